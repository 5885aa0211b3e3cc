// Layer normalisation: Ba, Kiros, Hinton, arXiv:1607.06450v1, section 3.
//
//   y_c = gamma_c (x_c - mean) / sqrt(variance + epsilon) + beta_c
//   mean = 1/n sum_c x_c,   variance = 1/n sum_c (x_c - mean)^2
//
// over the n channels c of a row. The variance is the biased one, in a second pass over the row, so
// that a large common offset does not cancel. Sums are float64, the rest is fp32, on every device.
//
// The backward pass, with dy = dL/dy, the normalised row h = (x - mean) / sqrt(variance + epsilon)
// and g_c = gamma_c dy_c:
//
//   dx_c = (g_c - 1/n sum_e g_e - h_c 1/n sum_e g_e h_e) / sqrt(variance + epsilon)
//   dgamma_c = sum over rows of dy_c h_c,   dbeta_c = sum over rows of dy_c
//
// (the chain rule; section 3 of the paper has no formula for it). A Backward reads x and computes
// the statistics of its rows again, so that a Run keeps nothing. A row of dy that is 0 adds nothing
// and has no gradient but the summand, whatever x holds there, such as NaN of padding. Sums over
// rows are fp32, in an order that the number of rows alone decides.
#ifndef TFB_CORE_LAYERS_LAYER_NORM_H_
#define TFB_CORE_LAYERS_LAYER_NORM_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/cuda/device_array.h"
#include "core/cuda/row_list.h"
#include "core/problem.h"
#include "core/technique.h"
#include "core/tensor.h"

namespace tfb {

constexpr double kLayerNormEpsilon = 1e-5;

class LayerNorm {
 public:
  LayerNorm() = default;
  // Copies gamma and beta, [channels], from host memory to the device.
  static absl::StatusOr<LayerNorm> Create(Device device, const ConstTensorView& gamma,
                                          const ConstTensorView& beta,
                                          double epsilon = kLayerNormEpsilon);

  // CPU: one row for each thread. CUDA: none.
  static size_t workspace_bytes(Device device, int64_t channels, int threads);

  // x is [batch, tokens, channels] or [rows, channels], y of its shape; y may be x. Each may be
  // f32, bf16 or f16, with any strides. It allocates nothing. Returns Internal where the shapes do
  // not fit. Lists of rows are supported on CUDA.
  absl::Status Run(const ConstTensorView& x, const TensorView& y, const Execution& execution,
                   const RowList& rows = {}) const;

  struct BackwardCall {
    ConstTensorView x;   // as Run read it
    ConstTensorView dy;  // of x's shape
    ConstTensorView
        added;         // of x's shape, or empty: a summand of dx, such as a residual's gradient
    TensorView dx;     // of x's shape, or empty; may be dy or the summand
    TensorView gamma;  // dgamma, f32 [channels], or empty
    TensorView beta;   // dbeta, f32 [channels], or empty
    bool accumulate = false;  // adds to what dgamma and dbeta hold
    RowList rows = {};        // on CUDA; others are neither read nor written
  };
  // Returns the scratch of a Backward of up to `rows` rows: the sums of up to 64 groups of rows, and
  // on the CPU two rows for each thread, on CUDA the statistics of each row.
  static size_t backward_workspace_bytes(Device device, int64_t rows, int64_t channels,
                                         int threads);
  // Computes the gradients. Views are as in Run. It allocates nothing; on CUDA it enqueues on the
  // stream. Returns Internal where the shapes do not fit.
  absl::Status Backward(const BackwardCall& call, const Execution& execution) const;

  Device device() const { return gamma_.device(); }
  size_t bytes() const { return gamma_.bytes() + beta_.bytes(); }

 private:
  absl::Status RunCpu(const ConstTensorView& x, const TensorView& y,
                      const Execution& execution) const;
  absl::Status RunCuda(const ConstTensorView& x, const TensorView& y, const Execution& execution,
                       const RowList& rows) const;
  void BackwardCpu(const BackwardCall& call, const Execution& execution) const;
  absl::Status BackwardCuda(const BackwardCall& call, const Execution& execution) const;

  DeviceArray<float> gamma_;
  DeviceArray<float> beta_;
  double epsilon_ = kLayerNormEpsilon;
};

}  // namespace tfb

#endif  // TFB_CORE_LAYERS_LAYER_NORM_H_
