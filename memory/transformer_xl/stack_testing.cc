#include "memory/transformer_xl/stack_testing.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "core/backward_testing.h"
#include "core/random.h"
#include "core/status.h"
#include "core/testing.h"
#include "gtest/gtest.h"
#include "harness/inputs/continuation.h"

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

// Returns the outputs of two runs, or of their definitions, of which the second goes on where the
// first ended.
absl::StatusOr<NamedTensors> OutputsOfTwo(const CutSequence& cut, const Inputs& inputs,
                                          RunRequest request, bool is_defined) {
  const auto evaluate = [&](bool is_second, const Inputs& of_part) {
    return is_defined ? DefineTechnique(*cut.technique, cut.Part(is_second), of_part, request, {})
                      : RunTechnique(*cut.technique, cut.Part(is_second), of_part, request);
  };
  TFB_ASSIGN_OR_RETURN(const Inputs of_first, cut.FirstInputs(inputs));
  TFB_ASSIGN_OR_RETURN(const NamedTensors first, evaluate(false, of_first));
  TFB_ASSIGN_OR_RETURN(request.options, cut.SecondOptions());
  TFB_ASSIGN_OR_RETURN(const Inputs of_second, cut.SecondInputs(inputs, first));
  TFB_ASSIGN_OR_RETURN(const NamedTensors second, evaluate(true, of_second));
  return cut.Joined(first, second);
}

}  // namespace

StackOutcome EvaluateInTwoRuns(const Technique& technique, const Problem& problem,
                               const Options& options, const NamedTensors& parameters,
                               const Inputs& inputs, int64_t first, Device device) {
  const CutSequence cut = {&technique, problem, options, first};
  const RunRequest request = {options, device, /*seed=*/1, &parameters, /*threads=*/1};
  auto computed = OutputsOfTwo(cut, inputs, request, /*is_defined=*/false);
  auto defined = OutputsOfTwo(cut, inputs, request, /*is_defined=*/true);
  EXPECT_TRUE(computed.ok()) << computed.status();
  EXPECT_TRUE(defined.ok()) << defined.status();
  return {*std::move(computed), *std::move(defined)};
}

void ExpectTwoRunsAreOne(const Technique& technique, const Problem& problem, const Options& options,
                         int64_t first, Device device) {
  const NamedTensors parameters = PerturbedParameters(technique, problem, options);
  NamedTensors drawn = RandomInputs(technique.InputSpecs(problem, options).value(), 3);
  drawn["x"] = RandomHidden(problem);
  const Inputs inputs = ViewsOf(drawn);
  const RunRequest request = {options, device, /*seed=*/1, &parameters, /*threads=*/1};
  const auto computed = RunTechnique(technique, problem, inputs, request);
  const auto defined = DefineTechnique(technique, problem, inputs, request, {});
  ASSERT_TRUE(computed.ok()) << computed.status();
  ASSERT_TRUE(defined.ok()) << defined.status();
  const StackOutcome two =
      EvaluateInTwoRuns(technique, problem, options, parameters, inputs, first, device);
  const int64_t layers = std::stoll(technique.Canonical(options)->at("layers"));
  for (const auto& [name, of_two] : two.computed) {
    if (defined->count(name) == 0) continue;
    const ConstTensorView expected = defined->at(name).view();
    EXPECT_LE(MaxDifference(two.defined.at(name).view(), expected), 1e-12) << name;
    double bound = 0;  // of integers
    if (IsFloating(of_two.dtype())) {
      const auto scale = defined->find(name + ".scale");  // see Technique::Define
      const bool is_larger =
          scale != defined->end() && MaxAbs(scale->second.view()) > MaxAbs(expected);
      const ConstTensorView size = is_larger ? scale->second.view() : expected;
      bound = StackBound(size, layers);
      if (problem.dtype != DType::kF32) bound += 5 * UnitRoundoff(problem.dtype) * MaxAbs(size);
    }
    EXPECT_LE(MaxDifference(computed->at(name).view(), expected), bound) << name;
    EXPECT_LE(MaxDifference(of_two.view(), expected), bound) << name;
  }
}

