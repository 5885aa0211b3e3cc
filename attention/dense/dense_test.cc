#include "attention/dense/dense.h"

#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "core/definition.h"
#include "core/technique.h"
#include "core/testing.h"
#include "gtest/gtest.h"

namespace tfb::dense {
namespace {

// Runs dense on one head of f32 tensors given row by row.
std::vector<float> Attend(const Problem& problem, std::vector<float> q, std::vector<float> k,
                          std::vector<float> v) {
  std::unique_ptr<Layer> layer = Dense().Create(problem, {}, Device::kCpu, 1).value();
  std::vector<float> out(problem.query_tokens * problem.value_dim, NAN);
  const auto view = [&](std::vector<float>& values, int64_t tokens, int64_t channels) {
    return TensorView(values.data(), DType::kF32, {1, 1, tokens, channels});
  };
  const Inputs inputs = {{"q", view(q, problem.query_tokens, problem.head_dim)},
                         {"k", view(k, problem.kv_tokens, problem.head_dim)},
                         {"v", view(v, problem.kv_tokens, problem.value_dim)}};
  ThreadPool pool(1);
  Tensor workspace(DType::kU8, {static_cast<int64_t>(layer->workspace_bytes(1)) + 1});
  Execution execution;
  execution.pool = &pool;
  execution.workspace = absl::MakeSpan(static_cast<std::byte*>(workspace.raw()), workspace.bytes());
  EXPECT_TRUE(layer->Setup(inputs, execution).ok());
  EXPECT_TRUE(
      layer->Run(inputs, {{"out", view(out, problem.query_tokens, problem.value_dim)}}, execution)
          .ok());
  return out;
}

TEST(Dense, TwoKeysAreWeightedByTheSoftmaxOfTheirScores) {
  // The scores q k / sqrt(1) are 0 and log 3, so that the weights are 1/4 and 3/4.
  Problem problem = Problem::SelfAttention(1, 1, 2, 1);
  problem.query_tokens = 1;
  const std::vector<float> out = Attend(problem, {1}, {0, std::log(3.0f)}, {4, 8});
  EXPECT_NEAR(out[0], 7, 1e-5);
}

TEST(Dense, ZeroQueriesGiveTheMeanOfTheValuesThatARowSees) {
  const std::vector<float> out =
      Attend(Problem::SelfAttention(1, 1, 3, 1, /*causal=*/true), {0, 0, 0}, {1, 2, 3}, {3, 6, 9});
  EXPECT_NEAR(out[0], 3, 1e-5);
  EXPECT_NEAR(out[1], 4.5, 1e-5);
  EXPECT_NEAR(out[2], 6, 1e-5);
}

TEST(Dense, CausalQueriesAreAlignedWithTheLastKeys) {
  Problem problem = Problem::SelfAttention(1, 1, 3, 1, /*causal=*/true);
  problem.query_tokens = 1;
  EXPECT_NEAR(Attend(problem, {0}, {1, 2, 3}, {3, 6, 9})[0], 6, 1e-5);
}

TEST(Dense, AddingOneVectorToEveryKeyChangesNothing) {
  const Problem problem = Problem::SelfAttention(1, 2, 70, 16);
  NamedTensors inputs = RandomInputs(QkvInputs(problem), 3);
  const NamedTensors before = RunTechnique(Dense(), problem, ViewsOf(inputs)).value();
  for (int64_t n = 0; n < inputs["k"].num_elements(); ++n) {
    inputs["k"].span<float>()[n] += static_cast<float>(n % 16) / 8;
  }
  const NamedTensors after = RunTechnique(Dense(), problem, ViewsOf(inputs)).value();
  EXPECT_LE(MaxDifference(before.at("out").view(), after.at("out").view()),
            Fp32Bound(inputs["v"].view()));
}

TEST(Dense, ALargeScaleReturnsTheValueOfTheBestKey) {
  const Problem problem = Problem::SelfAttention(1, 1, 40, 8);
  const NamedTensors inputs = RandomInputs(QkvInputs(problem), 3);
  const NamedTensors outputs =
      RunTechnique(Dense(), problem, ViewsOf(inputs), {{{"scale", "10000"}}}).value();
  const DoubleTensor q(inputs.at("q").view()), k(inputs.at("k").view());
  for (int64_t i = 0; i < 40; ++i) {
    int64_t best = 0;
    for (int64_t j = 1; j < 40; ++j) {
      if (Dot(q.Row(i), k.Row(j), 8) > Dot(q.Row(i), k.Row(best), 8)) best = j;
    }
    EXPECT_EQ(MaxDifference(Slice(outputs.at("out").view(), 2, i, 1),
                            Slice(inputs.at("v").view(), 2, best, 1)),
              0);
  }
}

// PyTorch computed these outputs in float64; the files' metadata say how.
class DenseGolden : public ::testing::TestWithParam<const char*> {};

TEST_P(DenseGolden, DefinitionAndEnginesMatchPyTorch) {
  const SafetensorsFile golden =
      GoldenFile(std::string("attention/dense/testdata/") + GetParam() + ".safetensors");
  const NamedTensors& tensors = golden.tensors;
  Problem problem;
  problem.batch = tensors.at("q").dim(0);
  problem.query_heads = tensors.at("q").dim(1);
  problem.query_tokens = tensors.at("q").dim(2);
  problem.head_dim = tensors.at("q").dim(3);
  problem.kv_heads = tensors.at("k").dim(1);
  problem.kv_tokens = tensors.at("k").dim(2);
  problem.value_dim = tensors.at("v").dim(3);
  problem.causal = std::string(GetParam()).find("causal") != std::string::npos;
  Inputs inputs;
  for (const char* name : {"q", "k", "v"}) inputs.Set(name, tensors.at(name).view());
  Tensor mask;
  if (tensors.count("key_padding") != 0) {
    mask = tensors.at("key_padding").CloneAs(DType::kU8);
    inputs.Set("key_mask", mask.view());
  }
  const NamedTensors defined = DefineTechnique(Dense(), problem, inputs).value();
  EXPECT_LE(MaxDifference(defined.at("out").view(), tensors.at("out").view()), 1e-12);
  for (const Device device : TestedDevices()) {
    const NamedTensors ours = RunTechnique(Dense(), problem, inputs, {{}, device}).value();
    EXPECT_LE(MaxDifference(ours.at("out").view(), tensors.at("out").view()),
              Fp32Bound(tensors.at("v").view()))
        << Name(device);
  }
}

INSTANTIATE_TEST_SUITE_P(Files, DenseGolden,
                         ::testing::Values("full", "causal_bottom_right", "key_padding",
                                           "grouped_heads_causal"));

}  // namespace
}  // namespace tfb::dense
