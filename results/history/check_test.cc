#include "results/history/check.h"

#include <cmath>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "results/history/check_report.h"
#include "results/history/testing.h"

namespace tfb {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

constexpr int kRuns = 30;
constexpr int kChanged = 20;  // the first run that is different

// A value with noise of about half a percent, the same on every machine.
double Noisy(double value, int run, int which) {
  const auto wave = [&](double frequency) {
    return std::sin(frequency * (run + 1) + 78.233 * (which + 1));
  };
  return value * (1 + 0.003 * (wave(12.9898) + wave(4.1414) + wave(27.183)));
}

// A store of kRuns runs of dense and three techniques, to which tests do something.
class HistoryMaker {
 public:
  HistoryMaker() {
    for (int run = 0; run < kRuns; ++run) {
      runs_.push_back(MakeHistoryRun(run));
      AddTimes("dense", run, 1, 0);
      AddTimes("near", run, 0.25, 1);
      AddTimes("far", run, 2, 2);
      AddTimes("sketch", run, 0.5, 3);
    }
  }

  HistoryCase& CaseOf(int run, const std::string& name) {
    for (HistoryCase& result : *runs_[run].mutable_cases()) {
      if (result.name() == name) return result;
    }
    ADD_FAILURE() << name;
    return *runs_[run].mutable_cases(0);
  }
  // Multiplies a metric of a technique by `factor` from the run kChanged on, or in [begin, end).
  void Change(const std::string& name, HistoryMetric metric, double factor, int begin = kChanged,
              int end = kRuns) {
    for (int run = begin; run < end; ++run) {
      for (HistoryValue& value : *CaseOf(run, name).mutable_values()) {
        if (value.metric() == metric) value.set_value(value.value() * factor);
      }
    }
  }
  void ChangeTimes(const std::string& name, double factor, int begin = kChanged, int end = kRuns) {
    Change(name, HISTORY_METRIC_TIME_OVER_DENSE, factor, begin, end);
    Change(name, HISTORY_METRIC_TIME_OVER_MACHINE, factor, begin, end);
  }

  HistoryRun& run(int number) { return runs_[number]; }

  History Make() const {
    std::vector<StoredRun> stored;
    for (const HistoryRun& run : runs_) stored.push_back({RunName(run), run});
    return MakeHistory(stored);
  }

 private:
  void AddTimes(const std::string& name, int run, double over_dense, int which) {
    HistoryCase* result = AddHistoryCase(&runs_[run], name);
    if (name != "dense") {
      AddHistoryValue(result, HISTORY_METRIC_TIME_OVER_DENSE, Noisy(over_dense, run, which));
    }
    AddHistoryValue(result, HISTORY_METRIC_TIME_OVER_MACHINE,
                    Noisy(40 * over_dense, run, which + 10));
    AddHistoryValue(result, HISTORY_METRIC_MEMORY, 1 << 20);
    AddHistoryValue(result, HISTORY_METRIC_ERROR, 2e-7);
    AddHistoryValue(result, HISTORY_METRIC_ERROR_AGAINST_DENSE, 0.25);
  }

