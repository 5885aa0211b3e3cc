#ifndef TFB_CORE_CUDA_SIMULATOR_BROKEN_KERNELS_H_
#define TFB_CORE_CUDA_SIMULATOR_BROKEN_KERNELS_H_

#include "core/cuda/kernel_table.h"

namespace tfb {

struct BrokenKernels {
  const char* (*reduce)(const float* values, float* sum, bool barrier);
};

}  // namespace tfb

#endif  // TFB_CORE_CUDA_SIMULATOR_BROKEN_KERNELS_H_
