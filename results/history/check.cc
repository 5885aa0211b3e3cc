#include "results/history/check.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <tuple>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "core/status.h"
#include "results/history/change_points.h"
#include "results/statistics.h"
#include "results/table.h"

namespace tfb {
namespace {

constexpr double kLeastSetupShare = 0.05;
constexpr double kPageBytes = 4096;  // memories up to a page are alike
constexpr int kRunsBesideAChange = 2;
constexpr double kNormal95 = 1.96;
constexpr double kOfMedian =
    1.2533;  // the standard error of a median over that of a mean: sqrt(pi/2)

bool IsNoisy(HistoryMetric metric) {
  return metric == HISTORY_METRIC_TIME_OVER_DENSE || metric == HISTORY_METRIC_TIME_OVER_MACHINE ||
         metric == HISTORY_METRIC_TIME || metric == HISTORY_METRIC_SETUP;
}

double MedianOfRange(const std::vector<double>& values, int begin, int end) {
  const std::optional<MedianInterval> median =
      MedianOf(std::vector<double>(values.begin() + begin, values.begin() + end));
  return median.has_value() ? median->median : std::nan("");
}

bool IsTime(double value) { return std::isfinite(value) && value > 0; }

bool Fails(double status) {
  const auto value = static_cast<Outcome::Status>(static_cast<int>(status) + Outcome::STATUS_OK);
  return value == Outcome::STATUS_FAILED || value == Outcome::STATUS_TIMEOUT ||
         value == Outcome::STATUS_OUT_OF_MEMORY;
}

// Tells whether the text is the pattern, where each * stands for any text.
bool MatchesStars(absl::string_view pattern, absl::string_view text) {
  const std::vector<absl::string_view> parts = absl::StrSplit(pattern, '*');
  if (parts.size() == 1) return pattern == text;
  if (!absl::ConsumePrefix(&text, parts.front())) return false;
  for (size_t i = 1; i + 1 < parts.size(); ++i) {  // the first place leaves most for the rest
    const size_t place = text.find(parts[i]);
    if (place == absl::string_view::npos) return false;
    text.remove_prefix(place + parts[i].size());
  }
  return absl::EndsWith(text, parts.back());
}

// Tells whether the text has the form of a run's name, "20261123T181522Z-unknown-1f2e3d4c".
bool IsRunName(absl::string_view text) {
  constexpr absl::string_view kBegin = "00000000T000000Z-";
  if (text.size() <= kBegin.size()) return false;
  for (size_t i = 0; i < kBegin.size(); ++i) {
    const bool fits = kBegin[i] == '0' ? absl::ascii_isdigit(static_cast<unsigned char>(text[i]))
                                       : text[i] == kBegin[i];
    if (!fits) return false;
  }
  return true;
}

// The series of each case on each machine, by metric.
using Companions = std::map<std::pair<std::string, int>, std::map<HistoryMetric, int>>;

class Checker {
 public:
  Checker(const History& history, const CheckOptions& options,
          const std::vector<Acknowledgement>& acknowledgements)
      : history_(history), options_(options), acknowledgements_(acknowledgements) {
    check_.noise.resize(history.series.size());
    check_.smallest_step.resize(history.series.size());
    for (size_t i = 0; i < history.series.size(); ++i) {
      const HistorySeries& series = history.series[i];
      companions_[{series.key, series.machine}][series.metric] = static_cast<int>(i);
    }
  }

  HistoryCheck Run() {
    for (size_t machine = 0; machine < history_.machines.size(); ++machine) {
      CheckTimes(static_cast<int>(machine));
    }
    for (size_t i = 0; i < history_.series.size(); ++i) {
      if (!IsNoisy(history_.series[i].metric) && IsJudged(static_cast<int>(i))) {
        CheckNumbers(static_cast<int>(i));
      }
    }
    for (auto& [series, changes] : changes_) Judge(&changes);
    Acknowledge();
    NoteMissingCases();
    Sort();
    return std::move(check_);
  }

 private:
  const HistorySeries& SeriesAt(int i) const { return history_.series[i]; }
  const HistorySeries* Companion(int i, HistoryMetric metric) const {
    const auto& metrics = companions_.at({SeriesAt(i).key, SeriesAt(i).machine});
    const auto found = metrics.find(metric);
    return found == metrics.end() ? nullptr : &SeriesAt(found->second);
  }

