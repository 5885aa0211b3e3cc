#include "positional/distance_aware/distance_aware.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <memory>
#include <utility>

#include "core/definition.h"
#include "core/flash/flash_layer.h"
#include "core/random.h"

namespace tfb::distance_aware {
namespace {

const bool registered = RegisterTechnique<DistanceAware>();

TechniqueInfo Info() {
  TechniqueInfo info;
  info.name = "distance_aware";
  info.family = "positional";
  info.title = "DA-Transformer distance-aware attention";
  info.citation = "Wu, Wu, Huang 2021, arXiv:2010.06925v2, section 3";
  info.exactness = Exactness::kOwn;
  info.growth = 2;
  info.devices = {Device::kCpu, Device::kCuda};
  return info;
}

// Returns log(1 + exp(x)) without overflow.
double Softplus(double x) { return std::max(x, 0.0) + std::log1p(std::exp(-std::abs(x))); }

class DistanceAwareLayer : public FlashLayer {
 public:
  DistanceAwareLayer(const Problem& problem, Device device, uint64_t seed)
      : FlashLayer(problem, QkvInputs(problem), AttentionOutputs(problem), device,
                   std::make_unique<FullPattern>(problem.kv_tokens)) {
    Tensor alpha(DType::kF32, {problem.query_heads}), beta(DType::kF32, {problem.query_heads});
    FillNormal(&alpha, seed, "alpha", 0, 0.1);
    FillNormal(&beta, seed, "beta");
    parameters_["alpha"] = std::move(alpha);
    parameters_["beta"] = std::move(beta);
  }

 protected:
  absl::Status BuildRule(const Inputs&, const Execution&, ScoreRule* rule) override {
    const absl::Span<const float> alpha = parameters_.at("alpha").span<float>();
    const absl::Span<const float> beta = parameters_.at("beta").span<float>();
    const Problem& p = problem();
    // Numbers beyond fp32 become the largest float, so that a product with 0 stays 0.
    constexpr double kLargest = std::numeric_limits<float>::max();
    const auto factor = [&](int64_t h, int64_t offset) {
      const int64_t distance = std::abs(p.causal_offset() - offset);
      return static_cast<float>(
          std::min(kLargest, DistanceAwareFactor(alpha[h], beta[h], distance)));
    };
    factors_ = DistanceTable(p.query_heads, p.query_tokens, p.kv_tokens, factor);
    rule->relu_multiplier = &factors_;
    return absl::OkStatus();
  }
  double FlopsPerPair() const override { return FlashLayer::FlopsPerPair() + 2; }

 private:
  DistanceTable factors_;
};

}  // namespace

double DistanceAwareFactor(double alpha, double beta, int64_t distance) {
  return std::exp(Softplus(beta) - Softplus(beta - alpha * static_cast<double>(distance)));
}

DistanceAware::DistanceAware() : TechniqueOf(Info()) {}

absl::StatusOr<std::unique_ptr<Layer>> DistanceAware::MakeLayer(const Problem& problem,
                                                                const DistanceAwareOptions&,
                                                                Device device,
                                                                uint64_t seed) const {
  return std::make_unique<DistanceAwareLayer>(problem, device, seed);
}

absl::Status DistanceAware::Definition(const Problem& problem, const DistanceAwareOptions&,
                                       const NamedTensors& parameters, const Inputs& inputs,
                                       const DefinitionRequest& request,
                                       NamedTensors* outputs) const {
  const DoubleTensor q(inputs.Get("q")), k(inputs.Get("k"));
  const DoubleTensor alpha(parameters.at("alpha").view()), beta(parameters.at("beta").view());
  const KeyMask is_token(inputs);
  const int64_t past = problem.kv_tokens - problem.query_tokens;
  DefineAttention(
      problem, inputs, request,
      [&](int64_t b, int64_t h, int64_t i, int64_t j) {
        if (problem.causal && j > i + past) return kNotSeen;
        if (!is_token(b, j)) return kNotSeen;
        const double distance = std::abs(static_cast<double>(i + past - j));
        const double f =
            (1 + std::exp(beta.at(h))) / (1 + std::exp(beta.at(h) - alpha.at(h) * distance));
        const double dot = Dot(q.Row(b, h, i), k.Row(b, h / problem.group(), j), problem.head_dim);
        const double relu = dot < 0 ? 0 : dot;  // NaN stays
        return relu * f / std::sqrt(static_cast<double>(problem.head_dim));
      },
      outputs);
  return absl::OkStatus();
}

}  // namespace tfb::distance_aware
