// Matrix products of operands in shared memory by FMA units: a thread holds a small matrix of sums
// in registers.
//
//   sums[r][c] += sum over k of a[k][r] b[k][c], in the order of k, by one fused multiply-add each
//
// For a step of k a thread reads kRows numbers of a and kColumns of b, which lie side by side, 16
// bytes at a time: with 8 x 4 floats three loads for 32 multiply-adds. A warp's loads of a should
// fall on few different addresses, and those of b on neighbouring ones: then 16 threads by 2 read
// 2 x 32 B and 256 B, 4 passes over the banks against 8 cycles of the FMA units on sm_80. Rows of
// an operand that is stored transposed should be 4 numbers longer: its stores then use all banks.
#ifndef TFB_CORE_CUDA_REGISTER_TILE_CUH_
#define TFB_CORE_CUDA_REGISTER_TILE_CUH_

#include "core/cuda/kernel.cuh"

namespace tfb {
namespace {  // internal linkage, as in kernel.cuh

// Reads numbers side by side, 16 bytes at a time, or all at once where there are fewer. `from` is
// aligned to as much.
template <int kCount, class Real>
__device__ inline void LoadVectors(const Real* from, Real (&to)[kCount]) {
  constexpr int kBytes = kCount * sizeof(Real) < 16 ? kCount * sizeof(Real) : 16;
  constexpr int kEach = kBytes / sizeof(Real);
  static_assert(kCount % kEach == 0, "whole vectors");
  struct alignas(kBytes) Vector {
    Real numbers[kEach];
  };
#pragma unroll
  for (int n = 0; n < kCount / kEach; ++n) {
    const Vector vector = reinterpret_cast<const Vector*>(from)[n];
#pragma unroll
    for (int i = 0; i < kEach; ++i) to[n * kEach + i] = vector.numbers[i];
  }
}

// Writes numbers side by side in the same way.
template <int kCount, class Real>
__device__ inline void StoreVectors(const Real (&from)[kCount], Real* to) {
  constexpr int kBytes = kCount * sizeof(Real) < 16 ? kCount * sizeof(Real) : 16;
  constexpr int kEach = kBytes / sizeof(Real);
  static_assert(kCount % kEach == 0, "whole vectors");
  struct alignas(kBytes) Vector {
    Real numbers[kEach];
  };
#pragma unroll
  for (int n = 0; n < kCount / kEach; ++n) {
    Vector vector;
#pragma unroll
    for (int i = 0; i < kEach; ++i) vector.numbers[i] = from[n * kEach + i];
    reinterpret_cast<Vector*>(to)[n] = vector;
  }
}

__device__ inline float MultiplyAdd(float a, float b, float sum) { return fmaf(a, b, sum); }
__device__ inline double MultiplyAdd(double a, double b, double sum) { return fma(a, b, sum); }

// sums[r][first + c] += a[r] b[c] for the rows r for which takes(r) is true.
template <int kRows, int kColumns, int kSums, class Real, class Takes>
__device__ inline void AddOuterProduct(const Real (&a)[kRows], const Real (&b)[kColumns],
                                       Real (&sums)[kRows][kSums], int first, const Takes& takes) {
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (!takes(r)) continue;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      sums[r][first + c] = MultiplyAdd(a[r], b[c], sums[r][first + c]);
    }
  }
}
template <int kRows, int kColumns, int kSums, class Real>
__device__ inline void AddOuterProduct(const Real (&a)[kRows], const Real (&b)[kColumns],
                                       Real (&sums)[kRows][kSums], int first = 0) {
  AddOuterProduct(a, b, sums, first, [](int) { return true; });
}

// An operand: the thread's numbers of step k begin at first + k * stride.
struct StagedOperand {
  const float* first;
  int stride;
};

// Adds the products of steps 0 to depth - 1, of which it unrolls kUnroll.
template <int kUnroll, int kRows, int kColumns>
__device__ inline void AddProduct(const StagedOperand& a, const StagedOperand& b, int depth,
                                  float (&sums)[kRows][kColumns]) {
#pragma unroll kUnroll
  for (int k = 0; k < depth; ++k) {
    float rows[kRows], columns[kColumns];
    LoadVectors(a.first + k * a.stride, rows);
    LoadVectors(b.first + k * b.stride, columns);
    AddOuterProduct(rows, columns, sums);
  }
}

}  // namespace
}  // namespace tfb

#endif  // TFB_CORE_CUDA_REGISTER_TILE_CUH_
