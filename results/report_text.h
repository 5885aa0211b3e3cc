// A result set as text for people: for terminals, and as Markdown.
#ifndef TFB_RESULTS_REPORT_TEXT_H_
#define TFB_RESULTS_REPORT_TEXT_H_

#include <string>
#include <vector>

#include "results/analysis.h"
#include "results/table.h"

namespace tfb {

struct ReportOptions {
  TextStyle style;       // of the terminal
  bool details = false;  // also each layer, costs told apart, statistics and environment
  // Shown as the last line, "results: …"; none where empty.
  std::vector<std::string> paths;
  // Shown before it, e.g. that a file has a torn tail.
  std::vector<std::string> notes;
};

// The style that suits the file descriptor: colour on a terminal where NO_COLOR is unset or empty
// and TERM is not "dumb"; Unicode where the locale's variables say UTF-8; the terminal's width
// where it tells one, but at least 80, and 120 otherwise.
TextStyle StyleFor(int file_descriptor);

// Both show a header for each machine; a table of errors for each element type, length and input
// file, over its layers and both masks; a table of times over lengths for each family of problems,
// and of segments where techniques stream; the choices that nothing beats in both error and time;
// what the marks mean; the fastest technique and its cost in two sentences, which Markdown has first;
// what did not run, by reason; a count of cases. A result set without cases says so. Where the terminal is wide,
// speed-ups stand beside times, and intervals beside speed-ups; a long table shows the dense row
// again for each family.
std::string TerminalReport(const Analysis& analysis, const ReportOptions& options);
std::string MarkdownReport(const Analysis& analysis, const ReportOptions& options);

}  // namespace tfb

#endif  // TFB_RESULTS_REPORT_TEXT_H_
