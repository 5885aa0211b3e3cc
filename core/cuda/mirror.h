// Copies of host tensors in device memory, for tests and for programs that run a layer once.
#ifndef TFB_CORE_CUDA_MIRROR_H_
#define TFB_CORE_CUDA_MIRROR_H_

#include <cstddef>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/cuda/runtime.h"
#include "core/tensor.h"

namespace tfb {

class DeviceMirror {
 public:
  explicit DeviceMirror(CudaRuntime* runtime) : runtime_(runtime) {}

  // Copies the host memory that the view spans, gaps between its elements included, and returns a
  // view of the copy with the same strides. An empty view gives an empty one.
  absl::StatusOr<ConstTensorView> Copy(const ConstTensorView& host);
  // Does the same for a view that is written; CopyBack copies all of its memory to the host again.
  absl::StatusOr<TensorView> CopyForWriting(const TensorView& host);
  absl::Status CopyBack();

 private:
  struct Span {
    const std::byte* host;
    size_t bytes;
    DeviceBuffer memory;
    bool written;
  };
  absl::StatusOr<const void*> Add(const ConstTensorView& host, bool written);

  CudaRuntime* runtime_;
  std::vector<Span> spans_;
};

}  // namespace tfb

#endif  // TFB_CORE_CUDA_MIRROR_H_
