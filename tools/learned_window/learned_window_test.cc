#include "tools/learned_window/learned_window.h"

#include "attention/dense/dense.h"
#include "core/testing.h"
#include "gtest/gtest.h"

namespace tfb::learned_window {
namespace {

NamedTensors RunWithWidths(const Problem& problem, const NamedTensors& inputs,
                           const std::vector<double>& widths, const Options& options) {
  NamedTensors parameters;
  parameters["widths"] = TensorOf(widths);
  RunRequest request = {options};
  request.parameters = &parameters;
  return RunTechnique(FindTechnique("learned_window"), problem, ViewsOf(inputs), request).value();
}

NamedTensors Random(const Problem& problem) {
  return RandomInputs(FindTechnique("learned_window").InputSpecs(problem, {}).value(), /*seed=*/1);
}

TEST(LearnedWindow, AWidthOfTheSequenceIsDense) {
  const Problem problem = Problem::SelfAttention(1, 2, 70, 16, /*causal=*/true);
  const NamedTensors inputs = Random(problem);
  const NamedTensors outputs = RunWithWidths(problem, inputs, {70, 200}, {{"ramp", "8"}});
  const NamedTensors dense = RunTechnique(dense::Dense(), problem, ViewsOf(inputs)).value();
  EXPECT_LE(MaxDifference(outputs.at("out").view(), dense.at("out").view()),
            Fp32Bound(inputs.at("v").view()));
}

TEST(LearnedWindow, ZeroQueriesGiveMeansWeightedByTheRamp) {
  const Problem problem = Problem::SelfAttention(1, 2, 6, 4, /*causal=*/true);
  NamedTensors inputs = Random(problem);
  Fill(inputs.at("q").view(), 0);
  for (int64_t j = 0; j < 6; ++j)
    Fill(Slice(inputs.at("v").view(), 2, j, 1), static_cast<double>(j));
  const NamedTensors outputs = RunWithWidths(problem, inputs, {0, 1.5}, {{"ramp", "2"}});
  // Weights 1, 1/2 for head 0, and 1, 1, 3/4, 1/4 for head 1, from the query's own token backwards.
  EXPECT_NEAR(*outputs.at("out").view().At<float>(0, 0, 5, 0), (5 + 4 / 2.0) / 1.5, 1e-5);
  EXPECT_NEAR(*outputs.at("out").view().At<float>(0, 1, 5, 0), (5 + 4 + 3 * 0.75 + 2 * 0.25) / 3,
              1e-5);
}

}  // namespace
}  // namespace tfb::learned_window
