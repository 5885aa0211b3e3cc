// Makes histories for tests, the same at every call: noise, steps, drifts, gaps.
#ifndef TFB_RESULTS_HISTORY_PAGE_SYNTHETIC_HISTORY_H_
#define TFB_RESULTS_HISTORY_PAGE_SYNTHETIC_HISTORY_H_

#include <cstdint>
#include <string>
#include <vector>

#include "results/history/check.h"
#include "results/history/series.h"

namespace tfb {
namespace synthetic {

// Returns the next of a sequence of numbers in [0, 1) (splitmix64, Steele et al. 2014).
double NextUniform(uint64_t* state);

struct HistoryWithChanges {
  History history;
  std::vector<Change> changes;
};

// Makes `count` runs, a day apart, of a machine with this signature.
Machine MakeMachine(const std::string& signature, int count);

// Adds a series of a case, "NAME", with a value for each run of the machine; NaN is a missing one.
HistorySeries* AddSeries(int machine, HistoryMetric metric, const std::string& name,
                         const std::vector<double>& values, History* history);

// Adds a change of the level of the last series from the place `at` on. It lies between `begin` and
// `end`, is worse where the level rises, and then a regression. Its interval is 1 % on either side.
Change* AddChange(int begin, int at, int end, HistoryWithChanges* out);

// Makes a history of one machine, with a change of each kind.
HistoryWithChanges MakeSmallHistory();

// Makes `cases` cases on each machine, each with three noisy times (2 %, 5 % and 3 %), and memory,
// error and status, which are constant in most. One case in four has a step, one in forty drifts,
// one in twenty-five has gaps, and one run in a hundred is far off.
HistoryWithChanges MakeLargeHistory(int machines, int runs, int cases);

}  // namespace synthetic
}  // namespace tfb

#endif  // TFB_RESULTS_HISTORY_PAGE_SYNTHETIC_HISTORY_H_
