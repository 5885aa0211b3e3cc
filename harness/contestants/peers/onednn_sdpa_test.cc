// Tests onednn_sdpa.cc over a stand-in for oneDNN that evaluates graphs in plain loops (stand_in):
// whether the graph is attention, and what the page does with the tensors.
#include <cmath>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/testing.h"
#include "gtest/gtest.h"
#include "harness/c/tfb.h"
#include "harness/contestants/shared_library.h"
#include "harness/judge/evaluate.h"

namespace tfb {
namespace {

constexpr DLDataType kF32 = {kDLFloat, 32, 1};

const Technique& Sdpa() {
  static const bool added = [] {
    const auto file =
        std::make_shared<SharedLibrary>("harness/contestants/peers/libonednn_sdpa.so");
    const auto list = file->List();
    EXPECT_TRUE(list.ok()) << list.status();
    const absl::Status status = AddContestants(file, *list, &Registry::Global());
    EXPECT_TRUE(status.ok()) << status;
    return status.ok();
  }();
  EXPECT_TRUE(added);
  return **Registry::Global().Find("sdpa@onednn_sdpa");
}

Problem Sizes(int64_t query_heads, int64_t kv_heads, int64_t queries, int64_t keys, bool causal) {
  Problem problem = Problem::SelfAttention(2, query_heads, keys, 16, causal);
  problem.kv_heads = kv_heads;
  problem.query_tokens = queries;
  problem.value_dim = 24;
  return problem;
}

TEST(OneDnnSdpa, IsDenseAttentionOfAllShapes) {
  ThreadPool pool(2);
  for (const bool causal : {false, true}) {
    for (const Problem& problem :
         {Sizes(2, 2, 37, 37, causal), Sizes(6, 2, 37, 37, causal), Sizes(6, 1, 5, 37, causal),
          Sizes(2, 2, 1, 37, causal), Sizes(4, 2, 1, 1, causal), Sizes(2, 2, 37, 5, causal)}) {
      EvaluateRequest request;
      request.job.technique = &Sdpa();
      request.job.problem = problem;
      const NamedTensors inputs = RandomInputs(*Sdpa().InputSpecs(problem, {}), 3);
      request.inputs = &inputs;
      request.pool = &pool;
      const auto accuracy = Evaluate(request);
      ASSERT_TRUE(accuracy.ok()) << problem.ToString() << ": " << accuracy.status();
      EXPECT_TRUE(accuracy->passed) << problem.ToString() << ": " << accuracy->failure;
      EXPECT_EQ(accuracy->counterpart, "dense");
      // The scores: oneDNN writes them, and the caller's memory around is watched.
      EXPECT_EQ(accuracy->workspace_bytes,
                4 * 2 * problem.query_heads * problem.query_tokens * problem.kv_tokens);
    }
  }
}

TEST(OneDnnSdpa, SaysWhatComputesAndInHowManyPartitions) {
  const auto about = [](bool causal) {
    const auto layer = Sdpa().Create(Sizes(2, 2, 37, 37, causal), {}, Device::kCpu, 1);
    EXPECT_TRUE(layer.ok()) << layer.status();
    return dynamic_cast<ContestantLayer&>(**layer).about();
  };
  using About = std::map<std::string, std::string>;
  EXPECT_EQ(about(true), (About{{"oneDNN", "3.13.2"},
                                {"partitions", "1, of 5 operations"},
                                {"runtime", "SYCL with TBB"},
                                {"threads", "1"}}));
  EXPECT_EQ(about(false)["partitions"], "1, of 4 operations");
}

// A layer of the library and its tensors, of 2 heads of 4 channels and 3 tokens.
class Layer {
 public:
  explicit Layer(bool causal = false) {
    const TfbProblem problem = {1, 2, 2, 3, 3, 4, 4, causal ? 1 : 0, kF32};
    EXPECT_EQ(tfb_create("sdpa", &problem, "cpu", 1, 2, &layer_), TFB_OK) << tfb_last_error();
    for (int n = 0; n < 24; ++n) {
      memory_[0][n] = std::sin(static_cast<float>(n));
      memory_[1][n] = std::cos(static_cast<float>(2 * n));
      memory_[2][n] = static_cast<float>(n);
    }
    for (int t = 0; t < 4; ++t) {
      tensors[t] = {memory_[t], {kDLCPU, 0}, 4, kF32, shape_, nullptr, 0};
    }
  }
  ~Layer() { tfb_destroy(layer_); }
  Layer(const Layer&) = delete;

  size_t workspace_bytes() const {
    size_t bytes = 0;
    EXPECT_EQ(tfb_workspace_bytes(layer_, &bytes), TFB_OK) << tfb_last_error();
    return bytes;
  }
  TfbStatus SetUp() { return tfb_setup(layer_, Inputs().data(), 3, nullptr, 0, nullptr); }
  TfbStatus Run(size_t inputs = 3, const char* output = "out") {
    const TfbTensor written = {output, &tensors[3]};
    return tfb_run(layer_, Inputs().data(), inputs, &written, 1, nullptr, 0, nullptr);
  }
  std::vector<float> out() const { return {memory_[3], memory_[3] + 24}; }

