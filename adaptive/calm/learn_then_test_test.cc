#include "adaptive/calm/learn_then_test.h"

#include <cmath>
#include <random>
#include <vector>

#include "gtest/gtest.h"

namespace tfb::calm {
namespace {

constexpr PValue kBoth[] = {PValue::kHoeffding, PValue::kHoeffdingBentkus};

TEST(LearnThenTest, BinomialsAreThoseCountedByHand) {
  EXPECT_NEAR(BinomialCdf(1, 3, 0.5), 0.5, 1e-12);
  EXPECT_NEAR(BinomialCdf(0, 4, 0.1), 0.6561, 1e-12);
  EXPECT_NEAR(BinomialCdf(2, 4, 0.1), 0.9963, 1e-12);  // 1 - 4 0.9 0.001 - 0.0001
  EXPECT_EQ(BinomialCdf(4, 4, 0.1), 1);
  EXPECT_EQ(BinomialCdf(-1, 4, 0.1), 0);
}

// The expected values come from NumPy and SciPy 1.10.1, by the formula of the authors' code
// (github.com/aangelopoulos/ltt, core/bounds.py, commit 13c43cf), except for a mean loss of 0,
// where that gives NaN.
TEST(LearnThenTest, PValuesAreThoseOfTheAuthorsFormula) {
  struct Expected {
    double mean;
    int64_t sequences;
    double risk, hoeffding, hoeffding_bentkus;
  };
  for (const Expected& e :
       std::vector<Expected>{{0.05, 500, 0.1, 0.0820849986239, 9.62302544446e-05},
                             {0, 30, 0.1, 0.548811636094, 0.0423911582752},
                             {0.08, 200, 0.1, 0.852143788966, 0.563982593528},
                             {0.2, 100, 0.1, 1, 1},
                             {0.013, 128, 0.05, 0.704361190292, 0.0753567130798},
                             {0.06, 256, 0.1, 0.440784140805, 0.0641543421465}}) {
    EXPECT_NEAR(PValueOf(PValue::kHoeffding, e.mean, e.sequences, e.risk) / e.hoeffding, 1, 1e-9);
    EXPECT_NEAR(
        PValueOf(PValue::kHoeffdingBentkus, e.mean, e.sequences, e.risk) / e.hoeffding_bentkus, 1,
        1e-9);
  }
}

TEST(LearnThenTest, ThresholdsAreAcceptedUpToTheFirstThatFails) {
  const RiskPromise promise = {0.1, 0.05};
  for (const PValue kind : kBoth) {
    EXPECT_EQ(LastAccepted(kind, {0, 0.01, 0.2, 0.01}, 1000, promise), 1);
    EXPECT_EQ(LastAccepted(kind, {0.2, 0}, 1000, promise), -1);
    EXPECT_EQ(LastAccepted(kind, {0, 0, 0}, 1000, promise), 2);
    EXPECT_EQ(LastAccepted(kind, {0}, 2, promise), -1);  // too few to be sure of anything
  }
}

// A guarantee is broken where a threshold is accepted whose true risk is above it. Losses are 0 or
// 1; risks rise with the index, in small steps around the guaranteed one.
TEST(LearnThenTest, PromisesAreBrokenNoMoreOftenThanPromised) {
  constexpr int kTrials = 4000, kSequences = 500;
  const RiskPromise promise = {0.1, 0.05};
  std::vector<double> risks;
  for (double risk = 0.02; risk < 0.16; risk += 0.004) risks.push_back(risk + 0.0005);
  double mean_accepted[2] = {};
  for (const PValue kind : kBoth) {
    std::mt19937 random(7);
    int broken = 0;
    for (int trial = 0; trial < kTrials; ++trial) {
      // All thresholds see the same sequences: a loss is 1 where a uniform number is below the
      // risk.
      std::vector<double> uniform(kSequences), means;
      for (double& u : uniform) u = std::generate_canonical<double, 53>(random);
      for (const double risk : risks) {
        int losses = 0;
        for (const double u : uniform) losses += u < risk ? 1 : 0;
        means.push_back(static_cast<double>(losses) / kSequences);
      }
      const int64_t last = LastAccepted(kind, means, kSequences, promise);
      broken += last >= 0 && risks[last] > promise.risk ? 1 : 0;
      mean_accepted[kind == PValue::kHoeffding ? 0 : 1] += static_cast<double>(last) / kTrials;
    }
    // Three deviations of a count of 4000 with probability 0.05 are 41.
    EXPECT_LE(broken, kTrials * promise.failure + 41) << static_cast<int>(kind);
  }
  EXPECT_GT(mean_accepted[1], mean_accepted[0] + 1);  // Hoeffding-Bentkus accepts more thresholds
}

TEST(LearnThenTest, HalfOfTheSequencesIsEverySecondOne) {
  EXPECT_EQ(EverySecond(7), (std::vector<int64_t>{0, 2, 4}));
  EXPECT_EQ(EverySecond(2), std::vector<int64_t>{0});
}

}  // namespace
}  // namespace tfb::calm
