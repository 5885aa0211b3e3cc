// The rows of tensors in functors of every device. Pointers are to the device's memory.
#ifndef TFB_CORE_LAYERS_TENSOR_ROWS_H_
#define TFB_CORE_LAYERS_TENSOR_ROWS_H_

#include <stdint.h>

#include "core/cuda/functor.h"

namespace tfb {

// The rows of a view of up to four dimensions, numbered through all but the last.
struct RowsOfView {
  DeviceView view;
  int64_t sizes[3];  // of the dimensions but the last, and then 1
  int axes;          // how many these dimensions are

  // The indices of a row, which views of one shape share.
  struct Place {
    int64_t i, j, k;
  };
  TFB_HOST_DEVICE Place PlaceOf(int64_t row) const {
    const int64_t rest = row / sizes[2];
    return {rest / sizes[1], rest % sizes[1], row % sizes[2]};
  }
  TFB_HOST_DEVICE int64_t OffsetOf(const Place& place) const {
    return place.i * view.strides[0] + place.j * view.strides[1] + place.k * view.strides[2];
  }
  TFB_HOST_DEVICE int64_t OffsetOf(int64_t row) const { return OffsetOf(PlaceOf(row)); }
  TFB_HOST_DEVICE int64_t stride() const { return view.strides[axes]; }

  // Loads a piece of a row, or zeros where there is no tensor.
  template <class Piece>
  TFB_HOST_DEVICE void Load(const Place& place, const Piece& piece,
                            float (&to)[Piece::kMost]) const {
    if (view.data != nullptr) {
      piece.Load(view, OffsetOf(place), stride(), to);
    } else {
      for (int i = 0; i < piece.count(); ++i) to[i] = 0;
    }
  }
  // Stores a piece of a row, unless there is no tensor.
  template <class Piece>
  TFB_HOST_DEVICE void Store(const Place& place, const Piece& piece,
                             const float (&from)[Piece::kMost]) const {
    if (view.data != nullptr) piece.Store(from, view, OffsetOf(place), stride());
  }
  // Do the same for a row.
  template <class Piece>
  TFB_HOST_DEVICE void Load(int64_t row, const Piece& piece, float (&to)[Piece::kMost]) const {
    Load(PlaceOf(row), piece, to);
  }
  template <class Piece>
  TFB_HOST_DEVICE void Store(int64_t row, const Piece& piece,
                             const float (&from)[Piece::kMost]) const {
    Store(PlaceOf(row), piece, from);
  }
};

// Copies rows, or writes zeros where there is nothing to copy.
struct CopyToRows {
  RowsOfView from;  // null: zeros
  RowsOfView to;

  template <class Piece>
  TFB_HOST_DEVICE void operator()(int64_t row, const Piece& piece) const {
    const RowsOfView::Place place = to.PlaceOf(row);
    float x[Piece::kMost];
    from.Load(place, piece, x);
    to.Store(place, piece, x);
  }
};

// to += from, in fp32.
struct AddToRows {
  RowsOfView from;
  RowsOfView to;

  template <class Piece>
  TFB_HOST_DEVICE void operator()(int64_t row, const Piece& piece) const {
    const RowsOfView::Place place = to.PlaceOf(row);
    float x[Piece::kMost], more[Piece::kMost];
    to.Load(place, piece, x);
    from.Load(place, piece, more);
    for (int i = 0; i < piece.count(); ++i) x[i] += more[i];
    to.Store(place, piece, x);
  }
};

}  // namespace tfb

#endif  // TFB_CORE_LAYERS_TENSOR_ROWS_H_
