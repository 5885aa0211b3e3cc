// The description of a tensor from which a GPU copies boxes, see CopyBox in hopper.cuh.
#ifndef TFB_CORE_CUDA_TENSOR_MAP_H_
#define TFB_CORE_CUDA_TENSOR_MAP_H_

#include <stdint.h>

namespace tfb {

// CUtensorMap of the CUDA driver; opaque, and of another kind in the simulator. Kernels take it by
// value, as __grid_constant__.
struct alignas(64) TensorMap {
  uint64_t words[16];
};

// A tensor of 16-bit numbers, whose dimensions are given innermost first. Box rows have 64 numbers,
// which are 128 bytes, and chunks are exchanged as DescribeMatrix says.
struct BoxedTensor {
  void* data;  // at a multiple of 16 bytes
  int64_t sizes[4];
  int64_t strides[4];  // in elements, multiples of 8 but for strides[0], which is 1
  int box_rows;        // of dimension 1; 1 of dimensions 2 and 3
};

}  // namespace tfb

#endif  // TFB_CORE_CUDA_TENSOR_MAP_H_
