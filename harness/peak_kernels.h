#ifndef TFB_HARNESS_PEAK_KERNELS_H_
#define TFB_HARNESS_PEAK_KERNELS_H_

#include <stddef.h>
#include <stdint.h>

#include "core/cuda/device_view.h"
#include "core/cuda/kernel_table.h"

namespace tfb {

// Work that does nothing but what a limit is of. Each enqueues on the default stream, and returns
// null or why it could not.
struct PeakKernels {
  static constexpr int kThreads = 256;  // of a block
  static constexpr int kChains = 8;     // of multiply-adds that do not wait for one another
  static constexpr int kTiles = 4;      // likewise of matrix products, each of 16 x 16 by 16 x 8

  // Every thread of `blocks` does `iterations` times in each of kChains numbers, from 0 on,
  // x = factor x + 1, and writes their sum: results[thread of the grid].
  const char* (*multiply_add)(int blocks, int64_t iterations, float factor, float* results);
  // Every warp adds `iterations` times to each of kTiles tiles the product of two matrices of
  // `value`, which are bf16 or f16, and every thread writes the sum of what it has of them.
  const char* (*matrix_products)(int blocks, int64_t iterations, Element type, float value,
                                 float* results);
  // `bytes` are a multiple of 16, and so are the addresses.
  const char* (*copy)(int blocks, void* to, const void* from, size_t bytes);
};

}  // namespace tfb

#endif  // TFB_HARNESS_PEAK_KERNELS_H_
