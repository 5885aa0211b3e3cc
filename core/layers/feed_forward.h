// The position-wise feed-forward network: Vaswani et al., arXiv:1706.03762v7, section 3.3.
//
//   y = output(activation(x W1 + b1) W2 + b2) + residual        W1 [in, inner], W2 [inner, out]
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
  // Computes y. Views are as in MatMulCall. It allocates nothing.
  absl::Status Run(const ConstTensorView& x, const ConstTensorView& residual, const TensorView& y,
                   const Execution& execution, const RowList& rows = {}) const;
  size_t bytes() const { return first_.bytes() + second_.bytes(); }

 private:
  PackedMatrix first_;
  PackedMatrix second_;
  Activation activation_ = Activation::kRelu;
  Activation output_ = Activation::kNone;
};

}  // namespace tfb

#endif  // TFB_CORE_LAYERS_FEED_FORWARD_H_
