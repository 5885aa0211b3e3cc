// Tests on this machine how far a comparison of two sweeps can be trusted.
#include <stdlib.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <string>
#include <system_error>

#include "absl/flags/flag.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "core/command_line.h"
#include "core/status.h"
#include "core/technique.h"
#include "harness/measure/compare_self_test.h"
#include "harness/measure/machine.h"
#include "harness/measure/sweep.h"
#include "harness/plan/quantities.h"
#include "results/files.h"

ABSL_FLAG(int, runs, 20, "Pairs of sweeps, for the false alarms and for the power each.");
ABSL_FLAG(double, slow_down, 1.10, "The factor by which a run of a chosen technique is longer.");
ABSL_FLAG(double, threshold, 1.05, "As of compare.");
ABSL_FLAG(std::string, techniques, "*", "What to sweep, as of sweep.");
ABSL_FLAG(std::string, lengths, "512", "Tokens, as of sweep.");
ABSL_FLAG(int, threads, 1, "Threads on the CPU.");
ABSL_FLAG(int, repetitions, 201, "Samples of a run.");
ABSL_FLAG(
    int, rounds, 3,
    "Visits over which they are spread, as of sweep. With 1, where a layer's memory happens to "
    "lie is the same for all samples of a sweep, and differs between two.");
ABSL_FLAG(std::string, min_time, "1ms", "As of sweep.");
ABSL_FLAG(std::string, time_budget, "60s", "Of one sweep, as of sweep. 0: no limit.");
ABSL_FLAG(std::string, keep, "", "A folder for the result files. Empty: they are deleted.");

namespace tfb {
namespace {

constexpr char kProgram[] = "compare_self_test";
constexpr char kUsage[] =
    "compare_self_test [--runs=20] [--slow_down=1.10] [--techniques=...]\n"
    "Sweeps the same build again and again, and in between a build in which every fourth "
    "technique\n"
    "takes longer, and compares neighbours: prints the rate of false alarms and the power.\n\n"
    "Exit status: 0 at most 1% of the cases are false alarms and at least 95% of the slowed\n"
    "techniques are found, 1 not so, 2 bad usage.";

absl::StatusOr<SelfTestOptions> OptionsOfFlags() {
  SelfTestOptions options;
  options.cases.techniques = absl::GetFlag(FLAGS_techniques);
  options.cases.devices = "cpu";
  options.cases.lengths = absl::GetFlag(FLAGS_lengths);
  options.cases.inputs = "gaussian";
  options.cases.threads = absl::StrCat(absl::GetFlag(FLAGS_threads));
  options.cases.accuracy = false;
  SweepOptions& sweep = options.sweep;
  sweep.measure.repetitions = absl::GetFlag(FLAGS_repetitions);
  sweep.measure.cold = false;
  TFB_ASSIGN_OR_RETURN(sweep.measure.min_time,
                       ParseSeconds("min_time", absl::GetFlag(FLAGS_min_time)));
  TFB_ASSIGN_OR_RETURN(sweep.time_budget,
                       ParseSeconds("time_budget", absl::GetFlag(FLAGS_time_budget)));
  sweep.measure.memory_limit = AvailableMemoryBytes() / 10 * 8;
  sweep.rounds = absl::GetFlag(FLAGS_rounds);
  sweep.program = kProgram;
  sweep.workspace = WorkspaceFolder();
  sweep.quiet = true;
  options.compare.threshold = absl::GetFlag(FLAGS_threshold);
  options.runs = absl::GetFlag(FLAGS_runs);
  if (options.runs < 1) return absl::InvalidArgumentError("--runs: 1 or more is wanted");
  options.slow_down = absl::GetFlag(FLAGS_slow_down);
  if (!(options.slow_down > 1)) {
    return absl::InvalidArgumentError("--slow_down: a factor above 1 is wanted");
  }
  return options;
}

// Makes the folder for the result files and returns it.
absl::StatusOr<std::string> MakeFolder() {
  const std::string kept = absl::GetFlag(FLAGS_keep);
  if (kept.empty()) {
    std::string name = (std::filesystem::temp_directory_path() / "compare_self_test_XXXXXX");
    if (mkdtemp(name.data()) == nullptr) return absl::UnavailableError("no temporary folder");
    return name;
  }
  const std::string folder = CallerPath(kept);
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) return absl::UnavailableError(absl::StrCat("--keep: ", error.message()));
  return folder;
}

// Returns a proportion with its 95 % Wilson score interval (1927).
std::string ShareText(int part, int whole) {
  constexpr double kZ = 1.959964;
  const double n = std::max(whole, 1), p = part / n;
  const double centre = (p + kZ * kZ / (2 * n)) / (1 + kZ * kZ / n);
  const double half = kZ / (1 + kZ * kZ / n) * std::sqrt(p * (1 - p) / n + kZ * kZ / (4 * n * n));
  return absl::StrFormat("%d of %d, %.2f%% (95%% interval %.2f%% to %.2f%%)", part, whole, 100 * p,
                         100 * std::max(0.0, centre - half), 100 * (centre + half));
}

void Print(const SelfTestOptions& options, const SelfTestCounts& counts) {
  std::printf("%d sweeps, %d techniques at %s tokens, %d samples each; threshold %g\n",
              counts.sweeps, counts.techniques, options.cases.lengths.c_str(),
              options.sweep.measure.repetitions, options.compare.threshold);
  std::printf("false alarms  %s of times that are the same are called SLOWER\n",
              ShareText(counts.false_alarms, counts.same_times).c_str());
  const auto count = [&counts](Verdict verdict) {
    const auto found = counts.verdicts.find(verdict);
    return found == counts.verdicts.end() ? 0 : found->second;
  };
  std::printf("              and %d FASTER, %d AMBIGUOUS, %d SAME, %d not judged\n",
              count(Verdict::kImproved), count(Verdict::kAmbiguous), count(Verdict::kSame),
              count(Verdict::kNotJudged));
  std::printf("power         %s of techniques slowed by %.0f%% are found\n",
              ShareText(counts.found, counts.slowed).c_str(), 100 * (options.slow_down - 1));
  for (const auto& [name, times] : counts.missed) {
    std::printf("              missed %s %d times\n", name.c_str(), times);
  }
}

absl::StatusOr<int> Test() {
  TFB_ASSIGN_OR_RETURN(SelfTestOptions options, OptionsOfFlags());
  TFB_ASSIGN_OR_RETURN(options.folder, MakeFolder());
  const absl::StatusOr<SelfTestCounts> counts = RunSelfTest(options, Registry::Global());
  if (absl::GetFlag(FLAGS_keep).empty()) std::filesystem::remove_all(options.folder);
  if (!counts.ok()) return counts.status();
  Print(options, *counts);
  return Holds(*counts) ? kExitDone : kExitCheckFailed;
}

}  // namespace
}  // namespace tfb

int main(int argc, char** argv) {
  return tfb::RunMain(tfb::kProgram, tfb::kUsage, {argv, argv + argc}, tfb::Test);
}
