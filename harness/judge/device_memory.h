// Memory that a layer of a device reads and writes: the host's for the CPU, the device's for a GPU
// and for the simulator of GPUs. Code that uses it runs on all three.
#ifndef TFB_HARNESS_JUDGE_DEVICE_MEMORY_H_
#define TFB_HARNESS_JUDGE_DEVICE_MEMORY_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "core/cuda/runtime.h"
#include "core/problem.h"
#include "core/technique.h"
#include "core/tensor.h"

namespace tfb {

// Returns null for the CPU, and Unavailable or Unimplemented, worded "no CUDA device: <reason>",
// where there is no such device.
absl::StatusOr<CudaRuntime*> RuntimeOf(Device device);

// Waits for the work that layers have enqueued on the stream. Does nothing where `runtime` is null:
// layers on the CPU return when they are done.
absl::Status Synchronize(CudaRuntime* runtime, void* stream = nullptr);

// Returns OK where layers can run on the device. Returns Unavailable or Unimplemented where there
// is none, as RuntimeOf does, and Unavailable where it is lost to this process: after a kernel has
// failed on a GPU, all later calls fail as well, in this process and no other.
absl::Status DeviceStatus(Device device);

// Bytes in the memory of a device, aligned to 64. Its contents are unspecified; the simulator
// reports a kernel that reads them before something wrote them.
class DeviceMemory {
 public:
  // Returns ResourceExhausted where there is not enough memory.
  static absl::StatusOr<DeviceMemory> Allocate(Device device, size_t bytes);

  absl::Span<std::byte> bytes() const { return bytes_; }

 private:
  Tensor host_;  // of the CPU
  DeviceBuffer device_;
  absl::Span<std::byte> bytes_;
};

// Contiguous tensors by name in the memory of a device: the inputs and outputs of a layer.
class DeviceTensors {
 public:
  // Refers, on the CPU, to the given tensors, which must outlive it; elsewhere it copies them.
  static absl::StatusOr<DeviceTensors> Of(Device device, const Inputs& host);
  // Allocates a tensor for each spec, and for optional ones on request. Contents are as in
  // DeviceMemory.
  static absl::StatusOr<DeviceTensors> Allocate(Device device, const std::vector<TensorSpec>& specs,
                                                bool optional_too);

  const Inputs& inputs() const { return inputs_; }
  const Outputs& outputs() const { return outputs_; }  // empty after Of
  // Returns copies of the tensors in the memory of the host. Waits for the device's work on the stream.
  absl::StatusOr<NamedTensors> Download(void* stream = nullptr) const;

 private:
  CudaRuntime* runtime_ = nullptr;
  std::map<std::string, DeviceMemory> memory_;
  Inputs inputs_;
  Outputs outputs_;
};

// The contents of memory that a kernel may access.
enum class Contents {
  kWritten,
  kUnwritten,  // unwritten: the simulator reports a kernel that reads it before it was written
};

// Device memory in which kernels may access only a part: while the fence is up, the simulator
// reports accesses to the rest. On a GPU there is no fence. Copy and fill the whole while the fence
// is down, as it is at first.
class FencedMemory {
 public:
  static absl::StatusOr<FencedMemory> Allocate(CudaRuntime* runtime, size_t bytes,
                                               size_t part_begin, size_t part_bytes);
  FencedMemory() = default;
  FencedMemory(FencedMemory&& other) noexcept { *this = std::move(other); }
  FencedMemory& operator=(FencedMemory&& other) noexcept;
  ~FencedMemory() { TakeDown(); }

  absl::Span<std::byte> whole() const { return {buffer_.As<std::byte>(), buffer_.bytes()}; }
  absl::Span<std::byte> part() const { return part_; }
  void PutUp(Contents contents);  // of the part
  void TakeDown();

 private:
  CudaRuntime* runtime_ = nullptr;
  DeviceBuffer buffer_;
  absl::Span<std::byte> part_;
  bool is_up_ = false;
};

// Device memory that mirrors host memory byte by byte, including the bytes around and between the
// tensors there. On the CPU it is that memory, and nothing is copied.
class DeviceTwin {
 public:
  // Mirrors all of `whole` on the device; kernels may access only `inside`, a part of it. The
  // simulator reports accesses to the rest. The host's memory must outlive the twin.
  static absl::StatusOr<DeviceTwin> Make(Device device, absl::Span<std::byte> whole,
                                         absl::Span<std::byte> inside);
  // Copies all of it from the host to the device.
  absl::Status Upload(Contents contents);
  // Copies all of it from the device to the host. Waits for the device.
  absl::Status Download();

  // Returns the device's address of an address in `whole`, or the device's view of a view of it.
  void* On(const void* host) const {
    return reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(host) + offset_);
  }
  TensorView On(TensorView view) const {
    view.data = On(view.data);
    return view;
  }

 private:
  CudaRuntime* runtime_ = nullptr;  // null on the CPU
  FencedMemory memory_;
  absl::Span<std::byte> whole_;
  uintptr_t offset_ = 0;  // from the host's addresses to the device's, modulo 2^64
};

}  // namespace tfb

#endif  // TFB_HARNESS_JUDGE_DEVICE_MEMORY_H_
