// The CUDA kernel of rope as C++ sees it. Pointers are to device memory.
#ifndef TFB_POSITIONAL_ROPE_ROPE_CUDA_H_
#define TFB_POSITIONAL_ROPE_ROPE_CUDA_H_

#include <stdint.h>

#include "core/cuda/device_view.h"
#include "core/cuda/functor.h"
#include "core/cuda/kernel_table.h"

namespace tfb::rope {

// The rows to rotate: those of queries, or of keys.
struct TurnedRows {
  DeviceView from;  // [batch, heads, tokens, channels]
  DeviceView to;    // the same shape
  int64_t batch;
  int64_t heads;
  int64_t tokens;
  int64_t first;  // row n has row n + first of the tables
};

// The kernel computes in Real, float or double.
template <class Real>
struct TurnArguments {
  TurnedRows queries;
  TurnedRows keys;
  const Real* cos;  // [positions, pairs]
  const Real* sin;
  int channels;
  int pairs;  // the channels behind the pairs are copied
  bool half;  // pair t is channels t and t + pairs; else 2 t and 2 t + 1
};

template <class Real>
struct RopeKernels {
  // Enqueues on the stream and returns null, or a text that says why it could not.
  const char* (*turn)(const TurnArguments<Real>& arguments, void* stream);
};

// Adds the rows of gradients, turned back, to those of f32: element n is a pair of channels of a
// row, or a channel behind the pairs, of `cells` in a row.
template <class Real>
struct TurnBack {
  TurnedRows rows;
  const Real* cos;  // [positions, pairs]
  const Real* sin;
  int cells;
  int pairs;
  bool half;

  TFB_HOST_DEVICE void operator()(int64_t n) const {
    const int64_t cell = n % cells, row = n / cells;
    const int64_t t = row % rows.tokens, h = row / rows.tokens % rows.heads;
    const int64_t b = row / rows.tokens / rows.heads;
    const auto from = [&](int64_t c) {
      return static_cast<const float*>(rows.from.data)[Offset(rows.from, b, h, t, c)];
    };
    const auto to = [&](int64_t c) -> float& {
      return static_cast<float*>(rows.to.data)[Offset(rows.to, b, h, t, c)];
    };
    if (cell >= pairs) {
      to(pairs + cell) += from(pairs + cell);
      return;
    }
    const int64_t first = half ? cell : 2 * cell, second = half ? cell + pairs : 2 * cell + 1;
    const Real c = cos[(t + rows.first) * pairs + cell], s = sin[(t + rows.first) * pairs + cell];
    const Real x = from(first), y = from(second);
    to(first) += static_cast<float>(x * c + y * s);
    to(second) += static_cast<float>(y * c - x * s);
  }
};

}  // namespace tfb::rope

#endif  // TFB_POSITIONAL_ROPE_ROPE_CUDA_H_
