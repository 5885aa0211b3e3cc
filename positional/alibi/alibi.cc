#include "positional/alibi/alibi.h"

#include <cmath>
#include <cstdlib>
#include <vector>

#include "core/flash/flash_technique.h"

namespace tfb::alibi {
namespace {

// Returns m_1 .. m_heads.
std::vector<double> Slopes(int64_t heads) {
  int64_t power = 1;
  while (2 * power <= heads) power *= 2;
  const auto slope = [](int64_t h, int64_t of) {
    return std::exp2(-8.0 * static_cast<double>(h) / static_cast<double>(of));
  };
  std::vector<double> slopes;
  for (int64_t h = 1; h <= power; ++h) slopes.push_back(slope(h, power));
  for (int64_t h = 1; static_cast<int64_t>(slopes.size()) < heads; h += 2) {
    slopes.push_back(slope(h, 2 * power));
  }
  return slopes;
}

class Alibi : public FlashTechnique<NoOptions> {
 public:
  Alibi()
      : FlashTechnique({"alibi", "positional", "ALiBi linear biases",
                        "Press, Smith, Lewis 2022, arXiv:2108.12409v2, section 3"}) {}

 private:
  absl::StatusOr<NamedTensors> Draw(const Job& job) const override {
    NamedTensors parameters;
    parameters["slopes"] = TensorOf(Slopes(job.problem.query_heads));
    return parameters;
  }
  absl::StatusOr<FlashPlan> Describe(const Job& job) const override {
    const auto bias = [m = job.parameters.at("slopes").span<float>()](int64_t h, int64_t distance) {
      return -Trace(m[h]) * static_cast<double>(std::abs(distance));
    };
    return FlashPlan(job.problem).Add<DistanceBias>(bias);
  }
  absl::StatusOr<PairScore> DefineScore(const Job& job) const override {
    return PairScore::Bias(
        [m = DoubleTensor(job.parameters, "slopes"), past = job.problem.causal_offset()](
            int64_t, int64_t h, int64_t i, int64_t j) {
          return -m.at(h) * std::abs(static_cast<double>(i + past - j));
        });
  }
};

const bool registered = RegisterTechnique<Alibi>();

}  // namespace
}  // namespace tfb::alibi