  bool IsJudged(int i) const {
    const HistorySeries& series = SeriesAt(i);
    const auto& metrics = options_.metrics;
    if (std::find(metrics.begin(), metrics.end(), series.metric) == metrics.end()) return false;
    if (series.metric == HISTORY_METRIC_TIME_OVER_MACHINE) {
      const bool twice = Companion(i, HISTORY_METRIC_TIME_OVER_DENSE) != nullptr &&
                         std::find(metrics.begin(), metrics.end(),
                                   HISTORY_METRIC_TIME_OVER_DENSE) != metrics.end();
      return !twice;
    }
    if (series.metric == HISTORY_METRIC_SETUP) {
      const HistorySeries* run = Companion(i, HISTORY_METRIC_TIME_OVER_DENSE);
      const double over = run == nullptr ? 1 : MedianOfRange(run->values, 0, Size(*run));
      return MedianOfRange(series.values, 0, Size(series)) >= kLeastSetupShare * over;
    }
    return true;
  }
  static int Size(const HistorySeries& series) { return static_cast<int>(series.values.size()); }

  double Threshold(HistoryMetric metric) const {
    if (IsNoisy(metric)) return options_.threshold;
    return metric == HISTORY_METRIC_MEMORY ? options_.memory_threshold : options_.error_threshold;
  }

  // Series whose noise is alike, and which are searched together: each group has its own threshold.
  enum TimeGroup { kMeans, kCases, kSetups, kTimeGroups };
  static TimeGroup GroupOf(const HistorySeries& series) {
    if (series.metric == HISTORY_METRIC_SETUP) return kSetups;
    return series.tokens == 0 ? kMeans : kCases;
  }

  void CheckTimes(int machine) {
    int too_short = 0;
    for (int group = 0; group < kTimeGroups; ++group) {
      std::vector<int> judged;
      for (size_t i = 0; i < history_.series.size(); ++i) {
        const HistorySeries& series = history_.series[i];
        const bool is_of_group = series.machine == machine && IsNoisy(series.metric) &&
                                 GroupOf(series) == group && IsJudged(static_cast<int>(i));
        if (is_of_group) judged.push_back(static_cast<int>(i));
      }
      too_short += CheckTimesTogether(judged);
    }
    if (too_short > 0) {
      check_.notes.push_back(absl::StrCat(
          too_short, " series of times on ", history_.machines[machine].signature,
          " have fewer than ", kFewestForChangePoints, " runs: they are judged from then on"));
    }
  }

  // Returns the number of series that are too short.
  int CheckTimesTogether(const std::vector<int>& judged) {
    std::vector<NoisySeries> noisy(judged.size());
    std::vector<std::vector<int>> places(judged.size());  // of the noisy values in the series
    int too_short = 0;
    for (size_t k = 0; k < judged.size(); ++k) {
      const HistorySeries& series = SeriesAt(judged[k]);
      for (size_t place = 0; place < series.values.size(); ++place) {
        if (!IsTime(series.values[place])) continue;
        noisy[k].runs.push_back(series.runs[place]);
        noisy[k].values.push_back(std::log(series.values[place]));
        places[k].push_back(static_cast<int>(place));
      }
      if (places[k].size() < kFewestForChangePoints) ++too_short;
    }
    ChangePointOptions options;
    options.false_alarm_rate = options_.false_alarm_rate / kTimeGroups;
    const ChangePoints points = FindChangePoints(noisy, options);
    for (size_t k = 0; k < judged.size(); ++k) {
      const double scale = points.scale[k];
      check_.noise[judged[k]] = scale;
      if (scale > 0) {
        check_.smallest_step[judged[k]] = std::exp(SmallestStep(
            points.critical, scale, static_cast<int>(noisy[k].values.size()), /*after=*/3));
      }
      AddTimeChanges(judged[k], noisy[k].values, places[k], points.at[k], scale);
    }
    return too_short;
  }

  // Adds the changes of a series of logarithms, whose k-th value is that at places[k].
  void AddTimeChanges(int i, const std::vector<double>& logarithms, const std::vector<int>& places,
                      const std::vector<int>& at, double scale) {
    const int n = static_cast<int>(logarithms.size());
    for (size_t c = 0; c < at.size(); ++c) {
      const int begin = c == 0 ? 0 : at[c - 1];
      const int end = c + 1 == at.size() ? n : at[c + 1];
      const double before = MedianOfRange(logarithms, begin, at[c]);
      const double after = MedianOfRange(logarithms, at[c], end);
      const double half =
          kNormal95 * kOfMedian * scale * std::sqrt(1.0 / (at[c] - begin) + 1.0 / (end - at[c]));
      Change& change =
          Add(i, places[begin], places[at[c]], end == n ? Size(SeriesAt(i)) : places[end]);
      change.before = std::exp(before);
      change.after = std::exp(after);
      change.ratio = std::exp(after - before);
      change.low = std::exp(after - before - half);
      change.high = std::exp(after - before + half);
      change.worse = after > before;
    }
  }

