#include "results/report_text.h"

#include <stdlib.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
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
  add(report::DuelTables(analysis));
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

std::string EnvironmentVariable(const char* name) {
  const char* value = getenv(name);
  return value == nullptr ? "" : value;
}

bool LocaleIsUtf8() {
  // The first variable that is set decides, as in setlocale(3).
  for (const char* name : {"LC_ALL", "LC_CTYPE", "LANG"}) {
    const std::string value = absl::AsciiStrToLower(EnvironmentVariable(name));
    if (!value.empty()) {
      return absl::StrContains(value, "utf-8") || absl::StrContains(value, "utf8");
    }
  }
  return true;  // none is set, as in containers: files and terminals are UTF-8 today
}

}  // namespace

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

std::string TerminalReport(const Analysis& analysis, const ReportOptions& options) {
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
  // A terminal shows the end of what was printed.
  const std::vector<std::string> message = report::RecommendationSentences(analysis);
  for (const std::string& sentence : message) add_line(sentence, Emphasis::kStrong);
  if (!message.empty()) out += "\n";
  if (analysis.cases().empty()) add_line(kNoCases, Emphasis::kNone);
  for (const report::OutcomeLine& line : report::OutcomeLines(analysis, options.details)) {
    add_line(line.text, line.bad ? Emphasis::kBad : Emphasis::kNone);
  }
  for (const std::string& note : options.notes) add_line(Printable(note), Emphasis::kStrong);
  // The paths are not wrapped, since a broken path cannot be copied.
  for (const std::string& path : options.paths) {
    absl::StrAppend(&out, "results: ", Printable(path), "\n");
  }
  return style.unicode ? out : ToAscii(out);
}

std::string MarkdownReport(const Analysis& analysis, const ReportOptions& options) {
  std::string out = "# Results\n\n";
  for (const std::string& line : report::HeaderLines(analysis, options.details)) {
    absl::StrAppend(&out, "- ", MarkdownText(line), "\n");
  }
  const std::vector<std::string> message = report::HeadlineSentences(analysis);
  if (!message.empty())
    absl::StrAppend(&out, "\n", MarkdownText(absl::StrJoin(message, " ")), "\n");
  const std::vector<Table> tables = AllTables(analysis, options.details);
  for (const Table& table : tables) absl::StrAppend(&out, "\n", ToMarkdown(table));
  const std::string legend = report::LegendLine(tables);
  if (!legend.empty()) absl::StrAppend(&out, "\n", legend, "\n");
  out += "\n### Outcome\n\n";
  if (analysis.cases().empty()) absl::StrAppend(&out, kNoCases, "\n\n");
  for (const report::OutcomeLine& line : report::OutcomeLines(analysis, options.details)) {
    absl::StrAppend(&out, "- ", line.bad ? "**" : "", MarkdownText(line.text), line.bad ? "**" : "",
                    "\n");
  }
  for (const std::string& note : options.notes) {
    absl::StrAppend(&out, "- ", MarkdownText(Printable(note)), "\n");
  }
  for (const std::string& path : options.paths) {
    absl::StrAppend(&out, "- results: ", MarkdownText(Printable(path)), "\n");
  }
  return out;
}

}  // namespace tfb
