// Tests the shared library by its header alone, as a program that loads it sees it.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "harness/c/tfb.h"
#include "nlohmann/json.hpp"

namespace {

using ::testing::HasSubstr;
using Json = nlohmann::json;

constexpr DLDataType kF32 = {kDLFloat, 32, 1}, kF64 = {kDLFloat, 64, 1};

// A contiguous tensor of the host.
class Array {
 public:
  Array(std::vector<int64_t> shape, DLDataType dtype) : shape_(std::move(shape)) {
    int64_t elements = 1;
    for (const int64_t size : shape_) elements *= size;
    memory_.resize(static_cast<size_t>(elements * dtype.bits / 8));
    tensor = {memory_.data(),
              {kDLCPU, 0},
              static_cast<int>(shape_.size()),
              dtype,
              shape_.data(),
              nullptr,
              0};
  }
  Array(const Array&) = delete;
  template <class T>
  T* data() {
    return reinterpret_cast<T*>(memory_.data());
  }
  template <class T>
  size_t size() const {
    return memory_.size() / sizeof(T);
  }

  DLTensor tensor;

 private:
  std::vector<int64_t> shape_;
  std::vector<char> memory_;
};

DLDataType ToDLDataType(const std::string& dtype) {
  if (dtype == "f32") return kF32;
  if (dtype == "i32") return {kDLInt, 32, 1};
  if (dtype == "i64") return {kDLInt, 64, 1};
  if (dtype == "u8") return {kDLUInt, 8, 1};
  ADD_FAILURE() << dtype;
  return kF32;
}

// Arrays by name, as an argument.
struct Arrays {
  void Add(const std::string& name, std::vector<int64_t> shape, DLDataType dtype) {
    names.push_back(name);
    arrays.push_back(std::make_unique<Array>(std::move(shape), dtype));
  }
  std::vector<TfbTensor> Argument() const {
    std::vector<TfbTensor> tensors;
    for (size_t n = 0; n < names.size(); ++n) {
      tensors.push_back({names[n].c_str(), &arrays[n]->tensor});
    }
    return tensors;
  }
  Array& at(const std::string& name) {
    for (size_t n = 0; n < names.size(); ++n) {
      if (names[n] == name) return *arrays[n];
    }
    ADD_FAILURE() << name;
    return *arrays[0];
  }

  void Remove(size_t n) {
    names.erase(names.begin() + static_cast<std::ptrdiff_t>(n));
    arrays.erase(arrays.begin() + static_cast<std::ptrdiff_t>(n));
  }

