#include "results/comparison.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "core/status.h"
#include "results/analysis.h"
#include "results/describe.h"
#include "results/reader.h"
#include "results/statistics.h"
#include "results/table.h"

namespace tfb {
namespace {

constexpr int kLeastSamples = 3;
constexpr double kLeastSetupShare = 0.05;
constexpr double kSignificance = 0.05;
constexpr char kOverDense[] = " over dense";

using Samples = std::vector<double>;
template <class Range>
Samples ToSamples(const Range& range) {
  return Samples(range.begin(), range.end());
}

// Returns the same number for the same text on every platform (FNV-1a).
uint64_t SeedOf(absl::string_view text) {
  uint64_t hash = 14695981039346656037u;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211u;
  return hash;
}

// One of the two sets, with indices for lookups.
struct Side {
  Side(const ResultSet& set, bool any_precision) : results(set), partners(set) {
    for (const auto& [key, result] : CasesByKey(set)) {
      if (!any_precision) {
        cases[key] = result;
        continue;
      }
      Case::Key without = result->key();
      without.clear_dtype();
      cases[CaseKey(without)] = result;
    }
  }
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

// Compares only the fields that a case on `device` depends on.
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

constexpr char kElementTypes[] = "element types";

// Returns the names of a key's fields, and their values as text.
std::map<std::string, std::string> FieldsOf(const Case::Key& key) {
  const ProblemSize& problem = key.problem();
  return {{"techniques", key.technique()},
          {"options", CanonicalOptions(key)},
          {"devices", std::string(Name(key.device()))},
          {kElementTypes, std::string(Name(key.dtype()))},
          {"threads", absl::StrCat(key.threads())},
          {"seeds", absl::StrCat(key.seed())},
          {"inputs", DescribeInput(key.input())},
          {"lengths", absl::StrCat(LengthOf(problem))},
          {"problems", DescribeProblem(problem, /*with_tokens=*/false)},
          {"purposes", std::string(Name(key.purpose()))},
          {"passes", std::string(Name(key.pass()))}};
}

// Says why the two sides have no key in common: lists the fields that share no value.
std::string WhyNothingInCommon(const Side& base, const Side& now) {
  static constexpr size_t kShown = 4;
  std::map<std::string, std::set<std::string>> values[2];
  for (const auto& [key, result] : base.cases) {
    for (const auto& [field, value] : FieldsOf(result->key())) values[0][field].insert(value);
  }
  for (const auto& [key, result] : now.cases) {
    for (const auto& [field, value] : FieldsOf(result->key())) values[1][field].insert(value);
  }
  const auto shown = [](const std::set<std::string>& all) {
    std::vector<std::string> some(all.begin(),
                                  std::next(all.begin(), std::min(size_t{kShown}, all.size())));
    if (all.size() > kShown) some.push_back("...");
    return Printable(absl::StrJoin(some, ", "));
  };
  std::vector<std::string> differences;
  for (const auto& [field, of_base] : values[0]) {
    const std::set<std::string>& of_now = values[1][field];
    const bool common = std::any_of(of_base.begin(), of_base.end(), [&](const std::string& value) {
      return of_now.count(value) > 0;
    });
    if (common || of_now.empty()) continue;
    differences.push_back(absl::StrCat(field, ": ", shown(of_base), " / ", shown(of_now)));
  }
  const bool precision = differences.size() == 1 && absl::StartsWith(differences[0], kElementTypes);
  return absl::StrCat("the two have no case in common (", base.cases.size(), " and ",
                      now.cases.size(), " cases)", differences.empty() ? "" : "; ",
                      absl::StrJoin(differences, "; "),
                      precision ? "; --allow_different_precision matches them all the same" : "");
}

enum class TimeKind { kRun, kSetup };

// A time on both sides, divided by a quantity that was measured beside it.
struct TimeView {
  std::string divisor;         // " over dense"; empty for the time itself
  std::vector<Factor> change;  // now over base
  Samples base, now;           // divided, each sample by its divisor or by their median
  bool portable = false;       // does not depend on the machine's speed
};

// Returns the number of samples of the smallest set.
size_t LeastSamples(const TimeView& view) {
  size_t least = std::min(view.base.size(), view.now.size());
  for (const Factor& factor : view.change) least = std::min(least, factor.samples.size());
  return least;
}

// Returns the p-value of a change of 1. The rank sum test takes the divisors' medians for constants.
// Where a divisor has samples of its own the p-value also has to account for their noise, which the
// trimmed means do. They alone would not do: with few samples their small p-values assume normal
// means, while the rank sum test never claims more than the number of orders allows.
double PValueOf(const TimeView& view) {
  const double of_ranks = MannWhitneyP(view.base, view.now);
  if (view.change.size() == 2) return of_ranks;
  return std::max(of_ranks, TrimmedRatioP(view.change));
}

double MedianOrNan(const Samples& samples) {
  const std::optional<MedianInterval> median = MedianOf(samples);
  return median.has_value() ? median->median : std::nan("");
}

Samples Quotients(const Samples& samples, const Samples& divisors) {
  Samples quotients;
  for (size_t i = 0; i < samples.size(); ++i) quotients.push_back(samples[i] / divisors[i]);
  return quotients;
}

// Returns the samples themselves where there are no divisors.
TimeView ViewOf(absl::string_view divisor, const Samples& base, const Samples& base_divisor,
                const Samples& now, const Samples& now_divisor, bool portable) {
  TimeView view;
  view.divisor = std::string(divisor);
  view.change = {{now, true}, {base, false}};
  view.base = base;
  view.now = now;
  view.portable = portable;
  if (base_divisor.empty()) return view;
  view.change.push_back({now_divisor, false});
  view.change.push_back({base_divisor, true});
  const double of_base = MedianOrNan(base_divisor), of_now = MedianOrNan(now_divisor);
  for (double& sample : view.base) sample /= of_base;
  for (double& sample : view.now) sample /= of_now;
  return view;
}

// Returns the samples of a case's warm runs, or none where it did not run.
Samples RunSamples(const Case& result) {
  if (!RunTime(result).has_value()) return {};
  return ToSamples(result.outcome().timing().run_ns());
}

// Tells whether a case was tried and did not end well.
bool WasTried(Outcome::Status status) {
  return status == Outcome::STATUS_FAILED || status == Outcome::STATUS_TIMEOUT ||
         status == Outcome::STATUS_OUT_OF_MEMORY;
}

// Returns "near:window=256" for the case that is shown as "near window=256".
std::string SpecOf(const Case& result) {
  std::string spec = result.key().technique();
  absl::string_view separator = ":";
  const std::string name = DisplayName(result);
  for (const absl::string_view word : absl::StrSplit(name, ' ')) {
    if (!absl::StrContains(word, '=')) continue;
    absl::StrAppend(&spec, separator, word);
    separator = ",";
  }
  return spec;
}

class Comparer {
 public:
  Comparer(const ResultSet& base, const ResultSet& now, const CompareOptions& options)
      : base_(base, options.allow_different_precision),
        now_(now, options.allow_different_precision) {
    comparison_.options = options;
    comparison_.base_environments.assign(base.environments().begin(), base.environments().end());
    comparison_.now_environments.assign(now.environments().begin(), now.environments().end());
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
    if (pairs.empty()) return absl::FailedPreconditionError(WhyNothingInCommon(base_, now_));
    if (!differences.empty() && !options().allow_different_environment) {
      return absl::FailedPreconditionError(
          absl::StrCat("the environments differ: ", absl::StrJoin(differences, "; "),
                       "; --allow_different_environment compares what does not depend on them"));
    }
    if (options().metric == CompareOptions::Metric::kInstructions) {
      TFB_RETURN_IF_ERROR(CheckInstructions(pairs));
    }
    for (const auto& [base, now] : pairs) CompareCase(*base, *now);
    ComparePresence();
    CorrectForNumberOfTimes();
    Sort();
    return std::move(comparison_);
  }

