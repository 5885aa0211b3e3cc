#include "positional/distance_aware/distance_aware.h"

#include <cmath>
#include <cstdlib>

#include "core/flash/flash_technique.h"

namespace tfb::distance_aware {
namespace {

class DistanceAware : public FlashTechnique<NoOptions> {
 public:
  DistanceAware()
      : FlashTechnique({"distance_aware", "positional", "DA-Transformer distance-aware attention",
                        "Wu, Wu, Huang 2021, arXiv:2010.06925v2, section 3", InputKind::kQkv,
                        Exactness::kOwn}) {}

 private:
  absl::StatusOr<NamedTensors> Draw(const Job& job) const override {
    const Shape shape = {job.problem.query_heads};
    return DrawNormal(job.seed, {{"alpha", shape, 0.1}, {"beta", shape}});
  }

  absl::StatusOr<FlashPlan> Describe(const Job& job) const override {
    const auto factor = [alpha = job.parameters.at("alpha").span<float>(),
                         beta = job.parameters.at("beta").span<float>()](int64_t h, int64_t d) {
      return DistanceAwareFactor(Trace(alpha[h]), Trace(beta[h]), std::abs(d));
    };
    return FlashPlan(job.problem).Add<ReluMultiplier>(factor);
  }

  absl::StatusOr<PairScore> DefineScore(const Job& job) const override {
    const DoubleTensor alpha(job.parameters, "alpha"), beta(job.parameters, "beta");
    const int64_t past = job.problem.kv_tokens - job.problem.query_tokens;
    const double root = std::sqrt(static_cast<double>(job.problem.head_dim));
    PairScore score;
    score.of_product = [=](int64_t h, int64_t i, int64_t j, double product) {
      const double distance = std::abs(static_cast<double>(i + past - j));
      const double f =
          (1 + std::exp(beta.at(h))) / (1 + std::exp(beta.at(h) - alpha.at(h) * distance));
      const double relu = product < 0 ? 0 : product;  // NaN stays
      return relu * f / root;
    };
    return score;
  }
};

const bool registered = RegisterTechnique<DistanceAware>();

}  // namespace

Traced DistanceAwareFactor(const Traced& alpha, const Traced& beta, int64_t distance) {
  return exp(Softplus(beta) - Softplus(beta - alpha * static_cast<double>(distance)));
}

}  // namespace tfb::distance_aware
