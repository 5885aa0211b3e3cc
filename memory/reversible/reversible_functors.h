// The step of reversible beside core/layers. Pointers are to the device's memory.
#ifndef TFB_MEMORY_REVERSIBLE_REVERSIBLE_FUNCTORS_H_
#define TFB_MEMORY_REVERSIBLE_REVERSIBLE_FUNCTORS_H_

#include <stdint.h>

#include "core/cuda/functor.h"

namespace tfb::reversible {

// y = a x + b z. Views are [batch, tokens, channels]; row n * tokens + t.
struct CombinationOfRows {
  float a;
  DeviceView x;
  float b;
  DeviceView z;
  DeviceView y;  // may be x or z
  int64_t tokens;

  template <class Piece>
  TFB_HOST_DEVICE void operator()(int64_t row, const Piece& piece) const {
    const int64_t n = row / tokens, t = row % tokens;
    float sum[Piece::kMost], term[Piece::kMost];
    piece.Load(x, Offset(x, n, t, 0), x.strides[2], sum);
    piece.Load(z, Offset(z, n, t, 0), z.strides[2], term);
    for (int i = 0; i < piece.count(); ++i) {
      const float first = a * sum[i], second = b * term[i];
      sum[i] = first + second;
    }
    piece.Store(sum, y, Offset(y, n, t, 0), y.strides[2]);
  }
};

}  // namespace tfb::reversible

#endif  // TFB_MEMORY_REVERSIBLE_REVERSIBLE_FUNCTORS_H_
