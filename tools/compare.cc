// Holds two result files against each other; see results/comparison.h for the rules.

#include <unistd.h>

#include <iostream>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "results/comparison.h"
#include "results/files.h"
#include "results/reader.h"
#include "results/render.h"
#include "tools/command_line.h"

ABSL_FLAG(double, threshold, 1.10,
          "A time or a memory that grew by this factor or more is a regression.");
ABSL_FLAG(
    std::string, metric, "relative_to_dense",
    "What of times to compare: relative_to_dense (over dense in the same run, which cancels "
    "a shared machine's speed; dense itself by its share of the measured peak), or absolute.");
ABSL_FLAG(double, error_threshold, 1.25,
          "An error against dense that grew by this factor or more is a regression.");
ABSL_FLAG(double, error_floor, 1e-5, "Errors up to here are rounding and are not compared.");
ABSL_FLAG(bool, allow_different_environment, false,
          "Compare although processor, GPU, compiler or flags differ; absolute times are then not "
          "judged.");
ABSL_FLAG(bool, allow_missing, false,
          "Cases of BASE that NEW lacks, or skipped, are no regression.");
ABSL_FLAG(bool, all, false, "Also list what is unchanged, within noise, or not judged.");
ABSL_FLAG(std::string, format, "terminal", "terminal or markdown.");

namespace tfb {
namespace {

constexpr char kUsage[] =
    "compare BASE NEW [--threshold=1.10] [--metric=relative_to_dense|absolute]\n"
    "Compares the cases that two result files have in common: times, memory, errors, status.\n"
    "A time counts where it is beyond the threshold and the 95% intervals do not overlap.\n\n"
    "Exit status: 0 nothing regressed, 1 a regression, 2 the two cannot be compared: other\n"
    "hardware or compiler flags, no case in common, an unreadable file, bad usage.";

absl::StatusOr<CompareOptions> OptionsFromFlags() {
  CompareOptions options;
  options.threshold = absl::GetFlag(FLAGS_threshold);
  options.error_threshold = absl::GetFlag(FLAGS_error_threshold);
  options.error_floor = absl::GetFlag(FLAGS_error_floor);
  options.allow_different_environment = absl::GetFlag(FLAGS_allow_different_environment);
  options.allow_missing = absl::GetFlag(FLAGS_allow_missing);
  const std::string metric = absl::GetFlag(FLAGS_metric);
  if (metric == "absolute") {
    options.metric = CompareOptions::Metric::kAbsolute;
  } else if (metric != "relative_to_dense") {
    return absl::InvalidArgumentError(
        absl::StrCat("--metric: \"", metric, "\" is none of relative_to_dense, absolute"));
  }
  const std::string format = absl::GetFlag(FLAGS_format);
  if (format != "terminal" && format != "markdown") {
    return absl::InvalidArgumentError(
        absl::StrCat("--format: \"", format, "\" is none of terminal, markdown"));
  }
  return options;
}

absl::StatusOr<ResultSet> Read(const std::string& argument) {
  const std::string path = CallerPath(argument);
  absl::StatusOr<ResultFile> file = ReadResultFile(path);
  if (!file.ok()) return file.status();
  if (file->torn_bytes > 0) {
    PrintError("compare", absl::StrCat(path, ": ", file->torn_bytes,
                                       " bytes of a torn last record were left out"));
  }
  return std::move(file->results);
}

absl::StatusOr<int> CompareFiles(const CommandLine& line) {
  absl::StatusOr<CompareOptions> options = OptionsFromFlags();
  if (!options.ok()) return options.status();
  if (line.arguments.size() != 2) {
    return absl::InvalidArgumentError(absl::StrCat(
        "two result files are wanted, BASE and NEW, not ", line.arguments.size(), "; see --help"));
  }
  absl::StatusOr<ResultSet> base = Read(line.arguments[0]);
  if (!base.ok()) return base.status();
  absl::StatusOr<ResultSet> now = Read(line.arguments[1]);
  if (!now.ok()) return now.status();
  absl::StatusOr<Comparison> comparison = Compare(*base, *now, *options);
  if (!comparison.ok()) return comparison.status();
  std::cout << RenderComparison(*comparison, absl::GetFlag(FLAGS_format) == "markdown",
                                absl::GetFlag(FLAGS_all), StyleFor(STDOUT_FILENO))
            << std::flush;
  return comparison->regressed() ? kExitCheckFailed : kExitDone;
}

int Main(const std::vector<std::string>& argv) {
  absl::StatusOr<CommandLine> line = ParseCommandLine(argv);
  if (!line.ok()) {
    PrintError("compare", line.status().message());
    return kExitBadUsage;
  }
  if (line->help) {
    std::cout << HelpText(kUsage);
    return kExitDone;
  }
  const absl::StatusOr<int> exit_status = CompareFiles(*line);
  if (!exit_status.ok()) {
    PrintError("compare", exit_status.status().message());
    return kExitBadUsage;
  }
  return *exit_status;
}

}  // namespace
}  // namespace tfb

int main(int argc, char** argv) { return tfb::Main({argv, argv + argc}); }