 private:
  const CompareOptions& options() const { return comparison_.options; }

  // Each side has them for some case.
  static absl::Status CheckInstructions(
      const std::vector<std::pair<const Case*, const Case*>>& pairs) {
    bool of_base = false, of_now = false;
    for (const auto& [base, now] : pairs) {
      of_base = of_base || base->outcome().timing().run_instructions_size() > 0;
      of_now = of_now || now->outcome().timing().run_instructions_size() > 0;
    }
    if (of_base && of_now) return absl::OkStatus();
    return absl::FailedPreconditionError(
        absl::StrCat("--metric=instructions: ",
                     of_base  ? "NEW"
                     : of_now ? "BASE"
                              : "neither of the two",
                     of_base || of_now ? " has no" : " has",
                     " counts of instructions: the kernel of a machine "
                     "grants them where it has a counter and perf_event_paranoid is at most 2"));
  }

  Finding& Add(absl::string_view what, const Case& result, Verdict verdict) {
    comparison_.findings.emplace_back();
    Finding& finding = comparison_.findings.back();
    finding.what = std::string(what);
    finding.subject = DescribeCase(result);
    finding.key = CaseKey(result);
    finding.case_key = result.key();
    finding.spec = SpecOf(result);
    finding.verdict = verdict;
    return finding;
  }

