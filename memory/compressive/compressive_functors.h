// Steps of row_operations.h and of the losses' gradients that all devices run. Pointers are to the device's memory.
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

// Replaces b by the gradient of the norm of a - b in each batch row, or of its mean square. Row n is that
// of batch row n / rows.
struct GradientOfDifference {
  DeviceView a;        // [batch, rows, channels]
  DeviceView b;        // likewise
  DeviceView of_loss;  // [batch]
  DeviceView norm;     // [batch], f32; or null, for the mean square
  int64_t rows;
  double twice_share;  // 2 / (rows channels)

  template <class Piece>
  TFB_HOST_DEVICE void operator()(int64_t n, const Piece& piece) const {
    const int64_t batch = n / rows, row = n % rows;
    float x[Piece::kMost], y[Piece::kMost];
    double factor = -Of(of_loss, batch, piece);
    if (norm.data == nullptr) {
      factor *= twice_share;
    } else {
      const double length = Of(norm, batch, piece);
      factor = length == 0 ? 0 : factor / length;
    }
    piece.Load(a, Offset(a, batch, row, 0), a.strides[2], x);
    piece.Load(b, Offset(b, batch, row, 0), b.strides[2], y);
    for (int i = 0; i < piece.count(); ++i) {
      y[i] = static_cast<float>(factor * (static_cast<double>(x[i]) - y[i]));
    }
    piece.Store(y, b, Offset(b, batch, row, 0), b.strides[2]);
  }

 private:
  // Returns the number of a batch row.
  template <class Piece>
  TFB_HOST_DEVICE static double Of(const DeviceView& numbers, int64_t batch, const Piece& piece) {
    float x[Piece::kMost];
    piece.Load(numbers, batch * numbers.strides[0], 0, x);  // the same for each column
    return x[0];
  }
};

}  // namespace tfb::compressive

#endif  // TFB_MEMORY_COMPRESSIVE_COMPRESSIVE_FUNCTORS_H_
