#include "results/history/check_report.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/time.h"
#include "nlohmann/json.hpp"

namespace tfb {
namespace {

using Json = nlohmann::ordered_json;

// What a change is to whoever reads the report, in the order of its sections.
enum class Section { kRegression, kAcknowledged, kOther, kImprovement };
constexpr Section kSections[] = {Section::kRegression, Section::kAcknowledged, Section::kOther,
                                 Section::kImprovement};

Section SectionOf(const Change& change) {
  if (!change.worse) return Section::kImprovement;
  if (!change.is_regression) return Section::kOther;
  return change.acknowledged.empty() ? Section::kRegression : Section::kAcknowledged;
}

absl::string_view Title(Section section) {
  switch (section) {
    case Section::kRegression:
      return "Regressions";
    case Section::kAcknowledged:
      return "Acknowledged regressions";
    case Section::kOther:
      return "Changes for the worse that are over, or not the code's";
    case Section::kImprovement:
      return "Improvements";
  }
  return "";
}

absl::string_view CountName(Section section) {
  switch (section) {
    case Section::kRegression:
      return "regressed";
    case Section::kAcknowledged:
      return "acknowledged";
    case Section::kOther:
      return "over or not the code's";
    case Section::kImprovement:
      return "improved";
  }
  return "";
}

const RunInfo& RunOf(const History& history, const Change& change, int place) {
  const HistorySeries& series = history.series[change.series];
  return history.machines[series.machine].runs[series.runs[place]];
}

// Returns "786d64f0c1aa" or, of a run without commit, when it began.
std::string CommitText(const RunInfo& run) {
  if (run.commit.empty()) {
    return absl::FormatTime("%Y-%m-%d %H:%M", absl::FromUnixSeconds(run.start_unix_s),
                            absl::UTCTimeZone());
  }
  return absl::StrCat(run.commit.substr(0, 12), run.dirty ? "+" : "");
}

std::string ChangeText(const Change& change) {
  if (change.ratio == 1) return "-";
  std::string text = absl::StrCat(FormatSignificant(change.ratio), "x");
  if (change.low < change.high)
    absl::StrAppend(&text, " ", FormatInterval(change.low, change.high));
  return text;
}

// Returns what else is known of a change.
std::string Remark(const History& history, const Change& change) {
  std::vector<std::string> parts;
  if (!change.acknowledged.empty()) parts.push_back(change.acknowledged);
  if (!change.reason.empty()) parts.push_back(change.reason);
  if (change.recovered) {
    parts.push_back(
        absl::StrCat("recovered by ", CommitText(RunOf(history, change, change.recovered_at))));
  }
  const HistorySeries& series = history.series[change.series];
  if (series.metric == HISTORY_METRIC_STATUS && change.is_regression)
    parts.push_back(series.reason);
  for (const std::string& difference : change.build_differences) parts.push_back(difference);
  std::string text;
  for (const std::string& part : parts) absl::StrAppend(&text, text.empty() ? "" : "; ", part);
  return text;
}

Table SectionTable(const History& history, const HistoryCheck& check, Section section) {
  Table table;
  table.title = std::string(Title(section));
  table.columns = {{"what"},        {"before", true},  {"now", true},      {"change", true},
                   {"last before"}, {"first with it"}, {"case", false, 30}};
  bool has_remarks = false;
  for (const Change& change : check.changes) {
    has_remarks = has_remarks || (SectionOf(change) == section && !Remark(history, change).empty());
  }
  if (has_remarks) table.columns.push_back({"remark", false, 16});
  if (history.machines.size() > 1) table.columns.push_back({"machine", false, 12});
  for (const Change& change : check.changes) {
    if (SectionOf(change) != section) continue;
    const HistorySeries& series = history.series[change.series];
    std::vector<TableCell> row = {
        {std::string(MetricTitle(series.metric)),
         section == Section::kRegression ? Emphasis::kBad : Emphasis::kNone},
        FormatValue(series.metric, change.before),
        FormatValue(series.metric, change.after),
        ChangeText(change),
        CommitText(RunOf(history, change, change.at - 1)),
        CommitText(RunOf(history, change, change.at)),
        absl::StrCat(series.name, ", ", series.problem)};
    if (has_remarks) row.push_back(Remark(history, change));
    if (history.machines.size() > 1) row.push_back(history.machines[series.machine].signature);
    table.rows.push_back(std::move(row));
  }
  return table;
}

std::map<Section, int> Count(const HistoryCheck& check) {
  std::map<Section, int> counts;
  for (const Change& change : check.changes) ++counts[SectionOf(change)];
  return counts;
}

std::string Counted(size_t count, absl::string_view noun) {
  return absl::StrCat(count, " ", noun, count == 1 ? "" : "s");
}

// Returns the flag of `history bisect` for a metric, or "" for its default.
std::string BisectMetric(HistoryMetric metric) {
  switch (metric) {
    case HISTORY_METRIC_SETUP:
      return " --metric=setup";
    case HISTORY_METRIC_MEMORY:
      return " --metric=memory";
    case HISTORY_METRIC_ERROR:
    case HISTORY_METRIC_ERROR_AGAINST_DENSE:
      return " --metric=error";
    case HISTORY_METRIC_STATUS:
      return " --metric=status";
    default:
      return "";
  }
}

// Returns the command that finds the commit of the first regression between whose runs there may be
// several, where it is one of a case.
std::string BisectAdvice(const History& history, const HistoryCheck& check, bool markdown) {
  for (const Change& change : check.changes) {
    const HistorySeries& series = history.series[change.series];
    const std::string good = RunOf(history, change, change.at - 1).commit.substr(0, 12);
    const std::string bad = RunOf(history, change, change.at).commit.substr(0, 12);
    const bool is_asked = SectionOf(change) == Section::kRegression && series.tokens > 0;
    if (!is_asked || good.empty() || bad.empty() || good == bad) continue;
    const std::string command =
        absl::StrCat("bazel run //tools:history -- bisect --case='", series.key, "' --good=", good,
                     " --bad=", bad, BisectMetric(series.metric));
    return absl::StrCat("What lies between two runs is searched by\n", markdown ? "\n```\n" : "",
                        command, "\n", markdown ? "```\n" : "\n");
  }
  return "";
}

// Says how small a change of a time is found, or nothing where no series is long enough.
std::string SmallestSteps(const History& history, const HistoryCheck& check) {
  std::vector<double> means, cases, setups;
  for (size_t i = 0; i < history.series.size(); ++i) {
    if (!(check.smallest_step[i] > 1)) continue;
    const HistorySeries& series = history.series[i];
    (series.metric == HISTORY_METRIC_SETUP ? setups
     : series.tokens == 0                  ? means
                                           : cases)
        .push_back(check.smallest_step[i] - 1);
  }
  std::vector<std::string> parts;
  const auto add = [&parts](std::vector<double> steps, absl::string_view noun) {
    if (steps.empty()) return;
    std::nth_element(steps.begin(), steps.begin() + steps.size() / 2, steps.end());
    parts.push_back(absl::StrCat(FormatSignificant(100 * steps[steps.size() / 2], 2), " % in ",
                                 steps.size(), " ", noun));
  };
  add(means, "means over lengths");
  add(cases, "cases");
  add(setups, "setups");
  if (parts.empty()) return "";
  return absl::StrCat(
      "The smallest steps that three runs show, as medians: ", absl::StrJoin(parts, ", "), "\n");
}

std::string Text(const History& history, const HistoryCheck& check, bool markdown, bool all,
                 const TextStyle& style) {
  std::map<Section, int> counts = Count(check);
  std::string out;
  for (const Section section : kSections) {
    const bool is_shown = all || section == Section::kRegression;
    if (counts[section] == 0 || !is_shown) continue;
    const Table table = SectionTable(history, check, section);
    absl::StrAppend(&out, markdown ? ToMarkdown(table) : ToTerminal(table, style), "\n");
  }
  if (counts[Section::kRegression] > 0) {
    out +=
        "A line in the file of --acknowledged, with a reason behind the #, takes one as it is:\n";
    out += markdown ? "\n```\n" : "";
    for (const Change& change : check.changes) {
      if (SectionOf(change) != Section::kRegression) continue;
      absl::StrAppend(&out, AcknowledgementLine(history, change), "\n");
    }
    out += markdown ? "```\n" : "\n";
  }
  absl::StrAppend(&out, BisectAdvice(history, check, markdown));
  for (const std::string& note : check.notes) {
    const std::string text = Printable(note);
    absl::StrAppend(&out, markdown ? MarkdownText(text) : text, "\n");
  }
  const std::string steps = SmallestSteps(history, check);
  out += markdown ? MarkdownText(steps) + (steps.empty() ? "" : "\n") : steps;
  const int hidden = static_cast<int>(check.changes.size()) - counts[Section::kRegression];
  out += "Changes:";
  absl::string_view separator = " ";
  for (const Section section : kSections) {
    absl::StrAppend(&out, separator, counts[section], " ", CountName(section));
    separator = ", ";
  }
  absl::StrAppend(&out, hidden > 0 && !all ? " (--all lists them)" : "", "\n",
                  CheckVerdict(history, check), "\n");
  return markdown || style.unicode ? out : ToAscii(out);
}

Json NumberOf(double value) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value > 0 ? "Infinity" : "-Infinity";
  return value;
}

Json JsonOf(const RunInfo& run) {
  Json json = {{"run", run.name}, {"start_unix_s", run.start_unix_s}};
  if (!run.commit.empty()) json["commit"] = run.commit;
  if (run.dirty) json["dirty"] = true;
  if (!run.commit_subject.empty()) json["subject"] = run.commit_subject;
  return json;
}

Json JsonOf(const History& history, const Change& change) {
  const HistorySeries& series = history.series[change.series];
  Json json = {{"machine", history.machines[series.machine].signature},
               {"metric", std::string(MetricName(series.metric))},
               {"name", series.name},
               {"problem", series.problem},
               {"key", series.key},
               {"worse", change.worse},
               {"regression", change.is_regression},
               {"recovered", change.recovered},
               {"before", NumberOf(change.before)},
               {"after", NumberOf(change.after)},
               {"ratio", NumberOf(change.ratio)},
               {"low", NumberOf(change.low)},
               {"high", NumberOf(change.high)},
               {"last_before", JsonOf(RunOf(history, change, change.at - 1))},
               {"first_with_it", JsonOf(RunOf(history, change, change.at))}};
  if (!change.acknowledged.empty()) json["acknowledged"] = change.acknowledged;
  if (!change.reason.empty()) json["reason"] = change.reason;
  if (!change.build_differences.empty()) json["build_differences"] = change.build_differences;
  return json;
}

std::string JsonText(const History& history, const HistoryCheck& check) {
  Json machines = Json::array();
  for (const Machine& machine : history.machines) {
    machines.push_back({{"signature", machine.signature}, {"runs", machine.runs.size()}});
  }
  Json changes = Json::array();
  for (const Change& change : check.changes) changes.push_back(JsonOf(history, change));
  Json times = Json::array();
  for (size_t i = 0; i < history.series.size(); ++i) {
    if (!(check.noise[i] > 0)) continue;
    const HistorySeries& series = history.series[i];
    times.push_back({{"metric", std::string(MetricName(series.metric))},
                     {"key", series.key},
                     {"noise", check.noise[i]},
                     {"smallest_step", check.smallest_step[i]}});
  }
  const Json json = {{"format", "tfb.HistoryCheck/1"},
                     {"regressed", check.regressions() > 0},
                     {"regressions", check.regressions()},
                     {"machines", machines},
                     {"changes", changes},
                     {"times", times},
                     {"notes", check.notes}};
  // Stores may hold any bytes.
  return json.dump(1, ' ', false, Json::error_handler_t::replace) + "\n";
}

}  // namespace

absl::StatusOr<CheckFormat> ParseCheckFormat(absl::string_view name) {
  if (name == "terminal") return CheckFormat::kTerminal;
  if (name == "markdown") return CheckFormat::kMarkdown;
  if (name == "json") return CheckFormat::kJson;
  return absl::InvalidArgumentError(
      absl::StrCat("--format: \"", Printable(name), "\" is none of terminal, markdown, json"));
}

std::string CheckVerdict(const History& history, const HistoryCheck& check) {
  size_t runs = 0;
  for (const Machine& machine : history.machines) runs += machine.runs.size();
  const int regressions = check.regressions();
  return absl::StrCat(
      regressions == 0
          ? "nothing regressed"
          : Counted(static_cast<size_t>(regressions), "regression") + " that nobody acknowledged",
      ", in ", Counted(runs, "run"), " on ", Counted(history.machines.size(), "kind"),
      history.machines.size() == 1 ? " of machine" : " of machines");
}

std::string RenderCheck(const History& history, const HistoryCheck& check, CheckFormat format,
                        bool all, const TextStyle& style) {
  if (format == CheckFormat::kJson) return JsonText(history, check);
  return Text(history, check, format == CheckFormat::kMarkdown, all, style);
}

}  // namespace tfb