  // Reports a number that BASE has and NEW lacks, of a case that ran in both. Where the status
  // differs, it explains missing numbers.
  void AddVanished(absl::string_view what, std::string base_text, const Case& base,
                   const Case& now) {
    const bool ran = base.outcome().status() == Outcome::STATUS_OK &&
                     now.outcome().status() == Outcome::STATUS_OK;
    if (!ran) return;
    Finding& finding =
        Add(what, now, options().allow_missing ? Verdict::kNotJudged : Verdict::kRegressed);
    finding.base = std::move(base_text);
    finding.now = "missing";
  }

  // The same for an error. One that the sweep of NEW did not measure, and says why, is not judged:
  // a check that would not fit into the time budget of one build may have fitted into the other's.
  void AddVanishedError(absl::string_view what, double before, const Case& base, const Case& now) {
    const size_t count = comparison_.findings.size();
    AddVanished(what, FormatError(before), base, now);
    const bool added = comparison_.findings.size() > count;
    const std::string& reason = now.outcome().reason();
    if (added && !reason.empty()) NotJudged(Printable(reason), &comparison_.findings.back());
  }

  // Judges a number without noise, only by the threshold.
  Verdict Judge(double change, double threshold) const {
    if (change >= threshold || std::isnan(change)) return Verdict::kRegressed;
    return change <= 1 / threshold ? Verdict::kImproved : Verdict::kSame;
  }

  void CompareCase(const Case& base, const Case& now) {
    const Outcome::Status before = base.outcome().status();
    const Outcome::Status after = now.outcome().status();
    if (before != after) {
      const bool gone = options().allow_missing &&
                        (after == Outcome::STATUS_SKIPPED || after == Outcome::STATUS_UNSUPPORTED);
      Verdict verdict = Verdict::kNotJudged;
      if (after == Outcome::STATUS_OK && WasTried(before)) verdict = Verdict::kImproved;
      if (before == Outcome::STATUS_OK && !gone) verdict = Verdict::kRegressed;
      // Failing where it was skipped is news as well.
      if (after == Outcome::STATUS_FAILED) verdict = Verdict::kRegressed;
      Finding& finding = Add("status", now, verdict);
      finding.base = std::string(Name(before));
      finding.now = std::string(Name(after));
      finding.reason = Printable(now.outcome().reason());
      if (after == Outcome::STATUS_OK && verdict == Verdict::kNotJudged) {
        finding.reason = "newly measured";
      }
    }
    CompareRuns(base, now);
    CompareSetups(base, now);
    CompareMemory(base, now);
    if (base.key().dtype() != now.key().dtype()) return;
    CompareDefinition(base, now);
    CompareGradients(base, now);
    CompareDense(base, now);
  }

  void CompareRuns(const Case& base, const Case& now) {
    if (options().metric == CompareOptions::Metric::kInstructions) {
      CompareInstructions(base, now);
    } else {
      CompareTimes(TimeKind::kRun, base, now, RunSamples(base), RunSamples(now));
    }
  }

