#include "adaptive/depth_adaptive/trained_exits.h"

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

#include "core/testing.h"
#include "core/thread_pool.h"
#include "gtest/gtest.h"
#include "harness/inputs/language_model.h"

namespace tfb::depth_adaptive {
namespace {

// Expects the probabilities of every tenth token: the definition's to the rounding of float64,
// which 6 layers magnify, and the layer's within the definition's bound of it.
void ExpectProbabilities(const ConstTensorView& expected, const NamedTensors& outputs,
                         const NamedTensors& defined) {
  const ConstTensorView q = outputs.at("exit_probabilities").view();
  const ConstTensorView of_definition = defined.at("exit_probabilities").view();
  const ConstTensorView scale = defined.at("exit_probabilities.scale").view();
  EXPECT_LE(MaxDifference(q, of_definition), std::max(Fp32Bound(q), Fp32Bound(scale)));
  for (int64_t t = 0; t < expected.dim(0); ++t) {
    for (int64_t n = 0; n < expected.dim(1); ++n) {
      EXPECT_NEAR(*of_definition.At<double>(0, 10 * t, n), *expected.At<double>(t, n), 1e-12)
          << "token " << 10 * t << " layer " << n + 1;
    }
  }
}

}  // namespace

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
    if (const auto q = file.tensors.find(name + ".exit_probabilities"); q != file.tensors.end()) {
      ThreadPool pool(2);
      DefinitionRequest request;
      request.pool = &pool;
      NamedTensors defined;
      ASSERT_TRUE(
          technique
              .Define(problem, options, layer->parameters(), ViewsOf(inputs), request, &defined)
              .ok());
      ExpectProbabilities(q->second.view(), outputs, defined);
    }
  }
}

}  // namespace tfb::depth_adaptive
