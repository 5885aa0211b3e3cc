#include "core/layers/activation_rows.h"

#include "core/cuda/for_each.h"
#include "core/layers/activation_functors.h"
#include "core/layers/copy_tensor.h"

namespace tfb {

absl::Status Activate(Device device, Activation activation, const ConstTensorView& from,
                      const TensorView& to, const Execution& execution) {
  const TensorRows rows(to);
  const ActivatedRows of = {activation, TensorRows(from).view(), rows.view()};
  return ForEachInRows(device, rows.rows(), rows.columns(), of, execution);
}

absl::Status MultiplyByDerivative(Device device, Activation activation, const ConstTensorView& x,
                                  const ConstTensorView& d, const TensorView& to,
                                  const Execution& execution) {
  const TensorRows rows(to);
  const RowsTimesDerivative of = {activation, TensorRows(x).view(), TensorRows(d).view(),
                                  rows.view()};
  return ForEachInRows(device, rows.rows(), rows.columns(), of, execution);
}

}  // namespace tfb
