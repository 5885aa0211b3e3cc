#include "results/history/change_points.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <functional>
#include <iterator>
#include <numeric>
#include <random>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tfb {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr double kStep = 0.04879;  // log 1.05

// Draws the same numbers with every library.
class Random {
 public:
  explicit Random(uint64_t seed) : generator_(seed) {}
  double Uniform() { return (static_cast<double>(generator_() >> 11) + 0.5) / 9007199254740992.0; }
  double Normal() {
    return std::sqrt(-2 * std::log(Uniform())) * std::cos(2 * 3.14159265358979323846 * Uniform());
  }

 private:
  std::mt19937_64 generator_;
};

// Noise of a standard deviation near 1, of one value of one series.
struct Noise {
  std::string name;
  // `common` is standard normal, and the same for all series of a run.
  std::function<double(Random*, double common)> draw;
};

std::vector<Noise> AllNoises() {
  return {{"Normal", [](Random* random, double) { return random->Normal(); }},
          {"SharedByTheSeriesOfARun",
           [](Random* random, double common) { return 0.7 * random->Normal() + 0.7 * common; }},
          {"HeavyTailed",  // Student's t of 5 degrees of freedom over its standard deviation
           [](Random* random, double) {
             double squares = 0;
             for (int i = 0; i < 5; ++i) squares += std::pow(random->Normal(), 2);
             return random->Normal() / std::sqrt(squares / 5) / std::sqrt(5.0 / 3);
           }},
          {"WithSlowRuns",  // one value in fifty is up to ten standard deviations too large
           [](Random* random, double) {
             return random->Normal() + (random->Uniform() < 0.02 ? 10 * random->Uniform() : 0);
           }},
          {"Skewed", [](Random* random, double) { return -std::log(random->Uniform()) - 1; }}};
}

// Makes series whose noise has the standard deviation `sigma`, give or take a third.
std::vector<NoisySeries> Draw(const Noise& noise, int series, int runs, double sigma,
                              uint64_t seed) {
  Random random(seed);
  std::vector<double> common(static_cast<size_t>(runs));
  for (double& value : common) value = random.Normal();
  std::vector<NoisySeries> drawn(static_cast<size_t>(series));
  for (NoisySeries& one : drawn) {
    const double own = sigma * (1 + 0.66 * (random.Uniform() - 0.5));
    for (int run = 0; run < runs; ++run) {
      one.runs.push_back(run);
      one.values.push_back(own * noise.draw(&random, common[run]));
    }
  }
  return drawn;
}

std::vector<NoisySeries> FirstRuns(const std::vector<NoisySeries>& series, int runs) {
  std::vector<NoisySeries> first = series;
  for (NoisySeries& one : first) {
    one.runs.resize(static_cast<size_t>(runs));
    one.values.resize(static_cast<size_t>(runs));
  }
  return first;
}

// Checks a store after each of its runs and returns the runs that were ever reported to begin a
// level. A change that later checks report again, perhaps a run beside, is one.
std::vector<int> RunsReported(const std::vector<NoisySeries>& all) {
  std::vector<int> reported;
  const int runs = static_cast<int>(all[0].runs.size());
  for (int first = kFewestForChangePoints; first <= runs; ++first) {
    for (const std::vector<int>& at : FindChangePoints(FirstRuns(all, first), {}).at) {
      for (const int run : at) {
        const bool is_known = std::any_of(reported.begin(), reported.end(),
                                          [run](int other) { return std::abs(other - run) <= 3; });
        if (!is_known) reported.push_back(run);
      }
    }
  }
  return reported;
}

// Reads the values behind the colon of a line, in units of 1e-5.
NoisySeries ReadSeries(const std::string& line) {
  NoisySeries series;
  std::istringstream values(line.substr(line.find(':') + 1));
  for (int value = 0; values >> value;) {
    series.runs.push_back(static_cast<int>(series.runs.size()));
    series.values.push_back(1e-5 * value);
  }
  return series;
}

class ChangePointsTest : public testing::TestWithParam<Noise> {};

INSTANTIATE_TEST_SUITE_P(Noises, ChangePointsTest, testing::ValuesIn(AllNoises()),
                         [](const auto& info) { return info.param.name; });