  Change& Add(int i, int begin, int at, int end) {
    Change& change = changes_[i].emplace_back();
    change.series = i;
    change.begin = begin;
    change.at = at;
    change.end = end;
    return change;
  }

  // Begins a new level where a value differs from the first one of its level.
  void CheckNumbers(int i) {
    const HistorySeries& series = SeriesAt(i);
    std::vector<int> at = {0};
    for (int k = 1; k < Size(series); ++k) {
      if (Differ(series.metric, series.values[at.back()], series.values[k])) at.push_back(k);
    }
    for (size_t c = 1; c < at.size(); ++c) {
      const int end = c + 1 == at.size() ? Size(series) : at[c + 1];
      Change& change = Add(i, at[c - 1], at[c], end);
      change.before = series.values[at[c - 1]];
      change.after = series.values[at[c]];
      const bool has_ratio =
          series.metric != HISTORY_METRIC_STATUS && IsTime(change.before) && IsTime(change.after);
      if (has_ratio) change.ratio = change.low = change.high = change.after / change.before;
      change.worse = IsWorse(series.metric, change.before, change.after);
    }
  }

  // Returns the value with what is too small to count drawn up.
  double Floored(HistoryMetric metric, double value) const {
    if (std::isnan(value)) return value;
    return std::max(value, metric == HISTORY_METRIC_MEMORY ? kPageBytes : options_.error_floor);
  }

  bool IsWorse(HistoryMetric metric, double before, double after) const {
    if (metric == HISTORY_METRIC_STATUS) return Fails(after) && !Fails(before);
    if (std::isnan(after) || std::isnan(before)) return std::isnan(after) && !std::isnan(before);
    return Floored(metric, after) >= Threshold(metric) * Floored(metric, before);
  }

  bool Differ(HistoryMetric metric, double a, double b) const {
    return IsWorse(metric, a, b) || IsWorse(metric, b, a);
  }

  // Judges the changes of one series, which are in the order of runs.
  void Judge(std::vector<Change>* changes) {
    for (size_t c = 0; c < changes->size(); ++c) {
      Change& change = (*changes)[c];
      const HistorySeries& series = SeriesAt(change.series);
      change.build_differences = BuildDifferences(series, change);
      if (!change.worse) continue;
      const bool is_back = !StillWorse(series.metric, change.before, changes->back().after);
      for (size_t later = c + 1; later < changes->size() && !change.recovered; ++later) {
        change.recovered =
            is_back && !StillWorse(series.metric, change.before, (*changes)[later].after);
        change.recovered_at = (*changes)[later].at;
      }
      if (!change.recovered) change.recovered_at = 0;
      change.reason = OtherReason(series, change);
      change.is_regression = !change.recovered && change.reason.empty() &&
                             StillWorse(series.metric, change.before, change.after);
    }
  }

  bool StillWorse(HistoryMetric metric, double before, double level) const {
    return IsNoisy(metric) ? level >= options_.threshold * before : IsWorse(metric, before, level);
  }

  // Says what else than the code explains a change for the worse.
  std::string OtherReason(const HistorySeries& series, const Change& change) const {
    const std::vector<RunInfo>& runs = history_.machines[series.machine].runs;
    const RunInfo& last = runs[series.runs[change.at - 1]];
    const RunInfo& first = runs[series.runs[change.at]];
    if (!last.commit.empty() && last.commit == first.commit && !last.dirty && !first.dirty) {
      return "the same commit on both sides: the machine changed";
    }
    if (series.metric != HISTORY_METRIC_TIME_OVER_DENSE) return "";
    const HistorySeries* other = Companion(change.series, HISTORY_METRIC_TIME_OVER_MACHINE);
    if (other == nullptr) return "";
    // The companion's levels in the same runs.
    std::vector<double> before, after;
    for (size_t k = 0; k < other->runs.size(); ++k) {
      if (!IsTime(other->values[k])) continue;
      if (other->runs[k] >= series.runs[change.begin] && other->runs[k] < series.runs[change.at]) {
        before.push_back(other->values[k]);
      } else if (other->runs[k] >= series.runs[change.at] &&
                 other->runs[k] <= series.runs[change.end - 1]) {
        after.push_back(other->values[k]);
      }
    }
    if (before.empty() || after.empty()) return "";
    const double ratio = MedianOfRange(after, 0, static_cast<int>(after.size())) /
                         MedianOfRange(before, 0, static_cast<int>(before.size()));
    if (ratio >= std::sqrt(change.ratio)) return "";
    return absl::StrCat("dense changed: the time over fixed arithmetic is ", FormatRatio(ratio),
                        " what it was");
  }

