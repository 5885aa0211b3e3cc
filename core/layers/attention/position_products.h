// The gradient of the matrix that projects sinusoids (relative_positions.h). Pointers are to the device's memory.
#ifndef TFB_CORE_LAYERS_ATTENTION_POSITION_PRODUCTS_H_
#define TFB_CORE_LAYERS_ATTENTION_POSITION_PRODUCTS_H_

#include <stdint.h>

#include "core/cuda/functor.h"

namespace tfb::layers {

// Row c of the gradient += sum_d r_d[c] T_d, in the order of the distances.
struct PositionProducts {
  const float* sinusoids;     // r, [rows][channels]
  const double* by_distance;  // T, [rows][width]
  int64_t rows;
  int64_t channels;
  int64_t width;
  double* gradient;  // [channels][width]

  template <class Piece>
  TFB_HOST_DEVICE void operator()(int64_t c, const Piece& piece) const {
    double sums[Piece::kMost] = {};
    for (int64_t d = 0; d < rows; ++d) {
      const double factor = sinusoids[d * channels + c];
      const double* from = by_distance + d * width + piece.first();
      for (int i = 0; i < piece.count(); ++i) sums[i] += factor * from[i];
    }
    double* to = gradient + c * width + piece.first();
    for (int i = 0; i < piece.count(); ++i) to[i] += sums[i];
  }
};

}  // namespace tfb::layers

#endif  // TFB_CORE_LAYERS_ATTENTION_POSITION_PRODUCTS_H_
