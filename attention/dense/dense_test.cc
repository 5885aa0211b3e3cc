#include "attention/dense/dense.h"

#include <cmath>
#include <memory>
#include <vector>

#include "core/technique.h"
#include "gtest/gtest.h"

namespace tfb {
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
  // Scores q k / sqrt(1) are 0 and log 3, so that the weights are 1/4 and 3/4.
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

}  // namespace
}  // namespace tfb
