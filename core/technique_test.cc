// Tests what techniques and layers have in common: tensors, refusals, parameters, the registry.
#include "core/technique.h"

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "core/thread_pool.h"
#include "gtest/gtest.h"

namespace tfb {
namespace {

Tensor Filled(DType dtype, const Shape& shape, double value) {
  Tensor tensor(dtype, shape);
  Fill(tensor.view(), value);
  return tensor;
}

// A layer with a table of numbers, a bias and a table of whole numbers; it computes nothing.
class TablesLayer : public Layer {
 public:
  TablesLayer() : Layer(Problem(), {}, {}) {
    parameters_["w"] = Filled(DType::kF32, {2, 3}, 1);
    parameters_["bias"] = Filled(DType::kF32, {3}, 2);
    parameters_["order"] = Filled(DType::kI32, {2}, 3);
  }
  size_t workspace_bytes(int) const override { return 0; }
  Cost cost() const override { return {}; }

 private:
  absl::Status DoRun(const Inputs&, const Outputs&, const Execution&) override {
    return absl::OkStatus();
  }
};

// Replaces parameters by one of the two functions.
enum class Give { kCopied, kMoved };
constexpr Give kGives[] = {Give::kCopied, Give::kMoved};

absl::Status SetParameters(Give give, NamedTensors parameters, Layer* layer) {
  if (give == Give::kMoved) return layer->SetParameters(std::move(parameters));
  const NamedTensors& copied = parameters;
  return layer->SetParameters(copied);
}

// Tells whether a parameter has the dtype, and the value in every element.
bool Holds(const Layer& layer, const std::string& name, DType dtype, double value) {
  const Tensor& tensor = layer.parameters().at(name);
  for (int64_t n = 0; n < tensor.num_elements(); ++n) {
    if (tensor.view().Get(n) != value) return false;
  }
  return tensor.dtype() == dtype;
}

TEST(SetParameters, ReplacesThoseThatAreGivenInTheLayersDtypes) {
  for (const Give give : kGives) {
    TablesLayer layer;
    NamedTensors same;
    same["w"] = Filled(DType::kF32, {2, 3}, 0.5);
    ASSERT_TRUE(SetParameters(give, std::move(same), &layer).ok());
    EXPECT_TRUE(Holds(layer, "w", DType::kF32, 0.5));
    EXPECT_TRUE(Holds(layer, "bias", DType::kF32, 2));
    EXPECT_TRUE(Holds(layer, "order", DType::kI32, 3));
    NamedTensors others;
    others["bias"] = Filled(DType::kF64, {3}, 0.25);
    others["order"] = Filled(DType::kF32, {2}, 7);
    ASSERT_TRUE(SetParameters(give, std::move(others), &layer).ok());
    EXPECT_TRUE(Holds(layer, "w", DType::kF32, 0.5));
    EXPECT_TRUE(Holds(layer, "bias", DType::kF32, 0.25));
    EXPECT_TRUE(Holds(layer, "order", DType::kI32, 7));
  }
}

TEST(SetParameters, TakesTheMemoryOfTensorsThatAreMovedAndOfNoOthers) {
  for (const Give give : kGives) {
    TablesLayer layer;
    NamedTensors given;
    given["w"] = Filled(DType::kF32, {2, 3}, 0.5);
    given["bias"] = Filled(DType::kF64, {3}, 0.25);
    const void* w = given["w"].raw();
    const void* own_bias = layer.parameters().at("bias").raw();
    ASSERT_TRUE(SetParameters(give, std::move(given), &layer).ok());
    EXPECT_EQ(layer.parameters().at("w").raw() == w, give == Give::kMoved);
    EXPECT_EQ(layer.parameters().at("bias").raw(), own_bias);  // of another dtype: converted
  }
}

TEST(SetParameters, ReplacesNothingWhereOneTensorDoesNotFit) {
  for (const Give give : kGives) {
    const auto refused = [give](const char* name, Tensor tensor) {
      TablesLayer layer;
      NamedTensors given;
      given["bias"] = Filled(DType::kF32, {3}, 0.25);
      given[name] = std::move(tensor);
      const absl::Status status = SetParameters(give, std::move(given), &layer);
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << name;
      EXPECT_TRUE(Holds(layer, "w", DType::kF32, 1));
      EXPECT_TRUE(Holds(layer, "bias", DType::kF32, 2));
      EXPECT_TRUE(Holds(layer, "order", DType::kI32, 3));
      return std::string(status.message());
    };
    EXPECT_EQ(refused("x", Filled(DType::kF32, {1}, 0)),
              "there is no parameter \"x\"; the layer has bias, order, w");
    EXPECT_EQ(refused("w", Filled(DType::kF32, {3, 2}, 0)),
              "parameter w has shape [3, 2]; expected is [2, 3]");
    EXPECT_TRUE(absl::StrContains(refused("order", Filled(DType::kF32, {2}, 0.5)),
                                  "does not hold every element of the tensor given for it"));
  }
}

TEST(SetParameters, AsksForANewSetup) {
  ThreadPool pool(1);
  Execution execution;
  execution.pool = &pool;
  for (const Give give : kGives) {
    TablesLayer layer;
    EXPECT_EQ(layer.Run({}, {}, execution).code(), absl::StatusCode::kFailedPrecondition);
    ASSERT_TRUE(layer.Setup({}, execution).ok());
    EXPECT_TRUE(layer.Run({}, {}, execution).ok());
    NamedTensors given;
    given["w"] = Filled(DType::kF32, {2, 3}, 0.5);
    ASSERT_TRUE(SetParameters(give, std::move(given), &layer).ok());
    EXPECT_EQ(layer.Run({}, {}, execution).code(), absl::StatusCode::kFailedPrecondition);
    ASSERT_TRUE(layer.Setup({}, execution).ok());
    EXPECT_TRUE(layer.Run({}, {}, execution).ok());
  }
}

// Of sizes that all differ.
Problem Uneven() {
  Problem problem = Problem::SelfAttention(2, 6, 5, 4, /*causal=*/false, DType::kBF16);
  problem.kv_heads = 3;
  problem.kv_tokens = 7;
  problem.value_dim = 8;
  return problem;
}

void ExpectSpecs(const std::vector<TensorSpec>& specs, const std::vector<TensorSpec>& expected) {
  ASSERT_EQ(specs.size(), expected.size());
  for (size_t n = 0; n < specs.size(); ++n) {
    EXPECT_EQ(specs[n].name, expected[n].name);
    EXPECT_EQ(specs[n].shape, expected[n].shape) << specs[n].name;
    EXPECT_EQ(specs[n].dtype, expected[n].dtype) << specs[n].name;
    EXPECT_EQ(specs[n].optional, expected[n].optional) << specs[n].name;
  }
}

TEST(Specs, HaveTheSizesOfTheProblem) {
  const Problem problem = Uneven();
  ExpectSpecs(QkvInputs(problem), {{"q", {2, 6, 5, 4}, DType::kBF16, false},
                                   {"k", {2, 3, 7, 4}, DType::kBF16, false},
                                   {"v", {2, 3, 7, 8}, DType::kBF16, false},
                                   {"key_mask", {2, 7}, DType::kU8, true}});
  ExpectSpecs(AttentionOutputs(problem), {{"out", {2, 6, 5, 8}, DType::kBF16, false},
                                          {"log_sum_exp", {2, 6, 5}, DType::kF32, true}});
  ExpectSpecs(HiddenInputs(problem), {{"x", {2, 5, 24}, DType::kBF16, false}});
  ExpectSpecs(HiddenOutputs(problem), {{"out", {2, 5, 24}, DType::kBF16, false}});
  // 60 rows of queries and outputs, 42 of keys and values, of 4 and 8 channels with 2 bytes.
  EXPECT_EQ(AttentionBytes(problem), (60 * 4 + 60 * 8 + 42 * 4 + 42 * 8) * 2);
}

// A layer of attention's tensors, whose segments have 1 to 3 tokens, that counts its calls.
class CountingLayer : public StreamingLayer {
 public:
  explicit CountingLayer(const Problem& problem)
      : StreamingLayer(problem, QkvInputs(problem), AttentionOutputs(problem),
                       {{"x", {2, kSegmentTokens, 4}}}, {{"y", {kSegmentTokens}}},
                       /*max_segment_tokens=*/3) {
    parameters_["w"] = Filled(DType::kF32, {2, 3}, 1);
    parameters_["b"] = Filled(DType::kF16, {5}, 1);
  }
  size_t workspace_bytes(int threads) const override { return 64 * threads; }
  Cost cost() const override { return {0, TensorBytes()}; }
  absl::Status Reset() override { return absl::OkStatus(); }
  int setups = 0, runs = 0;
  std::vector<int64_t> appended;

