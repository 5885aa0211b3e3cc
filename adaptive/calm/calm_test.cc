// Tests CALM against its definition, against Transformer-XL where no token leaves, and by hand.
//
// Tolerance: as in transformer_xl_test.cc, for twice as many sublayers as layers and the exit's norm.
#include "adaptive/calm/calm.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "adaptive/calm/confidence_rule.h"
#include "core/backward_testing.h"
#include "core/cuda/device_array.h"
#include "core/cuda/simulator/simulator.h"
#include "core/cuda/work_testing.h"
#include "core/layers/exits/exit_probabilities.h"
#include "core/layers/layer_norm.h"
#include "core/random.h"
#include "core/testing.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "memory/transformer_xl/stack_testing.h"
#include "memory/transformer_xl/transformer_xl.h"

namespace tfb::calm {
namespace {

using transformer_xl::CausalProblem;
using transformer_xl::PerturbedParameters;

using ::testing::Each;
using ::testing::ElementsAre;

NamedTensors InputsFor(const Problem& problem) {
  NamedTensors inputs;
  inputs["x"] = transformer_xl::RandomHidden(problem);
  return inputs;
}

NamedTensors RunCalm(const Problem& problem, const NamedTensors& inputs,
                     const NamedTensors& parameters, const Options& options,
                     Device device = Device::kCpu) {
  auto outputs =
      RunTechnique(Calm(), problem, ViewsOf(inputs), {options, device, 1, &parameters, 2});
  EXPECT_TRUE(outputs.ok()) << outputs.status();
  return *std::move(outputs);
}

std::vector<int> ExitsOf(const NamedTensors& outputs) {
  const auto exits = outputs.at("exits").span<int32_t>();
  return std::vector<int>(exits.begin(), exits.end());
}

void ExpectEqualsDefinition(const Problem& problem, const NamedTensors& inputs,
                            const NamedTensors& parameters, const Options& options,
                            const NamedTensors& found) {
  DefinitionRequest request;
  request.computed = &found;
  const auto expected = DefineTechnique(Calm(), problem, ViewsOf(inputs),
                                        {options, Device::kCpu, 1, &parameters}, request);
  ASSERT_TRUE(expected.ok()) << expected.status();
  const ConstTensorView out = expected->at("out").view();
  EXPECT_LE(MaxDifference(found.at("out").view(), out), std::sqrt(8.0) * Fp32Bound(out));
  for (int64_t n = 0; n < found.at("exits").num_elements(); ++n) {
    ASSERT_EQ(found.at("exits").view().Get(n), expected->at("exits").view().Get(n)) << n;
  }
  if (found.count(kConfidenceLogits) == 0) return;
  // The norms of the weights are near 1, so that a logit is of the size of a state's channel.
  EXPECT_LE(
      MaxDifference(found.at(kConfidenceLogits).view(), expected->at(kConfidenceLogits).view()),
      std::sqrt(8.0) * Fp32Bound(expected->at("exit_outputs").view()));
}

// Returns the output of Transformer-XL with `layers` of the parameters, normalised as after that
// layer.
NamedTensors TruncatedModel(const Problem& problem, const NamedTensors& inputs,
                            const NamedTensors& parameters, Options options, int64_t layers,
                            int64_t of_layers, Device device) {
  for (const char* name : {"confidence", "threshold", "vocabulary"}) options.erase(name);
  options["layers"] = std::to_string(layers);
  const auto layer = transformer_xl::TransformerXl().Create(problem, options, Device::kCpu, 1);
  EXPECT_TRUE(layer.ok()) << layer.status();
  NamedTensors own;
  for (const auto& entry : (*layer)->parameters()) {
    own[entry.first] = parameters.at(entry.first).Clone();
  }
  // States in fp32, as the stack has them, before the output is rounded.
  Problem unrounded = problem;
  unrounded.dtype = DType::kF32;
  NamedTensors x;
  x["x"] = inputs.at("x").CloneAs(DType::kF32);
  auto states = RunTechnique(transformer_xl::TransformerXl(), unrounded, ViewsOf(x),
                             {options, device, 1, &own, 2});
  EXPECT_TRUE(states.ok()) << states.status();
  const std::string norm = layers::ExitNorm(layers, of_layers);
  const LayerNorm exit = LayerNorm::Create(Device::kCpu, parameters.at(norm + ".gamma").view(),
                                           parameters.at(norm + ".beta").view())
                             .value();
  ThreadPool pool(1);
  Tensor workspace(
      DType::kU8,
      {static_cast<int64_t>(LayerNorm::workspace_bytes(Device::kCpu, problem.model_dim(), 1))});
  const Execution execution = {
      &pool, absl::MakeSpan(static_cast<std::byte*>(workspace.raw()), workspace.bytes()), nullptr};
  NamedTensors outputs;
  outputs["out"] = Tensor(problem.dtype, inputs.at("x").shape());
  EXPECT_TRUE(exit.Run(states->at("out").view(), outputs["out"].view(), execution).ok());
  return outputs;
}

TEST(Calm, WithAThresholdThatLetsNothingLeaveItIsTransformerXlBitForBit) {
  for (const char* pre_norm : {"false", "true"}) {
    for (const char* same_length : {"false", "true"}) {
      for (const DType dtype : {DType::kF32, DType::kBF16}) {
        // 20 and 96 channels are less and more than a panel of the products, and not multiples of
        // one.
        for (const int64_t head_dim : {10, 48}) {
          const Problem problem = CausalProblem(2, 2, 150, head_dim, dtype);
          Options options = {{"layers", "3"},
                             {"segment", "64"},
                             {"memory", "50"},
                             {"pre_norm", pre_norm},
                             {"same_length", same_length},
                             {"vocabulary", "20"},
                             {"threshold", "1.001"}};
          const NamedTensors inputs = InputsFor(problem);
          const NamedTensors parameters = PerturbedParameters(Calm(), problem, options);
          const NamedTensors whole =
              TruncatedModel(problem, inputs, parameters, options, 3, 3, Device::kCpu);
          for (const char* confidence : {"softmax", "saturation", "classifier"}) {
            options["confidence"] = confidence;
            const NamedTensors own = PerturbedParameters(Calm(), problem, options);
            const NamedTensors found = RunCalm(problem, inputs, own, options);
            EXPECT_EQ(MaxDifference(found.at("out").view(), whole.at("out").view()), 0)
                << confidence << " " << problem.ToString();
            EXPECT_THAT(ExitsOf(found), Each(3));
          }
        }
      }
    }
  }
}

TEST(Calm, OnDevicesItIsTransformerXlTooWhereNothingLeaves) {
  const Problem problem = CausalProblem(2, 2, 70, 8);
  const Options options = {{"layers", "3"},
                           {"segment", "32"},
                           {"memory", "32"},
                           {"threshold", "2"},
                           {"vocabulary", "20"}};
  const NamedTensors inputs = InputsFor(problem);
  const NamedTensors parameters = PerturbedParameters(Calm(), problem, options);
  const NamedTensors found = RunCalm(problem, inputs, parameters, options, KernelDevice());
  const NamedTensors whole =
      TruncatedModel(problem, inputs, parameters, options, 3, 3, KernelDevice());
  EXPECT_LE(MaxDifference(found.at("out").view(), whole.at("out").view()),
            1e-6 * MaxAbs(whole.at("out").view()));  // the norm's sums are in another order
}

// Where no token may leave, CUDA takes all rows; here it lists all of them after each layer.
TEST(Calm, OnDevicesListsOfAllTokensGiveTheSameBits) {
  for (const char* pre_norm : {"false", "true"}) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      const Problem problem = CausalProblem(2, 2, 70, 8, dtype);
      Options options = {{"layers", "3"},    {"segment", "32"},   {"memory", "32"},
                         {"threshold", "2"}, {"vocabulary", "9"}, {"pre_norm", pre_norm}};
      NamedTensors inputs = InputsFor(problem);
      const NamedTensors parameters = PerturbedParameters(Calm(), problem, options);
      const NamedTensors none = RunCalm(problem, inputs, parameters, options, KernelDevice());
      inputs["exits"] = Tensor(DType::kI32, {2, 70});
      Fill(inputs["exits"].view(), 3);
      const NamedTensors all = RunCalm(problem, inputs, parameters, options, KernelDevice());
      EXPECT_EQ(MaxDifference(all.at("out").view(), none.at("out").view()), 0)
          << pre_norm << " " << problem.ToString();
    }
  }
}

