#include "absl/status/status.h"
#include "core/cuda/device_probe.h"

namespace tfb {

absl::StatusOr<CudaMachine> ProbeCudaMachine() {
  return absl::UnimplementedError("no CUDA device: built without the CUDA toolkit");
}

}  // namespace tfb
