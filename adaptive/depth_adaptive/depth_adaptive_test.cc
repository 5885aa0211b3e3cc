// Tests the depth-adaptive Transformer against its definition and by hand. The tests of calm, which
// has the same stack, cover its copied states, costs and given exits.
#include "adaptive/depth_adaptive/depth_adaptive.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numeric>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "adaptive/depth_adaptive/oracle.h"
#include "core/backward_testing.h"
#include "core/layers/stack/segmented_layer.h"
#include "core/random.h"
#include "core/testing.h"
#include "core/thread_pool.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "memory/transformer_xl/stack_testing.h"

namespace tfb::depth_adaptive {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;

Problem Make(int64_t batch, int64_t tokens, int64_t head_dim = 8) {
  return Problem::SelfAttention(batch, 2, tokens, head_dim, /*causal=*/true);
}

NamedTensors InputsFor(const Problem& problem, uint64_t seed = 3) {
  NamedTensors inputs;
  inputs["x"] = Tensor(DType::kF32, {problem.batch, problem.query_tokens, problem.model_dim()});
  FillNormal(&inputs["x"], seed, "x");
  return inputs;
}

NamedTensors ParametersOf(const Problem& problem, const Options& options) {
  const auto layer = DepthAdaptive().Create(problem, options, Device::kCpu, 1);
  EXPECT_TRUE(layer.ok()) << layer.status();
  NamedTensors parameters;
  for (const auto& [name, tensor] : (*layer)->parameters()) parameters[name] = tensor.Clone();
  return parameters;
}

NamedTensors RunIt(const Problem& problem, const NamedTensors& inputs,
                   const NamedTensors& parameters, const Options& options,
                   Device device = Device::kCpu) {
  auto outputs =
      RunTechnique(DepthAdaptive(), problem, ViewsOf(inputs), {options, device, 1, &parameters, 2});
  EXPECT_TRUE(outputs.ok()) << outputs.status();
  return *std::move(outputs);
}

std::vector<int> ExitsOf(const NamedTensors& outputs) {
  const auto exits = outputs.at("exits").span<int32_t>();
  return std::vector<int>(exits.begin(), exits.end());
}

// Expects the probabilities of a run within the bound that the definition gives.
void ExpectSameProbabilities(const NamedTensors& found, const NamedTensors& expected) {
  ASSERT_EQ(found.count("exit_probabilities"), expected.count("exit_probabilities"));
  if (found.count("exit_probabilities") == 0) return;
  const ConstTensorView q = expected.at("exit_probabilities").view();
  EXPECT_LE(MaxDifference(found.at("exit_probabilities").view(), q),
            std::max(Fp32Bound(q), Fp32Bound(expected.at("exit_probabilities.scale").view())));
}

// With all tokens leaving after layer n, the stack is its first n layers.
TEST(DepthAdaptive, TheOutputsOfAnExitAreThoseOfTokensThatLeaveThere) {
  const Problem problem = Make(2, 45);
  const Options options = {
      {"layers", "3"}, {"segment", "20"}, {"memory", "20"}, {"classifier", "fixed"}, {"exit", "3"}};
  const NamedTensors parameters = ParametersOf(problem, options);
  for (const Device device : TestedDevices()) {
    SCOPED_TRACE(Name(device));
    NamedTensors inputs = InputsFor(problem);
    const NamedTensors whole = RunIt(problem, inputs, parameters, options, device);
    const ConstTensorView exits = whole.at("exit_outputs").view();
    inputs["exits"] = Tensor(DType::kI32, {2, 45});
    for (int64_t n = 1; n <= 3; ++n) {
      Fill(inputs.at("exits").view(), static_cast<double>(n));
      const NamedTensors left = RunIt(problem, inputs, parameters, options, device);
      const ConstTensorView of_exit = layers::OfLayer(exits, n - 1);
      EXPECT_LE(MaxDifference(left.at("out").view(), of_exit), Fp32Bound(of_exit)) << n;
      EXPECT_EQ(ExitsOf(left), std::vector<int>(90, static_cast<int>(n)));
      for (int64_t m = n; m < 3; ++m) {  // a copied state, by the norms of later exits
        EXPECT_GT(MaxDifference(layers::OfLayer(left.at("exit_outputs").view(), m),
                                layers::OfLayer(exits, m)),
                  0.1);
      }
    }
  }
}

// Aligned training: the gradients of all exits' outputs add up, and so do those of runs in which all
// tokens leave after one layer.
TEST(DepthAdaptive, GradientsOfAllExitsAreThoseOfEachAddedUp) {
  const Problem problem = Make(2, 45);
  const Options options = {
      {"layers", "3"}, {"segment", "20"}, {"memory", "20"}, {"classifier", "fixed"}, {"exit", "3"}};
  NamedTensors of_all;
  of_all["exit_outputs"] = Tensor(DType::kF32, {2, 3, 45, problem.model_dim()});
  FillNormal(&of_all["exit_outputs"], 7, "gradient");
  for (const Device device : TestedDevices()) {
    SCOPED_TRACE(Name(device));
    const auto layer = DepthAdaptive().Create(problem, options, device, 1).value();
    NamedTensors inputs = InputsFor(problem);
    const auto aligned = GradientsOn(device, *layer, ViewsOf(inputs), of_all);
    ASSERT_TRUE(aligned.ok()) << aligned.status();
    Tensor sum(DType::kF64, inputs.at("x").shape());
    Fill(sum.view(), 0);
    inputs["exits"] = Tensor(DType::kI32, {2, 45});
    for (int64_t n = 1; n <= 3; ++n) {
      Fill(inputs.at("exits").view(), static_cast<double>(n));
      NamedTensors of_one;
      of_one["out"] = Tensor(DType::kF32, inputs.at("x").shape());
      CopyElements(layers::OfLayer(of_all.at("exit_outputs").view(), n - 1),
                   of_one.at("out").view());
      const auto one = GradientsOn(device, *layer, ViewsOf(inputs), of_one);
      ASSERT_TRUE(one.ok()) << one.status();
      for (int64_t e = 0; e < sum.num_elements(); ++e) {
        sum.span<double>()[e] += one->at("x").view().Get(e);
      }
      for (int64_t m = n + 1; m <= 3; ++m) {  // layers that no token goes through
        const Tensor& w = one->at(absl::StrCat("layer", m - 1, ".w_o"));
        for (const float gradient : w.span<float>()) ASSERT_EQ(gradient, 0);
      }
    }
    EXPECT_LE(MaxDifference(aligned->at("x").view(), sum.view()), Fp32Bound(sum.view()));
  }
}

// Expects the gradients of kernels and of the CPU, which has the same parameters, within the bounds of
// both, and that kernels give the same bits twice.
void ExpectGradientsOfTheCpu(const Problem& problem, const Options& options,
                             const NamedTensors& inputs, const NamedTensors& output_gradients) {
  const auto on_cpu = DepthAdaptive().Create(problem, options, Device::kCpu, 1).value();
  const auto expected = GradientsOf(*on_cpu, ViewsOf(inputs), output_gradients);
  ASSERT_TRUE(expected.ok()) << expected.status();
  const auto layer = DepthAdaptive().Create(problem, options, KernelDevice(), 1).value();
  const auto found = GradientsOn(KernelDevice(), *layer, ViewsOf(inputs), output_gradients);
  const auto again = GradientsOn(KernelDevice(), *layer, ViewsOf(inputs), output_gradients);
  ASSERT_TRUE(found.ok()) << found.status();
  ASSERT_TRUE(again.ok()) << again.status();
  ASSERT_EQ(found->size(), expected->size());
  for (const auto& [name, gradient] : *expected) {
    EXPECT_LE(MaxDifference(found->at(name).view(), gradient.view()),
              2 * Fp32Bound(gradient.view()))
        << name;
    EXPECT_EQ(MaxDifference(found->at(name).view(), again->at(name).view()), 0) << name;
  }
}

// Returns exits of all layers and beyond them, in no order.
Tensor MixedExits(const Problem& problem, int64_t layers) {
  Tensor exits(DType::kI32, {problem.batch, problem.query_tokens});
  for (int64_t e = 0; e < exits.num_elements(); ++e) {
    exits.span<int32_t>()[e] = static_cast<int32_t>((e * e + e / 7) % (layers + 2));
  }
  return exits;
}

// Mixed training: the exits are drawn, and the losses of the outputs, of all exits and of the
// probabilities are added up or stand alone.
TEST(DepthAdaptive, GradientsOfMixedExitsAreTheCpusOnEveryDevice) {
  const Problem problem = Make(2, 27);
  for (const char* classifier : {"geometric", "multinomial", "sequence"}) {
    const Options options = {{"layers", "4"},
                             {"segment", "12"},
                             {"memory", "7"},
                             {"classifier", classifier},
                             {"pre_norm", *classifier == 'm' ? "true" : "false"}};
    NamedTensors inputs = InputsFor(problem);
    inputs["exits"] = MixedExits(problem, 4);
    const auto layer = DepthAdaptive().Create(problem, options, Device::kCpu, 1).value();
    const NamedTensors of_all = RandomOutputGradients(*layer, 7);
    ASSERT_EQ(of_all.size(), 3u);
    // The gradients of the outputs know no classifier.
    const bool is_first = classifier == absl::string_view("geometric");
    for (const absl::string_view loss : {"out", "exit_outputs", "exit_probabilities", ""}) {
      if (!is_first && !loss.empty() && loss != "exit_probabilities") continue;
      SCOPED_TRACE(absl::StrCat(classifier, " ", loss));
      NamedTensors of_loss;
      for (const auto& [name, gradient] : of_all) {
        if (loss.empty() || name == loss) of_loss[name] = gradient.Clone();
      }
      ExpectGradientsOfTheCpu(problem, options, inputs, of_loss);
    }
  }
}

// Segments without a memory, so that nothing but the sequence's classifier reads across their borders,
// where gradients stop: of it the definition's slopes are those of its own parameters.
TEST(DepthAdaptive, GradientsOfMixedExitsAreThoseOfTheDefinitionOnEveryDevice) {
  const Problem problem = Make(2, 13, 4);
  for (const Device device : TestedDevices()) {
    for (const absl::string_view classifier : {"geometric", "multinomial", "sequence"}) {
      SCOPED_TRACE(absl::StrCat(classifier, " ", Name(device)));
      const Options options = {{"layers", "4"},
                               {"segment", "5"},
                               {"memory", "0"},
                               {"feed_forward_dim", "9"},
                               {"classifier", std::string(classifier)}};
      const auto layer = DepthAdaptive().Create(problem, options, Device::kCpu, 1).value();
      NamedTensors inputs = InputsFor(problem), parameters, checked;
      inputs["exits"] = MixedExits(problem, 4);
      for (const auto& [name, tensor] : layer->parameters()) {
        parameters[name] = tensor.Clone();
        if (MaxAbs(tensor.view()) == 0) FillNormal(&parameters[name], 5, name, 0, 0.1);
      }
      const NamedTensors of_outputs = RandomOutputGradients(*layer, 7);
      auto pass = BackwardOfTechnique(DepthAdaptive(), problem, ViewsOf(inputs), of_outputs,
                                      {options, device, 1, &parameters});
      ASSERT_TRUE(pass.ok()) << pass.status();
      for (auto& [name, gradient] : pass->parameters) {
        const bool is_classifiers = absl::StrContains(name, classifier);
        if (is_classifiers || classifier != "sequence") checked[name] = std::move(gradient);
      }
      if (classifier != "sequence") checked["x"] = std::move(pass->inputs.at("x"));
      EXPECT_EQ(checked.size(), classifier == "sequence" ? 2 : parameters.size() + 1);
      const DepthAdaptive technique;
      const auto slopes =
          SlopesOf({&technique, problem, options, &parameters, &inputs, &of_outputs}, checked);
      ASSERT_TRUE(slopes.ok()) << slopes.status();
      for (const Slope& slope : *slopes) {
        EXPECT_LE(std::abs(slope.of_layer - slope.of_definition), slope.bound) << slope.name;
      }
    }
  }
}

// The same of the classifier's own exits, with either oracle, with confidence and without a choice.
TEST(DepthAdaptive, GradientsOfOwnExitsAreTheCpusOnEveryDevice) {
  const Problem problem = Make(2, 27);
  const std::vector<Options> all = {
      {{"oracle", "likelihood"}, {"level", "0"}},
      {{"oracle", "correctness"}, {"level", "4"}},
      {{"oracle", "correctness"}, {"classifier", "multinomial"}},
      {{"oracle", "correctness"}, {"classifier", "sequence"}},
      {{"classifier", "confidence"}, {"thresholds", "50/100"}, {"vocabulary", "17"}},
      {{"classifier", "fixed"}, {"exit", "2"}},
      {{"classifier", "fixed"}, {"exit", "3"}},
      {{"given_memory", "5"}},
      {{"layers", "1"}}};
  for (Options options : all) {
    options["segment"] = "12";
    options["memory"] = "7";
    options.emplace("layers", "3");
    const auto layer = DepthAdaptive().Create(problem, options, Device::kCpu, 1).value();
    SCOPED_TRACE(ToString(options));
    NamedTensors inputs = RandomInputs(layer->inputs(), 3);
    ExpectGradientsOfTheCpu(problem, options, inputs, RandomOutputGradients(*layer, 7));
  }
}

TEST(DepthAdaptive, RunEqualsTheDefinitionWithEveryClassifier) {
  const Problem problem = Make(2, 90, 12);
  for (const Device device : TestedDevices()) {
    for (const char* classifier : {"sequence", "multinomial", "geometric", "confidence", "fixed"}) {
      for (const char* pre_norm : {"false", "true"}) {
        const Options options = {{"layers", "4"},         {"segment", "20"},
                                 {"memory", "40"},        {"exit", "3"},
                                 {"pre_norm", pre_norm},  {"oracle", "correctness"},
                                 {"same_length", "true"}, {"classifier", classifier},
                                 {"vocabulary", "50"},    {"thresholds", "700/500"}};
        const NamedTensors inputs = InputsFor(problem);
        const NamedTensors parameters = ParametersOf(problem, options);
        const NamedTensors found = RunIt(problem, inputs, parameters, options, device);
        const std::vector<int> exits = ExitsOf(found);
        const size_t different = std::set<int>(exits.begin(), exits.end()).size();
        EXPECT_GE(different, options.at("classifier") == "fixed" ? 1u : 2u) << classifier;
        DefinitionRequest request;
        request.computed = &found;
        const auto expected = DefineTechnique(DepthAdaptive(), problem, ViewsOf(inputs),
                                              {options, Device::kCpu, 1, &parameters}, request);
        ASSERT_TRUE(expected.ok()) << expected.status();
        const ConstTensorView out = expected->at("out").view();
        EXPECT_LE(MaxDifference(found.at("out").view(), out), std::sqrt(8.0) * Fp32Bound(out));
        for (int64_t n = 0; n < 180; ++n) {
          ASSERT_EQ(exits[n], expected->at("exits").view().Get(n)) << classifier << " " << n;
        }
        ExpectSameProbabilities(found, *expected);
      }
    }
  }
}

// Returns classifiers whose weights are 0, so that their outputs are their biases.
NamedTensors WithBias(const Problem& problem, const Options& options, const std::string& name,
                      const std::vector<float>& bias) {
  NamedTensors parameters = ParametersOf(problem, options);
  Fill(parameters.at(name + ".w").view(), 0);
  std::copy(bias.begin(), bias.end(), parameters.at(name + ".b").span<float>().begin());
  return parameters;
}

TEST(DepthAdaptive, AMultinomialTakesTheFirstOfTheLargest) {
  const Problem problem = Make(1, 10);
  const Options options = {{"layers", "4"}, {"classifier", "multinomial"}};
  for (const Device device : TestedDevices()) {
    const auto exits = [&](const std::vector<float>& bias) {
      return ExitsOf(RunIt(problem, InputsFor(problem),
                           WithBias(problem, options, "likelihood.2.multinomial", bias), options,
                           device));
    };
    EXPECT_THAT(exits({0, 2, 1, 2}), Each(2));
    EXPECT_THAT(exits({-1, -2, -3, 0}), Each(4));
    EXPECT_THAT(exits({5, 5, 5, 5}), Each(1));
  }
}

TEST(DepthAdaptive, AGeometricClassifierLeavesAtTheFirstChiAboveOneHalf) {
  const Problem problem = Make(1, 10);
  const Options options = {{"layers", "4"}, {"level", "0"}};
  for (const Device device : TestedDevices()) {
    const auto exits = [&](const std::vector<float>& bias) {
      return ExitsOf(RunIt(problem, InputsFor(problem),
                           WithBias(problem, options, "likelihood.0.geometric", bias), options,
                           device));
    };
    EXPECT_THAT(exits({-1, 0.1f, 3}), Each(2));
    EXPECT_THAT(exits({0, 0, 0}), Each(4));  // 1/2 is not above it
    EXPECT_THAT(exits({-1, -1, 1e-3f}), Each(3));
  }
}

TEST(DepthAdaptive, ASequenceIsJudgedByTheSegmentBeforeAndTheFirstStays) {
  const Problem problem = Make(2, 13);
  const Options options = {{"layers", "4"}, {"segment", "5"}, {"classifier", "sequence"}};
  NamedTensors parameters = WithBias(problem, options, "likelihood.2.sequence", {0, 1, 0, 0});
  for (const Device device : TestedDevices()) {
    const NamedTensors inputs = InputsFor(problem);
    EXPECT_THAT(ExitsOf(RunIt(problem, inputs, parameters, options, device)),
                ElementsAre(4, 4, 4, 4, 4, 2, 2, 2, 2, 2, 2, 2, 2,  //
                            4, 4, 4, 4, 4, 2, 2, 2, 2, 2, 2, 2, 2));
  }
  // The mean of channel 0 after layer 1 decides between 1 and 3. The exit's norm of tokens that
  // leave there shows it: their state is normalised already.
  Tensor& w = parameters.at("likelihood.2.sequence.w");
  w.view().MutableAt<float>(0)[0] = 100;
  w.view().MutableAt<float>(0)[2] = -100;
  std::set<int> seen;
  for (uint64_t seed = 0; seed < 4; ++seed) {
    NamedTensors inputs = InputsFor(problem, seed);
    const std::vector<int> exits = ExitsOf(RunIt(problem, inputs, parameters, options));
    inputs["exits"] = Tensor(DType::kI32, {2, 13});
    Fill(inputs["exits"].view(), 1);
    const NamedTensors first = RunIt(problem, inputs, parameters, options);
    for (int64_t t = 5; t < 13; ++t) {
      double sum = 0;
      for (int64_t before = t / 5 * 5 - 5; before < t / 5 * 5; ++before) {
        sum += *first.at("out").view().At<float>(1, before, 0);
      }
      EXPECT_EQ(exits[13 + t], sum > 0 ? 1 : 3) << seed << " " << t;
      seen.insert(exits[13 + t]);
    }
  }
  EXPECT_EQ(seen.size(), 2u);
}

TEST(DepthAdaptive, EachExitThatIsFixedIsTakenAndNoneIsBeyondTheLast) {
  const Problem problem = Make(1, 10);
  for (int exit = 1; exit <= 7; ++exit) {
    const Options options = {
        {"layers", "4"}, {"classifier", "fixed"}, {"exit", std::to_string(exit)}};
    const NamedTensors parameters = ParametersOf(problem, options);
    EXPECT_THAT(ExitsOf(RunIt(problem, InputsFor(problem), parameters, options)),
                Each(std::min(exit, 4)));
  }
}

// Returns parameters with two tokens, where the exits after layers 1 to 3 give one of them the
// probabilities 1/2, 3/4 and 9/10, whatever the state is.
NamedTensors WithProbabilities(const Problem& problem, const Options& options) {
  NamedTensors parameters = ParametersOf(problem, options);
  Fill(parameters.at("output").view(), 0);
  parameters.at("output").span<float>()[0] = 1;
  const double odds[] = {1, 3, 9};
  for (int n = 0; n < 3; ++n) {
    const std::string norm = layers::ExitNorm(n + 1, 4);
    Fill(parameters.at(norm + ".gamma").view(), 0);
    parameters.at(norm + ".beta").span<float>()[0] = static_cast<float>(std::log(odds[n]));
  }
  return parameters;
}

TEST(DepthAdaptive, ConfidenceLeavesAtTheFirstProbabilityThatReachesItsLayersThreshold) {
  const Problem problem = Make(2, 10);
  for (const Device device : TestedDevices()) {
    const auto exits = [&](const std::string& thresholds) {
      const Options options = {{"layers", "4"},
                               {"classifier", "confidence"},
                               {"vocabulary", "2"},
                               {"thresholds", thresholds}};
      return ExitsOf(
          RunIt(problem, InputsFor(problem), WithProbabilities(problem, options), options, device));
    };
    EXPECT_THAT(exits("0"), Each(1));
    EXPECT_THAT(exits("500"), Each(1));  // reached, not passed
    EXPECT_THAT(exits("501/740"), Each(2));
    EXPECT_THAT(exits("501/760/890"), Each(3));
    EXPECT_THAT(exits("760"), Each(3));  // the threshold of all layers
    EXPECT_THAT(exits("501/760/910"), Each(4));
    EXPECT_THAT(exits("1001/1001/0"), Each(3));
    EXPECT_THAT(exits("1001/1001/1001/0"), Each(4));  // after the last layer all leave
  }
}

TEST(DepthAdaptive, ConfidenceThatReachesNothingIsTheWholeModelBitForBit) {
  const Problem problem = Make(2, 33);
  for (const Device device : TestedDevices()) {
    Options options = {{"classifier", "confidence"}, {"thresholds", "1001"}, {"segment", "8"}};
    const NamedTensors parameters = ParametersOf(problem, options);
    const NamedTensors found = RunIt(problem, InputsFor(problem), parameters, options, device);
    options["classifier"] = "fixed";
    options["exit"] = "32";
    NamedTensors of_stack;
    for (const auto& [name, tensor] : parameters) {
      if (name != "output") of_stack[name] = tensor.Clone();
    }
    const NamedTensors whole = RunIt(problem, InputsFor(problem), of_stack, options, device);
    EXPECT_EQ(MaxDifference(found.at("out").view(), whole.at("out").view()), 0);
    EXPECT_EQ(ExitsOf(found), ExitsOf(whole));
  }
}

TEST(DepthAdaptive, ConfidenceOfNanNeverLeaves) {
  const Problem problem = Make(1, 5);
  const Options options = {{"layers", "4"}, {"classifier", "confidence"}, {"thresholds", "0"}};
  NamedTensors parameters = ParametersOf(problem, options);
  Fill(parameters.at("output").view(), std::nan(""));
  for (const Device device : TestedDevices()) {
    EXPECT_THAT(ExitsOf(RunIt(problem, InputsFor(problem), parameters, options, device)), Each(4));
  }
}

TEST(DepthAdaptive, ThresholdsBeyondTheirRangeAreRefusedWithIt) {
  for (const char* thresholds : {"1002", "-1", "500/", "0.5"}) {
    const auto options = DepthAdaptive().Canonical({{"thresholds", thresholds}});
    EXPECT_FALSE(options.ok()) << thresholds;
    EXPECT_THAT(std::string(options.status().message()), ::testing::HasSubstr("each 0 to 1001"));
  }
}

TEST(DepthAdaptive, ParametersAreNamedByOracleAndLevel) {
  const Problem problem = Make(1, 10);
  const auto has = [&](const Options& options, const char* name) {
    return ParametersOf(problem, options).count(name) > 0;
  };
  EXPECT_TRUE(has({}, "likelihood.2.geometric.w"));
  EXPECT_TRUE(has({{"oracle", "correctness"}, {"level", "4"}, {"classifier", "sequence"}},
                  "correctness.4.sequence.b"));
  EXPECT_FALSE(has({{"classifier", "fixed"}}, "likelihood.2.geometric.w"));
  EXPECT_TRUE(has({{"classifier", "confidence"}}, "output"));
  EXPECT_FALSE(has({{"classifier", "confidence"}}, "likelihood.2.geometric.w"));
}

// ---- The probabilities of leaving ----

// Returns the probabilities of a token of batch row 0, layer by layer.
std::vector<double> ProbabilitiesOf(const NamedTensors& outputs, int64_t t) {
  const ConstTensorView q = outputs.at("exit_probabilities").view();
  std::vector<double> of_token;
  for (int64_t n = 0; n < q.dim(2); ++n) of_token.push_back(*q.At<float>(0, t, n));
  return of_token;
}

auto Near(const std::vector<double>& values) {
  return ::testing::Pointwise(::testing::DoubleNear(1e-6), values);
}

TEST(DepthAdaptive, ProbabilitiesOfKnownLogitsAreWhatTheFormulaGivesByHand) {
  const Problem problem = Make(1, 10);
  const auto logs = [](const std::vector<double>& odds) {
    std::vector<float> logs;
    for (const double each : odds) logs.push_back(static_cast<float>(std::log(each)));
    return logs;
  };
  for (const Device device : TestedDevices()) {
    const auto run = [&](const std::string& classifier, const std::vector<double>& odds) {
      const Options options = {{"layers", "4"}, {"segment", "5"}, {"classifier", classifier}};
      return RunIt(problem, InputsFor(problem),
                   WithBias(problem, options, "likelihood.2." + classifier, logs(odds)), options,
                   device);
    };
    EXPECT_THAT(ProbabilitiesOf(run("multinomial", {1, 2, 4, 1}), 3),
                Near({0.125, 0.25, 0.5, 0.125}));
    const NamedTensors of_segments = run("sequence", {1, 2, 4, 1});
    EXPECT_THAT(ProbabilitiesOf(of_segments, 4), ElementsAre(0, 0, 0, 1));
    EXPECT_THAT(ProbabilitiesOf(of_segments, 5), Near({0.125, 0.25, 0.5, 0.125}));
    // chi is 1/4, 1/2 and 3/4.
    EXPECT_THAT(ProbabilitiesOf(run("geometric", {1.0 / 3, 1, 3}), 9),
                Near({0.25, 0.375, 0.28125, 0.09375}));
  }
}

TEST(DepthAdaptive, TheScaleOfProbabilitiesIsInTheSumOfTheWeightsMagnitudes) {
  const Problem problem = Make(1, 10);
  for (const std::string classifier : {"sequence", "multinomial", "geometric"}) {
    const Options options = {{"layers", "4"}, {"segment", "5"}, {"classifier", classifier}};
    const auto scale_with = [&](int64_t channels, double weight) {
      NamedTensors parameters = ParametersOf(problem, options);
      const TensorView w = parameters.at("likelihood.2." + classifier + ".w").view();
      Fill(w, 0);
      Fill(Slice(w, w.dim(0) == problem.model_dim() ? 0 : 1, 0, channels), weight);
      const auto defined = DefineTechnique(DepthAdaptive(), problem, ViewsOf(InputsFor(problem)),
                                           {options, Device::kCpu, 1, &parameters});
      EXPECT_TRUE(defined.ok()) << defined.status();
      return defined->at("exit_probabilities.scale").view().Get(9);
    };
    EXPECT_GT(scale_with(1, 1), 0) << classifier;
    EXPECT_DOUBLE_EQ(scale_with(6, -0.5), 3 * scale_with(1, 1)) << classifier;
  }
}

TEST(DepthAdaptive, AStackOfOneLayerIsLeftAfterItWithProbabilityOne) {
  const Problem problem = Make(1, 10);
  for (const Device device : TestedDevices()) {
    for (const char* classifier : {"sequence", "multinomial", "geometric"}) {
      const Options options = {{"layers", "1"}, {"segment", "4"}, {"classifier", classifier}};
      const NamedTensors found =
          RunIt(problem, InputsFor(problem), ParametersOf(problem, options), options, device);
      for (int64_t t = 0; t < 10; ++t) EXPECT_THAT(ProbabilitiesOf(found, t), ElementsAre(1));
    }
  }
}

// Each product and quotient rounds by 2^-24 of itself.
constexpr double kRounding = 40 * 6e-8;

TEST(DepthAdaptive, ProbabilitiesOfATokenSumToOneAndPointAtItsExit) {
  const Problem problem = Make(1, 90, 12);
  for (const Device device : TestedDevices()) {
    for (const std::string classifier : {"sequence", "multinomial", "geometric"}) {
      const Options options = {
          {"layers", "5"}, {"segment", "20"}, {"memory", "40"}, {"classifier", classifier}};
      const NamedTensors found =
          RunIt(problem, InputsFor(problem), ParametersOf(problem, options), options, device);
      const std::vector<int> exits = ExitsOf(found);
      EXPECT_GE(std::set<int>(exits.begin(), exits.end()).size(), 2u);
      for (int64_t t = 0; t < 90; ++t) {
        const std::vector<double> q = ProbabilitiesOf(found, t);
        double rest = std::accumulate(q.begin(), q.end(), 0.0);
        EXPECT_NEAR(rest, 1, kRounding) << classifier << " " << t;
        if (classifier != "geometric") {
          EXPECT_EQ(q[exits[t] - 1], *std::max_element(q.begin(), q.end())) << classifier << t;
          continue;
        }
        // chi > 1/2 where layer n takes more than half of what the layers below have left.
        for (int n = 1; n <= exits[t]; ++n) {
          rest -= q[n - 1];
          const double more = q[n - 1] - rest;
          EXPECT_GE(n < exits[t] ? -more : more, -kRounding) << t << " " << n;
        }
      }
    }
  }
}

TEST(DepthAdaptive, AGeometricClassifierGoesOnWithTheCopiedState) {
  const Problem problem = Make(1, 30);
  const Options options = {{"layers", "4"}, {"segment", "8"}};
  NamedTensors parameters = ParametersOf(problem, options);
  // The same classifier after every layer.
  const TensorView w = parameters.at("likelihood.2.geometric.w").view();
  for (int64_t n = 1; n < 3; ++n) CopyElements(Slice(w, 0, 0, 1), Slice(w, 0, n, 1));
  Fill(parameters.at("likelihood.2.geometric.b").view(), 0);
  for (const Device device : TestedDevices()) {
    NamedTensors inputs = InputsFor(problem);
    inputs["exits"] = Tensor(DType::kI32, {1, 30});
    for (int64_t t = 0; t < 30; ++t) inputs["exits"].span<int32_t>()[t] = t % 2 == 0 ? 1 : 4;
    const NamedTensors found = RunIt(problem, inputs, parameters, options, device);
    double largest = 0;
    for (int64_t t = 0; t < 30; ++t) {
      const std::vector<double> q = ProbabilitiesOf(found, t);
      const double chi = q[0], of_second = q[1] / (1 - chi);
      if (t % 2 == 0) {
        EXPECT_THAT(q,
                    Near({chi, chi * (1 - chi), chi * std::pow(1 - chi, 2), std::pow(1 - chi, 3)}));
      } else {
        largest = std::max(largest, std::abs(of_second - chi));
      }
    }
    EXPECT_GE(largest, 0.1);  // the state of tokens that stay is another after each layer
  }
}

TEST(DepthAdaptive, ProbabilitiesAreTheClassifiersWhereItsOwnExitsAreGiven) {
  const Problem problem = Make(2, 50, 12);
  for (const Device device : TestedDevices()) {
    for (const char* classifier : {"sequence", "multinomial", "geometric"}) {
      const Options options = {
          {"layers", "4"}, {"segment", "16"}, {"memory", "20"}, {"classifier", classifier}};
      const NamedTensors parameters = ParametersOf(problem, options);
      NamedTensors inputs = InputsFor(problem);
      const NamedTensors free = RunIt(problem, inputs, parameters, options, device);
      inputs["exits"] = free.at("exits").Clone();
      const NamedTensors given = RunIt(problem, inputs, parameters, options, device);
      EXPECT_EQ(MaxDifference(given.at("exit_probabilities").view(),
                              free.at("exit_probabilities").view()),
                0)
          << classifier;
      // Other exits leave other states, but the definition has the same.
      Fill(inputs["exits"].view(), 2);
      const auto expected = DefineTechnique(DepthAdaptive(), problem, ViewsOf(inputs),
                                            {options, Device::kCpu, 1, &parameters});
      ASSERT_TRUE(expected.ok()) << expected.status();
      ExpectSameProbabilities(RunIt(problem, inputs, parameters, options, device), *expected);
    }
  }
}

TEST(DepthAdaptive, ASegmentWhoseExitsAreGivenCountsForTheNext) {
  const Problem problem = Make(2, 15);
  const Options options = {{"layers", "4"}, {"segment", "5"}, {"classifier", "sequence"}};
  const NamedTensors inputs = InputsFor(problem);
  const auto layer = DepthAdaptive().Create(problem, options, Device::kCpu, 1).value();
  auto& stream = dynamic_cast<StreamingLayer&>(*layer);
  const auto whole = RunLayer(*layer, ViewsOf(inputs), 2);
  ASSERT_TRUE(whole.ok()) << whole.status();
  ThreadPool pool(2);
  Tensor workspace(DType::kU8, {static_cast<int64_t>(layer->workspace_bytes(2))});
  const Execution execution = {
      &pool, absl::MakeSpan(static_cast<std::byte*>(workspace.raw()), workspace.bytes()), nullptr};
  ASSERT_TRUE(stream.Reset().ok());
  Tensor out(DType::kF32, {2, 5, 16}), q(DType::kF32, {2, 5, 4});
  for (const int64_t begin : {0, 5, 10}) {
    Inputs segment = {{"x", Slice(inputs.at("x").view(), 1, begin, 5)}};
    Outputs written = {{"out", out.view()}};
    if (begin < 10) {
      segment.Set("exits", Slice(whole->at("exits").view(), 1, begin, 5));
    } else {
      written.Set("exit_probabilities", q.view());
    }
    const absl::Status status = stream.Append(segment, written, execution);
    ASSERT_TRUE(status.ok()) << status;
  }
  EXPECT_EQ(MaxDifference(out.view(), Slice(whole->at("out").view(), 1, 10, 5)), 0);
  EXPECT_EQ(MaxDifference(q.view(), Slice(whole->at("exit_probabilities").view(), 1, 10, 5)), 0);
}

TEST(DepthAdaptive, OnlyClassifiersOfLayersHaveProbabilities) {
  for (const auto& [classifier, has] :
       std::vector<std::pair<std::string, bool>>{{"sequence", true},
                                                 {"multinomial", true},
                                                 {"geometric", true},
                                                 {"confidence", false},
                                                 {"fixed", false}}) {
    const auto outputs = DepthAdaptive().OutputSpecs(Make(1, 10), {{"classifier", classifier}});
    ASSERT_TRUE(outputs.ok());
    EXPECT_EQ(std::any_of(outputs->begin(), outputs->end(),
                          [](const TensorSpec& spec) { return spec.name == "exit_probabilities"; }),
              has)
        << classifier;
  }
}

// ---- Memories of an earlier run ----

TEST(DepthAdaptive, TwoRunsWithTheMemoriesHandedOverAreOne) {
  const Problem problem = Make(2, 75);
  for (const Device device : TestedDevices()) {
    for (const Options& more : std::vector<Options>{
             {{"classifier", "geometric"}, {"memory", "20"}},
             {{"classifier", "geometric"}, {"memory", "30"}, {"same_length", "true"}},
             {{"classifier", "multinomial"}, {"memory", "37"}, {"pre_norm", "true"}},
             {{"classifier", "confidence"}, {"memory", "200"}, {"pre_norm", "true"}},
             {{"classifier", "fixed"}, {"memory", "20"}, {"exit", "1"}}}) {
      Options options = more;
      options.insert({{"layers", "3"}, {"segment", "16"}, {"vocabulary", "9"}});
      options.insert({"thresholds", "400/500"});
      SCOPED_TRACE(ToString(options));
      const NamedTensors found =
          RunIt(problem, InputsFor(problem),
                transformer_xl::PerturbedParameters(DepthAdaptive(), problem, options), options);
      const std::vector<int> exits = ExitsOf(found);
      EXPECT_GE(std::set<int>(exits.begin(), exits.end()).size(),
                more.at("classifier") == "fixed" ? 1u : 2u);
      for (const int64_t first : {16, 48}) {
        transformer_xl::ExpectTwoRunsAreOne(DepthAdaptive(), problem, options, first, device);
      }
      // The second run leaves memories that are partly given.
      transformer_xl::ExpectTwoRunsAreOne(DepthAdaptive(), Make(1, 51), options, 48, device);
    }
    Problem in_16_bits = Make(1, 75, 16);
    in_16_bits.dtype = DType::kBF16;
    transformer_xl::ExpectTwoRunsAreOne(DepthAdaptive(), in_16_bits,
                                        {{"classifier", "fixed"},
                                         {"exit", "2"},
                                         {"layers", "3"},
                                         {"memory", "20"},
                                         {"segment", "16"}},
                                        32, device);
  }
}

TEST(DepthAdaptive, MemoriesOfTokensThatHaveLeftAreTheCopiedStates) {
  const Problem problem = Make(2, 40);
  const Options options = {{"layers", "3"}, {"segment", "16"}, {"memory", "23"}};
  const NamedTensors parameters = ParametersOf(problem, options);
  NamedTensors inputs = InputsFor(problem);
  inputs["exits"] = Tensor(DType::kI32, {2, 40});
  for (int64_t t = 0; t < 80; ++t) inputs["exits"].span<int32_t>()[t] = t % 2 == 0 ? 1 : 3;
  for (const Device device : TestedDevices()) {
    const NamedTensors found = RunIt(problem, inputs, parameters, options, device);
    const ConstTensorView memories = found.at("memories").view();
    ASSERT_EQ(memories.shape(), (Shape{2, 3, 23, 16}));
    EXPECT_EQ(MaxDifference(layers::OfLayer(memories, 0), Slice(inputs.at("x").view(), 1, 17, 23)),
              0);
    for (int64_t t = 17; t < 40; ++t) {
      const auto of_token = [&](int64_t n) {
        return Slice(layers::OfLayer(memories, n), 1, t - 17, 1);
      };
      EXPECT_EQ(MaxDifference(of_token(1), of_token(2)) == 0, t % 2 == 0) << t;
      EXPECT_GT(MaxDifference(of_token(0), of_token(1)), 0) << t;
    }
  }
}

TEST(DepthAdaptive, AStreamReadsTheMemoriesWithItsFirstSegmentAndCountsFromIt) {
  const Problem problem = Make(2, 40);
  const Options options = {{"memory", "30"},
                           {"given_memory", "25"},
                           {"segment", "16"},
                           {"layers", "4"},
                           {"classifier", "sequence"}};
  NamedTensors inputs = InputsFor(problem);
  inputs["memories"] = Tensor(DType::kF32, {2, 4, 25, 16});
  FillNormal(&inputs["memories"], 9, "memories");
  const auto layer = DepthAdaptive().Create(problem, options, Device::kCpu, 1).value();
  ASSERT_TRUE(
      layer->SetParameters(WithBias(problem, options, "likelihood.2.sequence", {0, 1, 0, 0})).ok());
  const auto whole = RunLayer(*layer, ViewsOf(inputs), 2);
  ASSERT_TRUE(whole.ok()) << whole.status();
  for (int64_t t = 0; t < 40; ++t) {
    EXPECT_EQ(*whole->at("exits").view().At<int32_t>(0, t), t < 16 ? 4 : 2) << t;
  }
  auto& stream = dynamic_cast<StreamingLayer&>(*layer);
  ThreadPool pool(2);
  Tensor workspace(DType::kU8, {static_cast<int64_t>(layer->workspace_bytes(2))});
  const Execution execution = {
      &pool, absl::MakeSpan(static_cast<std::byte*>(workspace.raw()), workspace.bytes()), nullptr};
  ASSERT_TRUE(stream.Reset().ok());
  Tensor out(DType::kF32, {2, 40, 16}), exits(DType::kI32, {2, 40});
  for (const int64_t begin : {0, 16, 32}) {
    const int64_t count = std::min<int64_t>(16, 40 - begin);
    Inputs segment = {{"x", Slice(inputs.at("x").view(), 1, begin, count)}};
    const Outputs written = {{"out", Slice(out.view(), 1, begin, count)},
                             {"exits", Slice(exits.view(), 1, begin, count)}};
    if (begin == 0) {
      const absl::Status without = stream.Append(segment, written, execution);
      EXPECT_EQ(without.message(), "input memories is missing; the first segment has need of it");
      segment.Set("memories", inputs.at("memories").view());
    }
    const absl::Status status = stream.Append(segment, written, execution);
    ASSERT_TRUE(status.ok()) << status;
  }
  EXPECT_EQ(MaxDifference(out.view(), whole->at("out").view()), 0);
  EXPECT_EQ(MaxDifference(exits.view(), whole->at("exits").view()), 0);
}

TEST(DepthAdaptive, MoreThanTheMemoryCannotBeGivenAndTheCounterpartReadsAsMuch) {
  const Problem problem = Make(1, 10);
  EXPECT_EQ(DepthAdaptive()
                .Create(problem, {{"memory", "5"}, {"given_memory", "6"}}, Device::kCpu, 1)
                .status()
                .message(),
            "option given_memory is 6; allowed with memory=5 are 0 to 5");
  const auto counterpart = DepthAdaptive().Counterpart(problem, {{"given_memory", "6"}});
  ASSERT_TRUE(counterpart.ok());
  EXPECT_EQ(counterpart->options.at("given_memory"), "6");
}

// ---- Oracles ----

const ExitValues kValues = {{-3, -1, -2, -1}, {-1, -2, -1, -1}, {-1, -1, -1, -0.5}};

// Two exits, three tokens of three: the exits give probabilities 1/2, 1/4, 1/4 in turn.
Tensor TurningLogits() {
  Tensor logits(DType::kF32, {2, 3, 3});
  for (int64_t n = 0; n < 2; ++n) {
    for (int64_t t = 0; t < 3; ++t) {
      for (int64_t v = 0; v < 3; ++v) {
        logits.view().Set((n * 3 + t) * 3 + v, v == (n + t) % 3 ? std::log(2.0) + 5 : 5);
      }
    }
  }
  return logits;
}

TEST(DepthAdaptiveOracle, ValuesAreTheLikelihoodOrTheCorrectnessOfTheNextToken) {
  const Tensor logits = TurningLogits();
  const std::vector<int64_t> next = {0, 2, 2};
  const double half = std::log(0.5), quarter = std::log(0.25);
  const auto near = [](double value) { return ::testing::DoubleNear(value, 1e-6); };
  const ExitValues likelihood = LikelihoodOfExits(logits.view(), next);
  EXPECT_THAT(likelihood[0], ElementsAre(near(half), near(quarter), near(half)));
  EXPECT_THAT(likelihood[1], ElementsAre(near(quarter), near(half), near(quarter)));
  const ExitValues correctness = CorrectnessOfExits(logits.view(), next);
  EXPECT_THAT(correctness[0], ElementsAre(1, 0, 1));
  EXPECT_THAT(correctness[1], ElementsAre(0, 1, 0));
  // Exit 2 gains log 2 for token 1 alone, where the penalty of one more exit is below that.
  EXPECT_THAT(TokenOracle(likelihood, 0.69, 0), ElementsAre(1, 2, 1));
  EXPECT_THAT(TokenOracle(likelihood, 0.7, 0), Each(1));
  EXPECT_THAT(TokenOracle(correctness, 0.99, 0), ElementsAre(1, 2, 1));
  EXPECT_EQ(SequenceOracle(correctness, 0), 1);
}

TEST(DepthAdaptiveOracle, OfEquallyLikelyTokensTheFirstIsTheMostLikely) {
  Tensor logits(DType::kF32, {1, 2, 3});
  Fill(logits.view(), 1);
  EXPECT_THAT(CorrectnessOfExits(logits.view(), std::vector<int64_t>{0, 1})[0], ElementsAre(1, 0));
}

TEST(DepthAdaptiveOracle, OfASequenceTakesTheBestMeanLessThePenalty) {
  EXPECT_EQ(SequenceOracle(kValues, 0), 3);    // means -1.75, -1.25, -0.875
  EXPECT_EQ(SequenceOracle(kValues, 0.4), 2);  // -2.15, -2.05, -2.075
  EXPECT_EQ(SequenceOracle(kValues, 0.6), 1);  // -2.35, -2.45, -2.675
  EXPECT_EQ(SequenceOracle(kValues, 1e9), 1);
  EXPECT_EQ(SequenceOracle({{1, 0}, {0, 1}}, 0), 1);  // ties
}

TEST(DepthAdaptiveOracle, OfATokenWithoutSmoothingTakesItsOwnBest) {
  EXPECT_THAT(TokenOracle(kValues, 0, 0), ElementsAre(2, 1, 2, 3));
  EXPECT_THAT(TokenOracle(kValues, 0.2, 0), ElementsAre(2, 1, 2, 3));
  EXPECT_THAT(TokenOracle(kValues, 0.3, 0), ElementsAre(2, 1, 2, 1));
  EXPECT_THAT(TokenOracle(kValues, 1e9, 0), Each(1));
}

TEST(DepthAdaptiveOracle, SmoothingMixesNeighboursByTheKernel) {
  // With sigma 1 / ln 2, a neighbour has weight 1/2, and the next one 1/16.
  const ExitValues values = {{1, 0, 0}, {0, 0.45, 0}};
  // Token 1 compares 0.5 with 0.45, token 2 0.0625 with 0.225, token 0 1 with 0.225.
  EXPECT_THAT(TokenOracle(values, 0, 1 / std::log(2.0)), ElementsAre(1, 1, 2));
  EXPECT_THAT(TokenOracle(values, 0, 0), ElementsAre(1, 2, 1));
}

TEST(DepthAdaptiveOracle, WideSmoothingGivesEveryTokenTheSequencesExit) {
  for (const double penalty : {0.0, 0.4, 0.6}) {
    const int exit = static_cast<int>(SequenceOracle(kValues, penalty));
    EXPECT_THAT(TokenOracle(kValues, 4 * penalty, 1e12), Each(exit)) << penalty;
  }
}

}  // namespace
}  // namespace tfb::depth_adaptive
