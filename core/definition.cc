#include "core/definition.h"

#include <numeric>

namespace tfb {

DoubleTensor::DoubleTensor(const ConstTensorView& view) {
  assert(view.rank <= 4);
  for (int axis = 0; axis < view.rank; ++axis) dims_[4 - view.rank + axis] = view.dim(axis);
  if (view.empty()) return;
  values_.resize(view.num_elements());
  CopyElements(view, TensorView(values_.data(), DType::kF64, view.shape()));
}

std::vector<int64_t> RowsOf(const DefinitionRequest& request, int64_t tokens) {
  if (!request.rows.empty()) return {request.rows.begin(), request.rows.end()};
  std::vector<int64_t> rows(tokens);
  std::iota(rows.begin(), rows.end(), 0);
  return rows;
}

}  // namespace tfb
