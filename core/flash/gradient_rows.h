// The rows of a view for functors of gradients.
#ifndef TFB_CORE_FLASH_GRADIENT_ROWS_H_
#define TFB_CORE_FLASH_GRADIENT_ROWS_H_

#include <algorithm>
#include <cstdint>

#include "core/cuda/runtime.h"
#include "core/flash/gradient_functors.h"
#include "core/tensor.h"

namespace tfb {

class GradientRows {
 public:
  // An empty view has no data; one of no dimensions is a row of one element.
  explicit GradientRows(const ConstTensorView& view) {
    rows_.view = ToDeviceView(view);
    rows_.axes = std::max(view.rank - 1, 0);
    std::fill_n(rows_.sizes, 3, 1);
    for (int axis = 0; axis < rows_.axes; ++axis) rows_.sizes[axis] = view.dim(axis);
    columns_ = view.rank == 0 ? 1 : view.dim(view.rank - 1);
    count_ = columns_ == 0 ? 0 : view.num_elements() / columns_;
  }
  const RowsOfView& view() const { return rows_; }
  int64_t rows() const { return count_; }
  int64_t columns() const { return columns_; }

 private:
  RowsOfView rows_ = {};
  int64_t count_ = 0;
  int64_t columns_ = 0;
};

}  // namespace tfb

#endif  // TFB_CORE_FLASH_GRADIENT_ROWS_H_
