// Activations of whole tensors, on every device.
#ifndef TFB_CORE_LAYERS_ACTIVATION_ROWS_H_
#define TFB_CORE_LAYERS_ACTIVATION_ROWS_H_

#include "absl/status/status.h"
#include "core/cuda/row_list.h"
#include "core/layers/activation.h"
#include "core/problem.h"
#include "core/technique.h"
#include "core/tensor.h"

namespace tfb {

// to = activation(from), channel by channel. The tensors have one shape, of up to four dimensions; each
// is f32, bf16 or f16, in the device's memory, with any strides, and `to` may be `from`. It allocates
// nothing; on CUDA it enqueues on the stream. Of a list, the listed rows are read and written alone.
absl::Status Activate(Device device, Activation activation, const ConstTensorView& from,
                      const TensorView& to, const Execution& execution, const RowList& rows = {});

// to = d activation'(x), likewise; `to` may be d. Where a factor is 0, so is the product (activation.h).
absl::Status MultiplyByDerivative(Device device, Activation activation, const ConstTensorView& x,
                                  const ConstTensorView& d, const TensorView& to,
                                  const Execution& execution, const RowList& rows = {});

}  // namespace tfb

#endif  // TFB_CORE_LAYERS_ACTIVATION_ROWS_H_
