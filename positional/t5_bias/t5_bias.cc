#include "positional/t5_bias/t5_bias.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "core/flash/flash_technique.h"

namespace tfb::t5_bias {
namespace {

// A natural number of any size: digits to the base 2^32, the lowest first, without leading zeros.
using Natural = std::vector<uint32_t>;

Natural TimesPower(Natural number, int64_t base, int64_t exponent) {
  for (int64_t n = 0; n < exponent; ++n) {
    uint64_t carry = 0;
    for (uint32_t& digit : number) {
      carry += uint64_t{digit} * static_cast<uint64_t>(base);
      digit = static_cast<uint32_t>(carry);
      carry >>= 32;
    }
    if (carry != 0) number.push_back(static_cast<uint32_t>(carry));
  }
  return number;
}

bool IsAtLeast(const Natural& a, const Natural& b) {
  if (a.size() != b.size()) return a.size() > b.size();
  return !std::lexicographical_compare(a.rbegin(), a.rend(), b.rbegin(), b.rend());
}

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
    return DrawNormal(job.seed, {{"beta",
                                  {job.options.buckets, job.problem.query_heads},
                                  1 / std::sqrt(static_cast<double>(job.problem.model_dim()))}});
  }

  absl::StatusOr<FlashPlan> Describe(const Job& job) const override {
    const int64_t side = BucketsOfASide(job.problem, job.options);
    const auto bias = [=, starts = T5BucketStarts(side, job.options.max_distance),
                       causal = job.problem.causal,
                       beta = job.parameters.at("beta").view()](int64_t h, int64_t behind) {
      const int64_t distance = causal ? std::max<int64_t>(behind, 0) : std::abs(behind);
      const int64_t bucket =
          std::upper_bound(starts.begin(), starts.end(), distance) - starts.begin() - 1;
      return Trace(*beta.At<float>(!causal && behind < 0 ? side + bucket : bucket, h));
    };
    return FlashPlan(job.problem, job.options.scale).Add<DistanceBias>(bias);
  }

  absl::StatusOr<PairScore> DefineScore(const Job& job) const override {
    const auto bias = [beta = DoubleTensor(job.parameters, "beta"), problem = job.problem,
                       options = job.options](int64_t, int64_t h, int64_t i, int64_t j) {
      const int64_t behind = i + problem.kv_tokens - problem.query_tokens - j;
      const int64_t side = problem.causal ? options.buckets : options.buckets / 2;
      const int64_t bucket = DefinedBucket(std::abs(behind), side, options.max_distance);
      return beta.Row(!problem.causal && behind < 0 ? side + bucket : bucket)[h];
    };
    return PairScore::Bias(bias, job.options.scale);
  }
};

const bool registered = RegisterTechnique<T5Bias>();

}  // namespace

std::vector<int64_t> T5BucketStarts(int64_t buckets, int64_t max_distance) {
  const int64_t exact = buckets / 2, growing = buckets - exact;
  const double ratio = static_cast<double>(max_distance) / static_cast<double>(exact);
  std::vector<int64_t> starts(exact + 1);
  std::iota(starts.begin(), starts.end(), 0);
  for (int64_t r = 1; r < growing; ++r) {
    // This finds the smallest n with (n/m)^c >= (D/m)^r, that is n^c >= D^r m^(c-r), near m
    // (D/m)^(r/c).
    const Natural bound = TimesPower(TimesPower({1}, max_distance, r), exact, growing - r);
    const auto reaches = [&](int64_t n) { return IsAtLeast(TimesPower({1}, n, growing), bound); };
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