// The test compares the simulator's loads and stores with the FLOPs of the definition. Three of
// four tokens, or one of two, leave after the first layer, anywhere in the text; the others stay to
// the last.
TEST(Calm, InTheSimulatorTheWorkFallsWithTheTokensThatLeave) {
  if (KernelDevice() != Device::kSimulator) GTEST_SKIP() << "the simulator alone counts accesses";
  const Problem problem = CausalProblem(1, 2, 256, 32);
  const Options options = {
      {"layers", "4"}, {"segment", "128"}, {"memory", "128"}, {"vocabulary", "9"}};
  NamedTensors inputs = InputsFor(problem);
  const auto layer = Calm().Create(problem, options, KernelDevice(), 1).value();
  struct Work {
    double accesses;
    double flops_saved;
  };
  const auto run = [&](int64_t one_in) {
    inputs["exits"] = Tensor(DType::kI32, {1, 256});
    for (int64_t t = 0; t < 256; ++t) {
      inputs["exits"].span<int32_t>()[t] = t % one_in == 0 ? 4 : 1;
    }
    const int64_t before = cuda_simulator::TotalCounts().accesses;
    const auto outputs = RunCudaLayer(*layer, KernelDevice(), ViewsOf(inputs));
    EXPECT_TRUE(outputs.ok()) << outputs.status();
    return Work{static_cast<double>(cuda_simulator::TotalCounts().accesses - before),
                layer->statistics().at("flops_saved")};
  };
  const double of_all = run(1).accesses;
  for (const int64_t one_in : {2, 4}) {
    const Work work = run(one_in);
    EXPECT_GE((1 - work.accesses / of_all) / work.flops_saved, 0.6)
        << "one token in " << one_in << " stays: " << 1 - work.accesses / of_all
        << " of the accesses saved, " << work.flops_saved << " of the FLOPs";
  }
}

