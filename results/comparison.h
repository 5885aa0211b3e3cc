// Two result sets held against each other, so that continuous integration can hold a line: red on
// a regression, silent on noise.
#ifndef TFB_RESULTS_COMPARISON_H_
#define TFB_RESULTS_COMPARISON_H_

#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "results/results.pb.h"
#include "results/two_samples.h"

namespace tfb {

struct CompareOptions {
  enum class Metric {
    // A time over that of dense in the same run, which cancels what a shared machine does to both.
    // Dense itself, and what has no dense partner on both sides, is judged by its time over that of
    // the fixed arithmetic that was timed beside each sample; where that is unknown, by its share
    // of the measured peak, and else by its time.
    kRelativeToDense,
    kAbsolute,  // times
    // Instructions of one run, where both machines count them: the same from run to run but for
    // threads that wait, so that a much smaller threshold holds.
    kInstructions
  };
  Metric metric = Metric::kRelativeToDense;
  // A time regressed where its interval lies beyond this factor.
  double threshold = 1.05;
  // Memory is exact: it regressed where it grew by this factor.
  double memory_threshold = 1.05;
  // An error against dense regressed where it grew by this factor, and so did an error against the
  // definition that has no bound.
  double error_threshold = 1.25;
  // Errors up to here are rounding, and are not compared.
  double error_floor = 1e-5;
  // Compare although hardware or build differ. Times are then judged only relative to dense or to
  // the measured peak.
  bool allow_different_environment = false;
  // Match cases whatever their element type. Errors are then not judged.
  bool allow_different_precision = false;
  // A case of the base that is missing or skipped now, and a number of it that is missing, is not a
  // regression.
  bool allow_missing = false;
};

enum class Verdict {
  kRegressed,  // SLOWER, of times
  kImproved,   // FASTER
  kSame,       // the whole interval within the threshold
  kAmbiguous,  // the interval holds the threshold, or there are too few samples to be sure
  kNotJudged   // one side is not known well enough to say
};

// One quantity of one case.
struct Finding {
  std::string what;     // "run time over dense", "working memory", "status", ...
  std::string subject;  // the case, for people
  std::string key;      // CaseKey
  bool is_time = false;
  std::string base, now;
  double change = 1;  // now over base, where both are numbers: above 1 is worse
  // Times alone have the 95 % interval of the change, and the probability that samples of equal
  // times lie as far apart, corrected for the number of times compared.
  std::optional<RatioInterval> interval;
  std::optional<double> p_value;
  Verdict verdict = Verdict::kSame;
  std::string reason;  // where it is not judged, or not a number
};

struct Comparison {
  std::vector<Finding> findings;  // all of them, regressions first, then by the size of the change
  int cases = 0;                  // whose keys both sets hold
  int missing = 0;                // in the base alone
  int added = 0;                  // now alone
  std::vector<std::string> environment_differences;
  CompareOptions options;

  int Count(Verdict verdict) const;
  bool regressed() const { return Count(Verdict::kRegressed) > 0; }
};

// Matches cases by their whole keys (results/reader.h), the last of several, and judges
//   run and setup   A change is the ratio of the medians of all samples, with an interval by the
//                   bootstrap in which the samples of dense count as well. It regressed where the
//                   interval lies beyond the threshold as a whole and the rank sum test, corrected
//                   for the number of times compared, says that the two differ (p < 0.05);
//                   likewise for the better. A time over dense that its time over the fixed
//                   arithmetic, or over the peak, does not confirm is ambiguous: dense changed.
//                   Under three samples nothing is judged, nor is a setup below 5 % of its run; one
//                   that was, and no longer is, is held against those 5 %.
//   working memory  workspace and parameters, which are exact
//   errors          a bound that was held and is not; an error against dense that grew
//   status          ok before, and not now
//   presence        in the base and not now; new cases count only where they failed.
// FailedPrecondition where the two cannot be compared: no case in common, environments that differ
// in what the compared cases depend on, or a metric that one of them lacks, with the differences in
// the message. InvalidArgument for options out of range.
absl::StatusOr<Comparison> Compare(const ResultSet& base, const ResultSet& now,
                                   const CompareOptions& options);

}  // namespace tfb

#endif  // TFB_RESULTS_COMPARISON_H_
