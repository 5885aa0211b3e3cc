// The step of copy_rows.h. Pointers are to the device's memory.
#ifndef TFB_CORE_LAYERS_COPY_ROWS_FUNCTOR_H_
#define TFB_CORE_LAYERS_COPY_ROWS_FUNCTOR_H_

#include <stdint.h>

#include "core/cuda/functor.h"

namespace tfb {

// A list of rows in a ring [batch, places, channels]: row n is at place (first + n) % places.
struct DeviceRowList {
  DeviceView view;
  int64_t first;
  int64_t places;

  TFB_HOST_DEVICE int64_t OffsetOf(int64_t b, int64_t n) const {
    return Offset(view, b, (first + n) % places, 0);
  }
};

// Copies row n of sequence b, which is row b * rows + n.
struct CopyOfRows {
  DeviceRowList from;
  DeviceRowList to;
  int64_t rows;
  const int32_t* selected;  // [batch][rows], or null
  int64_t dilated_block;    // or 0

  template <class Piece>
  TFB_HOST_DEVICE void operator()(int64_t row, const Piece& piece) const {
    const int64_t b = row / rows, n = row % rows;
    int64_t source = n;
    if (selected != nullptr) {
      source = selected[row];
    } else if (dilated_block > 0) {
      source += dilated_block - 1 - 3 * (n % dilated_block);
    }
    float x[Piece::kMost];
    if (source >= 0) {
      piece.Load(from.view, from.OffsetOf(b, source), from.view.strides[2], x);
    } else {
      for (int i = 0; i < piece.count(); ++i) x[i] = 0;
    }
    piece.Store(x, to.view, to.OffsetOf(b, n), to.view.strides[2]);
  }
};

}  // namespace tfb

#endif  // TFB_CORE_LAYERS_COPY_ROWS_FUNCTOR_H_