 private:
  absl::Status DoSetup(const Inputs&, const Execution&) override {
    return ++setups, absl::OkStatus();
  }
  absl::Status DoRun(const Inputs&, const Outputs&, const Execution&) override {
    return ++runs, absl::OkStatus();
  }
  absl::Status DoAppend(int64_t tokens, const Inputs&, const Outputs&, const Execution&) override {
    return appended.push_back(tokens), absl::OkStatus();
  }
};

TEST(Layer, TensorBytesAreThoseOfWhatMustBeThereAndTheParameters) {
  // q 240, k 168, v 336 and out 480 elements of 2 bytes; w has 6 of 4, b 5 of 2.
  EXPECT_EQ(CountingLayer(Uneven()).cost().bytes, (240 + 168 + 336 + 480) * 2 + 6 * 4 + 5 * 2);
}

// Tensors and memory that fit the layer, for a test to spoil.
struct Fitting {
  NamedTensors inputs, outputs;
  Tensor memory = Tensor(DType::kU8, {1000});
  ThreadPool pool = ThreadPool(2);
  Execution execution;

  Fitting() {
    for (const TensorSpec& spec : QkvInputs(Uneven())) {
      if (!spec.optional) inputs[spec.name] = Tensor(spec.dtype, spec.shape);
    }
    for (const TensorSpec& spec : AttentionOutputs(Uneven())) {
      if (!spec.optional) outputs[spec.name] = Tensor(spec.dtype, spec.shape);
    }
    execution.pool = &pool;
    UseMemory(0, 128);
  }
  void UseMemory(int64_t offset, size_t bytes) {
    execution.workspace = absl::MakeSpan(static_cast<std::byte*>(memory.raw()) + offset, bytes);
  }
};

TEST(Layer, CallsThatDoNotFitAreRefusedAndDoNothing) {
  struct Case {
    std::string message;
    bool of_setup;  // or of Run alone
    void (*spoil)(Fitting*);
  };
  const Case cases[] = {
      {"execution has no thread pool", true, [](Fitting* f) { f->execution.pool = nullptr; }},
      {"workspace has 127 bytes; the layer needs 128", true,
       [](Fitting* f) { f->UseMemory(0, 127); }},
      {"workspace is not aligned to 64 bytes", true, [](Fitting* f) { f->UseMemory(32, 128); }},
      {"workspace is not aligned to 64 bytes", true, [](Fitting* f) { f->UseMemory(63, 128); }},
      {"input k [2, 3, 7, 4] is missing", true, [](Fitting* f) { f->inputs.erase("k"); }},
      {"input v is f32; expected is bf16", true,
       [](Fitting* f) {
         f->inputs["v"] = Tensor(DType::kF32, {2, 3, 7, 8});
       }},
      {"input q has shape [2, 6, 4, 5]; expected is [2, 6, 5, 4]", true,
       [](Fitting* f) {
         f->inputs["q"] = Tensor(DType::kBF16, {2, 6, 4, 5});
       }},
      {"input key_mask has shape [2, 5]; expected is [2, 7]", true,
       [](Fitting* f) {
         f->inputs["key_mask"] = Tensor(DType::kU8, {2, 5});
       }},
      {"there is no input \"kk\"", true,
       [](Fitting* f) { f->inputs["kk"] = Tensor(DType::kBF16, {1}); }},
      {"output out [2, 6, 5, 8] is missing", false, [](Fitting* f) { f->outputs.clear(); }},
      {"there is no output \"weights\"", false,
       [](Fitting* f) { f->outputs["weights"] = Tensor(DType::kF32, {1}); }}};
  for (const Case& c : cases) {
    for (const bool in_setup : {true, false}) {
      if (in_setup && !c.of_setup) continue;
      CountingLayer layer(Uneven());
      Fitting fitting;
      if (!in_setup) {
        ASSERT_TRUE(layer.Setup(ViewsOf(fitting.inputs), fitting.execution).ok());
      }
      c.spoil(&fitting);
      const absl::Status status =
          in_setup ? layer.Setup(ViewsOf(fitting.inputs), fitting.execution)
                   : layer.Run(ViewsOf(fitting.inputs), MutableViewsOf(fitting.outputs),
                               fitting.execution);
      EXPECT_EQ(status, absl::InvalidArgumentError(c.message));
      EXPECT_EQ(layer.setups, in_setup ? 0 : 1);
      EXPECT_EQ(layer.runs, 0);
    }
  }
  CountingLayer layer(Uneven());
  Fitting fitting;
  fitting.UseMemory(64, 128);
  fitting.inputs["key_mask"] = Tensor(DType::kU8, {2, 7});
  ASSERT_TRUE(layer.Setup(ViewsOf(fitting.inputs), fitting.execution).ok());
  Inputs inputs = ViewsOf(fitting.inputs);
  inputs.Set("key_mask", ConstTensorView());  // as if it were not there
  inputs.Set("other", ConstTensorView());
  ASSERT_TRUE(layer.Run(inputs, MutableViewsOf(fitting.outputs), fitting.execution).ok());
  EXPECT_EQ(layer.runs, 1);
}

// A layer with a backward pass, which stops the gradients of the keys and of the bias, and counts its
// calls.
class DifferentiableLayer : public Layer {
 public:
  explicit DifferentiableLayer(bool is_differentiable = true)
      : Layer(Uneven(), QkvInputs(Uneven()), AttentionOutputs(Uneven())),
        is_differentiable_(is_differentiable) {
    parameters_["w"] = Filled(DType::kF16, {2, 3}, 1);
    parameters_["bias"] = Filled(DType::kF32, {3}, 2);
    parameters_["order"] = Filled(DType::kI32, {2}, 3);
  }
  size_t workspace_bytes(int) const override { return 0; }
  Cost cost() const override { return {}; }
  absl::Status CheckBackward() const override {
    return is_differentiable_ ? absl::OkStatus() : Layer::CheckBackward();
  }
  size_t kept_bytes() const override { return kept; }
  size_t backward_workspace_bytes(int threads) const override { return 64 * threads; }
  std::map<std::string, std::string> stopped_gradients() const override {
    return {{"k", "the keys are constants"}, {"bias", "the bias is a constant"}};
  }
  std::vector<std::string> differentiable_outputs() const override {
    return {"out", "log_sum_exp"};
  }
  int runs = 0, backward_setups = 0, passes = 0;
  size_t kept = 192;                         // what kept_bytes returns
  absl::Status of_setup, of_backward_setup;  // what DoSetup and DoSetUpBackward return

