// The steps of a backward pass over rows and elements of gradients, on every device. Pointers are
// to the device's memory.
#ifndef TFB_CORE_FLASH_GRADIENT_FUNCTORS_H_
#define TFB_CORE_FLASH_GRADIENT_FUNCTORS_H_

#include <stdint.h>

#include "core/cuda/functor.h"
#include "core/layers/tensor_rows.h"

namespace tfb {

// Writes sums in float64, without strides, as f32.
struct WriteSums {
  const double* sums;
  int64_t columns;
  RowsOfView to;

  template <class Piece>
  TFB_HOST_DEVICE void operator()(int64_t row, const Piece& piece) const {
    float x[Piece::kMost];
    const double* from = sums + row * columns + piece.first();
    for (int i = 0; i < piece.count(); ++i) x[i] = static_cast<float>(from[i]);
    piece.Store(x, to.view, to.OffsetOf(row), to.stride());
  }
};

// Sums slopes[e] times channel c of sums[places[e]] over the run begins[n] <= e < begins[n + 1], and adds
// that to channel c of element targets[n], or, where targets[n] is below 0, writes it to row
// -1 - targets[n] of partial sums: the run is one of several of an element.
struct AddMappedSums {
  const int64_t* targets;
  const int64_t* begins;
  const int64_t* places;
  const double* slopes;
  int64_t stride;  // of an element's channels
  const float* sums;
  double* gradients;
  double* partial;  // [rows][channels]
  int64_t channels;

  template <class Piece>
  TFB_HOST_DEVICE void operator()(int64_t n, const Piece& piece) const {
    double total[Piece::kMost] = {};
    float x[Piece::kMost];
    const DeviceView view = {const_cast<float*>(sums), {0, 0, 0, 0}, Element::kF32};
    for (int64_t e = begins[n]; e < begins[n + 1]; ++e) {
      piece.Load(view, places[e], 1, x);
      for (int i = 0; i < piece.count(); ++i) total[i] += slopes[e] * x[i];
    }
    if (targets[n] < 0) {
      double* to = partial + (-1 - targets[n]) * channels + piece.first();
      for (int i = 0; i < piece.count(); ++i) to[i] = total[i];
      return;
    }
    double* to = gradients + targets[n] + piece.first() * stride;
    for (int i = 0; i < piece.count(); ++i) to[i * stride] += total[i];
  }
};

// Adds to element elements[n] its partial sums, rows begins[n] to begins[n + 1] - 1.
struct AddPartialSums {
  const int64_t* elements;
  const int64_t* begins;
  const double* partial;  // [rows][channels]
  int64_t channels;
  int64_t stride;  // of an element's channels
  double* gradients;

  template <class Piece>
  TFB_HOST_DEVICE void operator()(int64_t n, const Piece& piece) const {
    double total[Piece::kMost] = {};
    for (int64_t row = begins[n]; row < begins[n + 1]; ++row) {
      const double* from = partial + row * channels + piece.first();
      for (int i = 0; i < piece.count(); ++i) total[i] += from[i];
    }
    double* to = gradients + elements[n] + piece.first() * stride;
    for (int i = 0; i < piece.count(); ++i) to[i * stride] += total[i];
  }
};

}  // namespace tfb

#endif  // TFB_CORE_FLASH_GRADIENT_FUNCTORS_H_
