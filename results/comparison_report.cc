#include "results/comparison_report.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "nlohmann/json.hpp"
#include "results/comparison_comment.h"
#include "results/reader.h"
#include "results/statistics.h"

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

// Returns the report's last line.
std::string VerdictLine(const Comparison& comparison) {
  if (comparison.regressed()) return "regressed";
  if (comparison.judged()) return "nothing regressed";
  return absl::StrCat("cannot be judged: ", comparison.WhyNotJudged());
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
                  AmbiguityAdvice(comparison), VerdictLine(comparison), "\n");
  return markdown || style.unicode ? out : ToAscii(out);
}

Json NumberOf(double value) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value > 0 ? "Infinity" : "-Infinity";
  return value;
}

// Returns the value in six digits. The last ones of a p-value depend on the mathematical functions of
// the machine, and say nothing.
double InSixDigits(double value) {
  double rounded = value;
  return absl::SimpleAtod(absl::StrCat(value), &rounded) ? rounded : value;
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
  if (finding.p_value.has_value()) json["p_value"] = NumberOf(InSixDigits(*finding.p_value));
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
  Json json = {{"format", "tfb.Comparison/1"},
               {"judged", comparison.judged()},
               {"regressed", comparison.regressed()},
               {"metric", std::string(MetricName(comparison.options.metric))},
               {"threshold", comparison.options.threshold},
               {"cases", comparison.cases},
               {"missing", comparison.missing},
               {"added", comparison.added},
               {"counts", counts},
               {"environment_differences", comparison.environment_differences},
               {"findings", findings}};
  if (!comparison.judged()) json["why_not_judged"] = comparison.WhyNotJudged();
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

namespace {

// Returns the word as it may stand in a command of a shell.
std::string Quoted(const std::string& word) {
  const bool plain = std::all_of(word.begin(), word.end(), [](char c) {
    return absl::ascii_isalnum(static_cast<unsigned char>(c)) ||
           absl::string_view("_-+.,:=/@%").find(c) != absl::string_view::npos;
  });
  return plain ? word : absl::StrCat("'", absl::StrReplaceAll(word, {{"'", "'\\''"}}), "'");
}

// The values that cases have of something that a flag of the sweep sets.
template <class T>
using Values = std::set<T>;

// Returns " --flag=values", or nothing where the values are those that the sweep takes by itself.
template <class T>
std::string FlagUnless(absl::string_view flag, const Values<T>& values, const Values<T>& usual) {
  if (values.empty() || values == usual) return "";
  return absl::StrCat(" --", flag, "=", Quoted(absl::StrJoin(values, ",")));
}

// The flags with which a sweep measures the cases of these findings again, and as little else as
// flags allow: they set lists, of which a sweep measures every combination.
class SweepFlags {
 public:
  explicit SweepFlags(const Comparison& comparison) {
    for (const Environment& environment : comparison.now_environments) {
      if (environment.threads() > 0) usual_threads_.insert(environment.threads());
      has_gpu_ = has_gpu_ || environment.gpus_size() > 0;
    }
  }

  void Add(const Finding& finding) {
    const Case::Key& key = finding.case_key;
    const ProblemSize& problem = key.problem();
    names_.insert(key.technique());
    specs_.insert(finding.spec);
    accuracy_ = accuracy_ || key.purpose() == Case::PURPOSE_ACCURACY;
    devices_.insert(std::string(Name(key.device())));
    dtypes_.insert(std::string(Name(key.dtype())));
    passes_.insert(std::string(Name(key.pass())));
    inputs_.insert(key.input().name());
    if (key.threads() > 0) threads_.insert(key.threads());
    seeds_.insert(key.seed());
    lengths_.insert(LengthOf(problem));
    batches_.insert(problem.batch());
    heads_.insert(problem.query_heads());
    if (problem.kv_heads() != problem.query_heads()) kv_heads_.insert(problem.kv_heads());
    head_dims_.insert(problem.head_dim());
    causal_.insert(problem.causal() ? "true" : "false");
  }

  std::string Text() const {
    constexpr size_t kMostNames = 12;
    std::string flags;
    if (specs_.size() <= kMostNames) {
      flags = FlagUnless("techniques", specs_, {});
    } else if (names_.size() <= kMostNames) {
      flags = FlagUnless("techniques", names_, {});
    }
    // Accuracy cases of captured tensors have their own lengths.
    if (!accuracy_) {
      absl::StrAppend(&flags, FlagUnless("lengths", lengths_, {}), " --accuracy=false",
                      FlagUnless("input", inputs_, {"gaussian"}));
    }
    absl::StrAppend(
        &flags, FlagUnless("dtypes", dtypes_, {"f32"}), FlagUnless("pass", passes_, {"forward"}),
        FlagUnless("threads", threads_, usual_threads_), FlagUnless("batches", batches_, {1}),
        FlagUnless("heads", heads_, {8}), FlagUnless("kv_heads", kv_heads_, {}),
        FlagUnless("head_dims", head_dims_, {64}),
        // Drawn inputs are causal by default.
        accuracy_ ? "" : FlagUnless("causal", causal_, {"true"}), FlagUnless("seed", seeds_, {1}));
    if (has_gpu_ || devices_.count("cuda") > 0) {
      absl::StrAppend(&flags, FlagUnless("devices", devices_, {"cpu", "cuda"}));
    }
    return flags;
  }

 private:
  bool has_gpu_ = false, accuracy_ = false;
  Values<std::string> names_, specs_, devices_, dtypes_, passes_, inputs_, causal_;
  Values<int64_t> threads_, usual_threads_, lengths_, batches_, heads_, kv_heads_, head_dims_;
  Values<uint64_t> seeds_;
};

}  // namespace

std::string AmbiguityAdvice(const Comparison& comparison) {
  SweepFlags flags(comparison);
  int times = 0;
  for (const Finding& finding : comparison.findings) {
    if (finding.verdict != Verdict::kAmbiguous || !finding.is_time) continue;
    ++times;
    flags.Add(finding);
  }
  if (times == 0) return "";
  return absl::StrCat(
      times, times == 1 ? " time is" : " times are",
      " ambiguous; more samples of both builds, taken by turns, would tell:\n"
      "bazel run //harness:sweep -- --interleave_with=SWEEP_OF_BASE --rounds=8 --time_budget=0",
      flags.Text(), "\n");
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