 private:
  absl::Status DoSetup(const Inputs&, const Execution&) override { return of_setup; }
  absl::Status DoRun(const Inputs&, const Outputs&, const Execution&) override {
    return ++runs, absl::OkStatus();
  }
  absl::Status DoSetUpBackward(const Inputs&, const Execution&) override {
    return ++backward_setups, of_backward_setup;
  }
  absl::Status DoBackward(const BackwardCall&, const Execution&) override {
    return ++passes, absl::OkStatus();
  }

  bool is_differentiable_;
};

TEST(Layer, GradientsAreThoseOfFloatingTensorsThatAreNotStopped) {
  const DifferentiableLayer layer;
  ExpectSpecs(layer.output_gradients(), {{"out", {2, 6, 5, 8}, DType::kBF16, true},
                                         {"log_sum_exp", {2, 6, 5}, DType::kF32, true}});
  ExpectSpecs(layer.input_gradients(),
              {{"q", {2, 6, 5, 4}, DType::kBF16, true}, {"v", {2, 3, 7, 8}, DType::kBF16, true}});
  ExpectSpecs(layer.parameter_gradients(), {{"w", {2, 3}, DType::kF32, true}});
  // By default a layer has no backward pass, and one that has takes the gradient of its output alone.
  const CountingLayer other(Uneven());
  EXPECT_EQ(other.CheckBackward(), absl::UnimplementedError("the layer has no backward pass"));
  EXPECT_EQ(other.kept_bytes(), 0u);
  EXPECT_EQ(other.backward_workspace_bytes(3), 0u);
  EXPECT_FALSE(other.backward_cost().flops.has_value());
  ExpectSpecs(other.output_gradients(), {{"out", {2, 6, 5, 8}, DType::kBF16, true}});
  ExpectSpecs(other.input_gradients(), {{"q", {2, 6, 5, 4}, DType::kBF16, true},
                                        {"k", {2, 3, 7, 4}, DType::kBF16, true},
                                        {"v", {2, 3, 7, 8}, DType::kBF16, true}});
  ExpectSpecs(other.parameter_gradients(),
              {{"b", {5}, DType::kF32, true}, {"w", {2, 3}, DType::kF32, true}});
}

// What a backward pass of DifferentiableLayer needs, for a test to spoil.
struct FittingBackward : Fitting {
  NamedTensors output_gradients, input_gradients, parameter_gradients;
  Tensor kept_memory = Tensor(DType::kU8, {1000});

