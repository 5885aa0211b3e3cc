// The sums of the gradients of relative positions and spans (relative_positions.h, list_attention.h). Pointers are to the device's memory.
#ifndef TFB_CORE_LAYERS_ATTENTION_POSITION_PRODUCTS_H_
#define TFB_CORE_LAYERS_ATTENTION_POSITION_PRODUCTS_H_

#include <stdint.h>

#include "core/cuda/functor.h"
#include "core/layers/tensor_rows.h"

namespace tfb::layers {

// Row c of the gradient += sum_d r_d[c] T_d, in the order of the distances.
struct PositionProducts {
  const float* sinusoids;     // r, [rows][channels]
  const double* by_distance;  // T, [rows][width]
  int64_t rows;
  int64_t channels;
  int64_t width;
  double* gradient;  // [channels][width], or null
  RowsOfView to;     // then [channels, width]

  template <class Piece>
  TFB_HOST_DEVICE void operator()(int64_t c, const Piece& piece) const {
    double sums[Piece::kMost] = {};
    for (int64_t d = 0; d < rows; ++d) {
      const double factor = sinusoids[d * channels + c];
      const double* from = by_distance + d * width + piece.first();
      for (int i = 0; i < piece.count(); ++i) sums[i] += factor * from[i];
    }
    if (gradient != nullptr) {
      double* const of_row = gradient + c * width + piece.first();
      for (int i = 0; i < piece.count(); ++i) of_row[i] += sums[i];
      return;
    }
    float x[Piece::kMost];
    to.Load(c, piece, x);
    for (int i = 0; i < piece.count(); ++i) x[i] += static_cast<float>(sums[i]);
    to.Store(c, piece, x);
  }
};

// Row n of `to` += row n of the sums.
struct AddDoubleRows {
  const double* sums;  // [rows][width]
  int64_t width;
  RowsOfView to;

  template <class Piece>
  TFB_HOST_DEVICE void operator()(int64_t n, const Piece& piece) const {
    const double* from = sums + n * width + piece.first();
    float x[Piece::kMost];
    to.Load(n, piece, x);
    for (int i = 0; i < piece.count(); ++i) x[i] += static_cast<float>(from[i]);
    to.Store(n, piece, x);
  }
};

// Adds to the sum of head h the numbers of its queries, in the order of batch rows and tokens.
struct SumsOfHeads {
  const float* numbers;  // [batch][heads][tokens]
  int64_t batch;
  int64_t heads;
  int64_t tokens;
  double* sums;  // [heads]

  TFB_HOST_DEVICE void operator()(int64_t h) const {
    double sum = sums[h];
    for (int64_t b = 0; b < batch; ++b) {
      const float* from = numbers + (b * heads + h) * tokens;
      for (int64_t i = 0; i < tokens; ++i) sum += from[i];
    }
    sums[h] = sum;
  }
};

}  // namespace tfb::layers

#endif  // TFB_CORE_LAYERS_ATTENTION_POSITION_PRODUCTS_H_
