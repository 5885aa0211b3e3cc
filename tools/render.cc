// Shows result files: tables and a page for people, plots for a paper, CSV and JSON for programs.

#include "results/render.h"

#include <stdio.h>
#include <unistd.h>

#include <iostream>
#include <string>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "core/command_line.h"
#include "core/output_file.h"
#include "results/files.h"
#include "results/reader.h"
#include "results/report_text.h"
#include "results/single_plot.h"

ABSL_FLAG(
    std::string, format, "terminal",
    "How to show the results: terminal (tables for people), markdown, html (one page with plots "
    "and tables, which needs nothing else), csv (one line a case with every number, RFC 4180), "
    "json (with every sample), benchmark_json (what Google Benchmark's compare.py reads), or svg "
    "and png (single plots, with --plot).");
ABSL_FLAG(std::string, output, "",
          "File to write to, relative to the caller's folder; standard output where empty.");
ABSL_FLAG(
    bool, details, false,
    "With terminal and markdown: each layer of an input in a row of its own, and the names of "
    "what was skipped for each reason; also streams on captured inputs, setup, cold and warm times "
    "told apart with their intervals, rates, the "
    "statistics that techniques report, and the whole environment.");
ABSL_FLAG(
    std::string, plot, "",
    "With svg and png: scaling (time over tokens), frontier (error, or bits per byte, against "
    "cost), memory, or roofline.");
ABSL_FLAG(std::string, family, "", "With --plot: only techniques of this family.");
ABSL_FLAG(
    std::string, techniques, "",
    "With --plot: only techniques that match one of these globs, separated by commas: a name, "
    "as near*, or a name with options as the tables show it.");
ABSL_FLAG(
    std::string, group, "",
    "With --plot: only figures, or panels of them, with this text in their title, e.g. causal, "
    "\"input real\" or computation.");
ABSL_FLAG(double, width_mm, 180, "With --plot: width on paper, 60 to 1000.");
ABSL_FLAG(int, dpi, 300, "With png: dots an inch, 30 to 2400.");
ABSL_FLAG(bool, salvage, false,
          "Read what is whole in a damaged file, and say how much is not; else it is an error.");
ABSL_FLAG(std::string, colour, "auto",
          "always, never, or auto: on a terminal where NO_COLOR is not set.");
ABSL_FLAG(
    int, width, -1,
    "Columns that terminal tables may take; 0 is unlimited, -1 what the terminal has, or 120.");

