// Measures how far a comparison of two sweeps can be trusted on a machine: how often it reports an
// unchanged technique as slower (false positives), and how often it finds a technique that was
// slowed on purpose (power).
#ifndef TFB_HARNESS_MEASURE_COMPARE_SELF_TEST_H_
#define TFB_HARNESS_MEASURE_COMPARE_SELF_TEST_H_

#include <map>
#include <set>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/technique.h"
#include "harness/measure/sweep.h"
#include "harness/plan/cases.h"
#include "results/comparison.h"
#include "results/results.pb.h"

namespace tfb {

struct SelfTestOptions {
  CaseFlags cases;
  SweepOptions sweep;  // of each sweep; its output and registry are ignored
  CompareOptions compare;
  int runs = 20;            // pairs of sweeps, for the false positives and for the power each
  double slow_down = 1.10;  // the factor by which a run of a chosen technique is longer
  std::string folder;       // of the result files 1.pb, 2.pb, ...
};

struct SelfTestCounts {
  int sweeps = 0;
  int techniques = 0;  // that can be slowed
  int same_times = 0, false_alarms = 0;
  int slowed = 0, found = 0;  // techniques
  // Comparisons of two sweeps, and those with a false alarm; those with slowed techniques, and those
  // that found all of them.
  int comparisons = 0, with_false_alarm = 0;
  int with_slowed = 0, with_all_found = 0;
  std::map<Verdict, int> verdicts;    // on times that are the same
  std::map<std::string, int> missed;  // false negatives by technique
};

// Tells whether at most 1% of unchanged times are reported as slower, and at least 95% of the
// slowed techniques are found.
bool Holds(const SelfTestCounts& counts);

// Returns what was counted in some lines. The times of one comparison are not independent: all are
// over the same dense, and one disturbance of a sweep is in many of them. So an interval of their
// share by their number would be too narrow. The shares of comparisons have 95 % intervals by Wilson
// (1927), which count each comparison once; that two neighbours have a sweep in common remains.
std::string SelfTestReport(const SelfTestOptions& options, const SelfTestCounts& counts);

// Compares two sweeps, of which the second one has the techniques in `slowed` slowed and the others
// unchanged, and adds the verdicts on their times to `counts`.
absl::Status CountVerdicts(const ResultSet& base, const ResultSet& now,
                           const std::set<std::string>& slowed, const CompareOptions& options,
                           SelfTestCounts* counts);

// Sweeps the techniques of `registry` repeatedly, alternately unchanged and with every fourth one
// slowed, and compares consecutive sweeps. Slowed layers wait by the clock of the sweep. Returns
// InvalidArgument where no technique can be slowed, since none is compared with another one.
absl::StatusOr<SelfTestCounts> RunSelfTest(const SelfTestOptions& options,
                                           const Registry& registry);

}  // namespace tfb

#endif  // TFB_HARNESS_MEASURE_COMPARE_SELF_TEST_H_
