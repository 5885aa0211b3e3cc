#include "results/statistics.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "results/synthetic.h"

namespace tfb {
namespace {

using ::tfb::synthetic::AddVisit;
using ::tfb::synthetic::CaseSpec;
using ::tfb::synthetic::MakeCase;
using ::tfb::synthetic::MakeEnvironment;
using ::tfb::synthetic::MakeSweep;
using ::tfb::synthetic::MakeUnmeasured;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

std::vector<double> OneTo(int n) {
  std::vector<double> values;
  for (int i = 1; i <= n; ++i) values.push_back(i);
  return values;
}

TEST(Median, OfOddAndEvenNumbersOfSamples) {
  EXPECT_EQ(MedianOf({3, 1, 2})->median, 2);
  EXPECT_EQ(MedianOf({4, 1, 2, 3})->median, 2.5);
  EXPECT_EQ(MedianOf({7})->median, 7);
}

TEST(Median, IntervalsAreThoseOfThePublishedBinomialTables) {
  // n, k of [x(k), x(n+1-k)] at 95 %: Conover, Practical Nonparametric Statistics, table A3.
  const struct {
    int n, k;
  } kTable[] = {{6, 1}, {8, 1}, {9, 2}, {12, 3}, {15, 4}, {20, 6}, {25, 8}, {50, 18}, {100, 40}};
  for (const auto& row : kTable) {
    const MedianInterval interval = *MedianOf(OneTo(row.n));
    EXPECT_EQ(interval.low, row.k) << row.n;
    EXPECT_EQ(interval.high, row.n + 1 - row.k) << row.n;
    EXPECT_TRUE(interval.is_95_percent()) << row.n;
  }
}

TEST(Median, FewerThanSixSamplesGiveTheirRangeAndItsCoverage) {
  const MedianInterval five = *MedianOf(OneTo(5));
  EXPECT_EQ(five.low, 1);
  EXPECT_EQ(five.high, 5);
  EXPECT_DOUBLE_EQ(five.coverage, 1 - 2.0 / 32);
  EXPECT_FALSE(five.is_95_percent());
  EXPECT_DOUBLE_EQ(MedianOf({1})->coverage, 0);
}

TEST(Median, HoldsTheTrueMedianInNinetyFivePercentOfDraws) {
  std::mt19937_64 random(7);
  std::lognormal_distribution<double> distribution(0, 1);  // true median 1
  int held = 0;
  constexpr int kDraws = 4000;
  for (int draw = 0; draw < kDraws; ++draw) {
    std::vector<double> samples(25);
    for (double& sample : samples) sample = distribution(random);
    const MedianInterval interval = *MedianOf(samples);
    held += interval.low <= 1 && 1 <= interval.high;
  }
  // 25 samples cover 0.957; three standard deviations of 4000 draws are 0.0096.
  EXPECT_NEAR(held / double{kDraws}, 0.957, 0.0096);
}

TEST(Median, IsAbsentWithoutSamplesAndWithNan) {
  EXPECT_FALSE(MedianOf({}).has_value());
  EXPECT_FALSE(MedianOf({1, kNan, 2}).has_value());
  EXPECT_EQ(MedianOf({1, kInfinity, 2})->median, 2);
}

TEST(Median, OfTenThousandSamplesIsNarrow) {
  const MedianInterval interval = *MedianOf(OneTo(10000));
  EXPECT_NEAR(interval.low, 5000 - 98, 2);  // 1.96 * sqrt(10000) / 2
  EXPECT_NEAR(interval.coverage, 0.95, 0.002);
}

TEST(FitGrowth, FindsTheExponentOfAPower) {
  const std::optional<Growth> growth =
      FitGrowth({{256, 1e-3}, {512, 4e-3}, {1024, 16e-3}, {2048, 64e-3}});
  ASSERT_TRUE(growth.has_value());
  EXPECT_NEAR(growth->exponent, 2, 1e-12);
  EXPECT_NEAR(*growth->standard_error, 0, 1e-6);
}

TEST(FitGrowth, LooksAtTheUpperHalfOfTheLengthsBecauseFixedCostsBendTheLower) {
  std::vector<LengthTime> points;
  for (const int64_t tokens : {64, 128, 256, 512, 1024, 2048, 4096, 8192}) {
    points.push_back({tokens, 10.0 + 1e-4 * tokens * tokens});
  }
  const std::optional<Growth> growth = FitGrowth(points);
  EXPECT_EQ(growth->from_tokens, 1024);
  EXPECT_EQ(growth->to_tokens, 8192);
  EXPECT_NEAR(growth->exponent, 2, 0.06);
}

TEST(FitGrowth, IsAbsentWithOneLengthOrWithoutUsableTimes) {
  EXPECT_FALSE(FitGrowth({}).has_value());
  EXPECT_FALSE(FitGrowth({{256, 1}, {256, 2}}).has_value());
  EXPECT_FALSE(FitGrowth({{256, 0}, {512, kInfinity}, {1024, 3}}).has_value());
  const std::optional<Growth> two = FitGrowth({{256, 1}, {512, 2}});
  EXPECT_NEAR(two->exponent, 1, 1e-12);
  EXPECT_FALSE(two->standard_error.has_value());
}

// Makes speed-ups, each with an interval of a factor of `spread` to both sides.
std::vector<LengthSpeedUp> SpeedUps(const std::vector<std::pair<int64_t, double>>& ratios,
                                    double spread = 1) {
  std::vector<LengthSpeedUp> speed_ups;
  for (const auto& [tokens, ratio] : ratios) {
    const double low = ratio / spread, high = ratio * spread;
    speed_ups.push_back({tokens, {ratio, low, high, true, low > 1 || high < 1}});
  }
  return speed_ups;
}

TEST(FindCrossover, InterpolatesBetweenMeasuredLengthsInLogarithms) {
  // Technique 3 s, dense s^2, equal at s = 3.
  const std::optional<Crossover> crossover =
      FindCrossover(SpeedUps({{1, 1 / 3.0}, {2, 2 / 3.0}, {4, 4 / 3.0}, {8, 8 / 3.0}}));
  ASSERT_TRUE(crossover.has_value());
  EXPECT_EQ(crossover->kind, Crossover::Kind::kAt);
  EXPECT_NEAR(crossover->tokens, 3, 1e-9);
  EXPECT_EQ(crossover->changes, 1);
}

TEST(FindCrossover, SaysAlwaysAndNeverAndOnlyBelow) {
  const auto always = FindCrossover(SpeedUps({{256, 2}, {512, 4}, {1024, 8}}));
  EXPECT_EQ(always->kind, Crossover::Kind::kAlways);
  EXPECT_EQ(always->tokens, 256);
  EXPECT_EQ(always->low_tokens, 0);
  EXPECT_EQ(always->high_tokens, 0);
  const auto never = FindCrossover(SpeedUps({{256, 0.2}, {512, 0.4}, {1024, 0.8}}));
  EXPECT_EQ(never->kind, Crossover::Kind::kNever);
  EXPECT_EQ(never->tokens, 1024);
  const auto below = FindCrossover(SpeedUps({{256, 2}, {512, 0.5}, {1024, 0.5}}));
  EXPECT_EQ(below->kind, Crossover::Kind::kOnlyBelow);
  EXPECT_NEAR(below->tokens, 362, 1);  // half way in both logarithms
}

TEST(FindCrossover, TakesTheLastOfSeveralAndCountsThem) {
  const auto crossover = FindCrossover(SpeedUps({{1, 2}, {2, 0.5}, {4, 2}}));
  EXPECT_EQ(crossover->kind, Crossover::Kind::kAt);
  EXPECT_EQ(crossover->changes, 2);
  EXPECT_NEAR(crossover->tokens, std::sqrt(8.0), 1e-9);
}

TEST(FindCrossover, NeedsALengthAndCallsATieSlower) {
  EXPECT_FALSE(FindCrossover({}).has_value());
  const auto tie = FindCrossover(SpeedUps({{256, 1}}));
  EXPECT_EQ(tie->kind, Crossover::Kind::kNever);
  EXPECT_EQ(tie->tokens, 256);
  EXPECT_FALSE(tie->clear);
}

TEST(FindCrossover, HasTheIntervalBetweenTheCrossingsOfTheSpeedUpsIntervals) {
  // The speed-up is tokens / 512, known to a factor of the root of 2: so is the crossover.
  const auto crossover = FindCrossover(SpeedUps({{256, 0.5}, {512, 1}, {1024, 2}}, std::sqrt(2.0)));
  EXPECT_NEAR(crossover->tokens, 512, 1e-6);
  EXPECT_NEAR(crossover->low_tokens, 512 / std::sqrt(2.0), 1e-6);
  EXPECT_NEAR(crossover->high_tokens, 512 * std::sqrt(2.0), 1e-6);
  EXPECT_TRUE(crossover->clear);
}

TEST(FindCrossover, IsNotClearWhereTheLongestLengthTellsNoDifference) {
  const auto crossover = FindCrossover(SpeedUps({{256, 0.5}, {512, 0.7}, {1024, 1.01}}, 1.1));
  EXPECT_EQ(crossover->kind, Crossover::Kind::kAt);
  EXPECT_FALSE(crossover->clear);
  EXPECT_GT(crossover->low_tokens, 512);
  EXPECT_TRUE(std::isinf(crossover->high_tokens));
}

TEST(SpeedUpOf, IsTheRatioOfMediansWithABootstrapInterval) {
  const std::vector<double> dense = synthetic::Samples(3e6), technique = synthetic::Samples(1e6);
  const std::optional<SpeedUpInterval> speed_up = SpeedUpOf(dense, technique);
  ASSERT_TRUE(speed_up.has_value());
  EXPECT_NEAR(speed_up->ratio, 3, 1e-9);
  EXPECT_LT(speed_up->low, 3);
  EXPECT_GT(speed_up->low, 2.94);
  EXPECT_GT(speed_up->high, 3);
  EXPECT_LT(speed_up->high, 3.06);
  EXPECT_TRUE(speed_up->is_95_percent);
  EXPECT_TRUE(speed_up->distinct);
  EXPECT_FALSE(SpeedUpOf(dense, dense)->distinct);
}

TEST(SpeedUpOf, TellsApartByFewSamplesOnlyWhatTheirRanksTell) {
  EXPECT_FALSE(SpeedUpOf({3}, {1})->distinct);
  EXPECT_FALSE(SpeedUpOf({3, 3.1, 3.2}, {1, 1.1, 1.2})->distinct);      // 1 of 10 orders
  const auto four = SpeedUpOf({3, 3.1, 3.2, 3.3}, {1, 1.1, 1.2, 1.3});  // 1 of 35
  EXPECT_TRUE(four->distinct);
  EXPECT_FALSE(four->is_95_percent);
  EXPECT_NEAR(four->low, 3 / 1.3, 1e-9);
  EXPECT_NEAR(four->high, 3.3, 1e-9);
  EXPECT_FALSE(SpeedUpOf({1, 3.1, 3.2, 3.3}, {1, 1.1, 1.2, 1.3})->distinct);
  EXPECT_FALSE(SpeedUpOf({}, {1}).has_value());
  EXPECT_FALSE(SpeedUpOf({kNan}, {1}).has_value());
}

TEST(DensePartner, SharesEverythingButTechniqueOptionsAndSeed) {
  const ResultSet sweep = MakeSweep();
  for (const Case& result : sweep.cases()) {
    const Case* dense = DensePartners(sweep).Find(result);
    ASSERT_NE(dense, nullptr);
    EXPECT_EQ(dense->key().technique(), "plain");
    EXPECT_EQ(dense->key().problem().query_tokens(), result.key().problem().query_tokens());
    EXPECT_EQ(dense->key().purpose(), result.key().purpose());
  }
  Case changed = sweep.cases(sweep.cases_size() - 1);
  changed.mutable_key()->set_seed(99);
  EXPECT_NE(DensePartners(sweep).Find(changed), nullptr);
  changed.mutable_key()->set_dtype(ELEMENT_TYPE_BF16);
  EXPECT_EQ(DensePartners(sweep).Find(changed), nullptr);
  changed = sweep.cases(sweep.cases_size() - 1);
  changed.set_environment_id("another machine");
  EXPECT_EQ(DensePartners(sweep).Find(changed), nullptr);
}

TEST(DensePartner, IsTheOneWithTheSameSeedAndThenTheOneWithDefaultOptions) {
  ResultSet results;
  CaseSpec spec;
  for (const uint64_t seed : {1, 2}) {
    spec.seed = seed;
    spec.option_value = spec.option_name = "";
    *results.add_cases() = MakeCase(spec);
    spec.option_name = "tile";
    spec.option_value = "32";
    *results.add_cases() = MakeCase(spec);
    results.mutable_cases(results.cases_size() - 1)
        ->mutable_technique()
        ->set_options_are_default(false);
  }
  CaseSpec other;
  other.technique = "other";
  other.seed = 1;
  EXPECT_EQ(DensePartners(results).Find(MakeCase(other)), &results.cases(0));
  other.seed = 2;
  EXPECT_EQ(DensePartners(results).Find(MakeCase(other)), &results.cases(2));
}

TEST(DensePartner, OfATechniqueThatIsHeldAgainstItselfHasTheOptionsThatItAsksFor) {
  ResultSet results;
  for (const char* window : {"64", "512", "128"}) {
    CaseSpec spec;
    spec.technique = "near";
    spec.option_name = "window";
    spec.option_value = window;
    Case* result = results.add_cases();
    *result = MakeCase(spec);
    result->mutable_technique()->set_dense_counterpart("near");
    (*result->mutable_technique()->mutable_dense_counterpart_options())["window"] = "512";
  }
  EXPECT_FALSE(IsBaseline(results.cases(0)));
  EXPECT_TRUE(IsBaseline(results.cases(1)));
  const DensePartners partners(results);
  for (const Case& result : results.cases()) {
    EXPECT_EQ(partners.Find(result), &results.cases(1));
  }
  (*results.mutable_cases(0)->mutable_technique()->mutable_dense_counterpart_options())["window"] =
      "256";
  EXPECT_EQ(DensePartners(results).Find(results.cases(0)), nullptr);
}

TEST(DensePartner, OfAResumedSweepIsFoundInTheFirstRunAndPreferredInTheSame) {
  ResultSet results;
  *results.add_environments() = MakeEnvironment("first");
  *results.add_environments() = MakeEnvironment("resumed");
  CaseSpec spec;
  spec.environment_id = "first";
  *results.add_cases() = MakeCase(spec);
  CaseSpec other;
  other.technique = "other";
  other.environment_id = "resumed";
  EXPECT_EQ(DensePartners(results).Find(MakeCase(other)), &results.cases(0));
  spec.environment_id = "resumed";
  *results.add_cases() = MakeCase(spec);
  EXPECT_EQ(DensePartners(results).Find(MakeCase(other)), &results.cases(1));
  results.mutable_environments(0)->set_git_commit("another");
  results.mutable_environments(1)->set_host("elsewhere");
  results.mutable_cases()->RemoveLast();
  EXPECT_EQ(DensePartners(results).Find(MakeCase(other)), nullptr);
}

TEST(SpeedUp, IsTimeOfDenseOverTimeOfTheTechnique) {
  CaseSpec spec;
  spec.median_ns = 4e6;
  const Case dense = MakeCase(spec);
  spec.technique = "other";
  spec.median_ns = 1e6;
  EXPECT_DOUBLE_EQ(*SpeedUp(MakeCase(spec), &dense), 4);
  EXPECT_FALSE(SpeedUp(MakeCase(spec), nullptr).has_value());
  const Case failed = MakeUnmeasured(spec, Outcome::STATUS_TIMEOUT, "60 s");
  EXPECT_FALSE(SpeedUp(failed, &dense).has_value());
}

// Returns a case without samples, which ended well.
Case MakeUntimed(const std::string& technique) {
  CaseSpec spec;
  spec.technique = technique;
  spec.median_ns = 0;
  return MakeCase(spec);
}

TEST(SamplesSideBySide, ArePairsOfTheVisitsInCommon) {
  Case dense = MakeUntimed("plain"), near = MakeUntimed("near");
  AddVisit(100, {40, 41, 42}, &dense);
  AddVisit(200, {80, 81, 82}, &dense);
  AddVisit(300, {60, 61}, &dense);
  AddVisit(200, {20, 27, 20.5}, &near);
  AddVisit(300, {15, 16}, &near);
  AddVisit(400, {70, 71}, &near);
  const SideBySide samples = SamplesSideBySide({{&near, &dense}});
  EXPECT_TRUE(samples.are_pairs);
  EXPECT_EQ(samples.dense_ns, (std::vector<double>{80, 81, 82, 60, 61}));
  EXPECT_EQ(samples.technique_ns, (std::vector<double>{20, 27, 20.5, 15, 16}));
  const SpeedUpInterval speed_up = *SpeedUpOf(samples);  // of 4, 3, 4, 4 and 61 / 16
  EXPECT_EQ(speed_up.ratio, 4);
  EXPECT_EQ(speed_up.low, 3);
  EXPECT_EQ(speed_up.high, 4);
  EXPECT_FALSE(speed_up.is_95_percent);  // five pairs
  EXPECT_TRUE(speed_up.distinct);
  EXPECT_EQ(*SpeedUp(near, &dense), 4);
  EXPECT_EQ(*SpeedUp(dense, &near), 0.25);
  EXPECT_EQ(*SpeedUp(dense, &dense), 1);
}

TEST(SamplesSideBySide, OfTheCaseWithMoreSamplesTakeEvenlySpreadOnes) {
  Case dense = MakeUntimed("plain"), near = MakeUntimed("near");
  AddVisit(1, OneTo(11), &dense);
  AddVisit(1, OneTo(4), &near);
  const SideBySide samples = SamplesSideBySide({{&near, &dense}});
  EXPECT_EQ(samples.dense_ns, (std::vector<double>{2, 5, 7, 10}));
  EXPECT_EQ(samples.technique_ns, OneTo(4));
  const SideBySide swapped = SamplesSideBySide({{&dense, &near}});
  EXPECT_EQ(swapped.dense_ns, samples.technique_ns);
  EXPECT_EQ(swapped.technique_ns, samples.dense_ns);
}

TEST(SamplesSideBySide, OfSeveralCasesAreThePairsOfEach) {
  Case dense = MakeUntimed("plain"), other_dense = MakeUntimed("plain");
  Case near = MakeUntimed("near"), other = MakeUntimed("near"), failed = MakeUntimed("near");
  AddVisit(100, {40, 41, 42}, &dense);
  AddVisit(200, {80, 81, 82, 83}, &dense);
  AddVisit(200, {60, 61, 62, 63}, &other_dense);
  AddVisit(200, {20, 21, 22, 23}, &near);
  AddVisit(200, {15, 16, 17, 18}, &other);
  AddVisit(100, {9, 9, 9, 9}, &failed);
  failed.mutable_outcome()->set_status(Outcome::STATUS_TIMEOUT);
  const std::vector<ComparedCase> cases = {
      {&near, &dense}, {&other, &other_dense}, {&failed, &dense}, {&near, nullptr}};
  const SideBySide samples = SamplesSideBySide(cases);
  EXPECT_TRUE(samples.are_pairs);
  EXPECT_EQ(samples.dense_ns, (std::vector<double>{80, 81, 82, 83, 60, 61, 62, 63}));
  EXPECT_EQ(samples.technique_ns, (std::vector<double>{20, 21, 22, 23, 15, 16, 17, 18}));
  EXPECT_TRUE(SpeedUpOf(samples)->is_95_percent);
  // With one that has no pairs there are none, and each case counts once.
  other.mutable_outcome()->mutable_timing()->mutable_visits(0)->set_start_unix_ns(300);
  const SideBySide all =
      SamplesSideBySide({{&near, &dense}, {&other, &other_dense}, {&other, &dense}});
  EXPECT_FALSE(all.are_pairs);
  EXPECT_EQ(all.dense_ns, (std::vector<double>{40, 41, 42, 80, 81, 82, 83, 60, 61, 62, 63}));
  EXPECT_EQ(all.technique_ns, (std::vector<double>{20, 21, 22, 23, 15, 16, 17, 18}));
  EXPECT_TRUE(SamplesSideBySide({{&near, nullptr}}).dense_ns.empty());
  EXPECT_FALSE(SpeedUpOf(SamplesSideBySide({{&near, nullptr}})).has_value());
  EXPECT_FALSE(SpeedUpOf(SamplesSideBySide({})).has_value());
}

TEST(SamplesSideBySide, AreAllWhereTheRecordDoesNotTellOrTooFewAreInCommon) {
  Case dense = MakeUntimed("plain"), near = MakeUntimed("near");
  AddVisit(100, {40, 41, 42, 43}, &dense);
  AddVisit(200, {80, 81, 82, 83}, &dense);
  AddVisit(200, {20, 21, 22, 23}, &near);
  ASSERT_TRUE(SamplesSideBySide({{&near, &dense}}).are_pairs);
  const auto expect_all = [](const Case& near_case, const Case& dense_case) {
    const SideBySide samples = SamplesSideBySide({{&near_case, &dense_case}});
    EXPECT_FALSE(samples.are_pairs);
    const auto& of_dense = dense_case.outcome().timing().run_ns();
    const auto& of_near = near_case.outcome().timing().run_ns();
    EXPECT_EQ(samples.dense_ns, std::vector<double>(of_dense.begin(), of_dense.end()));
    EXPECT_EQ(samples.technique_ns, std::vector<double>(of_near.begin(), of_near.end()));
  };
  const auto changed = [](const Case& result, const std::function<void(Timing*)>& change) {
    Case copy = result;
    change(copy.mutable_outcome()->mutable_timing());
    return copy;
  };
  // An older program's record, one that an older program began, and damaged ones, of which one has
  // numbers that add up.
  for (const std::function<void(Timing*)>& change : std::vector<std::function<void(Timing*)>>{
           [](Timing* timing) { timing->clear_visits(); },
           [](Timing* timing) { timing->add_run_ns(5); },
           [](Timing* timing) { timing->mutable_visits(0)->set_run_samples(7); },
           [](Timing* timing) {
             const int samples = timing->mutable_visits(0)->run_samples();
             timing->mutable_visits(0)->set_run_samples(-1);
             timing->add_visits()->set_run_samples(samples + 1);
           }}) {
    expect_all(changed(near, change), dense);
    expect_all(near, changed(dense, change));
  }
  // Three samples, and a visit of another sweep.
  expect_all(changed(near,
                     [](Timing* timing) {
                       timing->mutable_run_ns()->RemoveLast();
                       timing->mutable_visits(0)->set_run_samples(3);
                     }),
             dense);
  expect_all(
      changed(near, [](Timing* timing) { timing->mutable_visits(0)->set_start_unix_ns(201); }),
      dense);
}

TEST(SamplesSideBySide, OfTimesThatAreNotPositiveAndFiniteHaveNoSpeedUp) {
  for (const double ns : {0.0, -1.0, kInfinity}) {
    Case dense = MakeUntimed("plain"), near = MakeUntimed("near");
    AddVisit(1, {4, 4, 4, ns}, &dense);
    AddVisit(1, {1, 1, 1, 1}, &near);
    EXPECT_FALSE(SpeedUpOf(SamplesSideBySide({{&near, &dense}})).has_value()) << ns;
    EXPECT_FALSE(SpeedUpOf(SamplesSideBySide({{&dense, &near}})).has_value()) << ns;
    EXPECT_FALSE(SpeedUp(near, &dense).has_value()) << ns;
  }
}

// A machine whose speed changes between visits and during them, by steps that last for some samples.
class DriftingMachine {
 public:
  // Adds a visit in which both take `samples` by turns.
  void Visit(int64_t start, int samples, Case* dense, Case* near) {
    std::vector<double> of_dense, of_near;
    double level = 0.05 * normal_(random_);
    for (int i = 0; i < samples; ++i) {
      if (random_() % 4 == 0) level = 0.05 * normal_(random_);
      of_dense.push_back(4e6 * std::exp(level + 0.01 * normal_(random_)));
      of_near.push_back(1e6 * std::exp(level + 0.01 * normal_(random_)));
    }
    AddVisit(start, of_dense, dense);
    if (near != nullptr) AddVisit(start, of_near, near);
  }

