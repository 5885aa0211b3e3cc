// Tests the shared library by its header alone, as a program that loads it sees it.
#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
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
}

TEST(CInterface, EveryTechniqueRunsAndIsAsCloseToItsDefinitionAsItsBound) {
  const Json techniques = Json::parse(tfb_techniques());
  EXPECT_EQ(techniques.size(), 38u);
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

}  // namespace
