#include "core/cuda/runtime.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/status.h"

namespace tfb {
namespace {

CudaDevice SimulatedDevice(const SimulatedGpu& gpu) {
  CudaDevice device;
  device.name = "host simulator";
  device.compute_capability_major = gpu.compute_capability_major;
  device.compute_capability_minor = gpu.compute_capability_minor;
  device.memory_bytes = int64_t{8} << 30;
  device.l2_cache_bytes = int64_t{1} << 20;
  device.shared_memory_bytes_per_block = static_cast<int64_t>(gpu.shared_memory_bytes_per_block);
  device.multiprocessors = 4;
  return device;
}

}  // namespace

absl::StatusOr<DeviceEvent> DeviceEvent::Make(CudaRuntime* runtime) {
  void* event = nullptr;
  TFB_RETURN_IF_ERROR(ToStatus(runtime->api().create_event(&event)));
  DeviceEvent made;
  made.event_ = DeviceHandle(event, {runtime, [](CudaRuntime* runtime, void* event) {
                                       (void)runtime->api().destroy_event(event);
                                     }});
  return made;
}

absl::Status DeviceEvent::Record(void* stream) {
  return ToStatus(event_.get_deleter().runtime->api().record_event(event_.get(), stream));
}

absl::StatusOr<double> DeviceEvent::SecondsSince(const DeviceEvent& earlier) const {
  float ms = 0;
  const CudaApi& api = event_.get_deleter().runtime->api();
  TFB_RETURN_IF_ERROR(ToStatus(api.elapsed_ms(&ms, earlier.event_.get(), event_.get())));
  return ms / 1e3;
}

absl::StatusOr<DeviceStream> DeviceStream::Make(CudaRuntime* runtime) {
  void* stream = nullptr;
  TFB_RETURN_IF_ERROR(ToStatus(runtime->api().create_stream(&stream)));
  DeviceStream made;
  made.stream_ = DeviceHandle(stream, {runtime, [](CudaRuntime* runtime, void* stream) {
                                         (void)runtime->Synchronize(stream);
                                         (void)runtime->api().destroy_stream(stream);
                                       }});
  return made;
}

absl::StatusOr<DeviceGraph> DeviceGraph::Capture(
    CudaRuntime* runtime, absl::FunctionRef<absl::Status(void* stream)> enqueue) {
  const CudaApi& api = runtime->api();
  void* stream = nullptr;
  TFB_RETURN_IF_ERROR(ToStatus(api.begin_capture(&stream)));
  absl::Status status = enqueue(stream);
  void* graph = nullptr;
  status.Update(ToStatus(api.end_capture(stream, &graph)));
  DeviceGraph captured;
  captured.graph_ = DeviceHandle(graph, {runtime, [](CudaRuntime* runtime, void* graph) {
                                           (void)runtime->api().destroy_graph(graph);
                                         }});
  TFB_RETURN_IF_ERROR(status);
  return captured;
}

absl::Status DeviceGraph::Launch(void* stream) const {
  return ToStatus(graph_.get_deleter().runtime->api().launch_graph(graph_.get(), stream));
}

DeviceBuffer& DeviceBuffer::operator=(DeviceBuffer&& other) noexcept {
  Release();
  runtime_ = std::exchange(other.runtime_, nullptr);
  data_ = std::exchange(other.data_, nullptr);
  bytes_ = std::exchange(other.bytes_, 0);
  return *this;
}

void DeviceBuffer::Release() {
  if (data_ == nullptr) return;
  // The release fails where an earlier kernel has broken the context, which was reported then.
  (void)runtime_->api().release(data_);
  runtime_->allocated_ -= static_cast<int64_t>(bytes_);
  data_ = nullptr;
}

absl::StatusOr<CudaRuntime*> CudaRuntime::ForSimulator() {
  const CudaApi* api = FindKernels<CudaApi>(CudaTarget::kSimulator);
  if (api == nullptr) {
    return absl::UnimplementedError(
        "this program was built without the simulator of GPUs; `bazel run --config=simulator` "
        "adds it");
  }
  const SimulatedGpu gpu = api->simulated_gpu();
  static auto* runtimes = new std::map<std::pair<int, int>, CudaRuntime*>;  // by capability
  static std::mutex mutex;
  const std::lock_guard<std::mutex> lock(mutex);
  CudaRuntime*& runtime = (*runtimes)[{gpu.compute_capability_major, gpu.compute_capability_minor}];
  if (runtime == nullptr) runtime = new CudaRuntime(CudaTarget::kSimulator, SimulatedDevice(gpu));
  return runtime;
}

absl::StatusOr<CudaRuntime*> CudaRuntime::For(Device device) {
  if (device == Device::kSimulator) return ForSimulator();
  if (device != Device::kCuda) {
    return absl::InvalidArgumentError(
        absl::StrCat("device ", Name(device), " does not run CUDA code"));
  }
  static const auto* gpu = new absl::StatusOr<CudaRuntime*>([]() -> absl::StatusOr<CudaRuntime*> {
    TFB_ASSIGN_OR_RETURN(CudaMachine machine, ProbeCudaMachine());
    return new CudaRuntime(CudaTarget::kGpu, std::move(machine.devices[0]));
  }());
  return *gpu;
}

absl::StatusOr<DeviceBuffer> CudaRuntime::Allocate(size_t bytes) {
  DeviceBuffer buffer;
  if (bytes == 0) return buffer;
  ++allocations_;
  void* memory = nullptr;
  TFB_RETURN_IF_ERROR(ToStatus(api().allocate(&memory, bytes)));
  if (memory == nullptr) {
    return absl::ResourceExhaustedError(absl::StrCat("no ", bytes, " bytes of memory on ",
                                                     properties_.name, "; ", allocated_.load(),
                                                     " are in use by this program"));
  }
  buffer.runtime_ = this;
  buffer.data_ = memory;
  buffer.bytes_ = bytes;
  const int64_t now = allocated_ += static_cast<int64_t>(bytes);
  for (int64_t peak = peak_; peak < now && !peak_.compare_exchange_weak(peak, now);) {
  }
  return buffer;
}

absl::StatusOr<DeviceBuffer> CudaRuntime::Upload(const void* from, size_t bytes) {
  TFB_ASSIGN_OR_RETURN(DeviceBuffer buffer, Allocate(bytes));
  TFB_RETURN_IF_ERROR(CopyToDevice(buffer.data(), from, bytes));
  TFB_RETURN_IF_ERROR(Synchronize());
  return buffer;
}

absl::Status CudaRuntime::CopyToDevice(void* to, const void* from, size_t bytes, void* stream) {
  if (bytes == 0) return absl::OkStatus();
  return ToStatus(api().copy(to, from, bytes, CopyDirection::kToDevice, stream));
}
absl::Status CudaRuntime::CopyToHost(void* to, const void* from, size_t bytes, void* stream) {
  if (bytes == 0) return absl::OkStatus();
  TFB_RETURN_IF_ERROR(ToStatus(api().copy(to, from, bytes, CopyDirection::kToHost, stream)));
  return Synchronize(stream);
}
absl::Status CudaRuntime::CopyWithinDevice(void* to, const void* from, size_t bytes, void* stream) {
  if (bytes == 0) return absl::OkStatus();
  return ToStatus(api().copy(to, from, bytes, CopyDirection::kWithinDevice, stream));
}
absl::Status CudaRuntime::Fill(void* memory, int byte, size_t bytes, void* stream) {
  if (bytes == 0) return absl::OkStatus();
  return ToStatus(api().fill(memory, byte, bytes, stream));
}
absl::Status CudaRuntime::Synchronize(void* stream) {
  ++waits_;
  return ToStatus(api().synchronize(stream));
}
absl::Status CudaRuntime::SynchronizeAll() {
  ++waits_;
  return ToStatus(api().synchronize_all());
}

absl::Status ToStatus(const char* launch_error) {
  if (launch_error == nullptr) return absl::OkStatus();
  return absl::InternalError(absl::StrCat("CUDA: ", launch_error));
}

DeviceView ToDeviceView(const ConstTensorView& view) {
  DeviceView result = {};
  if (view.empty()) return result;
  result.data = const_cast<void*>(view.data);
  for (int axis = 0; axis < std::min(view.rank, 4); ++axis)
    result.strides[axis] = view.stride(axis);
  result.element = view.dtype == DType::kBF16  ? Element::kBf16
                   : view.dtype == DType::kF16 ? Element::kF16
                                               : Element::kF32;
  return result;
}

}  // namespace tfb
