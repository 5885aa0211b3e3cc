// Layer normalisation: Ba, Kiros, Hinton, arXiv:1607.06450v1, section 3.
//
//   y_c = gamma_c (x_c - mean) / sqrt(variance + epsilon) + beta_c
//   mean = 1/n sum_c x_c,   variance = 1/n sum_c (x_c - mean)^2
//
// over the n channels c of a row. The variance is the biased one, in a second pass over the row, so
// that a large common offset does not cancel. Sums are float64, the rest is fp32, on every device.
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
  Device device() const { return gamma_.device(); }
  size_t bytes() const { return gamma_.bytes() + beta_.bytes(); }

 private:
  absl::Status RunCpu(const ConstTensorView& x, const TensorView& y,
                      const Execution& execution) const;
  absl::Status RunCuda(const ConstTensorView& x, const TensorView& y, const Execution& execution,
                       const RowList& rows) const;

  DeviceArray<float> gamma_;
  DeviceArray<float> beta_;
  double epsilon_ = kLayerNormEpsilon;
};

}  // namespace tfb

#endif  // TFB_CORE_LAYERS_LAYER_NORM_H_
