// A gradient that a caller left out is 0, and sums begin with 0.
#ifndef TFB_CORE_ZEROS_H_
#define TFB_CORE_ZEROS_H_

#include <cstddef>
#include <cstdint>

#include "absl/types/span.h"
#include "core/tensor.h"
#include "core/thread_pool.h"

namespace tfb {

// Returns the gradient, or where it is empty zeros of the shape of `like`.
inline ConstTensorView OrZeros(const ConstTensorView& gradient, const ConstTensorView& like) {
  static constexpr float kZero = 0;
  if (!gradient.empty()) return gradient;
  return ConstTensorView(&kZero, DType::kF32, like.shape(), Shape(like.rank, 0));
}

// Returns the number of rows, of the last dimension; 0 where they have no elements.
inline int64_t RowsOf(const TensorView& view) {
  const int64_t channels = view.dim(view.rank - 1);
  return channels == 0 ? 0 : view.num_elements() / channels;
}
// Returns the offset of a row, whose number counts through all dimensions but the last.
inline int64_t RowOffset(const TensorView& view, int64_t row) {
  int64_t offset = 0;
  for (int axis = view.rank - 2; axis >= 0; --axis) {
    offset += row % view.dim(axis) * view.stride(axis);
    row /= view.dim(axis);
  }
  return offset;
}

// Set memory to 0, a piece a task.
void SetToZero(absl::Span<std::byte> memory, ThreadPool* pool);
void SetToZero(const TensorView& view, ThreadPool* pool);

}  // namespace tfb

#endif  // TFB_CORE_ZEROS_H_