  std::vector<HistoryRun> runs_;
};

HistoryCheck CheckOf(const History& history,
                     const std::vector<Acknowledgement>& acknowledgements = {}) {
  absl::StatusOr<HistoryCheck> check = CheckHistory(history, CheckOptions(), acknowledgements);
  EXPECT_TRUE(check.ok()) << check.status();
  return *std::move(check);
}

// The changes as texts: "time near 20 worse regression".
std::vector<std::string> Texts(const History& history, const HistoryCheck& check) {
  std::vector<std::string> texts;
  for (const Change& change : check.changes) {
    const HistorySeries& series = history.series[change.series];
    texts.push_back(absl::StrCat(MetricName(series.metric), " ", series.name, " ",
                                 series.runs[change.at], change.worse ? " worse" : " better",
                                 change.recovered ? " recovered" : "",
                                 change.is_regression ? " regression" : "",
                                 change.acknowledged.empty() ? "" : " acknowledged"));
  }
  return texts;
}

TEST(Check, AStoreWithoutChangesHasNone) {
  const History history = HistoryMaker().Make();
  const HistoryCheck check = CheckOf(history);
  EXPECT_THAT(Texts(history, check), IsEmpty());
  EXPECT_THAT(check.notes, IsEmpty());
  EXPECT_EQ(check.regressions(), 0);
  for (size_t i = 0; i < history.series.size(); ++i) {
    const bool is_judged = history.series[i].metric == HISTORY_METRIC_TIME_OVER_DENSE ||
                           (history.series[i].metric == HISTORY_METRIC_TIME_OVER_MACHINE &&
                            history.series[i].name == "dense");
    EXPECT_EQ(check.noise[i] > 0, is_judged) << history.series[i].name;
    EXPECT_EQ(check.smallest_step[i] > 1, is_judged);
  }
}

TEST(Check, ATimeThatGrewIsARegressionWithItsSizeAndItsCommits) {
  HistoryMaker maker;
  maker.ChangeTimes("near", 1.06);
  const History history = maker.Make();
  const HistoryCheck check = CheckOf(history);
  ASSERT_THAT(Texts(history, check), ElementsAre("time near 20 worse regression"));
  const Change& change = check.changes[0];
  EXPECT_EQ(change.begin, 0);
  EXPECT_EQ(change.end, kRuns);
  EXPECT_NEAR(change.before, 0.25, 0.002);
  EXPECT_NEAR(change.ratio, 1.06, 0.005);
  EXPECT_LT(change.low, 1.06);
  EXPECT_GT(change.high, 1.06);
  EXPECT_LT(change.high - change.low, 0.02);
  EXPECT_EQ(check.regressions(), 1);
}

TEST(Check, ATimeThatFellIsNoRegression) {
  HistoryMaker maker;
  maker.ChangeTimes("near", 0.9);
  const History history = maker.Make();
  EXPECT_THAT(Texts(history, CheckOf(history)), ElementsAre("time near 20 better"));
  EXPECT_EQ(CheckOf(history).regressions(), 0);
}

TEST(Check, AChangeBelowTheThresholdIsToldButNoRegression) {
  HistoryMaker maker;
  maker.ChangeTimes("near", 1.015);
  const History history = maker.Make();
  EXPECT_THAT(Texts(history, CheckOf(history)), ElementsAre("time near 20 worse"));
}

TEST(Check, ARegressionThatIsOverHasRecovered) {
  HistoryMaker maker;
  maker.ChangeTimes("near", 1.1, 12, 20);
  const History history = maker.Make();
  const HistoryCheck check = CheckOf(history);
  ASSERT_THAT(Texts(history, check),
              ElementsAre("time near 12 worse recovered", "time near 20 better"));
  EXPECT_EQ(history.series[check.changes[0].series].runs[check.changes[0].recovered_at], 20);
}

TEST(Check, HalfARecoveryIsARegressionStill) {
  HistoryMaker maker;
  maker.ChangeTimes("near", 1.2, 10, 20);
  maker.ChangeTimes("near", 1.1, 20);
  const History history = maker.Make();
  EXPECT_THAT(Texts(history, CheckOf(history)),
              ElementsAre("time near 10 worse regression", "time near 20 better"));
}

TEST(Check, ADenseThatBecameFasterSlowsNobodyDown) {
  HistoryMaker maker;
  for (const char* name : {"near", "far", "sketch"}) {
    maker.Change(name, HISTORY_METRIC_TIME_OVER_DENSE, 1.2);
  }
  maker.Change("dense", HISTORY_METRIC_TIME_OVER_MACHINE, 1 / 1.2);
  const History history = maker.Make();
  const HistoryCheck check = CheckOf(history);
  EXPECT_EQ(check.regressions(), 0);
  EXPECT_EQ(check.changes.size(), 4);
  for (const Change& change : check.changes) {
    if (change.worse) {
      EXPECT_THAT(change.reason, HasSubstr("dense changed")) << change.series;
    }
  }
}

TEST(Check, ADenseThatBecameSlowerIsARegressionOfItsOwn) {
  HistoryMaker maker;
  maker.Change("dense", HISTORY_METRIC_TIME_OVER_MACHINE, 1.2);
  const History history = maker.Make();
  EXPECT_THAT(Texts(history, CheckOf(history)),
              ElementsAre("machine_time dense 20 worse regression"));
}

TEST(Check, AChangeWithinOneCommitIsTheMachines) {
  HistoryMaker maker;
  maker.ChangeTimes("near", 1.1);
  maker.run(kChanged).mutable_environments(0)->set_git_commit(CommitOfNumber(kChanged - 1));
  const History history = maker.Make();
  const HistoryCheck check = CheckOf(history);
  ASSERT_EQ(check.changes.size(), 1);
  EXPECT_THAT(check.changes[0].reason, HasSubstr("the same commit"));
  EXPECT_EQ(check.regressions(), 0);
  // Local changes are another program.
  maker.run(kChanged).mutable_environments(0)->set_git_dirty(true);
  EXPECT_EQ(CheckOf(maker.Make()).regressions(), 1);
}

TEST(Check, WhatElseChangedInTheBuildIsTold) {
  HistoryMaker maker;
  maker.ChangeTimes("near", 1.1);
  for (int run = kChanged; run < kRuns; ++run) {
    maker.run(run).mutable_environments(0)->set_compiler("GCC 13.1.0");
  }
  const HistoryCheck check = CheckOf(maker.Make());
  ASSERT_EQ(check.regressions(), 1);
  EXPECT_THAT(check.changes[0].build_differences, ElementsAre("compiler: GCC 12.2.0 / GCC 13.1.0"));
}

TEST(Check, MemoryErrorsAndStatusAreJudgedFromTheFirstRunOn) {
  HistoryMaker maker;
  maker.Change("near", HISTORY_METRIC_MEMORY, 1.06, kRuns - 1);
  maker.Change("far", HISTORY_METRIC_ERROR_AGAINST_DENSE, 1.3, kRuns - 1);
  maker.Change("sketch", HISTORY_METRIC_ERROR, 1e4, kRuns - 1);
  maker.CaseOf(kRuns - 1, "dense").set_status(Outcome::STATUS_TIMEOUT);
  maker.CaseOf(kRuns - 1, "dense").set_reason("took longer than 60 s");
  const History history = maker.Make();
  const HistoryCheck check = CheckOf(history);
  EXPECT_THAT(Texts(history, check),
              testing::UnorderedElementsAre(
                  "memory near 29 worse regression", "error_against_dense far 29 worse regression",
                  "error sketch 29 worse regression", "status dense 29 worse regression"));
  EXPECT_THAT(RenderCheck(history, check, CheckFormat::kTerminal, false, {false, true, 0}),
              HasSubstr("took longer than 60 s"));
}

TEST(Check, SmallChangesOfNumbersWithoutNoiseAreNone) {
  HistoryMaker maker;
  maker.Change("near", HISTORY_METRIC_MEMORY, 1.04);
  maker.Change("far", HISTORY_METRIC_ERROR_AGAINST_DENSE, 1.2);
  maker.Change("sketch", HISTORY_METRIC_ERROR, 40);  // 8e-6: rounding
  maker.CaseOf(kChanged, "dense").set_status(Outcome::STATUS_SKIPPED);
  EXPECT_THAT(CheckOf(maker.Make()).regressions(), 0);
}

TEST(Check, AMemoryThatCreepsUpIsFoundWhereItPassesTheThreshold) {
  HistoryMaker maker;
  for (int run = 0; run < kRuns; ++run) {
    maker.Change("near", HISTORY_METRIC_MEMORY, 1 + 0.004 * run, run, run + 1);
  }
  const History history = maker.Make();
  EXPECT_THAT(Texts(history, CheckOf(history)),
              ElementsAre("memory near 27 worse regression", "memory near 13 worse regression"));
}

TEST(Check, AnErrorThatIsNoNumberIsARegressionUntilItIsOneAgain) {
  HistoryMaker maker;
  maker.Change("near", HISTORY_METRIC_ERROR, std::nan(""));
  EXPECT_EQ(CheckOf(maker.Make()).regressions(), 1);
  HistoryMaker mended;
  mended.Change("near", HISTORY_METRIC_ERROR, std::nan(""), 10, 12);
  const History history = mended.Make();
  EXPECT_THAT(Texts(history, CheckOf(history)),
              ElementsAre("error near 10 worse recovered", "error near 12 better"));
}

TEST(Check, ATimeThatIsNoNumberIsNotJudged) {
  HistoryMaker maker;
  maker.Change("near", HISTORY_METRIC_TIME_OVER_DENSE, std::nan(""), 5, 6);
  maker.Change("near", HISTORY_METRIC_TIME_OVER_DENSE, HUGE_VAL, 7, 8);
  maker.Change("near", HISTORY_METRIC_TIME_OVER_DENSE, 0, 9, 10);
  maker.ChangeTimes("near", 1.1);
  const History history = maker.Make();
  EXPECT_THAT(Texts(history, CheckOf(history)), ElementsAre("time near 20 worse regression"));
}

TEST(Check, AnAcknowledgementTakesAChangeAsItIs) {
  HistoryMaker maker;
  maker.ChangeTimes("near", 1.1);
  const History history = maker.Make();
  const HistoryCheck before = CheckOf(history);
  ASSERT_EQ(before.regressions(), 1);
  const std::string line = AcknowledgementLine(history, before.changes[0]) + "wanted";
  EXPECT_THAT(line, HasSubstr(CommitOfNumber(kChanged).substr(0, 12)));
  const auto acknowledged =
      ParseAcknowledgements(absl::StrCat("# accepted\n\n", line, "\n"), "file");
  ASSERT_TRUE(acknowledged.ok()) << acknowledged.status();
  const HistoryCheck after = CheckOf(history, *acknowledged);
  EXPECT_EQ(after.regressions(), 0);
  EXPECT_EQ(after.changes[0].acknowledged, "wanted");
  EXPECT_THAT(after.notes, IsEmpty());
}

TEST(Check, AnAcknowledgementHoldsForItsCommitMetricAndCasesAlone) {
  HistoryMaker maker;
  maker.ChangeTimes("near", 1.1);
  const History history = maker.Make();
  const auto regressions_with = [&](const std::string& line) {
    const auto parsed = ParseAcknowledgements(line, "file");
    EXPECT_TRUE(parsed.ok()) << parsed.status();
    const HistoryCheck check = CheckOf(history, *parsed);
    // What holds for nothing is told.
    EXPECT_EQ(check.notes.size(), check.regressions()) << line;
    return check.regressions();
  };
  const std::string commit = CommitOfNumber(kChanged).substr(0, 10);
  EXPECT_EQ(regressions_with(commit + " time technique=near* # why"), 0);
  EXPECT_EQ(regressions_with(commit + " * *tokens=1024 # why"), 0);
  EXPECT_EQ(regressions_with(commit + " * technique=*=1024 # why"), 0);
  EXPECT_EQ(regressions_with(commit + " memory technique=near* # why"), 1);
  EXPECT_EQ(regressions_with(commit + " time technique=far* # why"), 1);
  EXPECT_EQ(regressions_with(commit + " time technique=near # why"), 1);
  EXPECT_EQ(regressions_with(commit + " time *tokens # why"), 1);
  // The place of a change is an estimate: two runs beside it are its own.
  EXPECT_EQ(regressions_with(CommitOfNumber(kChanged - 2) + " time * # why"), 0);
  EXPECT_EQ(regressions_with(CommitOfNumber(kChanged + 2) + " time * # why"), 0);
  EXPECT_EQ(regressions_with(CommitOfNumber(kChanged - 3) + " time * # why"), 1);
  EXPECT_EQ(regressions_with(CommitOfNumber(kChanged + 3) + " time * # why"), 1);
}

TEST(Check, ARunWithoutACommitIsAcknowledgedByItsName) {
  HistoryMaker maker;
  maker.ChangeTimes("near", 1.1);
  History history = maker.Make();
  for (RunInfo& run : history.machines[0].runs) {
    run.commit.clear();
    run.name = absl::StrCat("20261123T", 100000 + run.start_unix_s % 100000, "Z-unknown-4f94863f");
  }
  const HistoryCheck before = CheckOf(history, {});
  ASSERT_EQ(before.regressions(), 1);
  const std::string line = AcknowledgementLine(history, before.changes[0]) + "wanted";
  const auto parsed = ParseAcknowledgements(line, "file");
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  const HistoryCheck after = CheckOf(history, *parsed);
  EXPECT_EQ(after.regressions(), 0) << line;
  EXPECT_EQ(after.changes[0].acknowledged, "wanted");
}

TEST(Check, AcknowledgementsThatAreNoneNameTheirLine) {
  for (const auto& [text, message] : std::vector<std::pair<std::string, std::string>>{
           {"1234567 time *", "line 1: no reason"},
           {"\n1234567 time * # ", "line 2: no reason"},
           {"1234567 time # why", "too few words"},
           {"123456 time * # why", "is no hash of 7 or more digits"},
           {"main123 time * # why", "is no hash"},
           {"20261123T195804Z- time * # why", "nor the name of a run"},
           {"unknown time * # why", "nor the name of a run"},
           {"1234567 speed * # why", "\"speed\" is none of time, machine_time"}}) {
    const absl::Status status = ParseAcknowledgements(text, "FILE").status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << text;
    EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr("FILE: line "), HasSubstr(message)));
  }
}

