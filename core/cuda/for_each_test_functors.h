// The functors of for_each_test.
#ifndef TFB_CORE_CUDA_FOR_EACH_TEST_FUNCTORS_H_
#define TFB_CORE_CUDA_FOR_EACH_TEST_FUNCTORS_H_

#include <stdint.h>

#include "core/cuda/functor.h"

namespace tfb::for_each_test {

// counts[n] += n + 1.
struct CountElements {
  int64_t* counts;

  TFB_HOST_DEVICE void operator()(int64_t n) const { counts[n] += n + 1; }
};

// counts[row][c] += row * columns + c + 1.
struct CountColumns {
  int64_t* counts;
  int64_t columns;

  template <class Piece>
  TFB_HOST_DEVICE void operator()(int64_t row, const Piece& piece) const {
    for (int64_t c = piece.first(); c < piece.end(); ++c) {
      counts[row * columns + c] += row * columns + c + 1;
    }
  }
};

// to = 2 from, of rows [rows, columns] of any dtype.
struct DoubleRows {
  DeviceView from;
  DeviceView to;

  template <class Piece>
  TFB_HOST_DEVICE void operator()(int64_t row, const Piece& piece) const {
    float x[Piece::kMost];
    piece.Load(from, Offset(from, row, 0, 0), from.strides[1], x);
    for (int i = 0; i < piece.count(); ++i) x[i] *= 2;
    piece.Store(x, to, Offset(to, row, 0, 0), to.strides[1]);
  }
};

}  // namespace tfb::for_each_test

#endif  // TFB_CORE_CUDA_FOR_EACH_TEST_FUNCTORS_H_
