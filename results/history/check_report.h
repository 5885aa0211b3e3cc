// Shows a check of a history as text for people, and as JSON for programs.
#ifndef TFB_RESULTS_HISTORY_CHECK_REPORT_H_
#define TFB_RESULTS_HISTORY_CHECK_REPORT_H_

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "results/history/check.h"
#include "results/history/series.h"
#include "results/table.h"

namespace tfb {

enum class CheckFormat { kTerminal, kMarkdown, kJson };
// Parses "terminal", "markdown" or "json". Returns InvalidArgument, naming these, for other names.
absl::StatusOr<CheckFormat> ParseCheckFormat(absl::string_view name);

// Renders a check: a table of the regressions that nobody acknowledged with the lines that would
// acknowledge them, one of the acknowledged ones, and with `all` one of every other change; counts;
// notes. `style` is the terminal's.
//
// JSON is {"format", "regressed", "runs", "machines": [...], "changes": [{"machine", "metric",
// "name", "problem", "key", "worse", "regression", "acknowledged", "recovered", "ratio", "low",
// "high", "before", "after", "last_good", "first_bad", "reason", "build_differences"}], "times":
// [{"metric", "key", "noise", "smallest_step"}], "notes"} with every change, whatever `all` is.
// Numbers that are not finite are texts.
std::string RenderCheck(const History& history, const HistoryCheck& check, CheckFormat format,
                        bool all, const TextStyle& style);

// Returns the verdict in a sentence: "3 regressions that nobody acknowledged, in 120 runs on 2
// machines".
std::string CheckVerdict(const History& history, const HistoryCheck& check);

}  // namespace tfb

#endif  // TFB_RESULTS_HISTORY_CHECK_REPORT_H_
