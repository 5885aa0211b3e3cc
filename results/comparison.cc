#include "results/comparison.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "results/reader.h"
#include "results/render.h"
#include "results/statistics.h"

namespace tfb {
namespace {

constexpr int kLeastSamples = 3;
constexpr double kLeastSetupShare = 0.05;

// A positive quantity with an interval, in natural logarithms.
struct LogInterval {
  double middle, low, high;
};

std::optional<LogInterval> LogOf(const std::optional<MedianInterval>& time) {
  if (!time.has_value() || !(time->low > 0) || !std::isfinite(time->high)) return std::nullopt;
  return LogInterval{std::log(time->median), std::log(time->low), std::log(time->high)};
}

// log(a / b), half widths added in quadrature.
LogInterval Ratio(const LogInterval& a, const LogInterval& b) {
  const double middle = a.middle - b.middle;
  return {middle, middle - std::hypot(a.middle - a.low, b.high - b.middle),
          middle + std::hypot(a.high - a.middle, b.middle - b.low)};
}

// One of the two sets, with what is looked up in it.
struct Side {
  explicit Side(const ResultSet& set) : results(set), partners(set), cases(CasesByKey(set)) {}
  const Environment& EnvironmentOf(const Case& result) const {
    static const Environment* const unknown = new Environment();
    const Environment* found = FindEnvironment(results, result.environment_id());
    return found == nullptr ? *unknown : *found;
  }
  const ResultSet& results;
  DensePartners partners;
  std::map<std::string, const Case*> cases;
};

void AddDifference(absl::string_view what, const std::string& base, const std::string& now,
                   std::set<std::string>* differences) {
  if (base == now) return;
  const auto shown = [](const std::string& text) {
    return text.empty() ? std::string("unknown") : Printable(text);
  };
  differences->insert(absl::StrCat(what, ": ", shown(base), " / ", shown(now)));
}

std::string GpuText(const Environment& environment) {
  return absl::StrJoin(environment.gpus(), " + ", [](std::string* out, const Gpu& gpu) {
    absl::StrAppend(out, gpu.name(), " (", gpu.compute_capability(), ")");
  });
}

// In what a case on `device` depends on.
void AddDifferences(const Environment& base, const Environment& now, DeviceType device,
                    std::set<std::string>* differences) {
  AddDifference("processor", base.cpu_model(), now.cpu_model(), differences);
  AddDifference("cores", absl::StrCat(base.logical_cores()), absl::StrCat(now.logical_cores()),
                differences);
  AddDifference("SIMD", absl::StrJoin(base.simd(), " "), absl::StrJoin(now.simd(), " "),
                differences);
  AddDifference("compiler", base.compiler(), now.compiler(), differences);
  AddDifference("compiler flags", base.compile_flags(), now.compile_flags(), differences);
  AddDifference("compilation mode", base.compilation_mode(), now.compilation_mode(), differences);
  if (device != DEVICE_TYPE_CUDA) return;
  AddDifference("GPU", GpuText(base), GpuText(now), differences);
  AddDifference("CUDA compiler", base.cuda_compiler(), now.cuda_compiler(), differences);
}

class Comparer {
 public:
  Comparer(const ResultSet& base, const ResultSet& now, const CompareOptions& options)
      : base_(base), now_(now) {
    comparison_.options = options;
  }

  absl::StatusOr<Comparison> Run() {
    std::vector<std::pair<const Case*, const Case*>> pairs;
    std::set<std::string> differences;
    for (const auto& [key, base] : base_.cases) {
      const auto now = now_.cases.find(key);
      if (now == now_.cases.end()) continue;
      pairs.emplace_back(base, now->second);
      AddDifferences(base_.EnvironmentOf(*base), now_.EnvironmentOf(*now->second),
                     base->key().device(), &differences);
    }
    comparison_.cases = static_cast<int>(pairs.size());
    comparison_.environment_differences.assign(differences.begin(), differences.end());
    if (pairs.empty()) {
      return absl::FailedPreconditionError(absl::StrCat("the two have no case in common (",
                                                        base_.cases.size(), " and ",
                                                        now_.cases.size(), " cases)"));
    }
    if (!differences.empty() && !options().allow_different_environment) {
      return absl::FailedPreconditionError(
          absl::StrCat("the environments differ: ", absl::StrJoin(differences, "; "),
                       "; --allow_different_environment compares what does not depend on them"));
    }
    for (const auto& [base, now] : pairs) CompareCase(*base, *now);
    ComparePresence();
    Sort();
    return std::move(comparison_);
  }

