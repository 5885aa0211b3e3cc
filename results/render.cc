#include "results/render.h"

#include <stdlib.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "results/analysis.h"
#include "results/benchmark_json.h"
#include "results/export.h"
#include "results/page.h"
#include "results/reader.h"
#include "results/report.h"

namespace tfb {
namespace {

constexpr absl::string_view kNoCases =
    "No cases: the sweep was stopped before its first case ended, or its selection was empty.";

std::vector<Table> AllTables(const Analysis& analysis, bool details) {
  std::vector<Table> all;
  const auto add = [&all](std::vector<Table> tables) {
    for (Table& table : tables) all.push_back(std::move(table));
  };
  add(report::AccuracyTables(analysis, details));
  add(report::ScalingTables(analysis));
  add(report::StreamingTables(analysis, details));
  if (details) {
    add(report::CostTables(analysis));
    add(report::ExtrapolationTables(analysis));
    add(report::StatisticsTables(analysis));
  }
  report::ChoiceReport choices = report::ChoiceTables(analysis);
  add(std::move(choices.first));
  add(std::move(choices.more));
  if (details) add(report::EnvironmentTables(analysis));
  return all;
}

std::string RenderTerminal(const Analysis& analysis, const RenderOptions& options) {
  const TextStyle& style = options.style;
  std::string out;
  const auto add_line = [&](absl::string_view line, Emphasis emphasis) {
    const std::string wrapped = style.width > 0 ? Wrap(line, style.width, "  ") : std::string(line);
    absl::StrAppend(&out, Emphasise(wrapped, emphasis, style), "\n");
  };
  for (const std::string& line : report::HeaderLines(analysis, options.details)) {
    add_line(line, Emphasis::kNone);
  }
  const std::vector<Table> tables = AllTables(analysis, options.details);
  for (const Table& table : tables) absl::StrAppend(&out, "\n", ToTerminal(table, style));
  std::vector<Table> shown;
  for (const Table& table : tables) shown.push_back(WithShownDetails(table, style));
  const std::string legend = report::LegendLine(shown);
  if (!legend.empty()) {
    out += "\n";
    add_line(legend, Emphasis::kFaint);
  }
  out += "\n";
  if (analysis.cases().empty()) add_line(kNoCases, Emphasis::kNone);
  for (const report::OutcomeLine& line : report::OutcomeLines(analysis, options.details)) {
    add_line(line.text, line.bad ? Emphasis::kBad : Emphasis::kNone);
  }
  for (const std::string& note : options.notes) add_line(Printable(note), Emphasis::kStrong);
  // Not wrapped: a path that is broken in two cannot be copied.
  for (const std::string& path : options.paths) {
    absl::StrAppend(&out, "results: ", Printable(path), "\n");
  }
  return style.unicode ? out : ToAscii(out);
}

std::string RenderMarkdown(const Analysis& analysis, const RenderOptions& options) {
  std::string out = "# Results\n\n";
  for (const std::string& line : report::HeaderLines(analysis, options.details)) {
    absl::StrAppend(&out, "- ", line, "\n");
  }
  const std::vector<std::string> message = report::HeadlineSentences(analysis);
  if (!message.empty()) absl::StrAppend(&out, "\n", absl::StrJoin(message, " "), "\n");
  const std::vector<Table> tables = AllTables(analysis, options.details);
  for (const Table& table : tables) absl::StrAppend(&out, "\n", ToMarkdown(table));
  const std::string legend = report::LegendLine(tables);
  if (!legend.empty()) absl::StrAppend(&out, "\n", legend, "\n");
  out += "\n### Outcome\n\n";
  if (analysis.cases().empty()) absl::StrAppend(&out, kNoCases, "\n\n");
  for (const report::OutcomeLine& line : report::OutcomeLines(analysis, options.details)) {
    absl::StrAppend(&out, "- ", line.bad ? "**" : "", line.text, line.bad ? "**" : "", "\n");
  }
  for (const std::string& note : options.notes) {
    absl::StrAppend(&out, "- ", Printable(note), "\n");
  }
  for (const std::string& path : options.paths) {
    absl::StrAppend(&out, "- results: ", Printable(path), "\n");
  }
  return out;
}

std::string EnvironmentVariable(const char* name) {
  const char* value = getenv(name);
  return value == nullptr ? "" : value;
}

bool LocaleIsUtf8() {
  // The first that is set decides, as in setlocale(3).
  for (const char* name : {"LC_ALL", "LC_CTYPE", "LANG"}) {
    const std::string value = absl::AsciiStrToLower(EnvironmentVariable(name));
    if (!value.empty()) {
      return absl::StrContains(value, "utf-8") || absl::StrContains(value, "utf8");
    }
  }
  return true;  // nothing said, as in containers: files and terminals are UTF-8 today
}

}  // namespace

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

TextStyle StyleFor(int file_descriptor) {
  TextStyle style;
  style.unicode = LocaleIsUtf8();
  if (isatty(file_descriptor) == 0) return style;
  style.colour = EnvironmentVariable("NO_COLOR").empty() && EnvironmentVariable("TERM") != "dumb";
  winsize size = {};
  if (ioctl(file_descriptor, TIOCGWINSZ, &size) == 0 && size.ws_col > 0) {
    style.width = std::max<int>(80, size.ws_col);
  }
  return style;
}

std::string Render(const ResultSet& results, const RenderOptions& options) {
  const Analysis analysis(results);
  switch (options.format) {
    case RenderFormat::kTerminal:
      return RenderTerminal(analysis, options);
    case RenderFormat::kMarkdown:
      return RenderMarkdown(analysis, options);
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

std::string DescribeProblem(const ProblemSize& problem, bool with_tokens) {
  std::vector<std::string> parts;
  const bool equal = problem.query_tokens() == problem.kv_tokens();
  const bool few_queries = problem.query_tokens() < problem.kv_tokens();
  if (with_tokens && equal) {
    parts.push_back(absl::StrCat(problem.query_tokens(), " tokens"));
  } else if (!equal) {
    // The shorter of the two stays the same within a scaling table.
    if (with_tokens || few_queries) {
      parts.push_back(absl::StrCat(problem.query_tokens(),
                                   problem.query_tokens() == 1 ? " query" : " queries"));
    }
    if (with_tokens || !few_queries) {
      parts.push_back(
          absl::StrCat(problem.kv_tokens(), problem.kv_tokens() == 1 ? " key" : " keys"));
    }
  }
  std::string heads =
      absl::StrCat(problem.query_heads(), problem.query_heads() == 1 ? " head" : " heads");
  if (problem.kv_heads() != problem.query_heads()) {
    absl::StrAppend(&heads, " on ", problem.kv_heads());
  }
  absl::StrAppend(&heads, " of ", problem.head_dim());
  if (problem.value_dim() != problem.head_dim()) {
    absl::StrAppend(&heads, " (values of ", problem.value_dim(), ")");
  }
  parts.push_back(heads);
  if (problem.batch() != 1) parts.push_back(absl::StrCat("batch ", problem.batch()));
  if (problem.causal()) parts.push_back("causal");
  return absl::StrJoin(parts, ", ");
}

std::string DescribeInput(const InputProfile& input) {
  std::vector<std::string> parts;
  const std::string& source = input.file().empty() ? input.model() : input.file();
  if (!source.empty()) parts.push_back(Printable(source));
  if (!input.layer().empty()) parts.push_back("layer " + Printable(input.layer()));
  const std::string details = CanonicalOptions({input.details().begin(), input.details().end()});
  if (!details.empty()) parts.push_back(details);
  const std::string name = Printable(input.name());
  return parts.empty() ? name : absl::StrCat(name, " (", absl::StrJoin(parts, ", "), ")");
}

std::string DescribeCase(const Case& result) {
  const Case::Key& key = result.key();
  std::string text = absl::StrCat(Printable(DisplayName(result)), ", ", Name(key.device()), " ",
                                  Name(key.dtype()), ", ", DescribeProblem(key.problem(), true));
  const std::string input = DescribeInput(key.input());
  if (!input.empty()) absl::StrAppend(&text, ", ", input);
  return text;
}

}  // namespace tfb
