// The element types of tensors as DLPack's.
#ifndef TFB_HARNESS_C_DLPACK_DTYPE_H_
#define TFB_HARNESS_C_DLPACK_DTYPE_H_

#include <dlpack/dlpack.h>

#include <cstdint>

#include "core/dtype.h"

namespace tfb {

inline DLDataType ToDLDataType(DType dtype) {
  const auto bits = static_cast<uint8_t>(8 * SizeOf(dtype));
  if (dtype == DType::kBF16) return {kDLBfloat, bits, 1};
  if (dtype == DType::kU8) return {kDLUInt, bits, 1};
  return {static_cast<uint8_t>(IsFloating(dtype) ? kDLFloat : kDLInt), bits, 1};
}

}  // namespace tfb

#endif  // TFB_HARNESS_C_DLPACK_DTYPE_H_
