#include "results/history/check_report.h"

#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "results/history/check.h"
#include "results/history/series.h"

namespace tfb {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr TextStyle kWide = {/*colour=*/false, /*unicode=*/true, /*width=*/0};

RunInfo RunOf(const std::string& commit, int number) {
  RunInfo run;
  run.name = "run" + std::to_string(number);
  run.start_unix_s = 1'700'000'000 + 86'400 * number;
  run.commit = commit;
  return run;
}

HistorySeries SeriesOf(int machine, HistoryMetric metric, const std::string& name, int64_t tokens) {
  HistorySeries series;
  series.machine = machine;
  series.metric = metric;
  series.key = "technique=" + name;
  series.name = name;
  series.problem = "cpu f32";
  series.tokens = tokens;
  return series;
}

Change ChangeOf(int series, int at, double before, double after) {
  Change change;
  change.series = series;
  change.at = at;
  change.before = before;
  change.after = after;
  change.worse = after > before;
  change.is_regression = change.worse;
  return change;
}

// Two machines; what follows of the report depends on the changes.
struct Reported {
  Reported() {
    history.machines = {
        {"CPU A", {RunOf(std::string(40, 'a'), 0), RunOf(std::string(40, 'b'), 1), RunOf("", 2)}},
        {"CPU B", {RunOf("c0ffee", 3), RunOf("deadbeef", 4)}}};
    history.machines[0].runs[1].dirty = true;
    history.machines[0].runs[1].commit_subject = "A change";
    Add(SeriesOf(0, HISTORY_METRIC_TIME_OVER_DENSE, "near", 0), {0, 1, 2}, {0.25, 0.5, 0.5});
    Add(SeriesOf(1, HISTORY_METRIC_MEMORY, "far", 1024), {0, 1}, {1 << 20, 3 << 20});
    Add(SeriesOf(0, HISTORY_METRIC_STATUS, "sketch", 512), {0, 2}, {0, 3});
    history.series[2].reason = "took longer than 60 s";
    Add(SeriesOf(0, HISTORY_METRIC_SETUP, "near", 512), {0, 1, 2}, {1, 1.5, 1});
    Add(SeriesOf(0, HISTORY_METRIC_ERROR, "near", 512), {0, 1}, {1e-7, std::nan("")});
  }

  void Add(HistorySeries series, std::vector<int> runs, std::vector<double> values) {
    series.runs = std::move(runs);
    series.values = std::move(values);
    history.series.push_back(std::move(series));
    check.noise.push_back(0);
    check.smallest_step.push_back(0);
  }

  Change& Add(Change change) { return check.changes.emplace_back(std::move(change)); }
  Change& AddTime() {
    Change change = ChangeOf(0, 1, 0.25, 0.5);
    change.ratio = 2;
    change.low = 1.9;
    change.high = 2.1;
    return Add(change);
  }

  std::string Text(bool all = true, CheckFormat format = CheckFormat::kTerminal) const {
    return RenderCheck(history, check, format, all, kWide);
  }

