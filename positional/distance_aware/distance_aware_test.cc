#include "positional/distance_aware/distance_aware.h"

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "attention/dense/dense.h"
#include "core/testing.h"
#include "gtest/gtest.h"

namespace tfb::distance_aware {
namespace {

const Technique& DistanceAware() { return FindTechnique("distance_aware"); }

NamedTensors Parameters(const std::vector<float>& alpha, const std::vector<float>& beta) {
  NamedTensors parameters;
  const Shape heads = {static_cast<int64_t>(alpha.size())};
  parameters["alpha"] = Tensor(DType::kF32, heads);
  parameters["beta"] = Tensor(DType::kF32, heads);
  std::copy(alpha.begin(), alpha.end(), parameters["alpha"].span<float>().begin());
  std::copy(beta.begin(), beta.end(), parameters["beta"].span<float>().begin());
  return parameters;
}

NamedTensors RunWith(const Problem& problem, const NamedTensors& inputs,
                     const NamedTensors& parameters, Device device = Device::kCpu) {
  return RunTechnique(DistanceAware(), problem, ViewsOf(inputs), {{}, device, 1, &parameters})
      .value();
}

double Factor(double alpha, double beta, int64_t distance) {
  return DistanceAwareFactor(alpha, beta, distance).value();
}

TEST(DistanceAware, FactorOfDistanceZeroIsOne) {
  for (const double alpha : {-3.0, 0.0, 0.1, 5.0}) {
    for (const double beta : {-20.0, -1.0, 0.0, 4.0, 900.0}) {
      EXPECT_EQ(Factor(alpha, beta, 0), 1) << alpha << " " << beta;
    }
  }
}

TEST(DistanceAware, FactorIsThePapersQuotient) {
  // For beta = 0 f is 2 / (1 + e^-n); for alpha = log 2, beta = log 3 it is 4 / (1 + 3 / 2^n).
  EXPECT_NEAR(Factor(1, 0, 2), 2 / (1 + std::exp(-2.0)), 1e-15);
  EXPECT_NEAR(Factor(std::log(2.0), std::log(3.0), 1), 1.6, 1e-14);
  EXPECT_NEAR(Factor(std::log(2.0), std::log(3.0), 3), 4 / 1.375, 1e-14);
  EXPECT_NEAR(Factor(-std::log(2.0), std::log(3.0), 2), 4.0 / 13, 1e-15);
}

TEST(DistanceAware, FactorTendsToItsLimitsAndNeverTurns) {
  for (const double beta : {-5.0, 0.0, 2.0}) {
    EXPECT_NEAR(Factor(0.5, beta, 1000), 1 + std::exp(beta), 1e-12 * std::exp(5.0));
    EXPECT_EQ(Factor(-0.5, beta, 1000000), 0);
    for (int64_t n = 0; n < 60; ++n) {
      EXPECT_GT(Factor(0.1, beta, n + 1), Factor(0.1, beta, n));
      EXPECT_LT(Factor(-0.1, beta, n + 1), Factor(-0.1, beta, n));
    }
  }
}

TEST(DistanceAware, FactorStaysFiniteWhereTheQuotientIsInfinityByInfinity) {
  // beta is so large that f = exp(alpha n) as long as alpha n is far below it.
  EXPECT_NEAR(Factor(0.25, 800, 4), std::exp(1.0), 1e-12);
  EXPECT_NEAR(Factor(-0.25, 800, 4), std::exp(-1.0), 1e-12);
}

TEST(DistanceAware, WeightsOfThreeKeysByHand) {
  // With head_dim 4, alpha = log 2, beta = log 3: f(0) = 1, f(1) = 1.6. Query 1 is (2, 0, 0, 0),
  // keys are (x, 0, 0, 0) with x = -5, 3, 5: products -10, 6, 10, over sqrt(4) 0, 3, and 5 * 1.6 =
  // 8.
  const Problem problem = Problem::SelfAttention(1, 1, 3, 4);
  NamedTensors inputs = RandomInputs(QkvInputs(problem), 1);
  for (const char* name : {"q", "k", "v"}) Fill(inputs[name].view(), 0);
  *inputs["q"].view().MutableAt<float>(0, 0, 1) = 2;
  const float keys[] = {-5, 3, 5};
  for (int64_t j = 0; j < 3; ++j) {
    *inputs["k"].view().MutableAt<float>(0, 0, j) = keys[j];
    *inputs["v"].view().MutableAt<float>(0, 0, j, j) = 1;
  }
  const NamedTensors parameters =
      Parameters({static_cast<float>(std::log(2.0))}, {static_cast<float>(std::log(3.0))});
  const double sum = 1 + std::exp(3.0) + std::exp(8.0);
  for (const Device device : TestedDevices()) {
    const NamedTensors ours = RunWith(problem, inputs, parameters, device);
    const float* row = ours.at("out").view().At<float>(0, 0, 1);
    EXPECT_NEAR(row[0], 1 / sum, 1e-6) << Name(device);
    EXPECT_NEAR(row[1], std::exp(3.0) / sum, 1e-6) << Name(device);
    EXPECT_NEAR(row[2], std::exp(8.0) / sum, 1e-6) << Name(device);
  }
}

// Computes softmax(relu(q k^T) factor / sqrt(head_dim)) v of one batch row, without a mask, by
// plain loops.
Tensor PlainAttention(const Problem& problem, const NamedTensors& inputs,
                      const std::vector<float>& alpha, const std::vector<float>& beta) {
  Tensor out(DType::kF64, {1, problem.query_heads, problem.query_tokens, problem.value_dim});
  Fill(out.view(), 0);
  for (int64_t h = 0; h < problem.query_heads; ++h) {
    for (int64_t i = 0; i < problem.query_tokens; ++i) {
      std::vector<double> weights;
      double sum = 0;
      for (int64_t j = 0; j < problem.kv_tokens; ++j) {
        double dot = 0;
        for (int64_t c = 0; c < problem.head_dim; ++c) {
          dot += static_cast<double>(inputs.at("q").view().At<float>(0, h, i)[c]) *
                 inputs.at("k").view().At<float>(0, h, j)[c];
        }
        const double a = alpha[h], b = beta[h], n = std::abs(static_cast<double>(i - j));
        const double f = (1 + std::exp(b)) / (1 + std::exp(b - a * n));
        weights.push_back(std::exp(std::max(dot, 0.0) * f / std::sqrt(problem.head_dim)));
        sum += weights.back();
      }
      for (int64_t j = 0; j < problem.kv_tokens; ++j) {
        for (int64_t c = 0; c < problem.value_dim; ++c) {
          *out.view().MutableAt<double>(0, h, i, c) +=
              weights[j] / sum * inputs.at("v").view().At<float>(0, h, j)[c];
        }
      }
    }
  }
  return out;
}

TEST(DistanceAware, MatchesPlainLoops) {
  const Problem problem = Problem::SelfAttention(1, 3, 150, 16);
  const NamedTensors inputs = RandomInputs(QkvInputs(problem), 2);
  const std::vector<float> alpha = {0.05f, -0.3f, 2}, beta = {1, 0.5f, -2};
  const NamedTensors parameters = Parameters(alpha, beta);
  const Tensor expected = PlainAttention(problem, inputs, alpha, beta);
  NamedTensors defined;
  ASSERT_TRUE(DistanceAware().Define(problem, {}, parameters, ViewsOf(inputs), {}, &defined).ok());
  EXPECT_LE(MaxDifference(defined["out"].view(), expected.view()), 1e-12);
  EXPECT_LE(MaxDifference(RunWith(problem, inputs, parameters).at("out").view(), expected.view()),
            Fp32Bound(inputs.at("v").view()));
}

TEST(DistanceAware, AlphaOfZeroIsTheSoftmaxOfReluScores) {
  // Where all products are positive, the result is dense attention.
  for (bool causal : {false, true}) {
    const Problem problem = Problem::SelfAttention(1, 2, 100, 16, causal);
    NamedTensors inputs = RandomInputs(QkvInputs(problem), 2);
    for (const char* name : {"q", "k"}) {
      for (float& value : inputs[name].span<float>()) value = std::abs(value);
    }
    const NamedTensors ours = RunWith(problem, inputs, Parameters({0, 0}, {3, -1}));
    const NamedTensors dense = RunTechnique(dense::Dense(), problem, ViewsOf(inputs)).value();
    EXPECT_LE(MaxDifference(ours.at("out").view(), dense.at("out").view()), 2e-6);
  }
}

TEST(DistanceAware, NegativeProductsAndFarKeysKeepTheWeightOfScoreZero) {
  // With opposed queries and keys all scores are 0, whatever alpha, and the output is the mean.
  const Problem problem = Problem::SelfAttention(1, 2, 100, 16);
  NamedTensors inputs = RandomInputs(QkvInputs(problem), 2);
  Fill(inputs["q"].view(), 1);
  Fill(inputs["k"].view(), -1);
  const NamedTensors ours = RunWith(problem, inputs, Parameters({0.5f, -0.5f}, {3, -1}));
  for (int64_t h = 0; h < 2; ++h) {
    for (int64_t c = 0; c < 16; ++c) {
      double mean = 0;
      for (int64_t j = 0; j < 100; ++j) mean += inputs["v"].view().At<float>(0, h, j)[c] / 100;
      EXPECT_NEAR(ours.at("out").view().At<float>(0, h, 37)[c], mean, 1e-6);
    }
  }
  // A row of 100 keys with score 0 has the log-sum-exp log 100.
  EXPECT_NEAR(*ours.at("log_sum_exp").view().At<float>(0, 1, 37), std::log(100.0), 1e-5);
}

TEST(DistanceAware, FactorsBeyondFp32LeaveScoresOfZeroAlone) {
  const Problem problem = Problem::SelfAttention(1, 1, 100, 16);
  NamedTensors inputs = RandomInputs(QkvInputs(problem), 2);
  Fill(inputs["q"].view(), 0);
  const NamedTensors ours = RunWith(problem, inputs, Parameters({4}, {200}));
  EXPECT_NEAR(*ours.at("log_sum_exp").view().At<float>(0, 0, 50), std::log(100.0), 1e-5);
}

TEST(DistanceAware, MatchesItsDefinitionBidirectionallyAndCausally) {
  for (bool causal : {false, true}) {
    for (auto [queries, keys] : {std::pair<int64_t, int64_t>{129, 129}, {30, 200}, {200, 30}}) {
      Problem problem = Problem::SelfAttention(2, 6, queries, 40, causal);
      problem.kv_tokens = keys;
      problem.kv_heads = 3;
      const NamedTensors inputs = RandomInputs(QkvInputs(problem), 2);
      const NamedTensors ours = RunTechnique(DistanceAware(), problem, ViewsOf(inputs)).value();
      const NamedTensors expected =
          DefineTechnique(DistanceAware(), problem, ViewsOf(inputs)).value();
      EXPECT_LE(MaxDifference(ours.at("out").view(), expected.at("out").view()),
                Fp32Bound(inputs.at("v").view()));
    }
  }
}

TEST(DistanceAware, TheLastQueriesOfManyAreThoseOfAProblemOfTheirOwn) {
  Problem all = Problem::SelfAttention(1, 5, 100, 16, /*causal=*/true);
  Problem last = all;
  last.query_tokens = 40;
  const NamedTensors inputs = RandomInputs(QkvInputs(all), 2);
  const NamedTensors whole = RunTechnique(DistanceAware(), all, ViewsOf(inputs)).value();
  Inputs tail = ViewsOf(inputs);
  tail.Set("q", Slice(inputs.at("q").view(), 2, 60, 40));
  const NamedTensors part = RunTechnique(DistanceAware(), last, tail).value();
  EXPECT_LE(MaxDifference(Slice(whole.at("out").view(), 2, 60, 40), part.at("out").view()), 1e-6);
}

TEST(DistanceAware, CostCountsTwoProductsAndTwoOperationsAPair) {
  Problem problem = Problem::SelfAttention(3, 4, 5, 6, /*causal=*/true);
  problem.kv_heads = 2;
  problem.value_dim = 7;
  // There are 15 pairs a head.
  EXPECT_EQ(CostOf(DistanceAware(), problem).flops, 3 * 4 * 15 * (2 * (6 + 7) + 2));
}

}  // namespace
}  // namespace tfb::distance_aware
