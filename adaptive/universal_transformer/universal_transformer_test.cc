// Tolerance. The bound is multi_head's: 2e-5 of the largest value, or of 1 where that is more; a
// stack of blocks has a norm after each.
#include "adaptive/universal_transformer/universal_transformer.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "attention/encoder_decoder/encoder_decoder.h"
#include "core/backward_testing.h"
#include "core/cuda/simulator/simulator.h"
#include "core/cuda/work_testing.h"
#include "core/random.h"
#include "core/testing.h"
#include "gtest/gtest.h"

namespace tfb::universal_transformer {
namespace {

Problem Self(int64_t batch, int64_t heads, int64_t tokens, int64_t head_dim, bool causal = false) {
  return Problem::SelfAttention(batch, heads, tokens, head_dim, causal);
}

NamedTensors Random(const Problem& problem) {
  return RandomInputs(UniversalTransformer().InputSpecs(problem, {}).value(), 5);
}

NamedTensors Parameters(const Problem& problem, const Options& options = {}) {
  const auto layer = UniversalTransformer().Create(problem, options, Device::kCpu, 1);
  EXPECT_TRUE(layer.ok()) << layer.status();
  NamedTensors parameters;
  for (const auto& [name, tensor] : (*layer)->parameters()) parameters[name] = tensor.Clone();
  return parameters;
}

// Makes p = sigmoid(logit), whatever the state.
void SetProbability(double logit, NamedTensors* parameters) {
  Fill(parameters->at("halting.w").view(), 0);
  Fill(parameters->at("halting.b").view(), logit);
}

NamedTensors RunOwn(const Problem& problem, const NamedTensors& inputs, const Options& options,
                    const NamedTensors& parameters, Device device = Device::kCpu, int threads = 1) {
  RunRequest request{options, device};
  // Parameters that the technique does not use are left out, such as the gate of a network that
  // never halts.
  NamedTensors own;
  const auto layer = UniversalTransformer().Create(problem, options, Device::kCpu, 1).value();
  for (const auto& [name, tensor] : layer->parameters()) own[name] = parameters.at(name).Clone();
  request.parameters = &own;
  request.threads = threads;
  auto outputs = RunTechnique(UniversalTransformer(), problem, ViewsOf(inputs), request);
  EXPECT_TRUE(outputs.ok()) << outputs.status();
  return outputs.ok() ? std::move(*outputs) : NamedTensors();
}

Tensor OutOf(const Problem& problem, const NamedTensors& inputs, const Options& options,
             const NamedTensors& parameters, Device device = Device::kCpu) {
  NamedTensors outputs = RunOwn(problem, inputs, options, parameters, device);
  return outputs.empty() ? Tensor() : std::move(outputs.at("out"));
}

double Bound(const ConstTensorView& expected) { return 2e-5 * std::max(1.0, MaxAbs(expected)); }

bool SameBits(const Tensor& a, const Tensor& b) {
  return a.shape() == b.shape() && a.dtype() == b.dtype() &&
         std::memcmp(a.raw(), b.raw(), a.bytes()) == 0;
}

const std::vector<Options>& Variants() {
  static const std::vector<Options> variants = {
      {{"steps", "6"}},
      {{"output", "basic"}, {"steps", "4"}},
      {{"output", "frozen"}, {"bias", "true"}, {"steps", "5"}},
      {{"halt_from", "after"}, {"steps", "3"}},
      {{"remainder_at_limit", "false"}, {"steps", "2"}, {"time", "learned"}},
      {{"transition", "separable_convolution"}, {"feed_forward_dim", "19"}, {"steps", "4"}},
      {{"transition", "separable_convolution"}, {"halting", "none"}, {"steps", "2"}},
      {{"halting", "none"}, {"steps", "3"}},
      {{"halted", "recomputed"}, {"steps", "5"}},
      {{"halted", "recomputed"}, {"output", "basic"}, {"halt_when", "above"}, {"steps", "4"}},
      {{"halted", "recomputed"}, {"output", "frozen"}, {"halt_from", "after"}, {"steps", "4"}},
      {{"halted", "recomputed"}, {"transition", "separable_convolution"}, {"steps", "4"}},
  };
  return variants;
}

// ---- Halting by hand ----

// Returns the states of one token after each step, S^1, S^2, ...: the last states of networks that
// never halt.
std::vector<Tensor> StatesOf(const Problem& problem, const NamedTensors& inputs,
                             const NamedTensors& parameters, int64_t steps) {
  std::vector<Tensor> states;
  for (int64_t n = 1; n <= steps; ++n) {
    states.push_back(
        OutOf(problem, inputs, {{"halting", "none"}, {"steps", std::to_string(n)}}, parameters));
  }
  return states;
}

Tensor Weighted(const std::vector<Tensor>& states, const std::vector<double>& weights) {
  Tensor sum(DType::kF32, states[0].shape());
  for (int64_t i = 0; i < sum.num_elements(); ++i) {
    double value = 0;
    for (size_t n = 0; n < weights.size(); ++n) value += weights[n] * states[n].span<float>()[i];
    sum.span<float>()[i] = static_cast<float>(value);
  }
  return sum;
}

TEST(UniversalTransformer, AThresholdOfZeroHaltsAtOnce) {
  const Problem problem = Self(2, 2, 30, 8);
  const NamedTensors inputs = Random(problem), parameters = Parameters(problem);
  const Tensor first = OutOf(problem, inputs, {{"halting", "none"}, {"steps", "1"}}, parameters);
  for (const char* output : {"accumulated", "basic", "frozen"}) {
    for (const Device device : TestedDevices()) {
      const NamedTensors outputs =
          RunOwn(problem, inputs, {{"threshold", "0"}, {"output", output}, {"steps", "3"}},
                 parameters, device);
      EXPECT_LE(MaxDifference(outputs.at("out").view(), first.view()), Bound(first.view()));
      for (const int32_t n : outputs.at("steps").span<int32_t>()) EXPECT_EQ(n, 1);
      for (const float ponder : outputs.at("ponder").span<float>()) EXPECT_EQ(ponder, 2);
    }
  }
}

TEST(UniversalTransformer, WhoNeverHaltsIsTheNetworkOfFixedSteps) {
  const Problem problem = Self(2, 2, 30, 8, /*causal=*/true);
  const NamedTensors inputs = Random(problem);
  NamedTensors parameters = Parameters(problem);
  SetProbability(-1000, &parameters);
  const Options never = {{"halting", "none"}, {"steps", "6"}};
  const Tensor fixed = OutOf(problem, inputs, never, parameters);
  for (const Device device : TestedDevices()) {
    const Tensor of_device = OutOf(problem, inputs, never, parameters, device);
    EXPECT_LE(MaxDifference(of_device.view(), fixed.view()), Bound(fixed.view()));
    for (const char* output : {"accumulated", "basic", "frozen"}) {
      const NamedTensors outputs =
          RunOwn(problem, inputs, {{"output", output}, {"steps", "6"}}, parameters, device);
      EXPECT_EQ(MaxDifference(outputs.at("out").view(), of_device.view()), 0);
      for (const int32_t n : outputs.at("steps").span<int32_t>()) EXPECT_EQ(n, 6);
      for (const float ponder : outputs.at("ponder").span<float>()) EXPECT_EQ(ponder, 7);
    }
  }
}

// With p = 0.4 in each step, 0.4 + 0.4 < 0.9, and the third step has the remainder 0.2 as its
// weight, or at a limit of two steps the second has 0.6.
TEST(UniversalTransformer, ProbabilitiesOfTwoFifthsWeighTwoFifthsTwoFifthsAndAFifth) {
  const Problem problem = Self(1, 2, 9, 8);
  const NamedTensors inputs = Random(problem);
  NamedTensors parameters = Parameters(problem);
  SetProbability(std::log(0.4 / 0.6), &parameters);
  const std::vector<Tensor> states = StatesOf(problem, inputs, parameters, 3);
  struct Case {
    Options options;
    std::vector<double> weights;
    double ponder;
  };
  const std::vector<Case> cases = {
      {{}, {0.4, 0.4, 0.2}, 3.2},
      {{{"halt_from", "after"}}, {0.4, 0.4, 0.2}, 3.2},
      // 0.4 (1 - 0.4) (1 - 0.2), 0.4 (1 - 0.2), 0.2
      {{{"output", "basic"}}, {0.192, 0.32, 0.2}, 3.2},
      {{{"output", "frozen"}}, {0, 0, 1}, 3.2},
      {{{"steps", "2"}}, {0.4, 0.6}, 2.6},
      {{{"steps", "2"}, {"remainder_at_limit", "false"}}, {0.4, 0.4}, 2},
      {{{"steps", "3"}, {"remainder_at_limit", "false"}}, {0.4, 0.4, 0.2}, 3.2},
  };
  for (Case one : cases) {
    one.options["threshold"] = "0.9";
    one.options.try_emplace("steps", "5");
    const Tensor expected = Weighted(states, one.weights);
    for (const Device device : TestedDevices()) {
      const NamedTensors outputs = RunOwn(problem, inputs, one.options, parameters, device);
      EXPECT_LE(MaxDifference(outputs.at("out").view(), expected.view()), Bound(expected.view()))
          << ToString(one.options) << " " << Name(device);
      for (const float ponder : outputs.at("ponder").span<float>()) {
        EXPECT_NEAR(ponder, one.ponder, 1e-6) << ToString(one.options);
      }
    }
  }
}

// There is one token, whose probabilities are 0.3, 0.4 and 0.9: the state before step n has only
// its time, of which w picks a channel that the norms cannot reach.
TEST(UniversalTransformer, AMixOfThreeStatesWeighsThemAsItsProductsSay) {
  const Problem problem = Self(1, 1, 1, 4);
  NamedTensors inputs = Random(problem);
  const Options options = {{"output", "basic"}, {"time", "learned"}, {"steps", "6"}};
  NamedTensors parameters = Parameters(problem, options);
  // Whatever the state is, ff_norm leaves 0 in channel 3, which then holds x, 0, 0 plus the time.
  *parameters["ff_norm.gamma"].view().MutableAt<float>(3) = 0;
  *inputs["x"].view().MutableAt<float>(0, 0, 3) = 0;
  Fill(parameters["halting.w"].view(), 0);
  *parameters["halting.w"].view().MutableAt<float>(3) = 1;
  Fill(parameters["halting.b"].view(), 0);
  const float position = 1;  // cos 0
  const double probabilities[] = {0.3, 0.4, 0.9};
  for (int64_t n = 0; n < 3; ++n) {
    *parameters["t"].view().MutableAt<float>(n, 3) =
        static_cast<float>(std::log(probabilities[n] / (1 - probabilities[n]))) - position;
  }
  std::vector<Tensor> states;
  for (const char* steps : {"1", "2", "3"}) {
    Options fixed = {{"halting", "none"}, {"time", "learned"}, {"steps", steps}};
    NamedTensors of_steps;
    for (const auto& [name, tensor] : parameters) of_steps[name] = tensor.Clone();
    of_steps["t"] = Tensor(DType::kF32, {steps[0] - '0', 4});
    CopyElements(Slice(parameters["t"].view(), 0, 0, steps[0] - '0'), of_steps["t"].view());
    states.push_back(OutOf(problem, inputs, fixed, of_steps));
  }
  const Tensor expected = Weighted(states, {0.126, 0.28, 0.3});  // .3 .6 .7, .4 .7, .3
  for (const Device device : TestedDevices()) {
    const NamedTensors outputs = RunOwn(problem, inputs, options, parameters, device);
    EXPECT_EQ(outputs.at("steps").span<int32_t>()[0], 3);
    EXPECT_NEAR(outputs.at("ponder").span<float>()[0], 3.3, 1e-6);
    EXPECT_LE(MaxDifference(outputs.at("out").view(), expected.view()), 1e-5);
  }
}

// If hidden states are all ones, the weighted sum is the sum of the weights.
TEST(UniversalTransformer, WeightsSumToOne) {
  const Problem problem = Self(2, 2, 40, 8);
  const NamedTensors inputs = Random(problem);
  NamedTensors parameters = Parameters(problem);
  Fill(parameters["ff_norm.gamma"].view(), 0);
  Fill(parameters["ff_norm.beta"].view(), 1);
  for (const char* from : {"before", "after"}) {
    for (const char* steps : {"2", "8"}) {
      const Tensor out =
          OutOf(problem, inputs, {{"halt_from", from}, {"steps", steps}}, parameters);
      for (const float value : out.span<float>()) EXPECT_NEAR(value, 1, 1e-6);
    }
  }
}

TEST(UniversalTransformer, PaddingNeverPondersAndIsNotSeen) {
  const Problem problem = Self(2, 2, 40, 8);
  NamedTensors inputs = Random(problem);
  const NamedTensors parameters = Parameters(problem);
  Tensor mask(DType::kU8, {2, 40});
  Fill(mask.view(), 1);
  Fill(Slice(Slice(mask.view(), 0, 0, 1), 1, 25, 15), 0);
  inputs["key_mask"] = std::move(mask);
  Problem shorter = problem;
  shorter.batch = 1;
  shorter.query_tokens = shorter.kv_tokens = 25;
  NamedTensors alone;
  alone["x"] = Tensor(DType::kF32, {1, 25, 16});
  CopyElements(Slice(Slice(inputs["x"].view(), 0, 0, 1), 1, 0, 25), alone["x"].view());
  for (int64_t t = 25; t < 40; ++t) *inputs["x"].view().MutableAt<float>(0, t, 3) = NAN;
  const auto expect = [&](const Options& options, const NamedTensors& own) {
    for (const Device device : TestedDevices()) {
      const NamedTensors outputs = RunOwn(problem, inputs, options, own, device);
      const Tensor expected = OutOf(shorter, alone, options, own, device);
      const ConstTensorView row = Slice(outputs.at("out").view(), 0, 0, 1);
      EXPECT_LE(MaxDifference(Slice(row, 1, 0, 25), expected.view()), Bound(expected.view()))
          << ToString(options) << " " << Name(device);
      EXPECT_EQ(MaxAbs(Slice(row, 1, 25, 15)), 0);
      if (outputs.count("ponder") == 0) continue;
      for (int64_t t = 25; t < 40; ++t) {
        EXPECT_EQ(*outputs.at("ponder").view().At<float>(0, t), 0);
        EXPECT_EQ(*outputs.at("steps").view().At<int32_t>(0, t), 0);
      }
    }
  };
  for (const Options& options : Variants()) {
    NamedTensors own = Parameters(problem, options);
    expect(options, own);
    if (own.count("halting.b") == 0) continue;
    Fill(own["halting.b"].view(), 4);  // many tokens halt in the first step
    expect(options, own);
  }
}

// ---- The network ----

TEST(UniversalTransformer, WithoutHaltingItIsAStackOfEqualLayers) {
  // The reference is a layer of encoder_decoder with the encoding added before it, three times.
  const Problem problem = Self(2, 3, 50, 8);
  const Options options = {{"halting", "none"}, {"steps", "3"}, {"bias", "true"}};
  const NamedTensors inputs = Random(problem), parameters = Parameters(problem, options);
  NamedTensors of_layer;
  for (const auto& [name, tensor] : parameters) {
    of_layer["encoder0." + name] = tensor.Clone();
  }
  Tensor h = inputs.at("x").Clone();
  for (int64_t n = 1; n <= 3; ++n) {
    const Tensor positions = Sinusoids(0, 50, 24, {}).value(),
                 time = Sinusoids(n, 1, 24, {}).value();
    for (int64_t i = 0; i < h.num_elements(); ++i) {
      h.span<float>()[i] += positions.span<float>()[i % (50 * 24)] + time.span<float>()[i % 24];
    }
    RunRequest request{{{"layers", "1"}}};
    request.parameters = &of_layer;
    h = std::move(
        RunTechnique(encoder_decoder::EncoderDecoder(), problem, {{"x", h.view()}}, request)
            ->at("out"));
  }
  const Tensor out = OutOf(problem, inputs, options, parameters);
  EXPECT_LE(MaxDifference(out.view(), h.view()), Bound(h.view()));
}

// The reference runs one step at a time, computes all tokens and discards those of halted tokens.
class UniversalTransformerOn : public testing::TestWithParam<Device> {};
INSTANTIATE_TEST_SUITE_P(, UniversalTransformerOn, testing::ValuesIn(TestedDevices()),
                         [](const auto& device) { return std::string(Name(device.param)); });

TEST_P(UniversalTransformerOn, ComputingOnlyTheTokensThatGoOnChangesNoBit) {
  for (const bool causal : {false, true}) {
    const Problem problem = Self(2, 2, 150, 8, causal);
    const NamedTensors inputs = Random(problem);
    NamedTensors parameters = Parameters(problem);
    Fill(parameters["halting.b"].view(), -1);  // 2 to 6 steps
    const NamedTensors outputs =
        RunOwn(problem, inputs, {{"output", "frozen"}, {"steps", "6"}}, parameters, GetParam());
    const auto steps = outputs.at("steps").span<int32_t>();
    Tensor h = inputs.at("x").Clone();
    for (int32_t n = 1; n <= 6; ++n) {
      NamedTensors read;
      read["x"] = h.Clone();
      const Tensor made = OutOf(
          problem, read, {{"halting", "none"}, {"steps", "1"}, {"first_step", std::to_string(n)}},
          parameters, GetParam());
      for (int64_t i = 0; i < h.num_elements(); ++i) {
        if (n <= steps[i / 16]) h.span<float>()[i] = made.span<float>()[i];
      }
    }
    EXPECT_TRUE(SameBits(outputs.at("out"), h)) << causal;
    EXPECT_LT(*std::min_element(steps.begin(), steps.end()), 4);
    EXPECT_EQ(*std::max_element(steps.begin(), steps.end()), 6);
  }
}

// The test compares the simulator's loads and stores with the FLOPs of the definition. Channel 0 of
// the input decides: tokens that have 100 there halt after the first step, anywhere in the text,
// others never.
TEST(UniversalTransformer, InTheSimulatorTheWorkFallsWithTheTokensThatHalt) {
  if (KernelDevice() != Device::kSimulator) GTEST_SKIP() << "the simulator alone counts accesses";
  for (const char* transition : {"feed_forward", "separable_convolution"}) {
    const Problem problem = Self(1, 2, 256, 32);
    const Options options = {{"steps", "3"}, {"transition", transition}};
    NamedTensors inputs = Random(problem), parameters = Parameters(problem, options);
    Fill(parameters["halting.w"].view(), 0);
    *parameters["halting.w"].view().MutableAt<float>(0) = 1;
    Fill(parameters["halting.b"].view(), -50);
    auto layer = UniversalTransformer().Create(problem, options, KernelDevice(), 1).value();
    ASSERT_EQ(layer->SetParameters(parameters), absl::OkStatus());
    struct Work {
      double accesses;
      double saved_flops;
    };
    const auto run = [&](int64_t one_in) {
      for (int64_t t = 0; t < 256; ++t) {
        *inputs["x"].view().MutableAt<float>(0, t, 0) = t % one_in == 0 ? 0 : 100;
      }
      const int64_t before = cuda_simulator::TotalCounts().accesses;
      const auto outputs = RunCudaLayer(*layer, KernelDevice(), ViewsOf(inputs));
      EXPECT_TRUE(outputs.ok()) << outputs.status();
      EXPECT_DOUBLE_EQ(layer->statistics().at("mean_steps"), 1 + 2 / static_cast<double>(one_in));
      return Work{static_cast<double>(cuda_simulator::TotalCounts().accesses - before),
                  layer->statistics().at("saved_flops")};
    };
    const double of_all = run(1).accesses;
    for (const int64_t one_in : {2, 4}) {
      const Work work = run(one_in);
      EXPECT_GE((1 - work.accesses / of_all) / work.saved_flops, 0.6)
          << transition << ", one token in " << one_in << " goes on: " << 1 - work.accesses / of_all
          << " of the accesses saved, " << work.saved_flops << " of the FLOPs";
    }
  }
}

// Likewise of a Run and its backward pass, less those of the Run alone. Where every second token halts
// after the first of three steps, a third of the tokens of all steps have halted. Compilers differ in
// accesses by a thousandth; the rest of the work is the kernels' own.
TEST(UniversalTransformer, InTheSimulatorTheWorkOfABackwardPassFallsWithTheTokensThatHalted) {
  if (KernelDevice() != Device::kSimulator) GTEST_SKIP() << "the simulator alone counts accesses";
  const Problem problem = Self(1, 2, 256, 32);
  const Options options = {{"steps", "3"}};
  NamedTensors inputs = Random(problem), parameters = Parameters(problem, options);
  Fill(parameters["halting.w"].view(), 0);
  *parameters["halting.w"].view().MutableAt<float>(0) = 1;
  Fill(parameters["halting.b"].view(), -50);
  NamedTensors of_outputs;
  FillNormal(&(of_outputs["out"] = Tensor(DType::kF32, inputs.at("x").shape())), 7, "out");
  RunRequest request{options, KernelDevice()};
  request.parameters = &parameters;
  const auto accesses_of = [](const auto& run) {
    const int64_t before = cuda_simulator::TotalCounts().accesses;
    const absl::Status status = run();
    EXPECT_TRUE(status.ok()) << status;
    return static_cast<double>(cuda_simulator::TotalCounts().accesses - before);
  };
  std::string of_kernels;
  const auto work = [&](int64_t one_in) {
    for (int64_t t = 0; t < 256; ++t) {
      *inputs["x"].view().MutableAt<float>(0, t, 0) = t % one_in == 0 ? 0 : 100;
    }
    const UniversalTransformer technique;
    double of_both = 0;
    of_kernels = WorkOf([&] {
      of_both = accesses_of([&] {
        return BackwardOfTechnique(technique, problem, ViewsOf(inputs), of_outputs, request)
            .status();
      });
    });
    const double of_run = accesses_of(
        [&] { return RunTechnique(technique, problem, ViewsOf(inputs), request).status(); });
    return of_both - of_run;
  };
  const double of_all = work(1);
  EXPECT_LE(work(2) / of_all, 0.7);
  EXPECT_EQ(of_kernels, "201 launches, 5223 blocks, 3398 barriers, 173600 collectives");
}

TEST(UniversalTransformer, HaltedTokensStayAndAreStillSeen) {
  // Token 0 halts after one step, the others never: without it their results are different.
  const Problem problem = Self(1, 2, 12, 8);
  NamedTensors inputs = Random(problem);
  const Options options = {{"output", "frozen"}, {"steps", "4"}};
  NamedTensors parameters = Parameters(problem, options);
  // Channel 0 decides: 100 in token 0, and nothing but position and time elsewhere.
  Fill(parameters["halting.w"].view(), 0);
  *parameters["halting.w"].view().MutableAt<float>(0) = 1;
  Fill(parameters["halting.b"].view(), -50);
  *inputs["x"].view().MutableAt<float>(0, 0, 0) = 100;
  const Tensor first = OutOf(problem, inputs, {{"halting", "none"}, {"steps", "1"}}, parameters);
  for (const Device device : TestedDevices()) {
    const NamedTensors outputs = RunOwn(problem, inputs, options, parameters, device);
    const auto steps = outputs.at("steps").span<int32_t>();
    EXPECT_EQ(steps[0], 1);
    for (int64_t t = 1; t < 12; ++t) EXPECT_EQ(steps[t], 4);
    EXPECT_LE(MaxDifference(Slice(outputs.at("out").view(), 1, 0, 1), Slice(first.view(), 1, 0, 1)),
              Bound(first.view()));
    NamedTensors masked = Random(problem);
    masked["x"] = inputs.at("x").Clone();
    Tensor mask(DType::kU8, {1, 12});
    Fill(mask.view(), 1);
    *mask.view().MutableAt<uint8_t>(0, 0) = 0;
    masked["key_mask"] = std::move(mask);
    const Tensor without = OutOf(problem, masked, options, parameters, device);
    EXPECT_GT(
        MaxDifference(Slice(outputs.at("out").view(), 1, 1, 11), Slice(without.view(), 1, 1, 11)),
        1e-2);
  }
}

// p = 1/2, exactly: the sum is 1 after two steps, which is not above it.
TEST(UniversalTransformer, ASumThatIsTheThresholdReachesItButIsNotAboveIt) {
  const Problem problem = Self(1, 2, 6, 8);
  const NamedTensors inputs = Random(problem);
  NamedTensors parameters = Parameters(problem);
  SetProbability(0, &parameters);
  const std::vector<Tensor> states = StatesOf(problem, inputs, parameters, 3);
  for (const Device device : TestedDevices()) {
    for (const char* from : {"before", "after"}) {
      Options options = {{"threshold", "1"}, {"steps", "4"}, {"halt_from", from}};
      for (const char* when : {"at_least", "above"}) {
        options["halt_when"] = when;
        const NamedTensors outputs = RunOwn(problem, inputs, options, parameters, device);
        const bool above = std::strcmp(when, "above") == 0;
        for (const int32_t n : outputs.at("steps").span<int32_t>()) EXPECT_EQ(n, above ? 3 : 2);
        // The remainder of the third step is 0.
        for (const float ponder : outputs.at("ponder").span<float>()) {
          EXPECT_EQ(ponder, above ? 3 : 2.5);
        }
        const Tensor expected = Weighted(states, {0.5, 0.5, 0});
        EXPECT_LE(MaxDifference(outputs.at("out").view(), expected.view()), Bound(expected.view()));
        RunRequest request{options};
        request.parameters = &parameters;
        const NamedTensors defined =
            DefineTechnique(UniversalTransformer(), problem, ViewsOf(inputs), request).value();
        EXPECT_EQ(defined.at("steps").span<double>()[0], above ? 3 : 2);
      }
    }
  }
}

// Token 0 halts after one step, the others never. The states of all tokens are those of a network
// that never halts, and token 0's output is its first.
TEST(UniversalTransformer, RecomputedTokensChangeForTheOthersButNotInTheOutput) {
  const Problem problem = Self(2, 2, 12, 8);
  NamedTensors inputs = Random(problem);
  const Options never = {{"halting", "none"}, {"steps", "4"}};
  const Options options = {{"output", "frozen"}, {"steps", "4"}, {"halted", "recomputed"}};
  NamedTensors parameters = Parameters(problem, options);
  Fill(parameters["halting.w"].view(), 0);
  *parameters["halting.w"].view().MutableAt<float>(0) = 1;
  Fill(parameters["halting.b"].view(), -50);
  for (const int64_t b : {0, 1}) *inputs["x"].view().MutableAt<float>(b, 0, 0) = 100;
  const Tensor first = OutOf(problem, inputs, {{"halting", "none"}, {"steps", "1"}}, parameters);
  const Tensor fixed = OutOf(problem, inputs, never, parameters);
  for (const Device device : TestedDevices()) {
    const Tensor out = OutOf(problem, inputs, options, parameters, device);
    EXPECT_LE(MaxDifference(Slice(out.view(), 1, 0, 1), Slice(first.view(), 1, 0, 1)),
              Bound(first.view()));
    EXPECT_LE(MaxDifference(Slice(out.view(), 1, 1, 11), Slice(fixed.view(), 1, 1, 11)),
              Bound(fixed.view()));
    Options copied = options;
    copied["halted"] = "copied";
    const Tensor other = OutOf(problem, inputs, copied, parameters, device);
    EXPECT_GT(MaxDifference(Slice(out.view(), 1, 1, 11), Slice(other.view(), 1, 1, 11)), 1e-3);
  }
}

TEST(UniversalTransformer, AConvolutionOfItsOwnTokenAloneIsTheFeedForwardTransition) {
  for (const bool causal : {false, true}) {
    const Problem problem = Self(2, 2, 30, 8, causal);
    const NamedTensors inputs = Random(problem);
    NamedTensors parameters = Parameters(problem, {{"transition", "separable_convolution"}});
    for (const char* name : {"ff.k1", "ff.k2"}) {
      Tensor& kernel = parameters[name];
      Fill(kernel.view(), 0);
      Fill(Slice(kernel.view(), 0, causal ? kernel.dim(0) - 1 : kernel.dim(0) / 2, 1), 1);
    }
    const Tensor expected = OutOf(problem, inputs, {}, parameters);
    for (const Device device : TestedDevices()) {
      const Tensor out =
          OutOf(problem, inputs, {{"transition", "separable_convolution"}}, parameters, device);
      EXPECT_LE(MaxDifference(out.view(), expected.view()), Bound(expected.view()));
    }
  }
}

// A warp's lanes have several channels of the wide problem, some one more than others.
TEST(UniversalTransformer, EveryVariantMatchesTheDefinition) {
  Problem grouped = Self(2, 4, 33, 4);
  grouped.kv_heads = 2;
  grouped.value_dim = 6;
  Problem causal = grouped;
  causal.causal = true;
  const Problem wide = Self(1, 3, 9, 14);
  for (const Problem& problem : {grouped, causal, wide}) {
    const NamedTensors inputs = Random(problem);
    for (const Options& options : Variants()) {
      const NamedTensors parameters = Parameters(problem, options);
      RunRequest request{options};
      request.parameters = &parameters;
      for (const Device device : TestedDevices()) {
        const NamedTensors outputs = RunOwn(problem, inputs, options, parameters, device, 3);
        DefinitionRequest definition;
        definition.computed = &outputs;
        const NamedTensors expected =
            DefineTechnique(UniversalTransformer(), problem, ViewsOf(inputs), request, definition)
                .value();
        for (const auto& [name, tensor] : outputs) {
          if (tensor.dtype() != DType::kF32) continue;
          EXPECT_LE(MaxDifference(tensor.view(), expected.at(name).view()),
                    Bound(expected.at(name).view()))
              << name << ", " << ToString(options) << ", " << Name(device);
        }
      }
    }
  }
}

// ---- The definition's choice, cost, statistics ----

TEST(UniversalTransformer, TheDefinitionFollowsALayerOnlyWhereTheThresholdIsNear) {
  const Problem problem = Self(1, 2, 5, 8);
  const NamedTensors inputs = Random(problem);
  const Options options = {{"threshold", "0.5"}};
  NamedTensors parameters = Parameters(problem, options);
  RunRequest request{options};
  request.parameters = &parameters;
  const auto steps_of = [&](double p, int32_t computed) {
    SetProbability(std::log(p / (1 - p)), &parameters);
    NamedTensors run;
    run["steps"] = Tensor(DType::kI32, {1, 5});
    for (int32_t& n : run["steps"].span<int32_t>()) n = computed;
    DefinitionRequest definition;
    definition.computed = &run;
    return DefineTechnique(UniversalTransformer(), problem, ViewsOf(inputs), request, definition)
        ->at("steps")
        .span<double>()[0];
  };
  EXPECT_EQ(steps_of(0.50001, 1), 1);
  EXPECT_EQ(steps_of(0.50001, 2), 2);
  EXPECT_EQ(steps_of(0.49999, 1), 1);
  EXPECT_EQ(steps_of(0.49999, 2), 2);
  EXPECT_EQ(steps_of(0.501, 2), 1);
  EXPECT_EQ(steps_of(0.499, 1), 2);
}

TEST(UniversalTransformer, FlopsAndStatisticsAreThoseOfTheStepsTaken) {
  const Problem problem = Self(1, 1, 3, 2);
  UniversalTransformerOptions options;
  options.steps = 4;
  // A step is 2 x 2 x (2 + 2) for queries and output, 4 x 2 x 8 for the transition, 2 x 2 for the
  // gate; a pair is 2 x (2 + 2). A key and value are 2 x 2 x 4, computed in steps 1 and 2 for the
  // token that halts after the first, in 3 for the one that takes 2, as for the third.
  const double step = 16 + 64 + 4, pair = 8, key = 16;
  EXPECT_EQ(UniversalTransformerFlops(problem, options, {1, 2, 3}),
            6 * (step + 3 * pair) + (2 + 3 + 3) * key);
  EXPECT_EQ(UniversalTransformerFlops(problem, options, {1, 0, 3}),
            4 * (step + 2 * pair) + (2 + 3) * key);
  Problem causal = problem;
  causal.causal = true;
  EXPECT_EQ(UniversalTransformerFlops(causal, options, {1, 2, 3}),
            6 * step + (1 + 2 * 2 + 3 * 3) * pair + (2 + 3 + 3) * key);

  // Recomputed, all tokens take 3 steps, of which each has its gate in its own.
  options.halted = UniversalTransformerOptions::Halted::kRecomputed;
  EXPECT_EQ(UniversalTransformerFlops(problem, options, {1, 2, 3}),
            9 * (step - 4 + 3 * pair + key) + 6 * 4);

  const NamedTensors inputs = Random(problem);
  for (const Device device : TestedDevices()) {
    const auto layer =
        UniversalTransformer().Create(problem, {{"threshold", "0"}, {"steps", "4"}}, device, 1);
    EXPECT_FALSE((*layer)->cost().flops.has_value());
    const auto outputs = device == Device::kCpu ? RunLayer(**layer, ViewsOf(inputs))
                                                : RunCudaLayer(**layer, device, ViewsOf(inputs));
    ASSERT_TRUE(outputs.ok()) << outputs.status();
    const double taken = 3 * (step + 3 * pair + key), fixed = 12 * (step - 4 + 3 * pair + key);
    EXPECT_EQ((*layer)->cost().flops, taken);
    const auto statistics = (*layer)->statistics();
    EXPECT_EQ(statistics.at("mean_steps"), 1);
    EXPECT_EQ(statistics.at("max_steps"), 1);
    EXPECT_EQ(statistics.at("mean_ponder"), 2);
    EXPECT_DOUBLE_EQ(statistics.at("saved_flops"), 1 - taken / fixed);
  }
}

TEST(UniversalTransformer, KeysOfOtherTokensAreRefused) {
  Problem problem = Self(1, 1, 4, 4);
  problem.kv_tokens = 5;
  EXPECT_EQ(UniversalTransformer().Create(problem, {}, Device::kCpu, 1).status().message(),
            "keys are of the same tokens as queries: kv_tokens is 5; allowed is query_tokens, 4");
}

// ---- Other implementations' results ----

NamedTensors ParametersIn(const SafetensorsFile& file, const Problem& problem,
                          const Options& options) {
  NamedTensors parameters = Parameters(problem, options);
  for (auto& [name, tensor] : parameters) {
    CopyElements(file.tensors.at(name).view(), tensor.view());
  }
  return parameters;
}

// The file has no token near the threshold, so that N is the same everywhere.
void ExpectOutputs(const SafetensorsFile& file, const NamedTensors& outputs, Device device) {
  for (const char* name : {"out", "ponder"}) {
    EXPECT_LE(MaxDifference(outputs.at(name).view(), file.tensors.at(name).view()),
              Bound(file.tensors.at(name).view()))
        << name << " " << Name(device);
  }
  EXPECT_EQ(MaxDifference(outputs.at("steps").view(), file.tensors.at("steps").view()), 0);
}

void ExpectMatchesPort(const std::string& name, const Options& more) {
  const SafetensorsFile file =
      GoldenFile("adaptive/universal_transformer/testdata/" + name + ".safetensors");
  const int64_t heads = std::stoll(file.metadata.at("heads"));
  const ConstTensorView x = file.tensors.at("x").view();
  const Problem problem = Self(x.dim(0), heads, x.dim(1), x.dim(2) / heads);
  Options options = {{"steps", "5"},      {"threshold", "0.9"},
                     {"output", "basic"}, {"remainder_at_limit", "false"},
                     {"first_step", "0"}, {"layout", "concatenated"},
                     {"bias", "true"},    {"frequencies", "inclusive"}};
  options.insert(more.begin(), more.end());
  const NamedTensors parameters = ParametersIn(file, problem, options);
  NamedTensors inputs;
  inputs["x"] = file.tensors.at("x").Clone();
  for (const Device device : TestedDevices()) {
    ExpectOutputs(file, RunOwn(problem, inputs, options, parameters, device), device);
  }
  RunRequest request{options};
  request.parameters = &parameters;
  const NamedTensors defined =
      DefineTechnique(UniversalTransformer(), problem, ViewsOf(inputs), request).value();
  for (const char* name : {"out", "ponder"}) {
    EXPECT_LE(MaxDifference(defined.at(name).view(), file.tensors.at(name).view()), 1e-12) << name;
  }
}

TEST(UniversalTransformer, MatchesThePortOfTensor2TensorWithHaltedTokensPutBack) {
  ExpectMatchesPort("basic", {});
}
TEST(UniversalTransformer, MatchesThePortOfTensor2TensorAsItIs) {
  ExpectMatchesPort("recomputed",
                    {{"halted", "recomputed"}, {"halt_when", "above"}, {"feed_forward_dim", "16"}});
}

TEST(UniversalTransformer, TheTrainedModelIsWhatItIsInPyTorch) {
  const SafetensorsFile file =
      GoldenFile("adaptive/universal_transformer/testdata/trained.safetensors");
  const SafetensorsFile model =
      GoldenFile("adaptive/universal_transformer/model/model.safetensors");
  const Problem problem = Self(3, 4, file.tensors.at("out").dim(1), 16);
  const Options options = {{"steps", "8"}};
  const NamedTensors parameters = ParametersIn(model, problem, options);
  NamedTensors inputs;
  inputs["x"] = Tensor(DType::kF32, file.tensors.at("out").shape());
  inputs["key_mask"] = Tensor(DType::kU8, file.tensors.at("key_mask").shape());
  for (int64_t r = 0; r < inputs["key_mask"].num_elements(); ++r) {
    inputs["key_mask"].span<uint8_t>()[r] =
        static_cast<uint8_t>(file.tensors.at("key_mask").span<int32_t>()[r]);
    for (int64_t c = 0; c < 64; ++c) {
      double sum = 0;
      for (int64_t part = 0; part < 2; ++part) {
        const ConstTensorView table =
            model.tensors.at(part == 0 ? "embedding.first" : "embedding.second").view();
        const int32_t digit = file.tensors.at("numbers").span<int32_t>()[2 * r + part];
        sum += table.Get(table.Offset(digit, c));
      }
      inputs["x"].span<float>()[64 * r + c] = static_cast<float>(sum);
    }
  }
  for (const Device device : TestedDevices()) {
    ExpectOutputs(file, RunOwn(problem, inputs, options, parameters, device), device);
    const Tensor fixed =
        OutOf(problem, inputs, {{"halting", "none"}, {"steps", "8"}}, parameters, device);
    EXPECT_LE(MaxDifference(fixed.view(), file.tensors.at("fixed").view()),
              Bound(file.tensors.at("fixed").view()));
  }
}

// ---- The backward pass ----

TEST(UniversalTransformer, GradientsAreThoseOfTheDefinitionInEveryVariant) {
  for (const bool causal : {false, true}) {
    const Problem problem = Self(2, 2, 13, 8, causal);
    for (const Options& options : Variants()) {
      SCOPED_TRACE(ToString(TechniqueSpec{"universal_transformer", options}));
      const auto steps = options.find("steps");
      GradientRequest request{options};
      request.roundings = (steps == options.end() ? 2 : std::stod(steps->second)) *
                          (2 * AttentionRoundings(problem) + 26.0 * 16);
      request.inputs["key_mask"] = Tensor(DType::kU8, {2, 13});
      Fill(request.inputs.at("key_mask").view(), 1);
      for (const int64_t padding : {2, 11, 12}) {
        *request.inputs.at("key_mask").view().MutableAt<uint8_t>(0, padding) = 0;
      }
      ExpectGradientsOfDefinition(UniversalTransformer(), problem, request);
    }
  }
}

// Returns what a Run and its Backward write on a device, of tokens that halt at different steps.
absl::StatusOr<RunAndGradients> BackwardOn(Device device, const Problem& problem,
                                           const Options& options, const NamedTensors& inputs,
                                           const NamedTensors& output_gradients) {
  NamedTensors parameters = Parameters(problem, options);
  if (parameters.count("halting.w") > 0) {
    for (float& weight : parameters.at("halting.w").span<float>()) weight *= 3;
    Fill(parameters.at("halting.b").view(), -0.3);
  }
  RunRequest request{options, device};
  request.parameters = &parameters;
  return BackwardOfTechnique(UniversalTransformer(), problem, ViewsOf(inputs), output_gradients,
                             request);
}

// Padding holds NaN, in the input and in the gradient of the output.
TEST(UniversalTransformer, GradientsOfTokensThatHaltAtDifferentStepsAreTheCpusOnEveryDevice) {
  int of_three_steps = 0;
  for (const bool causal : {false, true}) {
    Problem problem = Self(2, 4, 13, 4, causal);
    problem.kv_heads = 2;
    problem.value_dim = 6;
    for (Options options : Variants()) {
      options.emplace("threshold", causal ? "0.9" : "0.7");
      SCOPED_TRACE(ToString(options));
      NamedTensors inputs = Random(problem);
      inputs["key_mask"] = Tensor(DType::kU8, {2, 13});
      Fill(inputs.at("key_mask").view(), 1);
      const auto layer = UniversalTransformer().Create(problem, options, Device::kCpu, 1).value();
      NamedTensors of_outputs = RandomOutputGradients(*layer, 7);
      for (const int64_t padding : {2, 11, 12}) {
        *inputs.at("key_mask").view().MutableAt<uint8_t>(0, padding) = 0;
        for (int64_t c = 0; c < problem.model_dim(); ++c) {
          *inputs.at("x").view().MutableAt<float>(0, padding, c) = std::nanf("");
          *of_outputs.at("out").view().MutableAt<float>(0, padding, c) = std::nanf("");
        }
      }
      const auto expected = BackwardOn(Device::kCpu, problem, options, inputs, of_outputs);
      const auto found = BackwardOn(KernelDevice(), problem, options, inputs, of_outputs);
      const auto again = BackwardOn(KernelDevice(), problem, options, inputs, of_outputs);
      ASSERT_TRUE(expected.ok()) << expected.status();
      ASSERT_TRUE(found.ok()) << found.status();
      ASSERT_TRUE(again.ok()) << again.status();
      if (expected->outputs.count("steps") > 0) {
        const Tensor& steps = expected->outputs.at("steps");
        EXPECT_TRUE(SameBits(found->outputs.at("steps"), steps));
        const auto taken = steps.span<int32_t>();
        of_three_steps += std::set<int32_t>(taken.begin(), taken.end()).size() > 3 ? 1 : 0;
      }
      const auto compare = [&](const NamedTensors& of_cpu, const NamedTensors& of_device,
                               const NamedTensors& of_again) {
        ASSERT_EQ(of_device.size(), of_cpu.size());
        for (const auto& [name, gradient] : of_cpu) {
          // That of the keys' bias is a sum that cancels, of what that of their matrix sums.
          const Tensor& scale = name == "attention.b_k" ? of_cpu.at("attention.w_k") : gradient;
          for (const float value : gradient.span<float>())
            ASSERT_TRUE(std::isfinite(value)) << name;
          EXPECT_LE(MaxDifference(of_device.at(name).view(), gradient.view()),
                    2 * Bound(scale.view()))
              << name;
          EXPECT_TRUE(SameBits(of_device.at(name), of_again.at(name))) << name;
        }
      };
      compare(expected->inputs, found->inputs, again->inputs);
      compare(expected->parameters, found->parameters, again->parameters);
    }
  }
  EXPECT_GE(of_three_steps, 12);  // of 20 that halt
}

TEST(UniversalTransformer, OfThePonderAloneTheGradientsAreTheCpusOnEveryDevice) {
  const Problem problem = Self(2, 2, 9, 8);
  for (const char* halt_from : {"before", "after"}) {
    const Options options = {{"steps", "4"}, {"halt_from", halt_from}, {"output", "basic"}};
    NamedTensors of_ponder;
    of_ponder["ponder"] = Tensor(DType::kF32, {2, 9});
    FillNormal(&of_ponder["ponder"], 7, "gradient");
    const NamedTensors inputs = Random(problem);
    const auto expected = BackwardOn(Device::kCpu, problem, options, inputs, of_ponder);
    const auto found = BackwardOn(KernelDevice(), problem, options, inputs, of_ponder);
    ASSERT_TRUE(expected.ok()) << expected.status();
    ASSERT_TRUE(found.ok()) << found.status();
    for (const auto& [name, gradient] : expected->parameters) {
      EXPECT_LE(MaxDifference(found->parameters.at(name).view(), gradient.view()),
                2 * Fp32Bound(gradient.view()))
          << name << ", " << halt_from;
    }
    const Tensor& of_x = expected->inputs.at("x");
    EXPECT_GT(MaxAbs(of_x.view()), 0);
    EXPECT_LE(MaxDifference(found->inputs.at("x").view(), of_x.view()), 2 * Fp32Bound(of_x.view()));
  }
}

// A row's weights sum to 1, so that db_v = sum of dv = sum of dc = W_o db_o, also where all scores are
// near 4096, and the log-sum-exp is rounded to 2^-12.
TEST(UniversalTransformer, GradientsOfWeightsThatSumToOneKnowTheLogSumExpBeyondItsRounding) {
  const Problem problem = Self(1, 2, 70, 8);
  const Options options = {{"halting", "none"}, {"steps", "1"}, {"bias", "true"}};
  NamedTensors parameters = Parameters(problem, options);
  const double bias = std::sqrt(4096 / std::sqrt(8.0));
  for (const char* name : {"attention.b_q", "attention.b_k"}) {
    Fill(parameters.at(name).view(), bias);
  }
  NamedTensors of_out;
  of_out["out"] = Tensor(DType::kF32, {1, 70, 16});
  FillNormal(&of_out["out"], 7, "gradient");
  for (const Device device : TestedDevices()) {
    RunRequest request{options, device};
    request.parameters = &parameters;
    const NamedTensors inputs = Random(problem);
    const auto pass =
        BackwardOfTechnique(UniversalTransformer(), problem, ViewsOf(inputs), of_out, request);
    ASSERT_TRUE(pass.ok()) << pass.status();
    const auto of_b_o = pass->parameters.at("attention.b_o").span<float>();
    const auto w_o = parameters.at("attention.w_o").span<float>();
    Tensor expected(DType::kF64, {16});
    for (int64_t r = 0; r < 16; ++r) {
      double sum = 0;
      for (int64_t c = 0; c < 16; ++c) sum += static_cast<double>(w_o[r * 16 + c]) * of_b_o[c];
      expected.span<double>()[r] = sum;
    }
    EXPECT_LE(MaxDifference(pass->parameters.at("attention.b_v").view(), expected.view()),
              Fp32Bound(expected.view()))
        << Name(device);
  }
}

// Without halting, 2 equal layers: what is kept is a state a step.
TEST(UniversalTransformer, AStepMoreKeepsOneState) {
  const Problem problem = Self(2, 2, 40, 8);
  const auto kept = [&](const char* steps) {
    return UniversalTransformer()
        .Create(problem, {{"steps", steps}}, Device::kCpu, 1)
        .value()
        ->kept_bytes();
  };
  EXPECT_EQ(kept("6") - kept("5"), sizeof(float) * 2 * 40 * 16);
}

}  // namespace
}  // namespace tfb::universal_transformer
