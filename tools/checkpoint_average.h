// Computes the mean of checkpoints that are read one after the other, in the memory of two
// checkpoints and of their sum.
#ifndef TFB_TOOLS_CHECKPOINT_AVERAGE_H_
#define TFB_TOOLS_CHECKPOINT_AVERAGE_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/safetensors.h"
#include "core/tensor.h"

namespace tfb {

// theta = 1 / m sum_k theta_k, in float64, rounded once to each tensor's dtype.
class CheckpointAverage {
 public:
  // Adds a checkpoint, which messages call `name`. Returns InvalidArgument, and adds nothing, where
  // its tensors have other names, shapes or dtypes than the first checkpoint's.
  absl::Status Add(SafetensorsFile checkpoint, const std::string& name);
  // Returns the mean; integer tensors and metadata are the last checkpoint's. Returns
  // FailedPrecondition where there was no checkpoint.
  absl::StatusOr<SafetensorsFile> Finish() &&;

 private:
  absl::Status Check(const SafetensorsFile& checkpoint, const std::string& name) const;

  int64_t count_ = 0;
  std::string first_;  // name of the first checkpoint
  NamedTensors sums_;  // f64, of floating tensors
  SafetensorsFile last_;
};

}  // namespace tfb

#endif  // TFB_TOOLS_CHECKPOINT_AVERAGE_H_
