#include "results/history/change_points.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <thread>
#include <utility>

namespace tfb {
namespace {

constexpr int kLeastSegment = 3;
constexpr int kWindow = 5;  // of the running median, which three values of a new level make theirs
constexpr double kOutlier = 3;
// Levels this many standard errors apart are taken out of a series before it is permuted, since a
// few runs of another level come to stand side by side in many permutations of a short series.
constexpr double kPlainlyAChange = 6;
constexpr double kOddDifference = 2.5;
// The root mean square of a standard normal variable that is drawn in at 2.5:
// E[min(x^2, 2.5^2)] = 1 - 2 (2.5 phi(2.5) + Q(2.5)) + 2 * 2.5^2 Q(2.5) = 0.9776.
constexpr double kRootMeanSquareDrawnIn = 0.98873;
constexpr double kMadOfNormal = 1.4826;
constexpr double kPriorValues = 8;
constexpr double kValuesPerDifference = 0.6;  // successive differences are correlated
// Logarithms of times are not known better than to 0.1 %.
constexpr double kLeastScale = 1e-3;

// By value, so that the compiler makes one instruction of each.
double Smaller(double a, double b) { return b < a ? b : a; }
double Larger(double a, double b) { return a < b ? b : a; }

// Returns the median, and leaves the values in another order. Hoare's selection: where
// std::nth_element jumps on each comparison, which no processor foresees, this adds it.
double MedianInPlace(std::vector<double>* values) {
  double* const v = values->data();
  const size_t middle = values->size() / 2;
  size_t begin = 0, end = values->size();  // where the middle one is
  while (end - begin > 1) {
    const double a = v[begin], b = v[begin + (end - begin) / 2], c = v[end - 1];
    const double pivot = Larger(Smaller(a, b), Smaller(Larger(a, b), c));
    size_t smaller = begin;
    for (size_t i = begin; i < end; ++i) {
      const double value = v[i];
      v[i] = v[smaller];
      v[smaller] = value;
      smaller += value < pivot;
    }
    if (middle < smaller) {
      end = smaller;
      continue;
    }
    size_t larger = smaller;
    for (size_t i = smaller; i < end; ++i) {
      const double value = v[i];
      v[i] = v[larger];
      v[larger] = value;
      larger += !(pivot < value);
    }
    if (middle < larger) break;  // it is one of those that equal the pivot
    begin = larger;
  }
  if (values->size() % 2 == 1) return v[middle];
  return (v[middle] + *std::max_element(v, v + middle)) / 2;
}

// The values of a series, or of a permutation of it, with outliers drawn in, and what can be said
// of its segments.
class Values {
 public:
  // Draws in the values of `y` farther than kOutlier scales from the median of the kWindow values
  // around them.
  void Set(const std::vector<double>& y, double scale) {
    const int n = static_cast<int>(y.size());
    const double limit = kOutlier * scale;
    sums_.resize(y.size() + 1);
    squares_.resize(y.size() + 1);
    double sum = 0, squares = 0;
    for (int i = 0; i < n; ++i) {
      const double* around = y.data() + std::clamp(i - kWindow / 2, 0, n - kWindow);
      const double centre = MedianOfWindow(around);
      const double value = Smaller(Larger(y[i], centre - limit), centre + limit) - y[0];
      sums_[i + 1] = sum += value;
      squares_[i + 1] = squares += value * value;
    }
  }

  // Returns the sum of squares of [begin, end) about its mean.
  double Squares(int begin, int end) const {
    const double sum = sums_[end] - sums_[begin];
    return squares_[end] - squares_[begin] - sum * sum / (end - begin);
  }

  // Returns by how much the best split of all values in two reduces their sum of squares.
  double MostExplained() const {
    const int n = static_cast<int>(sums_.size()) - 1;
    const double mean = sums_[n] / n;
    double most = 0;
    // With d = sum of the first m - m mean, the reduction is d^2 n / (m (n - m)).
    for (int m = kLeastSegment; m <= n - kLeastSegment; ++m) {
      const double d = sums_[m] - m * mean;
      most = std::max(most, d * d / (static_cast<double>(m) * (n - m)));
    }
    return most * n;
  }

