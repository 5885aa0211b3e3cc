#include "positional/t5_bias/t5_bias.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/flash/flash_technique.h"
#include "core/random.h"

namespace tfb::t5_bias {
namespace {

// A natural number of any size.
class Natural {
 public:
  void MultiplyByPower(uint32_t base, int64_t exponent) {
    for (int64_t n = 0; n < exponent; ++n) MultiplyBy(base);
  }
  bool operator>=(const Natural& other) const {
    if (digits_.size() != other.digits_.size()) return digits_.size() > other.digits_.size();
    return !std::lexicographical_compare(digits_.rbegin(), digits_.rend(), other.digits_.rbegin(),
                                         other.digits_.rend());
  }

 private:
  void MultiplyBy(uint32_t factor) {
    uint64_t carry = 0;
    for (uint32_t& digit : digits_) {
      carry += uint64_t{digit} * factor;
      digit = static_cast<uint32_t>(carry);
      carry >>= 32;
    }
    if (carry != 0) digits_.push_back(static_cast<uint32_t>(carry));
  }

  // Digits to the base 2^32, the lowest first, without leading zeros.
  std::vector<uint32_t> digits_ = {1};
};

int64_t BucketsOfASide(const Problem& problem, const T5BiasOptions& options) {
  return problem.causal ? options.buckets : options.buckets / 2;
}

// Computes b(n) by its formula. An exact power, where the quotient is a whole number, must not fall
// below it by rounding.
int64_t DefinedBucket(int64_t n, int64_t buckets, int64_t max_distance) {
  const int64_t m = buckets / 2;
  if (n < m) return n;
  const double quotient = static_cast<double>(buckets - m) *
                          std::log(static_cast<double>(n) / static_cast<double>(m)) /
                          std::log(static_cast<double>(max_distance) / static_cast<double>(m));
  return std::min(buckets - 1, m + static_cast<int64_t>(std::floor(quotient + 1e-10)));
}

class T5Bias : public FlashTechnique<T5BiasOptions> {
 public:
  T5Bias()
      : FlashTechnique({"t5_bias", "positional", "T5 relative position bias",
                        "Raffel et al. 2020, arXiv:1910.10683v4, section 2.1"}) {}

  absl::StatusOr<TechniqueSpec> Counterpart(const Problem&, const Options& options) const override {
    TFB_ASSIGN_OR_RETURN(const Options canonical, Canonical(options));
    return TechniqueSpec{"dense", {{"scale", canonical.at("scale")}}};
  }

 private:
  absl::Status Check(const Problem& problem, const T5BiasOptions& options) const override {
    const int64_t exact = BucketsOfASide(problem, options) / 2;
    if (options.max_distance > exact) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat("max_distance=", options.max_distance, ": with buckets=", options.buckets, " ",
                     problem.causal ? "and" : "and no", " causal mask, distances below ", exact,
                     " have buckets of their own, and max_distance must be above that: ", exact + 1,
                     " to ", int64_t{1} << 20));
  }

  absl::StatusOr<NamedTensors> Draw(const Job& job) const override {
    NamedTensors parameters;
    Tensor& beta = parameters["beta"] =
        Tensor(DType::kF32, {job.options.buckets, job.problem.query_heads});
    FillNormal(&beta, job.seed, "beta", 0,
               1 / std::sqrt(static_cast<double>(job.problem.model_dim())));
    return parameters;
  }

  absl::StatusOr<FlashPlan> Describe(const Job& job) const override {
    const bool causal = job.problem.causal;
    const int64_t side = BucketsOfASide(job.problem, job.options);
    const auto bucket = [=,
                         starts = T5BucketStarts(side, job.options.max_distance)](int64_t behind) {
      const int64_t distance = causal ? std::max<int64_t>(behind, 0) : std::abs(behind);
      const int64_t n =
          std::upper_bound(starts.begin(), starts.end(), distance) - starts.begin() - 1;
      return !causal && behind < 0 ? side + n : n;
    };
    FlashPlan plan(job.problem, job.options.scale);
    plan.Add<DistanceBias>([bucket, beta = job.parameters.at("beta").view()](int64_t h, int64_t d) {
      return *beta.At<float>(bucket(d), h);
    });
    return plan;
  }

  absl::StatusOr<PairScore> DefineScore(const Job& job) const override {
    const Problem& p = job.problem;
    const int64_t past = p.kv_tokens - p.query_tokens, half = job.options.buckets / 2;
    PairScore score;
    score.scale = job.options.scale;
    score.bias = [=, beta = DoubleTensor(job.parameters.at("beta").view()), causal = p.causal,
                  options = job.options](int64_t, int64_t h, int64_t i, int64_t j) {
      const int64_t behind = i + past - j;
      if (causal) return beta.Row(DefinedBucket(behind, options.buckets, options.max_distance))[h];
      const int64_t bucket = DefinedBucket(std::abs(behind), half, options.max_distance);
      return beta.Row(behind < 0 ? half + bucket : bucket)[h];
    };
    return score;
  }
};

const bool registered = RegisterTechnique<T5Bias>();

}  // namespace

std::vector<int64_t> T5BucketStarts(int64_t buckets, int64_t max_distance) {
  const int64_t exact = buckets / 2;
  const int64_t growing = buckets - exact;
  std::vector<int64_t> starts;
  for (int64_t n = 0; n <= exact; ++n) starts.push_back(n);
  for (int64_t r = 1; r < growing; ++r) {
    // This finds the smallest n with (n/m)^c >= (D/m)^r, that is n^c >= D^r m^(c-r), near m
    // (D/m)^(r/c).
    Natural bound;
    bound.MultiplyByPower(static_cast<uint32_t>(max_distance), r);
    bound.MultiplyByPower(static_cast<uint32_t>(exact), growing - r);
    const auto reaches = [&](int64_t n) {
      Natural power;
      power.MultiplyByPower(static_cast<uint32_t>(n), growing);
      return power >= bound;
    };
    const double ratio = static_cast<double>(max_distance) / static_cast<double>(exact);
    int64_t n =
        std::llround(static_cast<double>(exact) *
                     std::pow(ratio, static_cast<double>(r) / static_cast<double>(growing)));
    while (!reaches(n)) ++n;
    while (reaches(n - 1)) --n;
    starts.push_back(n);
  }
  return starts;
}

}  // namespace tfb::t5_bias