// Stores of twenty cases are checked after each of their first hundred runs.
TEST_P(ChangePointsTest, NoiseGivesAtMostOneAlarmInAHundredRuns) {
  constexpr int kStores = 2, kSeries = 20, kRuns = 100;
  size_t alarms = 0;
  for (int store = 0; store < kStores; ++store) {
    const std::vector<NoisySeries> all = Draw(GetParam(), kSeries, kRuns, 0.01, 100 + store);
    alarms += RunsReported(all).size();
  }
  EXPECT_LE(alarms, kStores);
}

// In stores of forty cases a case becomes slower by 5 % behind 20 to 58 runs with a noise of 0.5 %.
TEST_P(ChangePointsTest, AStepOfFivePercentIsFoundWithinThreeRuns) {
  int found_steps = 0, steps = 0;
  for (int before = 20; before < 60; before += 2) {
    std::vector<NoisySeries> all = Draw(GetParam(), 40, before + 3, 0.005, 1000 + before);
    for (size_t changed = 0; changed < 40; changed += 8, ++steps) {
      for (int run = before; run < before + 3; ++run) all[changed].values[run] += kStep;
    }
    const ChangePoints found = FindChangePoints(all, {});
    for (size_t changed = 0; changed < 40; changed += 8) {
      const std::vector<int>& at = found.at[changed];
      // The run before may have been a slow one by chance.
      found_steps += !at.empty() && std::abs(at.back() - before) <= 1;
    }
  }
  EXPECT_GE(found_steps, 0.95 * steps) << "of " << steps;
}

TEST_P(ChangePointsTest, ADriftOfHalfAPercentARunIsFoundWithinTenRuns) {
  int found_drifts = 0, drifts = 0;
  for (int before = 20; before < 60; before += 2) {
    std::vector<NoisySeries> all = Draw(GetParam(), 40, before + 10, 0.005, 2000 + before);
    for (size_t changed = 0; changed < 40; changed += 8, ++drifts) {
      for (int run = before; run < before + 10; ++run) {
        all[changed].values[run] += (run - before + 1) * std::log(1.005);
      }
    }
    const ChangePoints found = FindChangePoints(all, {});
    for (size_t changed = 0; changed < 40; changed += 8) {
      const std::vector<int>& at = found.at[changed];
      found_drifts += !at.empty() && at.back() >= before;
    }
  }
  EXPECT_GE(found_drifts, 0.95 * drifts) << "of " << drifts;
}

// Levels of 12 to 40 runs, 4 to 8 % apart, with a noise of 0.5 %.
TEST(ChangePoints, EveryStepOfALongSeriesIsFoundAtItsRun) {
  const std::vector<int> steps = {40, 52, 80, 120, 140};
  const std::vector<double> levels = {0, 0.06, 0.02, -0.04, 0.04, 0.1};
  std::vector<NoisySeries> all = Draw(AllNoises()[0], 20, 170, 0.005, 7);
  for (int run = 0; run < 170; ++run) {
    const auto level = std::upper_bound(steps.begin(), steps.end(), run) - steps.begin();
    all[3].values[run] += levels[level];
  }
  const ChangePoints found = FindChangePoints(all, {});
  for (size_t i = 0; i < all.size(); ++i) {
    if (i != 3) {
      EXPECT_THAT(found.at[i], IsEmpty()) << i;
    }
  }
  EXPECT_EQ(found.at[3], steps);
  EXPECT_NEAR(found.scale[3], 0.005, 0.002);
}

// The recorded times over dense of techniques (testdata/README.md), at three lengths each and as
// means over the lengths, in the order of the runs.
struct Recorded {
  std::vector<NoisySeries> series;
  std::vector<size_t> means, cases;  // places in `series`
};

Recorded ReadRecorded() {
  Recorded recorded;
  std::ifstream file("results/history/testdata/recorded_noise.txt");
  for (std::string line; std::getline(file, line);) {
    const bool is_mean = line.find(" mean:") != std::string::npos;
    (is_mean ? recorded.means : recorded.cases).push_back(recorded.series.size());
    recorded.series.push_back(ReadSeries(line));
  }
  return recorded;
}

