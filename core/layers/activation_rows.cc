#include "core/layers/activation_rows.h"

#include "core/layers/activation_functors.h"
#include "core/layers/copy_tensor.h"
#include "core/layers/for_each_listed.h"

namespace tfb {

absl::Status Activate(Device device, Activation activation, const ConstTensorView& from,
                      const TensorView& to, const Execution& execution, const RowList& rows) {
  const TensorRows to_rows(to);
  const ActivatedRows of = {activation, TensorRows(from).view(), to_rows.view()};
  return ForEachInListedRows(device, to_rows.rows(), to_rows.columns(), of, rows, execution);
}

absl::Status MultiplyByDerivative(Device device, Activation activation, const ConstTensorView& x,
                                  const ConstTensorView& d, const TensorView& to,
                                  const Execution& execution, const RowList& rows) {
  const TensorRows to_rows(to);
  const RowsTimesDerivative of = {activation, TensorRows(x).view(), TensorRows(d).view(),
                                  to_rows.view()};
  return ForEachInListedRows(device, to_rows.rows(), to_rows.columns(), of, rows, execution);
}

}  // namespace tfb
