#include "harness/judge/device_memory.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "core/status.h"

namespace tfb {

absl::StatusOr<CudaRuntime*> RuntimeOf(Device device) {
  if (device == Device::kCpu) return nullptr;
  return CudaRuntime::For(device);
}

absl::Status Synchronize(CudaRuntime* runtime, void* stream) {
  return runtime == nullptr ? absl::OkStatus() : runtime->Synchronize(stream);
}

absl::Status DeviceStatus(Device device) {
  TFB_ASSIGN_OR_RETURN(CudaRuntime* const runtime, RuntimeOf(device));
  const absl::Status status = Synchronize(runtime);
  if (status.ok()) return status;
  return absl::UnavailableError(
      absl::StrCat("the device is lost to this process, by a kernel before: ", status.message()));
}

absl::StatusOr<DeviceMemory> DeviceMemory::Allocate(Device device, size_t bytes) {
  DeviceMemory memory;
  TFB_ASSIGN_OR_RETURN(CudaRuntime* const runtime, RuntimeOf(device));
  if (runtime == nullptr) {
    TFB_ASSIGN_OR_RETURN(memory.host_, Tensor::Allocate(DType::kU8, {static_cast<int64_t>(bytes)}));
    memory.bytes_ = absl::MakeSpan(static_cast<std::byte*>(memory.host_.raw()), bytes);
  } else {
    TFB_ASSIGN_OR_RETURN(memory.device_, runtime->Allocate(bytes));
    memory.bytes_ = absl::MakeSpan(memory.device_.As<std::byte>(), bytes);
  }
  return memory;
}

absl::StatusOr<DeviceTensors> DeviceTensors::Of(Device device, const Inputs& host) {
  DeviceTensors tensors;
  TFB_ASSIGN_OR_RETURN(tensors.runtime_, RuntimeOf(device));
  if (tensors.runtime_ == nullptr) {
    tensors.inputs_ = host;
    return tensors;
  }
  for (const auto& [name, view] : host) {
    if (view.empty()) continue;
    ConstTensorView source = view;
    Tensor contiguous;
    if (!view.is_contiguous()) {
      TFB_ASSIGN_OR_RETURN(contiguous, Tensor::Allocate(view.dtype, view.shape()));
      CopyElements(view, contiguous.view());
      source = contiguous.view();
    }
    const size_t bytes = static_cast<size_t>(view.num_elements() * SizeOf(view.dtype));
    TFB_ASSIGN_OR_RETURN(DeviceMemory memory, DeviceMemory::Allocate(device, bytes));
    TFB_RETURN_IF_ERROR(tensors.runtime_->CopyToDevice(memory.bytes().data(), source.data, bytes));
    tensors.inputs_.Set(name, ConstTensorView(memory.bytes().data(), view.dtype, view.shape()));
    tensors.memory_.emplace(name, std::move(memory));
  }
  return tensors;
}

absl::StatusOr<DeviceTensors> DeviceTensors::Allocate(Device device,
                                                      const std::vector<TensorSpec>& specs,
                                                      bool optional_too) {
  DeviceTensors tensors;
  TFB_ASSIGN_OR_RETURN(tensors.runtime_, RuntimeOf(device));
  for (const TensorSpec& spec : specs) {
    if (spec.optional && !optional_too) continue;
    const size_t bytes = static_cast<size_t>(NumElements(spec.shape) * SizeOf(spec.dtype));
    TFB_ASSIGN_OR_RETURN(DeviceMemory memory, DeviceMemory::Allocate(device, bytes));
    const TensorView view(memory.bytes().data(), spec.dtype, spec.shape);
    tensors.inputs_.Set(spec.name, view);
    tensors.outputs_.Set(spec.name, view);
    tensors.memory_.emplace(spec.name, std::move(memory));
  }
  return tensors;
}

absl::StatusOr<NamedTensors> DeviceTensors::Download(void* stream) const {
  NamedTensors host;
  for (const auto& [name, view] : inputs_) {
    TFB_ASSIGN_OR_RETURN(Tensor copy, Tensor::Allocate(view.dtype, view.shape()));
    if (runtime_ == nullptr) {
      CopyElements(view, copy.view());
    } else {
      TFB_RETURN_IF_ERROR(runtime_->CopyToHost(copy.raw(), view.data, copy.bytes(), stream));
    }
    host[name] = std::move(copy);
  }
  return host;
}

absl::StatusOr<FencedMemory> FencedMemory::Allocate(CudaRuntime* runtime, size_t bytes,
                                                    size_t part_begin, size_t part_bytes) {
  FencedMemory memory;
  TFB_ASSIGN_OR_RETURN(memory.buffer_, runtime->Allocate(bytes));
  memory.part_ = memory.whole().subspan(part_begin, part_bytes);
  memory.runtime_ = runtime;
  return memory;
}

FencedMemory& FencedMemory::operator=(FencedMemory&& other) noexcept {
  TakeDown();
  buffer_ = std::move(other.buffer_);
  part_ = std::exchange(other.part_, {});
  runtime_ = other.runtime_;
  is_up_ = std::exchange(other.is_up_, false);
  return *this;
}

// The simulator knows a buffer by where it begins: with the fence up, the buffer is the inner part.
void FencedMemory::PutUp(Contents contents) {
  TakeDown();
  const CudaApi& api = runtime_->api();
  api.unregister_buffer(buffer_.data());
  api.register_buffer(part_.data(), part_.size(), contents == Contents::kWritten);
  is_up_ = true;
}

void FencedMemory::TakeDown() {
  if (!is_up_) return;
  const CudaApi& api = runtime_->api();
  api.unregister_buffer(part_.data());
  api.register_buffer(buffer_.data(), buffer_.bytes(), /*written=*/true);
  is_up_ = false;
}

absl::StatusOr<DeviceTwin> DeviceTwin::Make(Device device, absl::Span<std::byte> whole,
                                            absl::Span<std::byte> inside) {
  DeviceTwin twin;
  TFB_ASSIGN_OR_RETURN(twin.runtime_, RuntimeOf(device));
  twin.whole_ = whole;
  if (twin.runtime_ == nullptr) return twin;
  const size_t begin = static_cast<size_t>(inside.data() - whole.data());
  TFB_ASSIGN_OR_RETURN(twin.memory_,
                       FencedMemory::Allocate(twin.runtime_, whole.size(), begin, inside.size()));
  twin.offset_ = reinterpret_cast<uintptr_t>(twin.memory_.whole().data()) -
                 reinterpret_cast<uintptr_t>(whole.data());
  return twin;
}

absl::Status DeviceTwin::Upload(Contents contents) {
  if (runtime_ == nullptr) return absl::OkStatus();
  memory_.TakeDown();
  TFB_RETURN_IF_ERROR(runtime_->CopyToDevice(memory_.whole().data(), whole_.data(), whole_.size()));
  memory_.PutUp(contents);
  return absl::OkStatus();
}

absl::Status DeviceTwin::Download() {
  if (runtime_ == nullptr) return absl::OkStatus();
  memory_.TakeDown();
  return runtime_->CopyToHost(whole_.data(), memory_.whole().data(), whole_.size());
}

}  // namespace tfb
