// The logarithm of a softmax over channels, on every device:
//
//   y_c = (x_c - max) - log sum_e exp(x_e - max)        max = max_e x_e, natural logarithm
//
// The computation is in fp32. A row with a NaN, or with nothing above -inf, has no softmax: it
// becomes NaN.
//
// The backward pass, with dy = dL/dy:   dx_c = dy_c - exp(y_c) sum_e dy_e
#ifndef TFB_CORE_LAYERS_LOG_SOFTMAX_H_
#define TFB_CORE_LAYERS_LOG_SOFTMAX_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "core/problem.h"
#include "core/technique.h"
#include "core/tensor.h"

namespace tfb {

// CPU: a row and its exponentials for each thread. CUDA: none.
size_t LogSoftmaxWorkspaceBytes(Device device, int64_t channels, int threads);

// x is [batch, tokens, channels] or [rows, channels], y of its shape; y may be x. Both are in
// memory of the device, each f32, bf16 or f16, with any strides. LogSoftmax allocates nothing. It
// returns Internal where the shapes do not fit.
absl::Status LogSoftmax(Device device, const ConstTensorView& x, const TensorView& y,
                        const Execution& execution);

// Computes dx in fp32, of x's shape, which may be dy. x is what LogSoftmax read or wrote: the log
// softmax of y is y. It allocates nothing and needs LogSoftmaxWorkspaceBytes. It returns Internal
// where the shapes do not fit.
absl::Status LogSoftmaxBackward(Device device, const ConstTensorView& x, const ConstTensorView& dy,
                                const TensorView& dx, const Execution& execution);

}  // namespace tfb

#endif  // TFB_CORE_LAYERS_LOG_SOFTMAX_H_
