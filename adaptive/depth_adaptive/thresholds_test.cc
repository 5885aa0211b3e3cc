#include "adaptive/depth_adaptive/thresholds.h"

#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tfb::depth_adaptive {
namespace {

using ::testing::ElementsAre;

TEST(DepthAdaptiveThresholds, SeparateTheTokensThatAreRightFromThoseThatAreWrong) {
  // There are four tokens, and layer 1 is right about those with a confidence above 0.6.
  const ExitValues values = {{0, 1, 0, 1}, {1, 1, 1, 1}};
  const ExitValues confidences = {{0.58, 0.9, 0.2, 0.63}};
  // The higher one wins ties.
  EXPECT_THAT(SearchThresholds(values, confidences, 0.1), ElementsAre(630));
}

TEST(DepthAdaptiveThresholds, WithoutAPenaltyNothingLeavesThatTheNextLayerBetters) {
  const ExitValues values = {{-2, -2}, {-1, -1}, {-0.5, -0.5}};
  const ExitValues confidences = {{0.9, 0.8}, {1, 0.7}};
  EXPECT_THAT(SearchThresholds(values, confidences, 0), ElementsAre(1001, 1001));
  EXPECT_THAT(SearchThresholds(values, confidences, 0.7), ElementsAre(1001, 700));
}

TEST(DepthAdaptiveThresholds, ALargePenaltyLetsAllLeaveAtOnce) {
  const ExitValues values = {{-9, -9, -9}, {-1, -1, -1}, {0, 0, 0}};
  const ExitValues confidences = {{0.31, 0.5, 0.99}, {1, 1, 1}};
  EXPECT_EQ(SearchThresholds(values, confidences, 100)[0], 310);
}

TEST(DepthAdaptiveThresholds, ConfidenceOfOneIsReachedAndBelowTheGridNothingIs) {
  EXPECT_THAT(SearchThresholds({{1, 0}, {0, 1}}, {{1, 0.999}}, 0.1), ElementsAre(1000));
  EXPECT_THAT(SearchThresholds({{1, 1}, {0, 0}}, {{0.004, 0.002}}, 0.1), ElementsAre(0));
  // A number that is no probability is at most the grid's 1000, and 1001 stays out of reach.
  EXPECT_THAT(SearchThresholds({{1, 0}, {0, 1}}, {{1.5, 0.999}}, 0.1), ElementsAre(1000));
}

// No single threshold can be moved to a better place.
TEST(DepthAdaptiveThresholds, OfRandomTokensNoLayersThresholdIsBetteredByAnother) {
  constexpr size_t kTokens = 500, kExits = 4;
  std::mt19937 random(1);
  std::uniform_real_distribution<double> uniform(0, 1);
  ExitValues values(kExits), confidences(kExits - 1);
  for (size_t n = 0; n < kExits; ++n) {
    for (size_t t = 0; t < kTokens; ++t) {
      const double c = uniform(random);
      if (n + 1 < kExits) confidences[n].push_back(c);
      values[n].push_back(c - 1 + 0.3 * uniform(random) + 0.2 * static_cast<double>(n));
    }
  }
  const double penalty = 0.15;
  const auto mean = [&](const std::vector<int64_t>& thresholds) {
    double sum = 0;
    for (size_t t = 0; t < kTokens; ++t) {
      size_t n = 0;
      while (n < thresholds.size() && confidences[n][t] * 1000 < thresholds[n]) ++n;
      sum += values[n][t] - penalty * static_cast<double>(n + 1);
    }
    return sum / kTokens;
  };
  const std::vector<int64_t> found = SearchThresholds(values, confidences, penalty);
  for (size_t n = 0; n < found.size(); ++n) {
    for (int64_t threshold = 0; threshold <= 1001; threshold += threshold == 1000 ? 1 : 10) {
      std::vector<int64_t> moved = found;
      moved[n] = threshold;
      EXPECT_LE(mean(moved), mean(found) + 1e-9) << n << " " << threshold;
    }
  }
  for (int64_t shared = 0; shared <= 1000; shared += 10) {
    EXPECT_GE(mean(found), mean({shared, shared, shared}) - 1e-9);
  }
  EXPECT_GT(mean(found), mean({1001, 1001, 1001}));
}

// Moving one threshold at a time may end below what one that all layers share gives, unless it begins
// there.
TEST(DepthAdaptiveThresholds, AreAtLeastAsGoodAsAnyThatAllLayersShare) {
  constexpr size_t kTokens = 6, kExits = 5;
  std::mt19937 random(2);
  std::uniform_real_distribution<double> uniform(0, 1);
  for (int instance = 0; instance < 2000; ++instance) {
    ExitValues values(kExits), confidences(kExits - 1);
    for (size_t n = 0; n < kExits; ++n) {
      for (size_t t = 0; t < kTokens; ++t) {
        values[n].push_back(uniform(random));
        if (n + 1 < kExits) confidences[n].push_back(uniform(random));
      }
    }
    const auto sum = [&](const std::vector<int64_t>& thresholds) {
      double gains = 0;
      for (size_t t = 0; t < kTokens; ++t) {
        size_t n = 0;
        while (n < thresholds.size() && confidences[n][t] * 1000 < thresholds[n]) ++n;
        gains += values[n][t];
      }
      return gains;
    };
    const double found = sum(SearchThresholds(values, confidences, /*penalty=*/0));
    for (int64_t shared = 0; shared <= 1000; shared += 10) {
      ASSERT_GE(found, sum({shared, shared, shared, shared}) - 1e-9)
          << "instance " << instance << ", " << shared;
    }
  }
}

}  // namespace
}  // namespace tfb::depth_adaptive
