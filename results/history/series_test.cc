#include "results/history/series.h"

#include <algorithm>
#include <cmath>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "results/history/summary.h"
#include "results/history/testing.h"
#include "results/synthetic.h"

namespace tfb {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using ::tfb::synthetic::CaseSpec;
using ::tfb::synthetic::MakeCase;

std::vector<StoredRun> Stored(const std::vector<HistoryRun>& runs) {
  std::vector<StoredRun> stored;
  for (const HistoryRun& run : runs) stored.push_back({RunName(run), run});
  return stored;
}

const HistorySeries* Find(const History& history, absl::string_view name, HistoryMetric metric,
                          int64_t tokens = 1024) {
  for (const HistorySeries& series : history.series) {
    if (series.name == name && series.metric == metric && series.tokens == tokens) return &series;
  }
  return nullptr;
}

HistoryRun RunWith(int number, const std::vector<std::pair<int64_t, double>>& times) {
  HistoryRun run = MakeHistoryRun(number);
  for (const auto& [tokens, time] : times) {
    HistoryCase* result = AddHistoryCase(&run, "near", tokens);
    result->set_group("technique=near");
    result->set_group_problem("cpu f32");
    AddHistoryValue(result, HISTORY_METRIC_TIME_OVER_DENSE, time);
  }
  return run;
}

TEST(Series, RunsAreInTheOrderOfTheirCommitsWhereAllHaveADate) {
  std::vector<HistoryRun> runs = {RunWith(0, {{1024, 1}}), RunWith(1, {{1024, 2}}),
                                  RunWith(2, {{1024, 3}})};
  // The first commit was measured last.
  runs[0].mutable_environments(0)->set_start_unix_ns(runs[2].environments(0).start_unix_ns() +
                                                     1'000'000'000);
  EXPECT_THAT(Find(MakeHistory(Stored(runs)), "near", HISTORY_METRIC_TIME_OVER_DENSE)->values,
              ElementsAre(1, 2, 3));
  runs[1].clear_commit_unix_s();
  EXPECT_THAT(Find(MakeHistory(Stored(runs)), "near", HISTORY_METRIC_TIME_OVER_DENSE)->values,
              ElementsAre(2, 3, 1));
}

TEST(Series, ARunWithoutACaseLeavesAGap) {
  const History history = MakeHistory(
      Stored({RunWith(0, {{1024, 1}}), RunWith(1, {{512, 2}}), RunWith(2, {{1024, 3}})}));
  const HistorySeries* series = Find(history, "near", HISTORY_METRIC_TIME_OVER_DENSE);
  EXPECT_THAT(series->runs, ElementsAre(0, 2));
  EXPECT_THAT(series->values, ElementsAre(1, 3));
  EXPECT_EQ(history.machines[0].runs.size(), 3);
}

TEST(Series, TheMeanOverLengthsIsGeometricAndOfRunsThatHaveThemAll) {
  const History history = MakeHistory(
      Stored({RunWith(0, {{512, 1}, {1024, 4}}), RunWith(1, {{512, 2}}),
              RunWith(2, {{256, 7}, {512, 2}, {1024, 8}}), RunWith(3, {{512, 3}, {1024, 12}})}));
  const HistorySeries* mean = Find(history, "near", HISTORY_METRIC_TIME_OVER_DENSE, 0);
  ASSERT_NE(mean, nullptr);
  EXPECT_EQ(mean->key, "technique=near");
  EXPECT_THAT(mean->problem, HasSubstr("mean of 2 lengths of 512 to 1024 tokens"));
  EXPECT_THAT(mean->runs, ElementsAre(0, 2, 3));
  EXPECT_THAT(mean->values,
              ElementsAre(testing::DoubleNear(2, 1e-12), testing::DoubleNear(4, 1e-12),
                          testing::DoubleNear(6, 1e-12)));
  // One length has no mean.
  EXPECT_EQ(Find(MakeHistory(Stored({RunWith(0, {{512, 1}})})), "near",
                 HISTORY_METRIC_TIME_OVER_DENSE, 0),
            nullptr);
}

TEST(Series, EveryCaseHasItsStatusAndTheLastReason) {
  std::vector<HistoryRun> runs = {RunWith(0, {{1024, 1}}), RunWith(1, {{1024, 1}})};
  runs[0].mutable_cases(0)->set_status(Outcome::STATUS_TIMEOUT);
  runs[0].mutable_cases(0)->set_reason("took\ntoo long");
  const History history = MakeHistory(Stored(runs));
  const HistorySeries* status = Find(history, "near", HISTORY_METRIC_STATUS);
  ASSERT_EQ(status->values.size(), 2);
  EXPECT_EQ(FormatValue(HISTORY_METRIC_STATUS, status->values[0]), "timeout");
  EXPECT_EQ(FormatValue(HISTORY_METRIC_STATUS, status->values[1]), "ok");
  EXPECT_EQ(status->reason, "took?too long");
}

TEST(Series, MetricsHaveNamesThatParse) {
  for (int metric = HistoryMetric_MIN + 1; metric <= HistoryMetric_MAX; ++metric) {
    const auto value = static_cast<HistoryMetric>(metric);
    EXPECT_EQ(ParseHistoryMetric(MetricName(value)).value(), value);
    EXPECT_NE(MetricTitle(value), "unspecified");
  }
  EXPECT_THAT(std::string(ParseHistoryMetric("speed").status().message()), HasSubstr("memory"));
}

TEST(MachineSignature, DependsOnWhatTimesDependOnAndNotOnTheHost) {
  Environment environment = synthetic::MakeEnvironment();
  const std::string signature = MachineSignature(environment);
  EXPECT_THAT(signature, HasSubstr("Imaginary CPU 9000"));
  environment.set_host("another");
  environment.set_memory_bytes(1);
  environment.set_compiler("another");
  EXPECT_EQ(MachineSignature(environment), signature);
  Environment more_cores = environment;
  more_cores.set_logical_cores(64);
  Environment other_caches = environment;
  other_caches.add_caches()->set_bytes(1 << 22);
  Environment with_gpu = environment;
  with_gpu.add_gpus()->set_name("GPU");
  for (const Environment& other : {more_cores, other_caches, with_gpu}) {
    EXPECT_NE(MachineSignature(other), signature);
  }
  environment.clear_cpu_model();
  EXPECT_EQ(MachineSignature(environment), "");
}

// A sweep of a technique that takes a fourth of dense's time, with one sample of 20 disturbed.
ResultSet SmallSweep() {
  ResultSet results;
  *results.add_environments() = synthetic::MakeEnvironment();
  CaseSpec spec;
  for (const char* technique : {"plain", "near"}) {
    spec.technique = technique;
    spec.median_ns = 0;
    Case* result = results.add_cases();
    *result = MakeCase(spec);
    const double time = spec.technique == "plain" ? 4e6 : 1e6;
    Timing* timing = result->mutable_outcome()->mutable_timing();
    timing->clear_run_ns();
    timing->clear_probe_ns();
    for (int sample = 0; sample < 21; ++sample) {
      timing->add_run_ns(sample == 7 ? 9 * time : time * (1 + 0.01 * sample));
      timing->add_probe_ns(1e5);
    }
    timing->add_setup_ns(0.5e6);
  }
  return results;
}

double ValueOf(const HistoryCase& result, HistoryMetric metric) {
  for (const HistoryValue& value : result.values()) {
    if (value.metric() == metric) return value.value();
  }
  return std::nan("");
}

TEST(Summary, TimesAreThoseThatATenthOfTheSamplesStayBelow) {
  const absl::StatusOr<HistoryRun> run = SummarizeRun(SmallSweep(), "folder/run.pb");
  ASSERT_TRUE(run.ok()) << run.status();
  EXPECT_EQ(run->file(), "run.pb");
  ASSERT_EQ(run->cases_size(), 2);
  const HistoryCase& dense = run->cases(0);
  const HistoryCase& near = run->cases(1);
  // With k = 2 + 7 / 15, (k - 1/3) / (21 + 1/3) is a tenth.
  const double of_near = 1e6 * (1 + 0.01 * (1 + 7.0 / 15)), of_dense = 4 * of_near;
  EXPECT_NEAR(ValueOf(near, HISTORY_METRIC_TIME), of_near, 1e-3);
  EXPECT_NEAR(ValueOf(near, HISTORY_METRIC_TIME_OVER_DENSE), 0.25, 1e-9);
  EXPECT_NEAR(ValueOf(near, HISTORY_METRIC_TIME_OVER_MACHINE), of_near / 1e5, 1e-6);
  EXPECT_NEAR(ValueOf(near, HISTORY_METRIC_SETUP), 0.5e6 / of_dense, 1e-6);
  EXPECT_TRUE(std::isnan(ValueOf(dense, HISTORY_METRIC_TIME_OVER_DENSE)));
  EXPECT_NEAR(ValueOf(dense, HISTORY_METRIC_TIME_OVER_MACHINE), of_dense / 1e5, 1e-6);
}

TEST(Summary, ATimeOverDenseIsThatOfTheVisitsInCommon) {
  ResultSet results = SmallSweep();
  Case *dense = results.mutable_cases(0), *near = results.mutable_cases(1);
  for (Case* result : {dense, near}) result->mutable_outcome()->mutable_timing()->clear_run_ns();
  synthetic::AddVisit(1, synthetic::Samples(4e6), dense);
  synthetic::AddVisit(2, synthetic::Samples(8e6), dense);  // the machine became slower
  synthetic::AddVisit(2, synthetic::Samples(2e6), near);
  const absl::StatusOr<HistoryRun> run = SummarizeRun(results, "run.pb");
  ASSERT_TRUE(run.ok()) << run.status();
  EXPECT_NEAR(ValueOf(run->cases(1), HISTORY_METRIC_TIME_OVER_DENSE), 0.25, 1e-9);
}

// Returns the median, over many sweeps of a case with this many samples, of the logarithm of its
// time over the true time that a tenth of all samples stay below.
double DeviationOfTime(int samples, double sigma, std::mt19937_64* random) {
  std::normal_distribution<double> normal(0, sigma);
  ResultSet results;
  *results.add_environments() = synthetic::MakeEnvironment();
  *results.add_cases() = MakeCase(CaseSpec());
  Timing* timing = results.mutable_cases(0)->mutable_outcome()->mutable_timing();
  constexpr double kTenthOfNormal = -1.2815515655446;
  std::vector<double> deviations;
  for (int round = 0; round < 2001; ++round) {
    timing->clear_run_ns();
    for (int i = 0; i < samples; ++i) timing->add_run_ns(1e6 * std::exp(normal(*random)));
    const absl::StatusOr<HistoryRun> run = SummarizeRun(results, "run.pb");
    if (!run.ok()) return std::nan("");
    deviations.push_back(std::log(ValueOf(run->cases(0), HISTORY_METRIC_TIME) / 1e6) -
                         kTenthOfNormal * sigma);
  }
  std::nth_element(deviations.begin(), deviations.begin() + 1000, deviations.end());
  return deviations[1000];
}

// The median of 2001 sweeps has a standard deviation of at most 0.05 %.
TEST(Summary, ATimeDoesNotDependOnTheNumberOfItsSamples) {
  std::mt19937_64 random(31);
  for (const int samples : {6, 8, 11, 20, 40}) {
    EXPECT_NEAR(DeviationOfTime(samples, 0.025, &random), 0, 0.003) << samples;
  }
  // The smallest of four stands for a share of 2/13.
  const double of_four = DeviationOfTime(4, 0.025, &random);
  EXPECT_GT(of_four, 0);
  EXPECT_LT(of_four, 0.009);
}

TEST(Summary, ATimeOfOneSampleIsThatSample) {
  ResultSet results = SmallSweep();
  for (Case& result : *results.mutable_cases()) {
    result.mutable_outcome()->mutable_timing()->mutable_run_ns()->Truncate(1);
  }
  const absl::StatusOr<HistoryRun> run = SummarizeRun(results, "run.pb");
  ASSERT_TRUE(run.ok()) << run.status();
  EXPECT_EQ(ValueOf(run->cases(0), HISTORY_METRIC_TIME), 4e6);
}

TEST(Summary, CasesOfOneTechniqueAtOtherLengthsHaveOneGroup) {
  ResultSet results;
  *results.add_environments() = synthetic::MakeEnvironment();
  CaseSpec spec;
  for (const int64_t tokens : {512, 1024}) {
    spec.tokens = tokens;
    *results.add_cases() = MakeCase(spec);
  }
  spec.seed = 2;
  *results.add_cases() = MakeCase(spec);
  const HistoryRun run = *SummarizeRun(results, "run.pb");
  EXPECT_EQ(run.cases(0).group(), run.cases(1).group());
  EXPECT_NE(run.cases(0).key(), run.cases(1).key());
  EXPECT_NE(run.cases(1).group(), run.cases(2).group());
  EXPECT_THAT(run.cases(0).group_problem(), Not(HasSubstr("tokens")));
}

TEST(Summary, EachPassIsACaseWithItsOwnGroupAndMemory) {
  ResultSet results;
  *results.add_environments() = synthetic::MakeEnvironment();
  CaseSpec spec;
  for (const Case::Pass pass : {Case::PASS_FORWARD, Case::PASS_BACKWARD, Case::PASS_TRAINING}) {
    spec.pass = pass;
    *results.add_cases() = MakeCase(spec);
  }
  const HistoryRun run = *SummarizeRun(results, "run.pb");
  std::set<std::string> keys, groups;
  for (const HistoryCase& result : run.cases()) {
    keys.insert(result.key());
    groups.insert(result.group());
  }
  EXPECT_EQ(keys.size(), 3u);
  EXPECT_EQ(groups.size(), 3u);
  EXPECT_THAT(run.cases(0).problem(), Not(HasSubstr("training")));
  EXPECT_THAT(run.cases(2).problem(), HasSubstr("causal, training step, "));
  EXPECT_THAT(run.cases(2).group_problem(), HasSubstr("causal, training step, "));
  EXPECT_EQ(ValueOf(run.cases(0), HISTORY_METRIC_MEMORY), 512 * 1024);
  EXPECT_EQ(ValueOf(run.cases(2), HISTORY_METRIC_MEMORY), 512 * 1024 + 8 * 512 * 65 * 4);
}

TEST(Summary, TheErrorOfABackwardPassIsThatOfItsWorstGradient) {
  ResultSet results = SmallSweep();
  Case& result = *results.mutable_cases(1);
  result.mutable_key()->set_pass(Case::PASS_BACKWARD);
  result.mutable_outcome()->clear_against_definition();
  for (const auto& [name, value] : {std::make_pair("q", 1e-7), {"k", 3e-7}}) {
    NamedError* error = result.mutable_outcome()->add_gradient_errors();
    error->set_name(name);
    error->mutable_error()->set_value(value);
    error->mutable_error()->set_bound(6e-5);
  }
  const HistoryRun run = *SummarizeRun(results, "run.pb");
  EXPECT_EQ(ValueOf(run.cases(1), HISTORY_METRIC_ERROR), 3e-7);
}

TEST(Summary, UnfinishedCasesAreLeftOutAndAFileOfThemRefused) {
  ResultSet results = SmallSweep();
  results.mutable_cases(1)->mutable_outcome()->set_unfinished(true);
  EXPECT_EQ(SummarizeRun(results, "run.pb")->cases_size(), 1);
  results.mutable_cases(0)->mutable_outcome()->set_unfinished(true);
  EXPECT_EQ(SummarizeRun(results, "run.pb").status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(SummarizeRun(ResultSet(), "run.pb").status().code(),
            absl::StatusCode::kFailedPrecondition);
}

TEST(Summary, ARunWithoutItsMachineIsRefused) {
  ResultSet results = SmallSweep();
  results.mutable_environments(0)->clear_cpu_model();
  const absl::Status status = SummarizeRun(results, "run.pb").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr("names no processor"));
  results.clear_environments();
  EXPECT_FALSE(SummarizeRun(results, "run.pb").ok());
}

}  // namespace
}  // namespace tfb
