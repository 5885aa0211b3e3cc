// Tests Memorizing with trained weights on 16,384 bytes of held-out text, through which a store of
// 8,192 wraps, against the bits per byte that PyTorch computes in fp32 by the code that learned the
// gates and scales (tools/capture/language_model_retrieval.py).
//
// Tolerance. A byte's logarithm has an error of about 1e-5, as a stack's outputs have; the mean of
// 16,384 such errors, which have either sign, is smaller.
#include <memory>
#include <optional>

#include "core/testing.h"
#include "gtest/gtest.h"
#include "harness/inputs/language_model.h"
#include "memory/memorizing/memorizing.h"

namespace tfb::memorizing {
namespace {

// Computes with the learned gates, or with others.
double BitsPerByte(const Options& given, std::optional<double> gates = std::nullopt) {
  const auto model = ShippedLanguageModel().value();
  const Memorizing technique;
  const Problem problem = model->Fit(Problem::SelfAttention(1, 1, 16384, 1, /*causal=*/true));
  const Options options = model->FitOptions(technique.info(), given);
  const std::unique_ptr<Layer> layer =
      technique.Create(problem, options, Device::kCpu, /*seed=*/1).value();
  NamedTensors parameters = model->ParametersOf(*layer).value();
  if (gates.has_value()) Fill(parameters.at("layer4.memory.gate").view(), *gates);
  EXPECT_TRUE(layer->SetParameters(parameters).ok());
  const NamedTensors inputs = model->MakeInputs(layer->inputs(), problem).value();
  const NamedTensors outputs = RunLayer(*layer, ViewsOf(inputs), /*threads=*/2).value();
  return model->BitsPerByte(InputKind::kHidden, problem, outputs.at("out").view()).value();
}

TEST(TrainedMemorizing, TextIsAsLikelyAsInPyTorch) {
  EXPECT_NEAR(BitsPerByte({{"store", "0"}}), 1.642172, 1e-5);
  const Options beyond = {{"beyond_memory", "true"}};  // as in training
  EXPECT_NEAR(BitsPerByte(beyond), 1.642050, 1e-5);
  EXPECT_NEAR(BitsPerByte(beyond, 0), 1.647120, 1e-5);
}

}  // namespace
}  // namespace tfb::memorizing