 private:
  const CompareOptions& options() const { return comparison_.options; }

  Finding& Add(absl::string_view what, const Case& result, Verdict verdict) {
    comparison_.findings.emplace_back();
    Finding& finding = comparison_.findings.back();
    finding.what = std::string(what);
    finding.subject = DescribeCase(result);
    finding.verdict = verdict;
    return finding;
  }

  // By a threshold alone: for numbers without noise.
  Verdict Judge(double change, double threshold) const {
    if (change >= threshold || std::isnan(change)) return Verdict::kRegressed;
    return change <= 1 / threshold ? Verdict::kImproved : Verdict::kUnchanged;
  }

  void CompareCase(const Case& base, const Case& now) {
    const Outcome::Status before = base.outcome().status();
    const Outcome::Status after = now.outcome().status();
    if (before != after) {
      const bool gone = options().allow_missing &&
                        (after == Outcome::STATUS_SKIPPED || after == Outcome::STATUS_UNSUPPORTED);
      Verdict verdict = Verdict::kNotJudged;
      if (after == Outcome::STATUS_OK) verdict = Verdict::kImproved;
      if (before == Outcome::STATUS_OK && !gone) verdict = Verdict::kRegressed;
      // Neither is ok: failing where it was skipped is news as well.
      if (before != Outcome::STATUS_OK && after == Outcome::STATUS_FAILED) {
        verdict = Verdict::kRegressed;
      }
      Finding& finding = Add("status", now, verdict);
      finding.base = std::string(Name(before));
      finding.now = std::string(Name(after));
      finding.reason = Printable(now.outcome().reason());
    }
    CompareRuns(base, now);
    CompareSetups(base, now);
    CompareMemory(base, now);
    CompareDefinition(base, now);
    CompareDense(base, now);
  }

  void CompareRuns(const Case& base, const Case& now) {
    CompareTimes("run time", base, now, RunTime(base), RunTime(now));
  }

  void CompareSetups(const Case& base, const Case& now) {
    const std::optional<MedianInterval> before = Median(base.outcome().timing().setup_ns());
    const std::optional<MedianInterval> after = Median(now.outcome().timing().setup_ns());
    const std::optional<MedianInterval> run = RunTime(now);
    if (!before.has_value() || !after.has_value() || !run.has_value()) return;
    if (std::max(before->median, after->median) < kLeastSetupShare * run->median) return;
    CompareTimes("setup time", base, now, before, after);
  }

  // What a time is divided by before it is compared, on both sides alike.
  struct Basis {
    std::string name;
    LogInterval base, now;
    bool portable = false;  // does not depend on the machine's speed
  };

  static std::optional<Basis> DenseBasis(const Side& base_side, const Case& base,
                                         const Side& now_side, const Case& now) {
    const Case* before = base_side.partners.Find(base);
    const Case* after = now_side.partners.Find(now);
    if (before == nullptr || after == nullptr || IsBaseline(base) || IsBaseline(now)) {
      return std::nullopt;
    }
    const std::optional<LogInterval> log_before = LogOf(RunTime(*before));
    const std::optional<LogInterval> log_after = LogOf(RunTime(*after));
    if (!log_before.has_value() || !log_after.has_value()) return std::nullopt;
    return Basis{" over dense", *log_before, *log_after, true};
  }

  static std::optional<Basis> PeakBasis(const Side& base_side, const Case& base,
                                        const Side& now_side, const Case& now) {
    // The time that its operations take at the measured peak.
    const std::optional<LogInterval> before = TimeAtPeak(base_side, base);
    const std::optional<LogInterval> after = TimeAtPeak(now_side, now);
    if (!before.has_value() || !after.has_value()) return std::nullopt;
    return Basis{" over that at the measured peak", *before, *after, true};
  }

