// Products of a hidden state with a weight matrix.
//
//   y = activation(x W + b) + residual        x [rows, in], W [in, out], b [out]
//
// W is packed once into panels of 64 columns, [panel][in][64], so that the inner loop of
// core/cpu/kernels.h reads it contiguously: 64 x 64 floats of a panel are 16 KiB, half of a 32 KiB
// L1, and are used for all rows of a block before the next 64 channels are read. A task is one
// panel for one block of rows; it sums in fp32 in the order of the input channels, so the result
// depends neither on the number of threads nor on the other rows.
#ifndef TFB_CORE_LAYERS_MATMUL_H_
#define TFB_CORE_LAYERS_MATMUL_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "core/layers/activation.h"
#include "core/technique.h"
#include "core/tensor.h"

namespace tfb {

// A weight matrix as the CPU wants it: a copy, made at Setup.
class PackedMatrix {
 public:
  PackedMatrix() = default;
  // W [in, out] and b [out], or no bias where it is empty. Any floating dtype and strides.
  explicit PackedMatrix(const ConstTensorView& weights, const ConstTensorView& bias = {});
  // The columns of several matrices side by side, such as those of queries, keys and values: x is
  // then read once.
  explicit PackedMatrix(const std::vector<ConstTensorView>& weights);

  int64_t in() const { return in_; }
  int64_t out() const { return out_; }
  // [in][64]: columns 64 p to 64 p + 63 of W, zero beyond the last.
  const float* Panel(int64_t p) const { return panels_.view().At<float>(p); }
  const float* bias() const { return bias_.empty() ? nullptr : bias_.data(); }
  size_t bytes() const { return panels_.bytes() + bias_.size() * sizeof(float); }

 private:
  int64_t in_ = 0;
  int64_t out_ = 0;
  Tensor panels_;
  std::vector<float> bias_;
};

struct MatMulCall {
  ConstTensorView x;         // [batch, tokens, in] or [rows, in]
  ConstTensorView residual;  // of y's shape, or empty
  TensorView y;              // [batch, tokens, out] or [rows, out]; may be the residual itself
  Activation activation = Activation::kNone;
};

// For each thread one block of products and one of converted inputs.
size_t MatMulWorkspaceBytes(int threads);

// x, residual and y may each be f32, bf16 or f16, with any strides; sums are fp32. Allocates
// nothing. Internal where the shapes do not fit the matrix.
absl::Status MatMul(const PackedMatrix& matrix, const MatMulCall& call, const Execution& execution);

// y = a + b, of shape [batch, tokens, channels] or [rows, channels] each. y may be a or b.
absl::Status Add(const ConstTensorView& a, const ConstTensorView& b, const TensorView& y,
                 const Execution& execution);

}  // namespace tfb

#endif  // TFB_CORE_LAYERS_MATMUL_H_
