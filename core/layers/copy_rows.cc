#include "core/layers/copy_rows.h"

#include "core/cuda/for_each.h"
#include "core/cuda/runtime.h"
#include "core/layers/copy_rows_functor.h"

namespace tfb {

absl::Status CopyRows(Device device, const CopyRowsCall& call, const Execution& execution) {
  CopyOfRows copy = {};
  copy.from = {ToDeviceView(call.from), call.from_first, call.from.dim(1)};
  copy.to = {ToDeviceView(call.to), call.to_first, call.to.dim(1)};
  copy.rows = call.rows;
  copy.selected = call.selected;
  copy.dilated_block = call.dilated_block;
  return ForEachInRows(device, call.to.dim(0) * call.rows, call.to.dim(2), copy, execution);
}

absl::Status CopyAllRows(Device device, const ConstTensorView& from, const TensorView& to,
                         const Execution& execution) {
  CopyRowsCall copy;
  copy.from = from;
  copy.to = to;
  copy.rows = from.dim(1);
  return CopyRows(device, copy, execution);
}

}  // namespace tfb
