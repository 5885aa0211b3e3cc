// Tells which changes and which series of a history matter now, and says so in words.
#ifndef TFB_RESULTS_HISTORY_PAGE_RANKING_H_
#define TFB_RESULTS_HISTORY_PAGE_RANKING_H_

#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "results/history/check.h"
#include "results/history/series.h"

namespace tfb {

// In the order in which people want to know of them.
enum class ChangeKind {
  kRegression,    // worse today, and nobody has acknowledged it
  kAcknowledged,  // worse today
  kRecovered,     // was worse
  kImprovement,
  kNotCounted,  // worse, for a reason that makes it no regression
};
constexpr int kChangeKinds = 5;

ChangeKind KindOf(const Change& change);

// Returns |ln ratio|, or infinity where the change has no ratio: of a status, to or from 0, NaN.
double SizeOf(const History& history, const Change& change);
bool HasRatio(const History& history, const Change& change);

// Returns "+31.2%", "2.41x" from a factor of 2 on, or the two levels where there is no ratio, as in
// "ok → timeout".
std::string SizeText(const History& history, const Change& change);
// Returns the interval in the same unit, "[+29.8%, +32.7%]", or "" where there is no ratio.
std::string SizeInterval(const History& history, const Change& change);

// Returns the places of the changes of one kind: by size, then the latest first.
std::vector<int> ChangesOf(ChangeKind kind, const History& history,
                           const std::vector<Change>& changes);

// What the order of series depends on.
struct SeriesRank {
  ChangeKind kind = ChangeKind::kNotCounted;  // of its change that matters most
  bool changed = false;
  double weight = 0;  // the size of that change, halved for every 50 runs since; see SizeOf
  double noise = 0;   // scale of successive differences of logarithms
};
// Returns whether a series of rank `a` comes before one of rank `b`: series with regressions by
// size, then acknowledged ones, then other changes by weight, then the rest by noise.
bool MattersMore(const SeriesRank& a, const SeriesRank& b);
// `changes` are those of the series.
SeriesRank RankOf(const History& history, const HistorySeries& series,
                  const std::vector<const Change*>& changes);

// Returns 1.4826 median|d| / sqrt 2 of the differences d of successive logarithms of the values
// that are finite and positive, 0 where there are not two.
double Noise(const std::vector<double>& values);

}  // namespace tfb

#endif  // TFB_RESULTS_HISTORY_PAGE_RANKING_H_