// Loads and stores of a Run and its backward pass, less those of the Run alone. With one token of two
// that stays behind the first of three layers, a third of the tokens of all layers have left. What does
// not fall with them are the gradients of keys and values and of their matrices, and in part those of
// distances. Compilers differ in accesses by a thousandth; the rest of the work is the kernels' own.
TEST(Calm, InTheSimulatorTheWorkOfABackwardPassFallsWithTheTokensThatLeft) {
  if (KernelDevice() != Device::kSimulator) GTEST_SKIP() << "the simulator alone counts accesses";
  const Problem problem = CausalProblem(1, 2, 256, 32);
  NamedTensors inputs = InputsFor(problem), of_outputs;
  FillNormal(&(of_outputs["out"] = Tensor(DType::kF32, inputs.at("x").shape())), 7, "out");
  inputs["exits"] = Tensor(DType::kI32, {1, 256});
  const auto accesses_of = [](const auto& run) {
    const int64_t before = cuda_simulator::TotalCounts().accesses;
    const absl::Status status = run();
    EXPECT_TRUE(status.ok()) << status;
    return static_cast<double>(cuda_simulator::TotalCounts().accesses - before);
  };
  for (const auto& [pre_norm, kernels] :
       {std::pair("false", "481 launches, 9114 blocks, 7404 barriers, 205120 collectives"),
        std::pair("true", "507 launches, 9417 blocks, 7452 barriers, 231320 collectives")}) {
    const RunRequest request = {{{"layers", "3"},
                                 {"segment", "128"},
                                 {"memory", "128"},
                                 {"vocabulary", "9"},
                                 {"pre_norm", pre_norm}},
                                KernelDevice()};
    std::string of_kernels;
    const auto work = [&](int64_t one_in) {
      for (int64_t t = 0; t < 256; ++t) {
        inputs["exits"].span<int32_t>()[t] = t % one_in == 0 ? 3 : 1;
      }
      double of_both = 0;
      of_kernels = WorkOf([&] {
        of_both = accesses_of([&] {
          return BackwardOfTechnique(Calm(), problem, ViewsOf(inputs), of_outputs, request)
              .status();
        });
      });
      const double of_run = accesses_of(
          [&] { return RunTechnique(Calm(), problem, ViewsOf(inputs), request).status(); });
      return of_both - of_run;
    };
    const double of_all = work(1);
    EXPECT_LE(work(2) / of_all, 0.8) << pre_norm;
    EXPECT_EQ(of_kernels, kernels) << pre_norm;
  }
}

TEST(Calm, RunEqualsTheDefinitionWithEveryConfidenceAndSchedule) {
  const Problem problem = CausalProblem(2, 2, 90, 12);
  for (const Device device : TestedDevices()) {
    for (const std::string confidence : {"softmax", "saturation", "classifier"}) {
      for (const char* pre_norm : {"false", "true"}) {
        const char* schedule = device == Device::kCpu ? "decaying" : "t5x";
        Options options = {{"layers", "4"},        {"segment", "32"},
                           {"memory", "40"},       {"confidence", confidence},
                           {"pre_norm", pre_norm}, {"schedule", schedule},
                           {"vocabulary", "7"},    {"share_biases", "false"},
                           {"threshold", "0.55"},  {"temperature", "3"}};
        if (confidence == "saturation") options["threshold"] = "0.8";
        const NamedTensors inputs = InputsFor(problem);
        const NamedTensors parameters = PerturbedParameters(Calm(), problem, options);
        const NamedTensors found = RunCalm(problem, inputs, parameters, options, device);
        const std::vector<int> exits = ExitsOf(found);
        EXPECT_GE(std::set<int>(exits.begin(), exits.end()).size(), 3u) << confidence << pre_norm;
        SCOPED_TRACE(ToString(options));
        ExpectEqualsDefinition(problem, inputs, parameters, options, found);
      }
    }
  }
}

TEST(Calm, AThresholdOfZeroLeavesAfterTheFirstLayerThatIsAsked) {
  const Problem problem = CausalProblem(2, 2, 40, 8);
  for (const std::string confidence : {"softmax", "saturation", "classifier"}) {
    Options options = {{"layers", "4"}, {"threshold", "0"}, {"confidence", confidence}};
    const NamedTensors inputs = InputsFor(problem);
    const NamedTensors parameters = PerturbedParameters(Calm(), problem, options);
    for (const Device device : TestedDevices()) {
      const std::vector<int> exits = ExitsOf(RunCalm(problem, inputs, parameters, options, device));
      if (confidence == "saturation") {  // a cosine may be below 0
        EXPECT_GE(*std::min_element(exits.begin(), exits.end()), 2);
      } else {
        EXPECT_THAT(exits, Each(1));
      }
    }
  }
}

TEST(Calm, ExitsThatAreGivenAreTaken) {
  const Problem problem = CausalProblem(2, 2, 50, 8);
  const Options options = {
      {"layers", "4"}, {"segment", "20"}, {"memory", "24"}, {"vocabulary", "9"}};
  NamedTensors inputs = InputsFor(problem);
  const NamedTensors parameters = PerturbedParameters(Calm(), problem, options);
  inputs["exits"] = Tensor(DType::kI32, {2, 50});
  std::vector<int> taken;
  for (int n = 0; n < 100; ++n) {
    const int exit = n * n % 7 - 1;  // from -1 to 5
    inputs["exits"].span<int32_t>()[n] = exit;
    taken.push_back(std::clamp(exit, 1, 4));
  }
  for (const Device device : TestedDevices()) {
    const NamedTensors found = RunCalm(problem, inputs, parameters, options, device);
    EXPECT_EQ(ExitsOf(found), taken);
    ExpectEqualsDefinition(problem, inputs, parameters, options, found);
  }
}

TEST(Calm, LeavingAlwaysAfterALayerIsTheModelCutThere) {
  const Problem problem = CausalProblem(2, 2, 130, 20);
  const Options options = {{"layers", "4"}, {"pre_norm", "true"}, {"vocabulary", "9"}};
  NamedTensors inputs = InputsFor(problem);
  const NamedTensors parameters = PerturbedParameters(Calm(), problem, options);
  for (int n = 1; n <= 4; ++n) {
    NamedTensors given;
    given["x"] = inputs["x"].Clone();
    given["exits"] = Tensor(DType::kI32, {2, 130});
    Fill(given["exits"].view(), n);
    const NamedTensors found = RunCalm(problem, given, parameters, options);
    const NamedTensors cut =
        TruncatedModel(problem, inputs, parameters, options, n, 4, Device::kCpu);
    EXPECT_EQ(MaxDifference(found.at("out").view(), cut.at("out").view()), 0) << n;
  }
}

