// Holds backward passes against gradients that PyTorch's autograd computed in float64, of formulas
// that give the outputs of other implementations (tools/capture/golden_gradients.py).
#include <cmath>
#include <memory>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "core/backward_testing.h"
#include "core/options.h"
#include "core/technique.h"
#include "core/tensor.h"
#include "core/testing.h"
#include "gtest/gtest.h"

namespace tfb {
namespace {

// Returns the tensors whose names begin with the prefix, without it.
NamedTensors WithPrefix(const NamedTensors& tensors, const std::string& prefix) {
  NamedTensors found;
  for (const auto& [name, tensor] : tensors) {
    if (absl::StartsWith(name, prefix)) found[name.substr(prefix.size())] = tensor.Clone();
  }
  return found;
}

double Norm(const Tensor& x) {
  double square = 0;
  for (int64_t n = 0; n < x.num_elements(); ++n) square += x.view().Get(n) * x.view().Get(n);
  return std::sqrt(square);
}

Tensor Difference(const Tensor& a, const Tensor& b) {
  Tensor difference = a.CloneAs(DType::kF64);
  for (int64_t n = 0; n < b.num_elements(); ++n) difference.span<double>()[n] -= b.view().Get(n);
  return difference;
}

Problem ProblemOf(const SafetensorsFile& golden, const NamedTensors& inputs) {
  const bool causal = golden.metadata.at("causal") == "true";
  if (inputs.count("x") != 0) {
    const Tensor& x = inputs.at("x");
    const int64_t heads = std::stoll(golden.metadata.at("heads"));
    return Problem::SelfAttention(x.dim(0), heads, x.dim(1), x.dim(2) / heads, causal);
  }
  Problem problem;
  problem.batch = inputs.at("q").dim(0);
  problem.query_heads = inputs.at("q").dim(1);
  problem.kv_heads = inputs.at("k").dim(1);
  problem.query_tokens = inputs.at("q").dim(2);
  problem.kv_tokens = inputs.at("k").dim(2);
  problem.head_dim = inputs.at("q").dim(3);
  problem.value_dim = inputs.at("v").dim(3);
  problem.causal = causal;
  return problem;
}

// Returns the roundings of the technique: a stack has those of an attention, and of a network of
// some times its width, in each of its layers.
double RoundingsOf(const Problem& problem, const Options& options) {
  const auto layers = options.find("layers");
  if (layers == options.end()) return AttentionRoundings(problem) + 1;
  const double network = 4 * std::stod(options.at("feed_forward_dim"));
  return std::stod(layers->second) * (AttentionRoundings(problem) + network) + 1;
}

class GoldenGradients : public ::testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Files, GoldenGradients,
                         ::testing::Values("alibi_attention_6_heads", "bigbird_block_sparse",
                                           "dense_grouped_heads_causal", "dense_key_padding",
                                           "gated_transformer_xl_rllib", "longformer_global",
                                           "multi_head_self_causal_padded", "performer_softmax",
                                           "performer_softmax_causal", "t5_bias_causal_after_cache",
                                           "transformer_xl_labml"));

// The bound is that of ExpectGradientsOfDefinition (core/backward_testing.h): as many roundings as
// the sums between a tensor and the loss have terms, of the gradient and of |g| |out| / |x|, which
// the gradient is where it does not cancel. The file's own rounding to float32 is one more.
TEST_P(GoldenGradients, AreThoseOfTheLayer) {
  const SafetensorsFile golden =
      GoldenFile(absl::StrCat("harness/golden_gradients/", GetParam(), ".safetensors"));
  const TechniqueSpec spec = ParseTechniqueSpec(golden.metadata.at("technique")).value();
  NamedTensors inputs = WithPrefix(golden.tensors, "input."), output_gradients;
  const Problem problem = ProblemOf(golden, inputs);
  const std::unique_ptr<Layer> layer =
      FindTechnique(spec.technique).Create(problem, spec.options, Device::kCpu, 1).value();
  ASSERT_TRUE(layer->SetParameters(WithPrefix(golden.tensors, "parameter.")).ok());
  for (const TensorSpec& input : layer->inputs()) {
    if (inputs.count(input.name) != 0) inputs[input.name] = inputs[input.name].CloneAs(input.dtype);
  }
  output_gradients["out"] = golden.tensors.at("output_gradient").Clone();
  const LayerGradients found = RunBackward(*layer, ViewsOf(inputs), output_gradients).value();

  const double of_loss = Norm(output_gradients.at("out")) * Norm(golden.tensors.at("out"));
  int checked = 0;
  const auto check = [&](const NamedTensors& gradients, const std::string& kind) {
    for (const auto& [name, expected] :
         WithPrefix(golden.tensors, absl::StrCat(kind, "_gradient."))) {
      ++checked;
      ASSERT_EQ(gradients.count(name), 1u) << name;
      ASSERT_EQ(gradients.at(name).shape(), expected.shape()) << name;
      const double norm = Norm(expected);
      const double of_x = Norm(golden.tensors.at(absl::StrCat(kind, ".", name)));
      EXPECT_GT(norm, 0) << name;
      EXPECT_LE(Norm(Difference(gradients.at(name), expected)),
                RoundingsOf(problem, spec.options) * 0x1p-24 * (norm + of_loss / of_x))
          << name << ", of norm " << norm;
    }
  };
  check(found.inputs, "input");
  check(found.parameters, "parameter");
  EXPECT_GE(checked, 3);
}

}  // namespace
}  // namespace tfb
