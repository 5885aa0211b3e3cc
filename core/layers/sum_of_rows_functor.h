// The step of AddScaled (matmul.h). Pointers are to the device's memory.
#ifndef TFB_CORE_LAYERS_SUM_OF_ROWS_FUNCTOR_H_
#define TFB_CORE_LAYERS_SUM_OF_ROWS_FUNCTOR_H_

#include <stdint.h>

#include "core/cuda/functor.h"

namespace tfb {

// y = alpha a + beta b. Views are [batch, tokens, channels]; row n * tokens + t.
struct SumOfRows {
  float alpha;
  DeviceView a;
  float beta;
  DeviceView b;
  DeviceView y;  // may be a or b
  int64_t tokens;

  template <class Piece>
  TFB_HOST_DEVICE void operator()(int64_t row, const Piece& piece) const {
    const int64_t n = row / tokens, t = row % tokens;
    float sum[Piece::kMost], term[Piece::kMost];
    piece.Load(a, Offset(a, n, t, 0), a.strides[2], sum);
    piece.Load(b, Offset(b, n, t, 0), b.strides[2], term);
    for (int i = 0; i < piece.count(); ++i) {
      const float first = alpha * sum[i], second = beta * term[i];
      sum[i] = first + second;
    }
    piece.Store(sum, y, Offset(y, n, t, 0), y.strides[2]);
  }
};

}  // namespace tfb

#endif  // TFB_CORE_LAYERS_SUM_OF_ROWS_FUNCTOR_H_