namespace tfb {
namespace {

constexpr char kProgram[] = "render";
constexpr char kUsage[] =
    "render [FILE...] [--format=terminal|markdown|html|csv|json|benchmark_json] [--output=FILE]\n"
    "render [FILE...] --format=svg|png --plot=scaling|frontier|memory|roofline [--output=FILE]\n"
    "Shows what is in result files: errors, times over lengths against dense, crossover lengths,\n"
    "what did not run and why. Several files are shown as one. Without FILE the newest of\n"
    "results/runs is taken.\n\n"
    "Exit status: 0 done, 2 bad usage or an unreadable file.";

absl::StatusOr<RenderOptions> OptionsFromFlags() {
  RenderOptions options;
  absl::StatusOr<RenderFormat> format = ParseRenderFormat(absl::GetFlag(FLAGS_format));
  if (!format.ok()) {
    return absl::InvalidArgumentError(absl::StrCat("--format: ", format.status().message()));
  }
  options.format = *format;
  options.details = absl::GetFlag(FLAGS_details);
  const bool to_file = !absl::GetFlag(FLAGS_output).empty();
  if (!to_file) {
    options.style = StyleFor(STDOUT_FILENO);
  }
  const std::string colour = absl::GetFlag(FLAGS_colour);
  if (colour == "always" || colour == "never") {
    options.style.colour = colour == "always";
  } else if (colour != "auto") {
    return absl::InvalidArgumentError(
        absl::StrCat("--colour: \"", colour, "\" is none of auto, always, never"));
  }
  const int width = absl::GetFlag(FLAGS_width);
  if (width < -1 || (width > 0 && width < 40)) {
    return absl::InvalidArgumentError(
        absl::StrCat("--width=", width, ": 0, -1, or at least 40 is wanted"));
  }
  if (width >= 0) options.style.width = width;
  return options;
}

absl::StatusOr<std::vector<std::string>> Paths(const CommandLine& line) {
  std::vector<std::string> paths;
  for (const std::string& argument : line.arguments) paths.push_back(CallerPath(argument));
  if (!paths.empty()) return paths;
  absl::StatusOr<std::string> newest = NewestResultFile(DefaultRunsFolder());
  if (!newest.ok()) {
    return absl::NotFoundError(
        absl::StrCat(newest.status().message(),
                     "; name a file, or run a sweep first: bazel run //harness:sweep"));
  }
  paths.push_back(*newest);
  return paths;
}

// Returns the merged contents of the files; the notes and stderr say what was left out.
absl::Status ReadAll(const std::vector<std::string>& paths, ResultSet* results,
                     RenderOptions* options) {
  for (const std::string& path : paths) {
    absl::StatusOr<ResultFile> file =
        ReadResultFile(path, absl::GetFlag(FLAGS_salvage) ? Damage::kPassOver : Damage::kRefuse);
    if (!file.ok()) return file.status();
    results->MergeFrom(file->results);
    options->paths.push_back(path);
    if (const std::string note = WhatWasLeftOut(*file); !note.empty()) {
      options->notes.push_back(note);
      PrintError(kProgram, note);
    }
  }
  return absl::OkStatus();
}

absl::Status OutputError(absl::StatusCode code, absl::string_view message) {
  return absl::Status(code, absl::StrCat("--output: ", message));
}

// Checks that the file to write is none of those that are read, which would be lost.
absl::Status CheckOutput(const std::vector<std::string>& paths) {
  const std::string output = absl::GetFlag(FLAGS_output);
  for (const std::string& path : paths) {
    if (output.empty() || !IsSamePlainFile(CallerPath(output), path)) continue;
    return OutputError(absl::StatusCode::kInvalidArgument,
                       absl::StrCat(output, " is one of the files that are read"));
  }
  return absl::OkStatus();
}

absl::Status Write(const std::string& text) {
  const std::string output = absl::GetFlag(FLAGS_output);
  if (output.empty()) {
    std::cout << text << std::flush;
    return std::cout ? absl::OkStatus() : absl::UnavailableError("cannot write standard output");
  }
  const absl::Status status = WriteFile(CallerPath(output), text);
  return status.ok() ? status : OutputError(status.code(), status.message());
}

bool IsPlotFormat(absl::string_view format) { return format == "svg" || format == "png"; }

absl::Status RenderPlot(const ResultSet& results) {
  SinglePlotOptions options;
  options.kind = absl::GetFlag(FLAGS_plot);
  options.family = absl::GetFlag(FLAGS_family);
  options.techniques = absl::GetFlag(FLAGS_techniques);
  options.group = absl::GetFlag(FLAGS_group);
  options.width_mm = absl::GetFlag(FLAGS_width_mm);
  absl::StatusOr<std::string> svg = RenderSinglePlot(results, options);
  if (!svg.ok()) return svg.status();
  if (absl::GetFlag(FLAGS_format) == "svg") return Write(*svg);
  const std::string output = absl::GetFlag(FLAGS_output);
  if (output.empty()) return absl::InvalidArgumentError("--format=png wants --output=FILE.png");
  return WritePng(*svg, absl::GetFlag(FLAGS_dpi), CallerPath(output));
}

// Returns an error where a flag is set that only plots heed.
absl::Status CheckNoPlotFlags() {
  const std::pair<const char*, std::string> kFlags[] = {
      {"plot", absl::GetFlag(FLAGS_plot)},
      {"family", absl::GetFlag(FLAGS_family)},
      {"techniques", absl::GetFlag(FLAGS_techniques)},
      {"group", absl::GetFlag(FLAGS_group)}};
  for (const auto& [name, value] : kFlags) {
    if (value.empty()) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        "--", name, " wants --format=svg or --format=png",
        absl::string_view(name) == "plot" ? "" : " and --plot: tables show everything"));
  }
  return absl::OkStatus();
}

absl::StatusOr<int> RenderAll(const CommandLine& line) {
  const bool plot = IsPlotFormat(absl::GetFlag(FLAGS_format));
  RenderOptions options;
  if (!plot) {
    if (const absl::Status status = CheckNoPlotFlags(); !status.ok()) return status;
    absl::StatusOr<RenderOptions> from_flags = OptionsFromFlags();
    if (!from_flags.ok()) return from_flags.status();
    options = *std::move(from_flags);
  }
  absl::StatusOr<std::vector<std::string>> paths = Paths(line);
  if (!paths.ok()) return paths.status();
  if (const absl::Status distinct = CheckOutput(*paths); !distinct.ok()) return distinct;
  ResultSet results;
  const absl::Status read = ReadAll(*paths, &results, &options);
  if (!read.ok()) return read;
  const absl::Status shown = plot ? RenderPlot(results) : Write(Render(results, options));
  if (!shown.ok()) return shown;
  return kExitDone;
}

}  // namespace
}  // namespace tfb

int main(int argc, char** argv) {
  return tfb::RunMain(tfb::kProgram, tfb::kUsage, {argv, argv + argc}, tfb::RenderAll);
}
