// Tests whether two sets of samples differ, and estimates by what factor. Samples are assumed to be
// independent, but of no particular distribution.
#ifndef TFB_RESULTS_TWO_SAMPLES_H_
#define TFB_RESULTS_TWO_SAMPLES_H_

#include <cstdint>
#include <optional>
#include <vector>

namespace tfb {

// Samples of one quantity, all positive and finite, and whether its median is in the numerator.
struct Factor {
  std::vector<double> samples;
  bool above = true;
};

// A positive ratio with its 95 % confidence interval.
struct RatioInterval {
  double ratio = 1;
  double low = 1;
  double high = 1;
};

// Returns the product of the medians in the numerator over that of those in the denominator, with a
// percentile bootstrap interval: the 2.5th to the 97.5th percentile of kResamples values, for each
// of which the samples of every factor are resampled with replacement (Efron & Tibshirani, An
// Introduction to the Bootstrap, 1993, section 13.3). Equal arguments give equal results. Returns
// nothing where a factor has no samples, or one that is not positive and finite.
constexpr int kResamples = 1000;
std::optional<RatioInterval> BootstrapRatio(const std::vector<Factor>& factors, uint64_t seed);

// Returns the two-sided p-value of the rank sum test of Mann and Whitney (1947). It is exact where
// no two samples are equal and both sets have at most kMostExact, else it uses the normal
// approximation with corrections for ties and continuity. It is 1 for empty sets or equal samples.
constexpr int kMostExact = 60;
double MannWhitneyP(const std::vector<double>& a, const std::vector<double>& b);

// Returns the two-sided p-value of a product of quotients of typical values that is 1, with the
// uncertainty of the samples of every factor. It is Yuen's test (The two-sample trimmed t for
// unequal population variances, Biometrika 61, 1974), for a contrast of any number of sets:
//   m_j  the mean of the logarithms of the samples of factor j without the floor(n_j / 5) smallest
//        and largest, so that h_j are left and single slow samples count little
//   d_j = (n_j - 1) s_j^2 / (h_j (h_j - 1)), the variance of m_j, where s_j^2 is the variance of
//        all n_j logarithms, with those left out replaced by the nearest of those left
//   t = (sum of +-m_j) / sqrt(sum d_j), + for those in the numerator, compared with Student's t of
//   (sum d_j)^2 / sum(d_j^2 / (h_j - 1)) degrees of freedom (Welch 1947)
// Where the distributions are equal at most 6 % are below 0.05, with 4 to 30 samples a factor and
// noise that is normal, skewed, bimodal or has slow outliers. Far smaller values rest on the normal
// distribution of the means: where a factor has four samples up to 0.6 % are below 0.001. Returns
// 1 where a factor has fewer than two samples, or one that is not positive and finite.
double TrimmedRatioP(const std::vector<Factor>& factors);

// Returns the p-values corrected for multiple testing (Holm 1979, step-down), in the order given:
// the probability of any false rejection at 0.05 is at most 0.05.
std::vector<double> HolmAdjusted(const std::vector<double>& p_values);

}  // namespace tfb

#endif  // TFB_RESULTS_TWO_SAMPLES_H_
