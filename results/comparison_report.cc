#include "results/comparison_report.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "nlohmann/json.hpp"
#include "results/comparison_comment.h"

namespace tfb {
namespace {

using Json = nlohmann::ordered_json;

constexpr Verdict kVerdicts[] = {Verdict::kRegressed, Verdict::kImproved, Verdict::kAmbiguous,
                                 Verdict::kNotJudged, Verdict::kSame};

absl::string_view Title(Verdict verdict) {
  switch (verdict) {
    case Verdict::kRegressed:
      return "Regressions";
    case Verdict::kImproved:
      return "Improvements";
    case Verdict::kSame:
      return "Same, within the threshold";
    case Verdict::kAmbiguous:
      return "Ambiguous";
    case Verdict::kNotJudged:
      return "Not judged";
  }
  return "";
}

absl::string_view CountName(Verdict verdict) {
  switch (verdict) {
    case Verdict::kRegressed:
      return "regressed";
    case Verdict::kImproved:
      return "improved";
    case Verdict::kSame:
      return "same";
    case Verdict::kAmbiguous:
      return "ambiguous";
    case Verdict::kNotJudged:
      return "not judged";
  }
  return "";
}

absl::string_view MetricName(CompareOptions::Metric metric) {
  switch (metric) {
    case CompareOptions::Metric::kRelativeToDense:
      return "relative_to_dense";
    case CompareOptions::Metric::kAbsolute:
      return "absolute";
    case CompareOptions::Metric::kInstructions:
      return "instructions";
  }
  return "";
}

std::string IntervalText(const Finding& finding) {
  if (!finding.interval.has_value()) return "-";
  return absl::StrCat(FormatSignificant(finding.interval->low), " to ",
                      FormatSignificant(finding.interval->high));
}

// Returns a section of the report, with the columns that its findings fill.
Table FindingsTable(const Comparison& comparison, Verdict verdict) {
  std::vector<const Finding*> chosen;
  for (const Finding& finding : comparison.findings) {
    if (finding.verdict == verdict) chosen.push_back(&finding);
  }
  const bool intervals = std::any_of(chosen.begin(), chosen.end(), [](const Finding* finding) {
    return finding->interval.has_value();
  });
  const bool reasons = std::any_of(chosen.begin(), chosen.end(),
                                   [](const Finding* finding) { return !finding->reason.empty(); });
  Table table;
  table.title = std::string(Title(verdict));
  table.columns = {{"what"}, {"base", true}, {"now", true}, {"change", true}};
  if (intervals) table.columns.push_back({"95% interval", true});
  table.columns.push_back({"case", false, 30});
  if (reasons) table.columns.push_back({"reason", false, 12});
  for (const Finding* finding : chosen) {
    std::vector<TableCell> row = {
        {finding->what, verdict == Verdict::kRegressed ? Emphasis::kBad : Emphasis::kNone},
        finding->base.empty() ? "-" : finding->base,
        finding->now.empty() ? "-" : finding->now,
        finding->change == 1 ? "-" : FormatSignificant(finding->change) + "x"};
    if (intervals) row.push_back(IntervalText(*finding));
    row.push_back(finding->subject);
    if (reasons) row.push_back(finding->reason);
    table.rows.push_back(std::move(row));
  }
  return table;
}

std::string Text(const Comparison& comparison, bool markdown, bool all, const TextStyle& style) {
  std::string out;
  for (const Verdict verdict : kVerdicts) {
    const bool is_change = verdict == Verdict::kRegressed || verdict == Verdict::kImproved;
    if (comparison.Count(verdict) == 0 || (!is_change && !all)) continue;
    const Table table = FindingsTable(comparison, verdict);
    absl::StrAppend(&out, markdown ? ToMarkdown(table) : ToTerminal(table, style), "\n");
  }
  for (const std::string& difference : comparison.environment_differences) {
    const std::string text = Printable(difference);
    absl::StrAppend(&out, "environments differ in ", markdown ? MarkdownText(text) : text, "\n");
  }
  absl::StrAppend(&out, comparison.cases, comparison.cases == 1 ? " case" : " cases", " in both, ",
                  comparison.missing, " missing, ", comparison.added, " new; of their numbers");
  absl::string_view separator = " ";
  for (const Verdict verdict : kVerdicts) {
    absl::StrAppend(&out, separator, comparison.Count(verdict), " ", CountName(verdict));
    separator = ", ";
  }
  const bool hides = comparison.Count(Verdict::kAmbiguous) + comparison.Count(Verdict::kNotJudged);
  absl::StrAppend(&out, !all && hides ? " (--all lists them)" : "", "\n",
                  AmbiguityAdvice(comparison),
                  comparison.regressed() ? "regressed" : "nothing regressed", "\n");
  return markdown || style.unicode ? out : ToAscii(out);
}

Json NumberOf(double value) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value > 0 ? "Infinity" : "-Infinity";
  return value;
}

Json JsonOf(const Finding& finding) {
  Json json = {{"verdict", std::string(VerdictWord(finding))},
               {"what", finding.what},
               {"case", finding.subject},
               {"key", finding.key},
               {"base", finding.base},
               {"now", finding.now},
               {"change", NumberOf(finding.change)}};
  if (finding.interval.has_value()) {
    json["low"] = NumberOf(finding.interval->low);
    json["high"] = NumberOf(finding.interval->high);
  }
  if (finding.p_value.has_value()) json["p_value"] = NumberOf(*finding.p_value);
  if (!finding.reason.empty()) json["reason"] = finding.reason;
  return json;
}

std::string JsonText(const Comparison& comparison) {
  Json counts;
  for (const Verdict verdict : kVerdicts) {
    counts[std::string(CountName(verdict))] = comparison.Count(verdict);
  }
  Json findings = Json::array();
  for (const Finding& finding : comparison.findings) findings.push_back(JsonOf(finding));
  const Json json = {{"format", "tfb.Comparison/1"},
                     {"regressed", comparison.regressed()},
                     {"metric", std::string(MetricName(comparison.options.metric))},
                     {"threshold", comparison.options.threshold},
                     {"cases", comparison.cases},
                     {"missing", comparison.missing},
                     {"added", comparison.added},
                     {"counts", counts},
                     {"environment_differences", comparison.environment_differences},
                     {"findings", findings}};
  // Result files may hold any bytes.
  return json.dump(1, ' ', false, Json::error_handler_t::replace) + "\n";
}

}  // namespace

