// Kernels that a GPU cannot run as they ask, for kernel_resources_test. They are compiled and never launched.
#include "core/cuda/kernel.cuh"

namespace tfb {
namespace {

constexpr int kValues = 90;  // more than the 64 registers of each of 1024 threads

__device__ void Reverse(float* values, int stride) {
  float read[kValues];
#pragma unroll
  for (int i = 0; i < kValues; ++i) read[i] = values[i * stride + threadIdx.x];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    values[i * stride + threadIdx.x] = read[i] * read[kValues - 1 - i];
  }
}

// Blocks of 1024 threads fit, at the cost of spills.
__global__ void __launch_bounds__(1024) Spill(float* values, int stride) {
  Reverse(values, stride);
}

// Nothing bounds its registers, and blocks of 1024 threads do not fit.
__global__ void TakeRegisters(float* values, int stride) { Reverse(values, stride); }

// A sound kernel between them.
__global__ void __launch_bounds__(256, 2) Keep(float* values) {
  __shared__ float shared[256];
  shared[threadIdx.x] = values[threadIdx.x];
  __syncthreads();
  values[threadIdx.x] = shared[255 - threadIdx.x];
}

// An sm_89 has 99 KiB.
constexpr int kTooManyFloats = (99 << 8) + 1;
__global__ void TakeShared(float* values) {
  float* shared = reinterpret_cast<float*>(DynamicShared<kTooManyFloats * sizeof(float)>());
  shared[threadIdx.x] = values[threadIdx.x];
  __syncthreads();
  values[threadIdx.x] = shared[255 - threadIdx.x];
}

void LaunchAll(float* values) {
  Launch("Spill", &Spill, {1, 1024}, nullptr, values, 1024);
  Launch("TakeRegisters", &TakeRegisters, {1, 128}, nullptr, values, 1024);
  Launch("Keep", &Keep, {1, 256}, nullptr, values);
  Launch("TakeShared", &TakeShared, {1, 256, kTooManyFloats * sizeof(float)}, nullptr, values);
}

struct FaultyKernels {
  void (*launch_all)(float* values);
};

}  // namespace

TFB_KERNEL_TABLE(FaultyKernels, {&LaunchAll});

}  // namespace tfb
