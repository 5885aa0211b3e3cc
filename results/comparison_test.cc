#include "results/comparison.h"

#include <limits>
#include <random>
#include <string>

#include "absl/strings/match.h"
#include "gtest/gtest.h"
#include "results/synthetic.h"

namespace tfb {
namespace {

using ::tfb::synthetic::CaseSpec;
using ::tfb::synthetic::MakeCase;
using ::tfb::synthetic::MakeEnvironment;
using ::tfb::synthetic::MakeSweep;
using ::tfb::synthetic::MakeUnmeasured;

// Multiplies the times of `technique`, of all where it is empty.
void Slow(double factor, const std::string& technique, ResultSet* results) {
  for (Case& result : *results->mutable_cases()) {
    if (!technique.empty() && result.key().technique() != technique) continue;
    Timing* timing = result.mutable_outcome()->mutable_timing();
    for (double& ns : *timing->mutable_run_ns()) ns *= factor;
    for (double& ns : *timing->mutable_setup_ns()) ns *= factor;
  }
}

// The measured peaks with them: as a slower machine has both.
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
  return RenderComparison(comparison, false, true, TextStyle());
}

TEST(Compare, ASetAgainstItselfHasNothing) {
  const ResultSet sweep = MakeSweep();
  const Comparison comparison = CompareOrDie(sweep, sweep);
  EXPECT_FALSE(comparison.regressed());
  EXPECT_EQ(comparison.Count(Verdict::kUnchanged), static_cast<int>(comparison.findings.size()));
  EXPECT_EQ(comparison.cases, sweep.cases_size());
}

TEST(Compare, ASlowerTechniqueRegresses) {
  ResultSet now = MakeSweep();
  Slow(1.3, "near", &now);
  const Comparison comparison = CompareOrDie(MakeSweep(), now);
  EXPECT_EQ(comparison.Count(Verdict::kRegressed), 10) << Text(comparison);  // run and setup of 5
  const Finding& worst = comparison.findings.front();
  EXPECT_EQ(worst.what, "run time over dense");
  EXPECT_NEAR(worst.change, 1.3, 1e-9);
  EXPECT_TRUE(absl::StrContains(worst.subject, "near window=256, cpu f32"));
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
  ResultSet now = MakeSweep();
  Slow(0.6, "plain", &now);
  const Comparison comparison = CompareOrDie(MakeSweep(), now);
  EXPECT_FALSE(comparison.regressed()) << Text(comparison);
  EXPECT_GT(comparison.Count(Verdict::kNotJudged), 0);
}

TEST(Compare, ChangesBelowTheThresholdAreUnchanged) {
  ResultSet now = MakeSweep();
  Slow(1.09, "near", &now);
  EXPECT_FALSE(CompareOrDie(MakeSweep(), now).regressed());
  CompareOptions options;
  options.threshold = 1.05;
  EXPECT_TRUE(CompareOrDie(MakeSweep(), now, options).regressed());
}

TEST(Compare, OverlappingIntervalsAreNoise) {
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
  EXPECT_EQ(comparison.Count(Verdict::kNoise), 5) << Text(comparison);
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
  ResultSet now = MakeSweep();
  Slow(2, "near", &now);
  for (Case& result : *now.mutable_cases()) {
    if (result.key().technique() != "near") continue;
    Timing* timing = result.mutable_outcome()->mutable_timing();
    timing->mutable_run_ns()->Truncate(2);
    timing->clear_setup_ns();
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
  ResultSet now = base;
  Slow(1.5, "near", &now);
  now.mutable_cases(1)->mutable_outcome()->mutable_timing()->clear_setup_ns();
  EXPECT_EQ(RenderComparison(CompareOrDie(base, now), false, false, TextStyle()),
            "Regressions\n"
            "what                 base   now  change  case\n"
            "run time over dense  1.00  1.50   1.50x  "
            "near, cpu f32, 512 tokens, 8 heads of 64, causal, gaussian\n"
            "\n"
            "2 cases in both, 0 missing, 0 new; of their numbers 1 regressed, 0 improved, 4 "
            "unchanged, 0 within noise, 0 not judged\n"
            "regressed\n");
  EXPECT_TRUE(
      absl::StrContains(RenderComparison(CompareOrDie(base, now), true, false, TextStyle()),
                        "| **run time over dense** | 1.00 | 1.50 | 1.50x | near, cpu f32,"));
}

}  // namespace
}  // namespace tfb
