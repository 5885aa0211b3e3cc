#include "memory/transformer_xl/stack_testing.h"

#include <cmath>
#include <utility>

#include "core/random.h"
#include "core/testing.h"
#include "gtest/gtest.h"

namespace tfb::transformer_xl {

Problem CausalProblem(int64_t batch, int64_t heads, int64_t tokens, int64_t head_dim, DType dtype) {
  return Problem::SelfAttention(batch, heads, tokens, head_dim, /*causal=*/true, dtype);
}

Tensor RandomHidden(const Problem& problem, uint64_t seed) {
  Tensor x(problem.dtype, {problem.batch, problem.query_tokens, problem.model_dim()});
  FillNormal(&x, seed, "x");
  return x;
}

NamedTensors PerturbedParameters(const Layer& layer) {
  NamedTensors parameters;
  for (const auto& [name, tensor] : layer.parameters()) {
    Tensor changed = tensor.Clone();
    const RandomStream stream(2, name);
    for (int64_t i = 0; tensor.view().rank == 1 && i < tensor.num_elements(); ++i) {
      changed.span<float>()[i] += static_cast<float>(0.2 * stream.Normal(i));
    }
    parameters[name] = std::move(changed);
  }
  return parameters;
}

NamedTensors PerturbedParameters(const Technique& technique, const Problem& problem,
                                 const Options& options) {
  const auto layer = technique.Create(problem, options, Device::kCpu, 1);
  EXPECT_TRUE(layer.ok()) << layer.status();
  return layer.ok() ? PerturbedParameters(**layer) : NamedTensors();
}

double StackBound(const ConstTensorView& expected, int64_t layers) {
  return std::sqrt(2.0 * static_cast<double>(layers)) * Fp32Bound(expected);
}

StackOutcome EvaluateStack(const Technique& technique, const Problem& problem,
                           const Options& options, const NamedTensors& parameters, const Tensor& x,
                           Device device, int threads) {
  const RunRequest request = {options, device, /*seed=*/1, &parameters, threads};
  const Inputs inputs = {{"x", x.view()}};
  auto computed = RunTechnique(technique, problem, inputs, request);
  EXPECT_TRUE(computed.ok()) << computed.status();
  DefinitionRequest definition;
  definition.computed = &*computed;
  auto defined = DefineTechnique(technique, problem, inputs, request, definition);
  EXPECT_TRUE(defined.ok()) << defined.status();
  return {*std::move(computed), *std::move(defined)};
}

}  // namespace tfb::transformer_xl
