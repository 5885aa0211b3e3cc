// Two result sets held against each other, so that continuous integration can hold a line: red on
// a regression, silent on noise.
#ifndef TFB_RESULTS_COMPARISON_H_
#define TFB_RESULTS_COMPARISON_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "results/results.pb.h"
#include "results/table.h"

namespace tfb {

struct CompareOptions {
  enum class Metric {
    // A time over that of dense in the same run, which cancels what a shared machine does to
    // both. Dense itself, and what has no dense partner on both sides, is judged by its share of
    // the peak that its run measured; where that is unknown, by its time.
    kRelativeToDense,
    kAbsolute  // times
  };
  Metric metric = Metric::kRelativeToDense;
  // A time or memory that grew by this factor or more regressed; one that shrank by it improved.
  double threshold = 1.10;
  // The same for errors against dense, and for unbounded ones against the definition.
  double error_threshold = 1.25;
  // Errors up to here are rounding, and are not compared.
  double error_floor = 1e-5;
  // Compare although hardware or build differ. Absolute times are then not judged.
  bool allow_different_environment = false;
  // A case of the base that is missing or skipped now is not a regression.
  bool allow_missing = false;
};

enum class Verdict {
  kRegressed,
  kImproved,
  kUnchanged,  // within the threshold
  kNoise,      // beyond the threshold, but the intervals overlap
  kNotJudged   // one side is not known well enough to say
};

// One quantity of one case.
struct Finding {
  std::string what;     // "run time over dense", "working memory", "status", ...
  std::string subject;  // the case, for people
  std::string base, now;
  double change = 1;  // now over base, where both are numbers: above 1 is worse
  Verdict verdict = Verdict::kUnchanged;
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
//   run and setup   medians of warm runs and of setups, where three samples are there on both
//                   sides. Beyond the threshold, a change counts only where the 95 % intervals do
//                   not overlap; that of a ratio adds both half widths in quadrature, in
//                   logarithms. A setup below 5 % of its run is not judged.
//   working memory  workspace and parameters, which are exact
//   errors          a bound that was held and is not; an error against dense that grew
//   status          ok before, and not now
//   presence        in the base and not now; new cases count only where they failed.
// FailedPrecondition where the two cannot be compared: no case in common, or environments that
// differ in what the compared cases depend on, with the differences in the message. InvalidArgument
// for options out of range.
absl::StatusOr<Comparison> Compare(const ResultSet& base, const ResultSet& now,
                                   const CompareOptions& options);

// Regressions, improvements, and counts; what is noise or unchanged only with `all`.
std::string RenderComparison(const Comparison& comparison, bool markdown, bool all,
                             const TextStyle& style);

}  // namespace tfb

#endif  // TFB_RESULTS_COMPARISON_H_
