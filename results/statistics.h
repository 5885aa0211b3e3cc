// Derives medians with intervals, growth, crossovers and shares from samples and cases.
// Every number that cannot be derived is absent.
#ifndef TFB_RESULTS_STATISTICS_H_
#define TFB_RESULTS_STATISTICS_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "results/results.pb.h"

namespace tfb {

// Median of a distribution, and what its samples say about where it lies.
struct MedianInterval {
  double median = 0;
  double low = 0;  // order statistics, so always samples themselves
  double high = 0;
  double coverage = 0;  // probability that [low, high] holds the true median
  int samples = 0;

  // Six samples are the fewest with 95 %: the range of n covers 1 - 2^(1-n).
  bool is_95_percent() const { return coverage >= 0.95; }
  // (high - low) / (2 median): 0.05 is +-5 %.
  double relative_half_width() const;
};

// The interval is [x(k), x(n+1-k)] with the largest k whose binomial coverage
// 1 - 2 P(Bin(n, 1/2) < k) is at least 0.95, and the whole range where there is none. It assumes
// independent samples and nothing of their distribution. Absent without samples, or where one is
// NaN.
std::optional<MedianInterval> MedianOf(std::vector<double> samples);
template <typename Range>
std::optional<MedianInterval> Median(const Range& samples) {
  return MedianOf(std::vector<double>(samples.begin(), samples.end()));
}

// A time at a length.
struct LengthTime {
  int64_t tokens = 0;
  double time = 0;  // any unit, the same throughout
};

// Least-squares slope of log(time) over log(tokens).
//
// Only the upper half of the lengths counts (of n distinct ones the ceil(n/2) longest, but three
// where there are three): what is short measures fixed costs, and an exponent is a statement about
// long inputs. Points at one length enter one by one.
struct Growth {
  double exponent = 0;
  std::optional<double> standard_error;  // of the slope; absent for two points
  int64_t from_tokens = 0;               // shortest and longest length that counted
  int64_t to_tokens = 0;
};
// Absent with fewer than two distinct lengths, or where no two have positive finite times.
std::optional<Growth> FitGrowth(std::vector<LengthTime> points);

// How many times as fast as its dense counterpart a technique is.
struct SpeedUpInterval {
  double ratio = 1;  // median time of the counterpart over median time of the technique
  double low = 1;    // an interval that holds the ratio of the true medians
  double high = 1;
  bool is_95_percent = false;  // otherwise [low, high] is made of the ranges of too few samples
  bool distinct = false;       // the samples tell the technique apart from its counterpart
};
// From six samples of each on, the interval is a bootstrap's (results/two_samples.h), and the two are
// distinct where it does not hold 1. With fewer, which have no interval of 95 %, it is made of the
// ranges of all samples, and the two are distinct where the ranges do not overlap and a rank sum
// test gives at most 0.05. Absent where one has no samples, or one that is not positive and finite.
std::optional<SpeedUpInterval> SpeedUpOf(const std::vector<double>& dense_ns,
                                         const std::vector<double>& technique_ns);

struct LengthSpeedUp {
  int64_t tokens = 0;
  SpeedUpInterval speed_up;
};

// Where a technique becomes faster than its dense counterpart, over the lengths that both have.
struct Crossover {
  enum class Kind {
    kAt,         // faster from `tokens` on, to the longest length
    kAlways,     // faster at every length; `tokens` is the shortest
    kNever,      // slower at every length; `tokens` is the longest
    kOnlyBelow,  // faster below `tokens`, slower at the longest length
  };
  Kind kind = Kind::kNever;
  double tokens = 0;
  int changes = 0;  // of who is faster; above 1 the crossover is one of several
  // The interval of `tokens`: where the curves through the upper and the lower ends of the speed-ups'
  // intervals cross 1. 0 where that lies below the shortest length, infinite where it lies beyond
  // the longest one.
  double low_tokens = 0;
  double high_tokens = 0;
  // The two are told apart at the longest length, so that the order there is no accident.
  bool clear = false;
};
// log(speed-up) is interpolated linearly in log(tokens) between the last two lengths at which the
// order changes. A tie counts as slower. `speed_ups` are in the order of tokens, which are positive
// and different. Absent where there are none.
std::optional<Crossover> FindCrossover(const std::vector<LengthSpeedUp>& speed_ups);

// The length that a sweep varies: key tokens, or query tokens where those are more.
int64_t LengthOf(const ProblemSize& problem);

// Whether `result` is its own dense counterpart: in name, and in the options that it asks of it.
bool IsBaseline(const Case& result);

// Finds the dense counterpart of each case of `results`: same machine (MachineOf), and same key but
// for technique, options and seed. Of several, in this order: the options that the case asks of its
// counterpart, without which a case of the same technique is none; the same environment, so the
// same run; the same seed; default options; ok; the later. Holds pointers into `results`, which
// must outlive it unchanged.
class DensePartners {
 public:
  explicit DensePartners(const ResultSet& results);
  // Null where there is none; for a baseline the case itself.
  const Case* Find(const Case& result) const;

 private:
  std::string KeyOf(const Case& result, const std::string& technique) const;

  std::map<std::string, std::string> machines_;  // by environment id
  std::map<std::string, std::vector<const Case*>> candidates_;
};

// Median of the warm runs, ns. Absent where the case is not ok, failed bounds apart: a case that
// ran but exceeded a bound has a time.
std::optional<MedianInterval> RunTime(const Case& result);

// Time of dense over time of `result`: above 1 is faster than dense.
std::optional<double> SpeedUp(const Case& result, const Case* dense);

// FLOPs of one run over its median time, in GFLOP/s; bytes moved, in GB/s.
std::optional<double> GigaflopsPerSecond(const Case& result);
std::optional<double> GigabytesPerSecond(const Case& result);

// Achieved rate over the measured peak of the case's environment, 0.5 is half. Of several peaks of
// compute that fit device, dtype and, on the CPU, threads, the highest counts; where none has the
// case's number of threads there is no share. A bandwidth needs no dtype; read before copy.
std::optional<double> ShareOfComputePeak(const Case& result, const Environment& environment);
std::optional<double> ShareOfBandwidthPeak(const Case& result, const Environment& environment);

// Workspace and parameters of a technique, bytes: what it needs beyond inputs and outputs.
// Absent where the workspace is unknown.
std::optional<double> WorkingMemoryBytes(const Outcome& outcome);

// The value of the metric that `error` bounds, or of its relative Frobenius norm where it bounds
// none, or else of its largest absolute error.
std::optional<double> BoundedValue(const ErrorMeasure& error);

}  // namespace tfb

#endif  // TFB_RESULTS_STATISTICS_H_
