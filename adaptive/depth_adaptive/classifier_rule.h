// The rules of depth_adaptive.h on every device.
#ifndef TFB_ADAPTIVE_DEPTH_ADAPTIVE_CLASSIFIER_RULE_H_
#define TFB_ADAPTIVE_DEPTH_ADAPTIVE_CLASSIFIER_RULE_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "adaptive/depth_adaptive/depth_adaptive.h"
#include "adaptive/depth_adaptive/exit_stack.h"
#include "core/cuda/device_array.h"

namespace tfb::depth_adaptive {

// Returns the prefix of the classifier's parameters, such as "likelihood.2.geometric.".
std::string ClassifierPrefix(const DepthAdaptiveOptions& options);

class ClassifierRule : public ExitRule {
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
  absl::Status Decide(const ExitRows& rows, uint8_t* leaves, const Execution& execution) override;

 private:
  using Classifier = DepthAdaptiveOptions::Classifier;

  ClassifierRule(Device device, const Problem& problem, const DepthAdaptiveOptions& options)
      : device_(device), problem_(problem), options_(options) {}
  bool Is(Classifier classifier) const { return options_.classifier == classifier; }

  // Computes, after layer 1 and from all rows, the exits of the tokens, or those of the next
  // segment.
  absl::Status Classify(const ExitRows& rows, const Execution& execution);
  void ClassifyOnCpu(const ExitRows& rows, int64_t count, int32_t* exits,
                     const Execution& execution) const;
  void GeometricOnCpu(const ExitRows& rows, uint8_t* leaves, const Execution& execution) const;
  absl::Status Fill(const ExitRows& rows, bool leave, uint8_t* leaves,
                    const Execution& execution) const;

  Device device_;
  Problem problem_;
  DepthAdaptiveOptions options_;
  DeviceArray<float> weights_;  // [classes, model_dim]
  DeviceArray<float> bias_;     // [classes]
  DeviceArray<int32_t> exits_;  // exits of tokens by their places, or of batch rows in this segment
  DeviceArray<int32_t> next_;   // exits of batch rows in the next segment
  int64_t known_from_ = -1;     // the position at which next_ takes over
  bool known_ = false;          // whether exits_ hold for this segment
};

}  // namespace tfb::depth_adaptive

#endif  // TFB_ADAPTIVE_DEPTH_ADAPTIVE_CLASSIFIER_RULE_H_
