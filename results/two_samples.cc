#include "results/two_samples.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

#include "boost/math/distributions/students_t.hpp"

namespace tfb {
namespace {

// Returns the median, and reorders `values`.
double MedianInPlace(std::vector<double>* values) {
  const size_t n = values->size(), middle = n / 2;
  std::nth_element(values->begin(), values->begin() + middle, values->end());
  const double upper = (*values)[middle];
  if (n % 2 == 1) return upper;
  return (*std::max_element(values->begin(), values->begin() + middle) + upper) / 2;
}

double SignedLogMedian(std::vector<double>* values, bool above) {
  const double log_median = std::log(MedianInPlace(values));
  return above ? log_median : -log_median;
}

bool ArePositive(const std::vector<double>& samples) {
  return !samples.empty() && std::all_of(samples.begin(), samples.end(), [](double sample) {
    return sample > 0 && std::isfinite(sample);
  });
}

// Returns a number below `bound`, the same on every platform, unlike std::uniform_int_distribution.
size_t DrawBelow(size_t bound, std::mt19937_64* random) {
  return static_cast<size_t>(static_cast<double>((*random)() >> 11) * 0x1p-53 *
                             static_cast<double>(bound));
}

// Returns P(U <= u), where U is the number of pairs in which a sample of `m` is above one of `n`,
// and all orders are equally likely. Without the largest of all samples, a count of (m, n, u) is
// one of (m - 1, n, u - n) or of (m, n - 1, u).
double ProbabilityOfAtMost(int u, int m, int n) {
  // shares[i][k]: of the orders of i and j samples, j counting up, those with U = k.
  std::vector<std::vector<double>> shares(m + 1, std::vector<double>(u + 1, 0.0));
  for (int i = 0; i <= m; ++i) shares[i][0] = 1;
  for (int j = 1; j <= n; ++j) {
    for (int i = 1; i <= m; ++i) {
      const double of_first = static_cast<double>(i) / (i + j);
      for (int k = u; k >= 0; --k) {
        shares[i][k] =
            (1 - of_first) * shares[i][k] + (k >= j ? of_first * shares[i - 1][k - j] : 0);
      }
    }
  }
  return std::accumulate(shares[m].begin(), shares[m].end(), 0.0);
}

double NormalP(double u, double m, double n, double tied) {
  const double all = m + n;
  const double variance = m * n / 12 * (all + 1 - tied / (all * (all - 1)));
  if (!(variance > 0)) return 1;
  const double distance = std::max(0.0, std::fabs(u - m * n / 2) - 0.5);
  return std::erfc(distance / std::sqrt(2 * variance));
}

// Returns P(|T| >= |t|), where T has Student's distribution.
double StudentP(double t, double degrees_of_freedom) {
  const boost::math::students_t distribution(degrees_of_freedom);
  return 2 * boost::math::cdf(boost::math::complement(distribution, std::fabs(t)));
}

// The trimmed mean of logarithms: m_j, d_j and h_j - 1 of TrimmedRatioP.
struct TrimmedMean {
  double mean = 0;
  double variance = 0;
  double degrees_of_freedom = 0;
};

TrimmedMean TrimmedLogMean(const std::vector<double>& samples) {
  std::vector<double> logs;
  for (const double sample : samples) logs.push_back(std::log(sample));
  std::sort(logs.begin(), logs.end());
  const size_t n = logs.size(), cut = n / 5;
  const double left = static_cast<double>(n - 2 * cut);
  TrimmedMean result;
  result.mean = std::accumulate(logs.begin() + cut, logs.end() - cut, 0.0) / left;
  for (double& value : logs) value = std::min(std::max(value, logs[cut]), logs[n - 1 - cut]);
  const double mean = std::accumulate(logs.begin(), logs.end(), 0.0) / static_cast<double>(n);
  for (const double value : logs) result.variance += (value - mean) * (value - mean);
  result.variance /= left * (left - 1);
  result.degrees_of_freedom = left - 1;
  return result;
}

}  // namespace

std::optional<RatioInterval> BootstrapRatio(const std::vector<Factor>& factors, uint64_t seed) {
  double log_ratio = 0;
  for (const Factor& factor : factors) {
    if (!ArePositive(factor.samples)) return std::nullopt;
    std::vector<double> samples = factor.samples;
    log_ratio += SignedLogMedian(&samples, factor.above);
  }
  std::mt19937_64 random(seed);
  std::vector<double> resampled(kResamples, 0.0);
  std::vector<double> drawn;
  for (double& value : resampled) {
    for (const Factor& factor : factors) {
      drawn.resize(factor.samples.size());
      for (double& one : drawn) one = factor.samples[DrawBelow(drawn.size(), &random)];
      value += SignedLogMedian(&drawn, factor.above);
    }
  }
  std::sort(resampled.begin(), resampled.end());
  constexpr int kTail = kResamples / 40;
  return RatioInterval{std::exp(log_ratio), std::exp(std::min(resampled[kTail], log_ratio)),
                       std::exp(std::max(resampled[kResamples - 1 - kTail], log_ratio))};
}

double MannWhitneyP(const std::vector<double>& a, const std::vector<double>& b) {
  if (a.empty() || b.empty()) return 1;
  std::vector<double> all = a;
  all.insert(all.end(), b.begin(), b.end());
  std::sort(all.begin(), all.end());
  double tied = 0;  // sum of t^3 - t over groups of t equal samples
  for (size_t i = 0; i < all.size();) {
    const size_t end = std::upper_bound(all.begin() + i, all.end(), all[i]) - all.begin();
    const double t = static_cast<double>(end - i);
    tied += t * t * t - t;
    i = end;
  }
  double u = 0;
  for (const double x : a) {
    for (const double y : b) u += x > y ? 1 : x == y ? 0.5 : 0;
  }
  const int m = static_cast<int>(a.size()), n = static_cast<int>(b.size());
  if (tied > 0 || std::max(m, n) > kMostExact) return NormalP(u, m, n, tied);
  const int least = static_cast<int>(std::min(u, m * static_cast<double>(n) - u));
  return std::min(1.0, 2 * ProbabilityOfAtMost(least, m, n));
}

double TrimmedRatioP(const std::vector<Factor>& factors) {
  double log_ratio = 0, variance = 0, squares = 0;
  for (const Factor& factor : factors) {
    if (factor.samples.size() < 2 || !ArePositive(factor.samples)) return 1;
    const TrimmedMean one = TrimmedLogMean(factor.samples);
    log_ratio += factor.above ? one.mean : -one.mean;
    variance += one.variance;
    squares += one.variance * one.variance / one.degrees_of_freedom;
  }
  // Samples that are all equal have only rounding errors, which must not look like a difference. No
  // clock resolves a billionth of a time.
  constexpr double kLeastError = 1e-9;
  const double degrees_of_freedom = squares > 0 ? variance * variance / squares : 1;
  return StudentP(log_ratio / std::max(std::sqrt(variance), kLeastError), degrees_of_freedom);
}

std::vector<double> HolmAdjusted(const std::vector<double>& p_values) {
  std::vector<size_t> order(p_values.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return p_values[a] < p_values[b]; });
  std::vector<double> adjusted(p_values.size());
  double largest = 0;
  for (size_t rank = 0; rank < order.size(); ++rank) {
    const double left = static_cast<double>(order.size() - rank);
    largest = std::max(largest, std::min(1.0, left * p_values[order[rank]]));
    adjusted[order[rank]] = largest;
  }
  return adjusted;
}

}  // namespace tfb
