// Compares two result files; see results/comparison.h for the rules.

#include <unistd.h>

#include <iostream>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "core/command_line.h"
#include "core/status.h"
#include "results/comparison.h"
#include "results/comparison_comment.h"
#include "results/comparison_report.h"
#include "results/files.h"
#include "results/reader.h"
#include "results/report_text.h"

ABSL_FLAG(double, threshold, 1.05,
          "A time whose 95% interval lies beyond this factor as a whole is a regression.");
ABSL_FLAG(
    std::string, metric, "relative_to_dense",
    "What of times to compare: relative_to_dense (over dense in the same run, which cancels a "
    "shared machine's speed; dense itself over fixed arithmetic that was timed beside it), "
    "absolute, or instructions, where the kernels of both machines count them (with "
    "--threads=1 and --threshold=1.01 they find what times do not).");
ABSL_FLAG(double, memory_threshold, 1.05,
          "A memory that grew by this factor or more is a regression.");
ABSL_FLAG(double, error_threshold, 1.25,
          "An error against dense that grew by this factor or more is a regression.");
ABSL_FLAG(double, error_floor, 1e-5, "Errors up to here are rounding and are not compared.");
ABSL_FLAG(bool, allow_different_environment, false,
          "Compare although processor, GPU, compiler or flags differ; absolute times are then not "
          "judged.");
ABSL_FLAG(bool, allow_different_precision, false,
          "Match cases whatever their element type; errors are then not judged.");
ABSL_FLAG(
    bool, allow_missing, false,
    "Cases of BASE that NEW lacks, or skipped, and numbers that it lacks, are no regression.");
ABSL_FLAG(bool, all, false, "Also list what is the same, ambiguous, or not judged.");
ABSL_FLAG(std::string, format, "terminal",
          "terminal, markdown, comment (of a pull request: at most 60,000 bytes, and one that says "
          "why where the two cannot be compared) or json (with all verdicts).");

namespace tfb {
namespace {

constexpr char kProgram[] = "compare";
constexpr char kUsage[] =
    "compare BASE NEW [--threshold=1.05] [--metric=relative_to_dense|absolute|instructions]\n"
    "Compares the cases that two result files have in common: times, memory, errors, status.\n"
    "A time is SLOWER where the 95% interval of its change, by the bootstrap over all samples, "
    "lies\n"
    "beyond the threshold and a rank sum test and, over dense, a test that counts dense's noise,\n"
    "corrected for the number of cases, say that the two differ; FASTER likewise; SAME where the\n"
    "interval lies within; AMBIGUOUS in between.\n\n"
    "Exit status: 0 nothing regressed, 1 a regression, 2 it cannot be judged: all times are\n"
    "ambiguous or too few samples, or no number is on both sides; other hardware, compiler flags\n"
    "or precision, no case in common; an unreadable file, bad usage.";

absl::StatusOr<CompareOptions::Metric> ParseMetric(const std::string& name) {
  using Metric = CompareOptions::Metric;
  if (name == "relative_to_dense") return Metric::kRelativeToDense;
  if (name == "absolute") return Metric::kAbsolute;
  if (name == "instructions") return Metric::kInstructions;
  return absl::InvalidArgumentError(absl::StrCat(
      "--metric: \"", name, "\" is none of relative_to_dense, absolute, instructions"));
}

absl::StatusOr<CompareOptions> OptionsFromFlags() {
  CompareOptions options;
  options.threshold = absl::GetFlag(FLAGS_threshold);
  options.memory_threshold = absl::GetFlag(FLAGS_memory_threshold);
  options.error_threshold = absl::GetFlag(FLAGS_error_threshold);
  options.error_floor = absl::GetFlag(FLAGS_error_floor);
  options.allow_different_environment = absl::GetFlag(FLAGS_allow_different_environment);
  options.allow_different_precision = absl::GetFlag(FLAGS_allow_different_precision);
  options.allow_missing = absl::GetFlag(FLAGS_allow_missing);
  TFB_ASSIGN_OR_RETURN(options.metric, ParseMetric(absl::GetFlag(FLAGS_metric)));
  return options;
}

absl::StatusOr<ResultSet> Read(const std::string& argument) {
  const std::string path = CallerPath(argument);
  absl::StatusOr<ResultFile> file = ReadResultFile(path);
  if (!file.ok()) return file.status();
  if (file->torn_bytes > 0) {
    PrintError(kProgram, absl::StrCat(path, ": ", file->torn_bytes,
                                      " bytes of a torn last record were left out"));
  }
  return std::move(file->results);
}

absl::StatusOr<Comparison> CompareTwo(const std::vector<std::string>& paths,
                                      const CompareOptions& options) {
  TFB_ASSIGN_OR_RETURN(const ResultSet base, Read(paths[0]));
  TFB_ASSIGN_OR_RETURN(const ResultSet now, Read(paths[1]));
  return Compare(base, now, options);
}

absl::StatusOr<int> CompareFiles(const CommandLine& line) {
  TFB_ASSIGN_OR_RETURN(const CompareOptions options, OptionsFromFlags());
  TFB_ASSIGN_OR_RETURN(const ComparisonFormat format,
                       ParseComparisonFormat(absl::GetFlag(FLAGS_format)));
  if (line.arguments.size() != 2) {
    return absl::InvalidArgumentError(absl::StrCat(
        "two result files are wanted, BASE and NEW, not ", line.arguments.size(), "; see --help"));
  }
  const absl::StatusOr<Comparison> comparison = CompareTwo(line.arguments, options);
  if (!comparison.ok() && format == ComparisonFormat::kComment) {
    std::cout << RenderIncomparable(comparison.status().message()) << std::flush;
  }
  if (!comparison.ok()) return comparison.status();
  std::cout << RenderComparison(*comparison, format, absl::GetFlag(FLAGS_all),
                                StyleFor(STDOUT_FILENO))
            << std::flush;
  if (!comparison->judged()) {
    PrintError(kProgram, absl::StrCat("cannot be judged: ", comparison->WhyNotJudged()));
    return kExitBadUsage;
  }
  return comparison->regressed() ? kExitCheckFailed : kExitDone;
}

}  // namespace
}  // namespace tfb

int main(int argc, char** argv) {
  return tfb::RunMain(tfb::kProgram, tfb::kUsage, {argv, argv + argc}, tfb::CompareFiles);
}