  std::vector<std::string> names;
  std::vector<std::unique_ptr<Array>> arrays;
};

struct Destroy {
  void operator()(TfbLayer* layer) const { tfb_destroy(layer); }
};
using LayerPtr = std::unique_ptr<TfbLayer, Destroy>;

TfbProblem SelfAttention(int64_t tokens, bool causal) {
  return {2, 2, 2, tokens, tokens, 16, 16, causal ? 1 : 0, kF32};
}

LayerPtr Create(const std::string& technique, const TfbProblem& problem) {
  TfbLayer* layer = nullptr;
  EXPECT_EQ(tfb_create(technique.c_str(), &problem, "cpu", 1, 2, &layer), TFB_OK)
      << technique << ": " << tfb_last_error();
  return LayerPtr(layer);
}

Json Describe(const LayerPtr& layer) {
  const char* json = nullptr;
  EXPECT_EQ(tfb_describe(layer.get(), &json), TFB_OK);
  return Json::parse(json);
}

// Returns the inputs that are not optional. Floating ones are like noise; integers are 0 and 1.
Arrays InputsOf(const Json& specs) {
  Arrays inputs;
  for (const Json& spec : specs) {
    if (spec["optional"]) continue;
    inputs.Add(spec["name"], spec["shape"], ToDLDataType(spec["dtype"]));
    Array& array = *inputs.arrays.back();
    if (spec["dtype"] == "f32") {
      for (size_t i = 0; i < array.size<float>(); ++i) {
        const float wave = std::sin(static_cast<float>((i + 1) * (inputs.names.size() + 1)));
        array.data<float>()[i] = spec["noise"].is_null() ? wave : (wave + 1.5F) / 3;
      }
    } else if (spec["dtype"] == "i32") {
      for (size_t i = 0; i < array.size<int32_t>(); ++i) {
        array.data<int32_t>()[i] = static_cast<int32_t>(i % 2);
      }
    }
  }
  return inputs;
}

TfbStatus SetUpLayer(const LayerPtr& layer, const Arrays& inputs) {
  const std::vector<TfbTensor> given = inputs.Argument();
  return tfb_setup(layer.get(), given.data(), given.size(), nullptr, 0, nullptr);
}
TfbStatus RunLayer(const LayerPtr& layer, const Arrays& inputs, const Arrays& outputs) {
  const std::vector<TfbTensor> given = inputs.Argument(), written = outputs.Argument();
  return tfb_run(layer.get(), given.data(), given.size(), written.data(), written.size(), nullptr,
                 0, nullptr);
}

// A layer of dense attention over 40 tokens, its inputs and its output.
struct Dense {
  Dense() {
    const Json said = Describe(layer);
    inputs = InputsOf(said["inputs"]);
    outputs.Add("out", said["outputs"][0]["shape"], kF32);
  }
  LayerPtr layer = Create("dense", SelfAttention(40, false));
  Arrays inputs, outputs;
};

TEST(CInterface, HasTheHeadersVersion) {
  EXPECT_EQ(tfb_interface_version(), TFB_INTERFACE_VERSION);
  EXPECT_EQ(tfb_interface_revision(), TFB_INTERFACE_REVISION);
}

TEST(CInterface, EveryTechniqueRunsAndIsAsCloseToItsDefinitionAsItsBound) {
  const Json techniques = Json::parse(tfb_techniques());
  EXPECT_GE(techniques.size(), 38u);
  for (const Json& one : techniques) {
    const std::string name = one["name"];
    // Language models read a datastore; its queries are tokens of text.
    const bool is_language_model = one["input_kind"] == "tokens";
    const LayerPtr layer = Create(name, SelfAttention(96, one["causal"].back()));
    if (layer == nullptr) continue;
    const Json said = Describe(layer);
    EXPECT_FALSE(one["title"].get<std::string>().empty());
    const Arrays inputs = InputsOf(said["inputs"]);
    Arrays outputs;
    const Json& out = said["outputs"][0];
    ASSERT_EQ(out["name"], "out") << name;
    outputs.Add("out", out["shape"], ToDLDataType(out["dtype"]));
    ASSERT_EQ(SetUpLayer(layer, inputs), TFB_OK) << name << ": " << tfb_last_error();
    ASSERT_EQ(RunLayer(layer, inputs, outputs), TFB_OK) << name << ": " << tfb_last_error();

    const std::vector<TfbTensor> given = inputs.Argument(), written = outputs.Argument();
    const char* json = nullptr;
    ASSERT_EQ(tfb_evaluate(layer.get(), given.data(), given.size(), nullptr, 0, 20, &json), TFB_OK)
        << name << ": " << tfb_last_error();
    const Json accuracy = Json::parse(json);
    EXPECT_TRUE(accuracy["passed"]) << name << ": " << accuracy;
    if (is_language_model) continue;
    EXPECT_LE(accuracy["definition"]["max_abs_over_max_value"], accuracy["definition"]["bound"]);
  }
}

TEST(CInterface, TheDefinitionIsEvaluatedInFloat64) {
  Dense dense;
  ASSERT_EQ(SetUpLayer(dense.layer, dense.inputs), TFB_OK);
  ASSERT_EQ(RunLayer(dense.layer, dense.inputs, dense.outputs), TFB_OK);
  Arrays defined;
  defined.Add("out", {2, 2, 40, 16}, kF64);
  defined.Add("weights", {2, 2, 40, 40}, kF64);
  const std::vector<TfbTensor> given = dense.inputs.Argument(), written = defined.Argument();
  ASSERT_EQ(tfb_define(dense.layer.get(), given.data(), given.size(), written.data(), 2), TFB_OK)
      << tfb_last_error();
  double largest = 0;
  for (size_t i = 0; i < defined.at("out").size<double>(); ++i) {
    largest = std::max(largest, std::abs(defined.at("out").data<double>()[i] -
                                         dense.outputs.at("out").data<float>()[i]));
  }
  EXPECT_GT(largest, 0);
  EXPECT_LE(largest, 2e-6);
  double row = 0;
  for (int j = 0; j < 40; ++j) row += defined.at("weights").data<double>()[j];
  EXPECT_NEAR(row, 1, 1e-12);
}

// The tensors are one row, seen from 2^36 tokens, as PyTorch's expand makes them. A caller that asks
// too much gets a status: its process goes on.
TEST(CInterface, WantOfMemoryIsAStatus) {
  constexpr int64_t kTokens = int64_t{1} << 36;
  const TfbProblem huge = {1, 1, 1, kTokens, kTokens, 16, 16, 0, kF32};
  float row[16] = {};
  double defined[16] = {};
  int64_t shape[] = {1, 1, kTokens, 16}, strides[] = {16, 16, 0, 1};
  DLTensor repeated = {row, {kDLCPU, 0}, 4, kF32, shape, strides, 0};
  DLTensor out = {defined, {kDLCPU, 0}, 4, kF64, shape, strides, 0};
  const std::vector<TfbTensor> inputs = {{"q", &repeated}, {"k", &repeated}, {"v", &repeated}};
  const TfbTensor outputs = {"out", &out};
  const LayerPtr layer = Create("dense", huge);
  ASSERT_NE(layer, nullptr);
  const char* json = nullptr;
  EXPECT_EQ(tfb_evaluate(layer.get(), inputs.data(), 3, nullptr, 0, 1, &json),
            TFB_RESOURCE_EXHAUSTED)
      << tfb_last_error();
  EXPECT_EQ(tfb_define(layer.get(), inputs.data(), 3, &outputs, 1), TFB_RESOURCE_EXHAUSTED)
      << tfb_last_error();
  TfbLayer* none = nullptr;
  const TfbProblem many_heads = {1, kTokens / 8, kTokens / 8, 64, 64, 64, 64, 0, kF32};
  EXPECT_EQ(tfb_create("rfa", &many_heads, "cpu", 1, 2, &none), TFB_RESOURCE_EXHAUSTED)
      << tfb_last_error();
}

TEST(CInterface, OutputsOfOtherCodeAreJudged) {
  Dense dense;
  ASSERT_EQ(SetUpLayer(dense.layer, dense.inputs), TFB_OK);
  ASSERT_EQ(RunLayer(dense.layer, dense.inputs, dense.outputs), TFB_OK);
  const std::vector<TfbTensor> given = dense.inputs.Argument(), judged = dense.outputs.Argument();
  const auto evaluate = [&] {
    const char* json = nullptr;
    EXPECT_EQ(
        tfb_evaluate(dense.layer.get(), given.data(), given.size(), judged.data(), 1, 0, &json),
        TFB_OK)
        << tfb_last_error();
    return Json::parse(json);
  };
  EXPECT_TRUE(evaluate()["passed"]);
  dense.outputs.at("out").data<float>()[7] += 0.5F;
  const Json wrong = evaluate();
  EXPECT_FALSE(wrong["passed"]);
  EXPECT_NEAR(wrong["definition"]["max_abs"], 0.5, 1e-5);
  dense.outputs.at("out").data<float>()[7] = NAN;
  EXPECT_EQ(evaluate()["definition"]["not_finite"], 1);
  EXPECT_EQ(evaluate()["definition"]["max_abs"], "inf");
}

TEST(CInterface, StridesAndOffsetsAreFollowed) {
  Dense dense;
  ASSERT_EQ(SetUpLayer(dense.layer, dense.inputs), TFB_OK);
  ASSERT_EQ(RunLayer(dense.layer, dense.inputs, dense.outputs), TFB_OK);
  // The same queries as [batch, tokens, heads, channels], behind 8 bytes of something else.
  std::vector<float> memory(2 + 2 * 40 * 2 * 16, NAN);
  for (int b = 0; b < 2; ++b) {
    for (int h = 0; h < 2; ++h) {
      for (int t = 0; t < 40; ++t) {
        std::copy_n(dense.inputs.at("q").data<float>() + ((b * 2 + h) * 40 + t) * 16, 16,
                    memory.data() + 2 + ((b * 40 + t) * 2 + h) * 16);
      }
    }
  }
  int64_t strides[] = {40 * 2 * 16, 16, 2 * 16, 1};
  DLTensor& q = dense.inputs.at("q").tensor;
  q.data = memory.data();
  q.byte_offset = 8;
  q.strides = strides;
  Arrays outputs;
  outputs.Add("out", {2, 2, 40, 16}, kF32);
  ASSERT_EQ(RunLayer(dense.layer, dense.inputs, outputs), TFB_OK) << tfb_last_error();
  EXPECT_EQ(std::memcmp(outputs.at("out").data<float>(), dense.outputs.at("out").data<float>(),
                        outputs.at("out").size<char>()),
            0);
}

TEST(CInterface, ACallersWorkspaceIsUsed) {
  Dense dense;
  size_t bytes = 0;
  ASSERT_EQ(tfb_workspace_bytes(dense.layer.get(), &bytes), TFB_OK);
  ASSERT_GT(bytes, 0u);
  EXPECT_EQ(Describe(dense.layer)["workspace_bytes"], bytes);
  std::vector<char> memory(bytes + 64);
  char* workspace = memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64);
  const std::vector<TfbTensor> given = dense.inputs.Argument(), written = dense.outputs.Argument();
  EXPECT_EQ(tfb_setup(dense.layer.get(), given.data(), 3, workspace, bytes, nullptr), TFB_OK);
  EXPECT_EQ(
      tfb_run(dense.layer.get(), given.data(), 3, written.data(), 1, workspace, bytes, nullptr),
      TFB_OK);
  EXPECT_EQ(
      tfb_run(dense.layer.get(), given.data(), 3, written.data(), 1, workspace, bytes - 1, nullptr),
      TFB_INVALID_ARGUMENT);
  EXPECT_THAT(tfb_last_error(), HasSubstr("workspace has "));
  EXPECT_EQ(
      tfb_run(dense.layer.get(), given.data(), 3, written.data(), 1, workspace + 4, bytes, nullptr),
      TFB_INVALID_ARGUMENT);
  EXPECT_STREQ(tfb_last_error(), "workspace is not aligned to 64 bytes");
}

