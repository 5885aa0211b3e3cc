// Tests Transformer-XL with trained weights and spans, on 16,384 bytes of held-out text, against
// the bits per byte that PyTorch computes in fp32 (tools/capture/language_model.py, and
// attention_with_spans of language_model_extras.py).
//
// Tolerance. A byte's logarithm has an error of about 1e-5, as a stack's outputs have; the mean of
// 16,384 such errors, which have either sign, is smaller.
#include <string>

#include "core/testing.h"
#include "gtest/gtest.h"
#include "harness/inputs/language_model.h"
#include "memory/transformer_xl/transformer_xl.h"

namespace tfb::transformer_xl {
namespace {

TEST(TrainedTransformerXl, TextIsAsLikelyAsInPyTorch) {
  const auto model = ShippedLanguageModel().value();
  const TransformerXl technique;
  const Problem problem = model->Fit(Problem::SelfAttention(1, 1, 16384, 1, /*causal=*/true));
  for (const auto& [ramp, expected] : {std::pair("0", 1.642172), std::pair("32", 1.655260)}) {
    const Options options = model->FitOptions(technique.info(), {{"span_ramp", ramp}});
    const auto layer = technique.Create(problem, options, Device::kCpu, /*seed=*/1).value();
    ASSERT_TRUE(layer->SetParameters(model->ParametersOf(*layer).value()).ok());
    const NamedTensors inputs = model->MakeInputs(layer->inputs(), problem).value();
    const NamedTensors outputs = RunLayer(*layer, ViewsOf(inputs), /*threads=*/2).value();
    EXPECT_NEAR(model
                    ->BitsPerByte(InputKind::kHidden, problem, outputs.at("out").view(),
                                  layer->parameters())
                    .value(),
                expected, 1e-5)
        << "span_ramp " << ramp;
  }
}

}  // namespace
}  // namespace tfb::transformer_xl