 private:
  static double MedianOfWindow(const double* v) {
    static_assert(kWindow == 5, "the median of five values is written out");
    const double low = Larger(Smaller(v[0], v[1]), Smaller(v[2], v[3]));
    const double high = Smaller(Larger(v[0], v[1]), Larger(v[2], v[3]));
    return Larger(Smaller(low, high), Smaller(Larger(low, high), v[4]));
  }

  std::vector<double> sums_, squares_;
};

// Returns the scale of a series' noise from successive differences, which steps hardly change.
double ScaleOf(const std::vector<double>& y, std::vector<double>* scratch) {
  scratch->clear();
  for (size_t i = 1; i < y.size(); ++i) scratch->push_back(std::fabs(y[i] - y[i - 1]));
  double scale = kMadOfNormal * MedianInPlace(scratch);
  for (int pass = 0; pass < 2; ++pass) {
    const double limit = kOddDifference * std::max(scale, kLeastScale);
    double squares = 0;
    for (const double difference : *scratch) {
      const double drawn_in = Smaller(difference, limit);
      squares += drawn_in * drawn_in;
    }
    scale = std::sqrt(squares / static_cast<double>(scratch->size())) / kRootMeanSquareDrawnIn;
  }
  return std::max(scale / std::sqrt(2), kLeastScale);
}

class Finder {
 public:
  Finder(const std::vector<NoisySeries>& series, const ChangePointOptions& options)
      : series_(series), options_(options) {
    found_.at.resize(series.size());
    found_.scale.resize(series.size());
  }

  ChangePoints Find() {
    for (size_t i = 0; i < series_.size(); ++i) {
      if (LengthOf(i) >= kFewestForChangePoints) searched_.push_back(i);
    }
    if (searched_.empty()) return std::move(found_);
    std::vector<double> scales;
    for (const size_t i : searched_) scales.push_back(ScaleOf(series_[i].values, &scratch_));
    typical_ = MedianInPlace(&scales);
    found_.critical = kPlainlyAChange;
    for (const size_t i : searched_) Search(i);
    found_.critical = Critical();
    for (const size_t i : searched_) Search(i);
    return std::move(found_);
  }

 private:
  int LengthOf(size_t i) const { return static_cast<int>(series_[i].values.size()); }

  // Returns the scale of some values, pooled with the typical one.
  double PooledScaleOf(const std::vector<double>& values, std::vector<double>* scratch) const {
    const double own = ScaleOf(values, scratch);
    const double weight = kValuesPerDifference * static_cast<double>(values.size() - 1);
    return std::sqrt((weight * own * own + kPriorValues * typical_ * typical_) /
                     (weight + kPriorValues));
  }

  // Returns the values of a series without the levels that the splits so far give it.
  std::vector<double> WithoutLevels(size_t i) const {
    std::vector<double> values = series_[i].values;
    const std::vector<int>& at = found_.at[i];
    for (size_t k = 0; k <= at.size(); ++k) {
      const auto begin = values.begin() + (k == 0 ? 0 : at[k - 1]);
      const auto end = k == at.size() ? values.end() : values.begin() + at[k];
      std::vector<double> level(begin, end);
      const double centre = MedianInPlace(&level);
      std::for_each(begin, end, [centre](double& value) { value -= centre; });
    }
    return values;
  }

  // Returns the largest statistic of all permutations. Of m of them and the order that was
  // measured, each has the largest with probability 1 / (m + 1) where nothing changed.
  double Critical() const {
    const int permutations = static_cast<int>(std::ceil(1 / options_.false_alarm_rate)) - 1;
    std::vector<std::vector<double>> values;
    for (const size_t i : searched_) values.push_back(WithoutLevels(i));
    const int threads = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
    std::vector<double> largest(static_cast<size_t>(threads));
    std::vector<std::thread> workers;
    for (int worker = 0; worker < threads; ++worker) {
      workers.emplace_back([&, worker] {
        Permuter permuter(*this, values);
        for (int permutation = worker; permutation < permutations; permutation += threads) {
          largest[worker] = std::max(largest[worker], permuter.Largest(permutation));
        }
      });
    }
    for (std::thread& worker : workers) worker.join();
    return *std::max_element(largest.begin(), largest.end());
  }