  void CompareInstructions(const Case& base, const Case& now) {
    const Samples before = ToSamples(base.outcome().timing().run_instructions());
    const Samples after = ToSamples(now.outcome().timing().run_instructions());
    if (!before.empty() && after.empty()) {
      AddVanished("instructions", FormatSignificant(MedianOrNan(before)), base, now);
    }
    if (before.empty() || after.empty()) return;
    Finding& finding = Add("instructions", now, Verdict::kSame);
    finding.is_time = true;
    finding.base = FormatSignificant(MedianOrNan(before));
    finding.now = FormatSignificant(MedianOrNan(after));
    JudgeInterval(BootstrapRatio({{after, true}, {before, false}}, SeedOf(finding.key)), &finding);
  }

  void CompareSetups(const Case& base, const Case& now) {
    if (options().metric == CompareOptions::Metric::kInstructions) return;
    Samples before = ToSamples(base.outcome().timing().setup_ns());
    Samples after = ToSamples(now.outcome().timing().setup_ns());
    const std::optional<MedianInterval> run = RunTime(now);
    if (!run.has_value()) return;  // CompareRuns reports it
    const double least = kLeastSetupShare * run->median;
    const auto is_negligible = [least](const Samples& samples) {
      return samples.empty() || MedianOrNan(samples) < least;
    };
    if (is_negligible(before) && is_negligible(after)) return;
    // A setup that becomes large is compared with the smallest large one, since it may have been 0.
    for (Samples* samples : {&before, &after}) {
      for (double& ns : *samples) {
        if (ns >= 0) ns = std::max(ns, least);
      }
    }
    CompareTimes(TimeKind::kSetup, base, now, before, after);
  }

  // Divides each sample of a run by one of dense that was taken at about the same time, where the
  // records tell, else all samples by the median of dense.
  std::optional<TimeView> OverDense(TimeKind time, const Case& base, const Case& now,
                                    const Samples& before, const Samples& after) const {
    const Case* dense_before = base_.partners.Find(base);
    const Case* dense_after = now_.partners.Find(now);
    if (dense_before == nullptr || dense_after == nullptr || IsBaseline(base) || IsBaseline(now)) {
      return std::nullopt;
    }
    const SideBySide beside_base = SamplesSideBySide({{&base, dense_before}});
    const SideBySide beside_now = SamplesSideBySide({{&now, dense_after}});
    const Samples &of_base = beside_base.dense_ns, &of_now = beside_now.dense_ns;
    if (of_base.empty() || of_now.empty()) return std::nullopt;
    if (time == TimeKind::kRun && beside_base.are_pairs && beside_now.are_pairs) {
      return ViewOf(kOverDense, Quotients(beside_base.technique_ns, of_base), {},
                    Quotients(beside_now.technique_ns, of_now), {}, /*portable=*/true);
    }
    return ViewOf(kOverDense, before, of_base, after, of_now, /*portable=*/true);
  }

  std::optional<TimeView> OverProbe(const Case& base, const Case& now, const Samples& before,
                                    const Samples& after) const {
    const Samples of_base = ToSamples(base.outcome().timing().probe_ns());
    const Samples of_now = ToSamples(now.outcome().timing().probe_ns());
    if (of_base.empty() || of_now.empty() || !comparison_.environment_differences.empty()) {
      return std::nullopt;
    }
    constexpr absl::string_view kDivisor = " over fixed arithmetic beside it";
    if (of_base.size() != before.size() || of_now.size() != after.size()) {
      return ViewOf(kDivisor, before, of_base, after, of_now, /*portable=*/true);
    }
    // Each sample has its own divisor.
    return ViewOf(kDivisor, Quotients(before, of_base), {}, Quotients(after, of_now), {},
                  /*portable=*/true);
  }

