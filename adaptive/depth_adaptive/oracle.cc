#include "adaptive/depth_adaptive/oracle.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace tfb::depth_adaptive {
namespace {

constexpr double kLeastWeight = 1e-12;  // weights of the kernel below this are cut off

int64_t Best(const std::vector<double>& scores, double penalty) {
  int64_t best = 1;
  double largest = scores[0] - penalty;
  for (size_t n = 1; n < scores.size(); ++n) {
    const double score = scores[n] - penalty * static_cast<double>(n + 1);
    if (score <= largest) continue;
    best = static_cast<int64_t>(n + 1);
    largest = score;
  }
  return best;
}

// Calls value(logits of a row, y_t) for each exit and token.
template <class Value>
ExitValues ValuesOf(const ConstTensorView& logits, absl::Span<const int64_t> next,
                    const Value& value) {
  ExitValues values(logits.dim(0), std::vector<double>(logits.dim(1)));
  std::vector<double> row(logits.dim(2));
  for (int64_t n = 0; n < logits.dim(0); ++n) {
    for (int64_t t = 0; t < logits.dim(1); ++t) {
      for (int64_t v = 0; v < logits.dim(2); ++v) row[v] = logits.Get(logits.Offset(n, t, v));
      values[n][t] = value(row, next[t]);
    }
  }
  return values;
}

}  // namespace

ExitValues LikelihoodOfExits(const ConstTensorView& logits, absl::Span<const int64_t> next) {
  return ValuesOf(logits, next, [](const std::vector<double>& row, int64_t y) {
    const double largest = *std::max_element(row.begin(), row.end());
    double sum = 0;
    for (const double logit : row) sum += std::exp(logit - largest);
    return row[y] - largest - std::log(sum);
  });
}

ExitValues CorrectnessOfExits(const ConstTensorView& logits, absl::Span<const int64_t> next) {
  return ValuesOf(logits, next, [](const std::vector<double>& row, int64_t y) {
    return std::max_element(row.begin(), row.end()) - row.begin() == y ? 1.0 : 0.0;
  });
}

int64_t SequenceOracle(const ExitValues& values, double penalty) {
  std::vector<double> means;
  for (const std::vector<double>& of_exit : values) {
    means.push_back(std::accumulate(of_exit.begin(), of_exit.end(), 0.0) /
                    static_cast<double>(std::max<size_t>(of_exit.size(), 1)));
  }
  return Best(means, penalty);
}

std::vector<int32_t> TokenOracle(const ExitValues& values, double penalty, double sigma) {
  const int64_t tokens = static_cast<int64_t>(values[0].size());
  const int64_t radius =
      std::min(tokens, static_cast<int64_t>(std::sqrt(-sigma * std::log(kLeastWeight))));
  std::vector<int32_t> exits;
  std::vector<double> scores(values.size());
  for (int64_t t = 0; t < tokens; ++t) {
    for (size_t n = 0; n < values.size(); ++n) {
      scores[n] = values[n][t];
      for (int64_t d = 1; d <= radius; ++d) {
        const double weight = std::exp(-static_cast<double>(d * d) / sigma);
        if (t >= d) scores[n] += weight * values[n][t - d];
        if (t + d < tokens) scores[n] += weight * values[n][t + d];
      }
    }
    exits.push_back(static_cast<int32_t>(Best(scores, penalty)));
  }
  return exits;
}

}  // namespace tfb::depth_adaptive
