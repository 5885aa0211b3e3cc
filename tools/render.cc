// Prints result files as tables for people or as CSV or JSON for programs.

#include "results/render.h"

#include <stdio.h>
#include <unistd.h>

#include <fstream>
#include <iostream>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "results/files.h"
#include "results/reader.h"
#include "tools/command_line.h"

ABSL_FLAG(std::string, format, "terminal",
          "How to show the results: terminal (tables for people), markdown, csv (one line a case "
          "with every number, RFC 4180), or json (with every sample).");
ABSL_FLAG(std::string, output, "",
          "File to write to, relative to the caller's folder; standard output where empty.");
ABSL_FLAG(bool, details, false,
          "With terminal and markdown: each layer of an input in a row of its own; also streams on "
          "captured inputs, setup, cold and warm times told apart with their intervals, rates, the "
          "statistics that techniques report, and the whole environment.");
ABSL_FLAG(std::string, colour, "auto",
          "always, never, or auto: on a terminal where NO_COLOR is not set.");
ABSL_FLAG(
    int, width, -1,
    "Columns that terminal tables may take; 0 is unlimited, -1 what the terminal has, or 120.");

namespace tfb {
namespace {

constexpr char kUsage[] =
    "render [FILE...] [--format=terminal|markdown|csv|json] [--output=FILE]\n"
    "Prints what is in result files: errors, times over lengths against dense, crossover lengths,\n"
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

absl::Status RenderAll(const CommandLine& line) {
  absl::StatusOr<RenderOptions> options = OptionsFromFlags();
  if (!options.ok()) return options.status();
  absl::StatusOr<std::vector<std::string>> paths = Paths(line);
  if (!paths.ok()) return paths.status();
  ResultSet results;
  for (const std::string& path : *paths) {
    absl::StatusOr<ResultFile> file = ReadResultFile(path);
    if (!file.ok()) return file.status();
    results.MergeFrom(file->results);
    options->paths.push_back(path);
    if (file->torn_bytes > 0) {
      const std::string note =
          absl::StrCat(path, ": ", file->torn_bytes, " bytes of a torn last record were left out");
      options->notes.push_back(note);
      PrintError("render", note);
    }
  }
  const std::string text = Render(results, *options);
  const std::string output = absl::GetFlag(FLAGS_output);
  if (output.empty()) {
    std::cout << text << std::flush;
    return std::cout ? absl::OkStatus() : absl::UnavailableError("cannot write standard output");
  }
  const std::string path = CallerPath(output);
  std::ofstream stream(path, std::ios::binary);
  stream << text;
  stream.close();
  if (!stream) return absl::UnavailableError(absl::StrCat("--output: cannot write ", path));
  return absl::OkStatus();
}

int Main(const std::vector<std::string>& argv) {
  absl::StatusOr<CommandLine> line = ParseCommandLine(argv);
  if (!line.ok()) {
    PrintError("render", line.status().message());
    return kExitBadUsage;
  }
  if (line->help) {
    std::cout << HelpText(kUsage);
    return kExitDone;
  }
  const absl::Status status = RenderAll(*line);
  if (!status.ok()) {
    PrintError("render", status.message());
    return kExitBadUsage;
  }
  return kExitDone;
}

}  // namespace
}  // namespace tfb

int main(int argc, char** argv) { return tfb::Main({argv, argv + argc}); }