// The recorded runs took 15 s each. Three of them are as much measuring as a run of 45 s.
constexpr int kShortRunsInALongOne = 3;

// Draws runs each of which is the mean of `parts` recorded ones, drawn with replacement: all series
// of a recorded run stay together.
std::vector<NoisySeries> DrawRecorded(const Recorded& recorded, int runs, int parts,
                                      uint64_t seed) {
  Random random(seed);
  const size_t recorded_runs = recorded.series[0].values.size();
  std::vector<NoisySeries> drawn(recorded.series.size());
  for (int run = 0; run < runs; ++run) {
    for (NoisySeries& series : drawn) {
      series.runs.push_back(run);
      series.values.push_back(0);
    }
    for (int part = 0; part < parts; ++part) {
      const auto from = static_cast<size_t>(random.Uniform() * static_cast<double>(recorded_runs));
      for (size_t i = 0; i < drawn.size(); ++i) {
        drawn[i].values.back() += recorded.series[i].values[from] / parts;
      }
    }
  }
  return drawn;
}

TEST(RecordedNoise, InTheOrderOfItsRunsGivesAtMostOneAlarm) {
  EXPECT_LE(RunsReported(ReadRecorded().series).size(), 1);
}

TEST(RecordedNoise, GivesAtMostOneAlarmInAHundredRuns) {
  const Recorded recorded = ReadRecorded();
  for (const int parts : {1, kShortRunsInALongOne}) {
    EXPECT_LE(RunsReported(DrawRecorded(recorded, 100, parts, 300 + parts)).size(), 1) << parts;
  }
}

// The means alone, which a check searches together.
std::vector<NoisySeries> MeansOf(const Recorded& recorded, std::vector<NoisySeries> drawn) {
  std::vector<NoisySeries> means;
  for (const size_t mean : recorded.means) means.push_back(std::move(drawn[mean]));
  return means;
}

// A technique becomes slower by 5 % at all its lengths, behind 20 to 58 runs.
TEST(RecordedNoise, AStepOfFivePercentOfATechniqueIsFoundWithinThreeRuns) {
  const Recorded recorded = ReadRecorded();
  int found_steps = 0, steps = 0;
  for (int before = 20; before < 60; before += 2) {
    for (size_t mean = 0; mean < recorded.means.size(); ++mean) {
      std::vector<NoisySeries> all = MeansOf(
          recorded, DrawRecorded(recorded, before + 3, kShortRunsInALongOne, 5000 + before));
      for (int run = before; run < before + 3; ++run) all[mean].values[run] += kStep;
      const std::vector<int> at = FindChangePoints(all, {}).at[mean];
      ++steps;
      found_steps += !at.empty() && std::abs(at.back() - before) <= 2;
    }
  }
  EXPECT_GE(found_steps, 0.95 * steps) << "of " << steps;
}

TEST(RecordedNoise, ADriftOfHalfAPercentARunIsFoundWithinTenRuns) {
  const Recorded recorded = ReadRecorded();
  int found_drifts = 0, drifts = 0;
  for (int before = 20; before < 60; before += 2) {
    for (size_t mean = 0; mean < recorded.means.size(); ++mean) {
      std::vector<NoisySeries> all = MeansOf(
          recorded, DrawRecorded(recorded, before + 10, kShortRunsInALongOne, 6000 + before));
      for (int run = before; run < before + 10; ++run) {
        all[mean].values[run] += (run - before + 1) * std::log(1.005);
      }
      const std::vector<int> at = FindChangePoints(all, {}).at[mean];
      ++drifts;
      found_drifts += !at.empty() && at.back() >= before;
    }
  }
  EXPECT_GE(found_drifts, 0.95 * drifts) << "of " << drifts;
}