// Token 0 leaves after layer 1. Layer 2 still computes its key and value, from the state with which
// it left: they reach token 1, and no other of layer 2's matrices acts on token 0.
TEST(Calm, LaterTokensSeeTheCopiedStateOfATokenThatHasLeft) {
  const Problem problem = CausalProblem(1, 2, 2, 8);
  const Options options = {{"layers", "2"}, {"pre_norm", "true"}, {"vocabulary", "9"}};
  NamedTensors inputs = InputsFor(problem);
  inputs["exits"] = Tensor(DType::kI32, {1, 2});
  inputs["exits"].span<int32_t>()[0] = 1;
  inputs["exits"].span<int32_t>()[1] = 2;
  const NamedTensors parameters = PerturbedParameters(Calm(), problem, options);
  const NamedTensors found = RunCalm(problem, inputs, parameters, options);
  const auto changed = [&](const char* name) {
    NamedTensors others;
    for (const auto& [key, tensor] : parameters) others[key] = tensor.Clone();
    FillNormal(&others[name], 9, "other", 0, 0.3);
    const NamedTensors outputs = RunCalm(problem, inputs, others, options);
    std::vector<bool> differ;
    for (int64_t t = 0; t < 2; ++t) {
      differ.push_back(MaxDifference(Slice(std::as_const(outputs).at("out").view(), 1, t, 1),
                                     Slice(found.at("out").view(), 1, t, 1)) > 1e-3);
    }
    return differ;
  };
  EXPECT_THAT(changed("layer0.w_v"), ElementsAre(true, true));
  EXPECT_THAT(changed("layer1.w_k"), ElementsAre(false, true));
  EXPECT_THAT(changed("layer1.w_v"), ElementsAre(false, true));
  EXPECT_THAT(changed("layer1.w_q"), ElementsAre(false, true));
  EXPECT_THAT(changed("layer1.ff.w2"), ElementsAre(false, true));
}

TEST(Calm, ThresholdsDecayAsWritten) {
  using Schedule = CalmOptions::Schedule;
  const auto at = [](double lambda, Schedule schedule, int64_t t) {
    CalmOptions options;
    options.threshold = lambda;
    options.schedule = schedule;
    options.temperature = 4;
    return ThresholdAt(ThresholdOf(options, /*tokens=*/100), t);
  };
  EXPECT_FLOAT_EQ(at(0.8, Schedule::kConstant, 25), 0.8f);
  EXPECT_FLOAT_EQ(at(0.8, Schedule::kDecaying, 0), 0.82f);
  EXPECT_FLOAT_EQ(at(0.8, Schedule::kDecaying, 25), 0.75678794f);  // 0.72 + 0.1 / e
  EXPECT_FLOAT_EQ(at(0.8, Schedule::kDecaying, 1 << 20), 0.72f);
  EXPECT_FLOAT_EQ(at(0.8, Schedule::kT5x, 0), 0.8f);
  EXPECT_FLOAT_EQ(at(0.8, Schedule::kT5x, 25), 0.74943036f);  // 0.72 + 0.08 / e
  EXPECT_FLOAT_EQ(at(1, Schedule::kDecaying, 0), 1);
  // No token leaves, whatever the schedule.
  EXPECT_FLOAT_EQ(at(1.5, Schedule::kDecaying, 99), 1.5f);
}

// One row under a rule: tells whether it leaves after layer 2, just below and just above the
// confidence.
class RowRule {
 public:
  RowRule(Confidence confidence, int64_t vocabulary) {
    options_.layers = 3;
    options_.confidence = confidence;
    options_.vocabulary = vocabulary;
    for (const char* exit : {"exit0", "exit1"}) {
      for (const char* name : {".norm.gamma", ".norm.beta", ".confidence.w"}) {
        Set(std::string(exit) + name, {2}, {0, 0});
      }
      Set(std::string(exit) + ".norm.gamma", {2}, {1, 1});
      Set(std::string(exit) + ".confidence.b", {1}, {0});
    }
  }
  void Set(const std::string& name, const Shape& shape, const std::vector<float>& values) {
    parameters_[name] = Tensor(DType::kF32, shape);
    std::copy(values.begin(), values.end(), parameters_[name].span<float>().begin());
  }
  bool Leaves(double threshold, std::vector<float> state, std::vector<float> before,
              int64_t layer = 2) {
    options_.threshold = threshold;
    ConfidenceRule rule(Device::kCpu, CausalProblem(1, 1, 1, 2), options_);
    EXPECT_TRUE(rule.Setup(parameters_).ok());
    ThreadPool pool(1);
    Tensor workspace(DType::kU8, {static_cast<int64_t>(rule.workspace_bytes(1, 1))});
    const Execution execution = {
        &pool, absl::MakeSpan(static_cast<std::byte*>(workspace.raw()), workspace.bytes()),
        nullptr};
    const int32_t place = 0;
    uint8_t leaves = 2;
    const layers::ExitRows rows = {layer,
                                   TensorView(state.data(), DType::kF32, {1, 2}),
                                   TensorView(before.data(), DType::kF32, {1, 2}),
                                   &place,
                                   1,
                                   0};
    EXPECT_TRUE(rule.Decide(rows, &leaves, execution).ok());
    EXPECT_LE(leaves, 1);
    return leaves == 1;
  }
  void ExpectConfidence(double value, const std::vector<float>& state,
                        const std::vector<float>& before = {1, 0}) {
    EXPECT_TRUE(Leaves(value - 1e-5, state, before)) << value;
    EXPECT_FALSE(Leaves(value + 1e-5, state, before)) << value;
  }

 private:
  CalmOptions options_;
  NamedTensors parameters_;
};