TEST(Check, MachinesAreComparedOnlyWhenAsked) {
  std::vector<StoredRun> stored;
  for (int run = 0; run < kRuns; ++run) {
    HistoryRun made = MakeHistoryRun(run, run < kChanged ? "CPU A" : "CPU B");
    HistoryCase* result = AddHistoryCase(&made, "near");
    AddHistoryValue(result, HISTORY_METRIC_MEMORY, run < kChanged ? 1e6 : 2e6);
    stored.push_back({RunName(made), made});
  }
  const History apart = MakeHistory(stored);
  ASSERT_EQ(apart.machines.size(), 2);
  EXPECT_THAT(apart.machines[0].signature, HasSubstr("CPU B"));  // of the latest run
  EXPECT_THAT(CheckOf(apart).changes, IsEmpty());
  const History together = MakeHistory(stored, /*across_machines=*/true);
  ASSERT_EQ(together.machines.size(), 1);
  EXPECT_EQ(CheckOf(together).regressions(), 1);
}

TEST(Check, TooFewRunsAndMissingCasesAreTold) {
  HistoryMaker maker;
  maker.run(kRuns - 1).mutable_cases()->RemoveLast();
  EXPECT_THAT(CheckOf(maker.Make()).notes,
              ElementsAre(HasSubstr("1 cases of the 5 runs before are not in the latest run")));
  std::vector<StoredRun> three;
  for (int run = 0; run < 3; ++run) three.push_back({"run", maker.run(run)});
  EXPECT_THAT(CheckOf(MakeHistory(three)).notes, ElementsAre(HasSubstr("4 series of times")));
}

