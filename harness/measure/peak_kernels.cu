#include <string.h>

#include "core/cuda/kernel.cuh"
#include "harness/measure/peak_kernels.h"

namespace tfb {
namespace {

constexpr int kThreads = PeakKernels::kThreads;
constexpr int kChains = PeakKernels::kChains;
constexpr int kTiles = PeakKernels::kTiles;

__global__ void MultiplyAdd(int64_t iterations, float factor, float* results) {
  float x[kChains];
#pragma unroll
  for (int n = 0; n < kChains; ++n) x[n] = 0;
#pragma unroll 8
  for (int64_t i = 0; i < iterations; ++i) {
#pragma unroll
    for (int n = 0; n < kChains; ++n) x[n] = fmaf(factor, x[n], 1.0f);
  }
  float sum = 0;
#pragma unroll
  for (int n = 0; n < kChains; ++n) sum += x[n];
  results[static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x] = sum;
}

template <bool kIsBf16>
__global__ void MatrixProducts(int64_t iterations, unsigned pair, float* results) {
  const unsigned a[4] = {pair, pair, pair, pair}, b[2] = {pair, pair};
  float d[kTiles][4];
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int n = 0; n < 4; ++n) d[tile][n] = 0;
  }
#pragma unroll 4
  for (int64_t i = 0; i < iterations; ++i) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      if (kIsBf16) {
        MmaM16N8K16Bf16(d[tile], a, b);
      } else {
        MmaM16N8K16F16(d[tile], a, b);
      }
    }
  }
  float sum = 0;
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int n = 0; n < 4; ++n) sum += d[tile][n];
  }
  results[static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x] = sum;
}

__global__ void Copy(float4* to, const float4* from, int64_t count) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
#pragma unroll 4
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count;
       i += step) {
    to[i] = from[i];
  }
}

__global__ void Read(const float4* from, int64_t count, float* not_zero) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  float sum = 0;
#pragma unroll 4
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count;
       i += step) {
    const float4 x = from[i];
    sum += (x.x + x.y) + (x.z + x.w);
  }
  if (sum != 0) *not_zero = sum;
}

const char* LaunchMultiplyAdd(int blocks, int64_t iterations, float factor, float* results) {
  return Launch("MultiplyAdd", &MultiplyAdd, {blocks, kThreads}, nullptr, iterations, factor,
                results);
}

const char* LaunchMatrixProducts(int blocks, int64_t iterations, Element type, float value,
                                 float* results) {
  const bool is_bf16 = type == Element::kBf16;
  const __nv_bfloat16 bf16 = __float2bfloat16_rn(value);
  const __half f16 = __float2half_rn(value);
  uint16_t bits;
  memcpy(&bits, is_bf16 ? static_cast<const void*>(&bf16) : &f16, sizeof(bits));
  const unsigned pair = bits | static_cast<unsigned>(bits) << 16;
  return Launch("MatrixProducts", is_bf16 ? &MatrixProducts<true> : &MatrixProducts<false>,
                {blocks, kThreads}, nullptr, iterations, pair, results);
}

const char* LaunchCopy(int blocks, void* to, const void* from, size_t bytes) {
  return Launch("Copy", &Copy, {blocks, kThreads}, nullptr, static_cast<float4*>(to),
                static_cast<const float4*>(from), static_cast<int64_t>(bytes / sizeof(float4)));
}

const char* LaunchRead(int blocks, const void* from, size_t bytes, float* not_zero) {
  return Launch("Read", &Read, {blocks, kThreads}, nullptr, static_cast<const float4*>(from),
                static_cast<int64_t>(bytes / sizeof(float4)), not_zero);
}

}  // namespace

TFB_KERNEL_TABLE(PeakKernels,
                 {&LaunchMultiplyAdd, &LaunchMatrixProducts, &LaunchCopy, &LaunchRead});

}  // namespace tfb