TEST(CInterface, ParametersAreReadAndReplaced) {
  const LayerPtr layer = Create("t5_bias", SelfAttention(40, true));
  DLTensor found = {};
  ASSERT_EQ(tfb_get_parameter(layer.get(), "beta", &found), TFB_OK) << tfb_last_error();
  ASSERT_EQ(found.ndim, 2);
  Array values({found.shape[0], found.shape[1]}, kF32);
  for (size_t i = 0; i < values.size<float>(); ++i) values.data<float>()[i] = static_cast<float>(i);
  const TfbTensor given = {"beta", &values.tensor};
  ASSERT_EQ(tfb_set_parameters(layer.get(), &given, 1), TFB_OK) << tfb_last_error();
  ASSERT_EQ(tfb_get_parameter(layer.get(), "beta", &found), TFB_OK);
  EXPECT_EQ(static_cast<const float*>(found.data)[5], 5);
  const TfbTensor wrong = {"bis", &values.tensor};
  EXPECT_EQ(tfb_set_parameters(layer.get(), &wrong, 1), TFB_INVALID_ARGUMENT);
  EXPECT_STREQ(tfb_last_error(), "there is no parameter \"bis\"; the layer has beta");
  EXPECT_EQ(tfb_get_parameter(layer.get(), "bis", &found), TFB_NOT_FOUND);
}

TEST(CInterface, SegmentsGiveWhatTheWholeGives) {
  constexpr int64_t kTokens = 256, kWidth = 32;
  TfbProblem problem = SelfAttention(kTokens, true);
  problem.batch = 1;
  const LayerPtr layer = Create("transformer_xl", problem);
  const Json said = Describe(layer);
  Arrays inputs = InputsOf(said["inputs"]), whole;
  whole.Add("out", {1, kTokens, kWidth}, kF32);
  ASSERT_EQ(SetUpLayer(layer, inputs), TFB_OK);
  ASSERT_EQ(RunLayer(layer, inputs, whole), TFB_OK);
  const int64_t step = said["streaming"]["split_tokens"];
  ASSERT_EQ(step, kTokens / 2);
  EXPECT_EQ(said["streaming"]["inputs"][0]["shape"], Json({1, -1, kWidth}));
  for (int repeat = 0; repeat < 2; ++repeat) {
    ASSERT_EQ(tfb_reset(layer.get()), TFB_OK);
    for (int64_t begin = 0; begin < kTokens; begin += step) {
      Arrays segment, outputs;
      segment.Add("x", {1, step, kWidth}, kF32);
      segment.at("x").tensor.data = inputs.at("x").data<float>() + begin * kWidth;
      outputs.Add("out", {1, step, kWidth}, kF32);
      const std::vector<TfbTensor> given = segment.Argument(), written = outputs.Argument();
      ASSERT_EQ(tfb_append(layer.get(), given.data(), 1, written.data(), 1, nullptr, 0, nullptr),
                TFB_OK)
          << tfb_last_error();
      for (int64_t i = 0; i < step * kWidth; ++i) {
        EXPECT_NEAR(outputs.at("out").data<float>()[i],
                    whole.at("out").data<float>()[begin * kWidth + i], 1e-5);
      }
    }
  }
  const LayerPtr lsh = Create("lsh", problem);
  EXPECT_EQ(tfb_reset(lsh.get()), TFB_UNIMPLEMENTED);
  EXPECT_STREQ(tfb_last_error(), "the layer reads no segments");
}

