// The classifier "confidence" of depth_adaptive.h on every device: a token leaves where the largest
// probability of the next token reaches the layer's threshold.
#ifndef TFB_ADAPTIVE_DEPTH_ADAPTIVE_MAX_PROBABILITY_RULE_H_
#define TFB_ADAPTIVE_DEPTH_ADAPTIVE_MAX_PROBABILITY_RULE_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "adaptive/depth_adaptive/depth_adaptive.h"
#include "core/layers/exits/exit_logits.h"
#include "core/layers/exits/exit_stack.h"

namespace tfb::depth_adaptive {

class MaxProbabilityRule : public layers::ExitRule {
 public:
  MaxProbabilityRule(Device device, const Problem& problem, const DepthAdaptiveOptions& options)
      : device_(device),
        options_(options),
        logits_(device, problem.model_dim(), options.vocabulary) {}

  absl::Status Setup(const NamedTensors& parameters) override {
    return logits_.Setup(parameters, options_.layers);
  }
  size_t workspace_bytes(int64_t rows, int threads) const override;
  double flops(int64_t layers) const override {
    return static_cast<double>(layers) * logits_.flops();
  }
  absl::Status Decide(const layers::ExitRows& rows, uint8_t* leaves,
                      const Execution& execution) override;

 private:
  Device device_;
  DepthAdaptiveOptions options_;
  layers::ExitLogits logits_;
};

}  // namespace tfb::depth_adaptive

#endif  // TFB_ADAPTIVE_DEPTH_ADAPTIVE_MAX_PROBABILITY_RULE_H_
