#include "core/cuda/mirror.h"

#include <utility>

#include "core/status.h"

namespace tfb {

absl::StatusOr<const void*> DeviceMirror::Add(const ConstTensorView& host, bool written) {
  int64_t elements = host.num_elements() == 0 ? 0 : 1;
  for (int axis = 0; axis < host.rank && elements > 0; ++axis) {
    elements += (host.dim(axis) - 1) * host.stride(axis);
  }
  const size_t bytes = static_cast<size_t>(elements * SizeOf(host.dtype));
  TFB_ASSIGN_OR_RETURN(DeviceBuffer memory, runtime_->Upload(host.data, bytes));
  const void* data = memory.data();
  spans_.push_back({static_cast<const std::byte*>(host.data), bytes, std::move(memory), written});
  return data;
}

absl::StatusOr<ConstTensorView> DeviceMirror::Copy(const ConstTensorView& host) {
  ConstTensorView view = host;
  if (view.empty()) return view;
  TFB_ASSIGN_OR_RETURN(view.data, Add(host, /*written=*/false));
  return view;
}

absl::StatusOr<TensorView> DeviceMirror::CopyForWriting(const TensorView& host) {
  TensorView view = host;
  if (view.empty()) return view;
  TFB_ASSIGN_OR_RETURN(view.data, Add(host, /*written=*/true));
  return view;
}

absl::Status DeviceMirror::CopyBack() {
  TFB_RETURN_IF_ERROR(runtime_->Synchronize());
  for (const Span& span : spans_) {
    if (!span.written) continue;
    TFB_RETURN_IF_ERROR(
        runtime_->CopyToHost(const_cast<std::byte*>(span.host), span.memory.data(), span.bytes));
  }
  return absl::OkStatus();
}

}  // namespace tfb
