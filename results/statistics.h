// Computes medians with intervals, growth, crossovers and shares from samples and cases.
// Every number that cannot be computed is absent.
#ifndef TFB_RESULTS_STATISTICS_H_
#define TFB_RESULTS_STATISTICS_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "results/results.pb.h"

namespace tfb {

// The median of a distribution with its confidence interval.
struct MedianInterval {
  double median = 0;
  double low = 0;  // order statistics, so both ends are samples
  double high = 0;
  double coverage = 0;  // probability that [low, high] contains the true median
  int samples = 0;

  // Tells whether the coverage is 95 %. It takes six samples: the range of n covers 1 - 2^(1-n).
  bool is_95_percent() const { return coverage >= 0.95; }
  // Returns (high - low) / (2 median): 0.05 is +-5 %.
  double relative_half_width() const;
};

// Returns the median with the interval [x(k), x(n+1-k)] for the largest k whose binomial coverage
// 1 - 2 P(Bin(n, 1/2) < k) is at least 0.95, or with the whole range where there is none. The
// interval assumes independent samples but no particular distribution. Returns nothing where there
// are no samples, or where one is NaN.
std::optional<MedianInterval> MedianOf(std::vector<double> samples);
template <typename Range>
std::optional<MedianInterval> Median(const Range& samples) {
  return MedianOf(std::vector<double>(samples.begin(), samples.end()));
}

// A time at a length.
struct LengthTime {
  int64_t tokens = 0;
  double time = 0;  // in any unit, the same for all points
};

// The least-squares slope of log(time) over log(tokens).
//
// The fit uses only the upper half of the lengths (of n distinct ones the ceil(n/2) longest, but
// three where there are three), since short inputs measure fixed costs, and an exponent is a
// statement about long ones. Every point at a length counts.
struct Growth {
  double exponent = 0;
  std::optional<double> standard_error;  // of the slope; absent for two points
  int64_t from_tokens = 0;               // shortest and longest length of the fit
  int64_t to_tokens = 0;
};
// Returns nothing where fewer than two distinct lengths have positive finite times.
std::optional<Growth> FitGrowth(std::vector<LengthTime> points);

// The speed-up of a technique over its dense counterpart.
struct SpeedUpInterval {
  double ratio = 1;  // median time of the counterpart over median time of the technique
  double low = 1;    // an interval of the true ratio
  double high = 1;
  bool is_95_percent = false;  // otherwise [low, high] comes from the ranges of too few samples
  bool distinct = false;       // whether the two differ significantly
};
// Returns the speed-up. From six samples of each on, the interval is a bootstrap interval
// (results/two_samples.h), and the two are distinct where it does not contain 1. With fewer, which
// have no 95 % interval, it comes from the ranges of all samples, and the two are distinct where
// the ranges do not overlap and a rank sum test has p <= 0.05. Returns nothing where one has no
// samples, or one that is not positive and finite.
std::optional<SpeedUpInterval> SpeedUpOf(const std::vector<double>& dense_ns,
                                         const std::vector<double>& technique_ns);

struct LengthSpeedUp {
  int64_t tokens = 0;
  SpeedUpInterval speed_up;
};

// The length from which a technique is faster than its dense counterpart, of those that both have.
struct Crossover {
  enum class Kind {
    kAt,         // faster from `tokens` on, to the longest length
    kAlways,     // faster at every length; `tokens` is the shortest
    kNever,      // slower at every length; `tokens` is the longest
    kOnlyBelow,  // faster below `tokens`, slower at the longest length
  };
  Kind kind = Kind::kNever;
  double tokens = 0;
  int changes = 0;  // how often the order changes; above 1 the crossover is one of several
  // The interval of `tokens`: the lengths at which the curves through the upper and the lower ends
  // of the speed-ups' intervals cross 1. An end is 0 below the shortest length, and infinite beyond
  // the longest one.
  double low_tokens = 0;
  double high_tokens = 0;
  // Whether the two differ significantly at the longest length.
  bool clear = false;
};
// Interpolates log(speed-up) linearly in log(tokens) between the last two lengths at which the
// order changes. A tie counts as slower. `speed_ups` are in the order of tokens, which are positive
// and different. Returns nothing where there are none.
std::optional<Crossover> FindCrossover(const std::vector<LengthSpeedUp>& speed_ups);

// Returns the length that a sweep varies: key tokens, or query tokens where those are more.
int64_t LengthOf(const ProblemSize& problem);

// Tells whether `result` is its own dense counterpart, by its name and its counterpart's options.
bool IsBaseline(const Case& result);

// Finds the dense counterpart of each case of `results`: it has the same machine (MachineOf), and
// the same key except technique, options and seed. Of several it prefers, in this order: the
// options that the case requires of its counterpart, which one of the case's own technique must
// have; the same environment; the same seed; default options; status ok; the later one. Holds
// pointers into `results`, which must outlive it unchanged.
class DensePartners {
 public:
  explicit DensePartners(const ResultSet& results);
  // Returns the counterpart, or null where there is none; for a baseline, the case itself.
  const Case* Find(const Case& result) const;

