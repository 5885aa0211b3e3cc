// The CUDA kernel of a product's gradients (matmul_gradient.h) as C++ sees it. Pointers are to device memory.
#ifndef TFB_CORE_LAYERS_MATMUL_GRADIENT_KERNELS_H_
#define TFB_CORE_LAYERS_MATMUL_GRADIENT_KERNELS_H_

#include <stdint.h>

#include "core/cuda/device_view.h"
#include "core/cuda/functor.h"
#include "core/cuda/row_list.h"
#include "core/layers/layer_kernels.h"

namespace tfb {

struct MatMulGradientArguments {
  DeviceRows x;   // [rows, in]; or none, where db alone is wanted: `in` is 0
  DeviceRows dy;  // [rows, out]
  float* sums;    // [chunks][in + 1][out], the last row of which is the bias'
  int64_t rows;
  int64_t in;
  int64_t out;
  int64_t chunks;
  RowList list;
  bool wants_bias;  // else its sums are not written
};

// Adds up the chunks' sums of row k, in their order, and writes them, or adds them to what is there.
struct SumOfChunks {
  const float* sums;  // [chunks][in + 1][out]
  int64_t chunks;
  int64_t in;
  int64_t out;
  DeviceView weights;  // [in, out], or null
  DeviceView bias;     // [out], or null
  bool accumulate;
  float bias_sign;

  template <class Piece>
  TFB_HOST_DEVICE void operator()(int64_t k, const Piece& piece) const {
    const DeviceView& to = k == in ? bias : weights;
    if (to.data == nullptr) return;
    const int64_t stride = k == in ? to.strides[0] : to.strides[1];
    const int64_t offset = k == in ? 0 : k * to.strides[0];
    float sum[Piece::kMost] = {}, before[Piece::kMost];
    for (int64_t n = 0; n < chunks; ++n) {
      const float* from = sums + (n * (in + 1) + k) * out + piece.first();
      for (int i = 0; i < piece.count(); ++i) sum[i] += from[i];
    }
    if (accumulate) piece.Load(to, offset, stride, before);
    for (int i = 0; i < piece.count(); ++i) {
      if (k == in) sum[i] *= bias_sign;
      if (accumulate) sum[i] += before[i];
    }
    piece.Store(sum, to, offset, stride);
  }
};

struct MatMulGradientKernels {
  // Enqueues on the stream and returns null, or a text that says why it could not.
  const char* (*multiply)(const MatMulGradientArguments& arguments, void* stream);
};

}  // namespace tfb

#endif  // TFB_CORE_LAYERS_MATMUL_GRADIENT_KERNELS_H_