  // The first is what the verdict is about. A second one is another view of the machine's speed.
  std::vector<Basis> FindBases(const Case& base, const Case& now) const {
    std::vector<Basis> bases;
    if (options().metric == CompareOptions::Metric::kRelativeToDense) {
      if (auto dense = DenseBasis(base_, base, now_, now)) bases.push_back(*std::move(dense));
      if (auto peak = PeakBasis(base_, base, now_, now)) bases.push_back(*std::move(peak));
    }
    if (bases.empty() || comparison_.environment_differences.empty()) {
      bases.push_back({"", {0, 0, 0}, {0, 0, 0}, false});
    }
    return bases;
  }

  static std::optional<LogInterval> TimeAtPeak(const Side& side, const Case& result) {
    const std::optional<double> share = ShareOfComputePeak(result, side.EnvironmentOf(result));
    const std::optional<MedianInterval> time = RunTime(result);
    if (!share.has_value() || !(*share > 0) || !time.has_value()) return std::nullopt;
    const double log_time = std::log(time->median * *share);
    return LogInterval{log_time, log_time, log_time};
  }

  void CompareTimes(const std::string& name, const Case& base, const Case& now,
                    const std::optional<MedianInterval>& before,
                    const std::optional<MedianInterval>& after) {
    if (!before.has_value() || !after.has_value()) return;
    const std::optional<LogInterval> log_before = LogOf(before);
    const std::optional<LogInterval> log_after = LogOf(after);
    if (!log_before.has_value() || !log_after.has_value()) {
      Add(name, now, Verdict::kNotJudged).reason = "a time that is not positive and finite";
      return;
    }
    const std::vector<Basis> bases = FindBases(base, now);
    const Basis& basis = bases[0];
    const LogInterval ratio_before = Ratio(*log_before, basis.base);
    const LogInterval ratio_after = Ratio(*log_after, basis.now);
    const double change = std::exp(ratio_after.middle - ratio_before.middle);

    Finding& finding = Add(name + basis.name, now, Judge(change, options().threshold));
    finding.change = change;
    if (basis.portable) {
      finding.base = FormatSignificant(std::exp(ratio_before.middle));
      finding.now = FormatSignificant(std::exp(ratio_after.middle));
    } else {
      finding.base = absl::StrCat(FormatMilliseconds(before->median), " ms");
      finding.now = absl::StrCat(FormatMilliseconds(after->median), " ms");
    }
    if (!basis.portable && !comparison_.environment_differences.empty()) {
      finding.verdict = Verdict::kNotJudged;
      finding.reason = "a time of another environment";
    } else if (finding.verdict == Verdict::kUnchanged) {
      return;
    } else if (std::min(before->samples, after->samples) < kLeastSamples) {
      finding.verdict = Verdict::kNotJudged;
      finding.reason = absl::StrCat("fewer than ", kLeastSamples, " samples");
    } else if (ratio_before.low <= ratio_after.high && ratio_after.low <= ratio_before.high) {
      finding.verdict = Verdict::kNoise;
    } else if (bases.size() > 1) {
      // Where dense alone changed, every technique seems to: a second view must agree.
      const double other = std::exp(Ratio(*log_after, bases[1].now).middle -
                                    Ratio(*log_before, bases[1].base).middle);
      if (Judge(other, options().threshold) != finding.verdict) {
        finding.verdict = Verdict::kNotJudged;
        finding.reason = absl::StrCat("dense changed: the ", name, bases[1].name, " is ",
                                      FormatSignificant(other), "x what it was");
      }
    }
  }

  void CompareMemory(const Case& base, const Case& now) {
    const std::optional<double> before = WorkingMemoryBytes(base.outcome());
    const std::optional<double> after = WorkingMemoryBytes(now.outcome());
    if (!before.has_value() || !after.has_value()) return;
    // Below a page there is nothing to regress: 0 to 64 bytes is no infinite growth.
    constexpr double kPageBytes = 4096;
    const double change = std::max(*after, kPageBytes) / std::max(*before, kPageBytes);
    Finding& finding = Add("working memory", now, Judge(change, options().threshold));
    finding.base = FormatBytes(before);
    finding.now = FormatBytes(after);
    finding.change = change;
  }

