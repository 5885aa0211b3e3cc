// Numbers that a layer keeps where it runs: parameters, tables, state.
#ifndef TFB_CORE_CUDA_DEVICE_ARRAY_H_
#define TFB_CORE_CUDA_DEVICE_ARRAY_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "core/cuda/runtime.h"
#include "core/problem.h"
#include "core/status.h"
#include "core/tensor.h"

namespace tfb {

// In host memory on the CPU, else in the device's, aligned to 64 bytes. T is a number. Movable.
template <class T>
class DeviceArray {
 public:
  DeviceArray() = default;
  // A copy of host memory. ResourceExhausted where there is not so much memory; other errors are
  // those of CudaRuntime::For.
  static absl::StatusOr<DeviceArray> Create(Device device, const std::vector<T>& values) {
    TFB_ASSIGN_OR_RETURN(DeviceArray array, Allocate(device, static_cast<int64_t>(values.size())));
    if (device == Device::kCpu) {
      std::copy(values.begin(), values.end(), array.mutable_data());
      return array;
    }
    TFB_ASSIGN_OR_RETURN(CudaRuntime * runtime, CudaRuntime::For(device));
    TFB_RETURN_IF_ERROR(runtime->CopyToDevice(array.mutable_data(), values.data(), array.bytes()));
    // A layer's stream need not wait for the stream of this copy.
    TFB_RETURN_IF_ERROR(runtime->Synchronize());
    return array;
  }
  // Contents are unspecified.
  static absl::StatusOr<DeviceArray> Allocate(Device device, int64_t size) {
    DeviceArray array;
    array.device_ = device;
    array.size_ = size;
    if (device != Device::kCpu) {
      TFB_ASSIGN_OR_RETURN(CudaRuntime * runtime, CudaRuntime::For(device));
      TFB_ASSIGN_OR_RETURN(array.on_device_, runtime->Allocate(array.bytes()));
    } else if (size > 0) {
      array.on_host_.reset(std::aligned_alloc(
          kAlignment, (array.bytes() + kAlignment - 1) / kAlignment * kAlignment));
      if (array.on_host_ == nullptr) {
        return absl::ResourceExhaustedError(absl::StrCat("no ", array.bytes(), " bytes of memory"));
      }
    }
    return array;
  }

  Device device() const { return device_; }
  int64_t size() const { return size_; }
  size_t bytes() const { return static_cast<size_t>(size_) * sizeof(T); }
  // On the device. Null where there are no numbers.
  T* mutable_data() const {
    return device_ == Device::kCpu ? static_cast<T*>(on_host_.get()) : on_device_.template As<T>();
  }
  const T* data() const { return mutable_data(); }

  // To host memory, all of them, when what was enqueued on the stream is done.
  absl::Status Read(T* to, void* stream = nullptr) const {
    if (device_ == Device::kCpu) {
      std::copy_n(data(), size_, to);
      return absl::OkStatus();
    }
    TFB_ASSIGN_OR_RETURN(CudaRuntime * runtime, CudaRuntime::For(device_));
    return runtime->CopyToHost(to, data(), bytes(), stream);
  }

 private:
  static constexpr size_t kAlignment = 64;
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };

  Device device_ = Device::kCpu;
  int64_t size_ = 0;
  std::unique_ptr<void, Free> on_host_;
  DeviceBuffer on_device_;
};

// The elements of a view in host memory, of any floating dtype and strides, last dimension fastest.
inline absl::StatusOr<DeviceArray<float>> CopyFloats(Device device, const ConstTensorView& view) {
  std::vector<float> values(static_cast<size_t>(view.num_elements()));
  CopyElements(view, TensorView(values.data(), DType::kF32, view.shape()));
  return DeviceArray<float>::Create(device, values);
}

// A copy in host memory of a tensor that lies in the device's, when what was enqueued on the stream is
// done.
inline absl::StatusOr<Tensor> CopyToHost(Device device, ConstTensorView view,
                                         void* stream = nullptr) {
  TFB_ASSIGN_OR_RETURN(Tensor copy, Tensor::Allocate(view.dtype, view.shape()));
  if (view.num_elements() == 0) return copy;
  std::vector<std::byte> memory;  // what the view spans, gaps between its elements included
  if (device != Device::kCpu) {
    int64_t elements = 1;
    for (int axis = 0; axis < view.rank; ++axis) {
      elements += (view.dim(axis) - 1) * view.stride(axis);
    }
    memory.resize(static_cast<size_t>(elements * SizeOf(view.dtype)));
    TFB_ASSIGN_OR_RETURN(CudaRuntime * runtime, CudaRuntime::For(device));
    TFB_RETURN_IF_ERROR(runtime->CopyToHost(memory.data(), view.data, memory.size(), stream));
    view.data = memory.data();
  }
  CopyElements(view, copy.view());
  return copy;
}

}  // namespace tfb

#endif  // TFB_CORE_CUDA_DEVICE_ARRAY_H_
