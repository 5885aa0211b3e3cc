#include "memory/reversible/reversible.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/allocations.h"
#include "core/backward_testing.h"
#include "core/cuda/mirror.h"
#include "core/definition.h"
#include "core/testing.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "memory/reversible/reversible_stack.h"

namespace tfb::reversible {
namespace {

const Technique& Reversible() { return FindTechnique("reversible"); }

using ::testing::HasSubstr;

constexpr Device kCpu = Device::kCpu;
constexpr double kEpsilon = 1.0 / (1 << 23);

ReversibleOptions Parsed(const Options& options) {
  return ParseOptions<ReversibleOptions>(options).value();
}
NamedTensors Random(const Problem& problem, uint64_t seed = 11, const Options& options = {}) {
  return RandomInputs(Reversible().InputSpecs(problem, options).value(), seed);
}
NamedTensors ParametersOf(const Problem& problem, const Options& options) {
  const auto layer = Reversible().Create(problem, options, kCpu, 1).value();
  NamedTensors parameters;
  for (const auto& [name, tensor] : layer->parameters()) parameters[name] = tensor.Clone();
  return parameters;
}
void SetTo(const std::vector<float>& values, Tensor* tensor) {
  ASSERT_EQ(static_cast<int64_t>(values.size()), tensor->num_elements());
  std::copy(values.begin(), values.end(), tensor->span<float>().begin());
}

// Two streams in host memory.
struct HostStreams {
  Tensor first;
  Tensor second;
  HostStreams Clone() const { return {first.Clone(), second.Clone()}; }
};
HostStreams Draw(const Problem& problem, uint64_t seed, DType dtype = DType::kF32) {
  HostStreams streams;
  for (Tensor* stream : {&streams.first, &streams.second}) {
    *stream = Tensor(dtype, {problem.batch, problem.query_tokens, problem.model_dim()});
    FillNormal(stream, seed, stream == &streams.first ? "first" : "second");
  }
  return streams;
}
double Difference(const HostStreams& a, const HostStreams& b) {
  return std::max(MaxDifference(a.first.view(), b.first.view()),
                  MaxDifference(a.second.view(), b.second.view()));
}

// A stack on a device, for streams in host memory.
class StackOnDevice {
 public:
  using Streams = ReversibleStack::Streams;
  using Call = std::function<absl::Status(ReversibleStack&, const Streams&, const Execution&)>;

  StackOnDevice(const Problem& problem, const Options& options, Device device = kCpu,
                const NamedTensors* given = nullptr, int threads = 1)
      : device_(device),
        pool_(threads),
        stack_(ReversibleStack::Create(problem, Parsed(options), device, 1, &parameters_).value()) {
    for (const auto& [name, tensor] : given == nullptr ? parameters_ : *given) {
      given_[name] = tensor.Clone();
    }
    HostStreams streams = Draw(problem, 77);
    Apply([&](ReversibleStack& stack, const Streams& on_device,
              const Execution& execution) { return stack.Setup(given_, on_device, {}, execution); },
          &streams);
  }

  void Apply(const Call& call, HostStreams* streams) {
    if (device_ == kCpu) {
      Tensor workspace(DType::kU8, {static_cast<int64_t>(bytes())});
      std::memset(workspace.raw(), 0xFF, workspace.bytes());
      const absl::Status status = call(
          stack_, {streams->first.view(), streams->second.view()},
          {&pool_, absl::MakeSpan(static_cast<std::byte*>(workspace.raw()), bytes()), nullptr});
      ASSERT_TRUE(status.ok()) << status;
      return;
    }
    CudaRuntime* runtime = CudaRuntime::For(device_).value();
    DeviceMirror mirror(runtime);
    const TensorView first = mirror.CopyForWriting(streams->first.view()).value();
    const TensorView second = mirror.CopyForWriting(streams->second.view()).value();
    const DeviceBuffer workspace = runtime->Allocate(bytes()).value();
    ASSERT_TRUE(runtime->Fill(workspace.data(), 0xFF, bytes()).ok());
    const absl::Status status =
        call(stack_, {first, second},
             {&pool_, absl::MakeSpan(workspace.As<std::byte>(), bytes()), nullptr});
    ASSERT_TRUE(status.ok()) << status;
    ASSERT_TRUE(mirror.CopyBack().ok());
  }
  void Forward(HostStreams* streams) {
    Apply([](ReversibleStack& stack, const Streams& on_device,
             const Execution& execution) { return stack.Forward(on_device, {}, execution); },
          streams);
  }
  void Inverse(HostStreams* streams) {
    Apply([](ReversibleStack& stack, const Streams& on_device,
             const Execution& execution) { return stack.Inverse(on_device, {}, execution); },
          streams);
  }
  // Undoes the blocks on the CPU and takes the gradients of the streams with them.
  void Backward(HostStreams* streams, HostStreams* gradients) {
    Tensor workspace(DType::kU8,
                     {static_cast<int64_t>(stack_.backward_workspace_bytes(pool_.threads()))});
    std::memset(workspace.raw(), 0xFF, workspace.bytes());
    const Execution execution = {
        &pool_, absl::MakeSpan(static_cast<std::byte*>(workspace.raw()), workspace.bytes()),
        nullptr};
    ASSERT_EQ(stack_.SetUpBackward(given_, streams->first.view(), {}, execution), absl::OkStatus());
    ASSERT_EQ(stack_.Backward({streams->first.view(), streams->second.view()},
                              {gradients->first.view(), gradients->second.view()}, {}, execution),
              absl::OkStatus());
  }
  size_t bytes() const { return stack_.workspace_bytes(pool_.threads()); }
  const NamedTensors& parameters() const { return parameters_; }