TEST(Check, OptionsOutOfRangeAreNamed) {
  const History history;
  const auto message = [&](const CheckOptions& options) {
    return std::string(CheckHistory(history, options, {}).status().message());
  };
  CheckOptions options;
  options.threshold = 1;
  EXPECT_THAT(message(options), HasSubstr("--threshold=1"));
  options = CheckOptions();
  options.false_alarm_rate = 0;
  EXPECT_THAT(message(options), HasSubstr("--false_alarm_rate=0"));
  options = CheckOptions();
  options.error_floor = 0;
  EXPECT_THAT(message(options), HasSubstr("--error_floor=0"));
  EXPECT_EQ(message(CheckOptions()), "");
}

// The reason of a failure is no remark on the run in which it is over.
TEST(CheckReport, ACaseThatWorksAgainHasNoReason) {
  HistoryMaker maker;
  for (int run = 0; run + 1 < kRuns; ++run) {
    maker.CaseOf(run, "dense").set_status(Outcome::STATUS_TIMEOUT);
    maker.CaseOf(run, "dense").set_reason("took longer than 60 s");
  }
  const History history = maker.Make();
  const HistoryCheck check = CheckOf(history);
  EXPECT_THAT(Texts(history, check), testing::Contains(HasSubstr("status dense 29")));
  const std::string text =
      RenderCheck(history, check, CheckFormat::kTerminal, true, {false, true, 0});
  EXPECT_THAT(text, HasSubstr("Improvements"));
  EXPECT_THAT(text, Not(HasSubstr("took longer")));
}

