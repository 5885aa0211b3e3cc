#include "core/flash/rows.h"

#include <cstring>
#include <type_traits>

namespace tfb {
namespace {

// Converts element by element, in loops that the compiler vectorises where the stride is known to
// be 1.
template <class From, class To>
void Convert(const From* from, int64_t from_stride, To* to, int64_t to_stride, int64_t channels) {
  if (from_stride != 1 || to_stride != 1) {
    for (int64_t c = 0; c < channels; ++c) {
      to[c * to_stride] = static_cast<To>(from[c * from_stride]);
    }
  } else if constexpr (std::is_same_v<From, To>) {
    std::memcpy(to, from, channels * sizeof(To));
  } else {
    for (int64_t c = 0; c < channels; ++c) to[c] = static_cast<To>(from[c]);
  }
}

template <class T>
void Load(const void* data, int64_t offset, int64_t stride, int64_t channels, float* to) {
  Convert(static_cast<const T*>(data) + offset, stride, to, 1, channels);
}

template <class T>
void Store(const float* from, int64_t channels, void* data, int64_t offset, int64_t stride) {
  Convert(from, 1, static_cast<T*>(data) + offset, stride, channels);
}

}  // namespace

void LoadRow(const ConstTensorView& view, int64_t offset, int64_t stride, int64_t channels,
             float* to) {
  switch (view.dtype) {
    case DType::kBF16:
      return Load<BFloat16>(view.data, offset, stride, channels, to);
    case DType::kF16:
      return Load<Half>(view.data, offset, stride, channels, to);
    case DType::kF64:
      return Load<double>(view.data, offset, stride, channels, to);
    default:
      return Load<float>(view.data, offset, stride, channels, to);
  }
}

void StoreRow(const float* from, int64_t channels, const TensorView& view, int64_t offset,
              int64_t stride) {
  switch (view.dtype) {
    case DType::kBF16:
      return Store<BFloat16>(from, channels, view.mutable_data(), offset, stride);
    case DType::kF16:
      return Store<Half>(from, channels, view.mutable_data(), offset, stride);
    case DType::kF64:
      return Store<double>(from, channels, view.mutable_data(), offset, stride);
    default:
      return Store<float>(from, channels, view.mutable_data(), offset, stride);
  }
}

bool AllFinite(const float* row, int64_t channels) {
  constexpr uint32_t kExponent = 0x7F800000;  // all ones for an infinity or NaN
  uint32_t found = 0;
  for (int64_t c = 0; c < channels; ++c) {
    uint32_t bits;
    std::memcpy(&bits, row + c, sizeof(bits));
    found |= (bits & kExponent) == kExponent;
  }
  return found == 0;
}

}  // namespace tfb