TEST(CalmConfidence, OfTheSoftmaxIsTheGapBetweenTheTwoLargestProbabilities) {
  // LN of (3, 1) is (1, -1) to 5e-6, so the logits are the first column minus the second.
  RowRule rule(Confidence::kSoftmax, 3);
  rule.Set("output", {3, 2},
           {std::log(2.0f), 0, 0, std::log(3.0f), std::log(5.0f), 0});  // 2, 1/3, 5 of 22/3
  rule.ExpectConfidence(9.0 / 22, {3, 1});
  RowRule many(Confidence::kSoftmax, 37);  // two rounds of lanes, the second of them partial
  std::vector<float> output(74, 0.0f);
  output[2 * 20] = std::log(40.0f);
  output[2 * 36] = std::log(10.0f);
  many.Set("output", {37, 2}, output);
  many.ExpectConfidence(30.0 / 85, {3, 1});
}

TEST(CalmConfidence, OfSaturationIsACosineAndNotAskedAfterTheFirstLayer) {
  RowRule rule(Confidence::kSaturation, 2);
  rule.ExpectConfidence(0.6, {3, 4}, {7, 0});
  EXPECT_TRUE(rule.Leaves(0.99999, {2, 5}, {2, 5}));
  EXPECT_FALSE(rule.Leaves(0.5, {2, 5}, {2, 5}, /*layer=*/1));
}

TEST(CalmConfidence, OfTheClassifierIsASigmoidOfTheState) {
  RowRule rule(Confidence::kClassifier, 2);
  rule.Set("exit1.confidence.w", {2}, {2, -1});
  rule.Set("exit1.confidence.b", {1}, {0.5});
  rule.ExpectConfidence(1 / (1 + std::exp(-1.5)), {1, 1});
}

TEST(CalmConfidence, ThatIsNaNLeavesNever) {
  for (const Confidence confidence :
       {Confidence::kSoftmax, Confidence::kSaturation, Confidence::kClassifier}) {
    RowRule rule(confidence, 3);
    rule.Set("output", {3, 2}, {1, 2, 3, 4, 5, 6});
    EXPECT_FALSE(rule.Leaves(0, {NAN, 1}, {1, 1}));
  }
}

// ---- The authors' code: 48 states after layer 2 of 3 (tools/capture/golden_calm.py) ----

class CalmT5xTest : public ::testing::Test {
 protected:
  CalmT5xTest() : golden_(GoldenFile("adaptive/calm/testdata/t5x.safetensors").tensors) {
    options_.layers = 3;
    options_.vocabulary = 30;
    options_.temperature = 4;
    problem_ = CausalProblem(1, 1, tokens_, 12);
    for (const char* name : {"norm.gamma", "norm.beta", "confidence.w", "confidence.b"}) {
      // The confidence of the first exit is not used.
      for (const char* exit : {"exit0.", "exit1."}) {
        golden_[absl::StrCat(exit, name)] = golden_.at(absl::StrCat("exit1.", name)).Clone();
      }
    }
  }

  // Returns which of the states leave, as tokens 0 to 47 of a stream.
  std::vector<uint8_t> LeavingOn(Device device) {
    ConfidenceRule rule(device, problem_, options_);
    EXPECT_TRUE(rule.Setup(golden_).ok());
    auto state = CopyFloats(device, golden_.at("state").view()).value();
    auto before = CopyFloats(device, golden_.at("before").view()).value();
    const auto bytes = static_cast<int64_t>(rule.workspace_bytes(tokens_, 1));
    auto workspace = DeviceArray<std::byte>::Allocate(device, bytes).value();
    auto leaves = DeviceArray<uint8_t>::Allocate(device, tokens_).value();
    std::vector<int32_t> places(tokens_);
    std::iota(places.begin(), places.end(), 0);
    ThreadPool pool(1);
    const absl::Status status = rule.Decide(
        {/*layer=*/2, TensorView(state.mutable_data(), DType::kF32, {tokens_, 12}),
         TensorView(before.mutable_data(), DType::kF32, {tokens_, 12}), places.data(), tokens_,
         /*first_position=*/0},
        leaves.mutable_data(), {&pool, absl::MakeSpan(workspace.mutable_data(), bytes), nullptr});
    EXPECT_TRUE(status.ok()) << status;
    const Tensor host =
        CopyToHost(device, ConstTensorView(leaves.data(), DType::kU8, {tokens_})).value();
    return {host.span<uint8_t>().begin(), host.span<uint8_t>().end()};
  }

  int64_t tokens_ = 48;
  Problem problem_;
  CalmOptions options_;
  NamedTensors golden_;
};

// The authors' confidences are at least 1e-3 from their thresholds: far beyond fp32's rounding.
TEST_F(CalmT5xTest, TokensLeaveWhereTheAuthorsConfidenceReachesTheirThreshold) {
  const auto thresholds = golden_.at("thresholds").view();
  for (const auto& [confidence, name] : {std::pair(Confidence::kSoftmax, "softmax_diff"),
                                         std::pair(Confidence::kSaturation, "saturation"),
                                         std::pair(Confidence::kClassifier, "classifier")}) {
    const auto authors = golden_.at(name).span<double>();
    options_.confidence = confidence;
    for (const bool decays : {false, true}) {
      options_.schedule = decays ? CalmOptions::Schedule::kT5x : CalmOptions::Schedule::kConstant;
      for (int64_t n = 0; n < thresholds.dim(0); ++n) {
        options_.threshold = golden_.at("lambda").view().Get(n);
        std::vector<uint8_t> expected;
        for (int64_t t = 0; t < tokens_; ++t) {
          const double threshold =
              decays ? thresholds.Get(thresholds.Offset(n, t)) : options_.threshold;
          expected.push_back(authors[t] >= threshold ? 1 : 0);
        }
        for (const Device device : TestedDevices()) {
          EXPECT_EQ(LeavingOn(device), expected)
              << name << " " << options_.threshold << " " << decays << " " << Name(device);
        }
      }
    }
  }
}

