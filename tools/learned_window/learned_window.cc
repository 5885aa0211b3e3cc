#include "tools/learned_window/learned_window.h"

#include <algorithm>
#include <cmath>

#include "core/flash/flash_technique.h"
#include "core/random.h"

namespace tfb::learned_window {
namespace {

class LearnedWindow : public FlashTechnique<LearnedWindowOptions> {
 public:
  LearnedWindow()
      : FlashTechnique(SparseSelfAttention(
            {"learned_window", "attention", "Learned window",
             "Sukhbaatar et al. 2019, arXiv:1905.07799v2, equations (3) and (4)"},
            /*budget_option=*/"window", /*growth=*/1, Masking::kCausal)) {}

 private:
  absl::StatusOr<NamedTensors> Draw(const Job& job) const override {
    NamedTensors parameters;
    Tensor& widths = parameters["widths"] = Tensor(DType::kF32, {job.problem.query_heads});
    FillUniform(&widths, job.seed, "widths", 0, 2 * job.options.window);
    return parameters;
  }

  absl::StatusOr<FlashPlan> Describe(const Job& job) const override {
    const absl::Span<const float> widths = job.parameters.at("widths").span<float>();
    const auto keys_of = [=, ramp = job.options.ramp](int64_t h, int64_t i, KeyList* keys) {
      const auto zero_at = static_cast<int64_t>(std::ceil(widths[h] + ramp));  // the distance
      keys->Add(i - zero_at + 1, i + 1);
      return i + 1;
    };
    std::vector<Traced> spans;  // numbers that know their derivatives, for the widths' gradients
    for (const float& width : widths) spans.push_back(Trace(width));
    return FlashPlan(job.problem)
        .Sees(FunctionPattern(keys_of, job.problem.query_heads))
        .Add<SpanTerm>(std::move(spans), job.options.ramp);
  }

  absl::StatusOr<PairScore> DefineScore(const Job& job) const override {
    return PairScore::Bias([w = DoubleTensor(job.parameters, "widths"), ramp = job.options.ramp](
                               int64_t, int64_t h, int64_t i, int64_t j) {
      const double distance = static_cast<double>(i - j);
      return std::log(std::clamp((ramp + w.at(h) - distance) / ramp, 0.0, 1.0));
    });
  }
};

const bool registered = RegisterTechnique<LearnedWindow>();

}  // namespace
}  // namespace tfb::learned_window
