// The position-wise feed-forward network: Vaswani et al., arXiv:1706.03762v7, section 3.3.
//
//   y = output(activation(x W1 + b1) W2 + b2) + residual        W1 [in, inner], W2 [inner, out]
//
// The backward pass, with z = x W1 + b1, h = activation(z), u = h W2 + b2 and dy = dL/dy:
//
//   du = dy * output'(u)                  dW2 = h^T du,  db2 = sum over rows of du
//   dz = (du W2^T) * activation'(z)       dW1 = x^T dz,  db1 = sum over rows of dz,  dx = dz W1^T
//
// (the chain rule). A Run keeps z, [rows, inner] in fp32, and u, [rows, out], unless output is the
// identity. h is computed again from z, which costs one activation a channel beside the six
// products' FLOPs of W1 and W2, and halves what is kept.
#ifndef TFB_CORE_LAYERS_FEED_FORWARD_H_
#define TFB_CORE_LAYERS_FEED_FORWARD_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "core/cuda/row_list.h"
#include "core/layers/activation.h"
#include "core/layers/matmul.h"
#include "core/problem.h"
#include "core/technique.h"
#include "core/tensor.h"
#include "core/workspace.h"

namespace tfb {

class FeedForward {
 public:
  FeedForward() = default;
  // Two matrices on one device.
  FeedForward(PackedMatrix first, PackedMatrix second, Activation activation,
              Activation output = Activation::kNone)
      : first_(std::move(first)),
        second_(std::move(second)),
        activation_(activation),
        output_(output) {}

  struct Sizes {
    int64_t in = 0;
    int64_t inner = 0;
    int64_t out = 0;
  };
  // Returns the bytes for the activations of up to `rows` rows, [rows, inner] in fp32, and the
  // products' scratch.
  static size_t workspace_bytes(Device device, int64_t rows, const Sizes& sizes, int threads);
  // Computes y. Views are as in MatMulCall. It allocates nothing. Where execution.kept is not
  // empty, it has kept_bytes() bytes and receives what Backward needs.
  absl::Status Run(const ConstTensorView& x, const ConstTensorView& residual, const TensorView& y,
                   const Execution& execution, const RowList& rows = {}) const;
  size_t bytes() const { return first_.bytes() + second_.bytes(); }

  // ---- The backward pass ----

  static size_t kept_bytes(int64_t rows, const Sizes& sizes, Activation output = Activation::kNone);
  static size_t backward_workspace_bytes(Device device, int64_t rows, const Sizes& sizes,
                                         int threads, Activation output = Activation::kNone);
  // Takes W1 and W2 once more, in host memory, and packs their transposes.
  absl::Status SetUpBackward(const ConstTensorView& w1, const ConstTensorView& w2);
  struct BackwardCall {
    ConstTensorView x;          // as Run read it
    ConstTensorView dy;         // of y's shape, which is the residual's gradient too
    ConstTensorView added;      // of x's shape, or empty: a summand of dx
    TensorView dx;              // of x's shape, or empty; may be the summand, and dy
    TensorView w1, b1, w2, b2;  // the parameters' gradients, f32, or empty
    bool accumulate = false;    // adds to what those hold
    // On CUDA: the rows that the Run had. Others are not read, and those of dx are left as they are.
    RowList rows = {};
  };
  // Computes the gradients from execution.kept as a Run on x filled it. It allocates nothing; on CUDA
  // it enqueues on the stream.
  absl::Status Backward(const BackwardCall& call, const Execution& execution) const;

 private:
  struct Kept {
    float* z;  // [rows, inner]
    float* u;  // [rows, out], or null
  };
  static Kept LayOutKept(int64_t rows, const Sizes& sizes, Activation output, Workspace& workspace);
  Sizes sizes() const { return {first_.in(), first_.out(), second_.out()}; }

  PackedMatrix first_;
  PackedMatrix second_;
  PackedMatrix first_transposed_;
  PackedMatrix second_transposed_;
  Activation activation_ = Activation::kRelu;
  Activation output_ = Activation::kNone;
};

}  // namespace tfb

#endif  // TFB_CORE_LAYERS_FEED_FORWARD_H_
