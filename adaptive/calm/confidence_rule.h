// The rule of calm.h on every device: a token leaves where its confidence reaches its threshold.
#ifndef TFB_ADAPTIVE_CALM_CONFIDENCE_RULE_H_
#define TFB_ADAPTIVE_CALM_CONFIDENCE_RULE_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "adaptive/calm/calm.h"
#include "core/cuda/device_array.h"
#include "core/layers/exits/exit_logits.h"
#include "core/layers/exits/exit_stack.h"
#include "core/workspace.h"

namespace tfb::calm {

// Returns lambda_t of a problem of so many tokens, and its value in fp32.
Threshold ThresholdOf(const CalmOptions& options, int64_t tokens);
float ThresholdAt(const Threshold& threshold, int64_t t);

class ConfidenceRule : public layers::ExitRule {
 public:
  ConfidenceRule(Device device, const Problem& problem, const CalmOptions& options);

  absl::Status Setup(const NamedTensors& parameters) override;
  size_t workspace_bytes(int64_t rows, int threads) const override;
  double flops(int64_t layers) const override;
  bool never_leaves() const override { return options_.threshold > 1; }
  absl::Status Decide(const layers::ExitRows& rows, uint8_t* leaves,
                      const Execution& execution) override;

 private:
  struct Scratch {
    float* confidences;                     // [rows]
    layers::ExitLogits::Scratch of_logits;  // of softmax
  };
  Scratch LayOut(int64_t rows, Workspace& workspace) const;
  bool has_logits() const { return options_.confidence == Confidence::kSoftmax; }
  void ConfidencesOnCpu(const layers::ExitRows& rows, const Scratch& scratch,
                        const Execution& execution) const;
  // Computes the confidences of rows first to first + count - 1.
  void Classify(const layers::ExitRows& rows, int64_t first, int64_t count,
                float* confidences) const;
  absl::Status DecideOnCuda(const layers::ExitRows& rows, const Scratch& scratch, uint8_t* leaves,
                            const Execution& execution) const;

  Device device_;
  int64_t width_;
  CalmOptions options_;
  layers::ExitLogits logits_;
  Threshold threshold_;
  std::vector<DeviceArray<float>> weights_;  // w of the classifiers
  std::vector<float> biases_;
};

}  // namespace tfb::calm

#endif  // TFB_ADAPTIVE_CALM_CONFIDENCE_RULE_H_
