#include "memory/transformer_xl/stack_testing.h"

#include <cmath>
#include <string>
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

namespace {

// The outputs of a layer, and of its definition, of parts of x.
struct Parts {
  const Technique& technique;
  Problem problem;
  Options options;
  Device device;
  NamedTensors parameters;
  Tensor x;

  StackOutcome Of(int64_t begin, int64_t end, const StackOutcome* before) const {
    Problem part = problem;
    part.query_tokens = part.kv_tokens = end - begin;
    Options own = options;
    Inputs inputs = {{"x", Slice(x.view(), 1, begin, end - begin)}}, of_definition = inputs;
    if (before != nullptr) {
      const Tensor& memories = before->computed.at("memories");
      own["given_memory"] = std::to_string(memories.dim(2));
      inputs.Set("memories", memories.view());
      of_definition.Set("memories", before->defined.at("memories").view());
    }
    const RunRequest request = {own, device, /*seed=*/1, &parameters, /*threads=*/1};
    auto computed = RunTechnique(technique, part, inputs, request);
    auto defined = DefineTechnique(technique, part, of_definition, request, {});
    EXPECT_TRUE(computed.ok()) << computed.status();
    EXPECT_TRUE(defined.ok()) << defined.status();
    return {*std::move(computed), *std::move(defined)};
  }
};

}  // namespace

void ExpectTwoRunsAreOne(const Technique& technique, const Problem& problem, const Options& options,
                         int64_t first, Device device) {
  const Parts parts = {technique,
                       problem,
                       options,
                       device,
                       PerturbedParameters(technique, problem, options),
                       RandomHidden(problem)};
  const int64_t tokens = problem.query_tokens, layers = std::stoll(options.at("layers"));
  const StackOutcome whole = parts.Of(0, tokens, nullptr);
  const StackOutcome before = parts.Of(0, first, nullptr);
  const StackOutcome after = parts.Of(first, tokens, &before);
  for (const char* name : {"out", "context", "exits", "exit_probabilities", "memories"}) {
    if (whole.defined.count(name) == 0) continue;
    const bool of_tokens = std::string(name) != "memories";
    const auto of_second = [&](const NamedTensors& outputs) -> ConstTensorView {
      const ConstTensorView view = outputs.at(name).view();
      return of_tokens ? Slice(view, 1, first, tokens - first) : view;
    };
    const ConstTensorView expected = of_second(whole.defined);
    const double bound =
        StackBound(expected, layers) +
        (problem.dtype == DType::kF32 ? 0 : 5 * UnitRoundoff(problem.dtype) * MaxAbs(expected));
    EXPECT_LE(MaxDifference(after.defined.at(name).view(), expected), 1e-12) << name;
    EXPECT_LE(MaxDifference(of_second(whole.computed), expected), bound) << name;
    EXPECT_LE(MaxDifference(after.computed.at(name).view(), expected), bound) << name;
  }
}

}  // namespace tfb::transformer_xl
