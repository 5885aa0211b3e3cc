// The CUDA kernels of layer_norm.h as C++ sees them: plain data, launchers and a functor. Pointers are
// to device memory.
#ifndef TFB_CORE_LAYERS_LAYER_NORM_KERNELS_H_
#define TFB_CORE_LAYERS_LAYER_NORM_KERNELS_H_

#include <stdint.h>

#include "core/cuda/functor.h"
#include "core/cuda/row_list.h"
#include "core/layers/layer_kernels.h"
#include "core/layers/tensor_rows.h"

namespace tfb {

// The arguments of LayerNorm; y may be x.
struct LayerNormArguments {
  DeviceRows x;  // [rows, channels]
  const float* gamma;
  const float* beta;
  DeviceRows y;
  int64_t rows;
  int64_t channels;
  double share;  // 1 / channels
  double epsilon;
  RowList list;
};

// The statistics of a row of x, for its gradients.
struct RowStatistics {
  double mean;
  double scale;  // 1 / sqrt(variance + epsilon), rounded to fp32; -1 where the row of dy is 0
};

// The gradient of x; dx may be dy or the summand.
struct LayerNormGradientArguments {
  DeviceRows x;  // [rows, channels], as all others
  DeviceRows dy;
  DeviceRows added;  // or none
  DeviceRows dx;
  const float* gamma;
  RowStatistics* statistics;  // [rows]
  int64_t rows;
  int64_t channels;
  double share;  // 1 / channels
  double epsilon;
  RowList list;
};

// Adds up what the rows of one group add to dgamma and dbeta, in the order of the rows.
struct SumsOfNorm {
  RowsOfView x;
  RowsOfView dy;
  const RowStatistics* statistics;  // [rows]
  float* sums;                      // [groups][2][channels]
  int64_t rows;
  int64_t group_rows;
  int64_t channels;
  const uint8_t* is_listed;  // [rows], or null: all are

  template <class Piece>
  TFB_HOST_DEVICE void operator()(int64_t group, const Piece& piece) const {
    float of_gamma[Piece::kMost] = {}, of_beta[Piece::kMost] = {};
    float of_x[Piece::kMost], of_y[Piece::kMost];
    const int64_t last = (group + 1) * group_rows, end = last < rows ? last : rows;
    for (int64_t row = group * group_rows; row < end; ++row) {
      if (is_listed != nullptr && is_listed[row] == 0) continue;
      const double mean = statistics[row].mean;
      const float scale = static_cast<float>(statistics[row].scale);
      if (scale < 0) continue;  // whatever x holds there
      x.Load(row, piece, of_x);
      dy.Load(row, piece, of_y);
      for (int i = 0; i < piece.count(); ++i) {
        of_gamma[i] += of_y[i] * (static_cast<float>(of_x[i] - mean) * scale);
        of_beta[i] += of_y[i];
      }
    }
    float* const to = sums + group * 2 * channels + piece.first();
    for (int i = 0; i < piece.count(); ++i) {
      to[i] = of_gamma[i];
      to[channels + i] = of_beta[i];
    }
  }
};

// Each launcher enqueues on the stream and returns null, or a text that says why it could not.
struct LayerNormKernels {
  const char* (*normalize)(const LayerNormArguments& arguments, void* stream);
  // Writes the statistics.
  const char* (*measure)(const LayerNormGradientArguments& arguments, void* stream);
  // Writes dx from the statistics.
  const char* (*differentiate)(const LayerNormGradientArguments& arguments, void* stream);
};

}  // namespace tfb

#endif  // TFB_CORE_LAYERS_LAYER_NORM_KERNELS_H_
