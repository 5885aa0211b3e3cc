#include "harness/judge/extrapolation.h"

#include <cmath>
#include <utility>
#include <vector>

#include "core/random.h"
#include "gtest/gtest.h"
#include "harness/inputs/inputs.h"
#include "harness/judge/evaluate.h"
#include "harness/testing/tiny_technique.h"

namespace tfb {
namespace {

TEST(CompareLengths, TheSameWeightsHaveNoChange) {
  const auto result = CompareLengths({0, 0, 0.25, 0.75}, {0.25, 0.75});
  ASSERT_TRUE(result.has_value());
  EXPECT_EQ(result->change, 0);
  EXPECT_EQ(result->reshape, 0);
}

TEST(CompareLengths, WhatGoesToFartherKeysIsChangeWithoutReshaping) {
  // Three quarters go to the farther two keys; the nearer two keep their ratio of 1 to 3.
  const auto result = CompareLengths({0.5, 0.25, 0.0625, 0.1875}, {0.25, 0.75});
  ASSERT_TRUE(result.has_value());
  EXPECT_DOUBLE_EQ(result->change, 0.75);
  EXPECT_DOUBLE_EQ(result->reshape, 0);
}

TEST(CompareLengths, WhatMovesAmongTheSameOffsetsIsReshaping) {
  const auto result = CompareLengths({0, 0.5, 0.5, 0}, {0.5, 0, 0.5});
  ASSERT_TRUE(result.has_value());
  EXPECT_DOUBLE_EQ(result->change, 0.5);
  EXPECT_DOUBLE_EQ(result->reshape, 0.5);
}

TEST(CompareLengths, NothingLeftOfTheOffsetsOfTrainingIsAllOfBoth) {
  const auto result = CompareLengths({0.5, 0.5, 0, 0}, {0.5, 0.5});
  ASSERT_TRUE(result.has_value());
  EXPECT_DOUBLE_EQ(result->change, 1);
  EXPECT_DOUBLE_EQ(result->reshape, 1);
}

TEST(CompareLengths, ARowWithoutAKeyHasNone) {
  EXPECT_FALSE(CompareLengths({0, 0, 0, 0}, {0.5, 0.5}).has_value());
  EXPECT_FALSE(CompareLengths({0.5, 0.5, 0, 0}, {0, 0}).has_value());
}

// Tests through the harness, with a technique that sees `window` tokens on either side.
class Growth : public ::testing::Test {
 protected:
  Growth() { registry_.Add(MakeTiny(TinyFault::kNone)); }

  Accuracy Judge(const Problem& problem, const Options& options, double query = 1,
                 const std::vector<int64_t>& rows = {}) {
    EvaluateRequest request;
    request.job.technique = *registry_.Find(TinyName(TinyFault::kNone));
    request.job.options = *request.job.technique->Canonical(options);
    request.job.problem = problem;
    request.rows = rows;
    request.pool = &pool_;
    request.registry = &registry_;
    NamedTensors inputs =
        *MakeInputs({}, *request.job.technique->InputSpecs(problem, options), problem, 3);
    for (float& value : inputs.at("q").span<float>()) value *= static_cast<float>(query);
    request.inputs = &inputs;
    auto accuracy = Evaluate(request);
    EXPECT_TRUE(accuracy.ok()) << accuracy.status();
    return *std::move(accuracy);
  }

