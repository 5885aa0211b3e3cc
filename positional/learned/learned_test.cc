// Tolerance. The bound is multi_head's: 2e-5 of the largest value, or of 1 where that is more.
#include "positional/learned/learned.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "attention/multi_head/multi_head.h"
#include "core/backward_testing.h"
#include "core/testing.h"
#include "gtest/gtest.h"

namespace tfb::learned {
namespace {

const Technique& Learned() { return FindTechnique("learned"); }

Problem Self(int64_t heads, int64_t tokens, int64_t head_dim, bool causal = false) {
  return Problem::SelfAttention(2, heads, tokens, head_dim, causal);
}

NamedTensors Random(const Problem& problem) {
  return RandomInputs(Learned().InputSpecs(problem, {}).value(), 5);
}

NamedTensors Parameters(const Problem& problem, const Options& options = {}) {
  const auto layer = Learned().Create(problem, options, Device::kCpu, 1);
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

std::string Error(const Problem& problem, const Options& options) {
  const auto layer = Learned().Create(problem, options, Device::kCpu, 1);
  return layer.ok() ? "ok" : std::string(layer.status().message());
}

// Computes multi_head on x + p[table, t], with the parameters of one application.
Tensor Reference(const Problem& problem, const Tensor& x, const Tensor& p, int64_t table,
                 const NamedTensors& parameters, const std::string& prefix,
                 const std::string& inner = "dense") {
  NamedTensors own, inputs;
  for (const char* name : {"w_q", "w_k", "w_v", "w_o"}) {
    own[name] = parameters.at(prefix + name).Clone();
  }
  Tensor& u = inputs["x"] = x.Clone();
  for (int64_t b = 0; table >= 0 && b < x.dim(0); ++b) {
    for (int64_t t = 0; t < x.dim(1); ++t) {
      for (int64_t c = 0; c < x.dim(2); ++c) {
        *u.view().MutableAt<float>(b, t, c) += *p.view().At<float>(table, t, c);
      }
    }
  }
  return RunOf(FindTechnique("multi_head"), problem, ViewsOf(inputs), {{"inner", inner}}, own);
}

constexpr int64_t kNoTable = -1;

TEST(Learned, TwoTokensByHand) {
  // There is one channel, scale 1, and all matrices are 1: x = 1, 2 and rows 1 and 2 of the table
  // 0.5, -1 make u = 1.5, 1.
  const Problem problem = Problem::SelfAttention(1, 1, 2, 1);
  NamedTensors parameters;
  for (const char* name : {"w_q", "w_k", "w_v", "w_o"}) {
    Fill((parameters[name] = Tensor(DType::kF32, {1, 1})).view(), 1);
  }
  Tensor& p = parameters["p"] = Tensor(DType::kF32, {1, 3, 1});
  p.span<float>()[0] = 100;
  p.span<float>()[1] = 0.5;
  p.span<float>()[2] = -1;
  Tensor x(DType::kF32, {1, 2, 1});
  x.span<float>()[0] = 1;
  x.span<float>()[1] = 2;
  const Options options = {{"max_tokens", "3"}, {"position_offset", "1"}};
  for (const Device device : TestedDevices()) {
    const Tensor out = RunOf(Learned(), problem, {{"x", x.view()}}, options, parameters, device);
    const double u[] = {1.5, 1};
    for (int64_t i = 0; i < 2; ++i) {
      const double first = std::exp(u[i] * u[0]), second = std::exp(u[i] * u[1]);
      const double expected = (first * u[0] + second * u[1]) / (first + second);
      EXPECT_NEAR(out.span<float>()[i], expected, 1e-6) << Name(device);
    }
  }
}

TEST(Learned, WithATableOfZerosItKnowsNoOrder) {
  const Problem problem = Self(2, 50, 8);
  NamedTensors inputs = Random(problem), turned;
  NamedTensors parameters = Parameters(problem);
  turned["x"] = inputs.at("x").Clone();
  for (int64_t t = 0; t < 50; ++t) {
    CopyElements(Slice(ConstTensorView(inputs.at("x").view()), 1, t, 1),
                 Slice(turned["x"].view(), 1, 49 - t, 1));
  }
  // Difference of the reversed sequence's output to the reversed output.
  const auto difference = [&] {
    const Tensor out = RunOf(Learned(), problem, ViewsOf(inputs), {}, parameters);
    const Tensor of_turned = RunOf(Learned(), problem, ViewsOf(turned), {}, parameters);
    double worst = 0;
    for (int64_t t = 0; t < 50; ++t) {
      worst = std::max(
          worst, MaxDifference(Slice(out.view(), 1, t, 1), Slice(of_turned.view(), 1, 49 - t, 1)));
    }
    return worst;
  };
  EXPECT_GT(difference(), 1e-3);
  Fill(parameters["p"].view(), 0);
  EXPECT_LE(difference(), 2e-5);
  const Tensor out = RunOf(Learned(), problem, ViewsOf(inputs), {}, parameters);
  const Tensor plain =
      Reference(problem, inputs.at("x"), parameters.at("p"), kNoTable, parameters, "");
  EXPECT_LE(MaxDifference(out.view(), plain.view()), 1e-6);
}

TEST(Learned, ATableForEachLayerIsTheOneTableWhereThereIsOneLayer) {
  const Problem problem = Self(2, 30, 8, /*causal=*/true);
  const NamedTensors inputs = Random(problem), parameters = Parameters(problem);
  const Tensor once = RunOf(Learned(), problem, ViewsOf(inputs), {}, parameters);
  const Tensor each =
      RunOf(Learned(), problem, ViewsOf(inputs), {{"per_layer", "true"}}, parameters);
  EXPECT_EQ(MaxDifference(once.view(), each.view()), 0);
}

TEST(Learned, AStackIsOneMultiHeadAttentionOnTheOther) {
  const Problem problem = Self(2, 70, 8, /*causal=*/true);
  const NamedTensors inputs = Random(problem);
  for (const bool per_layer : {false, true}) {
    const Options options = {{"layers", "3"}, {"per_layer", per_layer ? "true" : "false"}};
    NamedTensors parameters = Parameters(problem, options);
    for (float& value : parameters["p"].span<float>()) value *= 50;  // N(0, 1)
    Tensor h = inputs.at("x").Clone();
    for (int64_t n = 0; n < 3; ++n) {
      const int64_t table = n == 0 || per_layer ? n : kNoTable;
      h = Reference(problem, h, parameters.at("p"), table, parameters,
                    "application" + std::to_string(n) + ".");
    }
    for (const Device device : TestedDevices()) {
      const Tensor out = RunOf(Learned(), problem, ViewsOf(inputs), options, parameters, device);
      EXPECT_LE(MaxDifference(out.view(), h.view()), Bound(h.view()))
          << per_layer << ", " << Name(device);
    }
  }
}

TEST(Learned, AListHasATechniqueForEachLayer) {
  const Problem problem = Self(2, 40, 8, /*causal=*/true);
  const NamedTensors inputs = Random(problem);
  const std::vector<std::string> list = {"longformer[window=4]", "longformer[window=12]", "dense"};
  const Options options = {{"layers", "3"}, {"inner", list[0] + "/" + list[1] + "/" + list[2]}};
  NamedTensors parameters = Parameters(problem, options);
  for (float& value : parameters["p"].span<float>()) value *= 50;  // N(0, 1)
  Tensor h = inputs.at("x").Clone();
  for (int64_t n = 0; n < 3; ++n) {
    h = Reference(problem, h, parameters.at("p"), n == 0 ? 0 : kNoTable, parameters,
                  "application" + std::to_string(n) + ".", list[n]);
  }
  RunRequest request{options};
  request.parameters = &parameters;
  const auto defined = DefineTechnique(Learned(), problem, ViewsOf(inputs), request);
  EXPECT_LE(MaxDifference(defined->at("out").view(), h.view()), Bound(h.view()));
  for (const Device device : TestedDevices()) {
    const Tensor out = RunOf(Learned(), problem, ViewsOf(inputs), options, parameters, device);
    EXPECT_LE(MaxDifference(out.view(), h.view()), Bound(h.view())) << Name(device);
  }
}

TEST(Learned, AListOfEqualTechniquesIsTheOneTechniqueBitByBit) {
  const Problem problem = Self(2, 40, 8, /*causal=*/true);
  const NamedTensors inputs = Random(problem);
  const Options one = {{"layers", "2"}, {"inner", "longformer[window=4]"}};
  const Options list = {{"layers", "2"}, {"inner", "2*longformer[window=4]"}};
  const NamedTensors parameters = Parameters(problem, one);
  for (const Device device : TestedDevices()) {
    EXPECT_EQ(
        MaxDifference(RunOf(Learned(), problem, ViewsOf(inputs), one, parameters, device).view(),
                      RunOf(Learned(), problem, ViewsOf(inputs), list, parameters, device).view()),
        0)
        << Name(device);
  }
  EXPECT_EQ(Error(problem, {{"layers", "3"}, {"inner", "dense/dense"}}),
            "option inner names 2 techniques; allowed with layers=3 are 1 or 3");
}

TEST(Learned, OnlyTheRowsOfItsPositionsAreRead) {
  const Problem problem = Self(1, 20, 8);
  const NamedTensors inputs = Random(problem);
  const Options options = {{"max_tokens", "40"}, {"position_offset", "7"}};
  NamedTensors parameters = Parameters(problem, options);
  const Tensor expected = RunOf(Learned(), problem, ViewsOf(inputs), options, parameters);
  for (const int64_t row : {0, 6, 27, 39}) {
    Fill(Slice(parameters["p"].view(), 1, row, 1), std::numeric_limits<double>::quiet_NaN());
  }
  const Tensor out = RunOf(Learned(), problem, ViewsOf(inputs), options, parameters);
  EXPECT_EQ(MaxDifference(out.view(), expected.view()), 0);
}

TEST(Learned, PositionsBeyondTheTableAreRefused) {
  EXPECT_EQ(Error(Self(1, 4096, 1), {}), "ok");
  EXPECT_EQ(Error(Self(1, 4097, 1), {}),
            "positions up to 4096 are beyond the table: with position_offset 0, tokens are 4097; "
            "allowed by max_tokens 4096 are at most 4096");
  EXPECT_EQ(Error(Self(1, 20, 8), {{"max_tokens", "32"}, {"position_offset", "12"}}), "ok");
  EXPECT_EQ(Error(Self(1, 21, 8), {{"max_tokens", "32"}, {"position_offset", "12"}}),
            "positions up to 32 are beyond the table: with position_offset 12, tokens are 21; "
            "allowed by max_tokens 32 are at most 20");
  EXPECT_EQ(Error(Self(1, 3, 8), {{"max_tokens", "32"}, {"position_offset", "50"}}),
            "positions up to 52 are beyond the table: with position_offset 50, tokens are 3; "
            "allowed by max_tokens 32 are at most 0");
}

TEST(Learned, TheTableIsDrawnWithADeviationOfOneFiftieth) {
  const NamedTensors parameters = Parameters(Self(8, 10, 8));
  const Tensor& p = parameters.at("p");
  EXPECT_EQ(p.shape(), (Shape{1, 4096, 64}));
  double squares = 0;
  for (const float value : p.span<float>()) squares += static_cast<double>(value) * value;
  // With 2^18 draws, the deviation of their mean square is sqrt(2 / 2^18) of it, 0.0028.
  EXPECT_NEAR(squares / static_cast<double>(p.num_elements()) / 4e-4, 1, 5 * 0.0028);
}

TEST(Learned, CostCountsTheRowsThatAreAdded) {
  const Problem problem = Self(2, 5, 3);  // width 6
  const Options options = {{"layers", "2"}, {"per_layer", "true"}};
  const auto layer = Learned().Create(problem, options, Device::kCpu, 1).value();
  ASSERT_TRUE(RunLayer(*layer, ViewsOf(Random(problem))).ok());
  const double weights = 4 * 6 * 6, pairs = 2 * 2 * 25;
  EXPECT_EQ(layer->cost().flops, 2 * (2 * 10 * weights + 4 * pairs * 3));
  EXPECT_EQ(layer->cost().bytes, 4 * (2 * 10 * 6 + 2 * weights + 2 * 5 * 6));
}

TEST(Learned, TorchsAttentionOnOptsTableComputesTheSame) {
  const SafetensorsFile golden = GoldenFile("positional/learned/testdata/opt.safetensors");
  NamedTensors parameters;
  for (const auto& [name, tensor] : golden.tensors) {
    if (name != "x" && name != "out") parameters[name] = tensor.Clone();
  }
  const Inputs inputs = {{"x", golden.tensors.at("x").view()}};
  const ConstTensorView out = golden.tensors.at("out").view();
  const Problem problem = Self(2, 19, 8);
  RunRequest request{{{"bias", "true"},
                      {"max_tokens", std::to_string(parameters.at("p").dim(1))},
                      {"position_offset", golden.metadata.at("position_offset")}}};
  request.parameters = &parameters;
  const auto defined = DefineTechnique(Learned(), problem, inputs, request);
  EXPECT_LE(MaxDifference(defined->at("out").view(), out), 1e-13);
  for (const Device device : TestedDevices()) {
    const Tensor ours = RunOf(Learned(), problem, inputs, request.options, parameters, device);
    EXPECT_LE(MaxDifference(ours.view(), out), Bound(out)) << Name(device);
  }
}

TEST(Learned, GradientsAreThoseOfItsDefinition) {
  const Problem problem = Self(2, 19, 8, /*causal=*/true);
  for (const Options& options :
       {Options{{"max_tokens", "30"}, {"position_offset", "5"}, {"bias", "true"}},
        Options{{"max_tokens", "20"}, {"layers", "2"}, {"inner", "longformer[window=4]/dense"}},
        Options{{"max_tokens", "19"}, {"layers", "3"}, {"per_layer", "true"}}}) {
    SCOPED_TRACE(ToString(TechniqueSpec{"learned", options}));
    ExpectGradientsOfDefinition(Learned(), problem, {options, 3 * AttentionRoundings(problem)});
  }
}

}  // namespace
}  // namespace tfb::learned