absl::StatusOr<ComparisonFormat> ParseComparisonFormat(absl::string_view name) {
  static const auto* const formats =
      new std::map<absl::string_view, ComparisonFormat>{{"terminal", ComparisonFormat::kTerminal},
                                                        {"markdown", ComparisonFormat::kMarkdown},
                                                        {"comment", ComparisonFormat::kComment},
                                                        {"json", ComparisonFormat::kJson}};
  const auto found = formats->find(name);
  if (found != formats->end()) return found->second;
  return absl::InvalidArgumentError(
      absl::StrCat("--format: \"", name, "\" is none of terminal, markdown, comment, json"));
}

std::string AmbiguityAdvice(const Comparison& comparison) {
  constexpr size_t kMostNames = 12;
  std::set<std::string> names;
  int times = 0;
  for (const Finding& finding : comparison.findings) {
    if (finding.verdict != Verdict::kAmbiguous || !finding.is_time) continue;
    ++times;
    // "near window=256, cpu f32, ...".
    names.insert(finding.subject.substr(0, finding.subject.find_first_of(" ,")));
  }
  if (times == 0) return "";
  return absl::StrCat(
      times, times == 1 ? " time is" : " times are",
      " ambiguous; more samples of both builds, taken by turns, would tell:\n"
      "bazel run //harness:sweep -- --interleave_with=SWEEP_OF_BASE --rounds=3 --time_budget=0",
      names.size() <= kMostNames ? absl::StrCat(" --techniques=", absl::StrJoin(names, ",")) : "",
      "\n");
}

absl::string_view VerdictWord(const Finding& finding) {
  switch (finding.verdict) {
    case Verdict::kRegressed:
      return finding.is_time ? "SLOWER" : "WORSE";
    case Verdict::kImproved:
      return finding.is_time ? "FASTER" : "BETTER";
    case Verdict::kSame:
      return "SAME";
    case Verdict::kAmbiguous:
      return "AMBIGUOUS";
    case Verdict::kNotJudged:
      return "NOT JUDGED";
  }
  return "";
}

std::string RenderComparison(const Comparison& comparison, ComparisonFormat format, bool all,
                             const TextStyle& style) {
  if (format == ComparisonFormat::kJson) return JsonText(comparison);
  if (format == ComparisonFormat::kComment) return RenderComment(comparison);
  return Text(comparison, format == ComparisonFormat::kMarkdown, all, style);
}

}  // namespace tfb
