// Calm with weights that were trained, against the same in PyTorch token by token in float64, where
// a token that has left is not computed but copied (tools/capture/golden_exits.py): where each of 300
// bytes leaves, and what the next one is thought to be.
//
// Tolerance. A byte's logarithm is off by about 1e-5, as a stack's outputs are; a mean of 300 such
// errors, which have either sign, by less.
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "adaptive/calm/calm.h"
#include "core/testing.h"
#include "gtest/gtest.h"
#include "harness/language_model.h"

namespace tfb {
namespace {

TEST(TrainedCalm, BytesLeaveWhereTheyDoInPyTorchAndAreAsLikely) {
  const SafetensorsFile golden = GoldenFile("adaptive/calm/testdata/trained.safetensors");
  const auto model = ShippedLanguageModel().value();
  const Calm technique;
  const Problem problem = model->Fit(Problem::SelfAttention(1, 1, 300, 1, /*causal=*/true));
  for (const auto& [name, given] : std::vector<std::pair<std::string, Options>>{
           {"softmax", {{"confidence", "softmax"}, {"threshold", "0.8"}}},
           {"saturation", {{"confidence", "saturation"}, {"threshold", "0.95"}}},
           {"classifier", {{"confidence", "classifier"}, {"threshold", "0.9"}}},
       }) {
    SCOPED_TRACE(name);
    const Options options = model->FitOptions(technique.info(), given);
    const auto layer = technique.Create(problem, options, Device::kCpu, /*seed=*/1).value();
    ASSERT_TRUE(layer->SetParameters(model->ParametersOf(*layer).value()).ok());
    const NamedTensors inputs = model->MakeInputs(layer->inputs(), problem).value();
    const NamedTensors outputs = RunLayer(*layer, ViewsOf(inputs), /*threads=*/2).value();
    const auto exits = outputs.at("exits").span<int32_t>();
    const auto expected = golden.tensors.at(name + ".exits").span<int32_t>();
    EXPECT_EQ(std::vector<int>(exits.begin(), exits.end()),
              std::vector<int>(expected.begin(), expected.end()));
    const auto bits = golden.tensors.at(name + ".bits").span<double>();
    EXPECT_NEAR(model
                    ->BitsPerByte(InputKind::kHidden, problem, outputs.at("out").view(),
                                  layer->parameters())
                    .value(),
                std::accumulate(bits.begin(), bits.end(), 0.0) / 300, 1e-5);
  }
}

}  // namespace
}  // namespace tfb
