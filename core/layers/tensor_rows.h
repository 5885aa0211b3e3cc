// The rows of tensors in functors of every device. Pointers are to the device's memory.
#ifndef TFB_CORE_LAYERS_TENSOR_ROWS_H_
#define TFB_CORE_LAYERS_TENSOR_ROWS_H_

#include <stdint.h>

#include "core/cuda/functor.h"

namespace tfb {

// The rows of a view of up to four dimensions, numbered through all but the last.
struct RowsOfView {
  DeviceView view;
  int64_t sizes[3];  // of the dimensions but the last
  int axes;          // how many these are

  TFB_HOST_DEVICE int64_t OffsetOf(int64_t row) const {
    int64_t offset = 0;
    for (int axis = axes - 1; axis >= 0; --axis) {
      offset += row % sizes[axis] * view.strides[axis];
      row /= sizes[axis];
    }
    return offset;
  }
  TFB_HOST_DEVICE int64_t stride() const { return view.strides[axes]; }
};

// Copies rows, or writes zeros where there is nothing to copy.
struct CopyToRows {
  RowsOfView from;  // null: zeros
  RowsOfView to;

  template <class Piece>
  TFB_HOST_DEVICE void operator()(int64_t row, const Piece& piece) const {
    float x[Piece::kMost];
    if (from.view.data != nullptr) {
      piece.Load(from.view, from.OffsetOf(row), from.stride(), x);
    } else {
      for (int i = 0; i < piece.count(); ++i) x[i] = 0;
    }
    piece.Store(x, to.view, to.OffsetOf(row), to.stride());
  }
};

// to += from, in fp32.
struct AddToRows {
  RowsOfView from;
  RowsOfView to;

  template <class Piece>
  TFB_HOST_DEVICE void operator()(int64_t row, const Piece& piece) const {
    float x[Piece::kMost], more[Piece::kMost];
    piece.Load(to.view, to.OffsetOf(row), to.stride(), x);
    piece.Load(from.view, from.OffsetOf(row), from.stride(), more);
    for (int i = 0; i < piece.count(); ++i) x[i] += more[i];
    piece.Store(x, to.view, to.OffsetOf(row), to.stride());
  }
};

}  // namespace tfb

#endif  // TFB_CORE_LAYERS_TENSOR_ROWS_H_
