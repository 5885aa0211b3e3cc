// Renders a result set as text for people: for terminals, and as Markdown.
#ifndef TFB_RESULTS_REPORT_TEXT_H_
#define TFB_RESULTS_REPORT_TEXT_H_

#include <string>
#include <vector>

#include "results/analysis.h"
#include "results/table.h"

namespace tfb {

struct ReportOptions {
  TextStyle style;       // of the terminal
  bool details = false;  // whether to show each layer, separate costs, statistics and environment
  // The paths of the last line, "results: …"; the line is missing where there are none.
  std::vector<std::string> paths;
  // Notes before that line, e.g. that a file ends in an incomplete record.
  std::vector<std::string> notes;
};

// Returns the style that suits the file descriptor: colour on a terminal where NO_COLOR is unset or
// empty and TERM is not "dumb"; Unicode where the locale's variables say UTF-8; the terminal's
// width where it is known, but at least 80, and 120 otherwise.
TextStyle StyleFor(int file_descriptor);

// Both show a header for each machine; a table of errors for each element type, length and input
// file, over its layers and both masks; a table of times over lengths for each family of problems,
// and of segments where techniques stream; the Pareto-optimal choices in error and time; a legend
// of the marks; the fastest technique and its cost in two sentences, which Markdown has first; the
// cases that did not run, by reason; a count of cases. A wide terminal shows speed-ups beside
// times, and intervals beside speed-ups; a long table repeats the dense row for each family.
std::string TerminalReport(const Analysis& analysis, const ReportOptions& options);
std::string MarkdownReport(const Analysis& analysis, const ReportOptions& options);

}  // namespace tfb

#endif  // TFB_RESULTS_REPORT_TEXT_H_
