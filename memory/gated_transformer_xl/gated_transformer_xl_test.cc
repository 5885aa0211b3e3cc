// Tests GTrXL against its definition, its gates' limits, and RLlib's network.
//
// Tolerance. As in transformer_xl's test: each sublayer has the bound of fp32 attention, 2e-5 of
// the largest output, and sublayers add in quadrature. A gate is a mean of the state and the
// sublayer's output, or their sum, so it passes errors on as a residual connection does; its own
// products are of order 1 in fp32.
#include "memory/gated_transformer_xl/gated_transformer_xl.h"

#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "core/random.h"
#include "core/testing.h"
#include "gtest/gtest.h"
#include "memory/transformer_xl/stack_testing.h"
#include "memory/transformer_xl/transformer_xl.h"

namespace tfb::gated_transformer_xl {
namespace {

using transformer_xl::CausalProblem;
using transformer_xl::EvaluateStack;
using transformer_xl::PerturbedParameters;
using transformer_xl::RandomHidden;
using transformer_xl::StackOutcome;

constexpr const char* kGates[] = {"gru", "input", "output", "highway", "sigmoid_tanh", "sum"};

TEST(GatedTransformerXl, EveryGateEqualsTheDefinition) {
  const GatedTransformerXl technique;
  const Problem problem = CausalProblem(2, 3, 100, 8);
  const Tensor x = RandomHidden(problem);
  for (const char* gate : kGates) {
    for (const Options& more : std::vector<Options>{
             {{"segment", "32"}, {"memory", "50"}},
             {{"segment", "40"}, {"memory", "30"}, {"same_length", "true"}},
             {{"segment", "64"}, {"memory", "0"}, {"relu", "false"}},
             {{"segment", "40"}, {"final_norm", "true"}},
             {{"segment", "32"}, {"memory", "50"}, {"normalise_memory", "false"}},
             {{"segment", "40"},
              {"memory", "70"},
              {"same_length", "true"},
              {"normalise_memory", "false"}},
             {{"max_distance", "20"}, {"share_biases", "false"}, {"layers", "3"}}}) {
      Options options = more;
      options["gate"] = gate;
      SCOPED_TRACE(ToString(options));
      const NamedTensors parameters = PerturbedParameters(technique, problem, options);
      const StackOutcome outcome = EvaluateStack(technique, problem, options, parameters, x);
      for (const char* output : {"out", "context"}) {
        EXPECT_LE(
            MaxDifference(outcome.computed.at(output).view(), outcome.defined.at(output).view()),
            transformer_xl::StackBound(outcome.defined.at(output).view(), 3))
            << output;
      }
    }
  }
}

TEST(GatedTransformerXl, OnDevicesEveryGateEqualsTheDefinition) {
  const GatedTransformerXl technique;
  const Problem problem = CausalProblem(1, 2, 70, 8);
  const Tensor x = RandomHidden(problem);
  for (const char* gate : kGates) {
    SCOPED_TRACE(gate);
    const bool is_gru = std::string(gate) == "gru";
    const Options options = {{"gate", gate},
                             {"segment", "40"},
                             {"memory", "20"},
                             {"layers", "2"},
                             {"normalise_memory", is_gru ? "false" : "true"},
                             {"gate_biases", is_gru ? "true" : "false"}};
    const NamedTensors parameters = PerturbedParameters(technique, problem, options);
    const StackOutcome outcome =
        EvaluateStack(technique, problem, options, parameters, x, KernelDevice());
    EXPECT_LE(MaxDifference(outcome.computed.at("out").view(), outcome.defined.at("out").view()),
              transformer_xl::StackBound(outcome.defined.at("out").view(), 2));
  }
}

TEST(GatedTransformerXl, AGruWithBiasesEqualsTheDefinition) {
  const GatedTransformerXl technique;
  const Problem problem = CausalProblem(2, 3, 100, 8);
  const Tensor x = RandomHidden(problem);
  const Options options = {{"gate_biases", "true"}, {"segment", "32"}, {"layers", "2"}};
  const NamedTensors parameters = PerturbedParameters(technique, problem, options);
  EXPECT_EQ(parameters.count("layer1.ff_gate.b_h"), 1u);
  const StackOutcome outcome = EvaluateStack(technique, problem, options, parameters, x);
  const ConstTensorView expected = outcome.defined.at("out").view();
  EXPECT_LE(MaxDifference(outcome.computed.at("out").view(), expected),
            transformer_xl::StackBound(expected, 2));
}

// ---- A memory that is not normalised ----

TEST(GatedTransformerXl, TheFirstSegmentDoesNotKnowWhetherTheMemoryIsNormalised) {
  const GatedTransformerXl technique;
  const Problem problem = CausalProblem(2, 2, 60, 8);
  const Tensor x = RandomHidden(problem);
  for (const Device device : TestedDevices()) {
    RunRequest request;
    request.device = device;
    request.options = {{"segment", "20"}, {"memory", "30"}};
    const NamedTensors normalised =
        RunTechnique(technique, problem, {{"x", x.view()}}, request).value();
    request.options["normalise_memory"] = "false";
    const NamedTensors raw = RunTechnique(technique, problem, {{"x", x.view()}}, request).value();
    const auto difference = [&](int64_t begin, int64_t tokens) {
      return MaxDifference(Slice(normalised.at("out").view(), 1, begin, tokens),
                           Slice(raw.at("out").view(), 1, begin, tokens));
    };
    EXPECT_EQ(difference(0, 20), 0);
    EXPECT_GT(difference(20, 40), 1e-3);
  }
}

// LN with gamma 1 and beta 0 leaves rows of mean 0 and variance 1 as they are, but for its epsilon.
TEST(GatedTransformerXl, AMemoryOfNormalisedStatesNeedsNoNorm) {
  const GatedTransformerXl technique;
  const Problem problem = CausalProblem(1, 2, 60, 8);
  Tensor x(DType::kF32, {1, 60, 16});
  for (int64_t t = 0; t < 60; ++t) {
    // 8 ones and 8 minus ones: a bit of the channel's number, another one for the next token.
    for (int64_t c = 0; c < 16; ++c) x.view().Set(t * 16 + c, (c >> (t % 4)) % 2 == 0 ? 1 : -1);
  }
  Options options = {{"segment", "20"}, {"memory", "30"}, {"layers", "1"}};
  NamedTensors parameters = PerturbedParameters(technique, problem, options);
  Fill(parameters["layer0.attention_norm.gamma"].view(), 1);
  Fill(parameters["layer0.attention_norm.beta"].view(), 0);
  const StackOutcome normalised = EvaluateStack(technique, problem, options, parameters, x);
  options["normalise_memory"] = "false";
  const StackOutcome raw = EvaluateStack(technique, problem, options, parameters, x);
  // 1 / sqrt(1 + 1e-5) is 1 - 5e-6.
  EXPECT_LE(MaxDifference(normalised.defined.at("out").view(), raw.defined.at("out").view()), 1e-4);
  EXPECT_LE(MaxDifference(normalised.computed.at("out").view(), raw.computed.at("out").view()),
            1e-4);
}

// ---- The gates' limits ----

TEST(GatedTransformerXl, AtALargeBiasEveryGateWithOneIsTheIdentityBitByBit) {
  const GatedTransformerXl technique;
  const Problem problem = CausalProblem(2, 2, 60, 8);
  const Tensor x = RandomHidden(problem);
  for (const char* gate : {"gru", "output", "highway", "sigmoid_tanh"}) {
    for (const Device device : TestedDevices()) {
      RunRequest request;
      request.options = {
          {"gate", gate}, {"gate_bias", "10000"}, {"segment", "32"}, {"layers", "2"}};
      request.device = device;
      const NamedTensors outputs =
          RunTechnique(technique, problem, {{"x", x.view()}}, request).value();
      EXPECT_EQ(MaxDifference(outputs.at("out").view(), x.view()), 0) << gate;
      const NamedTensors defined =
          DefineTechnique(technique, problem, {{"x", x.view()}}, request).value();
      EXPECT_EQ(MaxDifference(defined.at("out").view(), x.view()), 0) << gate;
    }
  }
}

TEST(GatedTransformerXl, WithZeroMatricesTheGruGateKeepsAShareOfItsStateThatItsBiasDecides) {
  const GatedTransformerXl technique;
  const Problem problem = CausalProblem(1, 2, 40, 8);
  const Tensor x = RandomHidden(problem);
  NamedTensors parameters = PerturbedParameters(technique, problem, {});
  for (auto& [name, tensor] : parameters) {
    if (name.find("gate.") == std::string::npos) continue;
    Fill(tensor.view(), tensor.view().rank == 1 ? 2 : 0);
  }
  const StackOutcome outcome = EvaluateStack(technique, problem, {}, parameters, x);
  const double kept = 1 - 1 / (1 + std::exp(2.0));
  EXPECT_NEAR(kept, 0.881, 5e-4);
  for (int64_t i = 0; i < x.num_elements(); ++i) {
    const double expected = kept * kept * x.span<float>()[i];  // two gates
    ASSERT_NEAR(outcome.computed.at("out").span<float>()[i], expected, 1e-6);
    ASSERT_NEAR(outcome.defined.at("out").span<double>()[i], expected, 1e-15);
  }
}

TEST(GatedTransformerXl, SumsWithoutReluArePreNormTransformerXl) {
  const GatedTransformerXl technique;
  const transformer_xl::TransformerXl transformer_xl;
  const Problem problem = CausalProblem(2, 2, 90, 16);
  const Tensor x = RandomHidden(problem);
  const Options shared = {{"segment", "32"}, {"memory", "40"}, {"layers", "3"}};
  Options options = shared, theirs = shared;
  options["gate"] = "sum";
  options["relu"] = "false";
  theirs["pre_norm"] = "true";
  const NamedTensors parameters = PerturbedParameters(transformer_xl, problem, theirs);
  const StackOutcome ours = EvaluateStack(technique, problem, options, parameters, x);
  const StackOutcome pre_norm = EvaluateStack(transformer_xl, problem, theirs, parameters, x);
  for (const char* output : {"out", "context"}) {
    EXPECT_EQ(MaxDifference(ours.computed.at(output).view(), pre_norm.computed.at(output).view()),
              0);
    EXPECT_LE(MaxDifference(ours.defined.at(output).view(), pre_norm.defined.at(output).view()),
              1e-14);
  }
}

TEST(GatedTransformerXl, SumsWithReluOnlyAdd) {
  const GatedTransformerXl technique;
  const Problem problem = CausalProblem(1, 2, 50, 8);
  const Tensor x = RandomHidden(problem);
  RunRequest request;
  request.options = {{"gate", "sum"}};
  const NamedTensors outputs = RunTechnique(technique, problem, {{"x", x.view()}}, request).value();
  double largest = 0;
  for (int64_t i = 0; i < x.num_elements(); ++i) {
    const float added = outputs.at("out").span<float>()[i] - x.span<float>()[i];
    EXPECT_GE(added, -1e-6f);
    largest = std::max<double>(largest, added);
  }
  EXPECT_GT(largest, 0.1);
}

TEST(GatedTransformerXl, TheGateOfOneTokenIsWhatItsFormulaGivesByHand) {
  // There are one channel and one token: attention returns the value, LN of one channel is beta,
  // and with all matrices 1, betas 1 and b_g = 0 the ReLUs pass y = 1: x = 2 gives r = s(1 + 2), z
  // = s(3), g = (1 - z) 2 + z tanh(1 + r 2).
  const GatedTransformerXl technique;
  const Problem problem = CausalProblem(1, 1, 1, 1);
  const Options options = {{"feed_forward_dim", "1"}};
  NamedTensors parameters = PerturbedParameters(technique, problem, options);
  for (auto& [name, tensor] : parameters) {
    const bool zero =
        name.find("b_g") != std::string::npos || name.find("ff.b") != std::string::npos;
    Fill(tensor.view(), zero ? 0 : 1);
  }
  Tensor x(DType::kF32, {1, 1, 1});
  Fill(x.view(), 2);
  const auto gate = [](double state) {
    const double open = 1 / (1 + std::exp(-(1 + state)));
    return (1 - open) * state + open * std::tanh(1 + open * state);
  };
  const StackOutcome outcome = EvaluateStack(technique, problem, options, parameters, x);
  EXPECT_NEAR(outcome.defined.at("out").span<double>()[0], gate(gate(2)), 1e-15);
  EXPECT_NEAR(outcome.computed.at("out").span<float>()[0], gate(gate(2)), 1e-6);
  EXPECT_NEAR(gate(2), 1.0417, 1e-4);  // 0.0474 * 2 + 0.9526 * tanh(2.9051)
}

// ---- Costs, parameters, errors ----

TEST(GatedTransformerXl, TwoRunsWithTheMemoriesHandedOverAreOne) {
  for (const Device device : TestedDevices()) {
    for (const char* gate : {"gru", "sum"}) {
      for (const char* same_length : {"false", "true"}) {
        const Options options = {
            {"gate", gate},
            {"same_length", same_length},
            {"normalise_memory", gate == std::string("gru") ? "true" : "false"},
            {"segment", "16"},
            {"memory", "20"},
            {"layers", "2"}};
        SCOPED_TRACE(ToString(options));
        transformer_xl::ExpectTwoRunsAreOne(GatedTransformerXl(), CausalProblem(2, 2, 75, 8),
                                            options, 48, device);
      }
    }
  }
}

TEST(GatedTransformerXl, CostCountsTheGatesProducts) {
  const GatedTransformerXl technique;
  const transformer_xl::TransformerXl transformer_xl;
  const Problem problem = CausalProblem(3, 2, 5, 4);
  const double plain =
      transformer_xl.Create(problem, {}, Device::kCpu, 1).value()->cost().flops.value();
  const double matrix = 2.0 * 3 * 5 * 8 * 8;  // one product of 15 rows
  const std::vector<std::pair<const char*, int>> matrices = {
      {"gru", 6}, {"input", 1}, {"output", 1}, {"highway", 1}, {"sigmoid_tanh", 2}, {"sum", 0}};
  for (const auto& [gate, count] : matrices) {
    const auto layer =
        technique.Create(problem, {{"gate", gate}, {"layers", "2"}}, Device::kCpu, 1).value();
    EXPECT_EQ(layer->cost().flops.value(), plain + 2 * 2 * count * matrix) << gate;
    EXPECT_EQ(layer->parameters().count("layer1.ff_gate.w_g"), count > 0 ? 1u : 0u);
  }
  const auto raw = technique.Create(
      problem, {{"gate", "sum"}, {"layers", "2"}, {"normalise_memory", "false"}}, Device::kCpu, 1);
  EXPECT_EQ((*raw)->cost().flops.value(), plain + 2 * 2 * matrix);
}

TEST(GatedTransformerXl, TheBiasBeginsWithTheOption) {
  const GatedTransformerXl technique;
  const auto layer = technique
                         .Create(CausalProblem(1, 2, 8, 4),
                                 {{"gate_bias", "-0.5"}, {"layers", "2"}}, Device::kCpu, 1)
                         .value();
  for (const char* name : {"layer0.attention_gate.b_g", "layer1.ff_gate.b_g"}) {
    for (const float value : layer->parameters().at(name).span<float>()) EXPECT_EQ(value, -0.5f);
  }
}

TEST(GatedTransformerXl, WhatItCannotDoIsSaidInOneLine) {
  const auto message = [](const Problem& problem, const Options& options) {
    const auto layer = GatedTransformerXl().Create(problem, options, Device::kCpu, 1);
    return layer.ok() ? "ok" : std::string(layer.status().ToString());
  };
  Problem problem = CausalProblem(1, 4, 64, 16);
  EXPECT_EQ(
      message(problem, {{"gate", "lstm"}}),
      "INVALID_ARGUMENT: option gate is \"lstm\"; allowed are gru | input | output | highway | "
      "sigmoid_tanh | sum");
  EXPECT_EQ(message(problem, {{"gate", "input"}, {"gate_biases", "true"}}),
            "INVALID_ARGUMENT: option gate_biases is true; allowed is that with gate=gru");
  problem.kv_heads = 2;
  EXPECT_EQ(message(problem, {}),
            "INVALID_ARGUMENT: gated_transformer_xl is self-attention: kv_heads is 2; allowed is "
            "query_heads, 4");
}

// ---- The backward pass ----

TEST(GatedTransformerXl, GradientsStopAtTheMemory) {
  const auto expect = [&](Options options) {
    options.insert({{"layers", "2"}, {"segment", "20"}, {"memory", "13"}});
    transformer_xl::ExpectGradientsStopAtTheMemory(GatedTransformerXl(),
                                                   CausalProblem(2, 2, 2 * 20, 8), options);
  };
  for (const char* gate : {"gru", "input", "output", "highway", "sigmoid_tanh", "sum"}) {
    for (const char* normalise_memory : {"true", "false"}) {
      expect({{"gate", gate}, {"normalise_memory", normalise_memory}});
    }
  }
  expect({{"memory", "30"}, {"gate_biases", "true"}, {"relu", "false"}});
}

// ---- Golden files ----

void ExpectMatchesGolden(const std::string& name, const Options& more) {
  SafetensorsFile golden =
      GoldenFile("memory/gated_transformer_xl/testdata/" + name + ".safetensors");
  const auto number = [&](const char* name) { return std::stoll(golden.metadata.at(name)); };
  const Tensor& x = golden.tensors.at("x");
  const Problem problem = CausalProblem(x.dim(0), number("heads"), x.dim(1), number("head_dim"));
  Options options = {{"layers", golden.metadata.at("layers")},
                     {"segment", golden.metadata.at("segment_tokens")},
                     {"memory", golden.metadata.at("memory_tokens")},
                     {"feed_forward_dim", golden.metadata.at("inner_dim")}};
  options.insert(more.begin(), more.end());
  const GatedTransformerXl technique;
  NamedTensors parameters = PerturbedParameters(technique, problem, options);
  for (auto& [name, tensor] : parameters) {
    const auto found = golden.tensors.find(name);
    if (found == golden.tensors.end()) {
      ASSERT_NE(name.find("ff.b"), std::string::npos) << name;
      Fill(tensor.view(), 0);  // RLlib's has none
    } else {
      tensor = found->second.Clone();
    }
  }
  const ConstTensorView out = golden.tensors.at("out").view();
  for (const Device device : TestedDevices()) {
    const StackOutcome outcome = EvaluateStack(technique, problem, options, parameters, x, device);
    EXPECT_LE(MaxDifference(outcome.defined.at("out").view(), out), 1e-13);
    EXPECT_LE(MaxDifference(outcome.computed.at("out").view(), out),
              transformer_xl::StackBound(out, 2));
  }
}

TEST(GatedTransformerXl, RllibsNetworkComputesTheSame) {
  ExpectMatchesGolden("rllib", {{"share_biases", "false"}});
}
TEST(GatedTransformerXl, TransformersRlsNetworkComputesTheSame) {
  ExpectMatchesGolden("transformers_rl",
                      {{"relu", "false"}, {"gate_biases", "true"}, {"normalise_memory", "false"}});
}

TEST(GatedTransformerXl, TheCounterpartKeepsTheOptionsThatHideNothing) {
  transformer_xl::ExpectCounterpartSeesAllTokens(
      GatedTransformerXl(), {{"same_length", "true"}, {"gate", "input"}, {"layers", "3"}},
      {{"same_length", "false"}});
}

}  // namespace
}  // namespace tfb::gated_transformer_xl
