#include "results/render.h"

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "results/analysis.h"
#include "results/benchmark_json.h"
#include "results/export.h"
#include "results/page.h"

namespace tfb {

absl::StatusOr<RenderFormat> ParseRenderFormat(absl::string_view name) {
  if (name == "terminal") return RenderFormat::kTerminal;
  if (name == "markdown") return RenderFormat::kMarkdown;
  if (name == "csv") return RenderFormat::kCsv;
  if (name == "json") return RenderFormat::kJson;
  if (name == "html") return RenderFormat::kHtml;
  if (name == "benchmark_json") return RenderFormat::kBenchmarkJson;
  return absl::InvalidArgumentError(absl::StrCat(
      "\"", name, "\" is none of terminal, markdown, csv, json, html, benchmark_json, svg, png"));
}

std::string Render(const ResultSet& results, const RenderOptions& options) {
  const Analysis analysis(results);
  switch (options.format) {
    case RenderFormat::kTerminal:
      return TerminalReport(analysis, options);
    case RenderFormat::kMarkdown:
      return MarkdownReport(analysis, options);
    case RenderFormat::kCsv:
      return RenderCsv(analysis);
    case RenderFormat::kJson:
      return RenderJson(analysis);
    case RenderFormat::kHtml:
      return RenderPage(analysis, {options.paths, options.notes});
    case RenderFormat::kBenchmarkJson:
      return RenderBenchmarkJson(analysis);
  }
  return "";
}

}  // namespace tfb
