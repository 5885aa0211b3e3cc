#include "adaptive/calm/learn_then_test.h"

#include <algorithm>
#include <cmath>

namespace tfb::calm {
namespace {

// Returns a ln(a / b), whose limit at a = 0 is 0.
double Term(double a, double b) { return a == 0 ? 0 : a * std::log(a / b); }

}  // namespace

double BinomialCdf(int64_t most, int64_t trials, double p) {
  if (most < 0) return 0;
  if (most >= trials) return 1;
  const double n = static_cast<double>(trials);
  double sum = 0;
  for (int64_t k = 0; k <= most; ++k) {
    const double hits = static_cast<double>(k);
    sum += std::exp(std::lgamma(n + 1) - std::lgamma(hits + 1) - std::lgamma(n - hits + 1) +
                    hits * std::log(p) + (n - hits) * std::log1p(-p));
  }
  return std::min(sum, 1.0);
}

double PValueOf(PValue kind, double mean_loss, int64_t sequences, double risk) {
  const double n = static_cast<double>(sequences);
  if (kind == PValue::kHoeffding) {
    const double gap = std::max(0.0, risk - mean_loss);
    return std::exp(-2 * n * gap * gap);
  }
  const double r = std::min(mean_loss, risk);
  const double hoeffding = std::exp(-n * (Term(r, risk) + Term(1 - r, 1 - risk)));
  const int64_t hits = static_cast<int64_t>(std::ceil(n * mean_loss));
  return std::min(hoeffding, std::exp(1.0) * BinomialCdf(hits, sequences, risk));
}

int64_t LastAccepted(PValue kind, const std::vector<double>& mean_losses, int64_t sequences,
                     const RiskPromise& promise) {
  int64_t last = -1;
  for (const double mean_loss : mean_losses) {
    if (PValueOf(kind, mean_loss, sequences, promise.risk) > promise.failure) break;
    ++last;
  }
  return last;
}

std::vector<int64_t> EverySecond(int64_t sequences) {
  std::vector<int64_t> half(sequences / 2);
  for (size_t n = 0; n < half.size(); ++n) half[n] = 2 * static_cast<int64_t>(n);
  return half;
}

}  // namespace tfb::calm