TEST_F(CalmT5xTest, ThresholdsDecayAsTheAuthorsDo) {
  options_.schedule = CalmOptions::Schedule::kT5x;
  const auto thresholds = golden_.at("thresholds").view();
  for (int64_t n = 0; n < thresholds.dim(0); ++n) {
    options_.threshold = golden_.at("lambda").view().Get(n);
    const Threshold ours = ThresholdOf(options_, tokens_);
    for (int64_t t = 0; t < tokens_; ++t) {
      EXPECT_NEAR(ThresholdAt(ours, t), thresholds.Get(thresholds.Offset(n, t)), 2e-7);
    }
  }
}

TEST_F(CalmT5xTest, ProbabilitiesInFloat64AreTheAuthors) {
  const Tensor states = golden_.at("state").CloneAs(DType::kF64);
  const layers::ExitDistribution distribution(golden_);
  for (int64_t t = 0; t < tokens_; ++t) {
    const layers::ExitProbabilities p =
        distribution.Of("exit1.norm", states.view().At<double>(t), 12, 0);
    EXPECT_NEAR(p.ascending[29], golden_.at("softmax_max").span<double>()[t], 1e-12);
    EXPECT_NEAR(p.ascending[29] - p.ascending[28], golden_.at("softmax_diff").span<double>()[t],
                1e-12);
  }
}

TEST(Calm, TheDefinitionTakesTheLayersWordForNearTiesOnly) {
  const Problem problem = CausalProblem(1, 2, 60, 8);
  const Options options = {{"layers", "4"}, {"threshold", "0.5"}, {"confidence", "classifier"}};
  const NamedTensors inputs = InputsFor(problem);
  const NamedTensors parameters = PerturbedParameters(Calm(), problem, options);
  NamedTensors computed = RunCalm(problem, inputs, parameters, options);
  const std::vector<int> exits = ExitsOf(computed);
  for (int32_t& exit : computed["exits"].span<int32_t>()) exit = exit % 4 + 1;
  DefinitionRequest request;
  request.computed = &computed;
  const auto defined = DefineTechnique(Calm(), problem, ViewsOf(inputs),
                                       {options, Device::kCpu, 1, &parameters}, request);
  ASSERT_TRUE(defined.ok());
  int same = 0;
  for (size_t n = 0; n < exits.size(); ++n) {
    same += defined->at("exits").view().Get(static_cast<int64_t>(n)) == exits[n] ? 1 : 0;
  }
  EXPECT_GE(same, 58);
}

// The exits' losses weighed in proportion to the layer, as its section 4.1 trains them, with that of
// the outputs of tokens that leave where the confidence says so, and that of the classifiers' logits.
TEST(Calm, GradientsOfItsOwnExitsAreTheCpusOnEveryDevice) {
  const Problem problem = CausalProblem(2, 2, 27, 8);
  struct Rule {
    const char* confidence;
    const char* threshold;
    size_t exits;  // saturation is not asked after the first layer
    const char* pre_norm;
  };
  for (const auto& [confidence, threshold, exits_taken, pre_norm] :
       {Rule{"softmax", "0.3", 3, "false"}, Rule{"saturation", "0.7", 2, "false"},
        Rule{"classifier", "0.5", 3, "false"}, Rule{"classifier", "0.5", 3, "true"}}) {
    SCOPED_TRACE(absl::StrCat(confidence, " ", pre_norm));
    const Options options = {
        {"layers", "3"},       {"segment", "12"},          {"memory", "7"},
        {"vocabulary", "9"},   {"confidence", confidence}, {"threshold", threshold},
        {"pre_norm", pre_norm}};
    const NamedTensors inputs = InputsFor(problem);
    NamedTensors of_outputs;
    of_outputs["out"] = Tensor(DType::kF32, inputs.at("x").shape());
    of_outputs["exit_outputs"] = Tensor(DType::kF32, {2, 3, 27, problem.model_dim()});
    if (confidence == std::string("classifier")) {
      of_outputs[kConfidenceLogits] = Tensor(DType::kF32, {2, 27, 2});
    }
    for (auto& [name, gradient] : of_outputs) FillNormal(&gradient, 7, name);
    const TensorView of_exits = of_outputs.at("exit_outputs").view();
    for (int64_t e = 0; e < of_exits.num_elements(); ++e) {
      const int64_t n = e / (27 * problem.model_dim()) % 3 + 1;
      of_exits.Set(e, of_exits.Get(e) * static_cast<double>(n) / 6);
    }
    const auto expected =
        BackwardOfTechnique(Calm(), problem, ViewsOf(inputs), of_outputs, {options});
    ASSERT_TRUE(expected.ok()) << expected.status();
    const std::vector<int> exits = ExitsOf(expected->outputs);
    EXPECT_EQ(std::set<int>(exits.begin(), exits.end()).size(), exits_taken);
    const auto found = BackwardOfTechnique(Calm(), problem, ViewsOf(inputs), of_outputs,
                                           {options, KernelDevice()});
    ASSERT_TRUE(found.ok()) << found.status();
    EXPECT_EQ(ExitsOf(found->outputs), exits);
    for (const auto& [name, gradient] : expected->parameters) {
      EXPECT_LE(MaxDifference(found->parameters.at(name).view(), gradient.view()),
                2 * Fp32Bound(gradient.view()))
          << name;
    }
    const ConstTensorView of_x = expected->inputs.at("x").view();
    EXPECT_LE(MaxDifference(found->inputs.at("x").view(), of_x), 2 * Fp32Bound(of_x));
  }
}

