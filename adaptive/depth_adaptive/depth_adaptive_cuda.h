// The CUDA kernels of depth_adaptive as C++ sees them. Pointers are to device memory.
#ifndef TFB_ADAPTIVE_DEPTH_ADAPTIVE_DEPTH_ADAPTIVE_CUDA_H_
#define TFB_ADAPTIVE_DEPTH_ADAPTIVE_DEPTH_ADAPTIVE_CUDA_H_

#include <stdint.h>

#include "adaptive/depth_adaptive/depth_adaptive_functors.h"
#include "core/cuda/kernel_table.h"
#include "core/cuda/row_list.h"

namespace tfb::depth_adaptive {

// scores[s][n] = weights_n . mean_s + bias_n, mean_s that of rows s * count, ..., s * count + count
// - 1; exits[s] = 1 + argmax_n scores[s][n]; ties go to the smallest n.
struct ClassifyArguments {
  const float* rows;     // [segments * count, channels]
  const float* weights;  // [classes, channels]
  const float* bias;     // [classes], kMaxExits at most
  float* scores;         // [segments, classes]
  int32_t* exits;        // [segments]
  int64_t segments;
  int64_t count;
  int64_t channels;
  int64_t classes;
};

// leaves[r] = exits[r / count] <= layer; or, where there are weights, weights . row_r + bias > 0.
struct ObeyArguments {
  const int32_t* exits;
  const float* rows;     // [rows, channels]
  const float* weights;  // [channels], or null
  const float* bias;     // one
  uint8_t* leaves;
  int64_t row_count;
  int64_t count;
  int64_t channels;
  int64_t layer;
  RowList list;
};

// With chi = sigmoid(weights . row_r + bias), layer < classes, and rest the last class of q, or 1
// for layer 1:
//
//   q of row r, layer = chi rest,  the last class = (1 - chi) rest
struct GeometricArguments {
  const float* rows;     // [row_count, channels]
  const float* weights;  // [channels]
  const float* bias;     // one
  DeviceProbabilities q;
  int64_t row_count;
  int64_t channels;
  int64_t layer;
  int64_t classes;
};

struct DepthAdaptiveKernels {
  // Each launcher enqueues on the stream and returns null, or a text that says why it could not.
  const char* (*classify)(const ClassifyArguments& arguments, void* stream);
  const char* (*obey)(const ObeyArguments& arguments, void* stream);
  const char* (*geometric)(const GeometricArguments& arguments, void* stream);
};

}  // namespace tfb::depth_adaptive

#endif  // TFB_ADAPTIVE_DEPTH_ADAPTIVE_DEPTH_ADAPTIVE_CUDA_H_