 private:
  Device device_;
  ThreadPool pool_;
  NamedTensors parameters_;
  ReversibleStack stack_;
  NamedTensors given_;  // the parameters that it was set up with
};

// ---- What it computes ----

TEST(Reversible, OneBlockOnOneTokenIsAsComputedByHand) {
  // Up to epsilon, LN(1, 3) = (-1, 1). Attention to one token is its value: F = 2 LN. G = relu(LN)
  // W_2 + b_2 = (0, 1) W_2 + (1, 0) = (5, 7) + (1, 0).
  const Problem problem = Problem::SelfAttention(1, 1, 1, 2);
  NamedTensors inputs = Random(problem);
  SetTo({1, 3}, &inputs["x"]);
  const auto run = [&](const char* output, Device device) {
    const Options options = {{"layers", "1"}, {"feed_forward_dim", "2"}, {"output", output}};
    NamedTensors parameters = ParametersOf(problem, options);
    SetTo({1, 0, 0, 1}, &parameters["layer0.f.w_v"]);
    SetTo({2, 0, 0, 2}, &parameters["layer0.f.w_o"]);
    SetTo({1, 0, 0, 1}, &parameters["layer0.g.w1"]);
    SetTo({0, 0}, &parameters["layer0.g.b1"]);
    SetTo({0, 0, 5, 7}, &parameters["layer0.g.w2"]);
    SetTo({1, 0}, &parameters["layer0.g.b2"]);
    RunRequest request;
    request.options = options;
    request.device = device;
    request.parameters = &parameters;
    const NamedTensors out = RunTechnique(Reversible(), problem, ViewsOf(inputs), request).value();
    const NamedTensors defined =
        DefineTechnique(Reversible(), problem, ViewsOf(inputs), request).value();
    EXPECT_LE(MaxDifference(out.at("out").view(), defined.at("out").view()), 1e-5);
    const auto span = out.at("out").span<float>();
    return std::vector<float>(span.begin(), span.end());
  };
  const auto near = [](double value) { return ::testing::FloatNear(value, 2e-4); };
  for (const Device device : TestedDevices()) {
    EXPECT_THAT(run("concatenate", device),
                ::testing::ElementsAre(near(-1), near(5), near(7), near(10)));
    EXPECT_THAT(run("mean", device), ::testing::ElementsAre(near(3), near(7.5)));
    EXPECT_THAT(run("sum", device), ::testing::ElementsAre(near(6), near(15)));
  }
}

TEST(Reversible, LayerEqualsDefinitionUnderEveryOption) {
  std::vector<Options> all;
  for (const char* output : {"concatenate", "mean", "sum"}) all.push_back({{"output", output}});
  for (const char* activation : {"relu", "gelu", "gelu_tanh", "gelu_sigmoid"}) {
    all.push_back({{"activation", activation}, {"feed_forward_dim", "13"}, {"chunks", "4"}});
  }
  all.push_back({{"layers", "1"}, {"f", "multi_head[bias=true]"}});
  all.push_back({{"layers", "3"}, {"f", "multi_head[inner=longformer[window=8]]"}});
  all.push_back({{"f", "transformer_xl[layers=1,segment=8,memory=8]"}});
  all.push_back({{"f", "reversible[layers=1,output=mean]"}});
  all.push_back(
      {{"f",
        "multi_head[inner=longformer[window=4]]/transformer_xl[layers=1,segment=8,memory=8]"}});
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const Problem problem = Problem::SelfAttention(2, 2, 37, 8, /*causal=*/true, dtype);
    const NamedTensors inputs = Random(problem);
    for (const Options& options : all) {
      for (const Device device : TestedDevices()) {
        RunRequest request;
        request.options = options;
        request.device = device;
        const auto run = RunTechnique(Reversible(), problem, ViewsOf(inputs), request);
        ASSERT_TRUE(run.ok()) << run.status();
        const NamedTensors defined =
            DefineTechnique(Reversible(), problem, ViewsOf(inputs), request).value();
        const double largest = MaxAbs(defined.at("out").view());
        // In 16 bits, roundings in f that go the other way move outputs by some units in the last
        // place.
        const double bound = dtype == DType::kF32 ? 2e-5 : 3 * UnitRoundoff(dtype);
        EXPECT_LE(MaxDifference(run->at("out").view(), defined.at("out").view()), bound * largest)
            << ToString(options) << " " << Name(dtype) << " " << Name(device);
      }
    }
  }
}

TEST(Reversible, ReformersBlocksHashTheirTokens) {
  const Problem problem = Problem::SelfAttention(1, 2, 37, 8, /*causal=*/true);
  const NamedTensors inputs = Random(problem);
  RunRequest request;
  request.options = {{"f", "multi_head[inner=lsh[chunk=8,rounds=2]]"}, {"chunks", "4"}};
  const NamedTensors defined =
      DefineTechnique(Reversible(), problem, ViewsOf(inputs), request).value();
  for (const Device device : TestedDevices()) {
    request.device = device;
    const NamedTensors run = RunTechnique(Reversible(), problem, ViewsOf(inputs), request).value();
    EXPECT_LE(MaxDifference(run.at("out").view(), defined.at("out").view()),
              2e-5 * MaxAbs(defined.at("out").view()));
  }
}

std::vector<std::string> InputNames(const Problem& problem, const Options& options) {
  std::vector<std::string> names;
  const std::vector<TensorSpec> specs = Reversible().InputSpecs(problem, options).value();
  for (const TensorSpec& spec : specs) names.push_back(spec.name);
  return names;
}

// Expects that runs with these inputs match the definition. Returns the definition's output.
Tensor ExpectMatchesDefinition(const Problem& problem, const NamedTensors& inputs,
                               const Options& options) {
  RunRequest request{options};
  Tensor expected =
      std::move(DefineTechnique(Reversible(), problem, ViewsOf(inputs), request).value().at("out"));
  for (const Device device : TestedDevices()) {
    request.device = device;
    const NamedTensors run = RunTechnique(Reversible(), problem, ViewsOf(inputs), request).value();
    EXPECT_LE(MaxDifference(run.at("out").view(), expected.view()), 2e-5 * MaxAbs(expected.view()))
        << Name(device);
  }
  return expected;
}

TEST(Reversible, MasksThatFReadsReachAllBlocks) {
  const Problem problem = Problem::SelfAttention(2, 2, 37, 8);
  const Options options = {{"f", "multi_head[inner=longformer[max_globals=2,window=4]]"}};
  EXPECT_THAT(InputNames(problem, options), ::testing::ElementsAre("x", "key_mask", "global_mask"));
  NamedTensors inputs = Random(problem, 11, options);
  const Tensor without = ExpectMatchesDefinition(problem, inputs, options);
  Tensor& mask = inputs["global_mask"] = Tensor(DType::kU8, {2, 37});
  Fill(mask.view(), 0);
  for (const int64_t token : {3, 29}) Fill(Slice(mask.view(), 1, token, 1), 1);
  const Tensor with = ExpectMatchesDefinition(problem, inputs, options);
  EXPECT_GT(MaxDifference(with.view(), without.view()), 1e-2);
}

TEST(Reversible, NoiseThatFReadsIsEachBlocksOwn) {
  const Problem problem = Problem::SelfAttention(2, 2, 20, 8);
  const Options options = {{"f", "multi_head[inner=hard[sample=gumbel]]"}};
  EXPECT_THAT(InputNames(problem, options),
              ::testing::ElementsAre("x", "key_mask", "layer0.f.g", "baseline", "layer1.f.g"));
  NamedTensors inputs = Random(problem, 11, options);
  const NamedTensors others = Random(problem, 12, options);
  Tensor before = ExpectMatchesDefinition(problem, inputs, options);
  for (const char* name : {"layer0.f.g", "layer1.f.g"}) {
    inputs[name] = others.at(name).Clone();
    Tensor after = ExpectMatchesDefinition(problem, inputs, options);
    EXPECT_GT(MaxDifference(after.view(), before.view()), 1e-2) << name;
    before = std::move(after);
  }
}

TEST(Reversible, EachBlockHasItsOwnMemories) {
  const Problem problem = Problem::SelfAttention(1, 2, 10, 4, /*causal=*/true);
  const Options options = {
      {"f", "transformer_xl[given_memory=4,layers=1]/transformer_xl[given_memory=6,layers=1]"}};
  const std::vector<TensorSpec> inputs = Reversible().InputSpecs(problem, options).value();
  ASSERT_EQ(inputs.size(), 4u);
  EXPECT_EQ(inputs[2].name, "layer0.f.memories");
  EXPECT_EQ(inputs[2].shape, (Shape{1, 1, 4, 8}));
  EXPECT_EQ(inputs[3].name, "layer1.f.memories");
  EXPECT_EQ(inputs[3].shape, (Shape{1, 1, 6, 8}));
  ExpectMatchesDefinition(problem, Random(problem, 11, options), options);
}

TEST(Reversible, AListHasATechniqueForEachBlockBitByBit) {
  const Problem problem = Problem::SelfAttention(2, 2, 37, 8, /*causal=*/true);
  const std::vector<std::string> list = {"multi_head[inner=longformer[window=4]]",
                                         "multi_head[bias=true]", "multi_head[bias=true]"};
  const Options options = {{"layers", "3"}, {"f", absl::StrCat(list[0], "/2*", list[1])}};
  const NamedTensors parameters = ParametersOf(problem, options);
  for (const Device device : TestedDevices()) {
    HostStreams blocks = Draw(problem, 5);
    HostStreams all = blocks.Clone();
    for (size_t n = 0; n < list.size(); ++n) {
      const std::string prefix = absl::StrCat("layer", n, ".");
      NamedTensors of_block;
      for (const auto& [name, tensor] : parameters) {
        if (name.rfind(prefix, 0) == 0) {
          of_block["layer0." + name.substr(prefix.size())] = tensor.Clone();
        }
      }
      StackOnDevice(problem, {{"layers", "1"}, {"f", list[n]}}, device, &of_block).Forward(&blocks);
    }
    StackOnDevice(problem, options, device, &parameters).Forward(&all);
    EXPECT_EQ(Difference(all, blocks), 0) << Name(device);
  }
}

TEST(Reversible, BlocksMayAttendToAMemory) {
  const Problem problem = Problem::SelfAttention(2, 2, 20, 8);
  const Options options = {{"f", "multi_head[cross=true]"}};
  NamedTensors inputs = Random(problem, 11, options);
  const Tensor before = ExpectMatchesDefinition(problem, inputs, options);
  inputs["memory"] = std::move(Random(problem, 12, options).at("memory"));
  const Tensor after = ExpectMatchesDefinition(problem, inputs, options);
  EXPECT_GT(MaxDifference(after.view(), before.view()), 1e-2);
}

TEST(Reversible, EqualsReformerPytorchInBothDirections) {
  for (const char* name : {"two_blocks", "three_causal_blocks"}) {
    const SafetensorsFile file =
        GoldenFile(absl::StrCat("memory/reversible/testdata/", name, ".safetensors"));
    const Shape shape = file.tensors.at("x").shape();
    const Problem problem = Problem::SelfAttention(shape[0], 2, shape[1], shape[2] / 2,
                                                   file.metadata.at("causal") == "true");
    const Options options = {{"layers", file.metadata.at("layers")},
                             {"f", "multi_head[bias=true]"},
                             {"feed_forward_dim", std::to_string(2 * shape[2])},
                             {"activation", file.metadata.at("activation")}};
    NamedTensors parameters, inputs;
    inputs["x"] = file.tensors.at("x").Clone();
    for (const auto& [parameter, tensor] : file.tensors) {
      if (parameter.rfind("layer", 0) == 0) parameters[parameter] = tensor.Clone();
    }
    const ConstTensorView expected = file.tensors.at("out").view();
    RunRequest request;
    request.options = options;
    request.parameters = &parameters;
    const NamedTensors defined =
        DefineTechnique(Reversible(), problem, ViewsOf(inputs), request).value();
    EXPECT_LE(MaxDifference(defined.at("out").view(), expected), 1e-12) << name;
    for (const Device device : TestedDevices()) {
      request.device = device;
      const NamedTensors run =
          RunTechnique(Reversible(), problem, ViewsOf(inputs), request).value();
      EXPECT_LE(MaxDifference(run.at("out").view(), expected), 2e-5 * MaxAbs(expected)) << name;
      // The call goes from outputs to inputs.
      HostStreams streams = Draw(problem, 1);
      CopyElements(Slice(expected, 2, 0, shape[2]), streams.first.view());
      CopyElements(Slice(expected, 2, shape[2], shape[2]), streams.second.view());
      StackOnDevice(problem, options, device, &parameters).Inverse(&streams);
      for (const Tensor* stream : {&streams.first, &streams.second}) {
        EXPECT_LE(MaxDifference(stream->view(), inputs["x"].view()), 2e-5 * MaxAbs(expected))
            << name;
      }
    }
  }
}

// ---- The inverse ----

TEST(Reversible, TwelveBlocksComeBackWithinTheirRoundings) {
  const Problem problem = Problem::SelfAttention(2, 2, 20, 8);
  for (const char* f : {"multi_head", "multi_head[inner=longformer[window=6]]"}) {
    for (const int64_t layers : {1, 4, 12}) {
      for (const Device device : TestedDevices()) {
        StackOnDevice stack(problem, {{"layers", absl::StrCat(layers)}, {"f", f}}, device);
        const HostStreams x = Draw(problem, 3);
        HostStreams streams = x.Clone();
        stack.Forward(&streams);
        EXPECT_GT(Difference(streams, x), 0.5);
        const double scale = std::max(MaxAbs(streams.first.view()), MaxAbs(streams.second.view()));
        stack.Inverse(&streams);
        EXPECT_LE(Difference(streams, x), 4 * layers * kEpsilon * scale)
            << f << ", " << layers << " layers";
      }
    }
  }
}

TEST(Reversible, TheDefinitionOfTwelveBlocksComesBackToTwelveDigits) {
  const Problem problem = Problem::SelfAttention(1, 2, 20, 8);
  const Options options = {{"layers", "12"}};
  const NamedTensors parameters = ParametersOf(problem, options);
  const ReversibleOptions parsed = Parsed(options);
  const ReversibleNetwork network = {problem, parsed, parameters, {}};
  const HostStreams x = Draw(problem, 3, DType::kF64);
  HostStreams streams = x.Clone();
  ASSERT_TRUE(DefineForward(network, &streams.first, &streams.second).ok());
  EXPECT_GT(Difference(streams, x), 0.5);
  ASSERT_TRUE(DefineInverse(network, &streams.first, &streams.second).ok());
  EXPECT_LE(Difference(streams, x), 1e-12);
}

TEST(Reversible, BranchesOfZeroAreTheIdentityInBothDirections) {
  const Problem problem = Problem::SelfAttention(1, 2, 20, 8);
  const Options options = {{"layers", "3"}};
  NamedTensors parameters = ParametersOf(problem, options);
  for (auto& [name, tensor] : parameters) {
    const std::string last = name.substr(name.rfind('.') + 1);
    if (last == "w_o" || last == "w2" || last == "b2") Fill(tensor.view(), 0);
  }
  for (const Device device : TestedDevices()) {
    StackOnDevice stack(problem, options, device, &parameters);
    const HostStreams x = Draw(problem, 3);
    HostStreams streams = x.Clone();
    stack.Forward(&streams);
    EXPECT_EQ(Difference(streams, x), 0);
    stack.Inverse(&streams);
    EXPECT_EQ(Difference(streams, x), 0);
  }
}

TEST(Reversible, WhatIsComputedAgainFromTheSameInputsHasTheSameBits) {
  const Problem problem = Problem::SelfAttention(2, 2, 70, 8);
  for (const Device device : TestedDevices()) {
    StackOnDevice stack(problem, {}, device), on_threads(problem, {}, device, nullptr, 3);
    const HostStreams x = Draw(problem, 3);
    HostStreams once = x.Clone(), again = x.Clone(), threads = x.Clone();
    stack.Forward(&once);
    HostStreams back = once.Clone();
    stack.Inverse(&back);  // which must leave no trace
    stack.Forward(&again);
    on_threads.Forward(&threads);
    EXPECT_EQ(Difference(once, again), 0);
    EXPECT_EQ(Difference(once, threads), 0);
  }
}

TEST(Reversible, ABlockIsUndoneToTheLastBitWhereItsSumsAreExact) {
  // y_1 = x_1 + F(x_2) has x_1 = 0, so that y_1 - F(x_2) is 0 if and only if F(x_2) is the same
  // again; and x_2 comes back where y_2 - G(y_1) is exact, as with x_2 = 0, whose LN is beta.
  const Problem problem = Problem::SelfAttention(1, 2, 70, 8);
  const Options options = {{"layers", "1"}};
  NamedTensors parameters = ParametersOf(problem, options);
  FillNormal(&parameters["layer0.f_norm.beta"], 5, "beta");
  for (const Device device : TestedDevices()) {
    StackOnDevice stack(problem, options, device, &parameters);
    HostStreams streams = Draw(problem, 3);
    Fill(streams.first.view(), 0);
    Fill(streams.second.view(), 0);
    stack.Forward(&streams);
    EXPECT_GT(MaxAbs(streams.first.view()), 0.1);
    EXPECT_GT(MaxAbs(streams.second.view()), 0.1);
    stack.Inverse(&streams);
    EXPECT_EQ(MaxAbs(streams.first.view()), 0);
    EXPECT_EQ(MaxAbs(streams.second.view()), 0);
  }
}

// Computes the determinant by elimination with pivots.
double Determinant(std::vector<std::vector<double>> rows) {
  double determinant = 1;
  for (size_t c = 0; c < rows.size(); ++c) {
    const auto pivot = std::max_element(
        rows.begin() + c, rows.end(),
        [c](const auto& a, const auto& b) { return std::abs(a[c]) < std::abs(b[c]); });
    if (pivot != rows.begin() + c) determinant = -determinant;
    std::swap(*pivot, rows[c]);
    determinant *= rows[c][c];
    for (size_t r = c + 1; r < rows.size(); ++r) {
      const double factor = rows[r][c] / rows[c][c];
      for (size_t d = c; d < rows.size(); ++d) rows[r][d] -= factor * rows[c][d];
    }
  }
  return determinant;
}

TEST(Reversible, TheJacobianHasDeterminantOne) {
  const Problem problem = Problem::SelfAttention(1, 2, 3, 2);
  const Options options = {{"layers", "2"}, {"activation", "gelu"}};
  const NamedTensors parameters = ParametersOf(problem, options);
  const ReversibleOptions parsed = Parsed(options);
  const ReversibleNetwork network = {problem, parsed, parameters, {}};
  const int64_t half = 12;  // the 12 numbers are 3 tokens of 4 channels
  const auto at = [&](HostStreams& streams, int64_t n) -> double& {
    return (n < half ? streams.first : streams.second).span<double>()[n % half];
  };
  const double step = 1e-5;
  std::vector<std::vector<double>> jacobian(2 * half, std::vector<double>(2 * half));
  const HostStreams x = Draw(problem, 3, DType::kF64);
  for (int64_t from = 0; from < 2 * half; ++from) {
    for (const double sign : {1.0, -1.0}) {
      HostStreams streams = x.Clone();
      at(streams, from) += sign * step;
      ASSERT_TRUE(DefineForward(network, &streams.first, &streams.second).ok());
      for (int64_t to = 0; to < 2 * half; ++to) {
        jacobian[to][from] += sign * at(streams, to) / (2 * step);
      }
    }
  }
  EXPECT_NEAR(Determinant(jacobian), 1, 1e-6);
}

// ---- The backward pass ----

TEST(Reversible, TheBackwardPassThatStoresNothingGivesAutomaticDifferentiationsGradients) {
  for (const char* name : {"two_blocks", "three_causal_blocks"}) {
    const SafetensorsFile file =
        GoldenFile(absl::StrCat("memory/reversible/testdata/", name, ".safetensors"));
    const Shape shape = file.tensors.at("x").shape();
    const Problem problem = Problem::SelfAttention(shape[0], 2, shape[1], shape[2] / 2,
                                                   file.metadata.at("causal") == "true");
    const Options options = {{"layers", file.metadata.at("layers")},
                             {"f", "multi_head[bias=true]"},
                             {"feed_forward_dim", std::to_string(2 * shape[2])},
                             {"activation", file.metadata.at("activation")}};
    NamedTensors parameters;
    for (const auto& [parameter, tensor] : file.tensors) {
      if (parameter.rfind("layer", 0) == 0) parameters[parameter] = tensor.Clone();
    }
    HostStreams streams = Draw(problem, 1), cotangents = Draw(problem, 2);
    const auto split = [&](const char* tensor, const HostStreams& to) {
      const ConstTensorView both = file.tensors.at(tensor).view();
      const auto write = [&](int64_t begin, const Tensor& half) {
        CopyElements(Slice(both, 2, begin, shape[2]),
                     TensorView(const_cast<void*>(half.raw()), half.dtype(), half.shape()));
      };
      write(0, to.first);
      write(shape[2], to.second);
    };
    split("out", streams);
    split("cotangent", cotangents);
    StackOnDevice(problem, options, kCpu, &parameters).Backward(&streams, &cotangents);
    HostStreams expected = Draw(problem, 1);
    split("gradient", expected);
    const double scale = std::max(MaxAbs(expected.first.view()), MaxAbs(expected.second.view()));
    EXPECT_LE(Difference(cotangents, expected), 2e-5 * scale) << name;
    EXPECT_LE(MaxDifference(streams.first.view(), file.tensors.at("x").view()), 2e-5) << name;
  }
}

TEST(Reversible, GradientsAreThoseOfItsDefinition) {
  const Problem problem = Problem::SelfAttention(2, 2, 17, 8, /*causal=*/true);
  const double width = static_cast<double>(problem.model_dim());
  for (const Options& options :
       {Options{{"layers", "3"}, {"f", "multi_head[bias=true]"}, {"activation", "gelu"}},
        Options{{"layers", "1"}, {"chunks", "5"}, {"output", "mean"}},
        Options{{"layers", "2"}, {"output", "sum"}, {"f", "learned[max_tokens=20]/multi_head"}}}) {
    SCOPED_TRACE(ToString(TechniqueSpec{"reversible", options}));
    // Streams that are computed again are off by the roundings of the updates, a few more.
    const double roundings = 3 * (2 * AttentionRoundings(problem) + 30 * width);
    ExpectGradientsOfDefinition(Reversible(), problem, {options, roundings});
  }
}

TEST(Reversible, TheBackwardPassComputesTheStreamsAsTheInverseDoesBitForBit) {
  const Problem problem = Problem::SelfAttention(2, 2, 37, 8);
  for (const char* chunks : {"1", "4"}) {
    const Options options = {{"layers", "3"}, {"chunks", chunks}, {"activation", "gelu"}};
    StackOnDevice stack(problem, options);
    HostStreams streams = Draw(problem, 3);
    stack.Forward(&streams);
    HostStreams undone = streams.Clone(), gradients = Draw(problem, 4);
    stack.Inverse(&undone);
    stack.Backward(&streams, &gradients);
    EXPECT_EQ(Difference(streams, undone), 0) << chunks;
  }
}

TEST(Reversible, WhatIsKeptDoesNotGrowWithTheBlocks) {
  const Problem problem = Problem::SelfAttention(1, 2, 200, 16);
  const auto layer = [&](const char* layers) {
    return Reversible().Create(problem, {{"layers", layers}}, kCpu, 1).value();
  };
  const auto one = layer("1"), many = layer("12");
  EXPECT_EQ(one->kept_bytes(), 2 * 200 * 32 * sizeof(float));
  EXPECT_EQ(many->kept_bytes(), one->kept_bytes());
  EXPECT_EQ(many->backward_workspace_bytes(2), one->backward_workspace_bytes(2));
}

// ---- Chunks and memory ----

TEST(Reversible, AnyNumberOfChunksGivesTheSameBits) {
  const Problem problem = Problem::SelfAttention(3, 2, 37, 8);
  const NamedTensors inputs = Random(problem);
  for (const Device device : TestedDevices()) {
    const auto run = [&](const char* chunks) {
      RunRequest request;
      request.options = {{"chunks", chunks}};
      request.device = device;
      return RunTechnique(Reversible(), problem, ViewsOf(inputs), request).value();
    };
    const NamedTensors whole = run("1");
    for (const char* chunks : {"2", "5", "36", "37", "1000"}) {
      EXPECT_EQ(MaxDifference(whole.at("out").view(), run(chunks).at("out").view()), 0) << chunks;
    }
  }
}

TEST(Reversible, ActivationMemoryDoesNotGrowWithTheBlocks) {
  const Problem problem = Problem::SelfAttention(1, 2, 2000, 16);
  const auto layer = [&](const char* layers, const char* chunks) {
    const Options options = {{"layers", layers}, {"chunks", chunks}, {"feed_forward_dim", "512"}};
    return Reversible().Create(problem, options, kCpu, 1).value();
  };
  const auto one = layer("1", "1"), many = layer("12", "1"), in_parts = layer("12", "8");
  EXPECT_EQ(one->workspace_bytes(2), many->workspace_bytes(2));
  // The inner activations are the largest part there, and most of them are gone.
  const size_t inner_bytes = 2000 * 16 * 32 * sizeof(float);
  EXPECT_GT(many->workspace_bytes(2), inner_bytes);
  EXPECT_LT(in_parts->workspace_bytes(2), many->workspace_bytes(2) - inner_bytes / 2);
  const auto bytes_of_parameters = [](const Layer& of) {
    double bytes = 0;
    for (const auto& [name, tensor] : of.parameters()) bytes += static_cast<double>(tensor.bytes());
    return bytes;
  };
  EXPECT_EQ(one->cost().bytes.value() - bytes_of_parameters(*one),
            many->cost().bytes.value() - bytes_of_parameters(*many));
  EXPECT_EQ(bytes_of_parameters(*many), 12 * bytes_of_parameters(*one));
}

TEST(Reversible, BothDirectionsAllocateNothing) {
  const Problem problem = Problem::SelfAttention(1, 2, 40, 8);
  StackOnDevice stack(problem, {{"chunks", "3"}});
  HostStreams streams = Draw(problem, 3);
  stack.Apply(
      [](ReversibleStack& of, const ReversibleStack::Streams& views, const Execution& execution) {
        const int64_t before = AllocationCount();
        const absl::Status forward = of.Forward(views, {}, execution);
        const absl::Status inverse = of.Inverse(views, {}, execution);
        EXPECT_EQ(AllocationCount() - before, 0);
        return forward.ok() ? inverse : forward;
      },
      &streams);
}

TEST(Reversible, CostIsThatOfTheBranches) {
  const Problem problem = Problem::SelfAttention(2, 2, 10, 4);
  const auto layer =
      Reversible().Create(problem, {{"layers", "3"}, {"feed_forward_dim", "16"}}, kCpu, 1).value();
  const NamedTensors inputs = Random(problem);
  ASSERT_TRUE(RunLayer(*layer, ViewsOf(inputs)).ok());  // Setup makes the inner schedule
  const double projections = 2 * 4 * 20 * 8 * 8, pairs = 2 * 2 * 10 * 10 * 2 * (4 + 4);
  EXPECT_EQ(layer->cost().flops, 3 * (projections + pairs + 2 * 2 * 20 * 8 * 16));
}

// ---- Refused problems ----

absl::Status Refused(const Problem& problem, const Options& options) {
  return Reversible().Create(problem, options, kCpu, 1).status();
}

TEST(Reversible, AnFThatIsNoLayerOnHiddenStatesIsRefusedWithTheReason) {
  const Problem problem = Problem::SelfAttention(1, 2, 10, 4);
  const auto message = [&](const Problem& of, const Options& options) {
    const absl::Status status = Refused(of, options);
    EXPECT_FALSE(status.ok());
    return std::string(status.message());
  };
  EXPECT_THAT(message(problem, {{"f", "longformer"}}), HasSubstr("multi_head[inner=longformer]"));
  EXPECT_THAT(message(problem, {{"f", "no_such"}}), HasSubstr("no_such"));
  EXPECT_THAT(message(problem, {{"f", "reversible"}}), HasSubstr("its out is [1, 10, 16]"));
  EXPECT_THAT(message(problem, {{"f", "transformer_xl"}}), HasSubstr("transformer_xl"));
  Problem cross = problem;
  cross.kv_tokens = 12;
  EXPECT_THAT(message(cross, {}), HasSubstr("kv_tokens is 12; allowed is query_tokens, 10"));
  EXPECT_THAT(message(problem, {{"layers", "0"}}), HasSubstr("1 to 64"));
  EXPECT_EQ(message(problem, {{"layers", "4"}, {"f", "3*multi_head"}}),
            "option f names 3 techniques; allowed with layers=4 are 1 or 4");
}

TEST(Reversible, TheCounterpartHasThatOfFInside) {
  const Problem problem = Problem::SelfAttention(1, 2, 10, 4);
  EXPECT_EQ(ToString(Reversible()
                         .Counterpart(problem, {{"f", "multi_head[inner=longformer[window=4]]"},
                                                {"layers", "3"}})
                         .value()),
            "reversible:activation=relu,chunks=1,f=multi_head[bias=false,cross=false,inner=dense],"
            "feed_forward_dim=0,layers=3,output=concatenate");
  const Options list = {{"f", "multi_head[inner=longformer[window=4]]/multi_head[bias=true]"}};
  EXPECT_EQ(Reversible().Counterpart(problem, list)->options.at("f"),
            "multi_head[bias=false,cross=false,inner=dense]/"
            "multi_head[bias=true,cross=false,inner=dense]");
}

}  // namespace
}  // namespace tfb::reversible