TEST(CInterface, WhatCannotBeIsRefusedWithItsReason) {
  const TfbProblem problem = SelfAttention(40, false);
  const auto create = [&](const char* technique, TfbProblem of, const char* device, int threads) {
    TfbLayer* layer = nullptr;
    const TfbStatus status = tfb_create(technique, &of, device, 1, threads, &layer);
    EXPECT_EQ(layer, nullptr);
    return status;
  };
  EXPECT_EQ(create("dens", problem, "cpu", 1), TFB_NOT_FOUND);
  EXPECT_THAT(tfb_last_error(), HasSubstr("there is no technique \"dens\"; nearest are dense"));
  EXPECT_EQ(create("longformer:windw=3", problem, "cpu", 1), TFB_INVALID_ARGUMENT);
  EXPECT_THAT(tfb_last_error(), HasSubstr("unknown option \"windw\"; known are window"));
  EXPECT_EQ(create("dense", problem, "tpu", 1), TFB_INVALID_ARGUMENT);
  EXPECT_STREQ(tfb_last_error(), "unknown device \"tpu\"; known are cpu, cuda, simulator");
  EXPECT_EQ(create("dense", problem, "simulator", 1), TFB_UNIMPLEMENTED);
  EXPECT_EQ(create("dense", problem, "cpu", -1), TFB_INVALID_ARGUMENT);
  EXPECT_STREQ(tfb_last_error(), "threads is -1; allowed are 0 to 4096");
  EXPECT_EQ(create("strided", problem, "cpu", 1), TFB_UNIMPLEMENTED);
  TfbProblem wrong = problem;
  wrong.causal = 2;
  EXPECT_EQ(create("dense", wrong, "cpu", 1), TFB_INVALID_ARGUMENT);
  EXPECT_STREQ(tfb_last_error(), "causal is 2; allowed are 0, 1");
  wrong = problem;
  wrong.head_dim = 0;
  EXPECT_EQ(create("dense", wrong, "cpu", 1), TFB_INVALID_ARGUMENT);
  wrong = problem;
  wrong.dtype = {kDLFloat, 8, 1};
  EXPECT_EQ(create("dense", wrong, "cpu", 1), TFB_INVALID_ARGUMENT);
  EXPECT_THAT(tfb_last_error(), HasSubstr("elements of DLPack's type code 2, 8 bits, 1 lanes"));
  EXPECT_EQ(tfb_create(nullptr, &problem, "cpu", 1, 1, nullptr), TFB_INVALID_ARGUMENT);
  EXPECT_EQ(tfb_run(nullptr, nullptr, 0, nullptr, 0, nullptr, 0, nullptr), TFB_INVALID_ARGUMENT);
  EXPECT_STREQ(tfb_last_error(), "layer is null");
  tfb_destroy(nullptr);
}

TEST(CInterface, TensorsThatAreNotTheLayersAreRefusedWithTheirNames) {
  Dense dense;
  EXPECT_EQ(RunLayer(dense.layer, dense.inputs, dense.outputs), TFB_FAILED_PRECONDITION);
  EXPECT_STREQ(tfb_last_error(), "Setup must be called before Run");
  ASSERT_EQ(SetUpLayer(dense.layer, dense.inputs), TFB_OK);
  DLTensor& k = dense.inputs.at("k").tensor;
  const DLTensor good = k;
  int64_t short_shape[] = {2, 2, 39, 16}, negative_shape[] = {2, 2, -1, 16};
  const auto refused = [&](const char* message) {
    EXPECT_EQ(RunLayer(dense.layer, dense.inputs, dense.outputs), TFB_INVALID_ARGUMENT) << message;
    EXPECT_STREQ(tfb_last_error(), message);
    k = good;
    dense.inputs.names[1] = "k";
    EXPECT_EQ(RunLayer(dense.layer, dense.inputs, dense.outputs), TFB_OK);
  };
  k.shape = short_shape;
  refused("input k has shape [2, 2, 39, 16]; expected is [2, 2, 40, 16]");
  k.shape = negative_shape;
  refused("input k has a size of -1");
  k.shape = nullptr;
  refused("input k has no shape");
  k.ndim = 6;
  refused("input k has 6 dimensions; allowed are 1 to 5");
  k.ndim = 0;
  refused("input k has 0 dimensions; allowed are 1 to 5");
  k.data = nullptr;
  refused("input k has no data");
  k.dtype = kF64;
  refused("input k is f64; expected is f32");
  k.device = {kDLCUDA, 1};
  refused("input k is on DLPack's device 2:1; it must be on the CPU (1)");
  dense.inputs.names[1] = "q";
  refused("input q is given twice");
  dense.inputs.names[1] = "key";
  EXPECT_EQ(RunLayer(dense.layer, dense.inputs, dense.outputs), TFB_INVALID_ARGUMENT);
  EXPECT_STREQ(tfb_last_error(), "input k [2, 2, 40, 16] is missing");
}

TEST(CInterface, ErrorsAreOfTheThreadThatMadeTheCall) {
  EXPECT_EQ(tfb_reset(nullptr), TFB_INVALID_ARGUMENT);
  std::thread([] {
    EXPECT_STREQ(tfb_last_error(), "");
    TfbLayer* layer = nullptr;
    const TfbProblem problem = SelfAttention(8, false);
    EXPECT_EQ(tfb_create("x", &problem, "cpu", 1, 1, &layer), TFB_NOT_FOUND);
  }).join();
  EXPECT_STREQ(tfb_last_error(), "layer is null");
}