  DLTensor tensors[4];  // q, k, v and out

 private:
  std::vector<TfbTensor> Inputs() const {
    return {{"q", &tensors[0]}, {"k", &tensors[1]}, {"v", &tensors[2]}};
  }

  int64_t shape_[4] = {1, 2, 3, 4};
  float memory_[4][24] = {};
  TfbLayer* layer_ = nullptr;
};

TEST(OneDnnSdpa, StridesAndOffsetsAreFollowed) {
  Layer contiguous;
  ASSERT_EQ(contiguous.SetUp(), TFB_OK) << tfb_last_error();
  ASSERT_EQ(contiguous.Run(), TFB_OK) << tfb_last_error();
  const std::vector<float> expected = contiguous.out();

  // [batch, tokens, heads, channels], with a number before it.
  int64_t strides[] = {24, 4, 8, 1};
  std::vector<float> moved[4];
  const auto move = [&](int t) {
    DLTensor& tensor = contiguous.tensors[t];
    moved[t].assign(25, NAN);
    for (int h = 0; h < 2; ++h) {
      for (int n = 0; n < 3; ++n) {
        for (int c = 0; c < 4; ++c) {
          moved[t][1 + n * 8 + h * 4 + c] = static_cast<float*>(tensor.data)[(h * 3 + n) * 4 + c];
        }
      }
    }
    tensor.data = moved[t].data();
    tensor.byte_offset = sizeof(float);
    tensor.strides = strides;
  };
  for (const int t : {1, 0, 2, 3}) {
    move(t);
    if (t == 3) moved[3].assign(25, NAN);
    ASSERT_EQ(contiguous.Run(), TFB_OK) << tfb_last_error();
    if (t < 3) {
      EXPECT_EQ(contiguous.out(), expected) << t;
    }
  }
  for (int h = 0; h < 2; ++h) {
    for (int n = 0; n < 3; ++n) {
      for (int c = 0; c < 4; ++c) {
        EXPECT_EQ(moved[3][1 + n * 8 + h * 4 + c], expected[(h * 3 + n) * 4 + c]);
      }
    }
  }
}

TEST(OneDnnSdpa, WhatItCannotDoIsItsStatus) {
  TfbProblem problem = {1, 2, 2, 3, 3, 4, 4, 0, kF32};
  const auto create = [&](const char* technique, const char* device) {
    TfbLayer* layer = nullptr;
    const TfbStatus status = tfb_create(technique, &problem, device, 1, 0, &layer);
    EXPECT_EQ(layer != nullptr, status == TFB_OK);
    tfb_destroy(layer);
    return status;
  };
  EXPECT_EQ(create("sdpa", "cpu"), TFB_OK);
  EXPECT_EQ(create("sdpa:scale=2", "cpu"), TFB_NOT_FOUND);
  EXPECT_STREQ(tfb_last_error(), "sdpa:scale=2 is not sdpa, which has no options");
  EXPECT_EQ(create("sdpa", "cuda"), TFB_UNIMPLEMENTED);
  EXPECT_STREQ(tfb_last_error(), "it is for the CPU");
  problem.dtype = {kDLBfloat, 16, 1};
  EXPECT_EQ(create("sdpa", "cpu"), TFB_UNIMPLEMENTED);
  EXPECT_STREQ(tfb_last_error(), "it computes in float32");
  problem.dtype = kF32;
  // The stand-in fuses heads of up to 128 channels.
  problem.head_dim = 129;
  EXPECT_EQ(create("sdpa", "cpu"), TFB_UNIMPLEMENTED);
  EXPECT_STREQ(tfb_last_error(), "oneDNN makes 4 partitions of this attention, not one");
  problem.head_dim = 4;
  problem.batch = 0;
  EXPECT_EQ(create("sdpa", "cpu"), TFB_UNIMPLEMENTED);
  EXPECT_STREQ(tfb_last_error(), "oneDNN has no graphs of empty tensors");

  Layer layer(/*causal=*/true);
  EXPECT_EQ(layer.Run(), TFB_FAILED_PRECONDITION);
  EXPECT_EQ(layer.workspace_bytes(), 2 * 3 * 3 * sizeof(float));
  EXPECT_EQ(layer.Run(), TFB_FAILED_PRECONDITION);
  ASSERT_EQ(layer.SetUp(), TFB_OK) << tfb_last_error();
  EXPECT_EQ(layer.Run(2), TFB_INVALID_ARGUMENT);
  EXPECT_STREQ(tfb_last_error(), "the inputs are q, k and v");
  EXPECT_EQ(layer.Run(3, "log_sum_exp"), TFB_INVALID_ARGUMENT);
  EXPECT_STREQ(tfb_last_error(), "the only output is out");
  EXPECT_EQ(layer.Run(), TFB_OK) << tfb_last_error();
}

}  // namespace
}  // namespace tfb