// Forty series with up to four steps of 3 to 10 % among noise of 0.5 %, and what the package
// ruptures finds in them (tools/capture/golden_change_points.py).
TEST(ChangePoints, AgreeWithAnotherImplementation) {
  std::ifstream file("results/history/testdata/ruptures.txt");
  std::vector<NoisySeries> all;
  std::vector<std::vector<int>> expected;
  for (std::string line; std::getline(file, line);) {
    std::istringstream begins(line.substr(0, line.find(':')));
    expected.emplace_back(std::istream_iterator<int>(begins), std::istream_iterator<int>());
    all.push_back(ReadSeries(line));
  }
  ASSERT_EQ(all.size(), 40);
  const ChangePoints found = FindChangePoints(all, {});
  for (size_t i = 0; i < all.size(); ++i) {
    ASSERT_EQ(found.at[i].size(), expected[i].size()) << i;
    for (size_t k = 0; k < expected[i].size(); ++k) {
      EXPECT_NEAR(found.at[i][k], expected[i][k], 1) << i;
    }
  }
}

// --- The definition in the header, written out. It has no running sums, and one thread.

constexpr int kLevelRuns = 3;  // of the shortest level

double MedianOf(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t n = values.size();
  return (values[(n - 1) / 2] + values[n / 2]) / 2;
}

double MeanOf(const std::vector<double>& values, size_t begin, size_t end) {
  return std::accumulate(values.begin() + begin, values.begin() + end, 0.0) / (end - begin);
}

// Returns the scale of the successive differences over sqrt 2, those beyond 2.5 of it drawn in: by
// two steps of the fixed point from the median, over what a normal variable so drawn in has.
double OwnScale(const std::vector<double>& y) {
  constexpr double kLeast = 1e-3, kEnd = 2.5;
  std::vector<double> differences;
  for (size_t i = 1; i < y.size(); ++i) differences.push_back(std::fabs(y[i] - y[i - 1]));
  const double beyond = std::erfc(kEnd / std::sqrt(2.0));
  const double density = std::exp(-kEnd * kEnd / 2) / std::sqrt(2 * M_PI);
  const double of_normal = std::sqrt(1 - (2 * kEnd * density + beyond) + kEnd * kEnd * beyond);
  double scale = 1.482602 * MedianOf(differences);
  for (int step = 0; step < 2; ++step) {
    double squares = 0;
    for (const double difference : differences) {
      squares += std::pow(std::min(difference, kEnd * std::max(scale, kLeast)), 2);
    }
    scale = std::sqrt(squares / differences.size()) / of_normal;
  }
  return std::max(scale / std::sqrt(2.0), kLeast);
}

// Each series has as many values as 0.6 of its differences, and the typical scale eight.
double Pooled(const std::vector<double>& y, double typical) {
  const double weight = 0.6 * static_cast<double>(y.size() - 1);
  return std::sqrt((weight * std::pow(OwnScale(y), 2) + 8 * typical * typical) / (weight + 8));
}

std::vector<double> WithoutOutliers(const std::vector<double>& y, double scale) {
  std::vector<double> drawn_in = y;
  for (int i = 0; i < static_cast<int>(y.size()); ++i) {
    const int first = std::min(std::max(i - 2, 0), static_cast<int>(y.size()) - 5);
    const double centre = MedianOf({y.begin() + first, y.begin() + first + 5});
    drawn_in[i] = std::min(std::max(y[i], centre - 3 * scale), centre + 3 * scale);
  }
  return drawn_in;
}

// Returns the largest t of the splits of a series.
double LargestT(const std::vector<double>& y, double typical) {
  const double scale = Pooled(y, typical);
  const std::vector<double> values = WithoutOutliers(y, scale);
  const size_t n = values.size();
  double largest = 0;
  for (size_t k = kLevelRuns; k + kLevelRuns <= n; ++k) {
    const double step = std::fabs(MeanOf(values, k, n) - MeanOf(values, 0, k));
    largest = std::max(largest, step / (scale * std::sqrt(1.0 / k + 1.0 / (n - k))));
  }
  return largest;
}

