#include "results/two_samples.h"

#include <cmath>
#include <limits>
#include <random>
#include <string>

#include "gtest/gtest.h"

namespace tfb {
namespace {

std::vector<double> Sequence(int count, double first, double step) {
  std::vector<double> values;
  for (int i = 0; i < count; ++i) values.push_back(first + i * step);
  return values;
}

std::vector<double> LogNormal(int count, double median, double sigma, std::mt19937_64* random) {
  std::normal_distribution<double> normal(0, sigma);
  std::vector<double> values;
  for (int i = 0; i < count; ++i) values.push_back(median * std::exp(normal(*random)));
  return values;
}

// SciPy 1.17.1, scipy.stats.mannwhitneyu with method "exact", or "asymptotic" where samples are equal
// or many.
TEST(MannWhitney, EqualsSciPy) {
  EXPECT_NEAR(MannWhitneyP({1.1, 2.2, 3.3, 4.4, 5.5}, {2.5, 6.1, 7.2, 8.3, 9.4, 10.5}),
              0.0303030303030303, 1e-14);
  EXPECT_NEAR(MannWhitneyP(Sequence(11, 0, 2), Sequence(11, 5.5, 3)), 0.0157690606607015, 1e-14);
  EXPECT_NEAR(MannWhitneyP({1, 2, 2, 3, 4, 5, 7}, {2, 3, 5, 6, 8, 9}), 0.171165535877966, 1e-14);
  EXPECT_NEAR(MannWhitneyP(Sequence(70, 0, 1), Sequence(65, 10.5, 1)), 0.026306622023362, 1e-14);
}

TEST(MannWhitney, SeparatedSamplesHaveOneOrderOfAllOnEachSide) {
  // 2 of the 705,432 ways to choose 11 of 22.
  EXPECT_NEAR(MannWhitneyP(Sequence(11, 1, 1), Sequence(11, 100, 1)), 2.0 / 705432, 1e-18);
  EXPECT_NEAR(MannWhitneyP({1, 2, 3}, {4, 5, 6}), 0.1, 1e-15);
}

TEST(MannWhitney, IsOneWhereThereIsNothingToTell) {
  EXPECT_EQ(MannWhitneyP({}, {1, 2}), 1);
  EXPECT_EQ(MannWhitneyP({3, 3, 3}, {3, 3}), 1);
  EXPECT_EQ(MannWhitneyP({1, 4}, {2, 3}), 1);
}

TEST(MannWhitney, IsSymmetric) {
  const std::vector<double> a = {1, 5, 8, 13}, b = {2, 3, 21};
  EXPECT_EQ(MannWhitneyP(a, b), MannWhitneyP(b, a));
}

TEST(MannWhitney, OfEqualDistributionsFivePercentAreBelowFivePercent) {
  std::mt19937_64 random(3);
  int below = 0;
  for (int round = 0; round < 2000; ++round) {
    below += MannWhitneyP(LogNormal(11, 1, 0.1, &random), LogNormal(9, 1, 0.1, &random)) < 0.05;
  }
  EXPECT_NEAR(below / 2000.0, 0.05, 0.015);  // three standard deviations
}

TEST(Holm, IsTheStepDownProcedure) {
  EXPECT_EQ(HolmAdjusted({}), std::vector<double>());
  const std::vector<double> adjusted = HolmAdjusted({0.01, 0.04, 0.03, 0.005});
  const std::vector<double> expected = {0.03, 0.06, 0.06, 0.02};
  for (size_t i = 0; i < expected.size(); ++i) EXPECT_NEAR(adjusted[i], expected[i], 1e-15) << i;
  EXPECT_EQ(HolmAdjusted({0.9, 0.8}), std::vector<double>({1, 1}));
}

TEST(Bootstrap, AConstantRatioHasNoWidth) {
  const auto ratio = BootstrapRatio({{{6, 6, 6}, true}, {{2, 2, 2, 2}, false}, {{5}, false}}, 1);
  ASSERT_TRUE(ratio.has_value());
  EXPECT_NEAR(ratio->ratio, 0.6, 1e-15);
  EXPECT_NEAR(ratio->low, 0.6, 1e-15);
  EXPECT_NEAR(ratio->high, 0.6, 1e-15);
}

TEST(Bootstrap, HoldsTheTrueRatioInAboutNinetyFivePercent) {
  std::mt19937_64 random(7);
  int held = 0;
  constexpr int kRounds = 400;
  for (int round = 0; round < kRounds; ++round) {
    const auto ratio = BootstrapRatio({{LogNormal(11, 3, 0.1, &random), true},
                                       {LogNormal(11, 2, 0.05, &random), false},
                                       {LogNormal(11, 4, 0.1, &random), false},
                                       {LogNormal(11, 2, 0.05, &random), true}},
                                      static_cast<uint64_t>(round));
    held += ratio->low <= 0.75 && 0.75 <= ratio->high;
  }
  EXPECT_GE(held / static_cast<double>(kRounds), 0.93);
  EXPECT_LE(held / static_cast<double>(kRounds), 0.995);
}

TEST(Bootstrap, TheSameSeedGivesTheSameInterval) {
  std::mt19937_64 random(5);
  const std::vector<Factor> factors = {{LogNormal(9, 1, 0.2, &random), true},
                                       {LogNormal(9, 1, 0.2, &random), false}};
  const auto once = BootstrapRatio(factors, 42), again = BootstrapRatio(factors, 42);
  EXPECT_EQ(once->low, again->low);
  EXPECT_EQ(once->high, again->high);
  EXPECT_LT(once->low, once->ratio);
  EXPECT_GT(once->high, once->ratio);
}

TEST(Bootstrap, IsAbsentForWhatIsNoTime) {
  for (const double bad : {0.0, -1.0, std::nan(""), std::numeric_limits<double>::infinity()}) {
    EXPECT_FALSE(BootstrapRatio({{{1, bad}, true}}, 1).has_value()) << bad;
  }
  EXPECT_FALSE(BootstrapRatio({{{}, true}}, 1).has_value());
}

}  // namespace
}  // namespace tfb
