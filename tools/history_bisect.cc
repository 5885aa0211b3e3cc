#include "tools/history_bisect.h"

#include <signal.h>

#include <iostream>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "core/status.h"
#include "results/files.h"
#include "results/history/bisect.h"
#include "results/history/bisect_report.h"

namespace {

constexpr char kDefaultBuild[] = "bazel build //harness:sweep";
constexpr char kDefaultClean[] = "bazel clean --expunge", kAuto[] = "auto";

}  // namespace

ABSL_FLAG(
    std::string, case, "",
    "What to measure: a technique as --techniques of the sweep takes it, then fields of a case, as "
    "in 'longformer:window=256 tokens=4096 causal=1 threads=1'; or a whole key of a case. Its "
    "dense counterpart is measured with it. Without other fields: 1024 tokens, drawn inputs, the "
    "CPU, and the sweep's defaults.");
ABSL_FLAG(std::string, good, "", "A commit before the change: a hash, tag or branch.");
ABSL_FLAG(std::string, bad, "HEAD", "A commit after it.");
ABSL_FLAG(
    std::string, repository, ".",
    "A folder of the repository that has the commits that were or are to be measured, and the "
    "branch of --store=git:BRANCH; its checkout is not touched, and may have changes.");
ABSL_FLAG(std::string, metric, "time",
          "What changed: time (of a run, over dense in the same run), absolute (time of a run), "
          "setup (its time), instructions, memory, error, or status.");
ABSL_FLAG(double, least_change, 1.05, "A change by less than this factor is none.");
ABSL_FLAG(std::string, build, kDefaultBuild,
          "Command line of the shell that builds a commit, run at the top of its checkout.");
ABSL_FLAG(std::string, program, "bazel-bin/harness/sweep",
          "The sweep that --build makes, relative to the top of the checkout.");
ABSL_FLAG(std::string, sweep_flags, "",
          "Further flags of the sweep, as the shell reads them, as in '--min_time=1ms "
          "--input=peaked'.");
ABSL_FLAG(std::string, clean, kAuto,
          "Command line that removes what builds left outside the checkout, run there before it is "
          "removed. auto: bazel clean --expunge with the default --build, else none.");
ABSL_FLAG(int, repetitions, 33, "Samples of the first measurement of two commits.");
ABSL_FLAG(
    int, looks, 4,
    "How often two commits are measured at most where that does not decide, each time with as "
    "many samples as before in all. A call with more of them goes on with what there is.");
ABSL_FLAG(std::string, budget, "5m", "Of one measurement, as --time_budget of the sweep.");
ABSL_FLAG(
    std::string, folder, "",
    "Where to check out, build and write; what is there already is gone on with. Empty: a folder "
    "of this question beside the checkout, CHECKOUT-bisect/GOOD-BAD-HASH.");
ABSL_FLAG(bool, restart, false, "Forget what the folder has, and begin anew.");
ABSL_FLAG(bool, keep, false, "Do not remove the checkout and the programs in the end.");

namespace tfb {
namespace {

constexpr char kProgram[] = "history";
constexpr int kExitStopped = 130;

volatile sig_atomic_t signals_seen = 0;

void NoteSignal(int) { signals_seen = 1; }

void CatchSignals() {
  struct sigaction note = {};
  note.sa_handler = NoteSignal;
  for (const int number : {SIGINT, SIGTERM, SIGHUP}) sigaction(number, &note, nullptr);
}

absl::StatusOr<BisectOptions> OptionsFromFlags() {
  BisectOptions options;
  options.repository = CallerPath(absl::GetFlag(FLAGS_repository));
  options.good = absl::GetFlag(FLAGS_good);
  options.bad = absl::GetFlag(FLAGS_bad);
  options.wanted = absl::GetFlag(FLAGS_case);
  const absl::StatusOr<BisectMetric> metric = ParseBisectMetric(absl::GetFlag(FLAGS_metric));
  if (!metric.ok()) {
    return absl::InvalidArgumentError(absl::StrCat("--metric: ", metric.status().message()));
  }
  options.metric = *metric;
  options.least_change = absl::GetFlag(FLAGS_least_change);
  options.build = absl::GetFlag(FLAGS_build);
  options.program = absl::GetFlag(FLAGS_program);
  options.sweep_flags = absl::GetFlag(FLAGS_sweep_flags);
  options.sweep_folder = CallerPath(".");
  options.clean = absl::GetFlag(FLAGS_clean);
  if (options.clean == kAuto) options.clean = options.build == kDefaultBuild ? kDefaultClean : "";
  options.repetitions = absl::GetFlag(FLAGS_repetitions);
  options.looks = absl::GetFlag(FLAGS_looks);
  options.budget = absl::GetFlag(FLAGS_budget);
  const std::string folder = absl::GetFlag(FLAGS_folder);
  if (!folder.empty()) options.folder = CallerPath(folder);
  options.restart = absl::GetFlag(FLAGS_restart);
  options.keep = absl::GetFlag(FLAGS_keep);
  options.stopped = [] { return signals_seen != 0; };
  return options;
}

}  // namespace

const char kBisectUsage[] =
    "history bisect --case=CASE --good=COMMIT [--bad=COMMIT] [--metric=time]\n"
    "Finds the commit that made a case slower, or changed its error, memory or status: builds\n"
    "commits between the two in a checkout of its own, measures each by turns with the good one,\n"
    "and keeps the half with the change. The commit that is found is measured against its parent.\n"
    "Needs git. One that was stopped or killed goes on when it is called again.\n\n"
    "Exit status: 0 one commit was found, 1 good and bad do not differ clearly, or several "
    "commits\n"
    "are left, 2 bad usage, or good or bad cannot be built or measured, 130 stopped by Ctrl-C.";

std::vector<std::string> BisectFlags() {
  return {"case",   "good",    "bad",         "repository", "metric",      "least_change",
          "build",  "program", "sweep_flags", "clean",      "repetitions", "looks",
          "budget", "folder",  "restart",     "keep"};
}

absl::StatusOr<int> RunBisect(const CommandLine& line) {
  if (!line.arguments.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("\"", line.arguments[0], "\" is no flag; --help lists the flags"));
  }
  TFB_ASSIGN_OR_RETURN(const BisectOptions options, OptionsFromFlags());
  CatchSignals();
  const absl::StatusOr<BisectResult> result =
      Bisect(options, [](absl::string_view text) { PrintError(kProgram, text); });
  if (absl::IsCancelled(result.status())) {
    PrintError(kProgram, "stopped; the same command goes on");
    return kExitStopped;
  }
  if (!result.ok()) return result.status();
  std::cout << RenderBisect(*result) << std::flush;
  return result->verdict == BisectResult::Verdict::kFound ? kExitDone : kExitCheckFailed;
}

}  // namespace tfb
