#include "core/cuda/for_each.h"

#include <algorithm>

#include "core/flash/rows.h"
#include "core/tensor.h"

namespace tfb {
namespace {

// Returns a view of no dimensions: rows are found by their offsets alone.
TensorView ViewOf(const DeviceView& view) {
  TensorView elements;
  elements.data = view.data;
  elements.dtype = view.element == Element::kBf16  ? DType::kBF16
                   : view.element == Element::kF16 ? DType::kF16
                                                   : DType::kF32;
  return elements;
}

}  // namespace

void HostPiece::Load(const DeviceView& view, int64_t offset, int64_t stride, float* to) const {
  offset += first_ * stride;
  if (view.element == Element::kF32 && stride == 1) {
    std::copy_n(static_cast<const float*>(view.data) + offset, count_, to);
  } else {
    LoadRow(ViewOf(view), offset, stride, count_, to);
  }
}

void HostPiece::Store(const float* from, const DeviceView& view, int64_t offset,
                      int64_t stride) const {
  offset += first_ * stride;
  if (view.element == Element::kF32 && stride == 1) {
    std::copy_n(from, count_, static_cast<float*>(view.data) + offset);
  } else {
    StoreRow(from, count_, ViewOf(view), offset, stride);
  }
}

}  // namespace tfb
