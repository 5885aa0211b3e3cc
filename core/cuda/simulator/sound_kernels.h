// Correct kernels that a checker may misjudge: the simulator must report nothing, and compute the
// same as a GPU.
#ifndef TFB_CORE_CUDA_SIMULATOR_SOUND_KERNELS_H_
#define TFB_CORE_CUDA_SIMULATOR_SOUND_KERNELS_H_

#include "core/cuda/kernel_table.h"

namespace tfb {

struct SoundKernels {
  // Runs the kernel of sound_kernels.cu that has this name, on buffers of 64 floats.
  const char* (*run)(const char* name, const float* input, float* output);
  // Computes c = a b, of 16 x 16 and 16 x 8 row-major float32 numbers rounded to bf16 or f16, with
  // ldmatrix and mma. With `transposed`, a is given as its transpose.
  const char* (*multiply)(const float* a, const float* b, float* c, bool is_bf16, bool transposed);
  // Kernels that the benchmark times: c = a b of n x n floats, n a multiple of 32, in tiles of
  // shared memory; `count` barriers in blocks of 256 threads; `count` shuffles in them.
  const char* (*multiply_in_tiles)(const float* a, const float* b, float* c, int n);
  const char* (*sync_often)(float* output, int count);
  const char* (*shuffle_often)(float* output, int count);
};

}  // namespace tfb

#endif  // TFB_CORE_CUDA_SIMULATOR_SOUND_KERNELS_H_
