// A gradient that a caller left out is 0, and sums begin with 0.
#ifndef TFB_CORE_ZEROS_H_
#define TFB_CORE_ZEROS_H_

#include <cstddef>

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

// Set memory to 0, a piece a task.
void SetToZero(absl::Span<std::byte> memory, ThreadPool* pool);
void SetToZero(const TensorView& view, ThreadPool* pool);

}  // namespace tfb

#endif  // TFB_CORE_ZEROS_H_
