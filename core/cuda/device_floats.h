// Floats that a layer keeps where it runs: parameters, tables.
#ifndef TFB_CORE_CUDA_DEVICE_FLOATS_H_
#define TFB_CORE_CUDA_DEVICE_FLOATS_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "core/cuda/runtime.h"
#include "core/problem.h"
#include "core/tensor.h"

namespace tfb {

// Fixed in number. In host memory where the device is the CPU, so that one class serves the code
// that is the same for all devices. Movable.
class DeviceFloats {
 public:
  DeviceFloats() = default;
  // Copies of `values`, from host memory. Errors: those of CudaRuntime::For and Allocate.
  static absl::StatusOr<DeviceFloats> Copy(Device device, absl::Span<const float> values);
  // The elements of a view of any floating dtype and strides in host memory, last dimension fastest.
  static absl::StatusOr<DeviceFloats> Copy(Device device, const ConstTensorView& view);
  // With unspecified contents.
  static absl::StatusOr<DeviceFloats> Allocate(Device device, int64_t count);

  Device device() const { return device_; }
  int64_t size() const { return size_; }
  size_t bytes() const { return static_cast<size_t>(size_) * sizeof(float); }
  // On the device; aligned to 64 bytes. Null where there are none.
  float* data() const { return data_; }
  // Of the CPU's.
  absl::Span<float> span() const { return absl::MakeSpan(data_, size_); }

  // To host memory, `size()` floats. Waits for what was enqueued on the stream.
  absl::Status Read(float* to, void* stream = nullptr) const;

 private:
  Device device_ = Device::kCpu;
  int64_t size_ = 0;
  float* data_ = nullptr;
  Tensor host_;          // of the CPU
  DeviceBuffer buffer_;  // of the others
};

}  // namespace tfb

#endif  // TFB_CORE_CUDA_DEVICE_FLOATS_H_