  std::optional<TimeView> OverPeak(const Case& base, const Case& now, const Samples& before,
                                   const Samples& after) const {
    const std::optional<double> of_base = TimeAtPeak(base_, base), of_now = TimeAtPeak(now_, now);
    if (!of_base.has_value() || !of_now.has_value()) return std::nullopt;
    // A peak is one number, so that its noise is not known.
    return ViewOf(" over that at the measured peak",
                  Quotients(before, Samples(before.size(), *of_base)), {},
                  Quotients(after, Samples(after.size(), *of_now)), {}, /*portable=*/true);
  }

  // Returns the time that a run's operations take at the measured peak.
  static std::optional<double> TimeAtPeak(const Side& side, const Case& result) {
    const std::optional<double> share = ShareOfComputePeak(result, side.EnvironmentOf(result));
    const std::optional<MedianInterval> time = RunTime(result);
    if (!share.has_value() || !(*share > 0) || !time.has_value()) return std::nullopt;
    return time->median * *share;
  }

  TimeView ChooseView(TimeKind time, const Case& base, const Case& now, const Samples& before,
                      const Samples& after) const {
    if (options().metric == CompareOptions::Metric::kRelativeToDense) {
      if (auto view = OverDense(time, base, now, before, after)) return *std::move(view);
      if (auto view = OverProbe(base, now, before, after)) return *std::move(view);
      if (auto view = OverPeak(base, now, before, after)) return *std::move(view);
    }
    return ViewOf("", before, {}, after, {}, /*portable=*/false);
  }

  void CompareTimes(TimeKind time, const Case& base, const Case& now, const Samples& before,
                    const Samples& after) {
    const absl::string_view name = time == TimeKind::kRun ? "run time" : "setup time";
    if (!before.empty() && after.empty()) {
      AddVanished(name, absl::StrCat(FormatMilliseconds(MedianOrNan(before)), " ms"), base, now);
    }
    if (before.empty() || after.empty()) return;
    const TimeView view = ChooseView(time, base, now, before, after);
    Finding& finding = Add(absl::StrCat(name, view.divisor), now, Verdict::kSame);
    finding.is_time = true;
    const std::optional<RatioInterval> change =
        BootstrapRatio(view.change, SeedOf(absl::StrCat(name, finding.key)));
    if (change.has_value()) finding.change = change->ratio;
    const auto shown = [&](const Samples& samples, const Samples& divided) {
      return view.portable ? FormatSignificant(MedianOrNan(divided))
                           : absl::StrCat(FormatMilliseconds(MedianOrNan(samples)), " ms");
    };
    finding.base = shown(before, view.base);
    finding.now = shown(after, view.now);
    if (!AreTimes(after) && AreTimes(before)) {
      finding.verdict = Verdict::kRegressed;
      finding.reason = "a time of NEW is not positive and finite";
    } else if (!change.has_value()) {
      NotJudged("a time that is not positive and finite", &finding);
    } else if (!view.portable && !comparison_.environment_differences.empty()) {
      NotJudged("a time of another environment", &finding);
    } else if (LeastSamples(view) < kLeastSamples) {
      NotJudged(absl::StrCat("fewer than ", kLeastSamples, " samples"), &finding);
    } else {
      finding.p_value = PValueOf(view);
      JudgeInterval(change, &finding);
      std::optional<TimeView> other = OverProbe(base, now, before, after);
      if (!other.has_value()) other = OverPeak(base, now, before, after);
      Confirm(view, other, &finding);
    }
  }

  static bool AreTimes(const Samples& samples) {
    return std::all_of(samples.begin(), samples.end(),
                       [](double ns) { return std::isfinite(ns) && ns > 0; });
  }

  static void NotJudged(std::string reason, Finding* finding) {
    finding->verdict = Verdict::kNotJudged;
    finding->reason = std::move(reason);
  }

  void JudgeInterval(const std::optional<RatioInterval>& change, Finding* finding) const {
    if (!change.has_value()) return NotJudged("a number that is not positive and finite", finding);
    finding->change = change->ratio;
    finding->interval = change;
    const double threshold = options().threshold;
    if (change->low > threshold) {
      finding->verdict = Verdict::kRegressed;
    } else if (change->high < 1 / threshold) {
      finding->verdict = Verdict::kImproved;
    } else if (change->low >= 1 / threshold && change->high <= threshold) {
      finding->verdict = Verdict::kSame;
    } else {
      finding->verdict = Verdict::kAmbiguous;
    }
  }