// Returns the begins of the levels with the least sum of squares and c^2 s^2 for each change.
std::vector<int> LevelsOf(const std::vector<double>& y, double scale, double critical) {
  const std::vector<double> values = WithoutOutliers(y, scale);
  const auto squares = [&values](size_t begin, size_t end) {
    const double mean = MeanOf(values, begin, end);
    double sum = 0;
    for (size_t i = begin; i < end; ++i) sum += std::pow(values[i] - mean, 2);
    return sum;
  };
  const double penalty = std::pow(critical * scale, 2);
  std::vector<double> cost(values.size() + 1, HUGE_VAL);  // of the first values
  std::vector<std::vector<int>> at(values.size() + 1);
  for (size_t end = kLevelRuns; end <= values.size(); ++end) {
    cost[end] = squares(0, end);
    for (size_t last = kLevelRuns; last + kLevelRuns <= end; ++last) {
      const double with_it = cost[last] + penalty + squares(last, end);
      if (with_it >= cost[end]) continue;
      cost[end] = with_it;
      at[end] = at[last];
      at[end].push_back(static_cast<int>(last));
    }
  }
  return at.back();
}

std::vector<double> LessTheirLevels(std::vector<double> y, std::vector<int> at) {
  at.push_back(static_cast<int>(y.size()));
  int begin = 0;
  for (const int end : at) {
    const double level = MedianOf({y.begin() + begin, y.begin() + end});
    for (; begin < end; ++begin) y[begin] -= level;
  }
  return y;
}

// Returns the values of a series in another order of the runs.
std::vector<double> InOrder(const NoisySeries& series, const std::vector<int>& order) {
  std::vector<double> values;
  for (const int run : order) {
    const auto found = std::find(series.runs.begin(), series.runs.end(), run);
    if (found != series.runs.end()) values.push_back(series.values[found - series.runs.begin()]);
  }
  return values;
}

ChangePoints ByDefinition(const std::vector<NoisySeries>& all, const ChangePointOptions& options) {
  ChangePoints points;
  points.at.resize(all.size());
  points.scale.resize(all.size());
  std::vector<double> scales;
  std::vector<NoisySeries> permuted;
  int runs = 0;
  for (const NoisySeries& series : all) {
    if (series.values.size() < 8) continue;
    scales.push_back(OwnScale(series.values));
    permuted.push_back(series);
    runs = std::max(runs, series.runs.back() + 1);
  }
  if (scales.empty()) return points;
  const double typical = MedianOf(scales);
  for (NoisySeries& series : permuted) {
    const double scale = Pooled(series.values, typical);
    series.values = LessTheirLevels(series.values, LevelsOf(series.values, scale, 6));
  }
  // The measured order is one of 1 / rate.
  const int permutations = static_cast<int>(std::ceil(1 / options.false_alarm_rate)) - 1;
  for (int permutation = 0; permutation < permutations; ++permutation) {
    std::mt19937_64 random(options.seed + static_cast<uint64_t>(permutation));
    std::vector<int> order(static_cast<size_t>(runs));
    std::iota(order.begin(), order.end(), 0);
    for (size_t left = order.size(); left > 1; --left) {
      std::swap(order[left - 1], order[random() % left]);
    }
    for (const NoisySeries& series : permuted) {
      points.critical = std::max(points.critical, LargestT(InOrder(series, order), typical));
    }
  }
  for (size_t i = 0; i < all.size(); ++i) {
    if (all[i].values.size() < 8) continue;
    points.scale[i] = Pooled(all[i].values, typical);
    points.at[i] = LevelsOf(all[i].values, points.scale[i], points.critical);
  }
  return points;
}

// Few series of few runs, so that any of them, any split and the ends decide; with odd runs, steps,
// gaps, and noise that is smaller than the least.
TEST(ChangePoints, AreThoseOfTheirDefinition) {
  int changes = 0;
  for (uint64_t seed = 0; seed < 120; ++seed) {
    const int runs = 8 + static_cast<int>(seed % 23), count = 1 + static_cast<int>(seed % 4);
    std::vector<NoisySeries> all =
        Draw(AllNoises()[seed % 5], count, runs, seed % 7 == 0 ? 2e-4 : 0.01, 40 + seed);
    for (int run = runs / 2; run < runs; ++run) all[0].values[run] += 0.004 * (seed % 9);
    all.back().values[seed % runs] += 0.1;
    const size_t gap = seed % 3;
    all.back().runs.erase(all.back().runs.begin() + gap);
    all.back().values.erase(all.back().values.begin() + gap);
    ChangePointOptions options;
    options.false_alarm_rate = seed % 2 == 0 ? 0.5 : 0.06;
    options.seed = seed;
    const ChangePoints expected = ByDefinition(all, options),
                       found = FindChangePoints(all, options);
    // The constants of the noise have five digits.
    EXPECT_NEAR(found.critical, expected.critical, 1e-4 * expected.critical) << seed;
    for (size_t i = 0; i < all.size(); ++i) {
      EXPECT_NEAR(found.scale[i], expected.scale[i], 1e-4 * expected.scale[i]) << seed << " " << i;
      EXPECT_EQ(found.at[i], expected.at[i]) << seed << " " << i;
      changes += static_cast<int>(found.at[i].size());
    }
  }
  EXPECT_GT(changes, 20);
}