  History history;
  HistoryCheck check;
};

TEST(CheckReport, EverySectionHasItsChangesWithWhatIsKnownOfThem) {
  Reported reported;
  reported.AddTime();
  Change memory = ChangeOf(1, 1, 1 << 20, 3 << 20);
  memory.ratio = memory.low = memory.high = 3;
  memory.acknowledged = "wanted";
  memory.build_differences = {"compiler: 1 / 2", "driver: 3 / 4"};
  reported.Add(memory);
  Change setup = ChangeOf(3, 1, 1, 1.5);
  setup.ratio = setup.low = setup.high = 1.5;
  setup.is_regression = false;
  setup.recovered = true;
  setup.recovered_at = 2;
  setup.reason = "the machine changed";
  reported.Add(setup);
  Change better = ChangeOf(0, 2, 0.5, 0.4);
  better.ratio = better.low = better.high = 0.8;
  reported.Add(better);
  reported.check.notes = {"a note\x1b"};
  reported.check.noise = {0.01, 0, 0, 0, 0};
  reported.check.smallest_step = {1.02, 0, 0, 1.3, 0};
  const std::string end =
      "A line in the file of --acknowledged, with a reason behind the #, takes one as it is:\n"
      "bbbbbbbbbbbb time technique=near # \n"
      "\n"
      "a note?\n"
      "The smallest steps that three runs show, as medians: 2.0 % in 1 means over lengths, 30 % in "
      "1 setups\n"
      "Changes: 1 regressed, 1 acknowledged, 1 over or not the code's, 1 improved";
  const std::string verdict =
      "\n1 regression that nobody acknowledged, in 5 runs on 2 kinds of machines\n";
  const std::string regressions =
      "Regressions\n"
      "what             before    now            change  last before   first with it  case         "
      " "
      " machine\n"
      "time over dense   0.250  0.500  2.00x [1.9, 2.1]  aaaaaaaaaaaa  bbbbbbbbbbbb+  near, cpu "
      "f32 "
      " CPU A\n"
      "\n";
  EXPECT_EQ(reported.Text(/*all=*/false), regressions + end + " (--all lists them)" + verdict);
  EXPECT_EQ(
      reported.Text(),
      regressions +
          "Acknowledged regressions\n"
          "what            before    now  change  last before  first with it  case          remark "
          " "
          "                                machine\n"
          "working memory   1 MiB  3 MiB   3.00x  c0ffee       deadbeef       far, cpu f32  "
          "wanted; "
          "compiler: 1 / 2; driver: 3 / 4  CPU B\n"
          "\n"
          "Changes for the worse that are over, or not the code's\n"
          "what        before   now  change  last before   first with it  case           remark    "
          " "
          "                                         machine\n"
          "setup time    1.00  1.50   1.50x  aaaaaaaaaaaa  bbbbbbbbbbbb+  near, cpu f32  the "
          "machine changed; recovered by 2023-11-16 22:13  CPU A\n"
          "\n"
          "Improvements\n"
          "what             before    now  change  last before    first with it     case           "
          "machine\n"
          "time over dense   0.500  0.400  0.800x  bbbbbbbbbbbb+  2023-11-16 22:13  near, cpu f32  "
          "CPU A\n"
          "\n" +
          end + verdict);
  EXPECT_EQ(
      reported.Text(/*all=*/false, CheckFormat::kMarkdown),
      "### Regressions\n"
      "\n"
      "| what | before | now | change | last before | first with it | case | machine |\n"
      "| --- | ---: | ---: | ---: | --- | --- | --- | --- |\n"
      "| **time over dense** | 0.250 | 0.500 | 2.00x [1.9, 2.1] | aaaaaaaaaaaa | "
      "bbbbbbbbbbbb+ | near, cpu f32 | CPU A |\n"
      "\n"
      "A line in the file of --acknowledged, with a reason behind the #, takes one as it is:\n"
      "\n"
      "```\n"
      "bbbbbbbbbbbb time technique=near # \n"
      "```\n"
      "a note?\n"
      "The smallest steps that three runs show, as medians: 2.0 % in 1 means over lengths, 30 "
      "% in 1 setups \n"
      "Changes: 1 regressed, 1 acknowledged, 1 over or not the code's, 1 improved (--all lists "
      "them)" +
          verdict);
}

TEST(CheckReport, NothingIsSaidOfWhatThereIsNot) {
  Reported reported;
  reported.history.machines.pop_back();
  reported.history.series.erase(reported.history.series.begin() + 1);
  EXPECT_EQ(reported.Text(false),
            "Changes: 0 regressed, 0 acknowledged, 0 over or not the code's, 0 improved\n"
            "nothing regressed, in 3 runs on 1 kind of machine\n");
  EXPECT_EQ(reported.Text(true, CheckFormat::kMarkdown), reported.Text());
  reported.AddTime();
  const std::string text = reported.Text();
  EXPECT_THAT(text, Not(HasSubstr("remark")));
  EXPECT_THAT(text, Not(HasSubstr("  machine\n")));
  EXPECT_THAT(text, Not(HasSubstr("--all")));
  EXPECT_THAT(text, Not(HasSubstr("smallest")));
}

TEST(CheckReport, AFailureHasItsReasonAndNoRatio) {
  Reported reported;
  reported.Add(ChangeOf(2, 1, 0, 3));
  EXPECT_THAT(reported.Text(), HasSubstr(" -  aaaaaaaaaaaa "));
  EXPECT_THAT(reported.Text(), HasSubstr("took longer than 60 s"));
  reported.check.changes[0].is_regression = false;
  EXPECT_THAT(reported.Text(), Not(HasSubstr("took longer")));
}

TEST(CheckReport, TheSearchForTheCommitIsAdvisedWhereSeveralMayLieBetween) {
  Reported reported;
  const auto advice = [&reported] {
    const std::string text = reported.Text();
    const size_t at = text.find("bazel run"), end = text.find("\n", at);
    return at == std::string::npos ? "" : text.substr(at, end - at);
  };
  // A mean is of no case; of three others, the first one is searched.
  reported.AddTime();
  EXPECT_EQ(advice(), "");
  reported.Add(ChangeOf(1, 1, 1, 3));
  reported.Add(ChangeOf(3, 1, 1, 2));
  EXPECT_EQ(advice(),
            "bazel run //tools:history -- bisect --case='technique=far' --good=c0ffee "
            "--bad=deadbeef --metric=memory");
  EXPECT_THAT(reported.Text(),
              HasSubstr("What lies between two runs is searched by\nbazel run //tools:history"));
  EXPECT_THAT(
      reported.Text(true, CheckFormat::kMarkdown),
      AllOf(HasSubstr("is searched by\n\n```\nbazel run"), HasSubstr("--metric=memory\n```\n")));
  reported.check.changes[1].acknowledged = "wanted";
  EXPECT_EQ(advice(),
            "bazel run //tools:history -- bisect --case='technique=near' --good=aaaaaaaaaaaa "
            "--bad=bbbbbbbbbbbb --metric=setup");
  reported.check.changes[2].is_regression = false;
  EXPECT_EQ(advice(), "");
  reported.check.changes[2].is_regression = true;
  // Runs of one commit, and of an unknown one.
  reported.history.machines[0].runs[1].commit = reported.history.machines[0].runs[0].commit;
  EXPECT_EQ(advice(), "");
  reported.history.machines[0].runs[1].commit = "";
  EXPECT_EQ(advice(), "");
  reported.history.machines[0].runs[1].commit = "b";
  reported.history.machines[0].runs[0].commit = "";
  EXPECT_EQ(advice(), "");
}

TEST(CheckReport, TheMetricOfTheSearchIsThatOfTheChange) {
  for (const auto& [metric, flag] : std::vector<std::pair<HistoryMetric, std::string>>{
           {HISTORY_METRIC_TIME_OVER_DENSE, ""},
           {HISTORY_METRIC_TIME_OVER_MACHINE, ""},
           {HISTORY_METRIC_SETUP, " --metric=setup"},
           {HISTORY_METRIC_MEMORY, " --metric=memory"},
           {HISTORY_METRIC_ERROR, " --metric=error"},
           {HISTORY_METRIC_ERROR_AGAINST_DENSE, " --metric=error"},
           {HISTORY_METRIC_STATUS, " --metric=status"}}) {
    Reported reported;
    reported.history.series[1].metric = metric;
    reported.Add(ChangeOf(1, 1, 1, 2));
    EXPECT_THAT(reported.Text(), HasSubstr("--bad=deadbeef" + flag + "\n"));
  }
}

TEST(CheckReport, TheSmallestStepsAreMediansByKind) {
  Reported reported;
  for (const double step : {1.5, 1.01, 1.03}) {
    reported.Add(SeriesOf(0, HISTORY_METRIC_TIME_OVER_MACHINE, "near", 512), {0}, {1});
    reported.check.smallest_step.back() = step;
  }
  EXPECT_THAT(reported.Text(),
              HasSubstr("The smallest steps that three runs show, as medians: 3.0 % in 3 cases\n"));
  reported.check.smallest_step[3] = 1.07;
  reported.check.smallest_step[0] = 1.004;
  EXPECT_THAT(reported.Text(), HasSubstr("as medians: 0.40 % in 1 means over lengths, 3.0 % in 3 "
                                         "cases, 7.0 % in 1 setups\n"));
}

TEST(CheckReport, JsonHasEveryChangeEachTimeAndTheNotes) {
  Reported reported;
  Change& time = reported.AddTime();
  time.build_differences = {"compiler: 1 / 2"};
  time.reason = "a reason";
  time.acknowledged = "wanted";
  Change error = ChangeOf(4, 1, HUGE_VAL, std::nan(""));
  error.is_regression = error.worse = true;
  error.low = -HUGE_VAL;
  reported.Add(error);
  reported.check.noise[0] = 0.01;
  reported.check.smallest_step[0] = 1.02;
  reported.check.notes = {"a note"};
  const auto json = nlohmann::json::parse(reported.Text(false, CheckFormat::kJson));
  EXPECT_EQ(json, nlohmann::json::parse(R"({
    "format": "tfb.HistoryCheck/1", "regressed": true, "regressions": 1,
    "machines": [{"signature": "CPU A", "runs": 3}, {"signature": "CPU B", "runs": 2}],
    "changes": [
      {"machine": "CPU A", "metric": "time", "name": "near", "problem": "cpu f32",
       "key": "technique=near", "worse": true, "regression": true, "recovered": false,
       "before": 0.25, "after": 0.5, "ratio": 2.0, "low": 1.9, "high": 2.1,
       "last_before": {"run": "run0", "start_unix_s": 1700000000,
                       "commit": "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"},
       "first_with_it": {"run": "run1", "start_unix_s": 1700086400, "dirty": true,
                         "commit": "bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb",
                         "subject": "A change"},
       "acknowledged": "wanted", "reason": "a reason", "build_differences": ["compiler: 1 / 2"]},
      {"machine": "CPU A", "metric": "error", "name": "near", "problem": "cpu f32",
       "key": "technique=near", "worse": true, "regression": true, "recovered": false,
       "before": "Infinity", "after": "NaN", "ratio": 1.0, "low": "-Infinity", "high": 1.0,
       "last_before": {"run": "run0", "start_unix_s": 1700000000,
                       "commit": "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"},
       "first_with_it": {"run": "run1", "start_unix_s": 1700086400, "dirty": true,
                         "commit": "bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb",
                         "subject": "A change"}}],
    "times": [{"metric": "time", "key": "technique=near", "noise": 0.01, "smallest_step": 1.02}],
    "notes": ["a note"]})"))
      << json.dump(1);
  reported.check.changes.pop_back();
  EXPECT_EQ(nlohmann::json::parse(reported.Text(false, CheckFormat::kJson))["regressed"], false);
}

TEST(CheckReport, FormatsHaveTheirNames) {
  EXPECT_EQ(*ParseCheckFormat("terminal"), CheckFormat::kTerminal);
  EXPECT_EQ(*ParseCheckFormat("markdown"), CheckFormat::kMarkdown);
  EXPECT_EQ(*ParseCheckFormat("json"), CheckFormat::kJson);
  const absl::Status status = ParseCheckFormat("yaml").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("\"yaml\" is none of terminal"));
}

}  // namespace
}  // namespace tfb
