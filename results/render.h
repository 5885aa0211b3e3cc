// Renders result sets as text: tables and pages for people, CSV and JSON for programs.
#ifndef TFB_RESULTS_RENDER_H_
#define TFB_RESULTS_RENDER_H_

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "results/report_text.h"
#include "results/results.pb.h"

namespace tfb {

enum class RenderFormat { kTerminal, kMarkdown, kCsv, kJson, kHtml, kBenchmarkJson };
// Parses "terminal", "markdown", "csv", "json", "html" or "benchmark_json". Returns
// InvalidArgument, naming these, for other names.
absl::StatusOr<RenderFormat> ParseRenderFormat(absl::string_view name);

struct RenderOptions : ReportOptions {
  RenderFormat format = RenderFormat::kTerminal;
};

// Renders `results`. For terminal and Markdown see results/report_text.h, for HTML results/page.h,
// for Google Benchmark's JSON results/benchmark_json.h.
//
// CSV (RFC 4180) has a header line, then one line per case, in the order of the file; absent values
// are empty fields, and numbers that are not finite are inf, -inf and nan. Times are in ns. The
// columns pass and kept_bytes are there where the file has another pass than the forward one.
//
// JSON is {"format", "environments": [...], "cases": [...]}; absent values are left out, numbers
// that are not finite are the strings "Infinity", "-Infinity" and "NaN", as in Protobuf's JSON, and
// 64-bit seeds are strings.
std::string Render(const ResultSet& results, const RenderOptions& options);

}  // namespace tfb

#endif  // TFB_RESULTS_RENDER_H_
