// Kernels with one error each, which the simulator finds. They are for tests and must not run on a
// GPU.
#ifndef TFB_CORE_CUDA_SIMULATOR_BROKEN_KERNELS_H_
#define TFB_CORE_CUDA_SIMULATOR_BROKEN_KERNELS_H_

#include "core/cuda/kernel_table.h"

namespace tfb {

struct BrokenKernels {
  // Sums 64 floats; with `barrier` false, __syncthreads is missing and there is a race.
  const char* (*reduce)(const float* values, float* sum, bool barrier);
  // Runs the kernel of broken_kernels.cu that has this name, on a buffer of 64 floats. The meaning
  // of the number depends on the kernel.
  const char* (*run)(const char* name, float* values, int number);
};

}  // namespace tfb

#endif  // TFB_CORE_CUDA_SIMULATOR_BROKEN_KERNELS_H_