  // Makes a verdict ambiguous that a second metric contradicts, as where only dense changed: half of the
  // change over dense, in powers of it, has to be the technique's own, or that one's interval beyond the
  // threshold. With less, noise alone would call what did not change slower wherever dense is faster.
  void Confirm(const TimeView& view, const std::optional<TimeView>& other, Finding* finding) const {
    if (view.divisor != kOverDense || !other.has_value()) return;
    const double change = MedianOrNan(other->now) / MedianOrNan(other->base);
    const std::optional<RatioInterval> own =
        BootstrapRatio(other->change, SeedOf(absl::StrCat(other->divisor, finding->key)));
    const double threshold = options().threshold;
    bool confirmed = true;
    if (finding->verdict == Verdict::kRegressed) {
      confirmed = change >= std::sqrt(std::max(threshold, finding->change)) ||
                  (own.has_value() && own->low > threshold);
    } else if (finding->verdict == Verdict::kImproved) {
      confirmed = change <= std::sqrt(std::min(1 / threshold, finding->change)) ||
                  (own.has_value() && own->high < 1 / threshold);
    }
    if (confirmed) return;
    finding->verdict = Verdict::kAmbiguous;
    finding->reason = absl::StrCat("dense changed: the time", other->divisor, " is ",
                                   FormatSignificant(change), "x what it was");
  }

  // Corrects p-values for multiple testing, since of many equal times some differ by chance.
  void CorrectForNumberOfTimes() {
    std::vector<Finding*> tested;
    std::vector<double> p_values;
    for (Finding& finding : comparison_.findings) {
      if (!finding.p_value.has_value()) continue;
      tested.push_back(&finding);
      p_values.push_back(*finding.p_value);
    }
    const std::vector<double> adjusted = HolmAdjusted(p_values);
    for (size_t i = 0; i < tested.size(); ++i) {
      Finding& finding = *tested[i];
      finding.p_value = adjusted[i];
      const bool changed =
          finding.verdict == Verdict::kRegressed || finding.verdict == Verdict::kImproved;
      if (!changed || adjusted[i] < kSignificance) continue;
      finding.verdict = Verdict::kAmbiguous;
      finding.reason = absl::StrCat("too few samples to be sure among ", tested.size(),
                                    " times: p = ", FormatSignificant(adjusted[i]));
    }
  }

  void CompareMemory(const Case& base, const Case& now) {
    const std::optional<double> before = WorkingMemoryBytes(base.outcome());
    const std::optional<double> after = WorkingMemoryBytes(now.outcome());
    if (before.has_value() && !after.has_value()) {
      AddVanished("working memory", FormatBytes(before), base, now);
    }
    if (!before.has_value() || !after.has_value()) return;
    // Sizes below a page are not judged: 0 to 64 bytes would be infinite growth.
    constexpr double kPageBytes = 4096;
    const double change = std::max(*after, kPageBytes) / std::max(*before, kPageBytes);
    Finding& finding = Add("working memory", now, Judge(change, options().memory_threshold));
    finding.base = FormatBytes(before);
    finding.now = FormatBytes(after);
    finding.change = change;
  }

  void AddErrors(absl::string_view what, const Case& result, double before, double after,
                 Verdict verdict) {
    Finding& finding = Add(what, result, verdict);
    finding.base = FormatError(before);
    finding.now = FormatError(after);
    finding.change = before == after ? 1 : before > 0 ? after / before : after > 0 ? HUGE_VAL : 1;
  }

  void CompareDefinition(const Case& base, const Case& now) {
    const ErrorMeasure& before = base.outcome().against_definition();
    const ErrorMeasure& after = now.outcome().against_definition();
    const std::optional<double> value_before = BoundedValue(before);
    const std::optional<double> value_after = BoundedValue(after);
    constexpr absl::string_view kWhat = "error against its definition";
    if (value_before.has_value() && !value_after.has_value()) {
      AddVanishedError(kWhat, *value_before, base, now);
    }
    if (!value_before.has_value() || !value_after.has_value()) return;
    const Verdict verdict = before.has_passed() && after.has_passed()
                                ? JudgePassed(before.passed(), after.passed())
                                : JudgeError(*value_before, *value_after);
    AddErrors(kWhat, now, *value_before, *value_after, verdict);
  }

