// Rows of tensors of any dtype as rows of float, for engines that convert tile by tile.
#ifndef TFB_CORE_FLASH_ROWS_H_
#define TFB_CORE_FLASH_ROWS_H_

#include <cstdint>

#include "core/tensor.h"

namespace tfb {

// to[c] = row element c, for channels elements that begin `offset` elements into the view and lie
// `stride` apart.
void LoadRow(const ConstTensorView& view, int64_t offset, int64_t stride, int64_t channels,
             float* to);
// Does the reverse, rounding to the view's dtype.
void StoreRow(const float* from, int64_t channels, const TensorView& view, int64_t offset,
              int64_t stride);

// Tells whether none of the elements is an infinity or NaN.
bool AllFinite(const float* row, int64_t channels);

// Returns the least multiple of `quantum` that is not below `value`.
constexpr int64_t RoundUp(int64_t value, int64_t quantum) {
  return (value + quantum - 1) / quantum * quantum;
}

}  // namespace tfb

#endif  // TFB_CORE_FLASH_ROWS_H_