 private:
  std::string KeyOf(const Case& result, const std::string& technique) const;

  std::map<std::string, std::string> machines_;  // by environment id
  std::map<std::string, std::vector<const Case*>> candidates_;
};

// Returns the median of the warm runs in ns. Returns nothing where the case is not ok, except that
// a case that ran but exceeded a bound has a time.
std::optional<MedianInterval> RunTime(const Case& result);

// A case and what it is held against.
struct ComparedCase {
  const Case* result = nullptr;
  const Case* dense = nullptr;
};
// Samples of the warm runs of cases and of what they are held against, in ns.
struct SideBySide {
  std::vector<double> dense_ns;
  std::vector<double> technique_ns;
  bool are_pairs = false;  // whether dense_ns[i] was taken about when technique_ns[i] was
};
// Returns pairs of samples of the visits in which both were measured. Within a visit all cases take
// their samples by turns, so that sample i of m is of the same part of the visit for both; of the
// case with more samples, m evenly spread ones count. Where the record of a case does not tell
// visits, or fewer than kLeastPairs are in common, it returns all samples of all cases that have a
// RunTime, which are no pairs.
//
// A machine's speed changes during and between visits, and a sweep visits dense more often than most
// techniques. In ten sweeps of 30 cases each, on two cores, the speed-up of a case by medians of all
// samples varied from sweep to sweep by 3.9 % (standard deviation), and by 8.4 % beside other
// programs; by the median quotient of pairs by 1.9 % and 2.6 %.
constexpr size_t kLeastPairs = 4;  // fewer can tell no difference (MannWhitneyP)
SideBySide SamplesSideBySide(const std::vector<ComparedCase>& cases);

// Returns the speed-up: of pairs the median of the quotients dense_ns[i] / technique_ns[i] with its
// interval (MedianOf), and the two are distinct as above, or nothing where a sample is not positive
// and finite; otherwise that of the two sets of samples.
std::optional<SpeedUpInterval> SpeedUpOf(const SideBySide& samples);

// Returns the ratio of that speed-up: the time of dense over that of `result`, above 1 where `result`
// is faster.
std::optional<double> SpeedUp(const Case& result, const Case* dense);

// Return FLOPs (in GFLOP/s) and bytes moved (in GB/s) of one run over its median time.
std::optional<double> GigaflopsPerSecond(const Case& result);
std::optional<double> GigabytesPerSecond(const Case& result);

// Return the achieved rate over the measured peak of the case's environment; 0.5 is half. The peak
// of compute is the highest of the same device, dtype and, on the CPU, number of threads; there is
// no share without one. The peak of bandwidth is that of reads, or else of copies, of any dtype.
std::optional<double> ShareOfComputePeak(const Case& result, const Environment& environment);
std::optional<double> ShareOfBandwidthPeak(const Case& result, const Environment& environment);

// Returns the bytes of workspace and parameters, which a technique needs beside inputs and outputs,
// and of what a run keeps for its backward pass where that is timed. Returns nothing where the
// workspace is unknown.
std::optional<double> WorkingMemoryBytes(const Outcome& outcome);

// Returns the value of the metric that `error` bounds, or its relative Frobenius norm where it
// bounds none, or else its largest absolute error.
std::optional<double> BoundedValue(const ErrorMeasure& error);

// Returns the gradient's error that is largest relative to its bound; null where none was measured.
const NamedError* WorstGradientError(const Outcome& outcome);

}  // namespace tfb

#endif  // TFB_RESULTS_STATISTICS_H_
