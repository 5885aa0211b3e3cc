#include "core/layers/exits/exit_probabilities.h"

#include <algorithm>
#include <cmath>

#include "core/layers/exits/exit_stack_definition.h"

namespace tfb::layers {

ExitDistribution::ExitDistribution(const NamedTensors& parameters)
    : parameters_(parameters), output_(parameters.at("output").view()) {
  for (int64_t v = 0; v < output_.rows(); ++v) {
    double magnitude = 0;
    for (int64_t c = 0; c < output_.channels(); ++c) magnitude += std::abs(output_.Row(v)[c]);
    largest_magnitude_ = std::max(largest_magnitude_, magnitude);
  }
}

ExitProbabilities ExitDistribution::Of(const std::string& norm, const double* h, int64_t channels,
                                       double state_error) const {
  const std::vector<double> y = NormOf(parameters_, norm, h, channels);
  double largest = 0;
  for (const double value : y) largest = std::max(largest, std::abs(value));
  const double logit_error = largest_magnitude_ * state_error * largest;
  std::vector<double> logits;
  for (int64_t v = 0; v < output_.rows(); ++v) {
    logits.push_back(Dot(output_.Row(v), y.data(), channels));
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

}  // namespace tfb::layers