  explicit FittingBackward(const Layer& layer) {
    const auto add = [](const std::vector<TensorSpec>& specs, NamedTensors* tensors) {
      for (const TensorSpec& spec : specs) (*tensors)[spec.name] = Tensor(spec.dtype, spec.shape);
    };
    add(layer.output_gradients(), &output_gradients);
    add(layer.input_gradients(), &input_gradients);
    add(layer.parameter_gradients(), &parameter_gradients);
    Keep(0, 192);
  }
  void Keep(int64_t offset, size_t bytes) {
    execution.kept = absl::MakeSpan(static_cast<std::byte*>(kept_memory.raw()) + offset, bytes);
  }
  absl::Status Setup(Layer* layer) { return layer->Setup(ViewsOf(inputs), execution); }
  absl::Status Run(Layer* layer) {
    return layer->Run(ViewsOf(inputs), MutableViewsOf(outputs), execution);
  }
  absl::Status SetUpBackward(Layer* layer) {
    return layer->SetUpBackward(ViewsOf(inputs), execution);
  }
  absl::Status Backward(Layer* layer) {
    return layer->Backward({ViewsOf(inputs), ViewsOf(outputs), ViewsOf(output_gradients),
                            MutableViewsOf(input_gradients), MutableViewsOf(parameter_gradients)},
                           execution);
  }
};

TEST(Layer, ABackwardPassFollowsItsSetUpWhichFollowsSetup) {
  DifferentiableLayer layer;
  FittingBackward fitting(layer);
  const absl::Status early =
      absl::FailedPreconditionError("SetUpBackward must be called before Backward");
  EXPECT_EQ(fitting.SetUpBackward(&layer),
            absl::FailedPreconditionError("Setup must be called before SetUpBackward"));
  EXPECT_EQ(fitting.Backward(&layer), early);
  ASSERT_TRUE(fitting.Setup(&layer).ok());
  EXPECT_EQ(fitting.Backward(&layer), early);
  layer.of_backward_setup = absl::InternalError("no");
  EXPECT_EQ(fitting.SetUpBackward(&layer), layer.of_backward_setup);
  EXPECT_EQ(fitting.Backward(&layer), early);
  layer.of_backward_setup = absl::OkStatus();
  ASSERT_TRUE(fitting.SetUpBackward(&layer).ok());
  EXPECT_TRUE(fitting.Run(&layer).ok());
  EXPECT_TRUE(fitting.Backward(&layer).ok());
  EXPECT_TRUE(fitting.Backward(&layer).ok());
  EXPECT_EQ(layer.passes, 2);
  // Another Setup, and other parameters, ask for another SetUpBackward.
  ASSERT_TRUE(fitting.Setup(&layer).ok());
  EXPECT_EQ(fitting.Backward(&layer), early);
  ASSERT_TRUE(fitting.SetUpBackward(&layer).ok());
  EXPECT_TRUE(fitting.Backward(&layer).ok());
  ASSERT_TRUE(layer.SetParameters(NamedTensors()).ok());
  EXPECT_EQ(fitting.Backward(&layer), early);
  EXPECT_EQ(layer.passes, 3);
  EXPECT_EQ(layer.backward_setups, 3);
}

TEST(Layer, ASetupThatFailsLeavesNothingOfTheOneBefore) {
  DifferentiableLayer layer;
  FittingBackward fitting(layer);
  ASSERT_TRUE(fitting.Setup(&layer).ok());
  ASSERT_TRUE(fitting.SetUpBackward(&layer).ok());
  layer.of_setup = absl::ResourceExhaustedError("no");
  EXPECT_EQ(fitting.Setup(&layer), layer.of_setup);
  EXPECT_EQ(fitting.Run(&layer), absl::FailedPreconditionError("Setup must be called before Run"));
  EXPECT_EQ(fitting.Backward(&layer),
            absl::FailedPreconditionError("SetUpBackward must be called before Backward"));
  EXPECT_EQ(layer.runs, 0);
  EXPECT_EQ(layer.passes, 0);
  // One that is refused before it begins changes nothing.
  layer.of_setup = absl::OkStatus();
  ASSERT_TRUE(fitting.Setup(&layer).ok());
  ASSERT_TRUE(fitting.SetUpBackward(&layer).ok());
  Execution without_threads = fitting.execution;
  without_threads.pool = nullptr;
  EXPECT_FALSE(layer.Setup(ViewsOf(fitting.inputs), without_threads).ok());
  EXPECT_TRUE(fitting.Run(&layer).ok());
  EXPECT_TRUE(fitting.Backward(&layer).ok());
}

TEST(Layer, ALayerWithoutABackwardPassRefusesWhatBelongsToIt) {
  DifferentiableLayer layer(/*is_differentiable=*/false);
  FittingBackward fitting(layer);
  const absl::Status refused = absl::UnimplementedError("the layer has no backward pass");
  ASSERT_TRUE(fitting.Setup(&layer).ok());
  EXPECT_EQ(fitting.SetUpBackward(&layer), refused);
  EXPECT_EQ(fitting.Run(&layer), refused);
  fitting.execution.kept = {};
  EXPECT_TRUE(fitting.Run(&layer).ok());
  EXPECT_EQ(layer.runs, 1);
  EXPECT_EQ(layer.backward_setups, 0);
}

TEST(Layer, BackwardCallsThatDoNotFitAreRefusedAndDoNothing) {
  struct Case {
    std::string message;
    void (*spoil)(FittingBackward*);
  };
  const Case cases[] = {
      {"execution has no thread pool", [](FittingBackward* f) { f->execution.pool = nullptr; }},
      {"workspace has 127 bytes; the layer needs 128",
       [](FittingBackward* f) { f->UseMemory(0, 127); }},
      {"workspace is not aligned to 64 bytes", [](FittingBackward* f) { f->UseMemory(32, 128); }},
      {"kept memory has 191 bytes; the layer needs 192",
       [](FittingBackward* f) { f->Keep(0, 191); }},
      {"kept memory has 0 bytes; the layer needs 192",
       [](FittingBackward* f) { f->execution.kept = {}; }},
      {"kept memory is not aligned to 64 bytes", [](FittingBackward* f) { f->Keep(32, 192); }},
      {"input k [2, 3, 7, 4] is missing", [](FittingBackward* f) { f->inputs.erase("k"); }},
      {"output out [2, 6, 5, 8] is missing", [](FittingBackward* f) { f->outputs.clear(); }},
      {"output log_sum_exp is f64; expected is f32",
       [](FittingBackward* f) {
         f->outputs["log_sum_exp"] = Tensor(DType::kF64, {2, 6, 5});
       }},
      {"output gradient out is f32; expected is bf16",
       [](FittingBackward* f) {
         f->output_gradients["out"] = Tensor(DType::kF32, {2, 6, 5, 8});
       }},
      {"output gradient log_sum_exp has shape [2, 6]; expected is [2, 6, 5]",
       [](FittingBackward* f) {
         f->output_gradients["log_sum_exp"] = Tensor(DType::kF32, {2, 6});
       }},
      {"there is no output gradient \"weights\"",
       [](FittingBackward* f) { f->output_gradients["weights"] = Tensor(DType::kF32, {1}); }},
      {"input gradient q has shape [2, 6, 4, 5]; expected is [2, 6, 5, 4]",
       [](FittingBackward* f) {
         f->input_gradients["q"] = Tensor(DType::kBF16, {2, 6, 4, 5});
       }},
      {"there is no input gradient \"k\"",
       [](FittingBackward* f) {
         f->input_gradients["k"] = Tensor(DType::kBF16, {2, 3, 7, 4});
       }},
      {"there is no input gradient \"key_mask\"",
       [](FittingBackward* f) {
         f->input_gradients["key_mask"] = Tensor(DType::kU8, {2, 7});
       }},
      {"parameter gradient w is f16; expected is f32",
       [](FittingBackward* f) {
         f->parameter_gradients["w"] = Tensor(DType::kF16, {2, 3});
       }},
      {"there is no parameter gradient \"bias\"",
       [](FittingBackward* f) { f->parameter_gradients["bias"] = Tensor(DType::kF32, {3}); }},
      {"there is no parameter gradient \"order\"",
       [](FittingBackward* f) { f->parameter_gradients["order"] = Tensor(DType::kI32, {2}); }}};
  for (const Case& c : cases) {
    DifferentiableLayer layer;
    FittingBackward fitting(layer);
    ASSERT_TRUE(fitting.Setup(&layer).ok());
    ASSERT_TRUE(fitting.SetUpBackward(&layer).ok());
    c.spoil(&fitting);
    EXPECT_EQ(fitting.Backward(&layer), absl::InvalidArgumentError(c.message));
    EXPECT_EQ(layer.passes, 0);
  }
  // All gradients may be left out.
  DifferentiableLayer layer;
  FittingBackward fitting(layer);
  ASSERT_TRUE(fitting.Setup(&layer).ok());
  ASSERT_TRUE(fitting.SetUpBackward(&layer).ok());
  fitting.output_gradients.clear();
  fitting.input_gradients.clear();
  fitting.parameter_gradients.clear();
  EXPECT_TRUE(fitting.Backward(&layer).ok());
  // A Run refuses kept memory that is too small, and SetUpBackward a workspace.
  fitting.Keep(0, 191);
  EXPECT_EQ(fitting.Run(&layer),
            absl::InvalidArgumentError("kept memory has 191 bytes; the layer needs 192"));
  fitting.UseMemory(0, 127);
  EXPECT_EQ(fitting.SetUpBackward(&layer),
            absl::InvalidArgumentError("workspace has 127 bytes; the layer needs 128"));
  EXPECT_EQ(layer.runs, 0);
  EXPECT_EQ(layer.backward_setups, 1);
}

TEST(Layer, NoKeptMemoryMayLieAnywhere) {
  DifferentiableLayer layer;
  layer.kept = 0;
  FittingBackward fitting(layer);
  ASSERT_TRUE(fitting.Setup(&layer).ok());
  ASSERT_TRUE(fitting.SetUpBackward(&layer).ok());
  fitting.Keep(3, 0);
  EXPECT_TRUE(fitting.Run(&layer).ok());
  EXPECT_TRUE(fitting.Backward(&layer).ok());
  EXPECT_EQ(layer.passes, 1);
}

TEST(StreamingLayer, SegmentsHaveOneToTheMostTokensAndTensorsToMatch) {
  CountingLayer layer(Uneven());
  Fitting fitting;
  const auto append = [&](const Shape& x, const Shape& y) {
    Tensor input(DType::kF32, x), output(DType::kF32, y);
    return layer.Append({{"x", input.view()}}, {{"y", output.view()}}, fitting.execution);
  };
  EXPECT_EQ(append({2, 1, 4}, {1}),
            absl::FailedPreconditionError("Setup must be called before Append"));
  ASSERT_TRUE(layer.Setup(ViewsOf(fitting.inputs), fitting.execution).ok());
  const auto refused = [](absl::string_view message) {
    return absl::InvalidArgumentError(message);
  };
  EXPECT_EQ(append({2, 0, 4}, {1}), refused("segment has 0 tokens; allowed are 1 to 3"));
  EXPECT_EQ(append({2, 4, 4}, {4}), refused("segment has 4 tokens; allowed are 1 to 3"));
  EXPECT_EQ(append({2}, {1}), refused("segment has 0 tokens; allowed are 1 to 3"));
  EXPECT_EQ(append({2, 3, 5}, {3}), refused("input x has shape [2, 3, 5]; expected is [2, 3, 4]"));
  EXPECT_EQ(append({2, 3, 4}, {2}), refused("output y has shape [2]; expected is [3]"));
  EXPECT_EQ(layer.Append({}, {}, fitting.execution),
            refused("segment has 0 tokens; allowed are 1 to 3"));
  fitting.execution.workspace = {};
  EXPECT_EQ(append({2, 1, 4}, {1}), refused("workspace has 0 bytes; the layer needs 128"));
  EXPECT_TRUE(layer.appended.empty());
  fitting.UseMemory(0, 128);
  EXPECT_TRUE(append({2, 1, 4}, {1}).ok());
  EXPECT_TRUE(append({2, 3, 4}, {3}).ok());
  EXPECT_EQ(layer.appended, (std::vector<int64_t>{1, 3}));
}

TEST(CheckSupported, NamesWhatATechniqueLacks) {
  TechniqueInfo info;
  info.name = "this";
  Problem causal = Uneven();
  causal.causal = true;
  const auto unimplemented = [](absl::string_view message) {
    return absl::UnimplementedError(message);
  };
  for (const Device device : {Device::kCpu, Device::kCuda, Device::kSimulator}) {
    EXPECT_TRUE(CheckSupported(info, causal, device).ok());
    EXPECT_TRUE(CheckSupported(info, Uneven(), device).ok());
  }
  info.devices = {Device::kCpu};
  EXPECT_TRUE(CheckSupported(info, Uneven(), Device::kCpu).ok());
  EXPECT_EQ(CheckSupported(info, Uneven(), Device::kSimulator),
            unimplemented("this has no implementation for device simulator"));
  EXPECT_EQ(CheckSupported(info, Uneven(), Device::kCuda),
            unimplemented("this has no implementation for device cuda"));
  info.devices = {Device::kCuda};
  EXPECT_EQ(CheckSupported(info, Uneven(), Device::kCpu),
            unimplemented("this has no implementation for device cpu"));
  info.supports_causal = false;
  EXPECT_TRUE(CheckForm(info, Uneven()).ok());
  EXPECT_EQ(CheckForm(info, causal), unimplemented("this has no causal form"));
  info.supports_causal = true;
  info.supports_noncausal = false;
  EXPECT_TRUE(CheckForm(info, causal).ok());
  EXPECT_EQ(CheckForm(info, Uneven()), unimplemented("this is causal only"));
  info.self_attention = true;
  EXPECT_EQ(CheckForm(info, causal),
            unimplemented("this is self-attention: query_tokens is 5, kv_tokens is 7"));
  causal.kv_tokens = 5;
  EXPECT_TRUE(CheckForm(info, causal).ok());
  causal.batch = -1;
  EXPECT_EQ(CheckSupported(info, causal, Device::kCuda).code(), absl::StatusCode::kInvalidArgument);
}

struct NoOptions {
  void Describe(OptionBinder&) {}
};
class NamedTechnique : public TechniqueOf<NoOptions> {
 public:
  explicit NamedTechnique(const std::string& name) : TechniqueOf({name, "attention", "", ""}) {}

