// Learn then Test: thresholds that guarantee a bound of a model's risk.
//
// Given n independent calibration sequences, with losses in [0, 1] whose mean at a threshold is r:
// is the expected loss at most `risk`? The hypothesis that it is more is rejected where its p-value
// is at most `failure`. Thresholds are tested from the safest on, and testing ends with the first
// that is not rejected; all thresholds accepted before have a risk of at most `risk`, jointly, with
// a probability of at least 1 - failure (fixed-sequence testing).
//
//   Hoeffding           exp(-2 n max(0, risk - r)^2)
//   Hoeffding-Bentkus   min(exp(-n h(min(r, risk), risk)), e P(Binomial(n, risk) <= ceil(n r)))
//                       h(a, b) = a ln(a / b) + (1 - a) ln((1 - a) / (1 - b))
//
// Source: Angelopoulos, Bates, Candes, Jordan, Lei 2021, "Learn then Test", arXiv:2110.01052v5,
// sections 3 and 4, which CALM's section 4 applies to one sequence of thresholds. `risk` and
// `failure` are alpha and delta there, delta and epsilon in CALM.
#ifndef TFB_ADAPTIVE_CALM_LEARN_THEN_TEST_H_
#define TFB_ADAPTIVE_CALM_LEARN_THEN_TEST_H_

#include <cstdint>
#include <vector>

namespace tfb::calm {

enum class PValue : uint8_t { kHoeffding, kHoeffdingBentkus };

struct RiskPromise {
  double risk = 0.1;      // in (0, 1)
  double failure = 0.05;  // in (0, 1)
};

// Returns P(Binomial(trials, p) <= most), for p in (0, 1).
double BinomialCdf(int64_t most, int64_t trials, double p);
// Returns the p-value of a mean loss in [0, 1] of n sequences.
double PValueOf(PValue kind, double mean_loss, int64_t sequences, double risk);
// Returns the last threshold that is accepted, as its index in `mean_losses`, where they stand from
// the safest on; -1 where none is.
int64_t LastAccepted(PValue kind, const std::vector<double>& mean_losses, int64_t sequences,
                     const RiskPromise& promise);

// Returns half of the sequences to calibrate with: every second one, 0, 2, 4, ..., since neighbours
// are alike.
std::vector<int64_t> EverySecond(int64_t sequences);

}  // namespace tfb::calm

#endif  // TFB_ADAPTIVE_CALM_LEARN_THEN_TEST_H_
