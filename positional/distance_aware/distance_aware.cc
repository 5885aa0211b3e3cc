#include "positional/distance_aware/distance_aware.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "core/flash/flash_technique.h"
#include "core/random.h"

namespace tfb::distance_aware {
namespace {

// Returns log(1 + exp(x)) without overflow.
double Softplus(double x) { return std::max(x, 0.0) + std::log1p(std::exp(-std::abs(x))); }

class DistanceAware : public FlashTechnique<NoOptions> {
 public:
  DistanceAware()
      : FlashTechnique({"distance_aware", "positional", "DA-Transformer distance-aware attention",
                        "Wu, Wu, Huang 2021, arXiv:2010.06925v2, section 3", InputKind::kQkv,
                        Exactness::kOwn}) {}

 private:
  absl::StatusOr<NamedTensors> Draw(const Job& job) const override {
    NamedTensors parameters;
    for (const char* name : {"alpha", "beta"}) {
      parameters[name] = Tensor(DType::kF32, {job.problem.query_heads});
    }
    FillNormal(&parameters["alpha"], job.seed, "alpha", 0, 0.1);
    FillNormal(&parameters["beta"], job.seed, "beta");
    return parameters;
  }

  absl::StatusOr<FlashPlan> Describe(const Job& job) const override {
    FlashPlan plan(job.problem);
    const auto alpha = job.parameters.at("alpha").span<float>();
    const auto beta = job.parameters.at("beta").span<float>();
    plan.Add<ReluMultiplier>([alpha, beta](int64_t h, int64_t distance) {
      return DistanceAwareFactor(alpha[h], beta[h], std::abs(distance));
    });
    return plan;
  }

  absl::StatusOr<PairScore> DefineScore(const Job& job) const override {
    const DoubleTensor alpha(job.parameters.at("alpha").view());
    const DoubleTensor beta(job.parameters.at("beta").view());
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

double DistanceAwareFactor(double alpha, double beta, int64_t distance) {
  return std::exp(Softplus(beta) - Softplus(beta - alpha * static_cast<double>(distance)));
}

}  // namespace tfb::distance_aware