 private:
  absl::StatusOr<std::unique_ptr<Layer>> MakeLayer(const Problem& problem, const NoOptions&, Device,
                                                   uint64_t) const override {
    return std::make_unique<CountingLayer>(problem);
  }
  absl::Status Definition(const Problem&, const NoOptions&, const NamedTensors&, const Inputs&,
                          const DefinitionRequest&, NamedTensors*) const override {
    return absl::OkStatus();
  }
};

TEST(Registry, FindsByNameAndNamesTheNearest) {
  Registry registry;
  for (const char* name : {"far", "near"}) registry.Add(std::make_unique<NamedTechnique>(name));
  ASSERT_EQ(registry.All().size(), 2u);
  EXPECT_EQ(registry.All()[0]->info().name, "far");
  EXPECT_EQ(registry.All()[1]->info().name, "near");
  EXPECT_EQ(*registry.Find("near"), registry.All()[1]);
  EXPECT_EQ(registry.Find("nearer").status(),
            absl::NotFoundError("there is no technique \"nearer\"; nearest are near, far"));
  EXPECT_DEATH(registry.Add(std::make_unique<NamedTechnique>("far")),
               "technique far is registered twice");
}

TEST(Problem, IsPrintedWithWhatDiffersAndComparedByAll) {
  EXPECT_EQ(Problem::SelfAttention(1, 8, 512, 64, true).ToString(),
            "batch 1, 8 heads of 64, 512 tokens, causal, f32");
  EXPECT_EQ(
      Uneven().ToString(),
      "batch 2, 6 heads of 4 (values of 8) over 3 key-value heads, 5 tokens over 7 keys, bf16");
  EXPECT_EQ(Problem::SelfAttention(2, 6, 5, 4, true, DType::kF16).ToString(),
            "batch 2, 6 heads of 4, 5 tokens, causal, f16");
  EXPECT_TRUE(Uneven() == Uneven());
  for (int64_t Problem::*size :
       {&Problem::batch, &Problem::query_heads, &Problem::kv_heads, &Problem::query_tokens,
        &Problem::kv_tokens, &Problem::head_dim, &Problem::value_dim}) {
    Problem other = Uneven();
    ++(other.*size);
    EXPECT_FALSE(other == Uneven());
  }
  Problem causal = Uneven(), half = Uneven();
  causal.causal = true;
  half.dtype = DType::kF16;
  EXPECT_FALSE(causal == Uneven());
  EXPECT_FALSE(half == Uneven());
}

TEST(Problem, EachSizeHasItsRange) {
  struct Case {
    int64_t Problem::*size;
    std::string name;
    int64_t least, most;
  };
  const int64_t many = int64_t{1} << 40;
  const Case cases[] = {{&Problem::batch, "batch", 0, many},
                        {&Problem::query_heads, "query_heads", 1, many},
                        {&Problem::kv_heads, "kv_heads", 1, many},
                        {&Problem::query_tokens, "query_tokens", 0, many},
                        {&Problem::kv_tokens, "kv_tokens", 0, many},
                        {&Problem::head_dim, "head_dim", 1, 256},
                        {&Problem::value_dim, "value_dim", 1, 256}};
  for (const Case& c : cases) {
    const auto with = [&c](int64_t value) {
      Problem problem = Problem::SelfAttention(1, 1, 1, 1);
      problem.*c.size = value;
      return Validate(problem);
    };
    const auto refused = [&](int64_t value) {
      return absl::InvalidArgumentError(
          absl::StrCat(c.name, " is ", value, "; allowed are ", c.least, " to ", c.most));
    };
    EXPECT_EQ(with(c.least), absl::OkStatus());
    EXPECT_EQ(with(c.least - 1), refused(c.least - 1));
    // A problem of one query head has no more key-value heads.
    EXPECT_EQ(with(c.most).ok(), c.name != "kv_heads");
    EXPECT_EQ(with(c.most + 1), refused(c.most + 1));
  }
}

TEST(Problem, HeadsDivideElementsAreFewAndTypesAreFloating) {
  Problem problem = Uneven();
  EXPECT_TRUE(Validate(problem).ok());
  problem.kv_heads = 4;
  EXPECT_EQ(Validate(problem),
            absl::InvalidArgumentError("query_heads is 6, which kv_heads (4) does not divide"));
  // 2^46 elements are the most: 2 x 4 x 2^40 x 8, by the tokens or the channels of either side.
  problem = Problem::SelfAttention(2, 4, 1, 1);
  problem.kv_tokens = int64_t{1} << 40;
  problem.value_dim = 8;
  EXPECT_TRUE(Validate(problem).ok());
  problem.value_dim = 9;
  EXPECT_EQ(Validate(problem),
            absl::InvalidArgumentError(
                "the tensors of batch 2, 4 heads of 1 (values of 9), 1 tokens over 1099511627776 "
                "keys, f32 have 7.91648e+13 elements; allowed are 7.03687e+13"));
  std::swap(problem.head_dim, problem.value_dim);
  EXPECT_FALSE(Validate(problem).ok());
  std::swap(problem.query_tokens, problem.kv_tokens);
  EXPECT_FALSE(Validate(problem).ok());
  // No tokens count as one, which has 2^40 x 2^6 elements here.
  problem = Problem::SelfAttention(1, int64_t{1} << 40, 0, 64);
  EXPECT_TRUE(Validate(problem).ok());
  problem.batch = 2;
  EXPECT_FALSE(Validate(problem).ok());
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    EXPECT_TRUE(Validate(Problem::SelfAttention(1, 1, 1, 1, false, dtype)).ok());
  }
  EXPECT_EQ(Validate(Problem::SelfAttention(1, 1, 1, 1, false, DType::kF64)),
            absl::InvalidArgumentError("dtype is f64; allowed are f32, bf16, f16"));
}

TEST(StoppedValues, LaterEvaluationsFindTheFirstOnesValuesInTheirPlaces) {
  StoppedValues stopped;
  // Evaluates x^2, y^3 and a choice, which are constants.
  const auto evaluate = [](double x, double y, double choice, StoppedValues* of) {
    std::vector<double> first = {x * x}, second = {y * y * y, y}, third = {choice};
    of->Hold(absl::MakeSpan(first));
    of->Choose(absl::MakeSpan(third));
    of->Hold(absl::MakeSpan(second));
    return std::vector<double>{first[0], second[0], second[1], third[0]};
  };
  EXPECT_EQ(evaluate(2, 3, 7, &stopped), (std::vector<double>{4, 27, 3, 7}));
  ASSERT_EQ(stopped.Rewind(), absl::OkStatus());
  EXPECT_EQ(evaluate(5, 6, 8, &stopped), (std::vector<double>{4, 27, 3, 7}));
  ASSERT_EQ(stopped.Rewind(), absl::OkStatus());
  StoppedValues elsewhere = stopped.WithChoices();
  EXPECT_EQ(evaluate(1, 2, 9, &elsewhere), (std::vector<double>{1, 8, 2, 7}));
  ASSERT_EQ(elsewhere.Rewind(), absl::OkStatus());
  EXPECT_EQ(evaluate(5, 6, 8, &elsewhere), (std::vector<double>{1, 8, 2, 7}));
}

TEST(StoppedValues, AnEvaluationThatHoldsOtherValuesIsAnError) {
  const auto hold = [](int64_t count, StoppedValues* stopped) {
    std::vector<double> values(count, 1.0);
    stopped->Hold(absl::MakeSpan(values));
  };
  for (const std::vector<int64_t>& counts :
       std::vector<std::vector<int64_t>>{{}, {3}, {2, 2}}) {  // too few, of another size, too many
    StoppedValues stopped;
    hold(2, &stopped);
    ASSERT_EQ(stopped.Rewind(), absl::OkStatus());
    for (const int64_t count : counts) hold(count, &stopped);
    EXPECT_EQ(stopped.Rewind().code(), absl::StatusCode::kInternal) << counts.size();
  }
}

TEST(Device, NamesReadBack) {
  for (const Device device : {Device::kCpu, Device::kCuda, Device::kSimulator}) {
    EXPECT_EQ(*ParseDevice(Name(device)), device);
  }
  EXPECT_EQ(ParseDevice("gpu").status(),
            absl::InvalidArgumentError("unknown device \"gpu\"; known are cpu, cuda, simulator"));
}

}  // namespace
}  // namespace tfb
