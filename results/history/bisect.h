// Finds the commit that changed a case: builds and measures commits between a good and a bad one by
// turns with the good one.
//
// All that a bisection writes is in one folder outside the checkout:
//
//   tfb_bisect_worktree   the worktree in which one commit after the other is built
//   programs/HASH         the programs that were built, with their data (FILE.runfiles)
//   results               the result files of all measurements, NEW.pb and NEW-base.pb
//   logs                  what builds and sweeps printed
//   bisect.json           what was built and measured (results/history/bisect_state.h)
//   lock                  is locked while a bisection runs
//
// The worktree and the programs are removed in the end, and on a signal; the rest stays. A second
// call with the same question reads bisect.json, so that it goes on where the first one was killed.
#ifndef TFB_RESULTS_HISTORY_BISECT_H_
#define TFB_RESULTS_HISTORY_BISECT_H_

#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "results/history/bisect_case.h"
#include "results/history/repository.h"

namespace tfb {

struct BisectOptions {
  std::string repository = ".";  // a folder of it
  std::string good, bad;         // commits
  std::string wanted;            // ParseBisectCase's text
  BisectMetric metric = BisectMetric::kTime;
  // A change by less than this factor is none.
  double least_change = 1.05;
  // A command line of the shell that builds a commit in its checkout.
  std::string build = "bazel build //harness:sweep";
  // The program that it builds, relative to the checkout. Sweeps are made with a copy of it and of
  // its data.
  std::string program = "bazel-bin/harness/sweep";
  // Further flags of the sweep, as the shell reads them. The last of two equal ones counts.
  std::string sweep_flags;
  // The folder in which sweeps run.
  std::string sweep_folder = ".";
  // A command line that removes what builds leave outside the worktree, before that is removed.
  std::string clean;
  // Files of the checkout that git ignores and builds read; they are copied where they exist.
  std::vector<std::string> carried = {".bazelrc.setup", ".bazelrc.user"};
  int repetitions = 33;  // samples of the first measurement of two programs
  // How often two programs are measured at most, each time with as many samples as before in all.
  int looks = 4;
  std::string budget = "5m";  // of a measurement, as --time_budget of the sweep takes it
  // Where to write; empty: beside the checkout, "CHECKOUT-bisect/GOOD-BAD-" and a hash of the
  // question, so that the same question has the same folder.
  std::string folder;
  bool restart = false;  // whether to forget what the folder has
  bool keep = false;     // whether the worktree and the programs stay
  // Whether to stop: asked at least five times a second.
  std::function<bool()> stopped = [] { return false; };
};

// A commit that was measured against the good one, or why it could not be.
struct TriedCommit {
  Commit commit;
  PairReading pair;
  std::string passed_over;  // empty where it was measured
};

struct BisectResult {
  enum class Verdict {
    kFound,         // `commit` changed the case
    kNoDifference,  // good and bad do not differ clearly
    kRange,         // the commits between `before` and `commit` cannot be built or measured
    kUnclear        // the change is between `before` and `commit`, for all that the samples tell
  };
  Verdict verdict = Verdict::kUnclear;
  Commit good, bad;
  PairReading whole;  // bad over good
  // The change came after `before`, and by `commit` at last. Where it was found, `before` is the
  // commit's first parent, or the good commit.
  Commit before, commit;
  PairReading own;           // commit over before, measured by turns, where the two are neighbours
  PairReading until_before;  // before over good
  PairReading until_commit;  // commit over good
  int left = 0;              // commits after `before` up to `commit`
  std::string why;           // of kRange, kUnclear and kNoDifference, with advice
  std::vector<TriedCommit> tried;  // in the order of the line, without good and bad
  double least_change = 1;
  std::string folder;
};

// Receives lines of progress.
using BisectProgress = std::function<void(absl::string_view line)>;

// Measures bad against good until it is clear whether they differ, and the change is known to a
// quarter. Where they differ, searches the first-parent line between them
// (results/history/bisect_search.h): each commit by turns with good in one run, so that the
// machine's load meets both alike. A commit whose program and data are, byte for byte, those of one
// that was measured is not measured again. In the end the commit is measured against its parent,
// so that a commit is named only where Compare finds that it changed the case, whatever the errors
// of the steps: with p < 0.05, and the whole 95 % interval beyond `least_change`.
//
// Returns an error, and no result, where the question makes no sense, good or bad cannot be built
// or measured, something cannot be written, or another process bisects in the folder; Cancelled
// where `stopped` returned true.
absl::StatusOr<BisectResult> Bisect(const BisectOptions& options, const BisectProgress& progress);

}  // namespace tfb

#endif  // TFB_RESULTS_HISTORY_BISECT_H_
