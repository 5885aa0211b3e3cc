// Renders a comparison as text for people, as a comment of a pull request, and as JSON for programs.
#ifndef TFB_RESULTS_COMPARISON_REPORT_H_
#define TFB_RESULTS_COMPARISON_REPORT_H_

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "results/comparison.h"
#include "results/table.h"

namespace tfb {

enum class ComparisonFormat { kTerminal, kMarkdown, kComment, kJson };
// Parses "terminal", "markdown", "comment" or "json". Returns InvalidArgument, naming these, for
// other names.
absl::StatusOr<ComparisonFormat> ParseComparisonFormat(absl::string_view name);

// Renders the comparison. Terminal and Markdown show regressions, improvements, and counts; they
// show what is the same, ambiguous or not judged only with `all`. `style` is the terminal's.
//
// JSON is {"format", "regressed", "metric", "threshold", "cases", "missing", "added", "counts":
// {...}, "environment_differences": [...], "findings": [...]} with all findings, whatever `all` is.
// Unknown numbers are left out; numbers that are not finite are the strings "Infinity" and "NaN".
//
// A comment is what RenderComment of results/comparison_comment.h returns, whatever `all` is.
std::string RenderComparison(const Comparison& comparison, ComparisonFormat format, bool all,
                             const TextStyle& style);

// Returns what to do about ambiguous times: a sentence and, on a line of its own, the command that
// takes more samples. Returns an empty text where no time is ambiguous.
std::string AmbiguityAdvice(const Comparison& comparison);

// Returns "SLOWER", "FASTER", "WORSE", "BETTER", "SAME", "AMBIGUOUS" or "NOT JUDGED".
absl::string_view VerdictWord(const Finding& finding);

}  // namespace tfb

#endif  // TFB_RESULTS_COMPARISON_REPORT_H_