  void AddErrors(absl::string_view what, const Case& result, double before, double after,
                 Verdict verdict) {
    Finding& finding = Add(what, result, verdict);
    finding.base = FormatError(before);
    finding.now = FormatError(after);
    finding.change = before > 0 ? after / before : after > 0 ? HUGE_VAL : 1;
  }

  void CompareDefinition(const Case& base, const Case& now) {
    const ErrorMeasure& before = base.outcome().against_definition();
    const ErrorMeasure& after = now.outcome().against_definition();
    const std::optional<double> value_before = BoundedValue(before);
    const std::optional<double> value_after = BoundedValue(after);
    if (!value_before.has_value() || !value_after.has_value()) return;
    constexpr absl::string_view kWhat = "error against its definition";
    if (before.has_passed() && after.has_passed()) {
      Verdict verdict = Verdict::kUnchanged;
      if (before.passed() && !after.passed()) verdict = Verdict::kRegressed;
      if (!before.passed() && after.passed()) verdict = Verdict::kImproved;
      AddErrors(kWhat, now, *value_before, *value_after, verdict);
    } else {
      AddErrors(kWhat, now, *value_before, *value_after, JudgeError(*value_before, *value_after));
    }
  }

  Verdict JudgeError(double before, double after) const {
    if (std::isnan(before)) return std::isnan(after) ? Verdict::kUnchanged : Verdict::kImproved;
    const double floor = std::max(options().error_floor, std::numeric_limits<double>::min());
    return Judge(std::max(after, floor) / std::max(before, floor), options().error_threshold);
  }

  void CompareDense(const Case& base, const Case& now) {
    const auto value = [](const Case& result) -> std::optional<double> {
      const ErrorMeasure& error = result.outcome().against_dense();
      if (error.has_relative_frobenius()) return error.relative_frobenius();
      return BoundedValue(error);
    };
    const std::optional<double> before = value(base);
    const std::optional<double> after = value(now);
    if (!before.has_value() || !after.has_value()) return;
    // std::max drops a NaN on its right: asked for first.
    const Verdict verdict = std::isnan(*after) && !std::isnan(*before)
                                ? Verdict::kRegressed
                                : JudgeError(*before, *after);
    AddErrors("error against dense", now, *before, *after, verdict);
  }

  void ComparePresence() {
    for (const auto& [key, base] : base_.cases) {
      if (now_.cases.count(key) > 0) continue;
      ++comparison_.missing;
      const bool ran = base->outcome().status() == Outcome::STATUS_OK;
      Finding& finding =
          Add("presence", *base,
              ran && !options().allow_missing ? Verdict::kRegressed : Verdict::kNotJudged);
      finding.base = std::string(Name(base->outcome().status()));
      finding.now = "missing";
    }
    for (const auto& [key, now] : now_.cases) {
      if (base_.cases.count(key) > 0) continue;
      ++comparison_.added;
      if (now->outcome().status() != Outcome::STATUS_FAILED) continue;
      Finding& finding = Add("presence", *now, Verdict::kRegressed);
      finding.base = "missing";
      finding.now = "failed";
      finding.reason = Printable(now->outcome().reason());
    }
  }

  void Sort() {
    std::stable_sort(comparison_.findings.begin(), comparison_.findings.end(),
                     [](const Finding& a, const Finding& b) {
                       if (a.verdict != b.verdict) return a.verdict < b.verdict;
                       const double size_a = std::fabs(std::log(a.change));
                       const double size_b = std::fabs(std::log(b.change));
                       // What is no number comes first.
                       const bool number_a = a.change != 1 && !std::isnan(size_a);
                       const bool number_b = b.change != 1 && !std::isnan(size_b);
                       if (number_a != number_b) return number_b;
                       return number_a && size_a > size_b;
                     });
  }

