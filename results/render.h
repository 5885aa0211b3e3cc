// Result sets as text: tables and pages for people, CSV and JSON for programs.
#ifndef TFB_RESULTS_RENDER_H_
#define TFB_RESULTS_RENDER_H_

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "results/report_text.h"
#include "results/results.pb.h"

namespace tfb {

enum class RenderFormat { kTerminal, kMarkdown, kCsv, kJson, kHtml, kBenchmarkJson };
// "terminal", "markdown", "csv", "json", "html", "benchmark_json"; InvalidArgument names what is
// allowed.
absl::StatusOr<RenderFormat> ParseRenderFormat(absl::string_view name);

struct RenderOptions : ReportOptions {
  RenderFormat format = RenderFormat::kTerminal;
};

// Terminal and Markdown: results/report_text.h.
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

}  // namespace tfb

#endif  // TFB_RESULTS_RENDER_H_