// Minutes of work on any machine, which the first question ends.
TEST(CInterface, AnInterruptedCallIsCancelledAndAnotherOneIsRefusedMeanwhile) {
  const TfbProblem problem = {1, 1, 1, 1 << 19, 1 << 19, 16, 16, 0, kF32};
  const LayerPtr layer = Create("dense", problem);
  const Json said = Describe(layer);
  const Arrays inputs = InputsOf(said["inputs"]);
  Arrays outputs;
  outputs.Add("out", said["outputs"][0]["shape"], kF32);
  ASSERT_EQ(SetUpLayer(layer, inputs), TFB_OK);
  struct Asked {
    TfbLayer* layer;
    TfbStatus of_another_call = TFB_OK;
  } asked{layer.get()};
  const auto interrupted = [](void* context) -> int32_t {
    Asked* own = static_cast<Asked*>(context);
    own->of_another_call = tfb_reset(own->layer);
    return 1;
  };
  ASSERT_EQ(tfb_set_interrupt(layer.get(), interrupted, &asked), TFB_OK);
  EXPECT_EQ(RunLayer(layer, inputs, outputs), TFB_CANCELLED);
  EXPECT_STREQ(tfb_last_error(), "the call was interrupted");
  EXPECT_EQ(asked.of_another_call, TFB_FAILED_PRECONDITION);
  ASSERT_EQ(tfb_set_interrupt(layer.get(), nullptr, nullptr), TFB_OK);
  EXPECT_EQ(RunLayer(layer, inputs, outputs), TFB_FAILED_PRECONDITION);
  EXPECT_STREQ(tfb_last_error(), "a call was interrupted: tfb_setup must come first");
}

// ---- The backward pass ----

Json DescribeBackward(const LayerPtr& layer) {
  const char* json = nullptr;
  EXPECT_EQ(tfb_describe_backward(layer.get(), &json), TFB_OK) << tfb_last_error();
  return Json::parse(json);
}

// Memory at an address that 64 divides.
class KeptMemory {
 public:
  explicit KeptMemory(size_t bytes) : bytes_(bytes), memory_(bytes + 64) {}
  char* data() { return memory_.data() + (64 - reinterpret_cast<uintptr_t>(memory_.data()) % 64); }
  size_t bytes() const { return bytes_; }

 private:
  size_t bytes_;
  std::vector<char> memory_;
};

// Arrays of the specs, with elements that are no numbers.
Arrays NanArraysOf(const Json& specs) {
  Arrays arrays;
  for (const Json& spec : specs) {
    arrays.Add(spec["name"], spec["shape"], ToDLDataType(spec["dtype"]));
    Array& array = *arrays.arrays.back();
    std::fill_n(array.data<float>(), array.size<float>(), NAN);
  }
  return arrays;
}

// A layer that has been set up for both passes, and the tensors of both.
struct Differentiated {
  Differentiated(const std::string& technique, const TfbProblem& problem)
      : layer(Create(technique, problem)),
        said(DescribeBackward(layer)),
        kept(said["kept_bytes"].get<size_t>()) {
    const Json specs = Describe(layer);
    inputs = InputsOf(specs["inputs"]);
    outputs.Add("out", specs["outputs"][0]["shape"], kF32);
    output_gradients.Add("out", specs["outputs"][0]["shape"], kF32);
    Array& of_out = output_gradients.at("out");
    for (size_t i = 0; i < of_out.size<float>(); ++i) {
      of_out.data<float>()[i] = std::cos(static_cast<float>(3 * i));
    }
    input_gradients = NanArraysOf(said["input_gradients"]);
    // A gradient of an optional input is there where the input is.
    for (size_t n = input_gradients.names.size(); n-- > 0;) {
      const std::vector<std::string>& given = inputs.names;
      if (std::find(given.begin(), given.end(), input_gradients.names[n]) == given.end()) {
        input_gradients.Remove(n);
      }
    }
    parameter_gradients = NanArraysOf(said["parameter_gradients"]);
  }

  TfbStatus SetUp() {
    if (const TfbStatus status = SetUpLayer(layer, inputs); status != TFB_OK) return status;
    return SetUpBackward();
  }
  TfbStatus SetUpBackward() {
    const std::vector<TfbTensor> given = inputs.Argument();
    return tfb_setup_backward(layer.get(), given.data(), given.size(), nullptr, 0, nullptr);
  }
  TfbStatus Run(void* memory, size_t bytes) {
    const std::vector<TfbTensor> given = inputs.Argument(), written = outputs.Argument();
    return tfb_run_kept(layer.get(), given.data(), given.size(), written.data(), written.size(),
                        nullptr, 0, memory, bytes, nullptr);
  }
  TfbStatus Run() { return Run(kept.data(), kept.bytes()); }
  TfbStatus Backward(void* memory, size_t bytes) {
    const std::vector<TfbTensor> arguments[] = {
        inputs.Argument(), outputs.Argument(), output_gradients.Argument(),
        input_gradients.Argument(), parameter_gradients.Argument()};
    const auto all = [&](int n) { return TfbTensors{arguments[n].data(), arguments[n].size()}; };
    const TfbBackwardCall call = {all(0), all(1), all(2), all(3), all(4)};
    return tfb_backward(layer.get(), &call, nullptr, 0, memory, bytes, nullptr);
  }
  TfbStatus Backward() { return Backward(kept.data(), kept.bytes()); }

  LayerPtr layer;
  Json said;
  KeptMemory kept;
  Arrays inputs, outputs, output_gradients, input_gradients, parameter_gradients;
};

