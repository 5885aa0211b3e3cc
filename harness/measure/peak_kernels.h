#ifndef TFB_HARNESS_MEASURE_PEAK_KERNELS_H_
#define TFB_HARNESS_MEASURE_PEAK_KERNELS_H_

#include <stddef.h>
#include <stdint.h>

#include "core/cuda/device_view.h"
#include "core/cuda/kernel_table.h"

namespace tfb {

// Kernels each of which measures one peak rate of the device, and one that empties its caches. Each
// launcher enqueues on the default stream, and returns null, or a text that says why it failed.
struct PeakKernels {
  static constexpr int kThreads = 256;  // of a block
  static constexpr int kChains = 8;     // independent chains of multiply-adds
  static constexpr int kTiles = 4;      // chains of matrix products, each of 16 x 16 by 16 x 8

  // Every thread of `blocks` computes x = factor x + 1 `iterations` times in each of kChains
  // numbers, from 0 on, and writes their sum: results[thread of the grid].
  const char* (*multiply_add)(int blocks, int64_t iterations, float factor, float* results);
  // Every warp adds `iterations` times to each of kTiles tiles the product of two matrices of
  // `value`, which are bf16 or f16, and every thread writes the sum of its elements.
  const char* (*matrix_products)(int blocks, int64_t iterations, Element type, float value,
                                 float* results);
  // Copies `bytes`, a multiple of 16, between addresses that are aligned to 16.
  const char* (*copy)(int blocks, void* to, const void* from, size_t bytes);
  // Reads `bytes`, a multiple of 16, from an address that is aligned to 16. Each thread that read
  // floats whose sum is not 0 writes it to *not_zero: where all are 0, nothing is written.
  const char* (*read)(int blocks, const void* from, size_t bytes, float* not_zero);
};

}  // namespace tfb

#endif  // TFB_HARNESS_MEASURE_PEAK_KERNELS_H_
