// Whether two sets of samples differ, and by what factor. Nothing is assumed of how the samples are
// distributed; they are taken to be independent.
#ifndef TFB_RESULTS_TWO_SAMPLES_H_
#define TFB_RESULTS_TWO_SAMPLES_H_

#include <cstdint>
#include <optional>
#include <vector>

namespace tfb {

// Samples of one quantity, all positive and finite, and whether its median stands above or below
// the line.
struct Factor {
  std::vector<double> samples;
  bool above = true;
};

// A positive number with an interval that holds it with a probability of 95 %.
struct RatioInterval {
  double ratio = 1;
  double low = 1;
  double high = 1;
};

// The product of the medians of all factors above the line over those below it. The interval is
// between the 2.5th and the 97.5th percentile of kResamples values, for each of which every factor
// is drawn anew from its samples, as many, with replacement (Efron & Tibshirani, An Introduction to
// the Bootstrap, 1993, section 13.3). Equal arguments give equal results. Absent where a factor has
// no samples, or one that is not positive and finite.
constexpr int kResamples = 1000;
std::optional<RatioInterval> BootstrapRatio(const std::vector<Factor>& factors, uint64_t seed);

// Two-sided p-value of the rank sum test of Mann and Whitney (1947): how likely samples of one
// distribution differ in rank as much as these. Exact where no two are equal and both have at most
// kMostExact; else by the normal approximation with corrections for ties and continuity. 1 where a
// set is empty or all samples are equal.
constexpr int kMostExact = 60;
double MannWhitneyP(const std::vector<double>& a, const std::vector<double>& b);

// p-values as if each were the only one: those below 0.05 are, together, wrong with a probability
// of at most 0.05 (Holm 1979, step-down). In the order given.
std::vector<double> HolmAdjusted(const std::vector<double>& p_values);

}  // namespace tfb

#endif  // TFB_RESULTS_TWO_SAMPLES_H_