constexpr int64_t kHeads = 4, kTokens = 40,
                  kDim = 16;  // of SelfAttention(40): 2 sequences, 2 heads

// The gradients of one head of dense attention, in float64: of y_i = sum_j p_ij v_j with p_ij =
// exp(s_ij) / sum_j exp(s_ij) and s_ij = q_i k_j / 4.
struct HeadGradients {
  HeadGradients(const float* q, const float* k, const float* v, const float* g)
      : dq(kTokens * kDim), dk(kTokens * kDim), dv(kTokens * kDim), weight_of_key(kTokens) {
    const auto dot = [](const float* a, const float* b, bool is_absolute) {
      double sum = 0;
      for (int64_t c = 0; c < kDim; ++c) {
        const double product = static_cast<double>(a[c]) * b[c];
        sum += is_absolute ? std::abs(product) : product;
      }
      return sum;
    };
    for (int64_t i = 0; i < kTokens; ++i) {
      std::vector<double> p(kTokens), dp(kTokens);
      double sum = 0, delta = 0;
      for (int64_t j = 0; j < kTokens; ++j) {
        p[j] = std::exp(dot(q + i * kDim, k + j * kDim, false) / 4);
        sum += p[j];
        largest_score = std::max(largest_score, dot(q + i * kDim, k + j * kDim, true) / 4);
        dp[j] = dot(g + i * kDim, v + j * kDim, false);
        largest_dp = std::max(largest_dp, dot(g + i * kDim, v + j * kDim, true));
      }
      for (int64_t j = 0; j < kTokens; ++j) {
        p[j] /= sum;
        delta += p[j] * dp[j];
      }
      for (int64_t j = 0; j < kTokens; ++j) {
        const double ds = p[j] * (dp[j] - delta) / 4;
        weight_of_key[j] += p[j];
        for (int64_t c = 0; c < kDim; ++c) {
          dq[i * kDim + c] += ds * k[j * kDim + c];
          dk[j * kDim + c] += ds * q[i * kDim + c];
          dv[j * kDim + c] += p[j] * g[i * kDim + c];
        }
      }
    }
  }

  std::vector<double> dq, dk, dv;
  std::vector<double> weight_of_key;         // sum_i p_ij
  double largest_score = 0, largest_dp = 0;  // sums of magnitudes
};

// In fp32 with unit roundoff u, a score is a sum of 16 products, and so 16 u of their magnitudes
// off; that is the relative error of its weight, and of the weights' sum. Sums over 40 tokens add
// 40 u, the exponential some units: e. An element of dv has the error of the p_ij g_ic that it
// sums, e each. ds_ij has that of p_ij times |dp_ij - D_i| <= 2 M, M a bound of sum_c |g_ic v_jc|,
// and p_ij times the errors of dp_ij and D_i, (16 u + e) M each. No element of q, k, v and g is
// beyond 1.
TEST(CInterface, GradientsOfDenseAttentionAreThoseOfAPlainLoop) {
  Differentiated dense("dense", SelfAttention(kTokens, false));
  ASSERT_EQ(dense.SetUp(), TFB_OK) << tfb_last_error();
  ASSERT_EQ(dense.Run(), TFB_OK) << tfb_last_error();
  ASSERT_EQ(dense.Backward(), TFB_OK) << tfb_last_error();
  constexpr double u = 1.0 / (1 << 24);
  for (int64_t head = 0; head < kHeads; ++head) {
    const auto rows = [&](Arrays& arrays, const char* name) {
      return arrays.at(name).data<float>() + head * kTokens * kDim;
    };
    const HeadGradients expected(rows(dense.inputs, "q"), rows(dense.inputs, "k"),
                                 rows(dense.inputs, "v"), rows(dense.output_gradients, "out"));
    const double e = 2 * kDim * u * expected.largest_score + (kTokens + 8) * u;
    const double of_score = (2 * e + 2 * (kDim * u + e)) * expected.largest_dp / 4;
    for (int64_t n = 0; n < kTokens * kDim; ++n) {
      const double weight = expected.weight_of_key[n / kDim];
      ASSERT_NEAR(rows(dense.input_gradients, "q")[n], expected.dq[n], of_score) << n;
      ASSERT_NEAR(rows(dense.input_gradients, "k")[n], expected.dk[n], of_score * weight) << n;
      ASSERT_NEAR(rows(dense.input_gradients, "v")[n], expected.dv[n], e * weight) << n;
    }
  }
}

