// A step of row_operations.h that all devices run. Pointers are to the device's memory.
#ifndef TFB_MEMORY_COMPRESSIVE_COMPRESSIVE_FUNCTORS_H_
#define TFB_MEMORY_COMPRESSIVE_COMPRESSIVE_FUNCTORS_H_

#include <math.h>
#include <stdint.h>

#include "core/cuda/functor.h"

namespace tfb::compressive {

// Pools `rate` rows into one, which is row b * blocks + block.
struct PooledRows {
  DeviceView from;  // [batch, blocks * rate, channels]
  DeviceView to;    // [batch, blocks, channels]
  int64_t blocks;
  int64_t rate;
  bool max;

  template <class Piece>
  TFB_HOST_DEVICE void operator()(int64_t row, const Piece& piece) const {
    const int64_t b = row / blocks, block = row % blocks;
    float x[Piece::kMost], largest[Piece::kMost];
    double sum[Piece::kMost];
    for (int i = 0; i < piece.count(); ++i) {
      sum[i] = 0;
      largest[i] = -INFINITY;
    }
    for (int64_t n = 0; n < rate; ++n) {
      piece.Load(from, Offset(from, b, block * rate + n, 0), from.strides[2], x);
      for (int i = 0; i < piece.count(); ++i) {
        sum[i] += x[i];
        if (!(x[i] <= largest[i])) largest[i] = x[i];  // a NaN stays
      }
    }
    for (int i = 0; i < piece.count(); ++i) {
      x[i] = max ? largest[i] : static_cast<float>(sum[i] / static_cast<double>(rate));
    }
    piece.Store(x, to, Offset(to, b, block, 0), to.strides[2]);
  }
};

}  // namespace tfb::compressive

#endif  // TFB_MEMORY_COMPRESSIVE_COMPRESSIVE_FUNCTORS_H_
