#include "results/comparison.h"

#include <cmath>
#include <limits>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "results/comparison_report.h"
#include "results/synthetic.h"

namespace tfb {
namespace {

using ::tfb::synthetic::AddVisit;
using ::tfb::synthetic::CaseSpec;
using ::tfb::synthetic::MakeCase;
using ::tfb::synthetic::MakeEnvironment;
using ::tfb::synthetic::MakeSweep;
using ::tfb::synthetic::MakeUnmeasured;
using ::tfb::synthetic::Samples;

// Multiplies the times of `technique`, or of all techniques where it is empty.
void Slow(double factor, const std::string& technique, ResultSet* results) {
  for (Case& result : *results->mutable_cases()) {
    if (!technique.empty() && result.key().technique() != technique) continue;
    Timing* timing = result.mutable_outcome()->mutable_timing();
    for (double& ns : *timing->mutable_run_ns()) ns *= factor;
    for (double& ns : *timing->mutable_setup_ns()) ns *= factor;
  }
}

// Multiplies the measured peaks, too, as a slower machine has both.
void SlowMachine(double factor, ResultSet* results) {
  Slow(factor, "", results);
  for (Environment& environment : *results->mutable_environments()) {
    for (Peak& peak : *environment.mutable_peaks()) peak.set_value(peak.value() / factor);
  }
}

Case* Find(const std::string& technique, Case::Purpose purpose, ResultSet* results) {
  for (Case& result : *results->mutable_cases()) {
    if (result.key().technique() == technique && result.key().purpose() == purpose) return &result;
  }
  return nullptr;
}

Comparison CompareOrDie(const ResultSet& base, const ResultSet& now,
                        const CompareOptions& options = {}) {
  absl::StatusOr<Comparison> comparison = Compare(base, now, options);
  EXPECT_TRUE(comparison.ok()) << comparison.status();
  return comparison.ok() ? *comparison : Comparison();
}

std::string Text(const Comparison& comparison) {
  return RenderComparison(comparison, ComparisonFormat::kTerminal, true, TextStyle());
}

// Sets the time of the fixed arithmetic beside each sample to `ns`.
void SetProbes(double ns, ResultSet* results) {
  for (Case& result : *results->mutable_cases()) {
    Timing* timing = result.mutable_outcome()->mutable_timing();
    timing->clear_probe_ns();
    for (int i = 0; i < timing->run_ns_size(); ++i) timing->add_probe_ns(ns);
  }
}

TEST(Compare, ASetAgainstItselfHasNothing) {
  const ResultSet sweep = MakeSweep();
  const Comparison comparison = CompareOrDie(sweep, sweep);
  EXPECT_FALSE(comparison.regressed());
  EXPECT_EQ(comparison.Count(Verdict::kSame), static_cast<int>(comparison.findings.size()));
  EXPECT_EQ(comparison.cases, sweep.cases_size());
}

TEST(Compare, ASlowerTechniqueRegresses) {
  ResultSet now = MakeSweep();
  Slow(1.3, "near", &now);
  const Comparison comparison = CompareOrDie(MakeSweep(), now);
  EXPECT_EQ(comparison.Count(Verdict::kRegressed), 10) << Text(comparison);  // run and setup of 5
  const Finding& worst = comparison.findings.front();
  EXPECT_TRUE(absl::EndsWith(worst.what, " time over dense")) << worst.what;
  EXPECT_NEAR(worst.change, 1.3, 1e-9);
  EXPECT_TRUE(absl::StrContains(worst.subject, "near window=256, cpu f32"));
}

TEST(Compare, PassesAreCasesOfTheirOwnAndWhatIsKeptIsMemory) {
  CaseSpec spec;
  ResultSet base, now;
  for (ResultSet* set : {&base, &now}) *set->add_environments() = MakeEnvironment();
  *base.add_cases() = MakeCase(spec);
  spec.pass = Case::PASS_TRAINING;
  *now.add_cases() = MakeCase(spec);
  EXPECT_TRUE(absl::StrContains(Compare(base, now, {}).status().message(),
                                "no case in common (1 and 1 cases); passes: forward / training"));
  *base.add_cases() = MakeCase(spec);
  Outcome* outcome = now.mutable_cases(0)->mutable_outcome();
  outcome->set_kept_bytes(2 * outcome->kept_bytes());
  CompareOptions options;
  options.allow_missing = true;
  const Comparison comparison = CompareOrDie(base, now, options);
  EXPECT_EQ(comparison.cases, 1);
  ASSERT_EQ(comparison.Count(Verdict::kRegressed), 1) << Text(comparison);
  EXPECT_EQ(comparison.findings.front().what, "working memory");
  EXPECT_TRUE(absl::StrContains(comparison.findings.front().subject, ", training step, "));
}

TEST(Compare, EveryNumberThatVanishesCounts) {
  const auto lose = [](void (*lose_from)(Outcome*), bool allow_missing = false) {
    ResultSet now = MakeSweep();
    for (Case& result : *now.mutable_cases()) {
      if (result.key().technique() == "near") lose_from(result.mutable_outcome());
    }
    CompareOptions options;
    options.allow_missing = allow_missing;
    return CompareOrDie(MakeSweep(), now, options);
  };
  const auto count = [](const Comparison& comparison, const std::string& what) {
    int count = 0;
    for (const Finding& finding : comparison.findings) {
      count += finding.what == what && finding.now == "missing" &&
               finding.verdict == Verdict::kRegressed;
    }
    return count;
  };
  const auto no_times = [](Outcome* outcome) { outcome->clear_timing(); };
  EXPECT_EQ(count(lose(no_times), "run time"), 5) << Text(lose(no_times));
  EXPECT_EQ(count(lose([](Outcome* outcome) { outcome->mutable_timing()->clear_setup_ns(); }),
                  "setup time"),
            5);
  EXPECT_EQ(count(lose([](Outcome* outcome) { outcome->clear_against_definition(); }),
                  "error against its definition"),
            1);
  EXPECT_EQ(
      count(lose([](Outcome* outcome) { outcome->clear_against_dense(); }), "error against dense"),
      1);
  EXPECT_EQ(count(lose([](Outcome* outcome) { outcome->clear_peak_workspace_bytes(); }),
                  "working memory"),
            6);
  EXPECT_FALSE(lose(no_times, /*allow_missing=*/true).regressed());
}

TEST(Compare, ErrorsThatTheSweepSaysItDidNotMeasureAreNotJudged) {
  ResultSet now = MakeSweep();
  Outcome* outcome = Find("near", Case::PURPOSE_ACCURACY, &now)->mutable_outcome();
  outcome->clear_against_definition();
  outcome->clear_against_dense();
  outcome->set_reason("errors were not measured: that would take about 3 s\x1b");
  const Comparison comparison = CompareOrDie(MakeSweep(), now);
  EXPECT_FALSE(comparison.regressed()) << Text(comparison);
  int count = 0;
  for (const Finding& finding : comparison.findings) {
    if (finding.now != "missing") continue;
    ++count;
    EXPECT_EQ(finding.verdict, Verdict::kNotJudged);
    EXPECT_EQ(finding.reason, "errors were not measured: that would take about 3 s?");
  }
  EXPECT_EQ(count, 2);
  // No reason explains that memory or times are missing.
  outcome->clear_peak_workspace_bytes();
  EXPECT_TRUE(CompareOrDie(MakeSweep(), now).regressed());
}

TEST(Compare, AmbiguousTimesComeWithTheCommandThatWouldTell) {
  EXPECT_FALSE(absl::StrContains(Text(CompareOrDie(MakeSweep(), MakeSweep())), "ambiguous;"));
  ResultSet now = MakeSweep();
  Case* near = Find("near", Case::PURPOSE_SCALING, &now);
  auto* times = near->mutable_outcome()->mutable_timing()->mutable_run_ns();
  for (int i = 0; i < times->size(); ++i) times->Set(i, times->Get(i) * (i % 2 == 0 ? 0.7 : 1.5));
  const std::string text = Text(CompareOrDie(MakeSweep(), now));
  EXPECT_TRUE(absl::StrContains(text, "1 time is ambiguous; more samples")) << text;
  const std::string tokens = absl::StrCat(near->key().problem().query_tokens());
  EXPECT_TRUE(absl::StrContains(
      text, absl::StrCat("--techniques=near:window=256 --lengths=", tokens, " --accuracy=false\n")))
      << text;
}

TEST(Compare, ATimeThatIsNoTimeRegresses) {
  for (const double ns : {std::nan(""), HUGE_VAL, 0.0, -5.0}) {
    ResultSet now = MakeSweep();
    Case* near = Find("near", Case::PURPOSE_SCALING, &now);
    for (double& time : *near->mutable_outcome()->mutable_timing()->mutable_run_ns()) time = ns;
    const Comparison comparison = CompareOrDie(MakeSweep(), now);
    EXPECT_TRUE(comparison.regressed()) << ns << Text(comparison);
    // A number that was NaN before, too, is not reported.
    EXPECT_FALSE(CompareOrDie(now, now).regressed()) << ns;
  }
}

TEST(Compare, AFasterTechniqueImproves) {
  ResultSet now = MakeSweep();
  Slow(0.7, "near", &now);
  const Comparison comparison = CompareOrDie(MakeSweep(), now);
  EXPECT_EQ(comparison.Count(Verdict::kImproved), 10) << Text(comparison);
  EXPECT_FALSE(comparison.regressed());
}

TEST(Compare, ASlowerMachineIsNoRegressionUnlessTimesThemselvesAreAskedFor) {
  ResultSet now = MakeSweep();
  SlowMachine(1.5, &now);
  EXPECT_FALSE(CompareOrDie(MakeSweep(), now).regressed());
  CompareOptions options;
  options.metric = CompareOptions::Metric::kAbsolute;
  EXPECT_TRUE(CompareOrDie(MakeSweep(), now, options).regressed());
}

TEST(Compare, ASlowerDenseRegressesAndOthersDoNotImproveByIt) {
  ResultSet now = MakeSweep();
  Slow(1.5, "plain", &now);
  const Comparison comparison = CompareOrDie(MakeSweep(), now);
  EXPECT_EQ(comparison.Count(Verdict::kRegressed), 10) << Text(comparison);
  EXPECT_EQ(comparison.findings.front().what, "run time over that at the measured peak");
  EXPECT_EQ(comparison.Count(Verdict::kImproved), 0) << Text(comparison);
}

TEST(Compare, AFasterDenseIsNoRegressionOfTheOthers) {
  ResultSet base = MakeSweep();
  ResultSet now = MakeSweep();
  SetProbes(1e5, &base);
  SetProbes(1e5, &now);
  Slow(0.6, "plain", &now);
  const Comparison comparison = CompareOrDie(base, now);
  EXPECT_FALSE(comparison.regressed()) << Text(comparison);
  EXPECT_EQ(comparison.Count(Verdict::kImproved), 10) << Text(comparison);   // dense: run and setup
  EXPECT_EQ(comparison.Count(Verdict::kAmbiguous), 20) << Text(comparison);  // of the two others
  for (const Finding& finding : comparison.findings) {
    if (finding.verdict != Verdict::kAmbiguous) continue;
    EXPECT_EQ(finding.reason,
              "dense changed: the time over fixed arithmetic beside it is 1.00x what it was");
  }
}

TEST(Compare, DenseItselfIsJudgedByTheArithmeticBesideIt) {
  ResultSet base = MakeSweep();
  ResultSet now = MakeSweep();
  SetProbes(1e5, &base);
  SetProbes(2e5, &now);
  Slow(2, "", &now);  // a machine of half the speed
  EXPECT_FALSE(CompareOrDie(base, now).regressed());
  Slow(1.2, "", &now);
  const Comparison comparison = CompareOrDie(base, now);
  EXPECT_TRUE(comparison.regressed());
  EXPECT_EQ(comparison.findings.front().what, "run time over fixed arithmetic beside it");
  EXPECT_NEAR(comparison.findings.front().change, 1.2, 1e-9);
}

TEST(Compare, ATimeRegressesWhereItsWholeIntervalIsBeyondTheThreshold) {
  ResultSet now = MakeSweep();
  Slow(1.09, "near", &now);
  const Comparison comparison = CompareOrDie(MakeSweep(), now);
  EXPECT_TRUE(comparison.regressed());
  const Finding& finding = comparison.findings.front();
  EXPECT_TRUE(finding.is_time);
  EXPECT_GT(finding.interval->low, 1.05);
  EXPECT_LT(finding.interval->high, 1.13);
  EXPECT_LT(*finding.p_value, 0.05);
  CompareOptions options;
  options.threshold = 1.12;
  EXPECT_FALSE(CompareOrDie(MakeSweep(), now, options).regressed());
}

TEST(Compare, AnIntervalThatHoldsTheThresholdIsAmbiguous) {
  ResultSet now = MakeSweep();
  Slow(1.05, "near", &now);
  const Comparison comparison = CompareOrDie(MakeSweep(), now);
  EXPECT_FALSE(comparison.regressed()) << Text(comparison);
  EXPECT_EQ(comparison.Count(Verdict::kAmbiguous), 10) << Text(comparison);
}

TEST(Compare, FewSamplesAmongManyTimesAreNotSure) {
  ResultSet base = MakeSweep();
  ResultSet now = MakeSweep();
  Slow(1.5, "near", &now);
  for (ResultSet* results : {&base, &now}) {
    for (Case& result : *results->mutable_cases()) {
      result.mutable_outcome()->mutable_timing()->mutable_run_ns()->Truncate(4);
      result.mutable_outcome()->mutable_timing()->clear_setup_ns();
    }
  }
  // Two sets of 4 differ as much by chance in 2 of 70 orders.
  const Comparison comparison = CompareOrDie(base, now);
  EXPECT_FALSE(comparison.regressed());
  ASSERT_EQ(comparison.Count(Verdict::kAmbiguous), 5) << Text(comparison);
  for (const Finding& finding : comparison.findings) {
    if (finding.verdict != Verdict::kAmbiguous) continue;
    EXPECT_EQ(finding.reason, "too few samples to be sure among 15 times: p = 0.429");
  }
}

// A sweep of "near" and dense with log-normal noise. A dense of another seed is another case, which is
// not compared, so that the time of "near" over dense is the only one and its p-value needs no
// correction.
ResultSet NoisySweep(uint64_t dense_seed, int samples, double near_ns, double sigma,
                     std::mt19937_64* random) {
  std::normal_distribution<double> normal(0, sigma);
  ResultSet results;
  *results.add_environments() = MakeEnvironment();
  CaseSpec dense, near;
  dense.seed = dense_seed;
  near.technique = "near";
  near.median_ns = near_ns;
  for (const CaseSpec& spec : {dense, near}) {
    Case* added = results.add_cases();
    *added = MakeCase(spec);
    Timing* timing = added->mutable_outcome()->mutable_timing();
    timing->clear_setup_ns();
    timing->clear_run_ns();
    for (int i = 0; i < samples; ++i) {
      timing->add_run_ns(spec.median_ns * std::exp(normal(*random)));
    }
  }
  return results;
}

// Compares two such sweeps, of which the second has "near" changed by a factor.
Finding CompareNoisySweeps(int samples, double change, double sigma, std::mt19937_64* random) {
  CompareOptions options;
  options.allow_missing = true;
  const Comparison comparison =
      CompareOrDie(NoisySweep(1, samples, 2e5, sigma, random),
                   NoisySweep(2, samples, 2e5 * change, sigma, random), options);
  int times = 0;
  Finding found;
  for (const Finding& finding : comparison.findings) {
    if (!finding.is_time) continue;
    ++times;
    found = finding;
  }
  EXPECT_EQ(times, 1);
  EXPECT_EQ(found.what, "run time over dense");
  return found;
}

// With dense's medians taken for constants it is 16 %.
TEST(Compare, OfEqualTimesOverANoisyDenseFivePercentHaveAPValueBelowFivePercent) {
  std::mt19937_64 random(21);
  constexpr int kRounds = 1000;
  int below = 0;
  for (int round = 0; round < kRounds; ++round) {
    below += *CompareNoisySweeps(10, 1, 0.025, &random).p_value < 0.05;
  }
  EXPECT_LE(below / static_cast<double>(kRounds), 0.065);  // two standard deviations above 5 %
}

// Returns a sweep with one visit to "near" and dense, and three more to dense alone, before which the
// machine became slower by a factor.
ResultSet SweepOfVisits(double slower) {
  ResultSet results;
  *results.add_environments() = MakeEnvironment();
  CaseSpec dense, near;
  near.technique = "near";
  for (const CaseSpec& spec : {dense, near}) {
    *results.add_cases() = MakeCase(spec);
    results.mutable_cases()->rbegin()->mutable_outcome()->clear_timing();
  }
  AddVisit(1000, Samples(1e6, 5), results.mutable_cases(0));
  AddVisit(1000, Samples(2e5, 5), results.mutable_cases(1));
  for (const int64_t start : {2000, 3000, 4000}) {
    AddVisit(start, Samples(1e6 * slower, 5), results.mutable_cases(0));
  }
  return results;
}

Finding OverDense(const ResultSet& base, const ResultSet& now) {
  for (const Finding& finding : CompareOrDie(base, now).findings) {
    if (finding.what == "run time over dense") return finding;
  }
  ADD_FAILURE() << "no time over dense";
  return Finding();
}

// Returns a sweep of "near" and dense in one visit, by turns, on a machine whose speed changes with every
// fourth sample or so.
ResultSet SweepOfADriftingMachine(double near_ns, int samples, std::mt19937_64* random) {
  std::normal_distribution<double> normal;
  ResultSet results = SweepOfVisits(1);
  double level = 0;
  std::vector<double> of_near, of_dense;
  for (int i = 0; i < samples; ++i) {
    if (i == 0 || (*random)() % 4 == 0) level = 0.05 * normal(*random);
    of_dense.push_back(1e6 * std::exp(level + 0.01 * normal(*random)));
    of_near.push_back(near_ns * std::exp(level + 0.01 * normal(*random)));
  }
  for (Case& result : *results.mutable_cases()) result.mutable_outcome()->clear_timing();
  AddVisit(1000, of_dense, results.mutable_cases(0));
  AddVisit(1000, of_near, results.mutable_cases(1));
  return results;
}

TEST(Compare, OnAMachineThatDriftsFivePercentAreFoundAndNothingElse) {
  std::mt19937_64 random(5);
  constexpr int kRounds = 400;
  int found = 0, below = 0;
  for (int round = 0; round < kRounds; ++round) {
    const ResultSet base = SweepOfADriftingMachine(2e5, 11, &random);
    found += *OverDense(base, SweepOfADriftingMachine(2.1e5, 11, &random)).p_value < 0.05;
    below += *OverDense(base, SweepOfADriftingMachine(2e5, 11, &random)).p_value < 0.05;
  }
  EXPECT_GE(found, 0.97 * kRounds);
  EXPECT_LE(below, 0.07 * kRounds);  // two standard deviations above 5 %
}

TEST(Compare, ATimeIsOverTheSamplesOfDenseBesideIt) {
  const Finding finding = OverDense(SweepOfVisits(1), SweepOfVisits(1.2));
  EXPECT_NEAR(finding.change, 1, 1e-12);
  EXPECT_EQ(finding.verdict, Verdict::kSame);
  EXPECT_EQ(finding.base, "0.200");
  EXPECT_EQ(finding.now, "0.200");
}

TEST(Compare, WithoutVisitsInCommonATimeIsOverAllSamplesOfDense) {
  const auto change = [](void (*change_visits)(const std::string& technique, Timing* timing)) {
    ResultSet base = SweepOfVisits(1), now = SweepOfVisits(1.2);
    for (ResultSet* results : {&base, &now}) {
      for (Case& result : *results->mutable_cases()) {
        change_visits(result.key().technique(), result.mutable_outcome()->mutable_timing());
      }
    }
    return OverDense(base, now).change;
  };
  // The record of a sweep by an older program, and of one that a newer program resumed.
  EXPECT_NEAR(change([](const std::string&, Timing* timing) { timing->clear_visits(); }), 1 / 1.2,
              0.01);
  EXPECT_NEAR(change([](const std::string&, Timing* timing) {
                timing->mutable_visits()->DeleteSubrange(0, 1);
              }),
              1 / 1.2, 0.01);
  // Another sweep's dense, and a visit of too few samples.
  EXPECT_NEAR(change([](const std::string& technique, Timing* timing) {
                if (technique == "near") timing->mutable_visits(0)->set_start_unix_ns(5000);
              }),
              1 / 1.2, 0.01);
  EXPECT_NEAR(change([](const std::string& technique, Timing* timing) {
                if (technique == "near") return;
                timing->mutable_visits(0)->set_run_samples(2);
                timing->mutable_visits(1)->set_run_samples(8);
              }),
              1 / 1.2, 0.01);
  // A damaged record, whose numbers add up.
  EXPECT_NEAR(change([](const std::string& technique, Timing* timing) {
                if (technique == "near") return;
                timing->mutable_visits(0)->set_run_samples(-5);
                timing->mutable_visits(1)->set_run_samples(15);
              }),
              1 / 1.2, 0.01);
}

TEST(Compare, ChangesOverANoisyDenseAreFound) {
  std::mt19937_64 random(22);
  constexpr int kRounds = 200;
  int found = 0;
  for (int round = 0; round < kRounds; ++round) {
    found += *CompareNoisySweeps(10, 1.1, 0.025, &random).p_value < 0.05;
    // Four samples are the fewest of a sweep.
    const Finding large = CompareNoisySweeps(4, 1.5, 0.025, &random);
    EXPECT_EQ(large.verdict, Verdict::kRegressed) << large.reason;
    EXPECT_NEAR(*large.p_value, 2.0 / 70, 1e-12);
  }
  EXPECT_GE(found, 0.99 * kRounds);
}

TEST(Compare, InstructionsAreComparedWhereBothHaveThem) {
  ResultSet base = MakeSweep();
  ResultSet now = MakeSweep();
  CompareOptions options;
  options.metric = CompareOptions::Metric::kInstructions;
  options.threshold = 1.01;
  EXPECT_EQ(std::string(Compare(base, now, options).status().message()),
            "--metric=instructions: neither of the two has counts of instructions: the kernel of a "
            "machine grants them where it has a counter and perf_event_paranoid is at most 2");
  for (ResultSet* results : {&base, &now}) {
    for (Case& result : *results->mutable_cases()) {
      for (const double count : {1e9, 1.0001e9, 1e9}) {
        result.mutable_outcome()->mutable_timing()->add_run_instructions(count);
      }
    }
  }
  EXPECT_FALSE(CompareOrDie(base, now, options).regressed());
  for (double& count : *Find("near", Case::PURPOSE_SCALING, &now)
                            ->mutable_outcome()
                            ->mutable_timing()
                            ->mutable_run_instructions()) {
    count *= 1.02;
  }
  Slow(3, "near", &now);  // times are not judged
  const Comparison comparison = CompareOrDie(base, now, options);
  EXPECT_EQ(comparison.Count(Verdict::kRegressed), 1) << Text(comparison);
  EXPECT_EQ(comparison.findings.front().what, "instructions");
  EXPECT_NEAR(comparison.findings.front().change, 1.02, 1e-9);
}

TEST(Compare, AnotherPrecisionIsComparedOnlyWhereAllowed) {
  ResultSet now = MakeSweep();
  for (Case& result : *now.mutable_cases()) result.mutable_key()->set_dtype(ELEMENT_TYPE_BF16);
  const absl::Status status = Compare(MakeSweep(), now, {}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(std::string(status.message()),
            "the two have no case in common (18 and 18 cases); element types: f32 / bf16"
            "; --allow_different_precision matches them all the same");
  CompareOptions options;
  options.allow_different_precision = true;
  EXPECT_FALSE(CompareOrDie(MakeSweep(), now, options).regressed());
  Slow(1.3, "near", &now);
  EXPECT_TRUE(CompareOrDie(MakeSweep(), now, options).regressed());
}

TEST(Compare, WideIntervalsAreAmbiguous) {
  ResultSet base = MakeSweep();
  ResultSet now = MakeSweep();
  Slow(1.2, "near", &now);
  for (ResultSet* results : {&base, &now}) {
    for (Case& result : *results->mutable_cases()) {
      auto* run_ns = result.mutable_outcome()->mutable_timing()->mutable_run_ns();
      result.mutable_outcome()->mutable_timing()->clear_setup_ns();
      // +-30 % around the median
      for (int i = 0; i < run_ns->size(); ++i) {
        run_ns->Set(i, run_ns->Get(run_ns->size() / 2) * (i % 2 == 0 ? 1.3 : 0.7));
      }
    }
  }
  const Comparison comparison = CompareOrDie(base, now);
  EXPECT_FALSE(comparison.regressed()) << Text(comparison);
  EXPECT_EQ(comparison.Count(Verdict::kAmbiguous), 15) << Text(comparison);
}

TEST(Compare, IsSilentOnNoiseInNinetyNineOfAHundredSweeps) {
  std::mt19937_64 random(11);
  std::normal_distribution<double> jitter(0, 0.08);
  int red = 0;
  for (int round = 0; round < 100; ++round) {
    ResultSet base = MakeSweep();
    ResultSet now = MakeSweep();
    for (ResultSet* results : {&base, &now}) {
      for (Case& result : *results->mutable_cases()) {
        Timing* timing = result.mutable_outcome()->mutable_timing();
        for (double& ns : *timing->mutable_run_ns()) ns *= std::exp(jitter(random));
        for (double& ns : *timing->mutable_setup_ns()) ns *= std::exp(jitter(random));
      }
    }
    red += CompareOrDie(base, now).regressed();
  }
  EXPECT_LE(red, 1);
}

TEST(Compare, TwoSamplesAreTooFewToJudge) {
  ResultSet base = MakeSweep();
  for (Case& result : *base.mutable_cases()) {
    result.mutable_outcome()->mutable_timing()->clear_setup_ns();
  }
  ResultSet now = base;
  Slow(2, "near", &now);
  for (Case& result : *now.mutable_cases()) {
    if (result.key().technique() != "near") continue;
    result.mutable_outcome()->mutable_timing()->mutable_run_ns()->Truncate(2);
  }
  const Comparison comparison = CompareOrDie(base, now);
  EXPECT_FALSE(comparison.regressed()) << Text(comparison);
  EXPECT_GT(comparison.Count(Verdict::kNotJudged), 0);
}

TEST(Compare, WithoutPeaksAndDenseTheTimeIsJudged) {
  ResultSet base;
  *base.add_environments() = MakeEnvironment();
  base.mutable_environments(0)->clear_peaks();
  CaseSpec spec;
  spec.technique = "alone";
  *base.add_cases() = MakeCase(spec);
  ResultSet now = base;
  Slow(1.5, "", &now);
  const Comparison comparison = CompareOrDie(base, now);
  EXPECT_TRUE(comparison.regressed());
  EXPECT_EQ(comparison.findings.front().what, "run time");
  EXPECT_EQ(comparison.findings.front().base, "1.00 ms");
}

TEST(Compare, ABoundThatNoLongerHoldsRegressesAndRoundingDoesNot) {
  ResultSet now = MakeSweep();
  ErrorMeasure* error =
      Find("near", Case::PURPOSE_ACCURACY, &now)->mutable_outcome()->mutable_against_definition();
  error->set_relative_frobenius(1.9e-6);  // nine times as much, and within its bound
  EXPECT_FALSE(CompareOrDie(MakeSweep(), now).regressed());
  error->set_relative_frobenius(3e-6);
  error->set_passed(false);
  const Comparison comparison = CompareOrDie(MakeSweep(), now);
  EXPECT_EQ(comparison.Count(Verdict::kRegressed), 1);
  EXPECT_EQ(comparison.findings.front().what, "error against its definition");
}

// Each gradient is compared with that of the same name.
TEST(Compare, AGradientThatExceedsItsBoundRegressesAndOneThatVanishesToo) {
  ResultSet base = MakeSweep();
  const auto set = [](absl::string_view name, double value, ResultSet* results) {
    NamedError* error =
        Find("near", Case::PURPOSE_ACCURACY, results)->mutable_outcome()->add_gradient_errors();
    error->set_name(std::string(name));
    error->mutable_error()->set_value(value);
    error->mutable_error()->set_bound(6e-5);
    error->mutable_error()->set_passed(value <= 6e-5);
  };
  set("q", 1e-7, &base);
  set("k", 7e-5, &base);
  ResultSet now = MakeSweep();
  set("k", 6e-5, &now);
  set("q", 5e-5, &now);  // rounding
  Comparison comparison = CompareOrDie(base, now);
  EXPECT_FALSE(comparison.regressed()) << Text(comparison);
  EXPECT_EQ(comparison.Count(Verdict::kImproved), 1);
  comparison = CompareOrDie(now, base);
  ASSERT_EQ(comparison.Count(Verdict::kRegressed), 1) << Text(comparison);
  EXPECT_EQ(comparison.findings.front().what, "error of the gradient of k");
  comparison = CompareOrDie(base, MakeSweep());
  EXPECT_EQ(comparison.Count(Verdict::kRegressed), 2) << Text(comparison);
  EXPECT_EQ(comparison.findings.front().now, "missing");
}

TEST(Compare, AnErrorAgainstDenseThatGrewRegresses) {
  ResultSet now = MakeSweep();
  ErrorMeasure* error =
      Find("sketch", Case::PURPOSE_ACCURACY, &now)->mutable_outcome()->mutable_against_dense();
  error->set_relative_frobenius(0.61 * 1.2);
  EXPECT_FALSE(CompareOrDie(MakeSweep(), now).regressed());
  error->set_relative_frobenius(0.61 * 1.3);
  EXPECT_TRUE(CompareOrDie(MakeSweep(), now).regressed());
  error->set_relative_frobenius(std::numeric_limits<double>::quiet_NaN());
  EXPECT_TRUE(CompareOrDie(MakeSweep(), now).regressed());
  error->set_relative_frobenius(std::numeric_limits<double>::infinity());
  EXPECT_TRUE(CompareOrDie(MakeSweep(), now).regressed());
  // Rounding: 2e-7 to 2e-6 is below the floor.
  now = MakeSweep();
  Find("plain", Case::PURPOSE_ACCURACY, &now)
      ->mutable_outcome()
      ->mutable_against_dense()
      ->set_relative_frobenius(2e-6);
  EXPECT_FALSE(CompareOrDie(MakeSweep(), now).regressed());
}

TEST(Compare, MemoryIsJudgedByTheThresholdAndNothingBelowAPage) {
  ResultSet base = MakeSweep();
  ResultSet now = MakeSweep();
  Outcome* outcome = Find("near", Case::PURPOSE_SCALING, &now)->mutable_outcome();
  outcome->set_peak_workspace_bytes(outcome->peak_workspace_bytes() * 2);
  EXPECT_EQ(CompareOrDie(base, now).Count(Verdict::kRegressed), 1);
  Find("near", Case::PURPOSE_SCALING, &base)->mutable_outcome()->set_peak_workspace_bytes(0);
  outcome->set_peak_workspace_bytes(64);
  EXPECT_FALSE(CompareOrDie(base, now).regressed());
}

TEST(Compare, StatusAndPresenceAreJudged) {
  ResultSet now = MakeSweep();
  Case* changed = Find("near", Case::PURPOSE_SCALING, &now);
  changed->mutable_outcome()->Clear();
  changed->mutable_outcome()->set_status(Outcome::STATUS_TIMEOUT);
  changed->mutable_outcome()->set_reason("60 s");
  Comparison comparison = CompareOrDie(MakeSweep(), now);
  EXPECT_EQ(comparison.Count(Verdict::kRegressed), 1);
  EXPECT_EQ(comparison.findings.front().now, "timeout");
  EXPECT_EQ(comparison.findings.front().reason, "60 s");
  EXPECT_EQ(CompareOrDie(now, MakeSweep()).Count(Verdict::kImproved), 1);

  now = MakeSweep();
  now.mutable_cases()->RemoveLast();
  comparison = CompareOrDie(MakeSweep(), now);
  EXPECT_EQ(comparison.missing, 1);
  EXPECT_TRUE(comparison.regressed());
  CompareOptions options;
  options.allow_missing = true;
  EXPECT_FALSE(CompareOrDie(MakeSweep(), now, options).regressed());

  comparison = CompareOrDie(now, MakeSweep());
  EXPECT_EQ(comparison.added, 1);
  EXPECT_FALSE(comparison.regressed());
  ResultSet failing = MakeSweep();
  failing.mutable_cases(failing.cases_size() - 1)
      ->mutable_outcome()
      ->set_status(Outcome::STATUS_FAILED);
  EXPECT_TRUE(CompareOrDie(now, failing).regressed());
}

TEST(Compare, SkippedOnBothSidesIsNothing) {
  ResultSet sweep = MakeSweep();
  CaseSpec spec;
  spec.technique = "near";
  spec.device = DEVICE_TYPE_CUDA;
  *sweep.add_cases() = MakeUnmeasured(spec, Outcome::STATUS_SKIPPED, "cuda: no device");
  EXPECT_FALSE(CompareOrDie(sweep, sweep).regressed());
}

TEST(Compare, OtherHardwareOrFlagsCannotBeComparedUnlessAllowed) {
  ResultSet now = MakeSweep();
  now.mutable_environments(0)->set_cpu_model("Another CPU");
  now.mutable_environments(0)->set_compile_flags("-O0");
  const absl::Status status = Compare(MakeSweep(), now, {}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(std::string(status.message()),
            "the environments differ: compiler flags: -O2 / -O0; processor: Imaginary CPU 9000 / "
            "Another CPU; --allow_different_environment compares what does not depend on them");
  CompareOptions options;
  options.allow_different_environment = true;
  EXPECT_FALSE(CompareOrDie(MakeSweep(), now, options).regressed());
  Slow(1.5, "near", &now);
  EXPECT_TRUE(CompareOrDie(MakeSweep(), now, options).regressed());
  options.metric = CompareOptions::Metric::kAbsolute;
  EXPECT_FALSE(CompareOrDie(MakeSweep(), now, options).regressed());
}

TEST(Compare, AnotherCommitAndAnUnusedGpuAreNoDifference) {
  ResultSet now = MakeSweep();
  now.mutable_environments(0)->set_git_commit("feedface");
  now.mutable_environments(0)->add_gpus()->set_name("A GPU");
  EXPECT_FALSE(CompareOrDie(MakeSweep(), now).regressed());
}

TEST(Compare, NothingInCommonCannotBeCompared) {
  EXPECT_EQ(Compare(MakeSweep(), ResultSet(), {}).status().code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(Compare(ResultSet(), ResultSet(), {}).status().code(),
            absl::StatusCode::kFailedPrecondition);
}

TEST(Compare, RefusesFactorsThatAreNone) {
  CompareOptions options;
  options.threshold = 0.9;
  EXPECT_EQ(std::string(Compare(MakeSweep(), MakeSweep(), options).status().message()),
            "--threshold=0.9: a factor above 1 is wanted");
  options.threshold = std::numeric_limits<double>::quiet_NaN();
  EXPECT_FALSE(Compare(MakeSweep(), MakeSweep(), options).ok());
}

TEST(RenderComparison, ListsRegressionsAndCounts) {
  ResultSet base;
  *base.add_environments() = MakeEnvironment();
  CaseSpec spec;
  *base.add_cases() = MakeCase(spec);
  spec.technique = "near";
  *base.add_cases() = MakeCase(spec);
  base.mutable_cases(1)->mutable_outcome()->mutable_timing()->clear_setup_ns();
  ResultSet now = base;
  Slow(1.5, "near", &now);
  const Comparison comparison = CompareOrDie(base, now);
  EXPECT_EQ(RenderComparison(comparison, ComparisonFormat::kTerminal, false, TextStyle()),
            "Regressions\n"
            "what                 base   now  change  95% interval  case\n"
            "run time over dense  1.00  1.50   1.50x  1.48 to 1.52  "
            "near, cpu f32, 512 tokens, 8 heads of 64, causal, gaussian\n"
            "\n"
            "2 cases in both, 0 missing, 0 new; of their numbers 1 regressed, 0 improved, 0 "
            "ambiguous, 0 not judged, 4 same\n"
            "regressed\n");
  EXPECT_TRUE(absl::StrContains(
      RenderComparison(comparison, ComparisonFormat::kMarkdown, false, TextStyle()),
      "| **run time over dense** | 1.00 | 1.50 | 1.50x | 1.48 to 1.52 | near, cpu f32,"));

  const auto json = nlohmann::json::parse(
      RenderComparison(comparison, ComparisonFormat::kJson, false, TextStyle()));
  EXPECT_EQ(json["format"], "tfb.Comparison/1");
  EXPECT_EQ(json["regressed"], true);
  EXPECT_EQ(json["counts"]["regressed"], 1);
  ASSERT_EQ(json["findings"].size(), 5u);
  EXPECT_EQ(json["findings"][0]["verdict"], "SLOWER");
  EXPECT_NEAR(json["findings"][0]["change"].get<double>(), 1.5, 1e-9);
  EXPECT_GT(json["findings"][0]["low"].get<double>(), 1.4);
  EXPECT_EQ(json["findings"][1]["verdict"], "SAME");
}

TEST(RenderComparison, NarrowsCasesAndReasonsToWhatCanBeRead) {
  Comparison comparison;
  Finding finding;
  finding.what = "run time";
  finding.subject = std::string(60, 'x');
  finding.verdict = Verdict::kNotJudged;
  finding.reason = std::string(60, 'y');
  comparison.findings = {finding, finding};
  comparison.findings[1].reason = "z";
  TextStyle style;
  style.width = 20;
  const std::string text = RenderComparison(comparison, ComparisonFormat::kTerminal, true, style);
  EXPECT_TRUE(absl::StrContains(text, " " + std::string(29, 'x') + "…\n")) << text;
  EXPECT_TRUE(absl::StrContains(text, "run time  " + std::string(11, 'y') + "…\n")) << text;
  EXPECT_TRUE(absl::StrContains(text, "run time  z\n")) << text;
}

TEST(RenderComparison, JsonHasNoNumberThatJsonLacks) {
  ResultSet now = MakeSweep();
  Find("sketch", Case::PURPOSE_ACCURACY, &now)
      ->mutable_outcome()
      ->mutable_against_dense()
      ->set_relative_frobenius(std::numeric_limits<double>::quiet_NaN());
  const auto json = nlohmann::json::parse(RenderComparison(
      CompareOrDie(MakeSweep(), now), ComparisonFormat::kJson, false, TextStyle()));
  EXPECT_EQ(json["findings"][0]["verdict"], "WORSE");
  EXPECT_EQ(json["findings"][0]["change"], "NaN");
}

TEST(ParseComparisonFormat, NamesWhatIsAllowed) {
  EXPECT_EQ(*ParseComparisonFormat("json"), ComparisonFormat::kJson);
  EXPECT_EQ(std::string(ParseComparisonFormat("yaml").status().message()),
            "--format: \"yaml\" is none of terminal, markdown, comment, json");
}

// Sets the times of all setups of `technique`, as a share of their runs.
void SetSetups(double share, const std::string& technique, ResultSet* results) {
  for (Case& result : *results->mutable_cases()) {
    if (result.key().technique() != technique) continue;
    Timing* timing = result.mutable_outcome()->mutable_timing();
    for (int i = 0; i < timing->setup_ns_size(); ++i) {
      timing->set_setup_ns(i, share * timing->run_ns(i));
    }
  }
}

TEST(Compare, ASetupThatWasNegligibleAndIsLargeRegresses) {
  for (const double share : {0.0, 1e-6, 0.04}) {
    ResultSet base = MakeSweep();
    SetSetups(share, "near", &base);
    ResultSet now = base;
    EXPECT_FALSE(CompareOrDie(base, now).regressed()) << share;
    SetSetups(0.5, "near", &now);
    const Comparison comparison = CompareOrDie(base, now);
    EXPECT_EQ(comparison.Count(Verdict::kRegressed), 5) << share << Text(comparison);
    const Finding& finding = comparison.findings.front();
    EXPECT_TRUE(absl::StartsWith(finding.what, "setup time")) << finding.what;
    EXPECT_NEAR(finding.change, 0.5 / 0.05, 0.01) << share;
    EXPECT_EQ(CompareOrDie(now, base).Count(Verdict::kImproved), 5) << share;
  }
}

TEST(Compare, SetupsBelowAShareOfTheirRunsAreNotJudged) {
  ResultSet base = MakeSweep();
  SetSetups(0.01, "near", &base);
  ResultSet now = base;
  SetSetups(0.0499, "near", &now);
  EXPECT_FALSE(CompareOrDie(base, now).regressed());
  SetSetups(0.06, "near", &now);  // 1.2 times the least that is judged
  EXPECT_EQ(CompareOrDie(base, now).Count(Verdict::kRegressed), 5);
  SetSetups(std::nan(""), "near", &now);
  EXPECT_EQ(CompareOrDie(base, now).Count(Verdict::kRegressed), 5);
}

TEST(Compare, ASetupThatIsNegligibleOnBothSidesIsNoFindingEvenWhereItVanishes) {
  const auto setups_of_near = [](double before, double after, bool vanishes) {
    ResultSet base = MakeSweep();
    SetSetups(before, "near", &base);
    ResultSet now = base;
    SetSetups(after, "near", &now);
    for (Case& result : *now.mutable_cases()) {
      if (vanishes) result.mutable_outcome()->mutable_timing()->clear_setup_ns();
    }
    int count = 0;
    for (const Finding& finding : CompareOrDie(base, now).findings) {
      count += absl::StartsWith(finding.what, "setup time") &&
               absl::StrContains(finding.subject, "near");
    }
    return count;
  };
  EXPECT_EQ(setups_of_near(0.01, 0.0499, false), 0);
  EXPECT_EQ(setups_of_near(0.01, 0.01, true), 0);
  EXPECT_EQ(setups_of_near(0.01, 0.06, false), 5);
  EXPECT_EQ(setups_of_near(0.06, 0.01, false), 5);
  EXPECT_EQ(setups_of_near(0.06, 0.01, true), 5);
}

// Returns the verdict from an interval alone.
Verdict VerdictOf(const RatioInterval& interval, double threshold) {
  if (interval.low > threshold) return Verdict::kRegressed;
  if (interval.high < 1 / threshold) return Verdict::kImproved;
  const bool inside = interval.low >= 1 / threshold && interval.high <= threshold;
  return inside ? Verdict::kSame : Verdict::kAmbiguous;
}

TEST(Compare, TheVerdictOfATimeFollowsFromItsIntervalForEveryFactorAndThreshold) {
  std::set<Verdict> seen;
  for (const double threshold : {1.02, 1.05, 1.3}) {
    for (double factor = 0.7; factor < 1.45; factor += 0.083) {
      ResultSet now = MakeSweep();
      Slow(factor, "near", &now);
      CompareOptions options;
      options.threshold = threshold;
      options.metric = CompareOptions::Metric::kAbsolute;
      for (const Finding& finding : CompareOrDie(MakeSweep(), now, options).findings) {
        if (!finding.is_time) continue;
        ASSERT_TRUE(finding.interval.has_value());
        EXPECT_LE(finding.interval->low, finding.change);
        EXPECT_GE(finding.interval->high, finding.change);
        EXPECT_NEAR(finding.change, absl::StartsWith(finding.subject, "near") ? factor : 1, 1e-9);
        EXPECT_EQ(finding.verdict, VerdictOf(*finding.interval, threshold))
            << finding.what << " of " << finding.subject << ": " << finding.interval->low << " to "
            << finding.interval->high;
        seen.insert(finding.verdict);
      }
    }
  }
  EXPECT_EQ(seen.size(), 4u);
}

// Compares where the time of dense changed by the factor `dense`, and the technique's by `own`.
Verdict VerdictBeside(double dense, double own) {
  ResultSet base = MakeSweep(), now = MakeSweep();
  SetProbes(1e5, &base);
  SetProbes(1e5, &now);
  Slow(dense, "plain", &now);
  Slow(own, "near", &now);
  for (const Finding& finding : CompareOrDie(base, now).findings) {
    if (finding.what == "run time over dense" && absl::StartsWith(finding.subject, "near")) {
      return finding.verdict;
    }
  }
  ADD_FAILURE() << "the time was not compared";
  return Verdict::kNotJudged;
}

TEST(Compare, AChangeOverDenseCountsWhereHalfOfItIsItsOwnOrItIsSureByItself) {
  // Over dense 1.2 times: half of that is 1.095.
  EXPECT_EQ(VerdictBeside(1.095 / 1.2, 1.0955), Verdict::kRegressed);
  EXPECT_EQ(VerdictBeside(1.03 / 1.2, 1.03), Verdict::kAmbiguous);
  EXPECT_EQ(VerdictBeside(1.2 / 1.095, 1 / 1.0955), Verdict::kImproved);
  EXPECT_EQ(VerdictBeside(1.2 / 1.03, 1 / 1.03), Verdict::kAmbiguous);
  // Twice as long over dense, of which a fifth is its own: little of it, and sure.
  EXPECT_EQ(VerdictBeside(0.6, 1.2), Verdict::kRegressed);
  EXPECT_EQ(VerdictBeside(1 / 0.6, 1 / 1.2), Verdict::kImproved);
  const double half = std::sqrt(CompareOptions().threshold);
  for (const double own : {1 / half, 1.0, half * 1.001}) {
    EXPECT_EQ(VerdictBeside(0.5, own), Verdict::kAmbiguous) << own;
    EXPECT_EQ(VerdictBeside(2, 1 / own), Verdict::kAmbiguous) << own;
  }
}

// Thirty techniques that did not change, of 2 % noise, beside a dense that became a tenth faster.
TEST(Compare, WhatDidNotChangeIsNotSlowerWhereDenseIsFaster) {
  std::mt19937_64 random(7);
  std::normal_distribution<double> noise(0, 0.02);
  const auto sweep = [&](double of_dense) {
    ResultSet results = MakeSweep();
    const ResultSet one = results;
    for (int copy = 0; copy < 30; ++copy) {
      for (const Case& given : one.cases()) {
        if (given.key().technique() != "near") continue;
        Case* added = results.add_cases();
        *added = given;
        added->mutable_key()->set_seed(given.key().seed());
        (*added->mutable_key()->mutable_options())["copy"] = std::to_string(copy);
        added->mutable_key()->set_options_text(absl::StrCat("copy=", copy));
      }
    }
    SetProbes(1e5, &results);
    for (Case& each : *results.mutable_cases()) {
      const bool is_dense = each.key().technique() == "plain";
      for (double& ns : *each.mutable_outcome()->mutable_timing()->mutable_run_ns()) {
        ns *= std::exp(noise(random)) * (is_dense ? of_dense : 1);
      }
    }
    return results;
  };
  const Comparison comparison = CompareOrDie(sweep(1), sweep(0.9));
  int over_dense = 0;
  for (const Finding& finding : comparison.findings) {
    over_dense += finding.what == "run time over dense" ? 1 : 0;
    EXPECT_NE(finding.verdict, Verdict::kRegressed) << finding.what << " of " << finding.subject;
  }
  EXPECT_GE(over_dense, 30);
}

TEST(Compare, ChangesOfErrorsAndMemoryAreRatiosWithTheirThresholds) {
  const auto verdict = [](const std::string& what, const CompareOptions& options, double factor) {
    ResultSet now = MakeSweep();
    for (Case& result : *now.mutable_cases()) {
      if (result.key().technique() != "near") continue;
      Outcome* outcome = result.mutable_outcome();
      outcome->set_peak_workspace_bytes(
          static_cast<uint64_t>(factor * static_cast<double>(outcome->peak_workspace_bytes())));
      if (!outcome->has_against_dense()) continue;
      ErrorMeasure* dense = outcome->mutable_against_dense();
      dense->set_relative_frobenius(factor * dense->relative_frobenius());
    }
    for (const Finding& finding : CompareOrDie(MakeSweep(), now, options).findings) {
      if (finding.what != what || !absl::StartsWith(finding.subject, "near")) continue;
      EXPECT_NEAR(finding.change, factor, 1e-2) << what;
      return finding.verdict;
    }
    ADD_FAILURE() << what << " was not compared";
    return Verdict::kNotJudged;
  };
  const CompareOptions options;
  EXPECT_EQ(verdict("working memory", options, 1.01 * options.memory_threshold),
            Verdict::kRegressed);
  EXPECT_EQ(verdict("working memory", options, 0.99 * options.memory_threshold), Verdict::kSame);
  EXPECT_EQ(verdict("working memory", options, 0.99 / options.memory_threshold),
            Verdict::kImproved);
  EXPECT_EQ(verdict("error against dense", options, 1.01 * options.error_threshold),
            Verdict::kRegressed);
  EXPECT_EQ(verdict("error against dense", options, 0.99 * options.error_threshold),
            Verdict::kSame);
  EXPECT_EQ(verdict("error against dense", options, 0.99 / options.error_threshold),
            Verdict::kImproved);
}

TEST(Compare, FindingsComeWorstFirst) {
  ResultSet now = MakeSweep();
  double factor = 1.2;
  for (Case& result : *now.mutable_cases()) {
    Timing* timing = result.mutable_outcome()->mutable_timing();
    if (result.key().technique() != "near") continue;
    for (double& ns : *timing->mutable_run_ns()) ns *= factor;
    factor *= result.key().problem().query_tokens() % 1024 == 0 ? 0.6 : 1.7;
  }
  const Comparison comparison = CompareOrDie(MakeSweep(), now);
  for (size_t i = 1; i < comparison.findings.size(); ++i) {
    const Finding &a = comparison.findings[i - 1], &b = comparison.findings[i];
    ASSERT_LE(a.verdict, b.verdict);
    if (a.verdict != b.verdict || a.change == 1 || b.change == 1) continue;
    EXPECT_GE(std::fabs(std::log(a.change)), std::fabs(std::log(b.change)));
  }
  EXPECT_GT(comparison.Count(Verdict::kRegressed), 1);
}

TEST(Compare, OptionsOutOfRangeAreRefusedByName) {
  const auto message = [](double CompareOptions::*option, double value) {
    CompareOptions options;
    options.*option = value;
    const absl::Status status = Compare(MakeSweep(), MakeSweep(), options).status();
    EXPECT_TRUE(status.ok() || status.code() == absl::StatusCode::kInvalidArgument) << status;
    return std::string(status.message());
  };
  const std::pair<std::string, double CompareOptions::*> factors[] = {
      {"threshold", &CompareOptions::threshold},
      {"memory_threshold", &CompareOptions::memory_threshold},
      {"error_threshold", &CompareOptions::error_threshold}};
  for (const auto& [name, option] : factors) {
    EXPECT_EQ(message(option, 1), absl::StrCat("--", name, "=1: a factor above 1 is wanted"));
    EXPECT_EQ(message(option, HUGE_VAL),
              absl::StrCat("--", name, "=inf: a factor above 1 is wanted"));
    EXPECT_EQ(message(option, std::nan("")),
              absl::StrCat("--", name, "=nan: a factor above 1 is wanted"));
    EXPECT_EQ(message(option, 1.001), "");
  }
  EXPECT_EQ(message(&CompareOptions::error_floor, -1), "--error_floor=-1: 0 or more is wanted");
  EXPECT_EQ(message(&CompareOptions::error_floor, std::nan("")),
            "--error_floor=nan: 0 or more is wanted");
  EXPECT_EQ(message(&CompareOptions::error_floor, 0), "");
}

TEST(Compare, WhatHasNothingInCommonSaysInWhichFields) {
  const auto set_of = [](const std::vector<int64_t>& lengths, const std::string& technique) {
    ResultSet results;
    for (const int64_t tokens : lengths) {
      CaseSpec spec;
      spec.technique = technique;
      spec.tokens = tokens;
      *results.add_cases() = MakeCase(spec);
    }
    return results;
  };
  const auto message = [](const ResultSet& base, const ResultSet& now) {
    return std::string(Compare(base, now, {}).status().message());
  };
  EXPECT_EQ(
      message(set_of({1, 2, 3, 4}, "plain"), set_of({5, 6, 7, 8, 9}, "plain")),
      "the two have no case in common (4 and 5 cases); lengths: 1, 2, 3, 4 / 5, 6, 7, 8, ...");
  EXPECT_EQ(message(set_of({1, 2}, "plain"), set_of({2}, "near")),
            "the two have no case in common (2 and 1 cases); techniques: plain / near");
  EXPECT_EQ(
      message(set_of({1}, "plain"), set_of({2}, "n\x1b")),
      "the two have no case in common (1 and 1 cases); lengths: 1 / 2; techniques: plain / n?");
  EXPECT_EQ(message(set_of({1}, "plain"), ResultSet()),
            "the two have no case in common (1 and 0 cases)");
  // Every value is there on both sides, and no combination of them.
  ResultSet base = set_of({1}, "plain"), now = set_of({2}, "plain");
  base.MergeFrom(set_of({2}, "near"));
  now.MergeFrom(set_of({1}, "near"));
  EXPECT_EQ(message(base, now), "the two have no case in common (2 and 2 cases)");
  // Another precision is offered only where nothing else differs.
  now = set_of({2}, "plain");
  now.mutable_cases(0)->mutable_key()->set_dtype(ELEMENT_TYPE_F16);
  EXPECT_EQ(
      message(set_of({1}, "plain"), now),
      "the two have no case in common (1 and 1 cases); element types: f32 / f16; lengths: 1 / 2");
}

TEST(Compare, AnEnvironmentDiffersInWhatItsCasesDependOn) {
  const auto differences = [](DeviceType device, void (*change)(Environment*)) {
    ResultSet base;
    *base.add_environments() = MakeEnvironment();
    CaseSpec spec;
    spec.device = device;
    *base.add_cases() = MakeCase(spec);
    ResultSet now = base;
    change(now.mutable_environments(0));
    CompareOptions options;
    options.allow_different_environment = true;
    return absl::StrJoin(CompareOrDie(base, now, options).environment_differences, "; ");
  };
  const struct {
    void (*change)(Environment*);
    const char* of_cpu;
    const char* of_gpu;
  } kRows[] = {
      {[](Environment* e) { e->clear_cpu_model(); }, "processor: Imaginary CPU 9000 / unknown",
       "processor: Imaginary CPU 9000 / unknown"},
      {[](Environment* e) { e->set_logical_cores(4); }, "cores: 2 / 4", "cores: 2 / 4"},
      {[](Environment* e) { e->add_simd("AVX2"); }, "SIMD: AVX-512 / AVX-512 AVX2",
       "SIMD: AVX-512 / AVX-512 AVX2"},
      {[](Environment* e) { e->set_compiler("clang"); }, "compiler: g++ 12.2.0 / clang",
       "compiler: g++ 12.2.0 / clang"},
      {[](Environment* e) { e->set_compile_flags("-O1"); }, "compiler flags: -O2 / -O1",
       "compiler flags: -O2 / -O1"},
      {[](Environment* e) { e->set_compilation_mode("dbg"); }, "compilation mode: opt / dbg",
       "compilation mode: opt / dbg"},
      {[](Environment* e) {
         e->add_gpus()->set_name("one");
         e->mutable_gpus(0)->set_compute_capability("9.0");
         e->add_gpus()->set_name("two");
       },
       "", "GPU: unknown / one (9.0) + two ()"},
      {[](Environment* e) { e->set_cuda_compiler("nvcc"); }, "", "CUDA compiler: unknown / nvcc"},
      {[](Environment* e) {
         e->set_git_commit("feed");
         e->set_threads(1);
       },
       "", ""}};
  for (const auto& row : kRows) {
    EXPECT_EQ(differences(DEVICE_TYPE_CPU, row.change), row.of_cpu);
    EXPECT_EQ(differences(DEVICE_TYPE_CUDA, row.change), row.of_gpu);
  }
}

TEST(Compare, AStatusIsJudgedByWhatItWas) {
  using Status = Outcome::Status;
  const auto verdict = [](Status before, Status after, bool allow_missing) {
    const auto set_of = [](Status status) {
      ResultSet results;
      *results.add_cases() = MakeUnmeasured(CaseSpec(), status, "a reason");
      return results;
    };
    CompareOptions options;
    options.allow_missing = allow_missing;
    const Comparison comparison = CompareOrDie(set_of(before), set_of(after), options);
    EXPECT_EQ(comparison.findings.size(), before == after ? 0u : 1u);
    return comparison.findings.empty() ? Verdict::kSame : comparison.findings[0].verdict;
  };
  const Status all[] = {Outcome::STATUS_UNSPECIFIED,  Outcome::STATUS_OK,
                        Outcome::STATUS_FAILED,       Outcome::STATUS_SKIPPED,
                        Outcome::STATUS_UNSUPPORTED,  Outcome::STATUS_TIMEOUT,
                        Outcome::STATUS_OUT_OF_MEMORY};
  for (const Status before : all) {
    for (const Status after : all) {
      const bool not_tried =
          after == Outcome::STATUS_SKIPPED || after == Outcome::STATUS_UNSUPPORTED;
      Verdict expected = Verdict::kNotJudged;
      if (before == after) {
        expected = Verdict::kSame;
      } else if (after == Outcome::STATUS_OK) {
        // A case that was not tried before is measured for the first time.
        const bool tried = before == Outcome::STATUS_FAILED || before == Outcome::STATUS_TIMEOUT ||
                           before == Outcome::STATUS_OUT_OF_MEMORY;
        if (tried) expected = Verdict::kImproved;
      } else if (after == Outcome::STATUS_FAILED || before == Outcome::STATUS_OK) {
        expected = Verdict::kRegressed;
      }
      EXPECT_EQ(verdict(before, after, false), expected) << before << " to " << after;
      if (before == Outcome::STATUS_OK && not_tried) expected = Verdict::kNotJudged;
      EXPECT_EQ(verdict(before, after, true), expected) << before << " to " << after;
    }
  }
}

TEST(Compare, ErrorsAreJudgedFromTheFloorOn) {
  const double kNan = std::nan("");
  const struct {
    double floor, before, after;
    Verdict verdict;
    double change;
  } kRows[] = {
      {1e-5, 0.1, 0.25, Verdict::kRegressed, 2.5},  // at the threshold of 2 or beyond
      {1e-5, 0.1, 0.2, Verdict::kRegressed, 2},
      {1e-5, 0.1, 0.19, Verdict::kSame, 1.9},
      {1e-5, 0.2, 0.1, Verdict::kImproved, 0.5},
      {1e-5, 1e-9, 1.9e-5, Verdict::kSame, 1.9e4},
      {1e-5, 1e-9, 2e-5, Verdict::kRegressed, 2e4},
      {1e-5, 2e-5, 0, Verdict::kImproved, 0},
      {0, 0, 0, Verdict::kSame, 1},
      {0, 0, 1e-9, Verdict::kRegressed, HUGE_VAL},
      {0, 1e-9, 0, Verdict::kImproved, 0},
      {1e-5, kNan, 0.1, Verdict::kImproved, kNan},
      {1e-5, 0.1, kNan, Verdict::kRegressed, kNan},
      {1e-5, kNan, kNan, Verdict::kSame, kNan},
      {1e-5, 0.1, HUGE_VAL, Verdict::kRegressed, HUGE_VAL},
      {1e-5, HUGE_VAL, HUGE_VAL, Verdict::kSame, 1},
      {1e-5, HUGE_VAL, 0.1, Verdict::kImproved, 0},
  };
  const auto set_of = [](double error) {
    ResultSet results;
    CaseSpec spec;
    spec.purpose = Case::PURPOSE_ACCURACY;
    spec.median_ns = 0;
    Outcome* outcome = (*results.add_cases() = MakeCase(spec)).mutable_outcome();
    for (ErrorMeasure* measure :
         {outcome->mutable_against_definition(), outcome->mutable_against_dense()}) {
      measure->clear_passed();  // without a bound the definition's error is judged alike
      measure->set_relative_frobenius(error);
    }
    return results;
  };
  for (const auto& row : kRows) {
    CompareOptions options;
    options.error_threshold = 2;
    options.error_floor = row.floor;
    int errors = 0;
    for (const Finding& finding :
         CompareOrDie(set_of(row.before), set_of(row.after), options).findings) {
      if (!absl::StartsWith(finding.what, "error")) continue;
      ++errors;
      const std::string name = absl::StrCat(finding.what, ": ", row.before, " to ", row.after);
      EXPECT_EQ(finding.verdict, row.verdict) << name;
      if (row.before == row.after) {
        EXPECT_EQ(finding.change, 1) << name;
      } else if (std::isfinite(row.before) && std::isfinite(row.after) &&
                 std::isfinite(row.change)) {
        EXPECT_NEAR(finding.change, row.change, 1e-9 * row.change) << name;
      } else if (std::isinf(row.change)) {
        EXPECT_EQ(finding.change, row.change) << name;
      }
    }
    EXPECT_EQ(errors, 2);
  }
}

TEST(Compare, InstructionsThatVanishCountAndWhatLacksThemAllIsNamed) {
  const auto with_counts = [](int first) {
    ResultSet results = MakeSweep();
    for (int i = first; i < results.cases_size(); ++i) {
      Timing* timing = results.mutable_cases(i)->mutable_outcome()->mutable_timing();
      for (const double count : {1e9, 1e9}) timing->add_run_instructions(count);
    }
    return results;
  };
  CompareOptions options;
  options.metric = CompareOptions::Metric::kInstructions;
  const std::string rest =
      " has no counts of instructions: the kernel of a machine grants them where it has a counter "
      "and perf_event_paranoid is at most 2";
  EXPECT_EQ(std::string(Compare(MakeSweep(), with_counts(0), options).status().message()),
            "--metric=instructions: BASE" + rest);
  EXPECT_EQ(std::string(Compare(with_counts(0), MakeSweep(), options).status().message()),
            "--metric=instructions: NEW" + rest);
  const Comparison comparison = CompareOrDie(with_counts(3), with_counts(5), options);
  EXPECT_EQ(comparison.Count(Verdict::kRegressed), 2) << Text(comparison);
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(comparison.findings[i].what, "instructions");
    EXPECT_EQ(comparison.findings[i].base, "1.00e9");
    EXPECT_EQ(comparison.findings[i].now, "missing");
  }
  EXPECT_FALSE(CompareOrDie(with_counts(5), with_counts(3), options).regressed());
}

TEST(Compare, ProbesOfAnotherNumberThanTheRunsCountByTheirMedian) {
  ResultSet base = MakeSweep(), now = MakeSweep();
  SetProbes(1e5, &base);
  SetProbes(2e5, &now);
  Slow(2, "", &now);
  for (ResultSet* results : {&base, &now}) {
    for (Case& result : *results->mutable_cases()) {
      auto* probes = result.mutable_outcome()->mutable_timing()->mutable_probe_ns();
      if (probes->size() > 3) probes->Truncate(3);
    }
  }
  for (const Finding& finding : CompareOrDie(base, now).findings) {
    if (!finding.is_time) continue;
    EXPECT_NEAR(finding.change, 1, 1e-9);
    EXPECT_EQ(finding.verdict, Verdict::kSame) << finding.what;
    if (!absl::StartsWith(finding.subject, "plain")) continue;
    EXPECT_TRUE(absl::EndsWith(finding.what, " over fixed arithmetic beside it")) << finding.what;
    EXPECT_EQ(finding.base, finding.now);
  }
}

TEST(Compare, ThreeSamplesAreEnoughToJudge) {
  for (const int samples : {2, 3}) {
    ResultSet base = MakeSweep();
    for (Case& result : *base.mutable_cases()) {
      auto* run_ns = result.mutable_outcome()->mutable_timing()->mutable_run_ns();
      if (!run_ns->empty()) run_ns->Truncate(samples);
    }
    // The setups of the ten cases that are not dense are over its runs, of which there are two.
    EXPECT_EQ(CompareOrDie(base, base).Count(Verdict::kNotJudged), samples == 2 ? 15 + 10 : 0);
  }
}

// A comparison of `count` ambiguous times of techniques t0, t1, ...
Comparison MakeAmbiguous(int count) {
  Comparison comparison;
  comparison.cases = 1;
  comparison.now_environments = {MakeEnvironment()};
  for (int i = 0; i < count; ++i) {
    Finding& finding = comparison.findings.emplace_back();
    finding.what = "run time";
    finding.subject = absl::StrCat("t", i, i % 2 == 0 ? " window=1, cpu" : ", cpu");
    finding.case_key = MakeCase(CaseSpec()).key();
    finding.case_key.set_technique(absl::StrCat("t", i % 13));
    finding.spec = absl::StrCat(finding.case_key.technique(), i % 2 == 0 ? ":window=1" : "");
    finding.is_time = true;
    finding.verdict = Verdict::kAmbiguous;
  }
  Finding& memory = comparison.findings.emplace_back();
  memory.subject = "not a time";
  memory.verdict = Verdict::kAmbiguous;
  return comparison;
}

TEST(RenderComparison, AdvisesMoreSamplesOfUpToTwelveTechniques) {
  const auto text = [](int count, bool all) {
    return RenderComparison(MakeAmbiguous(count), ComparisonFormat::kTerminal, all, TextStyle());
  };
  const auto expected = [](int count, const std::string& times, const std::string& names,
                           const std::string& verdict) {
    return absl::StrCat(
        "1 case in both, 0 missing, 0 new; of their numbers 0 regressed, 0 improved, ", count + 1,
        " ambiguous, 0 not judged, 0 same (--all lists them)\n", times,
        " ambiguous; more samples of both builds, taken by turns, would tell:\n"
        "bazel run //harness:sweep -- --interleave_with=SWEEP_OF_BASE --rounds=8 --time_budget=0",
        names, " --lengths=512 --accuracy=false\ncannot be judged: of ", verdict,
        " ambiguous and 0 not judged\n");
  };
  EXPECT_EQ(text(1, false), expected(1, "1 time is", " --techniques=t0:window=1", "1 time 1 is"));
  EXPECT_EQ(text(2, false),
            expected(2, "2 times are", " --techniques=t0:window=1,t1", "2 times 2 are"));
  EXPECT_EQ(text(12, false),
            expected(12, "12 times are",
                     " --techniques=t0:window=1,t1,t10:window=1,t11,t2:window=1,t3,t4:window=1,t5,"
                     "t6:window=1,t7,t8:window=1,t9",
                     "12 times 12 are"));
  EXPECT_EQ(text(13, false), expected(13, "13 times are", "", "13 times 13 are"));
  EXPECT_EQ(
      text(0, false),
      "1 case in both, 0 missing, 0 new; of their numbers 0 regressed, 0 improved, 1 "
      "ambiguous, 0 not judged, 0 same (--all lists them)\ncannot be judged: no number of the "
      "1 case in both was measured on both sides and could be compared\n");
  EXPECT_FALSE(absl::StrContains(text(1, true), "--all"));
  EXPECT_EQ(RenderComparison(Comparison(), ComparisonFormat::kMarkdown, false, TextStyle()),
            "0 cases in both, 0 missing, 0 new; of their numbers 0 regressed, 0 improved, 0 "
            "ambiguous, 0 not judged, 0 same\ncannot be judged: no number of the 0 cases in both "
            "was measured on both sides and could be compared\n");
}

TEST(RenderComparison, AdvisesTheFlagsThatMeasureTheAmbiguousCasesAgain) {
  Comparison comparison = MakeAmbiguous(2);
  const auto flags = [&comparison] {
    const std::string advice = AmbiguityAdvice(comparison);
    const size_t begin = advice.find("--time_budget=0 ") + 16;
    return advice.substr(begin, advice.size() - 1 - begin);
  };
  Case::Key& first = comparison.findings[0].case_key;
  Case::Key& second = comparison.findings[1].case_key;
  EXPECT_EQ(flags(), "--techniques=t0:window=1,t1 --lengths=512 --accuracy=false");
  // Each property that the sweep would not take by itself.
  second.set_threads(1);
  second.set_dtype(ELEMENT_TYPE_BF16);
  second.set_pass(Case::PASS_TRAINING);
  second.mutable_input()->set_name("peaked");
  ProblemSize* problem = second.mutable_problem();
  problem->set_query_tokens(1024);
  problem->set_kv_tokens(1024);
  problem->set_batch(4);
  problem->set_query_heads(16);
  problem->set_kv_heads(2);
  problem->set_head_dim(32);
  problem->set_causal(!first.problem().causal());
  comparison.findings[0].spec = "t0:name=a b";
  EXPECT_EQ(flags(),
            "--techniques='t0:name=a b,t1' --lengths=512,1024 --accuracy=false "
            "--input=gaussian,peaked --dtypes=bf16,f32 --pass=forward,training --threads=1,2 "
            "--batches=1,4 --heads=8,16 --kv_heads=2 --head_dims=32,64 --causal=false,true");
}

TEST(RenderComparison, SaysInEveryFormatThatNothingCouldBeJudged) {
  ResultSet sweep;
  *sweep.add_environments() = MakeEnvironment();
  *sweep.add_cases() = MakeUnmeasured(CaseSpec(), Outcome::STATUS_SKIPPED, "no time");
  const Comparison comparison = CompareOrDie(sweep, sweep);
  EXPECT_FALSE(comparison.judged());
  const auto text = [&comparison](ComparisonFormat format) {
    return RenderComparison(comparison, format, false, TextStyle());
  };
  const std::string why =
      "no number of the 1 case in both was measured on both sides and could be compared";
  for (const ComparisonFormat format : {ComparisonFormat::kTerminal, ComparisonFormat::kMarkdown}) {
    EXPECT_TRUE(absl::EndsWith(text(format), absl::StrCat("\ncannot be judged: ", why, "\n")));
  }
  const auto json = nlohmann::json::parse(text(ComparisonFormat::kJson));
  EXPECT_EQ(json.at("judged"), false);
  EXPECT_EQ(json.at("why_not_judged"), why);
  const std::string comment = text(ComparisonFormat::kComment);
  EXPECT_TRUE(absl::StrContains(comment, "### Cannot be judged: ")) << comment;
  EXPECT_TRUE(absl::StrContains(comment, absl::StrCat("\n\nThere is no verdict: ", why, ".\n\n")))
      << comment;
  EXPECT_TRUE(CompareOrDie(MakeSweep(), MakeSweep()).judged());
}

}  // namespace
}  // namespace tfb
