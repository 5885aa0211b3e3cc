// Tolerance. The bound is multi_head's: 2e-5 of the largest value, or of 1 where that is more.
#include "positional/universal/universal.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "core/backward_testing.h"
#include "core/testing.h"
#include "gtest/gtest.h"
#include "positional/sinusoidal/sinusoidal.h"

namespace tfb::universal {
namespace {

const Technique& Universal() { return FindTechnique("universal"); }

Problem Self(int64_t heads, int64_t tokens, int64_t head_dim, bool causal = false) {
  return Problem::SelfAttention(2, heads, tokens, head_dim, causal);
}

NamedTensors Random(const Problem& problem, const Options& options = {}, uint64_t seed = 5) {
  return RandomInputs(Universal().InputSpecs(problem, options).value(), seed);
}

NamedTensors Parameters(const Problem& problem, const Options& options = {}) {
  const auto layer = Universal().Create(problem, options, Device::kCpu, 1);
  EXPECT_TRUE(layer.ok()) << layer.status();
  NamedTensors parameters;
  for (const auto& [name, tensor] : (*layer)->parameters()) parameters[name] = tensor.Clone();
  return parameters;
}

Tensor RunOf(const Technique& technique, const Problem& problem, const Inputs& inputs,
             const Options& options, const NamedTensors& parameters, Device device = Device::kCpu) {
  RunRequest request{options, device};
  request.parameters = &parameters;
  auto outputs = RunTechnique(technique, problem, inputs, request);
  EXPECT_TRUE(outputs.ok()) << outputs.status();
  return outputs.ok() ? std::move(outputs->at("out")) : Tensor();
}

double Bound(const ConstTensorView& expected) { return 2e-5 * std::max(1.0, MaxAbs(expected)); }

// Returns x with the encoding of a position added to every token.
Tensor WithRow(const Tensor& x, int64_t position) {
  const Tensor row = Sinusoids(position, 1, x.dim(2), {}).value();
  Tensor result = x.Clone();
  for (int64_t n = 0; n < x.num_elements(); ++n) {
    result.span<float>()[n] += row.span<float>()[n % x.dim(2)];
  }
  return result;
}

TEST(Universal, AtPositionZeroAndStepZeroZerosAndTwosAreAdded) {
  // One token sees itself, and the matrices are the identity: y = u.
  const Problem problem = Self(1, 1, 6);
  NamedTensors parameters, inputs;
  for (const char* name : {"w_q", "w_k", "w_v", "w_o"}) {
    Tensor& matrix = parameters[name] = Tensor(DType::kF32, {6, 6});
    Fill(matrix.view(), 0);
    for (int64_t n = 0; n < 6; ++n) *matrix.view().MutableAt<float>(n, n) = 1;
  }
  Fill((inputs["x"] = Tensor(DType::kF32, {2, 1, 6})).view(), 0);
  for (const Device device : TestedDevices()) {
    const Tensor out = RunOf(Universal(), problem, ViewsOf(inputs),
                             {{"steps", "1"}, {"first_step", "0"}}, parameters, device);
    for (int64_t n = 0; n < 12; ++n) EXPECT_EQ(out.span<float>()[n], n % 2 == 0 ? 0 : 2);
    const Tensor twice = RunOf(Universal(), problem, ViewsOf(inputs),
                               {{"steps", "2"}, {"first_step", "0"}}, parameters, device);
    for (int64_t n = 0; n < 12; ++n) {  // (0, 2, ...) + PE[0] + PE[1]
      const double angle = std::pow(10000, -static_cast<double>(n % 6 / 2) / 3);
      EXPECT_NEAR(twice.span<float>()[n], n % 2 == 0 ? std::sin(angle) : 3 + std::cos(angle), 1e-6);
    }
  }
}

TEST(Universal, OneStepIsTheSinusoidalEncodingOfAHiddenStateThatHasOneRowAddedToAllTokens) {
  const Problem problem = Self(2, 60, 8);
  const NamedTensors inputs = Random(problem), parameters = Parameters(problem);
  for (const int64_t step : {1, 5}) {
    NamedTensors shifted;
    shifted["x"] = WithRow(inputs.at("x"), step);
    const Tensor expected = RunOf(FindTechnique("sinusoidal"), problem, ViewsOf(shifted),
                                  {{"position_offset", "3"}}, parameters);
    const Options options = {
        {"steps", "1"}, {"first_step", std::to_string(step)}, {"position_offset", "3"}};
    const Tensor out = RunOf(Universal(), problem, ViewsOf(inputs), options, parameters);
    EXPECT_LE(MaxDifference(out.view(), expected.view()), Bound(expected.view()));
  }
}

TEST(Universal, StepsAreApplicationsOfTheSameAttention) {
  const Problem problem = Self(2, 70, 8, /*causal=*/true);
  const NamedTensors inputs = Random(problem), parameters = Parameters(problem);
  for (const char* inner : {"dense", "longformer[window=6]"}) {
    NamedTensors h;
    h["x"] = inputs.at("x").Clone();
    for (int64_t step = 1; step <= 3; ++step) {
      h["x"] = WithRow(h["x"], step);
      h["x"] =
          RunOf(FindTechnique("sinusoidal"), problem, ViewsOf(h), {{"inner", inner}}, parameters);
    }
    for (const Device device : TestedDevices()) {
      const Tensor out = RunOf(Universal(), problem, ViewsOf(inputs),
                               {{"steps", "3"}, {"inner", inner}}, parameters, device);
      EXPECT_LE(MaxDifference(out.view(), h["x"].view()), Bound(h["x"].view()))
          << inner << ", " << Name(device);
    }
  }
}

TEST(Universal, LearnedTimesThatAreSinusoidsGiveTheSame) {
  const Problem problem = Self(2, 40, 8);
  const NamedTensors inputs = Random(problem);
  const Options sinusoid = {{"steps", "3"}}, learned = {{"steps", "3"}, {"time", "learned"}};
  NamedTensors parameters = Parameters(problem, learned);
  EXPECT_EQ(parameters.at("t").shape(), (Shape{3, 16}));
  parameters["t"] = Sinusoids(1, 3, 16, {}).value();
  NamedTensors without_times;
  for (const auto& [name, tensor] : parameters) {
    if (name != "t") without_times[name] = tensor.Clone();
  }
  const Tensor expected = RunOf(Universal(), problem, ViewsOf(inputs), sinusoid, without_times);
  const Tensor out = RunOf(Universal(), problem, ViewsOf(inputs), learned, parameters);
  EXPECT_EQ(MaxDifference(out.view(), expected.view()), 0);
}

TEST(Universal, WithoutTimeOneStepIsTheSinusoidalEncoding) {
  const Problem problem = Self(2, 40, 8);
  const NamedTensors inputs = Random(problem);
  const Options options = {{"steps", "1"}, {"time", "learned"}};
  NamedTensors parameters = Parameters(problem, options), without_times;
  Fill(parameters["t"].view(), 0);
  for (const auto& [name, tensor] : parameters) {
    if (name != "t") without_times[name] = tensor.Clone();
  }
  const Tensor expected =
      RunOf(FindTechnique("sinusoidal"), problem, ViewsOf(inputs), {}, without_times);
  const Tensor out = RunOf(Universal(), problem, ViewsOf(inputs), options, parameters);
  EXPECT_EQ(MaxDifference(out.view(), expected.view()), 0);
}

// Expects that runs with these inputs match the definition. Returns the definition's output.
Tensor ExpectMatchesDefinition(const Problem& problem, const NamedTensors& inputs,
                               const Options& options) {
  const NamedTensors parameters = Parameters(problem, options);
  RunRequest request{options};
  request.parameters = &parameters;
  Tensor expected =
      std::move(DefineTechnique(Universal(), problem, ViewsOf(inputs), request).value().at("out"));
  for (const Device device : TestedDevices()) {
    const Tensor out = RunOf(Universal(), problem, ViewsOf(inputs), options, parameters, device);
    EXPECT_LE(MaxDifference(out.view(), expected.view()), 2 * Bound(expected.view()))
        << Name(device);
  }
  return expected;
}

TEST(Universal, AMaskOfTheAttentionReachesEveryStepAndNoiseIsEachStepsOwn) {
  const Problem problem = Self(2, 40, 8);
  const Options masked = {{"inner", "longformer[window=4,max_globals=2]"}};
  NamedTensors inputs = Random(problem, masked);
  const Tensor without = ExpectMatchesDefinition(problem, inputs, masked);
  Tensor& mask = inputs["global_mask"] = Tensor(DType::kU8, {2, 40});
  Fill(mask.view(), 0);
  for (const int64_t token : {3, 29}) Fill(Slice(mask.view(), 1, token, 1), 1);
  const Tensor with = ExpectMatchesDefinition(problem, inputs, masked);
  EXPECT_GT(MaxDifference(with.view(), without.view()), 1e-2);

  const Options noisy = {{"inner", "hard[sample=gumbel]"}};
  inputs = Random(problem, noisy);
  const NamedTensors others = Random(problem, noisy, 6);
  Tensor before = ExpectMatchesDefinition(problem, inputs, noisy);
  for (const char* name : {"application0.g", "application1.g"}) {
    ASSERT_EQ(inputs.count(name), 1u) << name;
    inputs[name] = others.at(name).Clone();
    Tensor after = ExpectMatchesDefinition(problem, inputs, noisy);
    EXPECT_GT(MaxDifference(after.view(), before.view()), 1e-2) << name;
    before = std::move(after);
  }
  EXPECT_EQ(Random(problem, {{"inner", "hard[sample=gumbel]"}, {"steps", "1"}}).count("g"), 1u);
}

TEST(Universal, StepsTakeNoMoreWorkspaceAndParameters) {
  const Problem problem = Self(2, 40, 8);
  const auto layer_of = [&](const char* steps) {
    return Universal().Create(problem, {{"steps", steps}}, Device::kCpu, 1).value();
  };
  const auto one = layer_of("1"), many = layer_of("16");
  EXPECT_EQ(one->workspace_bytes(2), many->workspace_bytes(2));
  EXPECT_EQ(one->parameters().size(), many->parameters().size());
  const NamedTensors inputs = Random(problem);
  for (const auto& layer : {&one, &many}) ASSERT_TRUE(RunLayer(**layer, ViewsOf(inputs)).ok());
  EXPECT_EQ(many->cost().flops.value(), 16 * one->cost().flops.value());
  EXPECT_EQ(many->cost().bytes, one->cost().bytes);
}

TEST(Universal, APortOfTensor2TensorsEncoderComputesTheSame) {
  const SafetensorsFile golden = GoldenFile("positional/universal/testdata/encoder.safetensors");
  NamedTensors parameters;
  for (const auto& [name, tensor] : golden.tensors) {
    if (name != "x" && name != "out") parameters[name] = tensor.Clone();
  }
  const Inputs inputs = {{"x", golden.tensors.at("x").view()}};
  const ConstTensorView out = golden.tensors.at("out").view();
  const Problem problem = Self(2, 17, 8);
  RunRequest request{{{"bias", "true"},
                      {"steps", golden.metadata.at("steps")},
                      {"first_step", "0"},
                      {"layout", "concatenated"},
                      {"frequencies", "inclusive"}}};
  request.parameters = &parameters;
  const auto defined = DefineTechnique(Universal(), problem, inputs, request);
  EXPECT_LE(MaxDifference(defined->at("out").view(), out), 1e-13);
  for (const Device device : TestedDevices()) {
    const Tensor ours = RunOf(Universal(), problem, inputs, request.options, parameters, device);
    EXPECT_LE(MaxDifference(ours.view(), out), Bound(out)) << Name(device);
  }
}

TEST(Universal, CostCountsProjectionsAndPairsOfEachStep) {
  Problem problem = Problem::SelfAttention(3, 4, 5, 2, /*causal=*/true);
  problem.kv_heads = 2;
  problem.value_dim = 3;
  // The width is 8: q is 8 x 8, k 8 x 4, v 8 x 6, o 12 x 8; there are 15 pairs a head.
  const double weights = 8 * 8 + 8 * 4 + 8 * 6 + 12 * 8;
  EXPECT_EQ(CostOf(Universal(), problem, {{"steps", "2"}}).flops,
            2 * 2 * 3 * (5 * weights + 4 * 15 * (2 + 3)));
}

TEST(Universal, GradientsAreThoseOfItsDefinitionAndStepsShareTheirParameters) {
  const Problem problem = Self(2, 19, 8, /*causal=*/true);
  for (const Options& options :
       {Options{{"steps", "3"}, {"time", "learned"}, {"inner", "alibi"}},
        Options{{"steps", "2"}, {"bias", "true"}}, Options{{"steps", "1"}, {"time", "learned"}}}) {
    SCOPED_TRACE(ToString(TechniqueSpec{"universal", options}));
    ExpectGradientsOfDefinition(Universal(), problem, {options, 3 * AttentionRoundings(problem)});
  }
}

}  // namespace
}  // namespace tfb::universal
