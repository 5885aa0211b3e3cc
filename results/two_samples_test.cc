#include "results/two_samples.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <map>
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
TEST(MannWhitney, OfNoSamplesOnEitherSideTellsNothing) {
  EXPECT_EQ(MannWhitneyP({}, {1, 2, 3}), 1);
  EXPECT_EQ(MannWhitneyP({1, 2, 3}, {}), 1);
  EXPECT_EQ(MannWhitneyP({}, {}), 1);
}

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

// SciPy 1.17.1: scipy.stats.ttest_ind(log(a), log(b), equal_var=False, trim=0.2).
TEST(TrimmedRatio, OfTwoSetsEqualsSciPy) {
  const std::vector<double> a = {1.02, 1.0, 1.31, 0.99, 1.04, 1.01, 0.97, 1.03, 1.05, 0.98, 1.6};
  const std::vector<double> b = {1.06, 1.08, 1.04, 1.5, 1.07, 1.1};
  EXPECT_NEAR(TrimmedRatioP({{a, true}, {b, false}}), 0.009081681833905328, 1e-15);
  EXPECT_NEAR(TrimmedRatioP({{b, true}, {a, false}}), 0.009081681833905328, 1e-15);
  const double far =
      TrimmedRatioP({{{1.5, 1.501, 1.502, 1.503}, true}, {{1.0, 1.001, 1.002, 1.003}, false}});
  EXPECT_NEAR(far / 1.5422200452803172e-13, 1, 1e-6);
}

// The formula of the header in NumPy, with SciPy's trimmed means and distribution of Student.
TEST(TrimmedRatio, OfFourSetsEqualsTheFormula) {
  const std::vector<double> a = {1.02, 1.0, 1.31, 0.99, 1.04, 1.01, 0.97, 1.03, 1.05, 0.98, 1.6};
  const std::vector<double> b = {1.06, 1.08, 1.04, 1.5, 1.07, 1.1};
  const std::vector<double> c = {2.0, 2.1, 2.05, 2.2};
  const auto d = [](double divisor) {
    std::vector<double> samples = {3.0, 3.3, 3.1, 3.2, 3.05, 2.9, 3.6, 3.15, 3.12, 3.02};
    for (double& sample : samples) sample /= divisor;
    return samples;
  };
  EXPECT_NEAR(TrimmedRatioP({{a, true}, {b, false}, {c, false}, {d(1.45), true}}),
              0.3549268145183543, 1e-14);
  EXPECT_NEAR(TrimmedRatioP({{a, true}, {b, false}, {c, true}, {d(1.5), false}}),
              0.1363641433090657, 1e-14);
}

TEST(TrimmedRatio, OfConstantsIsOneWhereTheyAreEqualAndZeroElse) {
  const std::vector<double> third(5, 1.0 / 3), one(4, 1.0), sevenths(6, 1.0 / 7);
  const std::vector<double> of_both(3, 1.0 / 21);
  EXPECT_NEAR(TrimmedRatioP({{of_both, true}, {third, false}, {sevenths, false}, {one, true}}), 1,
              1e-6);
  EXPECT_LT(TrimmedRatioP({{third, true}, {one, false}}), 1e-8);
}

TEST(TrimmedRatio, IsOneWhereASetHasNoVarianceOrIsNoTime) {
  const std::vector<double> times = {1.0, 1.01, 1.02}, longer = {2.0, 2.01, 2.02};
  ASSERT_LT(TrimmedRatioP({{times, true}, {longer, false}}), 0.001);
  EXPECT_EQ(TrimmedRatioP({{times, true}, {{2.0}, false}}), 1);
  EXPECT_EQ(TrimmedRatioP({{times, true}, {{}, false}}), 1);
  for (const double bad : {0.0, -1.0, std::nan(""), std::numeric_limits<double>::infinity()}) {
    EXPECT_EQ(TrimmedRatioP({{times, true}, {{2.0, 2.01, bad}, false}}), 1) << bad;
  }
}

// Noise in which one of ten samples is a tenth slower.
std::vector<double> WithSlowOnes(int count, double median, double sigma, std::mt19937_64* random) {
  std::vector<double> values = LogNormal(count, median, sigma, random);
  for (double& value : values) value *= (*random)() % 10 == 0 ? 1.1 : 1;
  return values;
}

// Four sets of `count` samples, as of a technique and of dense in two sweeps.
using Noise = std::vector<double> (*)(int count, double median, double sigma, std::mt19937_64*);
std::vector<Factor> FourSets(int count, double change, double sigma, double sigma_of_dense,
                             Noise noise, std::mt19937_64* random) {
  return {{noise(count, 3 * change, sigma, random), true},
          {noise(count, 2, sigma, random), false},
          {noise(count, 6, sigma_of_dense, random), false},
          {noise(count, 4, sigma_of_dense, random), true}};
}

