// Says what changed in a history, when, by how much, and whether it still is so.
#ifndef TFB_RESULTS_HISTORY_CHECK_H_
#define TFB_RESULTS_HISTORY_CHECK_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "results/history/series.h"

namespace tfb {

struct CheckOptions {
  // The probability that a check reports a change of any time of a machine on which none has
  // changed (results/history/change_points.h).
  double false_alarm_rate = 0.003;
  // Changes by less than these factors are no regressions: of times, memory, and errors against
  // dense or without a bound.
  double threshold = 1.02;
  double memory_threshold = 1.05;
  double error_threshold = 1.25;
  double error_floor = 1e-5;  // errors up to this value are rounding
  // The metrics to judge. By default all but HISTORY_METRIC_TIME, which follows the speed of the
  // machine.
  std::vector<HistoryMetric> metrics = {
      HISTORY_METRIC_TIME_OVER_DENSE, HISTORY_METRIC_TIME_OVER_MACHINE,
      HISTORY_METRIC_SETUP,           HISTORY_METRIC_MEMORY,
      HISTORY_METRIC_ERROR,           HISTORY_METRIC_ERROR_AGAINST_DENSE,
      HISTORY_METRIC_STATUS};
};

// A change of the level of one series, from the values [begin, at) to [at, end), indices into
// HistorySeries::runs.
struct Change {
  int series = 0;  // index into History::series
  int begin = 0, at = 0, end = 0;
  double before = 0, after = 0;  // medians
  // After over before. Of times with its 95 % interval, which elsewhere is the ratio itself; 1
  // where a level is 0 or not finite.
  double ratio = 1, low = 1, high = 1;
  bool worse = false;
  // Whether a later change brought the level back to below the threshold over `before`, and the
  // index of that one's first value.
  bool recovered = false;
  int recovered_at = 0;
  // Whether the series is worse to this day because of it, by its threshold, and nothing else
  // explains it.
  bool is_regression = false;
  // Why a change that is worse is none: "dense changed: ...", "the same commit on both sides: ...".
  std::string reason;
  std::string acknowledged;  // the reason that an acknowledgement gives; empty where there is none
  std::vector<std::string> build_differences;  // "compiler: GCC 12 / GCC 13"
};

struct HistoryCheck {
  // By what matters: regressions that nobody acknowledged, those acknowledged, other changes for
  // the worse, improvements; within each the later first, of one run the larger.
  std::vector<Change> changes;
  // Of each series, the standard deviation of its noise as a share, and the smallest factor that is
  // found within three runs; 0 where the series is none of times, or too short.
  std::vector<double> noise, smallest_step;
  std::vector<std::string>
      notes;  // sentences: series that are too short, cases that the latest run lacks

  int regressions() const;  // that nobody acknowledged
};

// One line of a file of acknowledgements.
struct Acknowledgement {
  std::string commit;   // its first 7 or more digits, or the name of a run without a commit
  std::string metric;   // MetricName, or "*"
  std::string pattern;  // of the case's key, where * stands for any text
  std::string reason;
  int line = 0;
};

// Parses a file of acknowledgements: each line is `COMMIT METRIC PATTERN # REASON`, or empty, or
// begins with #. COMMIT is the first commit of the worse level, as a check names it, or the name of
// that level's first run (results/history/store.h), which may have no commit.
// InvalidArgument names `path` and the line.
absl::StatusOr<std::vector<Acknowledgement>> ParseAcknowledgements(absl::string_view text,
                                                                   const std::string& path);
// Returns the line that acknowledges a change, with a reason to fill in.
std::string AcknowledgementLine(const History& history, const Change& change);

// Finds the changes of all series and judges them:
//   times           The change points of results/history/change_points.h, of technique means, cases
//                   and setups each on their own at a third of the rate, since their noise differs.
//                   A time over dense is a regression only where the time over fixed arithmetic in
//                   the same runs confirms at least half of it; else dense became faster. The time
//                   over fixed arithmetic is judged of cases without a time over dense; setup where
//                   it is at least 5 % of a run.
//   memory, errors  each value that is beyond the threshold from the first one of its level begins
//                   a new level. They have no noise.
//   status          a case that fails, exceeds its time or memory, and did not before
// A change between two runs of one commit without local changes is the machine's, and no
// regression. An acknowledgement holds for changes at its commit and up to two runs beside it,
// since the place of a change is an estimate; one that holds for nothing gives a note. Returns
// InvalidArgument for options out of range.
absl::StatusOr<HistoryCheck> CheckHistory(const History& history, const CheckOptions& options,
                                          const std::vector<Acknowledgement>& acknowledgements);

}  // namespace tfb

#endif  // TFB_RESULTS_HISTORY_CHECK_H_
