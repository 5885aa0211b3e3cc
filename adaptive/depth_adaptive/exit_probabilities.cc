#include "adaptive/depth_adaptive/exit_probabilities.h"

#include <algorithm>
#include <cmath>

#include "adaptive/depth_adaptive/exit_stack_definition.h"

namespace tfb {

ExitProbabilities ExitProbabilitiesOf(const NamedTensors& parameters, const std::string& norm,
                                      const double* h, int64_t channels, double state_error) {
  const std::vector<double> y = NormOf(parameters, norm, h, channels);
  double largest = 0;
  for (const double value : y) largest = std::max(largest, std::abs(value));
  const ConstTensorView output = parameters.at("output").view();
  std::vector<double> logits(output.dim(0));
  double logit_error = 0;
  for (int64_t v = 0; v < output.dim(0); ++v) {
    double magnitude = 0;
    for (int64_t c = 0; c < channels; ++c) {
      const double w = output.Get(output.Offset(v, c));
      logits[v] += w * y[c];
      magnitude += std::abs(w);
    }
    logit_error = std::max(logit_error, magnitude * state_error * largest);
  }
  const double max = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (double& logit : logits) sum += logit = std::exp(logit - max);
  for (double& exponential : logits) exponential /= sum;
  std::sort(logits.begin(), logits.end());
  // A probability p changes by at most 2 p (1 - p) times the change of logits, which is at most
  // half of that change.
  return {logits, logit_error / 2};
}

}  // namespace tfb
