#include "memory/memorizing/memorizing.h"

#include "core/testing.h"
#include "gtest/gtest.h"

namespace tfb {
namespace {

Problem Make(int64_t batch, int64_t heads, int64_t tokens, int64_t head_dim) {
  return Problem::SelfAttention(batch, heads, tokens, head_dim, /*causal=*/true);
}

TEST(Memorizing, Smoke) {
  const Memorizing technique;
  const Problem problem = Make(2, 3, 100, 8);
  Tensor x(problem.dtype, {problem.batch, problem.query_tokens, problem.model_dim()});
  FillNormal(&x, 3, "x");
  RunRequest request;
  request.options = {{"segment", "16"}, {"memory", "10"}, {"store", "40"}, {"k", "5"}};
  auto run = RunTechnique(technique, problem, {{"x", x.view()}}, request);
  ASSERT_TRUE(run.ok()) << run.status();
  auto defined = DefineTechnique(technique, problem, {{"x", x.view()}}, request);
  ASSERT_TRUE(defined.ok()) << defined.status();
  EXPECT_LE(MaxDifference(run->at("out").view(), defined->at("out").view()), 1e-5);
  EXPECT_EQ(MaxDifference(run->at("retrieved").view(), defined->at("retrieved").view()), 0);
}

}  // namespace
}  // namespace tfb
