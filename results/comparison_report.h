// A comparison as text for people, and as JSON for programs.
#ifndef TFB_RESULTS_COMPARISON_REPORT_H_
#define TFB_RESULTS_COMPARISON_REPORT_H_

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "results/comparison.h"
#include "results/table.h"

namespace tfb {

enum class ComparisonFormat { kTerminal, kMarkdown, kJson };
// "terminal", "markdown", "json"; InvalidArgument names what is allowed.
absl::StatusOr<ComparisonFormat> ParseComparisonFormat(absl::string_view name);

// Terminal and Markdown: regressions, improvements, and counts; what is the same, ambiguous or not
// judged only with `all`. `style` is the terminal's.
//
// JSON: {"format", "regressed", "metric", "threshold", "cases", "missing", "added", "counts": {...},
// "environment_differences": [...], "findings": [...]}, all findings whatever `all` is. A number
// that is not known is left out, one that is not finite the string "Infinity" or "NaN".
std::string RenderComparison(const Comparison& comparison, ComparisonFormat format, bool all,
                             const TextStyle& style);

// "SLOWER", "FASTER", "WORSE", "BETTER", "SAME", "AMBIGUOUS", "NOT JUDGED".
absl::string_view VerdictWord(const Finding& finding);

}  // namespace tfb

#endif  // TFB_RESULTS_COMPARISON_REPORT_H_