  std::vector<std::string> BuildDifferences(const HistorySeries& series,
                                            const Change& change) const {
    const std::vector<RunInfo>& runs = history_.machines[series.machine].runs;
    const std::vector<std::string>& before = runs[series.runs[change.at - 1]].build;
    const std::vector<std::string>& after = runs[series.runs[change.at]].build;
    std::vector<std::string> differences;
    for (size_t k = 0; k < std::min(before.size(), after.size()); ++k) {
      if (before[k] == after[k]) continue;
      const std::pair<std::string, std::string> now =
          absl::StrSplit(after[k], absl::MaxSplits(": ", 1));
      differences.push_back(absl::StrCat(before[k], " / ", now.second));
    }
    return differences;
  }

  void Acknowledge() {
    std::vector<bool> used(acknowledgements_.size());
    for (auto& [i, changes] : changes_) {
      const HistorySeries& series = SeriesAt(i);
      for (Change& change : changes) {
        if (!change.worse) continue;
        for (size_t k = 0; k < acknowledgements_.size(); ++k) {
          if (!Holds(acknowledgements_[k], series, change)) continue;
          used[k] = true;
          change.acknowledged = acknowledgements_[k].reason;
        }
      }
    }
    for (size_t k = 0; k < acknowledgements_.size(); ++k) {
      if (used[k]) continue;
      check_.notes.push_back(absl::StrCat(
          "line ", acknowledgements_[k].line, " of the acknowledgements holds for no change: ",
          acknowledgements_[k].commit, " ", acknowledgements_[k].metric));
    }
    for (auto& [i, changes] : changes_) {
      std::move(changes.begin(), changes.end(), std::back_inserter(check_.changes));
    }
  }

  bool Holds(const Acknowledgement& acknowledgement, const HistorySeries& series,
             const Change& change) const {
    if (acknowledgement.metric != "*" && acknowledgement.metric != MetricName(series.metric))
      return false;
    if (!MatchesStars(acknowledgement.pattern, series.key)) return false;
    const std::vector<RunInfo>& runs = history_.machines[series.machine].runs;
    const int place = series.runs[change.at];
    const int begin = std::max(0, place - kRunsBesideAChange);
    const int end = std::min(static_cast<int>(runs.size()), place + kRunsBesideAChange + 1);
    return std::any_of(runs.begin() + begin, runs.begin() + end, [&](const RunInfo& run) {
      return absl::StartsWith(run.commit, acknowledgement.commit) ||
             run.name == acknowledgement.commit;
    });
  }

  // Counts the cases that every one of the five runs before the latest has, and the latest lacks.
  void NoteMissingCases() {
    static constexpr int kRunsBefore = 5;
    std::vector<int> missing(history_.machines.size());
    for (const HistorySeries& series : history_.series) {
      const int latest = static_cast<int>(history_.machines[series.machine].runs.size()) - 1;
      const bool was_always_there = latest >= kRunsBefore && Size(series) >= kRunsBefore &&
                                    series.runs.back() == latest - 1 &&
                                    series.runs[Size(series) - kRunsBefore] == latest - kRunsBefore;
      if (series.metric == HISTORY_METRIC_STATUS && was_always_there) ++missing[series.machine];
    }
    for (size_t machine = 0; machine < missing.size(); ++machine) {
      if (missing[machine] == 0) continue;
      check_.notes.push_back(absl::StrCat(missing[machine], " cases of the ", kRunsBefore,
                                          " runs before are not in the latest run on ",
                                          history_.machines[machine].signature));
    }
  }

  void Sort() {
    const auto rank = [](const Change& change) {
      if (change.is_regression) return change.acknowledged.empty() ? 0 : 1;
      return change.worse ? 2 : 3;
    };
    const auto place = [&](const Change& change) {
      const HistorySeries& series = SeriesAt(change.series);
      return std::make_tuple(rank(change), series.machine, -series.runs[change.at],
                             -std::fabs(std::log(change.ratio)), change.series);
    };
    std::stable_sort(check_.changes.begin(), check_.changes.end(),
                     [&](const Change& a, const Change& b) { return place(a) < place(b); });
  }

