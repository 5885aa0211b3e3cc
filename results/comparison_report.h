// Renders a comparison as text for people, and as JSON for programs.
#ifndef TFB_RESULTS_COMPARISON_REPORT_H_
#define TFB_RESULTS_COMPARISON_REPORT_H_

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "results/comparison.h"
#include "results/table.h"

namespace tfb {

enum class ComparisonFormat { kTerminal, kMarkdown, kJson };
// Parses "terminal", "markdown" or "json". Returns InvalidArgument, naming these, for other names.
absl::StatusOr<ComparisonFormat> ParseComparisonFormat(absl::string_view name);

// Renders the comparison. Terminal and Markdown show regressions, improvements, and counts; they
// show what is the same, ambiguous or not judged only with `all`. `style` is the terminal's.
//
// JSON is {"format", "regressed", "metric", "threshold", "cases", "missing", "added", "counts":
// {...}, "environment_differences": [...], "findings": [...]} with all findings, whatever `all` is.
// Unknown numbers are left out; numbers that are not finite are the strings "Infinity" and "NaN".
std::string RenderComparison(const Comparison& comparison, ComparisonFormat format, bool all,
                             const TextStyle& style);

// Returns "SLOWER", "FASTER", "WORSE", "BETTER", "SAME", "AMBIGUOUS" or "NOT JUDGED".
absl::string_view VerdictWord(const Finding& finding);

}  // namespace tfb

#endif  // TFB_RESULTS_COMPARISON_REPORT_H_
