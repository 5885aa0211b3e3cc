// The case that a bisection measures: what the caller writes, the sweep's flags for it, and what
// two results of it say.
#ifndef TFB_RESULTS_HISTORY_BISECT_CASE_H_
#define TFB_RESULTS_HISTORY_BISECT_CASE_H_

#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "results/comparison.h"
#include "results/history/bisect_search.h"
#include "results/results.pb.h"

namespace tfb {

// The quantity of a case that is compared, as results/comparison.h compares it.
enum class BisectMetric {
  kTime,          // of a run, over dense attention's in the same process
  kAbsoluteTime,  // of a run
  kSetup,         // time of the setup, over dense attention's run
  kInstructions,  // retired in a run, where the kernel counts them
  kMemory,        // workspace and parameters
  kError,         // against the definition or, where that meets its bound in both, against dense
  kStatus         // ok, failed, ...
};
// Parses "time", "absolute", "setup", "instructions", "memory", "error" or "status". Returns
// InvalidArgument, naming these, for other names.
absl::StatusOr<BisectMetric> ParseBisectMetric(absl::string_view name);
absl::string_view Name(BisectMetric metric);
// Tells whether the metric differs from run to run, so that more samples say more of it.
bool IsNoisy(BisectMetric metric);

// One technique at one problem.
struct BisectCase {
  std::string technique;                      // its name, as in the registry
  std::string spec;                           // as --techniques takes it: "NAME:option=value"
  std::map<std::string, std::string> fields;  // of the key, as far as they are given
};

// Parses words separated by spaces. The first is a technique as --techniques of the sweep takes it,
// and the others are fields of a case's key with their values; a whole key as CaseKey
// (results/reader.h) writes it, which begins with "technique=NAME options=...", will do:
//
//   longformer:window=256 tokens=4096 causal=1 threads=1
//   technique=longformer options=window%3D256 device=cpu dtype=f32 batch=1 ...
//
// "tokens" stands for query_tokens and kv_tokens. Returns InvalidArgument for a glob, several
// techniques, an unknown field, or a field that no flag of the sweep sets.
absl::StatusOr<BisectCase> ParseBisectCase(absl::string_view text);

// Returns the flags with which a sweep measures this case and its dense counterpart and nothing
// else. Fields that are not given are the sweep's defaults, but for 1024 tokens, the CPU, drawn
// inputs, and no accuracy cases; purpose=accuracy stands for the captured inputs.
std::vector<std::string> SweepFlags(const BisectCase& wanted);

// Returns the case of `results` with this technique and these fields: of several the one with the
// options of the spec that is no baseline. Returns NotFound where there is none, with the cases
// that there are, and FailedPrecondition where there are several.
absl::StatusOr<const Case*> FindCase(const ResultSet& results, const BisectCase& wanted);

// The change of a case between two builds that took turns, read from their results.
struct PairReading {
  Reading reading;  // of the new build over the base
  Verdict verdict = Verdict::kSame;
  std::string what;         // "run time over dense", "working memory", ...
  std::string subject;      // the case, for people
  std::string base, now;    // the quantity on both sides, for people
  std::string reason;       // why the verdict is no change, where there is more to say
  std::string case_status;  // of the new build's case
  std::vector<std::string> build_differences;  // compiler and flags: "compiler: base / new"
};

// Compares the two sides by the rules of Compare with the threshold `least_change`. Each side has
// one set for each measurement, whose samples are pooled. The two are compared although keys or
// builds differ: an option that one of them lacks, or another compiler, is part of what is sought.
// `what` is the quantity of an earlier reading, or empty for the one that changed most clearly.
// Returns an error that says why where the case was not measured on a side.
absl::StatusOr<PairReading> ReadPair(const std::vector<ResultSet>& base,
                                     const std::vector<ResultSet>& now, const BisectCase& wanted,
                                     BisectMetric metric, double least_change,
                                     absl::string_view what);

}  // namespace tfb

#endif  // TFB_RESULTS_HISTORY_BISECT_CASE_H_
