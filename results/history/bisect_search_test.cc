#include "results/history/bisect_search.h"

#include <cmath>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "gtest/gtest.h"

namespace tfb {
namespace {

using End = SearchResult::End;
constexpr SearchOptions kOptions;

Reading Exactly(double ratio) { return {ratio, ratio, ratio}; }

// Commits with a true ratio each, measured with a relative error that falls with the samples.
class Line {
 public:
  explicit Line(std::vector<double> ratios, double error = 0, uint64_t seed = 1)
      : ratios_(std::move(ratios)), error_(error), random_(seed) {}

  void PassOver(int commit) { passed_over_.insert(commit); }

  SearchResult Search() {
    const auto found =
        SearchForChange(static_cast<int>(ratios_.size()), Measured(LastIndex(), 0), kOptions,
                        [this](const SearchStep& step) -> absl::StatusOr<std::optional<Reading>> {
                          EXPECT_LT(step.low, step.commit);
                          EXPECT_LT(step.commit, step.high);
                          steps_.push_back(step);
                          if (passed_over_.count(step.commit) > 0) return std::nullopt;
                          return Measured(step.commit, step.look);
                        });
    EXPECT_TRUE(found.ok()) << found.status();
    return *found;
  }

  const std::vector<SearchStep>& steps() const { return steps_; }
  int LastIndex() const { return static_cast<int>(ratios_.size()) - 1; }

  // Returns the interval of an estimate with a normal error, whose standard deviation halves with
  // four times the samples.
  Reading Measured(int commit, int look) {
    const double deviation = error_ / std::sqrt(std::pow(2.0, look));
    const double estimate = std::log(ratios_[static_cast<size_t>(commit)]) + deviation * Normal();
    return {std::exp(estimate), std::exp(estimate - 1.96 * deviation),
            std::exp(estimate + 1.96 * deviation)};
  }

 private:
  double Normal() {
    const auto uniform = [this] { return static_cast<double>((random_() >> 11) + 1) * 0x1p-53; };
    const double radius = std::sqrt(-2 * std::log(uniform()));
    return radius * std::cos(2 * M_PI * uniform());
  }

