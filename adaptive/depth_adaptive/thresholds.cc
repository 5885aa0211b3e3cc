#include "adaptive/depth_adaptive/thresholds.h"

#include <algorithm>
#include <cmath>
#include <cstddef>

namespace tfb::depth_adaptive {
namespace {

constexpr int64_t kStep = 10;  // step of the grid, in thousandths
constexpr int64_t kHighest =
    101;  // the grid's last, which nothing reaches, behind 0, 10, ..., 1000

constexpr double kRounding = 1e-9;  // more than the rounding errors of sums over a text

class Search {
 public:
  Search(const ExitValues& values, const ExitValues& confidences, double penalty)
      : gains_(values), tokens_(values[0].size()) {
    for (size_t n = 0; n < gains_.size(); ++n) {
      for (double& gain : gains_[n]) gain -= penalty * static_cast<double>(n + 1);
    }
    // Finds the last threshold of the grid that each confidence reaches, where a layer's fp32
    // comparison may round.
    for (size_t n = 0; n + 1 < values.size(); ++n) {
      std::vector<int64_t>& reached = reached_.emplace_back();
      for (const double c : confidences[n]) {
        reached.push_back(std::clamp<int64_t>(std::floor(c * 1000 / kStep), -1, kHighest - 1));
      }
    }
    chosen_.assign(reached_.size(), kHighest);
  }

  std::vector<int64_t> Run() {
    BeginWithShared();
    Climb();
    std::vector<int64_t> best = chosen_;
    double largest = Sum();
    for (size_t n = 0; n <= chosen_.size(); ++n) {
      chosen_.assign(chosen_.size(), kHighest);
      if (n < chosen_.size()) chosen_[n] = 0;
      Climb();
      const double sum = Sum();
      if (sum <= largest + kRounding) continue;
      largest = sum;
      best = chosen_;
    }
    std::vector<int64_t> thresholds;
    for (const int64_t g : best) thresholds.push_back(g == kHighest ? 1001 : g * kStep);
    return thresholds;
  }

 private:
  // Returns the exit, counted from 0, of token t, which has not left before layer from + 1.
  size_t ExitOf(size_t t, size_t from) const {
    size_t n = from;
    while (n < chosen_.size() && reached_[n][t] < chosen_[n]) ++n;
    return n;
  }
  double Sum() const {
    double sum = 0;
    for (size_t t = 0; t < tokens_; ++t) sum += gains_[ExitOf(t, 0)][t];
    return sum;
  }

  void BeginWithShared() {
    std::vector<int64_t> best = chosen_;
    double largest = Sum();
    for (int64_t g = kHighest - 1; g >= 0; --g) {
      std::fill(chosen_.begin(), chosen_.end(), g);
      const double sum = Sum();
      if (sum <= largest) continue;
      largest = sum;
      best = chosen_;
    }
    chosen_ = best;
  }

  void Climb() {
    for (bool improves = true; improves;) {
      improves = false;
      for (size_t n = 0; n < chosen_.size(); ++n) improves |= Improve(n);
    }
  }

  // Sets the threshold of layer n + 1 to the best, keeping the others; returns whether that is
  // better.
  bool Improve(size_t n) {
    // more[g] is the gain of leaving here over going on, summed over the tokens whose confidence
    // reaches g and no more.
    std::vector<double> more(kHighest, 0);
    for (size_t t = 0; t < tokens_; ++t) {
      if (reached_[n][t] < 0 || ExitOf(t, 0) < n) continue;
      more[reached_[n][t]] += gains_[n][t] - gains_[ExitOf(t, n + 1)][t];
    }
    // The gain over all tokens that reach a threshold, by threshold.
    std::vector<double> of(kHighest + 1, 0);
    int64_t best = kHighest;
    for (int64_t g = kHighest - 1; g >= 0; --g) {
      of[g] = of[g + 1] + more[g];
      if (of[g] > of[best]) best = g;
    }
    const bool improves = of[best] > of[chosen_[n]] + kRounding;
    chosen_[n] = best;
    return improves;
  }

  ExitValues gains_;  // A^n_t - penalty n
  size_t tokens_;
  std::vector<std::vector<int64_t>> reached_;  // [N - 1][tokens]
  std::vector<int64_t> chosen_;                // [N - 1], places of the grid
};

}  // namespace

std::vector<int64_t> SearchThresholds(const ExitValues& values, const ExitValues& confidences,
                                      double penalty) {
  return Search(values, confidences, penalty).Run();
}

}  // namespace tfb::depth_adaptive
