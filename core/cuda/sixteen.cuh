// Numbers of 16 bits as operands of tensor cores (mma.sync m16n8k16 with f32 sums, sm_80 and later),
// and their rows in shared memory.
#ifndef TFB_CORE_CUDA_SIXTEEN_CUH_
#define TFB_CORE_CUDA_SIXTEEN_CUH_

#include <string.h>

#include "core/cuda/kernel.cuh"

namespace tfb {
namespace {  // internal linkage, as in kernel.cuh

// ---- What bf16 and f16 differ in ----

template <class T>
struct Sixteen;

template <>
struct Sixteen<__nv_bfloat16> {
  static constexpr Element kElement = Element::kBf16;
  static constexpr unsigned kExponent = 0x7f80;  // all exponent bits: infinity or NaN
  __device__ static float ToFloat(__nv_bfloat16 x) { return __bfloat162float(x); }
  __device__ static __nv_bfloat162 Round(float x, float y) { return __floats2bfloat162_rn(x, y); }
  __device__ static void Multiply(float d[4], const unsigned a[4], const unsigned b[2]) {
    MmaM16N8K16Bf16(d, a, b);
  }
};

template <>
struct Sixteen<__half> {
  static constexpr Element kElement = Element::kF16;
  static constexpr unsigned kExponent = 0x7c00;
  __device__ static float ToFloat(__half x) { return __half2float(x); }
  __device__ static __half2 Round(float x, float y) { return __floats2half2_rn(x, y); }
  __device__ static void Multiply(float d[4], const unsigned a[4], const unsigned b[2]) {
    MmaM16N8K16F16(d, a, b);
  }
};

// Packs two numbers as an operand of mma, the first in the low half.
template <class T>
__device__ inline unsigned Pair(float low, float high) {
  const auto rounded = Sixteen<T>::Round(low, high);
  unsigned pair;
  memcpy(&pair, &rounded, sizeof(pair));
  return pair;
}
template <class T>
__device__ inline float Half(unsigned pair, int which) {
  const unsigned short bits = static_cast<unsigned short>(pair >> 16 * which);
  T half;
  memcpy(&half, &bits, sizeof(half));
  return Sixteen<T>::ToFloat(half);
}
// Sets bit 15 and bit 31 of the result where the low and the high number are infinite or NaN.
// Adding one to an exponent of ones carries into the sign bit, which was cleared before.
template <class T>
__device__ inline unsigned NonFinite(unsigned pair) {
  constexpr unsigned kExponents = Sixteen<T>::kExponent * 0x10001u;
  constexpr unsigned kOnes = (0x8000u - Sixteen<T>::kExponent) * 0x10001u;
  return ((pair & kExponents) + kOnes) & 0x80008000u;
}

// ---- Rows in shared memory ----

// Returns the offset of 16-byte chunk `chunk` of row `row` in rows of kDim 16-bit numbers. The chunks of
// a row are exchanged by its number, so that neither copies nor ldmatrix meet two rows in a bank.
template <int kDim>
__device__ inline int ChunkOffset(int row, int chunk) {
  const int exchange = kDim == 32 ? row >> 1 & 3 : row & 7;
  return row * (kDim * 2) + (chunk ^ exchange) * 16;
}
// Returns, from the offset of chunk 0 or 1 of a row, that of the chunk `chunks` further on, an even
// number; with a constant it takes one instruction or none.
template <int kDim>
__device__ inline int ChunksOn(int offset, int chunks) {
  constexpr int kExchanged = kDim == 32 ? 3 : 7;
  return (offset ^ (chunks & kExchanged) * 16) + (chunks & ~kExchanged) * 16;
}

}  // namespace
}  // namespace tfb

#endif  // TFB_CORE_CUDA_SIXTEEN_CUH_
