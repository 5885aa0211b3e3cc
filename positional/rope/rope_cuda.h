// The CUDA kernel of rope as C++ sees it. Pointers are to device memory.
#ifndef TFB_POSITIONAL_ROPE_ROPE_CUDA_H_
#define TFB_POSITIONAL_ROPE_ROPE_CUDA_H_

#include <stdint.h>

#include "core/cuda/device_view.h"
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

}  // namespace tfb::rope

#endif  // TFB_POSITIONAL_ROPE_ROPE_CUDA_H_