  Registry registry_;
  ThreadPool pool_{2};
};

TEST_F(Growth, AWindowWithinTheTrainingLengthSeesTheSame) {
  for (const bool causal : {true, false}) {
    const Accuracy accuracy =
        Judge(Problem::SelfAttention(2, 2, 512, 8, causal), {{"window", "16"}});
    ASSERT_TRUE(accuracy.extrapolation.has_value());
    EXPECT_NEAR(accuracy.extrapolation->change, 0, 1e-12);
    EXPECT_NEAR(accuracy.extrapolation->reshape, 0, 1e-12);
  }
}

TEST_F(Growth, EqualWeightsLoseSevenEighthsToFartherKeys) {
  const Accuracy accuracy = Judge(Problem::SelfAttention(1, 2, 512, 8, false), {}, /*query=*/0);
  ASSERT_TRUE(accuracy.extrapolation.has_value());
  EXPECT_NEAR(accuracy.extrapolation->change, 7.0 / 8, 1e-12);
  EXPECT_NEAR(accuracy.extrapolation->reshape, 0, 1e-12);
}

TEST_F(Growth, SampledRowsAreFoundInBothSequences) {
  const Problem problem = Problem::SelfAttention(1, 2, 512, 8, true);
  const Accuracy few = Judge(problem, {}, 1, {0, 70, 448, 500, 511});
  ASSERT_TRUE(few.extrapolation.has_value());
  // Contents decide here, so the nearer keys keep their ratios.
  EXPECT_NEAR(few.extrapolation->reshape, 0, 1e-12);
  EXPECT_GT(few.extrapolation->change, 0.5);
  EXPECT_LT(few.extrapolation->change, 1);
  EXPECT_FALSE(Judge(problem, {}, 1, {0, 70, 448}).extrapolation.has_value());
}

TEST_F(Growth, ShortSequencesAndOthersKeysHaveNone) {
  EXPECT_FALSE(Judge(Problem::SelfAttention(1, 2, 63, 8, true), {}).extrapolation.has_value());
  Problem cross = Problem::SelfAttention(1, 2, 128, 8, false);
  cross.kv_tokens = 256;
  EXPECT_FALSE(Judge(cross, {}).extrapolation.has_value());
}

TEST(CompareLengths, IsHalfTheDistanceOfTheWeightsWithAndWithoutTheFartherKeys) {
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    const RandomStream random(seed, "weights");
    std::vector<double> all(12), last(5);
    double sum_all = 0, sum_last = 0;
    for (size_t j = 0; j < all.size(); ++j) sum_all += all[j] = random.Uniform(j);
    for (size_t j = 0; j < last.size(); ++j) sum_last += last[j] = random.Uniform(100 + j);
    for (double& weight : all) weight /= sum_all;
    for (double& weight : last) weight /= sum_last;
    double common = 0, change = 0, reshape = 0;
    for (size_t j = 7; j < 12; ++j) common += all[j];
    for (size_t j = 0; j < 12; ++j) change += std::abs(all[j] - (j < 7 ? 0 : last[j - 7]));
    for (size_t j = 0; j < 5; ++j) reshape += std::abs(all[7 + j] / common - last[j]);
    const auto result = CompareLengths(all, last);
    ASSERT_TRUE(result.has_value());
    EXPECT_NEAR(result->change, change / 2, 1e-12);
    EXPECT_NEAR(result->reshape, reshape / 2, 1e-12);
  }
}

TEST_F(Growth, SixtyFourTokensAreEnoughAndTheLastQuarterOfTheShorterSequenceIsCompared) {
  EXPECT_TRUE(Judge(Problem::SelfAttention(1, 2, 64, 8, true), {}).extrapolation.has_value());
  // The shorter sequence has the last 64 tokens, of which the last 16 are compared.
  const Problem problem = Problem::SelfAttention(1, 2, 512, 8, true);
  EXPECT_FALSE(Judge(problem, {}, 1, {495}).extrapolation.has_value());
  EXPECT_TRUE(Judge(problem, {}, 1, {496}).extrapolation.has_value());
}

TEST_F(Growth, TheMeanOfAllRowsIsThatOfEachAlone) {
  const Problem problem = Problem::SelfAttention(2, 2, 256, 8, true);
  Extrapolation sum;
  std::vector<int64_t> rows;
  for (int64_t row = 248; row < 256; ++row) {
    const auto one = Judge(problem, {}, 1, {row}).extrapolation;
    ASSERT_TRUE(one.has_value());
    sum.change += one->change / 8;
    sum.reshape += one->reshape / 8;
    rows.push_back(row);
  }
  for (const auto& chosen : {rows, std::vector<int64_t>()}) {
    const auto mean = Judge(problem, {}, 1, chosen).extrapolation;
    ASSERT_TRUE(mean.has_value());
    EXPECT_NEAR(mean->change, sum.change, 1e-12);
    EXPECT_NEAR(mean->reshape, sum.reshape, 1e-12);
  }
}

}  // namespace
}  // namespace tfb