  // Permutes the runs, and computes the largest statistic of all series in their new order.
  class Permuter {
   public:
    // `values` are those of the searched series.
    Permuter(const Finder& finder, const std::vector<std::vector<double>>& values)
        : finder_(finder), given_(values) {
      int runs = 0;
      for (const size_t i : finder.searched_) {
        runs = std::max(runs, finder.series_[i].runs.back() + 1);
      }
      order_.resize(static_cast<size_t>(runs));
      place_of_.resize(static_cast<size_t>(runs));
    }

    double Largest(int permutation) {
      std::mt19937_64 random(finder_.options_.seed + static_cast<uint64_t>(permutation));
      std::iota(order_.begin(), order_.end(), 0);
      for (size_t i = order_.size() - 1; i > 0; --i) {  // std::shuffle differs between libraries
        std::swap(order_[i], order_[random() % (i + 1)]);
      }
      double largest = 0;
      for (size_t place = 0; place < given_.size(); ++place) {
        Permute(finder_.series_[finder_.searched_[place]].runs, given_[place]);
        const double scale = finder_.PooledScaleOf(permuted_, &scratch_);
        values_.Set(permuted_, scale);
        largest = std::max(largest, std::sqrt(values_.MostExplained()) / scale);
      }
      return largest;
    }

   private:
    void Permute(const std::vector<int>& runs, const std::vector<double>& values) {
      std::fill(place_of_.begin(), place_of_.end(), -1);
      for (size_t k = 0; k < runs.size(); ++k) place_of_[runs[k]] = static_cast<int>(k);
      permuted_.clear();
      for (const int run : order_) {
        if (place_of_[run] >= 0) permuted_.push_back(values[place_of_[run]]);
      }
    }

    const Finder& finder_;
    const std::vector<std::vector<double>>& given_;
    std::vector<int> order_;
    std::vector<int> place_of_;  // of a run among those of a series, or -1
    std::vector<double> permuted_, scratch_;
    Values values_;
  };

  // Finds the levels that leave the least sum of squares about their means and a penalty for each.
  void Search(size_t i) {
    const int n = LengthOf(i);
    const double scale = found_.scale[i] = PooledScaleOf(series_[i].values, &scratch_);
    values_.Set(series_[i].values, scale);
    const double penalty = found_.critical * found_.critical * scale * scale;
    // The least cost of the first `end` values, and where the last level of theirs begins.
    std::vector<double> cost(static_cast<size_t>(n) + 1, std::numeric_limits<double>::infinity());
    std::vector<int> begin(static_cast<size_t>(n) + 1);
    cost[0] = -penalty;
    for (int end = kLeastSegment; end <= n; ++end) {
      for (int last = 0; last <= end - kLeastSegment; ++last) {
        const double with_it = cost[last] + values_.Squares(last, end) + penalty;
        if (with_it >= cost[end]) continue;
        cost[end] = with_it;
        begin[end] = last;
      }
    }
    std::vector<int>& at = found_.at[i];
    at.clear();
    for (int end = begin[n]; end > 0; end = begin[end]) at.push_back(end);
    std::reverse(at.begin(), at.end());
  }

  const std::vector<NoisySeries>& series_;
  const ChangePointOptions options_;
  std::vector<size_t> searched_;
  double typical_ = 0;
  Values values_;
  std::vector<double> scratch_;
  ChangePoints found_;
};

}  // namespace

ChangePoints FindChangePoints(const std::vector<NoisySeries>& series,
                              const ChangePointOptions& options) {
  return Finder(series, options).Find();
}

double SmallestStep(double critical, double scale, int runs, int after) {
  return critical * scale * std::sqrt(1.0 / after + 1.0 / runs);
}

}  // namespace tfb