  static Verdict JudgePassed(bool before, bool after) {
    if (before == after) return Verdict::kSame;
    return before ? Verdict::kRegressed : Verdict::kImproved;
  }

  // Compares the gradients by their names: one may get better while another gets worse.
  void CompareGradients(const Case& base, const Case& now) {
    std::map<std::string, const BoundedNumber*> errors;
    for (const NamedError& one : now.outcome().gradient_errors()) errors[one.name()] = &one.error();
    for (const NamedError& before : base.outcome().gradient_errors()) {
      const std::string what = absl::StrCat("error of the gradient of ", Printable(before.name()));
      const auto after = errors.find(before.name());
      if (after == errors.end() || !after->second->has_value()) {
        AddVanishedError(what, before.error().value(), base, now);
        continue;
      }
      AddErrors(what, now, before.error().value(), after->second->value(),
                JudgePassed(before.error().passed(), after->second->passed()));
    }
  }

  Verdict JudgeError(double before, double after) const {
    if (before == after) return Verdict::kSame;  // also where both are infinite
    if (std::isnan(before)) return std::isnan(after) ? Verdict::kSame : Verdict::kImproved;
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
    if (before.has_value() && !after.has_value()) {
      AddVanishedError("error against dense", *before, base, now);
    }
    if (!before.has_value() || !after.has_value()) return;
    // NaN is tested first, since std::max drops one on its right.
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
                       // Findings without a number come first.
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

}  // namespace

int Comparison::Count(Verdict verdict) const {
  return static_cast<int>(
      std::count_if(findings.begin(), findings.end(),
                    [verdict](const Finding& finding) { return finding.verdict == verdict; }));
}

bool Comparison::judged() const {
  if (regressed() || Count(Verdict::kImproved) > 0) return true;
  const bool times = std::any_of(findings.begin(), findings.end(),
                                 [](const Finding& finding) { return finding.is_time; });
  return std::any_of(findings.begin(), findings.end(), [&](const Finding& finding) {
    return finding.verdict == Verdict::kSame && (finding.is_time || !times);
  });
}

std::string Comparison::WhyNotJudged() const {
  const auto times = std::count_if(findings.begin(), findings.end(),
                                   [](const Finding& one) { return one.is_time; });
  const auto ambiguous = std::count_if(findings.begin(), findings.end(), [](const Finding& one) {
    return one.is_time && one.verdict == Verdict::kAmbiguous;
  });
  if (times == 0) {
    return absl::StrCat("no number of the ", cases, cases == 1 ? " case" : " cases",
                        " in both was measured on both sides and could be compared");
  }
  return absl::StrCat("of ", times, times == 1 ? " time" : " times", " ", ambiguous,
                      ambiguous == 1 ? " is" : " are", " ambiguous and ", times - ambiguous,
                      " not judged");
}

absl::StatusOr<Comparison> Compare(const ResultSet& base, const ResultSet& now,
                                   const CompareOptions& options) {
  const auto check = [](absl::string_view name, double value) {
    return value > 1 && std::isfinite(value)
               ? absl::OkStatus()
               : absl::InvalidArgumentError(
                     absl::StrCat("--", name, "=", value, ": a factor above 1 is wanted"));
  };
  TFB_RETURN_IF_ERROR(check("threshold", options.threshold));
  TFB_RETURN_IF_ERROR(check("memory_threshold", options.memory_threshold));
  TFB_RETURN_IF_ERROR(check("error_threshold", options.error_threshold));
  if (!(options.error_floor >= 0)) {
    return absl::InvalidArgumentError(
        absl::StrCat("--error_floor=", options.error_floor, ": 0 or more is wanted"));
  }
  return Comparer(base, now, options).Run();
}

}  // namespace tfb
