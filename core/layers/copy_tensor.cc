#include "core/layers/copy_tensor.h"

#include <algorithm>

#include "core/cuda/for_each.h"
#include "core/cuda/runtime.h"
#include "core/status.h"
#include "core/zeros.h"

namespace tfb {

TensorRows::TensorRows(const ConstTensorView& view) {
  rows_.view = ToDeviceView(view);
  rows_.axes = std::max(view.rank - 1, 0);
  std::fill_n(rows_.sizes, 3, 1);
  if (view.rank == 0) return;
  for (int axis = 0; axis < rows_.axes; ++axis) rows_.sizes[axis] = view.dim(axis);
  columns_ = view.dim(view.rank - 1);
  count_ = columns_ == 0 ? 0 : view.num_elements() / columns_;
}

absl::Status CopyTensor(Device device, const ConstTensorView& from, const TensorView& to,
                        const Execution& execution) {
  const TensorRows rows(to);
  return ForEachInRows(device, rows.rows(), rows.columns(),
                       CopyToRows{TensorRows(from).view(), rows.view()}, execution);
}

absl::Status ClearTensor(Device device, const TensorView& to, const Execution& execution) {
  return CopyTensor(device, {}, to, execution);
}

absl::Status ClearBytes(Device device, absl::Span<std::byte> memory, const Execution& execution) {
  if (device == Device::kCpu) {
    SetToZero(memory, execution.pool);
    return absl::OkStatus();
  }
  TFB_ASSIGN_OR_RETURN(CudaRuntime * runtime, CudaRuntime::For(device));
  return runtime->Fill(memory.data(), 0, memory.size(), execution.stream);
}

absl::Status AddTensor(Device device, const ConstTensorView& from, const TensorView& to,
                       const Execution& execution) {
  const TensorRows rows(to);
  return ForEachInRows(device, rows.rows(), rows.columns(),
                       AddToRows{TensorRows(from).view(), rows.view()}, execution);
}

}  // namespace tfb