TEST(CheckReport, SaysWhatHappenedInTextMarkdownAndJson) {
  HistoryMaker maker;
  maker.ChangeTimes("near", 1.1);
  maker.ChangeTimes("far", 0.8);
  const History history = maker.Make();
  const HistoryCheck check = CheckOf(history);
  const std::string text =
      RenderCheck(history, check, CheckFormat::kTerminal, false, {false, true, 0});
  EXPECT_THAT(text, HasSubstr("time over dense"));
  EXPECT_THAT(text, HasSubstr(CommitOfNumber(kChanged).substr(0, 12)));
  EXPECT_THAT(text, HasSubstr(CommitOfNumber(kChanged - 1).substr(0, 12)));
  EXPECT_THAT(text, HasSubstr("1 improved (--all lists them)"));
  EXPECT_THAT(text, Not(HasSubstr("Improvements")));
  EXPECT_THAT(text, testing::EndsWith("1 regression that nobody acknowledged, in 30 runs on 1 kind "
                                      "of machine\n"));
  EXPECT_THAT(RenderCheck(history, check, CheckFormat::kTerminal, true, {false, true, 0}),
              HasSubstr("Improvements"));
  EXPECT_THAT(RenderCheck(history, check, CheckFormat::kMarkdown, false, {}),
              HasSubstr("| **time over dense** |"));

  const auto json =
      nlohmann::json::parse(RenderCheck(history, check, CheckFormat::kJson, false, {}));
  EXPECT_EQ(json["regressed"], true);
  ASSERT_EQ(json["changes"].size(), 2);
  EXPECT_EQ(json["changes"][0]["first_with_it"]["commit"], CommitOfNumber(kChanged));
  EXPECT_EQ(json["changes"][0]["last_before"]["commit"], CommitOfNumber(kChanged - 1));
  EXPECT_NEAR(json["changes"][0]["ratio"].get<double>(), 1.1, 0.005);
  EXPECT_EQ(json["changes"][1]["worse"], false);
  // Those over dense of three techniques, and dense's own.
  ASSERT_EQ(json["times"].size(), 4);
  EXPECT_NEAR(json["times"][0]["noise"].get<double>(), 0.004, 0.002);
  EXPECT_GT(json["times"][0]["smallest_step"].get<double>(), 1);
  EXPECT_THAT(text, HasSubstr(" % in 4 cases\n"));
}

}  // namespace
}  // namespace tfb
