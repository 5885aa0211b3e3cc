// Copies and sums of whole tensors, of up to four dimensions, on every device.
#ifndef TFB_CORE_LAYERS_COPY_TENSOR_H_
#define TFB_CORE_LAYERS_COPY_TENSOR_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "core/layers/tensor_rows.h"
#include "core/problem.h"
#include "core/technique.h"
#include "core/tensor.h"

namespace tfb {

// A tensor's rows as functors take them. An empty view has none, and no data.
class TensorRows {
 public:
  explicit TensorRows(const ConstTensorView& view);
  const RowsOfView& view() const { return rows_; }
  int64_t rows() const { return count_; }
  int64_t columns() const { return columns_; }

 private:
  RowsOfView rows_ = {};
  int64_t count_ = 0;
  int64_t columns_ = 0;
};

// Copies a tensor of any floating dtype to one of the same shape; an empty one stands for zeros. It
// allocates nothing; on CUDA it enqueues on the stream.
absl::Status CopyTensor(Device device, const ConstTensorView& from, const TensorView& to,
                        const Execution& execution);
// Sets a tensor to 0, likewise.
absl::Status ClearTensor(Device device, const TensorView& to, const Execution& execution);

// Sets memory of the device to 0, likewise.
absl::Status ClearBytes(Device device, absl::Span<std::byte> memory, const Execution& execution);

// Adds a tensor to one of the same shape, likewise.
absl::Status AddTensor(Device device, const ConstTensorView& from, const TensorView& to,
                       const Execution& execution);

}  // namespace tfb

#endif  // TFB_CORE_LAYERS_COPY_TENSOR_H_
