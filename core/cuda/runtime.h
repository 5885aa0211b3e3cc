// Where CUDA code runs, and the one place for its memory, streams and errors: the GPU, or the
// simulator of core/cuda/simulator, behind one interface.
#ifndef TFB_CORE_CUDA_RUNTIME_H_
#define TFB_CORE_CUDA_RUNTIME_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/cuda/cuda_api.h"
#include "core/cuda/device_probe.h"
#include "core/cuda/device_view.h"
#include "core/cuda/kernel_table.h"
#include "core/problem.h"
#include "core/tensor.h"

namespace tfb {

class CudaRuntime;

// A moment in the work of a stream. Movable.
class DeviceEvent {
 public:
  static absl::StatusOr<DeviceEvent> Make(CudaRuntime* runtime);
  DeviceEvent() = default;
  DeviceEvent(DeviceEvent&& other) noexcept { *this = std::move(other); }
  DeviceEvent& operator=(DeviceEvent&& other) noexcept;
  ~DeviceEvent() { Release(); }

  // The moment when what was enqueued before is done.
  absl::Status Record(void* stream = nullptr);
  // Waits for both events, of which this one was recorded later.
  absl::StatusOr<double> SecondsSince(const DeviceEvent& earlier) const;

 private:
  void Release();

  CudaRuntime* runtime_ = nullptr;
  void* event_ = nullptr;
};

// Device memory, owned, aligned to 256 bytes. Movable.
class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  DeviceBuffer(DeviceBuffer&& other) noexcept { *this = std::move(other); }
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept;
  ~DeviceBuffer() { Release(); }

  void* data() const { return data_; }
  template <class T>
  T* As() const {
    return static_cast<T*>(data_);
  }
  size_t bytes() const { return bytes_; }

 private:
  friend class CudaRuntime;
  void Release();

  CudaRuntime* runtime_ = nullptr;
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

// Thread-safe.
class CudaRuntime {
 public:
  // Of Device::kCuda, the first GPU that CUDA_VISIBLE_DEVICES lets through, or Device::kSimulator.
  // Unavailable or Unimplemented, worded "no CUDA device: <reason>", where there is none.
  // InvalidArgument for the CPU. The runtime lives as long as the program.
  static absl::StatusOr<CudaRuntime*> For(Device device);

  Device device() const { return target_ == CudaTarget::kGpu ? Device::kCuda : Device::kSimulator; }
  CudaTarget target() const { return target_; }
  // The simulator calls itself "host simulator"; it has 4 multiprocessors, so that what depends on
  // their number can be tested on small problems, and shared memory as sm_90 has it.
  const CudaDevice& properties() const { return properties_; }

  // ResourceExhausted where there is not so much memory. Contents are unspecified. 0 bytes give a
  // buffer without memory.
  absl::StatusOr<DeviceBuffer> Allocate(size_t bytes);
  // Allocates, and copies from the host.
  absl::StatusOr<DeviceBuffer> Upload(const void* from, size_t bytes);

  // Enqueued on the stream; from and to pageable host memory they return when they are done.
  absl::Status CopyToDevice(void* to, const void* from, size_t bytes, void* stream = nullptr);
  absl::Status CopyToHost(void* to, const void* from, size_t bytes, void* stream = nullptr);
  absl::Status CopyWithinDevice(void* to, const void* from, size_t bytes, void* stream = nullptr);
  absl::Status Fill(void* memory, int byte, size_t bytes, void* stream = nullptr);
  // Waits for what was enqueued. Internal where a kernel failed meanwhile.
  // On a GPU a failed kernel takes the process's context along: every later call fails as well.
  absl::Status Synchronize(void* stream = nullptr);

  // Device memory that this program has allocated through the runtime, now and at most since the
  // last ResetPeak.
  int64_t allocated_bytes() const { return allocated_; }
  int64_t peak_bytes() const { return peak_; }
  void ResetPeak() { peak_ = allocated_.load(); }
  // Calls through the runtime so far that allocate, and that wait for the device: what a layer's Run
  // must not make.
  int64_t allocations() const { return allocations_; }
  int64_t waits() const { return waits_; }

  const CudaApi& api() const { return KernelsOn<CudaApi>(target_); }

 private:
  friend class DeviceBuffer;
  CudaRuntime(CudaTarget target, CudaDevice properties)
      : target_(target), properties_(std::move(properties)) {}

  CudaTarget target_;
  CudaDevice properties_;
  std::atomic<int64_t> allocated_{0};
  std::atomic<int64_t> peak_{0};
  std::atomic<int64_t> allocations_{0};
  std::atomic<int64_t> waits_{0};
};

// What a launcher returned as a status: Internal with its words.
absl::Status ToStatus(const char* launch_error);

// The view for kernels: right-aligned to four dimensions it is not; dimension n of the view is
// dimension n here. An empty view gives null data.
DeviceView ToDeviceView(const ConstTensorView& view);

}  // namespace tfb

#endif  // TFB_CORE_CUDA_RUNTIME_H_
