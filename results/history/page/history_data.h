// Writes a history as the JSON that the script of its page reads.
#ifndef TFB_RESULTS_HISTORY_PAGE_HISTORY_DATA_H_
#define TFB_RESULTS_HISTORY_PAGE_HISTORY_DATA_H_

#include <string>
#include <vector>

#include "results/history/check.h"
#include "results/history/page/series_text.h"
#include "results/history/series.h"

namespace tfb {

// The series of a history as texts, in its order, and what was kept of them.
struct SeriesTexts {
  Detail detail;
  std::vector<std::string> texts;
};
// Keeps as much detail as `most_bytes` of text have room for, and in any case 20 values of each
// series and 10 groups.
SeriesTexts MakeSeriesTexts(const History& history, const std::vector<Change>& changes,
                            size_t most_bytes);

// Returns a text that stands for a series in addresses: the same in every page of the same store,
// whatever else is in it.
std::string SeriesId(const History& history, const HistorySeries& series);

// Returns JSON in ASCII, without <, > and &, of
//   metrics   [name, title] of each metric, by number
//   statuses  the name of each status, by number
//   strings   texts, to which cases refer by place
//   machines  [signature, builds, runs]: builds are lists of properties; a run is [name, start in
//             s, commit, whether dirty, date of the commit in s or null, subject, place in builds]
//   cases     [id, machine, place in the history, name, problem, family, device, series], that
//             which matters most first; a series is [metric, text, noise, level, bound or null,
//             reason, changes, place in the order of what matters], where level is the median of a
//             series without changes; a change is
//             [run, begin, at, end, before, after, kind, size, interval, remark, build differences],
//             where run is that of the value at `at`
// Numbers that JSON does not have are the texts "NaN", "Infinity" and "-Infinity".
std::string HistoryJson(const History& history, const std::vector<Change>& changes,
                        const SeriesTexts& texts);

}  // namespace tfb

#endif  // TFB_RESULTS_HISTORY_PAGE_HISTORY_DATA_H_
