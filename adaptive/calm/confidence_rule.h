// The rule of calm.h on every device: a token leaves where its confidence reaches its threshold.
#ifndef TFB_ADAPTIVE_CALM_CONFIDENCE_RULE_H_
#define TFB_ADAPTIVE_CALM_CONFIDENCE_RULE_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "adaptive/calm/calm.h"
#include "core/layers/exits/exit_classifiers.h"
#include "core/layers/exits/exit_logits.h"
#include "core/layers/exits/exit_stack.h"
#include "core/workspace.h"

namespace tfb::calm {

// Returns lambda_t of a problem of so many tokens, and its value in fp32.
Threshold ThresholdOf(const CalmOptions& options, int64_t tokens);
float ThresholdAt(const Threshold& threshold, int64_t t);

// Returns the output of the classifiers' logits, or none where the confidence is another.
layers::RuleOutput LogitsOf(const CalmOptions& options);

class ConfidenceRule : public layers::ExitRule {
 public:
  ConfidenceRule(Device device, const Problem& problem, const CalmOptions& options);

  absl::Status Setup(const NamedTensors& parameters) override;
  size_t workspace_bytes(int64_t rows, int threads) const override;
  double flops(int64_t layers) const override;
  bool never_leaves() const override { return options_.threshold > 1; }
  absl::Status Decide(const layers::ExitRows& rows, uint8_t* leaves,
                      const Execution& execution) override;
  layers::RuleOutput output() const override { return LogitsOf(options_); }
  absl::Status WriteOutput(int64_t n, const ConstTensorView& state, const TensorView& logits,
                           const Execution& execution) override;
  size_t backward_memory_bytes() const override;
  absl::Status DifferentiateOutput(const OutputGradients& gradients,
                                   const Execution& execution) const override;
  absl::Status AddStateGradient(int64_t n, absl::Span<std::byte> memory, int64_t begin,
                                const TensorView& gradient,
                                const Execution& execution) const override;

 private:
  struct Scratch {
    float* confidences;                     // [rows]
    layers::ExitLogits::Scratch of_logits;  // of softmax
  };
  Scratch LayOut(int64_t rows, Workspace& workspace) const;
  bool has_logits() const { return options_.confidence == Confidence::kSoftmax; }
  void ConfidencesOnCpu(const layers::ExitRows& rows, const Scratch& scratch,
                        const Execution& execution) const;
  float* LayOutBackward(Workspace& workspace) const;  // dz [batch, tokens, N - 1]
  // Sets what a classifier reads, after layer n.
  void SetClassifier(int64_t n, ConfidenceArguments* arguments) const;
  absl::Status DecideOnCuda(const layers::ExitRows& rows, const Scratch& scratch, uint8_t* leaves,
                            const Execution& execution) const;

  Device device_;
  Problem problem_;
  CalmOptions options_;
  layers::ExitLogits logits_;
  Threshold threshold_;
  layers::ExitClassifiers classifiers_;  // after layers 1, ..., N - 1
  std::vector<std::string> names_;       // of their parameters, without .w and .b
};

}  // namespace tfb::calm

#endif  // TFB_ADAPTIVE_CALM_CONFIDENCE_RULE_H_
