// A hidden state as a list of rows, whatever its strides.
#ifndef TFB_CORE_LAYERS_ROWS_OF_H_
#define TFB_CORE_LAYERS_ROWS_OF_H_

#include <cassert>
#include <cstdint>

#include "core/flash/rows.h"
#include "core/tensor.h"

namespace tfb {

// [rows, channels], or [batch, tokens, channels] with batch * tokens rows. `View` is a
// ConstTensorView or a TensorView.
template <class View>
class RowsOf {
 public:
  explicit RowsOf(const View& view) : view_(view) { assert(view.rank == 2 || view.rank == 3); }

  int64_t rows() const { return view_.rank == 2 ? view_.dim(0) : view_.dim(0) * view_.dim(1); }
  int64_t channels() const { return view_.dim(view_.rank - 1); }
  int64_t Offset(int64_t row) const {
    return view_.rank == 2 ? view_.Offset(row)
                           : view_.Offset(row / view_.dim(1), row % view_.dim(1));
  }
  // Returns the first row of floats, where row r begins at FirstRow() + r * *stride; null where the
  // rows are not floats side by side.
  const float* FirstRow(int64_t* stride) const {
    return view_.dtype == DType::kF32 ? static_cast<const float*>(FirstRowOfAnyType(stride))
                                      : nullptr;
  }
  // Returns the same for elements of any type, between whose rows there are *stride elements.
  const void* FirstRowOfAnyType(int64_t* stride) const {
    const bool unit = view_.stride(view_.rank - 1) == 1 || channels() == 1;
    if (!unit) return nullptr;
    if (view_.rank == 2 || view_.dim(0) == 1) {
      *stride = view_.stride(view_.rank - 2);
    } else {
      *stride = view_.stride(view_.dim(1) == 1 ? 0 : 1);
      if (view_.dim(1) > 1 && view_.stride(0) != view_.dim(1) * view_.stride(1)) return nullptr;
    }
    return view_.data;
  }

  // Loads `count` channels of a row from channel `first` on.
  void Load(int64_t row, int64_t first, int64_t count, float* to) const {
    const int64_t stride = view_.stride(view_.rank - 1);
    LoadRow(view_, Offset(row) + first * stride, stride, count, to);
  }
  void Store(int64_t row, int64_t first, int64_t count, const float* from) const {
    const int64_t stride = view_.stride(view_.rank - 1);
    StoreRow(from, count, view_, Offset(row) + first * stride, stride);
  }

 private:
  const View& view_;
};

}  // namespace tfb

#endif  // TFB_CORE_LAYERS_ROWS_OF_H_
