// Layer normalisation: Ba, Kiros, Hinton, arXiv:1607.06450v1, section 3.
//
//   y_c = gamma_c (x_c - mean) / sqrt(variance + epsilon) + beta_c
//   mean = 1/n sum_c x_c,   variance = 1/n sum_c (x_c - mean)^2
//
// over the n channels c of a row. The variance is the biased one, in a second pass over the row, so that a large common offset does
// not cancel. Sums are float64, the rest is fp32.
#ifndef TFB_CORE_LAYERS_LAYER_NORM_H_
#define TFB_CORE_LAYERS_LAYER_NORM_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "core/technique.h"
#include "core/tensor.h"

namespace tfb {

constexpr double kLayerNormEpsilon = 1e-5;

struct LayerNormCall {
  ConstTensorView x;             // [batch, tokens, channels] or [rows, channels]
  const float* gamma = nullptr;  // [channels]
  const float* beta = nullptr;   // [channels]
  TensorView y;                  // of x's shape; may be x itself
  double epsilon = kLayerNormEpsilon;
};

// For each thread one row.
size_t LayerNormWorkspaceBytes(int64_t channels, int threads);

// x and y may each be f32, bf16 or f16, with any strides. Allocates nothing. Internal where the
// shapes differ.
absl::Status LayerNorm(const LayerNormCall& call, const Execution& execution);

}  // namespace tfb

#endif  // TFB_CORE_LAYERS_LAYER_NORM_H_