void ExpectGradientsStopAtTheMemory(const Technique& technique, const Problem& problem,
                                    const Options& options) {
  SCOPED_TRACE(ToString(TechniqueSpec{technique.info().name, options}));
  const CutSequence cut = {&technique, problem, options, problem.query_tokens / 2};
  const auto layer = technique.Create(problem, options, Device::kCpu, 1).value();
  const NamedTensors parameters = PerturbedParameters(*layer);
  ASSERT_TRUE(layer->SetParameters(parameters).ok());
  const Tensor x = RandomHidden(problem);
  NamedTensors of_both = RandomOutputGradients(*layer, 7), of_second;
  for (auto& [name, gradient] : of_both) {
    const int64_t half = gradient.dim(1) / 2;  // of the tokens, or of the segments
    Fill(Slice(gradient.view(), 1, 0, half), 0);
    const TensorView second = Slice(gradient.view(), 1, half, half);
    of_second[name] = Tensor(gradient.dtype(), second.shape());
    CopyElements(second, of_second[name].view());
  }
  const auto both = RunBackward(*layer, {{"x", x.view()}}, of_both, 2);
  ASSERT_TRUE(both.ok()) << both.status();

  const RunRequest request = {options, Device::kCpu, /*seed=*/1, &parameters, /*threads=*/1};
  const Inputs inputs = {{"x", x.view()}};
  const auto before =
      RunTechnique(technique, cut.Part(false), cut.FirstInputs(inputs).value(), request);
  ASSERT_TRUE(before.ok()) << before.status();
  const auto after =
      technique.Create(cut.Part(true), cut.SecondOptions().value(), Device::kCpu, 1).value();
  ASSERT_TRUE(after->SetParameters(parameters).ok());
  const auto alone = RunBackward(*after, cut.SecondInputs(inputs, *before).value(), of_second, 2);
  ASSERT_TRUE(alone.ok()) << alone.status();

  const int64_t tokens = cut.first, layers = 2 * std::stoll(options.at("layers"));
  const ConstTensorView dx = both->inputs.at("x").view();
  EXPECT_EQ(MaxAbs(Slice(dx, 1, 0, tokens)), 0);
  EXPECT_LE(MaxDifference(Slice(dx, 1, tokens, tokens), alone->inputs.at("x").view()),
            StackBound(dx, layers));
  EXPECT_EQ(alone->inputs.size(), 1u) << "what an earlier run leaves has no gradient";
  for (const auto& [name, gradient] : both->parameters) {
    EXPECT_LE(MaxDifference(gradient.view(), alone->parameters.at(name).view()),
              StackBound(gradient.view(), layers))
        << name;
    EXPECT_GT(MaxAbs(gradient.view()), 0) << name;
  }
}

void ExpectTheCpusGradientsOnDevices(const Technique& technique, const Problem& problem,
                                     const Options& options,
                                     const std::vector<std::string>& outputs) {
  SCOPED_TRACE(ToString(TechniqueSpec{technique.info().name, options}));
  NamedTensors inputs = RandomInputs(technique.InputSpecs(problem, options).value(), 5);
  inputs["x"] = RandomHidden(problem);
  const auto layer = technique.Create(problem, options, Device::kCpu, 1).value();
  const NamedTensors parameters = PerturbedParameters(*layer);
  ASSERT_TRUE(layer->SetParameters(parameters).ok());
  NamedTensors drawn = RandomOutputGradients(*layer, 7), of_outputs;
  for (auto& [name, gradient] : drawn) {
    const bool is_asked =
        outputs.empty() || std::find(outputs.begin(), outputs.end(), name) != outputs.end();
    if (is_asked) of_outputs[name] = std::move(gradient);
  }
  const auto expected = RunBackward(*layer, ViewsOf(inputs), of_outputs, 2);
  ASSERT_TRUE(expected.ok()) << expected.status();

  RunRequest request;
  request.options = options;
  request.device = KernelDevice();
  request.parameters = &parameters;
  const auto pass = BackwardOfTechnique(technique, problem, ViewsOf(inputs), of_outputs, request);
  ASSERT_TRUE(pass.ok()) << pass.status();
  const auto again = BackwardOfTechnique(technique, problem, ViewsOf(inputs), of_outputs, request);
  ASSERT_TRUE(again.ok()) << again.status();
  for (const auto& [name, output] : expected->outputs) {
    if (IsFloating(output.dtype())) continue;
    EXPECT_EQ(MaxDifference(pass->outputs.at(name).view(), output.view()), 0) << name;
  }
  const int64_t layers = 2 * std::stoll(technique.Canonical(options)->at("layers"));
  const auto compare = [&](const NamedTensors& of_cpu, const NamedTensors& of_device,
                           const NamedTensors& of_second_pass) {
    for (const auto& [name, gradient] : of_cpu) {
      EXPECT_LE(MaxDifference(of_device.at(name).view(), gradient.view()),
                2 * StackBound(gradient.view(), layers))
          << name;
      EXPECT_EQ(MaxDifference(of_device.at(name).view(), of_second_pass.at(name).view()), 0)
          << name;
    }
  };
  EXPECT_FALSE(expected->inputs.empty());
  compare(expected->inputs, pass->inputs, again->inputs);
  compare(expected->parameters, pass->parameters, again->parameters);
}

void ExpectCounterpartSeesAllTokens(const Technique& technique, const Options& options,
                                    const Options& fixed) {
  for (const int64_t tokens : {0, 1, 2, 3, 300}) {
    for (const int64_t given : {0, 5}) {
      Options asked = options;
      asked["given_memory"] = std::to_string(given);
      const TechniqueSpec counterpart =
          technique.Counterpart(CausalProblem(1, 2, tokens, 16), asked).value();
      Options expected = technique.Canonical(asked).value();
      for (const auto& [name, value] : fixed) expected[name] = value;
      const int64_t all = tokens == 0 ? 1 : tokens;
      expected["segment"] = std::to_string(all);
      expected["memory"] = std::to_string(given + all);
      EXPECT_EQ(counterpart.technique, technique.info().name);
      EXPECT_EQ(counterpart.options, expected) << tokens << " tokens, " << given << " given";
    }
  }
}

}  // namespace tfb::transformer_xl