TEST(CInterface, EveryTechniqueRunsBackwardsOrSaysWhyNot) {
  int with = 0, without = 0;
  for (const Json& one : Json::parse(tfb_techniques())) {
    const std::string name = one["name"];
    const TfbProblem problem = SelfAttention(96, one["causal"].back());
    const LayerPtr layer = Create(name, problem);
    if (const TfbStatus status = tfb_check_backward(layer.get()); status != TFB_OK) {
      ++without;
      EXPECT_EQ(status, TFB_UNIMPLEMENTED) << name;
      const std::string reason = tfb_last_error();
      EXPECT_FALSE(reason.empty()) << name;
      const char* json = nullptr;
      size_t bytes = 0;
      const TfbBackwardCall call = {};
      const Arrays inputs = InputsOf(Describe(layer)["inputs"]);
      ASSERT_EQ(SetUpLayer(layer, inputs), TFB_OK) << name;
      const std::vector<TfbTensor> given = inputs.Argument();
      Arrays outputs;
      const Json out = Describe(layer)["outputs"][0];
      outputs.Add("out", out["shape"], ToDLDataType(out["dtype"]));
      const std::vector<TfbTensor> written = outputs.Argument();
      TfbLayer* const own = layer.get();
      const auto refused = [&](TfbStatus of_call) {
        EXPECT_EQ(of_call, TFB_UNIMPLEMENTED) << name;
        EXPECT_EQ(tfb_last_error(), reason);
      };
      refused(tfb_describe_backward(own, &json));
      refused(tfb_kept_bytes(own, &bytes));
      refused(tfb_backward_workspace_bytes(own, &bytes));
      refused(tfb_setup_backward(own, given.data(), given.size(), nullptr, 0, nullptr));
      refused(tfb_run_kept(own, given.data(), given.size(), written.data(), 1, nullptr, 0, nullptr,
                           0, nullptr));
      refused(tfb_backward(own, &call, nullptr, 0, nullptr, 0, nullptr));
      continue;
    }
    ++with;
    Differentiated d(name, problem);
    ASSERT_EQ(d.SetUp(), TFB_OK) << name << ": " << tfb_last_error();
    ASSERT_EQ(RunLayer(d.layer, d.inputs, d.outputs), TFB_OK) << name << ": " << tfb_last_error();
    std::vector<char> expected(d.outputs.at("out").size<char>());
    std::memcpy(expected.data(), d.outputs.at("out").data<char>(), expected.size());
    ASSERT_EQ(d.Run(), TFB_OK) << name << ": " << tfb_last_error();
    EXPECT_EQ(std::memcmp(expected.data(), d.outputs.at("out").data<char>(), expected.size()), 0)
        << name;
    ASSERT_EQ(d.Backward(), TFB_OK) << name << ": " << tfb_last_error();
    for (Arrays* gradients : {&d.input_gradients, &d.parameter_gradients}) {
      for (const std::string& of : gradients->names) {
        Array& gradient = gradients->at(of);
        int64_t not_finite = 0;
        for (size_t i = 0; i < gradient.size<float>(); ++i) {
          not_finite += std::isfinite(gradient.data<float>()[i]) ? 0 : 1;
        }
        EXPECT_EQ(not_finite, 0) << name << ": gradient of " << of;
      }
    }
    size_t bytes = 0;
    EXPECT_EQ(tfb_kept_bytes(d.layer.get(), &bytes), TFB_OK);
    EXPECT_EQ(d.said["kept_bytes"], bytes);
    EXPECT_EQ(tfb_backward_workspace_bytes(d.layer.get(), &bytes), TFB_OK);
    EXPECT_EQ(d.said["workspace_bytes"], bytes);
  }
  EXPECT_GE(with, 15);
  EXPECT_EQ(static_cast<size_t>(with + without), Json::parse(tfb_techniques()).size());
}

TEST(CInterface, ABackwardPassSaysWhatItTakesAndWrites) {
  const LayerPtr layer = Create("t5_bias", SelfAttention(40, true));
  Json said = DescribeBackward(layer);
  EXPECT_GT(said["kept_bytes"], 0);
  EXPECT_GT(said["workspace_bytes"], 0);
  EXPECT_EQ(said["output_gradients"][0]["name"], "out");
  EXPECT_EQ(said["output_gradients"][0]["shape"], Json({2, 2, 40, 16}));
  EXPECT_EQ(said["output_gradients"][1]["name"], "log_sum_exp");
  ASSERT_EQ(said["input_gradients"].size(), 3u);
  for (int n = 0; n < 3; ++n) {
    EXPECT_EQ(said["input_gradients"][n]["name"], std::string(1, "qkv"[n]));
    EXPECT_EQ(said["input_gradients"][n]["shape"], Json({2, 2, 40, 16}));
  }
  ASSERT_EQ(said["parameter_gradients"].size(), 1u);
  EXPECT_EQ(said["parameter_gradients"][0]["name"], "beta");
  EXPECT_EQ(said["parameter_gradients"][0]["dtype"], "f32");
  EXPECT_EQ(said["stopped"], Json::object());
  ASSERT_EQ(SetUpLayer(layer, InputsOf(Describe(layer)["inputs"])), TFB_OK);
  EXPECT_GT(DescribeBackward(layer)["flops"], 0);
}

TEST(CInterface, KeptMemoryIsOfTheRunThatFilledIt) {
  Differentiated dense("dense", SelfAttention(kTokens, true));
  ASSERT_EQ(dense.SetUp(), TFB_OK);
  ASSERT_EQ(dense.Run(), TFB_OK);
  ASSERT_EQ(dense.Backward(), TFB_OK) << tfb_last_error();
  const Array& dq = dense.input_gradients.at("q");
  const std::vector<char> expected(static_cast<char*>(dq.tensor.data),
                                   static_cast<char*>(dq.tensor.data) + 2 * 2 * 40 * 16 * 4);
  // Another run, of other queries and with memory of its own, comes between.
  Differentiated second("dense", SelfAttention(kTokens, true));
  float* const q = second.inputs.at("q").data<float>();
  for (size_t i = 0; i < second.inputs.at("q").size<float>(); ++i) q[i] *= -3;
  std::swap(dense.layer, second.layer);  // it is of the same layer
  ASSERT_EQ(second.Run(), TFB_OK) << tfb_last_error();
  ASSERT_EQ(second.Backward(), TFB_OK) << tfb_last_error();
  std::swap(dense.layer, second.layer);
  Array& again = dense.input_gradients.at("q");
  EXPECT_NE(
      std::memcmp(second.input_gradients.at("q").data<char>(), expected.data(), expected.size()),
      0);
  std::fill_n(again.data<float>(), again.size<float>(), NAN);
  ASSERT_EQ(dense.Backward(), TFB_OK);
  EXPECT_EQ(std::memcmp(expected.data(), again.data<char>(), expected.size()), 0);
}