TEST(TrimmedRatio, OfEqualRatiosFivePercentAreBelowFivePercent) {
  constexpr int kRounds = 2000;
  std::mt19937_64 random(5);
  for (const Noise noise : {LogNormal, WithSlowOnes}) {
    for (const double sigma_of_dense : {0.005, 0.025}) {
      for (const int count : {4, 6, 10, 20}) {
        int below = 0;
        for (int round = 0; round < kRounds; ++round) {
          below += TrimmedRatioP(FourSets(count, 1, 0.025, sigma_of_dense, noise, &random)) < 0.05;
        }
        // Three standard deviations above 5 %. Slow samples make the test cautious, not useless.
        EXPECT_LE(below / static_cast<double>(kRounds), 0.065) << count << " " << sigma_of_dense;
        EXPECT_GE(below / static_cast<double>(kRounds), 0.015) << count << " " << sigma_of_dense;
      }
    }
  }
}

TEST(TrimmedRatio, FindsATenthOfTenSamples) {
  constexpr int kRounds = 500;
  std::mt19937_64 random(6);
  for (const Noise noise : {LogNormal, WithSlowOnes}) {
    int found = 0;
    for (int round = 0; round < kRounds; ++round) {
      found += TrimmedRatioP(FourSets(10, 1.1, 0.02, 0.02, noise, &random)) < 0.05;
    }
    EXPECT_GE(found, 0.95 * kRounds);
  }
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

// Of the orders of m and n samples those with exactly u pairs in which one of the m is the greater.
double Orders(int m, int n, int u, std::map<std::array<int, 3>, double>* known) {
  if (u < 0 || u > m * n) return 0;
  if (m == 0 || n == 0) return u == 0 ? 1 : 0;
  const auto [place, added] = known->emplace(std::array<int, 3>{m, n, u}, 0.0);
  if (!added) return place->second;
  const double count = Orders(m - 1, n, u - n, known) + Orders(m, n - 1, u, known);
  return (*known)[{m, n, u}] = count;
}

TEST(MannWhitney, IsExactUpToSixtySamplesAndApproximateBeyond) {
  for (const int m : {59, 60, 61}) {
    const int n = 4;
    // Four that are above 40, 41, 42 and 43 of the others.
    const std::vector<double> a = Sequence(m, 0, 1), b = {39.5, 40.25, 41.5, 42.25};
    const int u = (m - 40) + (m - 41) + (m - 42) + (m - 43), least = std::min(u, m * n - u);
    std::map<std::array<int, 3>, double> known;
    double all = 0, below = 0;
    for (int k = 0; k <= m * n; ++k) {
      const double orders = Orders(m, n, k, &known);
      all += orders;
      below += k <= least ? orders : 0;
    }
    const double exact = std::min(1.0, 2 * below / all);
    const double deviation = std::sqrt(m * n * (m + n + 1) / 12.0);
    const double normal =
        std::erfc((std::fabs(u - m * n / 2.0) - 0.5) / deviation / std::sqrt(2.0));
    ASSERT_GT(std::fabs(exact - normal), 1e-4);
    EXPECT_NEAR(MannWhitneyP(a, b), m <= kMostExact ? exact : normal, 1e-12) << m;
    EXPECT_NEAR(MannWhitneyP(b, a), m <= kMostExact ? exact : normal, 1e-12) << m;
  }
}

// The interval against one whose resamples are drawn by another generator.
TEST(Bootstrap, IsBetweenTheOuterFortiethsOfManyResamples) {
  std::mt19937_64 random(9);
  const std::vector<double> samples = LogNormal(25, 1, 0.3, &random);
  std::vector<double> medians;
  for (int i = 0; i < 20000; ++i) {
    std::vector<double> drawn(samples.size());
    for (double& one : drawn) one = samples[random() % samples.size()];
    std::nth_element(drawn.begin(), drawn.begin() + 12, drawn.end());
    medians.push_back(drawn[12]);
  }
  std::sort(medians.begin(), medians.end());
  const auto interval = BootstrapRatio({{samples, true}}, 3);
  // Of 1000 resamples the share below a percentile of 2.5 % has a standard deviation of 0.5 %.
  EXPECT_GE(interval->low, medians[20000 * 0.010]);
  EXPECT_LE(interval->low, medians[20000 * 0.040]);
  EXPECT_GE(interval->high, medians[20000 * 0.960]);
  EXPECT_LE(interval->high, medians[20000 * 0.990]);
}

}  // namespace
}  // namespace tfb
