// The kernels of hopper_test: single products, copies of boxes, and a pipeline of both.
#ifndef TFB_CORE_CUDA_HOPPER_CASES_H_
#define TFB_CORE_CUDA_HOPPER_CASES_H_

#include <stdint.h>

#include "core/cuda/device_view.h"
#include "core/cuda/kernel_table.h"
#include "core/cuda/tensor_map.h"

namespace tfb::hopper_test {

// Numbers are 16 bits of the element type, in device memory; rows without gaps. Launchers return
// null, or why they fail.
struct HopperCases {
  // *compiled = 1 where the kernels are compiled for the GPU that they run on.
  const char* (*is_compiled)(int* compiled);
  // The place of a product's factors in what is in shared memory.
  struct Place {
    int first_row;      // of a's 64 rows
    int first_channel;  // of the 16 of a and b that are multiplied
    bool by_copy_box;   // or by stores
  };
  // sums[64][128] += a[first_row + i][first_channel + k] b[n][first_channel + k], both [128][64]; with
  // `adds` false, the product replaces the sums.
  const char* (*multiply)(const void* a, const void* b, Element element, const Place& place,
                          bool adds, float* sums);
  // sums[64][columns] += a[i][k] b[first_row + k][n], a [64][16] and b [48][columns], of 64 or 128
  // columns.
  const char* (*multiply_transposed)(const void* a, const void* b, Element element,
                                     const Place& place, int columns, float* sums);
  // to[box_rows][64] = the tensor's box at the coordinates, innermost first.
  const char* (*copy)(const BoxedTensor& tensor, Element element, const int (&at)[4], uint16_t* to);
  // c[128][128] = a b^T, both [128][depth], depth a multiple of 64: one warp group copies and two
  // multiply, through a ring of two stages.
  const char* (*multiply_in_stages)(const void* a, const void* b, Element element, int depth,
                                    float* c);
};

}  // namespace tfb::hopper_test

#endif  // TFB_CORE_CUDA_HOPPER_CASES_H_
