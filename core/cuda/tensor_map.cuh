// Describes tensors for CopyBox of hopper.cuh, on the host.
#ifndef TFB_CORE_CUDA_TENSOR_MAP_CUH_
#define TFB_CORE_CUDA_TENSOR_MAP_CUH_

#include <string.h>

#include "core/cuda/kernel.cuh"
#include "core/cuda/tensor_map.h"

#ifdef __CUDACC__
#include <cuda.h>
#endif

namespace tfb {
namespace {  // internal linkage, as in kernel.cuh

#ifdef __CUDACC__
// Returns the driver's function; null where the driver has none.
inline decltype(&cuTensorMapEncodeTiled) AskForEncodeTiled() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
  const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                             12000, cudaEnableDefault, &result);
#else
  const cudaError_t error =
      cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &result);
#endif
  if (error != cudaSuccess || result != cudaDriverEntryPointSuccess) return nullptr;
  return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
}
inline decltype(&cuTensorMapEncodeTiled) FindEncodeTiled() {
  static const auto found = AskForEncodeTiled();
  return found;
}
#else
inline decltype(&cuTensorMapEncodeTiled) FindEncodeTiled() { return &cuTensorMapEncodeTiled; }
#endif

// Describes the tensor, of Element::kBf16 or kF16: its data are at a multiple of 16 bytes, its sizes
// 1 to 2^32, its strides but the innermost multiples of 8 elements, its boxes of at most 256 rows.
// Returns null, or why the description fails, in a text that is valid until the thread's next call.
inline const char* EncodeTensorMap(const BoxedTensor& tensor, Element element, TensorMap* map) {
  static_assert(sizeof(TensorMap) == sizeof(CUtensorMap), "");
  if (element == Element::kF32) return "a tensor map is of 16-bit numbers";
  if (tensor.strides[0] != 1) return "a tensor map is of rows without gaps";
  const auto encode = FindEncodeTiled();
  if (encode == nullptr) return "the CUDA driver has no cuTensorMapEncodeTiled";
  cuuint64_t sizes[4], strides[3];
  for (int n = 0; n < 4; ++n) sizes[n] = static_cast<cuuint64_t>(tensor.sizes[n]);
  for (int n = 0; n < 3; ++n) strides[n] = static_cast<cuuint64_t>(tensor.strides[n + 1]) * 2;
  const cuuint32_t box[4] = {64, static_cast<cuuint32_t>(tensor.box_rows), 1, 1};
  const cuuint32_t ones[4] = {1, 1, 1, 1};
  CUtensorMap encoded = {};  // which may have to lie at a larger power of two than a TensorMap
  const CUresult result =
      encode(&encoded,
             element == Element::kBf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                       : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
             4, tensor.data, sizes, strides, box, ones, CU_TENSOR_MAP_INTERLEAVE_NONE,
             CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result == CUDA_SUCCESS) {
    memcpy(map, &encoded, sizeof(encoded));
    return nullptr;
  }
  static thread_local char text[256];
  const int64_t *size = tensor.sizes, *stride = tensor.strides;
  snprintf(text, sizeof(text),
           "cuTensorMapEncodeTiled returns %d for data at %p, sizes %lld %lld %lld %lld, strides "
           "%lld %lld %lld and boxes of %d rows",
           static_cast<int>(result), tensor.data, static_cast<long long>(size[0]),
           static_cast<long long>(size[1]), static_cast<long long>(size[2]),
           static_cast<long long>(size[3]), static_cast<long long>(stride[1]),
           static_cast<long long>(stride[2]), static_cast<long long>(stride[3]), tensor.box_rows);
  return text;
}

}  // namespace
}  // namespace tfb

#endif  // TFB_CORE_CUDA_TENSOR_MAP_CUH_
