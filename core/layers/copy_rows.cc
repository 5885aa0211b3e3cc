#include "core/layers/copy_rows.h"

#include <algorithm>

#include "core/cuda/runtime.h"
#include "core/flash/rows.h"
#include "core/layers/copy_rows_kernels.h"
#include "core/status.h"

namespace tfb {
namespace {

int64_t SourceOf(const CopyRowsCall& call, int64_t b, int64_t row) {
  if (call.selected != nullptr) return call.selected[b * call.rows + row];
  if (call.dilated_block == 0) return row;
  return row + call.dilated_block - 1 - 3 * (row % call.dilated_block);
}

constexpr int64_t kChannels = 256;  // channels of a row at a time

void CopyRow(const CopyRowsCall& call, int64_t b, int64_t row) {
  const int64_t source = SourceOf(call, b, row);
  const ConstTensorView& from = call.from;
  const TensorView& to = call.to;
  float values[kChannels] = {};
  for (int64_t c = 0; c < to.dim(2); c += kChannels) {
    const int64_t count = std::min(kChannels, to.dim(2) - c);
    if (source >= 0) {
      LoadRow(from, from.Offset(b, (call.from_first + source) % from.dim(1), c), from.stride(2),
              count, values);
    }
    StoreRow(values, count, to, to.Offset(b, (call.to_first + row) % to.dim(1), c), to.stride(2));
  }
}

}  // namespace

absl::Status CopyRows(Device device, const CopyRowsCall& call, const Execution& execution) {
  const int64_t batch = call.to.dim(0);
  if (device == Device::kCpu) {
    execution.pool->ParallelFor(batch * call.rows, [&](int64_t task, int) {
      CopyRow(call, task / call.rows, task % call.rows);
    });
    return absl::OkStatus();
  }
  CopyRowsArguments arguments = {};
  arguments.from = {ToDeviceView(call.from), call.from_first, call.from.dim(1)};
  arguments.to = {ToDeviceView(call.to), call.to_first, call.to.dim(1)};
  arguments.batch = batch;
  arguments.rows = call.rows;
  arguments.channels = call.to.dim(2);
  arguments.selected = call.selected;
  arguments.dilated_block = call.dilated_block;
  TFB_ASSIGN_OR_RETURN(CudaRuntime * runtime, CudaRuntime::For(device));
  return ToStatus(
      KernelsOn<CopyRowsKernels>(runtime->target()).copy_rows(arguments, execution.stream));
}

}  // namespace tfb