  const History& history_;
  const CheckOptions& options_;
  const std::vector<Acknowledgement>& acknowledgements_;
  Companions companions_;
  std::map<int, std::vector<Change>> changes_;  // by series
  HistoryCheck check_;
};

}  // namespace

int HistoryCheck::regressions() const {
  return static_cast<int>(std::count_if(changes.begin(), changes.end(), [](const Change& change) {
    return change.is_regression && change.acknowledged.empty();
  }));
}

absl::StatusOr<std::vector<Acknowledgement>> ParseAcknowledgements(absl::string_view text,
                                                                   const std::string& path) {
  std::vector<Acknowledgement> all;
  int number = 0;
  for (absl::string_view line : absl::StrSplit(text, '\n')) {
    ++number;
    line = absl::StripAsciiWhitespace(line);
    if (line.empty() || line[0] == '#') continue;
    const auto wrong = [&](absl::string_view what) {
      return absl::InvalidArgumentError(absl::StrCat(path, ": line ", number, ": ", what,
                                                     "; wanted is COMMIT METRIC PATTERN # REASON"));
    };
    const std::pair<std::string, std::string> parts =
        absl::StrSplit(line, absl::MaxSplits(" # ", 1));
    Acknowledgement acknowledgement;
    acknowledgement.line = number;
    acknowledgement.reason = Printable(absl::StripAsciiWhitespace(parts.second));
    if (acknowledgement.reason.empty()) return wrong("no reason");
    const std::vector<std::string> words =
        absl::StrSplit(parts.first, absl::MaxSplits(absl::ByAnyChar(" \t"), 2));
    if (words.size() < 3) return wrong("too few words");
    const bool is_run = IsRunName(words[0]);
    acknowledgement.commit = is_run ? words[0] : absl::AsciiStrToLower(words[0]);
    acknowledgement.metric = words[1];
    acknowledgement.pattern = std::string(absl::StripAsciiWhitespace(words[2]));
    const bool is_hash = acknowledgement.commit.size() >= 7 &&
                         std::all_of(acknowledgement.commit.begin(), acknowledgement.commit.end(),
                                     absl::ascii_isxdigit);
    if (!is_hash && !is_run) {
      return wrong(absl::StrCat("\"", Printable(words[0]),
                                "\" is no hash of 7 or more digits, nor the name of a run"));
    }
    if (acknowledgement.metric != "*") {
      const absl::Status metric = ParseHistoryMetric(acknowledgement.metric).status();
      if (!metric.ok()) return wrong(absl::StrCat("the metric ", metric.message()));
    }
    if (acknowledgement.pattern.empty()) return wrong("no pattern");
    all.push_back(std::move(acknowledgement));
  }
  return all;
}

std::string AcknowledgementLine(const History& history, const Change& change) {
  const HistorySeries& series = history.series[change.series];
  const RunInfo& first = history.machines[series.machine].runs[series.runs[change.at]];
  return absl::StrCat(first.commit.empty() ? first.name : first.commit.substr(0, 12), " ",
                      MetricName(series.metric), " ", series.key, " # ");
}

absl::StatusOr<HistoryCheck> CheckHistory(const History& history, const CheckOptions& options,
                                          const std::vector<Acknowledgement>& acknowledgements) {
  const auto is_factor = [](absl::string_view name, double value) {
    return value > 1 && std::isfinite(value)
               ? absl::OkStatus()
               : absl::InvalidArgumentError(
                     absl::StrCat("--", name, "=", value, ": a factor above 1 is wanted"));
  };
  TFB_RETURN_IF_ERROR(is_factor("threshold", options.threshold));
  TFB_RETURN_IF_ERROR(is_factor("memory_threshold", options.memory_threshold));
  TFB_RETURN_IF_ERROR(is_factor("error_threshold", options.error_threshold));
  if (!(options.error_floor > 0)) {
    return absl::InvalidArgumentError(
        absl::StrCat("--error_floor=", options.error_floor, ": more than 0 is wanted"));
  }
  if (!(options.false_alarm_rate >= 0.0015 && options.false_alarm_rate <= 0.5)) {
    return absl::InvalidArgumentError(
        absl::StrCat("--false_alarm_rate=", options.false_alarm_rate, ": 0.0015 to 0.5 is wanted"));
  }
  return Checker(history, options, acknowledgements).Run();
}

}  // namespace tfb