  const std::vector<double> ratios_;
  const double error_;
  std::mt19937_64 random_;
  std::set<int> passed_over_;
  std::vector<SearchStep> steps_;
};

std::vector<double> StepAt(int count, int commit, double ratio) {
  std::vector<double> ratios(static_cast<size_t>(count), 1.0);
  for (int i = commit; i < count; ++i) ratios[static_cast<size_t>(i)] = ratio;
  return ratios;
}

TEST(BisectSearch, FindsOneChangeAtEveryPlaceInAsManyStepsAsItSays) {
  for (const int count : {2, 3, 4, 5, 16, 17, 18, 100}) {
    for (int commit = 1; commit < count; ++commit) {
      for (const double ratio : {1.3, 1 / 1.3}) {
        Line line(StepAt(count, commit, ratio));
        const SearchResult found = line.Search();
        EXPECT_EQ(found.end, End::kOneCommit);
        EXPECT_EQ(found.low, commit - 1);
        EXPECT_EQ(found.high, commit);
        EXPECT_EQ(found.of_low.ratio, 1);
        EXPECT_EQ(found.of_high.ratio, ratio);
        EXPECT_LE(static_cast<int>(line.steps().size()), StepsToFind(count)) << count;
      }
    }
  }
}

TEST(BisectSearch, StepsGrowWithTheLogarithm) {
  EXPECT_EQ(StepsToFind(2), 0);
  EXPECT_EQ(StepsToFind(3), 1);
  EXPECT_EQ(StepsToFind(5), 2);
  EXPECT_EQ(StepsToFind(6), 3);
  EXPECT_EQ(StepsToFind(1025), 10);
}

TEST(BisectSearch, MeasuresAgainUntilTheSideIsClear) {
  // With an error of 8 %, 1.3 is not clear of its half way, 1.14, in one look.
  int wrong = 0, unclear = 0, looks = 0, steps = 0;
  constexpr int kSeeds = 400;
  for (int seed = 0; seed < kSeeds; ++seed) {
    const int commit = 1 + seed % 15;
    // The last commit's ratio is known well, as it is measured until it is clear.
    Line line(StepAt(16, commit, 1.3), 0.08, static_cast<uint64_t>(seed));
    const SearchResult found =
        *SearchForChange(16, Exactly(1.3), kOptions,
                         [&](const SearchStep& step) -> absl::StatusOr<std::optional<Reading>> {
                           ++looks;
                           if (step.look == 0) ++steps;
                           return line.Measured(step.commit, step.look);
                         });
    if (found.end == End::kUnclear) {
      ++unclear;
    } else if (found.high != commit) {
      ++wrong;
    }
  }
  EXPECT_GT(looks, steps);
  // Four steps, each wrong with less than 2.5 %.
  EXPECT_LE(wrong, kSeeds / 40);
  EXPECT_LE(unclear, kSeeds / 4);
}

TEST(BisectSearch, ACommitExactlyHalfWayIsTakenForASideRarely) {
  // The worst case that the header states: at most 2.5 % for each of the two sides.
  int after = 0, before = 0;
  constexpr int kSeeds = 2000;
  for (int seed = 0; seed < kSeeds; ++seed) {
    Line line({1, std::sqrt(1.3), 1.3}, 0.3, static_cast<uint64_t>(seed));
    const SearchResult found =
        *SearchForChange(3, Exactly(1.3), kOptions,
                         [&](const SearchStep& step) -> absl::StatusOr<std::optional<Reading>> {
                           return line.Measured(step.commit, step.look);
                         });
    if (found.end != End::kOneCommit) continue;
    ++(found.high == 1 ? after : before);
  }
  // 50, and three standard deviations of such a count, 7.
  EXPECT_LE(after, 71);
  EXPECT_LE(before, 71);
  EXPECT_GT(after + before, 0);
}

TEST(BisectSearch, TooMuchNoiseIsUnclearAfterFourLooks) {
  int looks = 0;
  const SearchResult found =
      *SearchForChange(16, Exactly(1.1), kOptions,
                       [&](const SearchStep& step) -> absl::StatusOr<std::optional<Reading>> {
                         EXPECT_EQ(step.commit, 7);
                         EXPECT_EQ(step.look, looks++);
                         return Reading{1.05, 0.5, 2};
                       });
  EXPECT_EQ(found.end, End::kUnclear);
  EXPECT_EQ(looks, 4);
  EXPECT_EQ(found.low, 0);
  EXPECT_EQ(found.high, 15);
}

TEST(BisectSearch, MoreLooksDecideWhatFewDoNot) {
  // The interval of the n-th look is a factor of 1.3^(+-1/sqrt(2^n)), around 1.
  const auto measure = [](const SearchStep& step) -> absl::StatusOr<std::optional<Reading>> {
    const double width = std::log(1.3) / std::sqrt(std::pow(2.0, step.look));
    return Reading{1, std::exp(-width), std::exp(width)};
  };
  // The half way is 1.3^0.5. The third interval ends at 1.3^(1.22 / 2) where it is the last of
  // three, the fourth at 1.3^(1.275 / 2.83) = 1.3^0.45 where it is the last of four.
  SearchOptions options;
  options.most_looks = 3;
  EXPECT_EQ(SearchForChange(3, Exactly(1.3), options, measure)->end, End::kUnclear);
  options.most_looks = 4;
  EXPECT_EQ(SearchForChange(3, Exactly(1.3), options, measure)->end, End::kOneCommit);
}

TEST(BisectSearch, OfTwoChangesOneIsFound) {
  std::vector<double> ratios = StepAt(20, 4, 1.15);
  for (size_t i = 13; i < ratios.size(); ++i) ratios[i] = 1.3225;
  Line line(ratios, 0.002);
  const SearchResult found = line.Search();
  EXPECT_EQ(found.end, End::kOneCommit);
  EXPECT_TRUE(found.high == 4 || found.high == 13) << found.high;
}

TEST(BisectSearch, OfTwoChangesTheLargerOneIsFound) {
  std::vector<double> ratios = StepAt(20, 4, 1.1);
  for (size_t i = 13; i < ratios.size(); ++i) ratios[i] = 1.4;
  EXPECT_EQ(Line(ratios).Search().high, 13);
}

TEST(BisectSearch, SlowerThenFasterThenSlowerGivesOneThatIsSlower) {
  std::vector<double> ratios = StepAt(21, 3, 1.3);
  for (size_t i = 7; i < 15; ++i) ratios[i] = 1;
  const SearchResult found = Line(ratios).Search();
  EXPECT_EQ(found.end, End::kOneCommit);
  EXPECT_EQ(found.high, 15);
}

TEST(BisectSearch, ADriftEndsWhereWhatIsLeftIsBelowTheLeastChange) {
  std::vector<double> ratios;
  for (int i = 0; i < 33; ++i) ratios.push_back(std::pow(1.3, i / 32.0));
  const SearchResult found = Line(ratios).Search();
  EXPECT_EQ(found.end, End::kSpread);
  EXPECT_LT(found.of_high.ratio / found.of_low.ratio, kOptions.least_change);
  EXPECT_GT(found.high - found.low, 1);
}

TEST(BisectSearch, ASmallChangeIsFoundAlthoughItsEstimatesAreBelowTheLeastChange) {
  const std::vector<double> ratios = StepAt(16, 5, 1.045);
  const SearchResult found =
      *SearchForChange(16, Exactly(1.06), kOptions,
                       [&](const SearchStep& step) -> absl::StatusOr<std::optional<Reading>> {
                         return Exactly(ratios[static_cast<size_t>(step.commit)]);
                       });
  EXPECT_EQ(found.end, End::kOneCommit);
  EXPECT_EQ(found.high, 5);
}

TEST(BisectSearch, WhatCannotBeMeasuredIsPassedOverForItsNeighbours) {
  for (int commit = 1; commit < 16; ++commit) {
    Line line(StepAt(16, commit, 1.3));
    for (const int broken : {6, 7, 8, 12}) {
      if (broken != commit && broken != commit - 1) line.PassOver(broken);
    }
    const SearchResult found = line.Search();
    EXPECT_EQ(found.end, End::kOneCommit) << commit;
    EXPECT_EQ(found.high, commit);
  }
}

TEST(BisectSearch, WhereTheChangeIsAmongCommitsThatCannotBeMeasuredTheyAreTheAnswer) {
  Line line(StepAt(16, 8, 1.3));
  for (const int broken : {6, 7, 8}) line.PassOver(broken);
  const SearchResult found = line.Search();
  EXPECT_EQ(found.end, End::kPassedOver);
  EXPECT_EQ(found.low, 5);
  EXPECT_EQ(found.high, 9);
}

TEST(BisectSearch, InfiniteAndZeroRatiosAreSides) {
  for (const double ratio : {HUGE_VAL, 0.0, std::nan("")}) {
    const std::vector<double> ratios = StepAt(9, 6, ratio);
    const SearchResult found =
        *SearchForChange(9, Exactly(ratio), kOptions,
                         [&](const SearchStep& step) -> absl::StatusOr<std::optional<Reading>> {
                           return Exactly(ratios[static_cast<size_t>(step.commit)]);
                         });
    EXPECT_EQ(found.end, End::kOneCommit);
    EXPECT_EQ(found.high, 6) << ratio;
  }
}

TEST(BisectSearch, AnErrorEndsIt) {
  const auto found = SearchForChange(
      9, Exactly(2), kOptions, [](const SearchStep&) -> absl::StatusOr<std::optional<Reading>> {
        return absl::CancelledError("stopped");
      });
  EXPECT_EQ(found.status().code(), absl::StatusCode::kCancelled);
}

}  // namespace
}  // namespace tfb
