// Compares two result sets, so that continuous integration fails on regressions but not on noise.
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
    // A time divided by that of dense in the same run, which cancels the load of a shared machine.
    // Dense itself, and a case without a dense counterpart on both sides, is judged by its time
    // divided by that of the fixed arithmetic timed beside each sample; where that is unknown, by
    // its share of the measured peak, and else by its time.
    kRelativeToDense,
    kAbsolute,  // times
    // Instructions of one run, where both machines count them. They are the same from run to run,
    // except for waiting threads, so a much smaller threshold suffices.
    kInstructions
  };
  Metric metric = Metric::kRelativeToDense;
  // A time has regressed where its interval lies above this factor.
  double threshold = 1.05;
  // Memory, which has no noise, has regressed where it grew by this factor.
  double memory_threshold = 1.05;
  // An error against dense, or an error against the definition that has no bound, has regressed
  // where it grew by this factor.
  double error_threshold = 1.25;
  // Errors up to this value are rounding, and are not compared.
  double error_floor = 1e-5;
  // Whether to compare although hardware or build differ. Times are then judged only relative to
  // dense or to the measured peak.
  bool allow_different_environment = false;
  // Whether to match cases of different element types. Errors are then not judged.
  bool allow_different_precision = false;
  // Whether it is no regression that a case of the base, or a number of it, is missing or skipped.
  bool allow_missing = false;
};

enum class Verdict {
  kRegressed,  // SLOWER, of times
  kImproved,   // FASTER
  kSame,       // the whole interval lies within the threshold
  kAmbiguous,  // the interval contains the threshold, or there are too few samples
  kNotJudged   // one side is not known well enough
};

// One quantity of one case.
struct Finding {
  std::string what;     // "run time over dense", "working memory", "status", ...
  std::string subject;  // the case, for people
  std::string key;      // CaseKey
  Case::Key case_key;   // of the case that was compared: of NEW, or of BASE where NEW lacks it
  // The technique with its options as --techniques of the sweep takes it: "near:window=256".
  std::string spec;
  bool is_time = false;
  std::string base, now;
  double change = 1;  // now over base, where both are numbers: above 1 is worse
  // The 95 % interval of the change, and the p-value of equal times, corrected for the number of
  // times compared. Only times have them.
  std::optional<RatioInterval> interval;
  std::optional<double> p_value;
  Verdict verdict = Verdict::kSame;
  std::string reason;  // set where the finding is not judged, or is not a number
};

struct Comparison {
  std::vector<Finding> findings;  // all of them, regressions first, then by the size of the change
  int cases = 0;                  // cases whose keys are in both sets
  int missing = 0;                // cases only in the base
  int added = 0;                  // cases only in the current set
  std::vector<std::string> environment_differences;
  // All environments of the two sets, with the commits that were built.
  std::vector<Environment> base_environments, now_environments;
  CompareOptions options;

  int Count(Verdict verdict) const;
  bool regressed() const { return Count(Verdict::kRegressed) > 0; }
  // Tells whether there is a verdict at all: something regressed or improved, or a time is the same
  // or, where no time was compared, another number is. That memory and errors are the same says
  // nothing about times that are all ambiguous.
  bool judged() const;
  // Says why there is no verdict, in one line without a full stop.
  std::string WhyNotJudged() const;
};

// Matches cases by their whole keys (results/reader.h), the last of several, and judges
//   run and setup   A change is the ratio of the medians of all samples, with a bootstrap interval.
//                   A run's samples are quotients by the samples of dense that were taken at about
//                   the same time, where the records tell (SamplesSideBySide, results/statistics.h);
//                   else, and for setups, they are divided by the median of dense, whose samples
//                   the interval includes. A time has regressed where the whole interval lies above
//                   the threshold and the two differ (p < 0.05, corrected for the number of times
//                   compared); improvements are judged likewise. The p-value is that of the rank sum
//                   test, or where it is greater, and a median divides, that of TrimmedRatioP, which
//                   has the noise of all four sets of samples.
//                   A time over dense is ambiguous, since dense changed, where the time over the
//                   fixed arithmetic, or over the peak, has not at least half of the change, in
//                   powers of it, nor an interval beyond the threshold. Nothing is judged under
//                   three samples of the case or of dense, nor is a setup below 5 % of its run; a
//                   setup that was below and no longer is, is compared with those 5 %.
//   working memory  workspace, parameters and what a run keeps for its backward pass: no noise
//   errors          a bound that was met and is exceeded now; an error against dense that grew; an
//                   error that the current set lacks, unless its case says why it was not measured
//   status          a case that was ok, and is not now; one that failed, took too long or had too
//                   little memory, and is ok now. One that was skipped or unsupported, and is ok
//                   now, is measured for the first time, which is no improvement.
//   presence        a case of the base that is missing; new cases count only where they failed.
// Returns FailedPrecondition, with the differences, where the two cannot be compared: they have no
// case in common, their environments differ in something that the compared cases depend on, or one
// of them lacks the metric. Returns InvalidArgument for options out of range.
absl::StatusOr<Comparison> Compare(const ResultSet& base, const ResultSet& now,
                                   const CompareOptions& options);

}  // namespace tfb

#endif  // TFB_RESULTS_COMPARISON_H_