// Segments without a memory, so that no gradient stops between them.
TEST(Calm, GradientsOfTheLogitsAreThoseOfTheDefinitionOnEveryDevice) {
  const Problem problem = CausalProblem(2, 2, 13, 4);
  const Options options = {{"layers", "4"},
                           {"segment", "5"},
                           {"memory", "0"},
                           {"feed_forward_dim", "9"},
                           {"confidence", "classifier"}};
  NamedTensors inputs = InputsFor(problem);
  inputs["exits"] = Tensor(DType::kI32, {2, 13});
  for (int e = 0; e < 26; ++e) inputs["exits"].span<int32_t>()[e] = (e * e + e / 7) % 4 + 1;
  const NamedTensors parameters = PerturbedParameters(Calm(), problem, options);
  const auto layer = Calm().Create(problem, options, Device::kCpu, 1).value();
  const NamedTensors of_all = RandomOutputGradients(*layer, 7);
  ASSERT_EQ(of_all.count(kConfidenceLogits), 1u);
  const Calm technique;
  for (const Device device : TestedDevices()) {
    for (const bool of_logits_alone : {true, false}) {
      SCOPED_TRACE(absl::StrCat(Name(device), " ", of_logits_alone));
      NamedTensors of_outputs;
      for (const auto& [name, gradient] : of_all) {
        if (!of_logits_alone || name == kConfidenceLogits) of_outputs[name] = gradient.Clone();
      }
      auto pass = BackwardOfTechnique(technique, problem, ViewsOf(inputs), of_outputs,
                                      {options, device, 1, &parameters});
      ASSERT_TRUE(pass.ok()) << pass.status();
      NamedTensors gradients = std::move(pass->parameters);
      gradients["x"] = std::move(pass->inputs.at("x"));
      EXPECT_EQ(gradients.size(), parameters.size() + 1);
      const auto slopes =
          SlopesOf({&technique, problem, options, &parameters, &inputs, &of_outputs}, gradients);
      ASSERT_TRUE(slopes.ok()) << slopes.status();
      for (const Slope& slope : *slopes) {
        EXPECT_LE(std::abs(slope.of_layer - slope.of_definition), slope.bound) << slope.name;
      }
    }
  }
}

TEST(Calm, LogitsAreThoseThatDecideAndOfAllLayersAndTokens) {
  const Problem problem = CausalProblem(2, 2, 27, 8);
  Options options = {{"layers", "3"},
                     {"segment", "12"},
                     {"memory", "7"},
                     {"confidence", "classifier"},
                     {"threshold", "0.5"}};
  NamedTensors inputs = InputsFor(problem);
  const NamedTensors parameters = PerturbedParameters(Calm(), problem, options);
  for (const bool exits_given : {false, true}) {
    if (exits_given) {
      inputs["exits"] = Tensor(DType::kI32, {2, 27});
      for (int e = 0; e < 54; ++e) inputs["exits"].span<int32_t>()[e] = e * e % 3 + 1;
    }
    for (const Device device : TestedDevices()) {
      const NamedTensors found = RunCalm(problem, inputs, parameters, options, device);
      const ConstTensorView logits = found.at(kConfidenceLogits).view();
      ASSERT_EQ(logits.shape(), Shape({2, 27, 2}));
      std::vector<int> exits;
      for (int64_t e = 0; e < 54; ++e) {
        exits.push_back(logits.Get(2 * e) >= 0 ? 1 : logits.Get(2 * e + 1) >= 0 ? 2 : 3);
      }
      if (!exits_given) {
        EXPECT_EQ(ExitsOf(found), exits);
      }
      ExpectEqualsDefinition(problem, inputs, parameters, options, found);
    }
  }
  // Without a classifier there are none.
  for (const auto& [option, value] :
       {std::pair("layers", "1"), std::pair("confidence", "softmax")}) {
    Options without = options;
    without[option] = value;
    const std::vector<TensorSpec> outputs = Calm().OutputSpecs(problem, without).value();
    for (const TensorSpec& spec : outputs) EXPECT_NE(spec.name, kConfidenceLogits) << option;
  }
}

TEST(Calm, CostAndStatisticsCountWhatWasComputed) {
  const Problem problem = CausalProblem(1, 2, 3, 4);
  const Options options = {{"layers", "4"}, {"vocabulary", "9"}, {"confidence", "saturation"}};
  NamedTensors inputs = InputsFor(problem);
  for (const Device device : TestedDevices()) {
    auto layer = Calm().Create(problem, options, device, 1).value();
    EXPECT_FALSE(layer->cost().flops.has_value());
    inputs["exits"] = Tensor(DType::kI32, {1, 3});
    for (int t = 0; t < 3; ++t) inputs["exits"].span<int32_t>()[t] = t + 1;
    const auto run = device == Device::kCpu ? RunLayer(*layer, ViewsOf(inputs))
                                            : RunCudaLayer(*layer, device, ViewsOf(inputs));
    ASSERT_TRUE(run.ok()) << run.status();
    // With 8 channels and 32 inner ones, a layer is 2 * 8 * (4 * 8 + 2 * 32) = 1536 and 48 a key; a
    // copy is 256.
    const double spent = 6 * 1536 + 48 * (1 * 1 + 2 * 2 + 3 * 3) + 6 * 256;
    EXPECT_EQ(*layer->cost().flops, spent);
    EXPECT_NEAR(layer->statistics().at("mean_layers"), 2, 1e-12);
    const double whole = 4 * (3 * 1536 + 48 * 6);
    EXPECT_NEAR(layer->statistics().at("flops_saved"), 1 - spent / whole, 1e-12);
    // A backward pass computes matrices' products again, with two for gradients, 11 products a pair for
    // the 3 of a run, and copies; and dW_r of 3 distances in the 3 layers that tokens reached.
    const double of_distances = 3 * 3 * 2 * 8 * 8;
    EXPECT_EQ(*layer->backward_cost().flops,
              3 * 6 * 1536 + 11 * 16 * (1 * 1 + 2 * 2 + 3 * 3) + 3 * 6 * 256 + of_distances);
    if (device != Device::kCpu) continue;
    for (int t = 0; t < 3; ++t) inputs["exits"].span<int32_t>()[t] = 3 - t;
    ASSERT_TRUE(RunLayer(*layer, ViewsOf(inputs)).ok());
    EXPECT_EQ(*layer->backward_cost().flops,
              3 * 6 * 1536 + 11 * 16 * (3 * 1 + 2 * 2 + 1 * 3) + 3 * 6 * 256 + of_distances);
  }
}

