#include "positional/t5_bias/t5_bias.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/definition.h"
#include "core/flash/flash_layer.h"
#include "core/random.h"

namespace tfb::t5_bias {
namespace {

const bool registered = RegisterTechnique<T5Bias>();

TechniqueInfo Info() {
  TechniqueInfo info;
  info.name = "t5_bias";
  info.family = "positional";
  info.title = "T5 relative position bias";
  info.citation = "Raffel et al. 2020, arXiv:1910.10683v4, section 2.1";
  info.exactness = Exactness::kExact;
  info.growth = 2;
  info.devices = {Device::kCpu, Device::kCuda};
  return info;
}

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

absl::Status CheckBuckets(const Problem& problem, const T5BiasOptions& options) {
  const int64_t exact = BucketsOfASide(problem, options) / 2;
  if (options.max_distance > exact) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("max_distance=", options.max_distance, ": with buckets=", options.buckets, " ",
                   problem.causal ? "and" : "and no", " causal mask, distances below ", exact,
                   " have buckets of their own, and max_distance must be above that: ", exact + 1,
                   " to ", int64_t{1} << 20));
}

class T5BiasLayer : public FlashLayer {
 public:
  T5BiasLayer(const Problem& problem, const T5BiasOptions& options, Device device, uint64_t seed)
      : FlashLayer(problem, QkvInputs(problem), AttentionOutputs(problem), device,
                   std::make_unique<FullPattern>(problem.kv_tokens), options.scale),
        buckets_(BucketsOfASide(problem, options)),
        starts_(T5BucketStarts(buckets_, options.max_distance)) {
    Tensor beta(DType::kF32, {options.buckets, problem.query_heads});
    FillNormal(&beta, seed, "beta", 0, 1 / std::sqrt(static_cast<double>(problem.model_dim())));
    parameters_["beta"] = std::move(beta);
  }

 protected:
  absl::Status BuildRule(const Inputs&, const Execution&, ScoreRule* rule) override {
    const absl::Span<const float> beta = parameters_.at("beta").span<float>();
    const Problem& p = problem();
    bias_ =
        DistanceTable(p.query_heads, p.query_tokens, p.kv_tokens, [&](int64_t h, int64_t offset) {
          return beta[BucketOf(p.causal_offset() - offset) * p.query_heads + h];
        });
    rule->bias = &bias_;
    return absl::OkStatus();
  }
  double FlopsPerPair() const override { return FlashLayer::FlopsPerPair() + 1; }

 private:
  // Returns the bucket of a key `behind` tokens before the query.
  int64_t BucketOf(int64_t behind) const {
    const int64_t distance = problem().causal ? std::max<int64_t>(behind, 0) : std::abs(behind);
    const int64_t bucket =
        std::upper_bound(starts_.begin(), starts_.end(), distance) - starts_.begin() - 1;
    return !problem().causal && behind < 0 ? buckets_ + bucket : bucket;
  }

  int64_t buckets_;  // of a side
  std::vector<int64_t> starts_;
  DistanceTable bias_;
};

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

T5Bias::T5Bias() : TechniqueOf(Info()) {}

absl::StatusOr<TechniqueSpec> T5Bias::Counterpart(const Problem&, const Options& options) const {
  TFB_ASSIGN_OR_RETURN(const Options canonical, Canonical(options));
  return TechniqueSpec{"dense", {{"scale", canonical.at("scale")}}};
}

absl::StatusOr<std::unique_ptr<Layer>> T5Bias::MakeLayer(const Problem& problem,
                                                         const T5BiasOptions& options,
                                                         Device device, uint64_t seed) const {
  TFB_RETURN_IF_ERROR(CheckBuckets(problem, options));
  return std::make_unique<T5BiasLayer>(problem, options, device, seed);
}

absl::Status T5Bias::Definition(const Problem& problem, const T5BiasOptions& options,
                                const NamedTensors& parameters, const Inputs& inputs,
                                const DefinitionRequest& request, NamedTensors* outputs) const {
  TFB_RETURN_IF_ERROR(CheckBuckets(problem, options));
  const DoubleTensor beta(parameters.at("beta").view());
  DefineMaskedAttention(
      problem, inputs, request, options.scale, [](int64_t, int64_t, int64_t) { return true; },
      [&](int64_t, int64_t h, int64_t i, int64_t j) {
        const int64_t behind = i + problem.kv_tokens - problem.query_tokens - j;
        if (problem.causal) {
          return beta.Row(DefinedBucket(behind, options.buckets, options.max_distance))[h];
        }
        const int64_t half = options.buckets / 2;
        const int64_t bucket = DefinedBucket(std::abs(behind), half, options.max_distance);
        return beta.Row(behind < 0 ? half + bucket : bucket)[h];
      },
      outputs);
  return absl::OkStatus();
}

}  // namespace tfb::t5_bias
