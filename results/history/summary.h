// Makes what a store keeps of a run from the run's result file.
#ifndef TFB_RESULTS_HISTORY_SUMMARY_H_
#define TFB_RESULTS_HISTORY_SUMMARY_H_

#include <string>

#include "absl/status/statusor.h"
#include "results/history/history.pb.h"
#include "results/results.pb.h"

namespace tfb {

// Returns the run of a result file; `path` stands in messages. Of several cases with one key on one
// machine the last counts; cases that a stopped sweep had not finished are left out. Returns
// FailedPrecondition where there is no case, or one whose machine does not name its processor, by
// which machines are told apart.
absl::StatusOr<HistoryRun> SummarizeRun(const ResultSet& results, const std::string& path);

}  // namespace tfb

#endif  // TFB_RESULTS_HISTORY_SUMMARY_H_
