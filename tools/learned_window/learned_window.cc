#include "tools/learned_window/learned_window.h"

#include <algorithm>
#include <cmath>

#include "core/flash/flash_technique.h"
#include "core/random.h"

namespace tfb::learned_window {
namespace {

TechniqueInfo Info() {
  TechniqueInfo info = {"learned_window", "attention", "Learned window",
                        "Sukhbaatar et al. 2019, arXiv:1905.07799v2, equations (3) and (4)"};
  info.supports_noncausal = false;
  info.budget_option = "window";  // the option that trades error for cost
  info.growth = 1;                // exponent of the time in tokens
  return info;
}

class LearnedWindow : public FlashTechnique<LearnedWindowOptions> {
 public:
  LearnedWindow() : FlashTechnique(Info()) {}

 private:
  absl::StatusOr<NamedTensors> Draw(const Job& job) const override {
    Tensor widths(DType::kF32, {job.problem.query_heads});
    FillUniform(&widths, job.seed, "widths", 0, 2 * job.options.window);
    NamedTensors parameters;
    parameters["widths"] = std::move(widths);
    return parameters;
  }

  absl::StatusOr<FlashPlan> Describe(const Job& job) const override {
    const absl::Span<const float> widths = job.parameters.at("widths").span<float>();
    const auto keys_of = [=, ramp = job.options.ramp, past = job.problem.causal_offset()](
                             int64_t h, int64_t i, KeyList* keys) {
      // The first distance of weight 0.
      const int64_t reach = static_cast<int64_t>(std::ceil(widths[h] + ramp));
      keys->Add(i + past - reach + 1, i + past + 1);
      return i + 1;
    };
    FlashPlan plan(job.problem);
    plan.Sees(FunctionPattern(keys_of, job.problem.query_heads));
    plan.Add<SpanTerm>(std::vector<float>(widths.begin(), widths.end()), job.options.ramp);
    return plan;
  }

  absl::StatusOr<PairScore> DefineScore(const Job& job) const override {
    PairScore score;
    const DoubleTensor widths(job.parameters.at("widths").view());
    score.bias = [widths, ramp = job.options.ramp, past = job.problem.causal_offset()](
                     int64_t, int64_t h, int64_t i, int64_t j) {
      const double distance = static_cast<double>(i + past - j);
      return std::log(std::clamp((ramp + widths.at(h) - distance) / ramp, 0.0, 1.0));
    };
    return score;
  }
};

const bool registered = RegisterTechnique<LearnedWindow>();

}  // namespace
}  // namespace tfb::learned_window