 private:
  std::mt19937_64 random_{11};
  std::normal_distribution<double> normal_;
};

// Each sweep has one visit to the technique and four to dense.
TEST(SamplesSideBySide, HoldTheTrueSpeedUpInANarrowIntervalWhereTheMachineDrifts) {
  DriftingMachine machine;
  constexpr int kSweeps = 400;
  int held = 0, held_by_all = 0;
  double error = 0, error_of_all = 0;
  for (int sweep = 0; sweep < kSweeps; ++sweep) {
    Case dense = MakeUntimed("plain"), near = MakeUntimed("near");
    for (int visit = 1; visit <= 4; ++visit) {
      machine.Visit(visit, 11, &dense, visit == 2 ? &near : nullptr);
    }
    const SpeedUpInterval of_pairs = *SpeedUpOf(SamplesSideBySide({{&near, &dense}}));
    near.mutable_outcome()->mutable_timing()->clear_visits();
    const SpeedUpInterval of_all = *SpeedUpOf(SamplesSideBySide({{&near, &dense}}));
    held += of_pairs.low <= 4 && 4 <= of_pairs.high;
    held_by_all += of_all.low <= 4 && 4 <= of_all.high;
    error += std::pow(std::log(of_pairs.ratio / 4), 2) / kSweeps;
    error_of_all += std::pow(std::log(of_all.ratio / 4), 2) / kSweeps;
  }
  EXPECT_GE(held / double{kSweeps}, 0.95);
  EXPECT_LE(held_by_all / double{kSweeps}, 0.85);
  EXPECT_LE(std::sqrt(error), 0.008);
  EXPECT_GE(std::sqrt(error_of_all), 0.02);
}

TEST(Rates, AreAbsentWhereTheAmountOrTheTimeOrThePeakIsUnknown) {
  const Environment environment = MakeEnvironment();
  CaseSpec spec;
  spec.median_ns = 1e6;
  Case result = MakeCase(spec);
  result.mutable_outcome()->set_flops(100e6);
  result.mutable_outcome()->set_bytes_moved(1e6);
  EXPECT_DOUBLE_EQ(*GigaflopsPerSecond(result), 100);
  EXPECT_DOUBLE_EQ(*GigabytesPerSecond(result), 1);
  EXPECT_DOUBLE_EQ(*ShareOfComputePeak(result, environment), 0.25);  // of 2 threads' 400
  EXPECT_DOUBLE_EQ(*ShareOfBandwidthPeak(result, environment), 0.05);

  Case other = result;
  other.mutable_key()->set_threads(1);
  EXPECT_DOUBLE_EQ(*ShareOfComputePeak(other, environment), 0.5);
  other.mutable_key()->set_threads(3);
  EXPECT_FALSE(ShareOfComputePeak(other, environment).has_value());
  other = result;
  other.mutable_key()->set_dtype(ELEMENT_TYPE_BF16);
  EXPECT_FALSE(ShareOfComputePeak(other, environment).has_value());
  other = result;
  other.mutable_outcome()->clear_flops();
  EXPECT_FALSE(GigaflopsPerSecond(other).has_value());
  other.mutable_outcome()->mutable_timing()->clear_run_ns();
  EXPECT_FALSE(GigabytesPerSecond(other).has_value());
}

TEST(Rates, OnlyPeaksOfTheSameDevicePrecisionAndThreadsCount) {
  CaseSpec spec;
  const Case result = MakeCase(spec);  // on 2 threads of the CPU, in f32
  const double share = *ShareOfComputePeak(result, MakeEnvironment());
  const double of_bandwidth = *ShareOfBandwidthPeak(result, MakeEnvironment());
  EXPECT_NEAR(share * 400e9, *GigaflopsPerSecond(result) * 1e9, 1);
  EXPECT_NEAR(of_bandwidth * 20e9, *GigabytesPerSecond(result) * 1e9, 1);
  // Each of these is higher than the peak that counts, and of something else.
  Environment environment = MakeEnvironment();
  const auto add = [&](const Peak& like, const std::function<void(Peak*)>& change) {
    Peak* peak = environment.add_peaks();
    *peak = like;
    peak->set_value(10 * like.value());
    change(peak);
  };
  const Environment measured = environment;
  for (const int like : {1, 2}) {
    add(measured.peaks(like), [](Peak* peak) { peak->set_threads(3); });
    add(measured.peaks(like), [](Peak* peak) { peak->set_device(DEVICE_TYPE_CUDA); });
    add(measured.peaks(like), [](Peak* peak) { peak->set_value(0); });
    add(measured.peaks(like), [](Peak* peak) { peak->set_kind(Peak::KIND_UNSPECIFIED); });
  }
  add(measured.peaks(1), [](Peak* peak) { peak->set_dtype(ELEMENT_TYPE_BF16); });
  EXPECT_EQ(*ShareOfComputePeak(result, environment), share);
  EXPECT_EQ(*ShareOfBandwidthPeak(result, environment), of_bandwidth);
  // A higher one of the same kind does, and that of reading before that of copying.
  add(measured.peaks(1), [](Peak*) {});
  EXPECT_NEAR(*ShareOfComputePeak(result, environment), share / 10, 1e-12);
  add(measured.peaks(2), [](Peak* peak) { peak->set_kind(Peak::KIND_COPY_BANDWIDTH); });
  EXPECT_EQ(*ShareOfBandwidthPeak(result, environment), of_bandwidth);
  // The number of threads does not matter on a GPU.
  Case on_gpu = result;
  on_gpu.mutable_key()->set_device(DEVICE_TYPE_CUDA);
  on_gpu.mutable_key()->set_threads(0);
  EXPECT_NEAR(*ShareOfComputePeak(on_gpu, environment), share / 10, 1e-12);
}

TEST(WorkingMemory, IsWorkspaceAndParametersAndUnknownWithoutTheFormer) {
  Outcome outcome;
  outcome.set_parameter_bytes(5);
  EXPECT_FALSE(WorkingMemoryBytes(outcome).has_value());
  outcome.set_peak_workspace_bytes(7);
  EXPECT_EQ(WorkingMemoryBytes(outcome), 12);
}

TEST(BoundedValue, IsThatOfTheBoundedMetric) {
  ErrorMeasure error;
  EXPECT_FALSE(BoundedValue(error).has_value());
  error.set_max_abs(3);
  EXPECT_EQ(BoundedValue(error), 3);
  error.set_relative_frobenius(2);
  EXPECT_EQ(BoundedValue(error), 2);
  error.set_bounded_metric(ErrorMeasure::METRIC_MAX_ABS);
  EXPECT_EQ(BoundedValue(error), 3);
  error.set_bounded_metric(ErrorMeasure::METRIC_COSINE_DISTANCE);
  EXPECT_FALSE(BoundedValue(error).has_value());
  error.set_mean_cosine(0.75);
  EXPECT_EQ(BoundedValue(error), 0.25);
}

TEST(Median, IntervalsAreTheNarrowestThatCoverNinetyFivePercentForAnyNumber) {
  for (int n = 1; n <= 60; ++n) {
    // below[k]: P(Bin(n, 1/2) < k), from the sums of Pascal's triangle.
    std::vector<double> row = {1};
    for (int trial = 0; trial < n; ++trial) {
      std::vector<double> next(row.size() + 1, 0.0);
      for (size_t i = 0; i < row.size(); ++i) {
        next[i] += row[i] / 2;
        next[i + 1] += row[i] / 2;
      }
      row = next;
    }
    int k = 1;
    double below = row[0];
    for (int more = 2; 2 * more <= n; ++more) {
      double tail = 0;
      for (int i = 0; i < more; ++i) tail += row[i];
      if (1 - 2 * tail < 0.95) break;
      k = more;
      below = tail;
    }
    const MedianInterval interval = *MedianOf(OneTo(n));
    EXPECT_EQ(interval.samples, n);
    EXPECT_EQ(interval.low, k) << n;
    EXPECT_EQ(interval.high, n + 1 - k) << n;
    EXPECT_NEAR(interval.coverage, std::max(0.0, 1 - 2 * below), 1e-12) << n;
    EXPECT_EQ(interval.is_95_percent(), n >= 6) << n;
    EXPECT_NEAR(interval.relative_half_width(), (n + 1 - 2.0 * k) / (n + 1), 1e-12) << n;
  }
}

TEST(FitGrowth, HasTheStandardErrorOfALeastSquaresLine) {
  // log2 of times at 2^8, 2^9 and 2^10, two each: the slope of (-1, 0, 1) against (0, 1 +- 0.1, 2).
  std::vector<LengthTime> points;
  for (const int power : {0, 1, 2}) {
    for (const double off : {-0.1, 0.1}) {
      points.push_back({int64_t{256} << power, std::exp2(power + (power == 1 ? off : 0.0))});
    }
  }
  const Growth growth = *FitGrowth(points);
  EXPECT_NEAR(growth.exponent, 1, 1e-12);
  // The residuals are twice 0.1; six points less two; the squares of x sum to 4.
  ASSERT_TRUE(growth.standard_error.has_value());
  EXPECT_NEAR(*growth.standard_error, std::sqrt(2 * 0.01 / 4 / 4), 1e-12);
  EXPECT_EQ(growth.from_tokens, 256);
  EXPECT_EQ(growth.to_tokens, 1024);
}

TEST(Median, OfTwoInfinitiesIsInfinite) {
  EXPECT_EQ(MedianOf({kInfinity, kInfinity})->median, kInfinity);
  EXPECT_EQ(MedianOf({kInfinity, 1})->median, kInfinity);
  EXPECT_EQ(MedianOf({0, 0, 0})->relative_half_width(), 0);
}

TEST(FitGrowth, CountsTheLongerHalfOfTheLengthsButThreeAtLeast) {
  const int kept[] = {2, 3, 3, 3, 3, 4, 4, 5, 5};  // of 2 lengths, of 3, ...
  for (int count = 2; count <= 10; ++count) {
    std::vector<LengthTime> points;
    for (int i = 0; i < count; ++i) {
      points.push_back({int64_t{1} << i, std::exp2(3.0 * i)});
      points.push_back({int64_t{1} << i, std::exp2(3.0 * i)});  // the same length once more
    }
    std::reverse(points.begin(), points.end());
    const Growth growth = *FitGrowth(points);
    EXPECT_EQ(growth.from_tokens, int64_t{1} << (count - kept[count - 2])) << count;
    EXPECT_EQ(growth.to_tokens, int64_t{1} << (count - 1)) << count;
    EXPECT_NEAR(growth.exponent, 3, 1e-12) << count;
    ASSERT_TRUE(growth.standard_error.has_value()) << count;
    EXPECT_NEAR(*growth.standard_error, 0, 1e-6) << count;
  }
}

TEST(FitGrowth, LeavesOutWhatIsNoLengthOrNoTime) {
  const Growth growth = *FitGrowth({{0, 1},
                                    {-256, 1},
                                    {256, 1},
                                    {512, 4},
                                    {1024, 16},
                                    {2048, kNan},
                                    {4096, -1},
                                    {8192, kInfinity},
                                    {16384, 0}});
  EXPECT_NEAR(growth.exponent, 2, 1e-12);
  EXPECT_EQ(growth.from_tokens, 256);
  EXPECT_EQ(growth.to_tokens, 1024);
}

TEST(FindCrossover, HasAnIntervalForEachKind) {
  const struct {
    std::vector<std::pair<int64_t, double>> ratios;
    double spread;
    Crossover::Kind kind;
    double low, high;
    bool clear;
  } kRows[] = {
      // Slower everywhere: for certain, and by the lower ends alone.
      {{{256, 0.2}, {512, 0.4}, {1024, 0.8}}, 1, Crossover::Kind::kNever, 0, 0, true},
      {{{256, 0.2}, {512, 0.4}, {1024, 0.8}}, 2, Crossover::Kind::kNever, 0, kInfinity, false},
      // Faster everywhere: for certain from where the lower end crosses.
      {{{256, 2}, {512, 4}, {1024, 8}}, 4, Crossover::Kind::kAlways, 0, 512, true},
      // A speed-up of 512 / tokens, known to a factor of the root of 2.
      {{{256, 2}, {512, 1}, {1024, 0.5}, {2048, 0.25}},
       std::sqrt(2.0),
       Crossover::Kind::kOnlyBelow,
       512 / std::sqrt(2.0),
       512 * std::sqrt(2.0),
       true},
  };
  for (const auto& row : kRows) {
    const Crossover crossover = *FindCrossover(SpeedUps(row.ratios, row.spread));
    EXPECT_EQ(crossover.kind, row.kind);
    if (std::isinf(row.high)) {
      EXPECT_EQ(crossover.high_tokens, row.high);
    } else {
      EXPECT_NEAR(crossover.high_tokens, row.high, 1e-6);
    }
    EXPECT_NEAR(crossover.low_tokens, row.low, 1e-6);
    EXPECT_EQ(crossover.clear, row.clear);
  }
}

TEST(DensePartner, OfSeveralIsTheOneWithTheLeastFaults) {
  // Of two candidates the one that is better in the first property in which they differ.
  const auto candidate = [](const char* environment, uint64_t seed, bool is_default, bool ok) {
    CaseSpec spec;
    spec.environment_id = environment;
    spec.seed = seed;
    Case result = MakeCase(spec);
    result.mutable_technique()->set_options_are_default(is_default);
    result.mutable_outcome()->set_status(ok ? Outcome::STATUS_OK : Outcome::STATUS_FAILED);
    return result;
  };
  const struct {
    Case better, worse;
  } kRows[] = {
      {candidate("here", 2, false, false), candidate("there", 1, true, true)},
      {candidate("here", 1, false, false), candidate("here", 2, true, true)},
      {candidate("here", 1, true, false), candidate("here", 1, false, true)},
      {candidate("here", 1, true, true), candidate("here", 1, true, false)},
  };
  CaseSpec spec;
  spec.technique = "near";
  spec.environment_id = "here";
  const Case near = MakeCase(spec);
  for (const auto& row : kRows) {
    for (const bool better_first : {true, false}) {
      ResultSet results;
      *results.add_environments() = MakeEnvironment("here");
      *results.add_environments() = MakeEnvironment("there");
      *results.add_cases() = better_first ? row.better : row.worse;
      *results.add_cases() = better_first ? row.worse : row.better;
      EXPECT_EQ(DensePartners(results).Find(near), &results.cases(better_first ? 0 : 1));
    }
  }
  // Of equal ones the later.
  ResultSet results;
  for (int i = 0; i < 2; ++i) *results.add_cases() = candidate("here", 1, true, true);
  EXPECT_EQ(DensePartners(results).Find(near), &results.cases(1));
  Case alone = near;
  alone.mutable_technique()->clear_dense_counterpart();
  EXPECT_EQ(DensePartners(results).Find(alone), nullptr);
  alone.mutable_key()->clear_technique();
  EXPECT_FALSE(IsBaseline(alone));
}

TEST(RunTime, IsThatOfACaseThatRan) {
  for (const auto status : {Outcome::STATUS_UNSPECIFIED, Outcome::STATUS_OK, Outcome::STATUS_FAILED,
                            Outcome::STATUS_SKIPPED, Outcome::STATUS_TIMEOUT}) {
    Case result = MakeCase(CaseSpec());
    result.mutable_outcome()->set_status(status);
    EXPECT_EQ(RunTime(result).has_value(),
              status == Outcome::STATUS_OK || status == Outcome::STATUS_FAILED);
  }
}

TEST(Rates, NeedATimeThatIsPositive) {
  const Case dense = MakeCase(CaseSpec());
  for (const double ns : {0.0, -1.0}) {
    Case result = dense;
    for (double& sample : *result.mutable_outcome()->mutable_timing()->mutable_run_ns())
      sample = ns;
    EXPECT_FALSE(GigaflopsPerSecond(result).has_value()) << ns;
    EXPECT_FALSE(GigabytesPerSecond(result).has_value()) << ns;
    EXPECT_FALSE(SpeedUp(result, &dense).has_value()) << ns;
    EXPECT_EQ(*SpeedUp(dense, &result), ns / 1e6) << ns;
  }
  CaseSpec without_time;
  without_time.median_ns = 0;
  const Case untimed = MakeCase(without_time);
  EXPECT_FALSE(SpeedUp(dense, &untimed).has_value());
  EXPECT_FALSE(SpeedUp(untimed, &dense).has_value());
  Environment environment = MakeEnvironment();
  EXPECT_FALSE(ShareOfComputePeak(untimed, environment).has_value());
  EXPECT_FALSE(ShareOfBandwidthPeak(untimed, environment).has_value());
  // Copying counts where reading was not measured.
  environment.mutable_peaks(2)->set_kind(Peak::KIND_COPY_BANDWIDTH);
  EXPECT_DOUBLE_EQ(*ShareOfBandwidthPeak(dense, environment), *GigabytesPerSecond(dense) / 20);
  environment.clear_peaks();
  EXPECT_FALSE(ShareOfComputePeak(dense, environment).has_value());
  EXPECT_FALSE(ShareOfBandwidthPeak(dense, environment).has_value());
}

TEST(LengthOf, IsTheLongerOfTheTwo) {
  ProblemSize problem;
  problem.set_query_tokens(3);
  problem.set_kv_tokens(5);
  EXPECT_EQ(LengthOf(problem), 5);
  problem.set_query_tokens(7);
  EXPECT_EQ(LengthOf(problem), 7);
}

TEST(BoundedValue, IsAbsentWhereTheBoundedMetricIs) {
  for (const auto metric :
       {ErrorMeasure::METRIC_RELATIVE_FROBENIUS, ErrorMeasure::METRIC_MAX_ABS,
        ErrorMeasure::METRIC_MAX_ABS_OVER_MAX_VALUE, ErrorMeasure::METRIC_COSINE_DISTANCE}) {
    ErrorMeasure error;
    error.set_bounded_metric(metric);
    EXPECT_FALSE(BoundedValue(error).has_value()) << metric;
    error.set_relative_frobenius(1);
    error.set_max_abs(2);
    error.set_max_abs_over_max_value(3);
    error.set_mean_cosine(-3);
    EXPECT_EQ(BoundedValue(error), metric) << metric;
  }
}

TEST(WorstGradientError, IsTheLargestShareOfItsBoundAndANanIsWorst) {
  Outcome outcome;
  EXPECT_EQ(WorstGradientError(outcome), nullptr);
  const auto add = [&](const char* name, double value, double bound) {
    NamedError* error = outcome.add_gradient_errors();
    error->set_name(name);
    error->mutable_error()->set_value(value);
    error->mutable_error()->set_bound(bound);
    return WorstGradientError(outcome)->name();
  };
  outcome.add_gradient_errors()->set_name("unknown");
  EXPECT_EQ(WorstGradientError(outcome), nullptr);
  EXPECT_EQ(add("zero", 0, 0), "zero");
  EXPECT_EQ(add("v", 1e-7, 6e-5), "v");
  EXPECT_EQ(add("larger, of a larger bound", 2e-7, 6e-4), "v");
  EXPECT_EQ(add("q", 2e-7, 6e-5), "q");
  EXPECT_EQ(add("k", std::nan(""), 6e-5), "k");
}

}  // namespace
}  // namespace tfb
