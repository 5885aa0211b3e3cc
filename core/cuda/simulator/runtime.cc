// Implements the host half of cuda_runtime.h: memory, events, errors.
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "core/cuda/simulator/cuda_runtime.h"
#include "core/cuda/simulator/machine.h"
#include "core/cuda/simulator/runtime_error.h"
#include "core/cuda/simulator/streams.h"

namespace cuda_simulator {
namespace {

thread_local cudaError_t last_error = cudaSuccess;
thread_local std::string launch_message;

// The gap after every buffer, so that an overrun does not reach the next one.
constexpr size_t kGapBytes = 4096;

}  // namespace

cudaError_t SetLastError(cudaError_t error) { return last_error = error; }
void SetLaunchMessage(std::string message) { launch_message = std::move(message); }

cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }

const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "no error";
    case cudaErrorInvalidValue:
      return "simulator: a copy or fill leaves its buffer, or memory is freed that is none";
    case cudaErrorMemoryAllocation:
      return "simulator: out of memory";
    case cudaErrorStreamCaptureUnsupported:
      return "simulator: a call that waits, allocates or copies from or to the host, in a capture";
    case cudaErrorStreamCaptureInvalidated:
      return "simulator: an earlier call made the capture invalid";
    case cudaErrorStreamCaptureImplicit:
      return "simulator: work on another stream than the one that is captured";
    default:
      return launch_message.c_str();
  }
}

namespace {

// Returns cudaSuccess, or the error of an earlier kernel.
cudaError_t Earlier(const Machine& machine) {
  if (machine.failure.empty()) return cudaSuccess;
  SetLaunchMessage(machine.failure);
  return SetLastError(cudaErrorLaunchFailure);
}

cudaError_t EarlierOfAll() {
  Machine& machine = TheMachine();
  std::lock_guard<std::mutex> lock(machine.mutex);
  return Earlier(machine);
}

}  // namespace

cudaError_t cudaDeviceSynchronize() {
  if (const cudaError_t refused = RefuseWhileCapturing(); refused != cudaSuccess) return refused;
  const cudaError_t error = FinishAll();
  return error != cudaSuccess ? error : EarlierOfAll();
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  if (const cudaError_t refused = RefuseWhileCapturing(); refused != cudaSuccess) return refused;
  const cudaError_t error = Finish(stream);
  return error != cudaSuccess ? error : EarlierOfAll();
}
// The event's stream may have been destroyed.
cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaDeviceSynchronize(); }

cudaError_t cudaMalloc(void** memory, size_t bytes) {
  constexpr size_t kAlignment = 256;
  *memory = nullptr;
  if (const cudaError_t refused = RefuseWhileCapturing(); refused != cudaSuccess) return refused;
  if (const cudaError_t error = EarlierOfAll(); error != cudaSuccess) return error;
  if (bytes > SIZE_MAX - 2 * kGapBytes) return SetLastError(cudaErrorMemoryAllocation);
  const size_t padded = (bytes + kGapBytes + kAlignment - 1) / kAlignment * kAlignment;
  *memory = std::aligned_alloc(kAlignment, padded);
  if (*memory == nullptr) return SetLastError(cudaErrorMemoryAllocation);
  std::memset(*memory, 0xff, bytes);  // not zero, as on a GPU; as floats the bytes are NaN
  RegisterBuffer(*memory, bytes, /*written=*/false);
  return cudaSuccess;
}

cudaError_t cudaFree(void* memory) {
  if (memory == nullptr) return cudaSuccess;
  (void)FinishAll();  // its error is that of a later call that waits
  {
    Machine& machine = TheMachine();
    std::lock_guard<std::mutex> lock(machine.mutex);
    if (!machine.checker.device_memory.Remove(reinterpret_cast<uintptr_t>(memory))) {
      return SetLastError(cudaErrorInvalidValue);
    }
  }
  std::free(memory);
  return cudaSuccess;
}

namespace {

// Returns the buffer that contains these bytes, which copies and fills must not leave, or null
// where there is none.
DeviceBufferShadow* BufferOf(const void* memory, size_t bytes) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(memory);
  DeviceBufferShadow* buffer = TheMachine().checker.device_memory.Find(address);
  return buffer != nullptr && buffer->ContainsAll(address, bytes) ? buffer : nullptr;
}

cudaError_t CopyNow(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  std::lock_guard<std::mutex> lock(TheMachine().mutex);
  if (const cudaError_t error = Earlier(TheMachine()); error != cudaSuccess) return error;
  if (kind != cudaMemcpyHostToDevice && BufferOf(from, bytes) == nullptr) {
    return SetLastError(cudaErrorInvalidValue);
  }
  if (kind != cudaMemcpyDeviceToHost) {
    DeviceBufferShadow* buffer = BufferOf(to, bytes);
    if (buffer == nullptr) return SetLastError(cudaErrorInvalidValue);
    buffer->SetWritten(reinterpret_cast<uintptr_t>(to), bytes);
  }
  std::memmove(to, from, bytes);
  return cudaSuccess;
}

cudaError_t FillNow(void* memory, int value, size_t bytes) {
  std::lock_guard<std::mutex> lock(TheMachine().mutex);
  if (const cudaError_t error = Earlier(TheMachine()); error != cudaSuccess) return error;
  DeviceBufferShadow* buffer = BufferOf(memory, bytes);
  if (buffer == nullptr) return SetLastError(cudaErrorInvalidValue);
  buffer->SetWritten(reinterpret_cast<uintptr_t>(memory), bytes);
  std::memset(memory, value, bytes);
  return cudaSuccess;
}

}  // namespace

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  if (bytes == 0) return cudaSuccess;
  if (kind == cudaMemcpyDeviceToDevice) {
    return Enqueue(stream, [=] { return CopyNow(to, from, bytes, kind); });
  }
  // Memory of the host is pageable: the call waits for the stream's work, and copies.
  if (const cudaError_t refused = RefuseWhileCapturing(); refused != cudaSuccess) return refused;
  const cudaError_t error = Finish(stream);
  return error != cudaSuccess ? error : CopyNow(to, from, bytes, kind);
}

cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t stream) {
  if (bytes == 0) return cudaSuccess;
  return Enqueue(stream, [=] { return FillNow(memory, value, bytes); });
}

cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
  const size_t page_bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  *total_bytes = static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * page_bytes;
  *free_bytes = static_cast<size_t>(sysconf(_SC_AVPHYS_PAGES)) * page_bytes;
  return cudaSuccess;
}

// The seconds outlive an event that is destroyed before it is recorded.
struct CUevent_st {
  std::shared_ptr<double> seconds = std::make_shared<double>(0);
};
cudaError_t cudaEventCreate(cudaEvent_t* event) {
  *event = new CUevent_st;
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return Enqueue(stream, [seconds = event->seconds] {
    const auto told = CurrentSettings().event_seconds;
    *seconds =
        told != nullptr
            ? told()
            : std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch())
                  .count();
    return cudaSuccess;
  });
}
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t from, cudaEvent_t to) {
  *ms = static_cast<float>((*to->seconds - *from->seconds) * 1000);
  return cudaSuccess;
}

}  // namespace cuda_simulator