TEST(CInterface, BackwardCallsThatCannotBeAreRefusedWithTheirReasons) {
  Differentiated dense("dense", SelfAttention(kTokens, false));
  const auto refused = [](TfbStatus status, TfbStatus expected, const std::string& message) {
    EXPECT_EQ(status, expected) << message;
    EXPECT_EQ(tfb_last_error(), message);
  };
  refused(dense.SetUpBackward(), TFB_FAILED_PRECONDITION,
          "Setup must be called before SetUpBackward");
  ASSERT_EQ(SetUpLayer(dense.layer, dense.inputs), TFB_OK);
  const size_t bytes = dense.kept.bytes();
  const std::string needs = " bytes; the layer needs " + std::to_string(bytes);
  refused(dense.Run(nullptr, 0), TFB_INVALID_ARGUMENT, "kept memory has 0" + needs);
  refused(dense.Run(dense.kept.data(), bytes - 1), TFB_INVALID_ARGUMENT,
          "kept memory has " + std::to_string(bytes - 1) + needs);
  refused(dense.Run(nullptr, bytes), TFB_INVALID_ARGUMENT,
          "kept memory is null, and has " + std::to_string(bytes) + " bytes");
  refused(dense.Run(dense.kept.data() + 4, bytes), TFB_INVALID_ARGUMENT,
          "kept memory is not aligned to 64 bytes");
  ASSERT_EQ(dense.Run(), TFB_OK);
  refused(dense.Backward(), TFB_FAILED_PRECONDITION,
          "SetUpBackward must be called before Backward");
  ASSERT_EQ(dense.SetUpBackward(), TFB_OK);
  refused(dense.Backward(dense.kept.data(), bytes - 1), TFB_INVALID_ARGUMENT,
          "kept memory has " + std::to_string(bytes - 1) + needs);
  refused(tfb_backward(dense.layer.get(), nullptr, nullptr, 0, nullptr, 0, nullptr),
          TFB_INVALID_ARGUMENT, "call is null");
  refused(tfb_check_backward(nullptr), TFB_INVALID_ARGUMENT, "layer is null");

  const auto refused_with = [&](Arrays* arrays, int n, const std::string& name,
                                const std::string& message) {
    const std::string good = std::exchange(arrays->names[n], name);
    refused(dense.Backward(), TFB_INVALID_ARGUMENT, message);
    arrays->names[n] = good;
  };
  refused_with(&dense.inputs, 1, "key", "input k [2, 2, 40, 16] is missing");
  refused_with(&dense.outputs, 0, "o", "output out [2, 2, 40, 16] is missing");
  refused_with(&dense.output_gradients, 0, "o", "there is no output gradient \"o\"");
  refused_with(&dense.input_gradients, 0, "query", "there is no input gradient \"query\"");
  refused_with(&dense.input_gradients, 0, "k", "input gradient k is given twice");
  dense.parameter_gradients.Add("beta", {2, 32}, kF32);
  refused(dense.Backward(), TFB_INVALID_ARGUMENT, "there is no parameter gradient \"beta\"");
  dense.parameter_gradients.Remove(0);
  int64_t short_shape[] = {2, 2, 39, 16};
  DLTensor& dq = dense.input_gradients.at("q").tensor;
  int64_t* const good = std::exchange(dq.shape, short_shape);
  refused(dense.Backward(), TFB_INVALID_ARGUMENT,
          "input gradient q has shape [2, 2, 39, 16]; expected is [2, 2, 40, 16]");
  dq.shape = good;
  EXPECT_EQ(dense.Backward(), TFB_OK) << tfb_last_error();

  // Another set-up makes that of the backward pass void.
  ASSERT_EQ(SetUpLayer(dense.layer, dense.inputs), TFB_OK);
  refused(dense.Backward(), TFB_FAILED_PRECONDITION,
          "SetUpBackward must be called before Backward");
}

TEST(CInterface, ABackwardPassUsesTheCallersWorkspace) {
  Differentiated dense("dense", SelfAttention(kTokens, false));
  ASSERT_EQ(dense.SetUp(), TFB_OK);
  ASSERT_EQ(dense.Run(), TFB_OK);
  KeptMemory workspace(dense.said["workspace_bytes"].get<size_t>());
  const std::vector<TfbTensor> given = dense.inputs.Argument(), out = dense.outputs.Argument(),
                               of_out = dense.output_gradients.Argument(),
                               written = dense.input_gradients.Argument();
  const TfbBackwardCall call = {
      {given.data(), 3}, {out.data(), 1}, {of_out.data(), 1}, {written.data(), 3}, {nullptr, 0}};
  const auto backward = [&](size_t bytes) {
    return tfb_backward(dense.layer.get(), &call, workspace.data(), bytes, dense.kept.data(),
                        dense.kept.bytes(), nullptr);
  };
  EXPECT_EQ(tfb_setup_backward(dense.layer.get(), given.data(), 3, workspace.data(),
                               workspace.bytes(), nullptr),
            TFB_OK);
  EXPECT_EQ(backward(workspace.bytes()), TFB_OK) << tfb_last_error();
  EXPECT_EQ(backward(workspace.bytes() - 1), TFB_INVALID_ARGUMENT);
  EXPECT_EQ(tfb_last_error(), "workspace has " + std::to_string(workspace.bytes() - 1) +
                                  " bytes; the layer needs " + std::to_string(workspace.bytes()));
}

// Minutes of work on any machine, as above.
TEST(CInterface, AnInterruptedBackwardPassIsCancelled) {
  Differentiated dense("dense", {1, 1, 1, 1 << 17, 1 << 17, 16, 16, 1, kF32});
  ASSERT_EQ(dense.SetUp(), TFB_OK);
  const auto interrupted = [](void*) -> int32_t { return 1; };
  ASSERT_EQ(tfb_set_interrupt(dense.layer.get(), interrupted, nullptr), TFB_OK);
  EXPECT_EQ(dense.Backward(), TFB_CANCELLED);
  ASSERT_EQ(tfb_set_interrupt(dense.layer.get(), nullptr, nullptr), TFB_OK);
  EXPECT_EQ(dense.Backward(), TFB_FAILED_PRECONDITION);
  EXPECT_STREQ(tfb_last_error(), "a call was interrupted: tfb_setup must come first");
}

}  // namespace
