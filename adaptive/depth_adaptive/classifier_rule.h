// The rules of depth_adaptive.h on every device.
#ifndef TFB_ADAPTIVE_DEPTH_ADAPTIVE_CLASSIFIER_RULE_H_
#define TFB_ADAPTIVE_DEPTH_ADAPTIVE_CLASSIFIER_RULE_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "adaptive/depth_adaptive/depth_adaptive.h"
#include "core/cuda/device_array.h"
#include "core/layers/exits/exit_classifiers.h"
#include "core/layers/exits/exit_stack.h"
#include "core/workspace.h"

namespace tfb::depth_adaptive {

// Returns the prefix of the classifier's parameters, such as "likelihood.2.geometric.".
std::string ClassifierPrefix(const DepthAdaptiveOptions& options);
// Tells whether the classifier has probabilities of leaving after each layer.
bool HasProbabilities(const DepthAdaptiveOptions& options);
// Returns their output, or none.
layers::RuleOutput ProbabilitiesOf(const DepthAdaptiveOptions& options);

class ClassifierRule : public layers::ExitRule {
 public:
  // Allocates the memory for up to `rows` rows.
  static absl::StatusOr<std::unique_ptr<ClassifierRule>> Create(
      Device device, const Problem& problem, const DepthAdaptiveOptions& options);

  absl::Status Setup(const NamedTensors& parameters) override;
  size_t workspace_bytes(int64_t rows, int threads) const override;
  double flops(int64_t layers) const override;
  bool reads_segments() const override { return Is(Classifier::kSequence); }
  bool never_leaves() const override {
    return Is(Classifier::kFixed) && options_.exit >= options_.layers;
  }
  absl::Status Decide(const layers::ExitRows& rows, uint8_t* leaves,
                      const Execution& execution) override;
  layers::RuleOutput output() const override { return ProbabilitiesOf(options_); }
  absl::Status WriteOutput(int64_t n, const ConstTensorView& state, const TensorView& probabilities,
                           const Execution& execution) override;
  size_t backward_memory_bytes() const override;
  absl::Status DifferentiateOutput(const OutputGradients& gradients,
                                   const Execution& execution) const override;
  absl::Status AddStateGradient(int64_t n, absl::Span<std::byte> memory, int64_t begin,
                                const TensorView& gradient,
                                const Execution& execution) const override;

 private:
  using Classifier = DepthAdaptiveOptions::Classifier;

  ClassifierRule(Device device, const Problem& problem, const DepthAdaptiveOptions& options)
      : device_(device),
        problem_(problem),
        options_(options),
        names_(options),
        classifiers_(device, classes(), problem.model_dim()) {}
  bool Is(Classifier classifier) const { return options_.classifier == classifier; }

  // Computes, after layer 1 and from all rows, the scores and exits of the tokens, or those of the
  // next segment.
  absl::Status Classify(const layers::ExitRows& rows, const Execution& execution);
  void ClassifyOnCpu(const layers::ExitRows& rows, int64_t count, float* scores, int32_t* exits,
                     const Execution& execution) const;
  // Writes the softmax of each token's scores, or 1 for the last layer where they are null.
  absl::Status WriteSoftmax(const float* scores, const TensorView& probabilities,
                            const Execution& execution) const;
  // Parts what is left of the probability, which lies at layer N, between layer n and those above.
  absl::Status WriteGeometric(int64_t n, const ConstTensorView& state,
                              const TensorView& probabilities, const Execution& execution) const;
  absl::Status Fill(const layers::ExitRows& rows, bool leave, uint8_t* leaves,
                    const Execution& execution) const;
  // The backward pass: the classes that have logits, and tokens that share them.
  int64_t classes() const { return options_.layers - (Is(Classifier::kGeometric) ? 1 : 0); }
  int64_t segment() const { return Is(Classifier::kSequence) ? options_.segment : 1; }
  int64_t segments() const { return (problem_.query_tokens + segment() - 1) / segment(); }
  struct Memory {
    float* of_logits;  // [batch, tokens, classes]: z, and then dz
    float* means;      // sequence: [batch, segments, model_dim], what they are of
  };
  Memory LayOut(Workspace& workspace) const;
  absl::Status DifferentiateLogits(const ConstTensorView& of_probabilities, const Memory& memory,
                                   const Execution& execution) const;

  struct Names {
    explicit Names(const DepthAdaptiveOptions& options)
        : w(ClassifierPrefix(options) + "w"), b(ClassifierPrefix(options) + "b") {}
    std::string w, b;
  };

  Device device_;
  Problem problem_;
  DepthAdaptiveOptions options_;
  Names names_;  // of the parameters
  layers::ExitClassifiers classifiers_;
  // Scores and exits of tokens by their places, or of batch rows: the scores are [decisions, N].
  struct Decisions {
    DeviceArray<float> scores;
    DeviceArray<int32_t> exits;
  };
  Decisions here_;           // in this segment
  Decisions next_;           // in the next one
  int64_t known_from_ = -1;  // the position at which next_ takes over
  bool known_ = false;       // whether here_ holds for this segment
};

}  // namespace tfb::depth_adaptive

#endif  // TFB_ADAPTIVE_DEPTH_ADAPTIVE_CLASSIFIER_RULE_H_