  Side base_;
  Side now_;
  Comparison comparison_;
};

absl::string_view Title(Verdict verdict) {
  switch (verdict) {
    case Verdict::kRegressed:
      return "Regressions";
    case Verdict::kImproved:
      return "Improvements";
    case Verdict::kUnchanged:
      return "Within the threshold";
    case Verdict::kNoise:
      return "Beyond the threshold, but within the noise";
    case Verdict::kNotJudged:
      return "Not judged";
  }
  return "";
}

Table FindingsTable(const Comparison& comparison, Verdict verdict) {
  Table table;
  table.title = std::string(Title(verdict));
  table.columns = {{"what"},         {"base", true},      {"now", true},
                   {"change", true}, {"case", false, 30}, {"reason", false, 12}};
  const bool reasons = std::any_of(comparison.findings.begin(), comparison.findings.end(),
                                   [&](const Finding& finding) {
                                     return finding.verdict == verdict && !finding.reason.empty();
                                   });
  if (!reasons) table.columns.pop_back();
  for (const Finding& finding : comparison.findings) {
    if (finding.verdict != verdict) continue;
    std::vector<TableCell> row = {
        {finding.what, verdict == Verdict::kRegressed ? Emphasis::kBad : Emphasis::kNone},
        finding.base.empty() ? "-" : finding.base,
        finding.now.empty() ? "-" : finding.now,
        finding.change == 1 ? "-" : FormatSignificant(finding.change) + "x",
        finding.subject};
    if (reasons) row.push_back(finding.reason);
    table.rows.push_back(std::move(row));
  }
  return table;
}

}  // namespace

int Comparison::Count(Verdict verdict) const {
  return static_cast<int>(
      std::count_if(findings.begin(), findings.end(),
                    [verdict](const Finding& finding) { return finding.verdict == verdict; }));
}

absl::StatusOr<Comparison> Compare(const ResultSet& base, const ResultSet& now,
                                   const CompareOptions& options) {
  const auto check = [](absl::string_view name, double value) {
    return value > 1 && std::isfinite(value)
               ? absl::OkStatus()
               : absl::InvalidArgumentError(
                     absl::StrCat("--", name, "=", value, ": a factor above 1 is wanted"));
  };
  if (absl::Status status = check("threshold", options.threshold); !status.ok()) return status;
  if (absl::Status status = check("error_threshold", options.error_threshold); !status.ok()) {
    return status;
  }
  if (!(options.error_floor >= 0)) {
    return absl::InvalidArgumentError(
        absl::StrCat("--error_floor=", options.error_floor, ": 0 or more is wanted"));
  }
  return Comparer(base, now, options).Run();
}

std::string RenderComparison(const Comparison& comparison, bool markdown, bool all,
                             const TextStyle& style) {
  std::string out;
  std::vector<Verdict> verdicts = {Verdict::kRegressed, Verdict::kImproved};
  if (all) {
    verdicts.insert(verdicts.end(), {Verdict::kNoise, Verdict::kNotJudged, Verdict::kUnchanged});
  }
  for (const Verdict verdict : verdicts) {
    if (comparison.Count(verdict) == 0) continue;
    const Table table = FindingsTable(comparison, verdict);
    absl::StrAppend(&out, markdown ? ToMarkdown(table) : ToTerminal(table, style), "\n");
  }
  for (const std::string& difference : comparison.environment_differences) {
    absl::StrAppend(&out, "environments differ in ", difference, "\n");
  }
  const int shown_only_with_all =
      comparison.Count(Verdict::kNoise) + comparison.Count(Verdict::kNotJudged);
  absl::StrAppend(
      &out, comparison.cases, comparison.cases == 1 ? " case" : " cases", " in both, ",
      comparison.missing, " missing, ", comparison.added, " new; of their numbers ",
      comparison.Count(Verdict::kRegressed), " regressed, ", comparison.Count(Verdict::kImproved),
      " improved, ", comparison.Count(Verdict::kUnchanged), " unchanged, ",
      comparison.Count(Verdict::kNoise), " within noise, ", comparison.Count(Verdict::kNotJudged),
      " not judged", !all && shown_only_with_all > 0 ? " (--all lists them)" : "", "\n");
  absl::StrAppend(&out, comparison.regressed() ? "regressed" : "nothing regressed", "\n");
  return markdown || style.unicode ? out : ToAscii(out);
}

}  // namespace tfb
