// Result sets as text: tables and pages for people, CSV and JSON for programs.
#ifndef TFB_RESULTS_RENDER_H_
#define TFB_RESULTS_RENDER_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "results/results.pb.h"
#include "results/table.h"

namespace tfb {

enum class RenderFormat { kTerminal, kMarkdown, kCsv, kJson, kHtml, kBenchmarkJson };
// "terminal", "markdown", "csv", "json", "html", "benchmark_json"; InvalidArgument names what is
// allowed.
absl::StatusOr<RenderFormat> ParseRenderFormat(absl::string_view name);

struct RenderOptions {
  RenderFormat format = RenderFormat::kTerminal;
  TextStyle style;       // of the terminal
  bool details = false;  // also each layer, costs told apart, statistics and environment
  // Shown as the last line of terminal and Markdown, "results: …"; none where empty.
  std::vector<std::string> paths;
  // Shown before it, e.g. that a file has a torn tail.
  std::vector<std::string> notes;
};

// The style that suits the file descriptor: colour on a terminal where NO_COLOR is unset or empty
// and TERM is not "dumb"; Unicode where the locale's variables say UTF-8; the terminal's width
// where it tells one, but at least 80, and 120 otherwise.
TextStyle StyleFor(int file_descriptor);

// Terminal and Markdown: for each machine a header; in Markdown the message in three sentences; a
// table of errors for each element type, length
// and input file, over its layers and both masks; a table of times over lengths for each family of
// problems, and of segments where techniques stream; the choices that nothing beats in both error
// and time; what the marks mean; what did not run, by reason; a count of cases. A result set
// without cases says so. Where the terminal is wide, speed-ups stand beside times, and intervals
// beside speed-ups; a long table shows the dense row again for each family.
//
// CSV (RFC 4180): a header line, then one line a case, in the order of the file; absent values are
// empty fields, and numbers that are not finite are inf, -inf and nan. Times are in nanoseconds.
//
// JSON: {"format", "environments": [...], "cases": [...]}; absent values are left out, numbers that
// are not finite are the strings "Infinity", "-Infinity" and "NaN", as in Protobuf's JSON, and
// 64-bit seeds are strings.
//
// HTML: results/page.h. Google Benchmark's JSON: results/benchmark_json.h.
std::string Render(const ResultSet& results, const RenderOptions& options);

// "512 tokens, 8 heads of 64, causal", without the tokens where they vary within a table.
std::string DescribeProblem(const ProblemSize& problem, bool with_tokens);
// "real (file.safetensors, layer 3)"; the model where no file is named.
std::string DescribeInput(const InputProfile& input);
// "near window=256, cpu f32, 512 tokens, 8 heads of 64, causal, real".
std::string DescribeCase(const Case& result);

}  // namespace tfb

#endif  // TFB_RESULTS_RENDER_H_
