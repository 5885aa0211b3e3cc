#include "core/cuda/device_floats.h"

#include <algorithm>

#include "core/status.h"

namespace tfb {

absl::StatusOr<DeviceFloats> DeviceFloats::Allocate(Device device, int64_t count) {
  DeviceFloats floats;
  floats.device_ = device;
  floats.size_ = count;
  if (count == 0) return floats;
  if (device == Device::kCpu) {
    TFB_ASSIGN_OR_RETURN(floats.host_, Tensor::Allocate(DType::kF32, {count}));
    floats.data_ = floats.host_.span<float>().data();
  } else {
    TFB_ASSIGN_OR_RETURN(CudaRuntime * runtime, CudaRuntime::For(device));
    TFB_ASSIGN_OR_RETURN(floats.buffer_, runtime->Allocate(floats.bytes()));
    floats.data_ = floats.buffer_.As<float>();
  }
  return floats;
}

absl::StatusOr<DeviceFloats> DeviceFloats::Copy(Device device, absl::Span<const float> values) {
  TFB_ASSIGN_OR_RETURN(DeviceFloats floats, Allocate(device, static_cast<int64_t>(values.size())));
  if (device == Device::kCpu) {
    std::copy(values.begin(), values.end(), floats.data_);
  } else {
    TFB_ASSIGN_OR_RETURN(CudaRuntime * runtime, CudaRuntime::For(device));
    TFB_RETURN_IF_ERROR(runtime->CopyToDevice(floats.data_, values.data(), floats.bytes()));
    // The copy is on a stream of its own; the layer's may not wait for that one.
    TFB_RETURN_IF_ERROR(runtime->Synchronize());
  }
  return floats;
}

absl::StatusOr<DeviceFloats> DeviceFloats::Copy(Device device, const ConstTensorView& view) {
  TFB_ASSIGN_OR_RETURN(Tensor values, Tensor::Allocate(DType::kF32, view.shape()));
  CopyElements(view, values.view());
  return Copy(device, values.span<float>());
}

absl::Status DeviceFloats::Read(float* to, void* stream) const {
  if (device_ == Device::kCpu) {
    std::copy_n(data_, size_, to);
    return absl::OkStatus();
  }
  TFB_ASSIGN_OR_RETURN(CudaRuntime * runtime, CudaRuntime::For(device_));
  return runtime->CopyToHost(to, data_, bytes(), stream);
}

}  // namespace tfb
