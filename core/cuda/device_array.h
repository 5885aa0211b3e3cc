// Arrays of numbers that a layer keeps on its device: parameters, tables, state.
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

// An array in host memory on the CPU, else in the device's memory, aligned to 64 bytes. T is a
// number type. Arrays are movable.
template <class T>
class DeviceArray {
 public:
  DeviceArray() = default;
  // Copies host memory. Returns ResourceExhausted where there is not enough memory, and the errors
  // of CudaRuntime::For.
  static absl::StatusOr<DeviceArray> Create(Device device, const std::vector<T>& values) {
    TFB_ASSIGN_OR_RETURN(DeviceArray array, Allocate(device, static_cast<int64_t>(values.size())));
    if (device == Device::kCpu) {
      std::copy(values.begin(), values.end(), array.mutable_data());
      return array;
    }
    TFB_ASSIGN_OR_RETURN(CudaRuntime * runtime, CudaRuntime::For(device));
    TFB_RETURN_IF_ERROR(runtime->CopyToDevice(array.mutable_data(), values.data(), array.bytes()));
    // After this, a layer's stream need not wait for the stream of the copy.
    TFB_RETURN_IF_ERROR(runtime->Synchronize());
    return array;
  }
  // Allocates an array with unspecified contents.
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
  // Returns the pointer on the device, or null where the array is empty.
  T* mutable_data() const {
    return device_ == Device::kCpu ? static_cast<T*>(on_host_.get()) : on_device_.template As<T>();
  }
  const T* data() const { return mutable_data(); }

  // Copies the whole array to host memory, after the work that was enqueued before on any stream.
  absl::Status Read(T* to) const {
    if (device_ == Device::kCpu) {
      std::copy_n(data(), size_, to);
      return absl::OkStatus();
    }
    TFB_ASSIGN_OR_RETURN(CudaRuntime * runtime, CudaRuntime::For(device_));
    TFB_RETURN_IF_ERROR(runtime->SynchronizeAll());
    return runtime->CopyToHost(to, data(), bytes());
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

// Copies the elements of a view in host memory, of any floating dtype and strides, last dimension
// fastest.
inline absl::StatusOr<DeviceArray<float>> CopyFloats(Device device, const ConstTensorView& view) {
  std::vector<float> values(static_cast<size_t>(view.num_elements()));
  CopyElements(view, TensorView(values.data(), DType::kF32, view.shape()));
  return DeviceArray<float>::Create(device, values);
}

// Returns a copy in host memory of a tensor in device memory, made after the work that was enqueued
// on the stream before.
inline absl::StatusOr<Tensor> CopyToHost(Device device, ConstTensorView view,
                                         void* stream = nullptr) {
  TFB_ASSIGN_OR_RETURN(Tensor copy, Tensor::Allocate(view.dtype, view.shape()));
  if (view.num_elements() == 0) return copy;
  // The bytes that the view spans, gaps between its elements included.
  std::vector<std::byte> memory;
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