TEST(ChangePoints, OneOddRunIsNoChangeWhereverItIs) {
  const std::vector<NoisySeries> quiet = Draw(AllNoises()[0], 10, 40, 0.005, 8);
  for (int odd = 0; odd < 40; ++odd) {
    std::vector<NoisySeries> all = quiet;
    all[0].values[odd] += 3;  // twenty times as slow
    EXPECT_THAT(FindChangePoints(all, {}).at[0], IsEmpty()) << odd;
  }
}

TEST(ChangePoints, ASeriesWithGapsIsSearchedInTheRunsThatItHas) {
  std::vector<NoisySeries> all = Draw(AllNoises()[0], 10, 60, 0.005, 9);
  NoisySeries with_gaps;
  for (int run = 1; run < 60; run += 3) {  // 20 values, of which the last 8 are of run 37 on
    with_gaps.runs.push_back(run);
    with_gaps.values.push_back(all[0].values[run] + (run >= 37 ? kStep : 0));
  }
  all[0] = with_gaps;
  EXPECT_THAT(FindChangePoints(all, {}).at[0], ElementsAre(12));
}

TEST(ChangePoints, SeriesThatAreTooShortAreNotSearched) {
  std::vector<NoisySeries> all(2);
  for (int run = 0; run < kFewestForChangePoints; ++run) {
    for (NoisySeries& one : all) {
      one.runs.push_back(run);
      one.values.push_back(run < 4 ? 0 : 1);
    }
  }
  all[1].runs.pop_back();
  all[1].values.pop_back();
  const ChangePoints found = FindChangePoints(all, {});
  EXPECT_GT(found.scale[0], 0);
  EXPECT_EQ(found.scale[1], 0);
  EXPECT_THAT(found.at[1], IsEmpty());
  EXPECT_EQ(FindChangePoints({all[1]}, {}).critical, 0);
  EXPECT_EQ(FindChangePoints({}, {}).critical, 0);
}

TEST(ChangePoints, SeriesWithoutAnyNoiseHaveNoChangeUntilTheyHaveOne) {
  std::vector<NoisySeries> all(3);
  for (int run = 0; run < 30; ++run) {
    for (NoisySeries& one : all) {
      one.runs.push_back(run);
      one.values.push_back(0.5);
    }
  }
  EXPECT_THAT(FindChangePoints(all, {}).at, testing::Each(IsEmpty()));
  for (int run = 27; run < 30; ++run) all[1].values[run] += 0.01;
  const ChangePoints found = FindChangePoints(all, {});
  EXPECT_THAT(found.at[1], ElementsAre(27));
  EXPECT_THAT(found.at[0], IsEmpty());
}

TEST(ChangePoints, ALowerRateOfFalseAlarmsNeverLowersTheThreshold) {
  const std::vector<NoisySeries> all = Draw(AllNoises()[2], 30, 50, 0.01, 10);
  double previous = 0;
  for (const double rate : {0.5, 0.1, 0.01, 0.001}) {
    ChangePointOptions options;
    options.false_alarm_rate = rate;
    const double critical = FindChangePoints(all, options).critical;
    EXPECT_GE(critical, previous) << rate;
    previous = critical;
  }
}

TEST(ChangePoints, TheSmallestStepIsThatWhoseMeanStatisticIsTheThreshold) {
  // 5 * 0.01 * sqrt(1/3 + 1/6).
  EXPECT_NEAR(SmallestStep(5, 0.01, 6, 3), 0.0353553, 1e-6);
}

}  // namespace
}  // namespace tfb
