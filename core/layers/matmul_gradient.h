// The gradients of a product's parameters.
//
//   y = x W + b        dW = x^T dy,   db_c = sum_r dy_rc,   dx = dy W^T
//
// with dy = dL/dy. (The gradient dx is a product itself: see PackedMatrix::CreateTransposed.)
// Source: the chain rule; Goodfellow, Bengio, Courville 2016, "Deep learning", section 6.5.6.
//
// Sums are fp32. The rows are cut into chunks, whose number depends on the sizes alone, and each
// chunk into blocks of 64 rows. A task is one chunk of rows for one block of dW; it adds the sums
// of its blocks in their order, and the sums of chunks are added in theirs. So the result does not
// depend on the number of threads, and a sum over n rows is off by no more than 64 + n / 64
// roundings.
//
// On CUDA tensor cores multiply, operands of fp32 as several of 16 bits that lose nothing which fp32
// sums could hold (matmul_gradient.cu). Chunks have up to 2048 rows, and the sums of 16 or 32 rows are
// added in their order. An infinity in x or dy may give NaN there. The rows of a list are cut into as
// many chunks as all rows are, by their number, which the device knows: the result depends on the listed
// rows and on the number of all.
//
// A row of dy that is 0 adds nothing, whatever x holds there, so that NaN of padding does not reach dW.
#ifndef TFB_CORE_LAYERS_MATMUL_GRADIENT_H_
#define TFB_CORE_LAYERS_MATMUL_GRADIENT_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "core/cuda/row_list.h"
#include "core/problem.h"
#include "core/technique.h"
#include "core/tensor.h"

namespace tfb {

// The views of a call, each with any strides. x and dy are f32, bf16 or f16.
struct MatMulGradientCall {
  ConstTensorView x;   // [batch, tokens, in] or [rows, in]
  ConstTensorView dy;  // [batch, tokens, out] or [rows, out]
  TensorView weights;  // dW, f32 [in, out], or empty
  TensorView bias;     // db, f32 [out], or empty
  // Adds to what dW and db hold, for parameters that are used several times.
  bool accumulate = false;
  RowList rows = {};    // CUDA alone: the sums are over these rows, and no others are read
  float bias_sign = 1;  // -1 for a bias that the product subtracts: db is then - sum_r dy_rc
};

// Returns the scratch of calls for up to `rows` rows in bytes.
size_t MatMulGradientWorkspaceBytes(Device device, int64_t rows, int64_t in, int64_t out,
                                    int threads);
// Computes dW and db. It allocates nothing; on CUDA it enqueues on the stream. Returns Internal where
// the shapes do not fit.
absl::Status MatMulGradient(Device device, const MatMulGradientCall& call,
                            const Execution& execution);

// The same on the CPU.
size_t MatMulGradientWorkspaceBytes(int64_t rows, int64_t in, int64_t out, int threads);
absl::Status MatMulGradient(const MatMulGradientCall& call, const Execution& execution);

}  // namespace tfb

#endif  // TFB_CORE_LAYERS_MATMUL_GRADIENT_H_