TEST(Calm, CostsCountTheGivenKeys) {
  const Problem problem = CausalProblem(1, 2, 3, 4);
  NamedTensors inputs = InputsFor(problem);
  inputs["exits"] = Tensor(DType::kI32, {1, 3});
  for (int t = 0; t < 3; ++t) inputs["exits"].span<int32_t>()[t] = t + 1;
  inputs["memories"] = Tensor(DType::kF32, {1, 4, 2, 8});
  FillNormal(&inputs["memories"], 9, "memories");
  auto layer = Calm()
                   .Create(problem, {{"layers", "4"}, {"vocabulary", "9"}, {"given_memory", "2"}},
                           Device::kCpu, 1)
                   .value();
  ASSERT_TRUE(RunLayer(*layer, ViewsOf(inputs)).ok());
  // As above, with two keys more for each token.
  EXPECT_EQ(*layer->cost().flops, 6 * 1536 + 48 * (1 * 3 + 2 * 4 + 3 * 5) + 6 * 256);
}

TEST(Calm, TwoRunsWithTheMemoriesHandedOverAreOne) {
  const Problem problem = CausalProblem(2, 2, 75, 8);
  for (const Device device : TestedDevices()) {
    for (const auto& [confidence, threshold] : std::vector<std::pair<std::string, std::string>>{
             {"softmax", "0.3"}, {"saturation", "0.8"}, {"classifier", "0.6"}}) {
      const Options options = {{"confidence", confidence},
                               {"threshold", threshold},
                               {"pre_norm", confidence == "softmax" ? "true" : "false"},
                               {"same_length", confidence == "saturation" ? "true" : "false"},
                               {"vocabulary", "7"},
                               {"layers", "3"},
                               {"segment", "16"},
                               {"memory", "20"}};
      SCOPED_TRACE(ToString(options));
      const std::vector<int> exits = ExitsOf(RunCalm(
          problem, InputsFor(problem), PerturbedParameters(Calm(), problem, options), options));
      EXPECT_GE(std::set<int>(exits.begin(), exits.end()).size(), 2u);
      transformer_xl::ExpectTwoRunsAreOne(Calm(), problem, options, 48, device);
    }
  }
}

TEST(Calm, ThresholdsDecayFromTheFirstTokenBehindGivenMemories) {
  const Problem problem = CausalProblem(2, 2, 90, 12);
  const Options options = {{"confidence", "classifier"},
                           {"threshold", "0.55"},
                           {"schedule", "decaying"},
                           {"temperature", "3"},
                           {"layers", "4"},
                           {"given_memory", "60"},
                           {"segment", "32"}};
  const NamedTensors parameters = PerturbedParameters(Calm(), problem, options);
  NamedTensors inputs = InputsFor(problem);
  inputs["memories"] = Tensor(DType::kF32, {2, 4, 60, 24});
  FillNormal(&inputs["memories"], 9, "memories");
  Options constant = options;
  constant["schedule"] = "constant";
  for (const Device device : TestedDevices()) {
    const NamedTensors found = RunCalm(problem, inputs, parameters, options, device);
    ExpectEqualsDefinition(problem, inputs, parameters, options, found);
    EXPECT_NE(ExitsOf(found), ExitsOf(RunCalm(problem, inputs, parameters, constant, device)));
  }
}

TEST(Calm, DecisionsCostWhatTheConfidenceCosts) {
  const Problem problem = CausalProblem(1, 2, 3, 4);
  NamedTensors inputs = InputsFor(problem);
  for (const auto& [confidence, flops] : std::vector<std::pair<std::string, double>>{
           {"softmax", 3 * 144}, {"saturation", 2 * 48}, {"classifier", 3 * 16}}) {
    auto layer = Calm()
                     .Create(problem,
                             {{"layers", "4"},
                              {"vocabulary", "9"},
                              {"confidence", confidence},
                              {"threshold", "2"}},
                             Device::kCpu, 1)
                     .value();
    ASSERT_TRUE(RunLayer(*layer, ViewsOf(inputs)).ok());
    EXPECT_EQ(*layer->cost().flops, 4 * (3 * 1536 + 48 * 6) + 3 * flops) << confidence;
  }
}

TEST(Calm, WhatItCannotDoIsSaidInOneLine) {
  const auto message = [](const Problem& problem, const Options& options) {
    const auto layer = Calm().Create(problem, options, Device::kCpu, 1);
    return std::string(layer.status().message());
  };
  Problem grouped = CausalProblem(1, 2, 4, 8);
  grouped.kv_heads = 1;
  EXPECT_THAT(message(grouped, {}), ::testing::HasSubstr("calm is self-attention: kv_heads is 1"));
  EXPECT_THAT(message(CausalProblem(1, 2, 4, 8), {{"memory", "0"}, {"same_length", "true"}}),
              ::testing::HasSubstr("option memory is 0"));
  EXPECT_THAT(message(CausalProblem(1, 2, 4, 8), {{"threshold", "2.5"}}),
              ::testing::HasSubstr("0 to 2"));
}

}  // namespace
}  // namespace tfb::calm
