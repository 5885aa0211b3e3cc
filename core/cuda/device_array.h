// Numbers that the kernels of a layer's device read, made at Setup.
#ifndef TFB_CORE_CUDA_DEVICE_ARRAY_H_
#define TFB_CORE_CUDA_DEVICE_ARRAY_H_

#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "core/cuda/runtime.h"
#include "core/problem.h"
#include "core/status.h"

namespace tfb {

// In host memory on the CPU, else a copy in the device's.
template <class T>
class DeviceArray {
 public:
  DeviceArray() = default;
  static absl::StatusOr<DeviceArray> Create(Device device, std::vector<T> values) {
    DeviceArray array;
    if (device == Device::kCpu) {
      array.host_ = std::move(values);
      return array;
    }
    TFB_ASSIGN_OR_RETURN(CudaRuntime * runtime, CudaRuntime::For(device));
    TFB_ASSIGN_OR_RETURN(array.device_, runtime->Upload(values.data(), values.size() * sizeof(T)));
    return array;
  }

  const T* data() const { return host_.empty() ? device_.template As<T>() : host_.data(); }

 private:
  std::vector<T> host_;
  DeviceBuffer device_;
};

}  // namespace tfb

#endif  // TFB_CORE_CUDA_DEVICE_ARRAY_H_
