#include "harness/device_memory.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "core/cuda/simulator/simulator.h"
#include "core/status.h"

namespace tfb {

absl::StatusOr<CudaRuntime*> RuntimeOf(Device device) {
  if (device == Device::kCpu) return nullptr;
  return CudaRuntime::For(device);
}

absl::Status Synchronize(CudaRuntime* runtime) {
  return runtime == nullptr ? absl::OkStatus() : runtime->Synchronize();
}

absl::Status DeviceStatus(Device device) {
  TFB_ASSIGN_OR_RETURN(CudaRuntime * runtime, RuntimeOf(device));
  const absl::Status status = Synchronize(runtime);
  if (status.ok()) return status;
  return absl::UnavailableError(
      absl::StrCat("the device is lost to this process, by a kernel before: ", status.message()));
}

absl::StatusOr<DeviceMemory> DeviceMemory::Allocate(Device device, size_t bytes) {
  DeviceMemory memory;
  TFB_ASSIGN_OR_RETURN(CudaRuntime * runtime, RuntimeOf(device));
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

absl::StatusOr<NamedTensors> DeviceTensors::Download() const {
  NamedTensors host;
  for (const auto& [name, view] : inputs_) {
    TFB_ASSIGN_OR_RETURN(Tensor copy, Tensor::Allocate(view.dtype, view.shape()));
    if (runtime_ == nullptr) {
      CopyElements(view, copy.view());
    } else {
      TFB_RETURN_IF_ERROR(runtime_->CopyToHost(copy.raw(), view.data, copy.bytes()));
    }
    host[name] = std::move(copy);
  }
  return host;
}

absl::StatusOr<DeviceTwin> DeviceTwin::Make(Device device, absl::Span<std::byte> whole,
                                            absl::Span<std::byte> inside) {
  DeviceTwin twin;
  TFB_ASSIGN_OR_RETURN(twin.runtime_, RuntimeOf(device));
  twin.whole_ = whole;
  twin.inside_ = inside;
  if (twin.runtime_ == nullptr) return twin;
  TFB_ASSIGN_OR_RETURN(twin.buffer_, twin.runtime_->Allocate(whole.size()));
  twin.offset_ =
      reinterpret_cast<uintptr_t>(twin.buffer_.data()) - reinterpret_cast<uintptr_t>(whole.data());
  return twin;
}

DeviceTwin& DeviceTwin::operator=(DeviceTwin&& other) noexcept {
  Withdraw();
  runtime_ = other.runtime_;
  buffer_ = std::move(other.buffer_);
  whole_ = other.whole_;
  inside_ = other.inside_;
  offset_ = other.offset_;
  admitted_ = std::exchange(other.admitted_, false);
  return *this;
}

absl::Status DeviceTwin::Upload(Contents contents) {
  if (runtime_ == nullptr) return absl::OkStatus();
  Withdraw();
  TFB_RETURN_IF_ERROR(runtime_->CopyToDevice(buffer_.data(), whole_.data(), whole_.size()));
  Admit(contents);
  return absl::OkStatus();
}

absl::Status DeviceTwin::Download() {
  if (runtime_ == nullptr) return absl::OkStatus();
  Withdraw();
  return runtime_->CopyToHost(whole_.data(), buffer_.data(), whole_.size());
}

// The simulator knows a buffer by where it begins: while kernels are admitted to the inside, that
// is the buffer, and otherwise the whole, for copies and for its release.
void DeviceTwin::Admit(Contents contents) {
  if (runtime_->target() != CudaTarget::kSimulator) return;
  cuda_simulator::UnregisterBuffer(buffer_.data());
  cuda_simulator::RegisterBuffer(On(inside_.data()), inside_.size(),
                                 contents == Contents::kWritten);
  admitted_ = true;
}

void DeviceTwin::Withdraw() {
  if (!admitted_) return;
  cuda_simulator::UnregisterBuffer(On(inside_.data()));
  cuda_simulator::RegisterBuffer(buffer_.data(), buffer_.bytes(), /*written=*/true);
  admitted_ = false;
}

}  // namespace tfb
