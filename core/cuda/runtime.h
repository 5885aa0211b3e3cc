// The interface to the GPU and to the simulator of core/cuda/simulator: memory, streams and errors
// are handled only here.
#ifndef TFB_CORE_CUDA_RUNTIME_H_
#define TFB_CORE_CUDA_RUNTIME_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "absl/functional/function_ref.h"
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

// Gives what a runtime has made back to it.
struct DestroyHandle {
  CudaRuntime* runtime = nullptr;
  void (*destroy)(CudaRuntime* runtime, void* handle) = nullptr;
  void operator()(void* handle) const { destroy(runtime, handle); }
};
using DeviceHandle = std::unique_ptr<void, DestroyHandle>;

// A point in the work of a stream, as a CUDA event marks it. It is movable.
class DeviceEvent {
 public:
  static absl::StatusOr<DeviceEvent> Make(CudaRuntime* runtime);

  // Marks the point at which all work that was enqueued before is done.
  absl::Status Record(void* stream = nullptr);
  // Returns the seconds between two events, of which this one was recorded later. Waits for both.
  absl::StatusOr<double> SecondsSince(const DeviceEvent& earlier) const;

 private:
  DeviceHandle event_;
};

// A stream that does not wait for the default stream, nor that one for it: cudaStreamNonBlocking. It
// is movable. Its work is done when it is destroyed.
class DeviceStream {
 public:
  static absl::StatusOr<DeviceStream> Make(CudaRuntime* runtime);

  void* get() const { return stream_.get(); }  // a cudaStream_t

 private:
  DeviceHandle stream_;
};

// Device memory and its ownership, aligned to 256 bytes. Buffers are movable.
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

// Work that was recorded once, and is enqueued again as a whole, for less of the host's time than
// its calls take: a CUDA graph. It is movable, and reads and writes the addresses that the recorded
// calls were given.
class DeviceGraph {
 public:
  // Records what `enqueue` enqueues on the stream that it is given. Returns its error, or Internal
  // where it does what no graph can: waits, allocates, or enqueues on another stream.
  static absl::StatusOr<DeviceGraph> Capture(CudaRuntime* runtime,
                                             absl::FunctionRef<absl::Status(void* stream)> enqueue);

  absl::Status Launch(void* stream = nullptr) const;

 private:
  DeviceHandle graph_;
};

// The runtime of one device. It is thread-safe.
class CudaRuntime {
 public:
  // Returns the runtime of Device::kCuda, which is the first GPU that CUDA_VISIBLE_DEVICES lets
  // through, or of Device::kSimulator. It lives as long as the program. Returns Unavailable or
  // Unimplemented, worded "no CUDA device: <reason>", where there is no GPU, and InvalidArgument
  // for the CPU.
  static absl::StatusOr<CudaRuntime*> For(Device device);

  Device device() const { return target_ == CudaTarget::kGpu ? Device::kCuda : Device::kSimulator; }
  CudaTarget target() const { return target_; }
  // The simulator calls itself "host simulator"; it has 4 multiprocessors, so that code that
  // depends on their number can be tested on small problems, and the compute capability and shared
  // memory of the GPU that it stands for. For returns another runtime where that has changed.
  const CudaDevice& properties() const { return properties_; }

  // Allocates memory with unspecified contents. Returns ResourceExhausted where there is not enough
  // memory. 0 bytes give a buffer without memory.
  absl::StatusOr<DeviceBuffer> Allocate(size_t bytes);
  // Allocates memory and copies from the host to it. The copy is done when it returns: a stream that
  // does not wait for the default stream may read it.
  absl::StatusOr<DeviceBuffer> Upload(const void* from, size_t bytes);

  // Enqueue copies on the stream; copies from and to pageable host memory return when they are
  // done.
  absl::Status CopyToDevice(void* to, const void* from, size_t bytes, void* stream = nullptr);
  absl::Status CopyToHost(void* to, const void* from, size_t bytes, void* stream = nullptr);
  absl::Status CopyWithinDevice(void* to, const void* from, size_t bytes, void* stream = nullptr);
  absl::Status Fill(void* memory, int byte, size_t bytes, void* stream = nullptr);
  // Waits for all enqueued work. Returns Internal where a kernel failed meanwhile. On a GPU a
  // failed kernel destroys the process's context: every later call fails as well.
  absl::Status Synchronize(void* stream = nullptr);
  // The same of all streams.
  absl::Status SynchronizeAll();

  // The device memory that this program has allocated through the runtime, now and at most since
  // the last ResetPeak.
  int64_t allocated_bytes() const { return allocated_; }
  int64_t peak_bytes() const { return peak_; }
  void ResetPeak() { peak_ = allocated_.load(); }
  // The numbers of calls through the runtime so far that allocate, and that wait for the device: a
  // layer's Run must not make such calls.
  int64_t allocations() const { return allocations_; }
  int64_t waits() const { return waits_; }

  const CudaApi& api() const { return KernelsOn<CudaApi>(target_); }

 private:
  friend class DeviceBuffer;
  static absl::StatusOr<CudaRuntime*> ForSimulator();
  CudaRuntime(CudaTarget target, CudaDevice properties)
      : target_(target), properties_(std::move(properties)) {}

  CudaTarget target_;
  CudaDevice properties_;
  std::atomic<int64_t> allocated_{0};
  std::atomic<int64_t> peak_{0};
  std::atomic<int64_t> allocations_{0};
  std::atomic<int64_t> waits_{0};
};

// Converts a launcher's result to a status: Internal with its text.
absl::Status ToStatus(const char* launch_error);

// Returns the view for kernels. It is not right-aligned to four dimensions: dimension n of the view
// is dimension n here. An empty view gives null data.
DeviceView ToDeviceView(const ConstTensorView& view);

}  // namespace tfb

#endif  // TFB_CORE_CUDA_RUNTIME_H_
