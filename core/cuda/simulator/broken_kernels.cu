#include "core/cuda/kernel.cuh"
#include "core/cuda/simulator/broken_kernels.h"

namespace tfb {
namespace {

// Sums 64 floats; with `barrier` false, the race that a forgotten __syncthreads is.
__global__ void Reduce(const float* values, float* sum, bool barrier) {
  __shared__ float partial[64];
  const int t = static_cast<int>(threadIdx.x);
  partial[t] = values[t];
  for (int width = 32; width > 0; width /= 2) {
    if (barrier) __syncthreads();
    if (t < width) partial[t] += partial[t + width];
  }
  if (t == 0) *sum = partial[0];
}

const char* LaunchReduce(const float* values, float* sum, bool barrier) {
  return Launch("Reduce", &Reduce, {dim3(1), dim3(64)}, nullptr, values, sum, barrier);
}

}  // namespace

TFB_KERNEL_TABLE(BrokenKernels, {&LaunchReduce});

}  // namespace tfb
