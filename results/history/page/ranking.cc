#include "results/history/page/ranking.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <tuple>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace tfb {
namespace {

// Returns "+31.2%" for 1.312, or "2.41x" where `factor`.
std::string ChangeText(double ratio, bool factor) {
  if (factor) return absl::StrFormat("%.*fx", ratio < 0.995 ? 3 : ratio < 99.5 ? 2 : 0, ratio);
  return absl::StrFormat("%+.1f%%", 100 * (ratio - 1));
}

bool IsFactor(const Change& change) { return change.ratio >= 2 || change.ratio <= 0.5; }

}  // namespace

ChangeKind KindOf(const Change& change) {
  if (!change.worse) return ChangeKind::kImprovement;
  if (change.recovered) return ChangeKind::kRecovered;
  if (!change.acknowledged.empty()) return ChangeKind::kAcknowledged;
  return change.is_regression ? ChangeKind::kRegression : ChangeKind::kNotCounted;
}

bool HasRatio(const History& history, const Change& change) {
  const auto usable = [](double value) { return std::isfinite(value) && value > 0; };
  return history.series[change.series].metric != HISTORY_METRIC_STATUS && usable(change.before) &&
         usable(change.after) && usable(change.ratio);
}

double SizeOf(const History& history, const Change& change) {
  return HasRatio(history, change) ? std::fabs(std::log(change.ratio))
                                   : std::numeric_limits<double>::infinity();
}

std::string SizeText(const History& history, const Change& change) {
  if (HasRatio(history, change)) return ChangeText(change.ratio, IsFactor(change));
  const HistoryMetric metric = history.series[change.series].metric;
  return absl::StrCat(FormatValue(metric, change.before), " → ", FormatValue(metric, change.after));
}

std::string SizeInterval(const History& history, const Change& change) {
  if (!HasRatio(history, change)) return "";
  return absl::StrCat("[", ChangeText(change.low, IsFactor(change)), ", ",
                      ChangeText(change.high, IsFactor(change)), "]");
}

std::vector<int> ChangesOf(ChangeKind kind, const History& history,
                           const std::vector<Change>& changes) {
  std::vector<int> places;
  for (size_t i = 0; i < changes.size(); ++i) {
    if (KindOf(changes[i]) == kind) places.push_back(static_cast<int>(i));
  }
  const auto order = [&](int i) {
    const Change& change = changes[i];
    return std::make_tuple(-SizeOf(history, change), -history.series[change.series].runs[change.at],
                           i);
  };
  std::sort(places.begin(), places.end(), [&](int a, int b) { return order(a) < order(b); });
  return places;
}

bool MattersMore(const SeriesRank& a, const SeriesRank& b) {
  const auto order = [](const SeriesRank& rank) {
    const int group = !rank.changed                            ? 3
                      : rank.kind == ChangeKind::kRegression   ? 0
                      : rank.kind == ChangeKind::kAcknowledged ? 1
                                                               : 2;
    return std::make_tuple(group, -rank.weight, -rank.noise);
  };
  return order(a) < order(b);
}

SeriesRank RankOf(const History& history, const HistorySeries& series,
                  const std::vector<const Change*>& changes) {
  SeriesRank best;
  best.noise = series.metric == HISTORY_METRIC_STATUS ? 0 : Noise(series.values);
  const int runs = static_cast<int>(history.machines[series.machine].runs.size());
  for (const Change* change : changes) {
    SeriesRank rank = best;
    rank.changed = true;
    rank.kind = KindOf(*change);
    const bool is_now =
        rank.kind == ChangeKind::kRegression || rank.kind == ChangeKind::kAcknowledged;
    const int age = runs - 1 - series.runs[change->at];
    const double size = std::min(SizeOf(history, *change), 1e6);
    rank.weight = is_now ? size : size * std::exp2(-age / 50.0);
    if (!best.changed || MattersMore(rank, best)) best = rank;
  }
  return best;
}

double Noise(const std::vector<double>& values) {
  std::vector<double> differences;
  double last = 0;
  for (const double value : values) {
    if (!std::isfinite(value) || value <= 0) continue;
    if (last > 0) differences.push_back(std::fabs(std::log(value) - std::log(last)));
    last = value;
  }
  if (differences.empty()) return 0;
  const auto middle = differences.begin() + differences.size() / 2;
  std::nth_element(differences.begin(), middle, differences.end());
  return 1.4826 * *middle / std::sqrt(2.0);
}

}  // namespace tfb
