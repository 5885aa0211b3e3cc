#include "adaptive/depth_adaptive/trained_exits.h"

#include <numeric>
#include <vector>

#include "core/testing.h"
#include "gtest/gtest.h"
#include "harness/language_model.h"

namespace tfb::depth_adaptive {

void ExpectTrainedExits(const Technique& technique, const std::string& golden,
                        const std::map<std::string, Options>& cases) {
  const SafetensorsFile file = GoldenFile(golden);
  const auto model = ShippedLanguageModel().value();
  const Problem problem = model->Fit(Problem::SelfAttention(1, 1, 300, 1, /*causal=*/true));
  for (const auto& [name, given] : cases) {
    SCOPED_TRACE(name);
    const Options options = model->FitOptions(technique.info(), given);
    const auto layer = technique.Create(problem, options, Device::kCpu, /*seed=*/1).value();
    ASSERT_TRUE(layer->SetParameters(model->ParametersOf(*layer).value()).ok());
    const NamedTensors inputs = model->MakeInputs(layer->inputs(), problem).value();
    const NamedTensors outputs = RunLayer(*layer, ViewsOf(inputs), /*threads=*/2).value();
    const auto exits = outputs.at("exits").span<int32_t>();
    const auto expected = file.tensors.at(name + ".exits").span<int32_t>();
    EXPECT_EQ(std::vector<int>(exits.begin(), exits.end()),
              std::vector<int>(expected.begin(), expected.end()));
    const auto bits = file.tensors.at(name + ".bits").span<double>();
    EXPECT_NEAR(model
                    ->BitsPerByte(InputKind::kHidden, problem, outputs.at("out").view(),
                                  layer->parameters())
                    .value(),
                std::accumulate(bits.begin(), bits.end(), 0.0) / 300, 1e-5);
  }
}

}  // namespace tfb::depth_adaptive
