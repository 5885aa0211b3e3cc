// The mean of checkpoints, one read after the other: memory is that of two and of their sum.
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
  // `name` stands for the checkpoint in messages. InvalidArgument where its tensors have other
  // names, shapes or dtypes than the first checkpoint's: nothing is added.
  absl::Status Add(SafetensorsFile checkpoint, const std::string& name);
  // Tensors of integers and metadata are the last checkpoint's. FailedPrecondition: there was none.
  absl::StatusOr<SafetensorsFile> Finish() &&;

 private:
  absl::Status Check(const SafetensorsFile& checkpoint, const std::string& name) const;

  int64_t count_ = 0;
  std::string first_;  // its name
  NamedTensors sums_;  // f64, of floating tensors
  SafetensorsFile last_;
};

}  // namespace tfb

#endif  // TFB_TOOLS_CHECKPOINT_AVERAGE_H_
