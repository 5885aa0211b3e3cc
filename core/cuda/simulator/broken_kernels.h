// Kernels that are wrong, each in one way that the simulator finds. For tests alone: nobody
// launches them on a GPU.
#ifndef TFB_CORE_CUDA_SIMULATOR_BROKEN_KERNELS_H_
#define TFB_CORE_CUDA_SIMULATOR_BROKEN_KERNELS_H_

#include "core/cuda/kernel_table.h"

namespace tfb {

struct BrokenKernels {
  // Sums 64 floats; with `barrier` false, the race that a forgotten __syncthreads is.
  const char* (*reduce)(const float* values, float* sum, bool barrier);
  // The kernel of broken_kernels.cu that has this name, on a buffer of 64 floats. What the number
  // means, if anything, is the kernel's.
  const char* (*run)(const char* name, float* values, int number);
};

}  // namespace tfb

#endif  // TFB_CORE_CUDA_SIMULATOR_BROKEN_KERNELS_H_
