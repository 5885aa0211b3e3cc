#include "core/cuda/testing.h"

#include <cstring>

namespace tfb {

std::string WhyNoDevice(Device device) {
  if (device == Device::kCpu) return "";
  const absl::Status status = CudaRuntime::For(device).status();
  return std::string(status.message());
}

DeviceTensor::DeviceTensor(Device device, const Tensor& tensor)
    : device_(device), tensor_(&tensor) {
  if (device == Device::kCpu) return;
  CudaRuntime* runtime = CudaRuntime::For(device).value();
  buffer_ = runtime->Upload(tensor.raw(), tensor.bytes()).value();
}

TensorView DeviceTensor::On(const ConstTensorView& part) const {
  TensorView view;
  static_cast<ConstTensorView&>(view) = part;
  if (device_ == Device::kCpu || buffer_.data() == nullptr) return view;
  const std::ptrdiff_t offset =
      static_cast<const char*>(part.data) - static_cast<const char*>(tensor_->raw());
  view.data = buffer_.As<char>() + offset;
  return view;
}

Tensor DeviceTensor::Read() const {
  Tensor copy = tensor_->Clone();
  if (device_ == Device::kCpu) return copy;
  CudaRuntime* runtime = CudaRuntime::For(device_).value();
  const absl::Status status = runtime->CopyToHost(copy.raw(), buffer_.data(), copy.bytes());
  EXPECT_TRUE(status.ok()) << status;
  return copy;
}

}  // namespace tfb
