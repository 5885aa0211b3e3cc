// Products of tiles in shared memory, in two arithmetics with one interface:
//
//   Fp32       problems in f32: FMA units
//   SplitBf16  problems in 16 bits: tensor cores. A number x is the sum of bf16(x) and
//              bf16(x - bf16(x)), which holds all of a bf16 or f16 number and 2^-18 |x| of any
//              other; of the four products the least, 2^-18 of the whole, is left out. The range is
//              that of fp32, as features need it. Sums are fp32. An infinity among W, queries or
//              keys gives NaN.
//
// A block has 8 warps. A warp computes tiles of 32 rows and 16 or 32 columns; lane l holds the
// elements (Row(i), Column(j)), i < 4, of which columns 2 n and 2 n + 1 are neighbours and rows
// depend on l / 4, columns on l % 4 alone.
//
// What is contracted over is called depth. Two kinds of tiles are operands:
//
//   Across<kRows>            [kRows][64 of depth]: inputs, W, features, weights
//   Down<kDepth, kColumns>   [kDepth][kColumns]: values, sums; as first operand it is transposed
//
// Fp32 stores both by depth, so that a step over depth reads three float4 for 32 multiply-adds of a
// lane (32 x 32), each of them 64 or 128 bytes of a warp: 5 passes over the banks at most, against 8
// cycles of the FMA units. SplitBf16 stores both by row, as two planes, and reads them with ldmatrix:
// 8 loads (32 passes) for 24 products of 16 x 8 x 16 a step of 16.
#ifndef TFB_CORE_LINEAR_LINEAR_MATH_CUH_
#define TFB_CORE_LINEAR_LINEAR_MATH_CUH_

#include <string.h>

#include "core/cuda/kernel.cuh"
#include "core/linear/linear_kernels.h"

namespace tfb {
namespace {

constexpr int kTile = kLinearTile;  // tokens of a chunk, features of a tile, channels at a time
constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

__device__ inline int Thread() { return static_cast<int>(threadIdx.x); }
__device__ inline int Lane() { return Thread() % 32; }
__device__ inline int Warp() { return Thread() / 32; }

// A lane's part of a tile of 32 x kColumns.
template <int kColumns>
struct Fragment {
  static constexpr int kEach = kColumns / 4;  // columns of a lane
  float at[4][kEach];

  __device__ void Clear() {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < kEach; ++j) at[i][j] = 0;
    }
  }
};

// ---- fp32 ----

struct Fp32 {
  // Four elements of a row of a tensor of the problem's dtype.
  using Raw = float4;
  __device__ static float4 Convert(const Raw& raw, Element) { return raw; }
  __device__ static Raw Nothing() { return make_float4(0, 0, 0, 0); }
  __device__ static Raw Gather(const void* row, int64_t stride, int count) {
    const float* from = static_cast<const float*>(row);
    return make_float4(from[0], count > 1 ? from[stride] : 0, count > 2 ? from[2 * stride] : 0,
                       count > 3 ? from[3 * stride] : 0);
  }

  __device__ static int Row(int i) { return Lane() / 4 * 4 + i; }
  __device__ static int Column(int j) { return j / 4 * 16 + Lane() % 4 * 4 + j % 4; }

  // By depth. Which four rows lie where is exchanged from one four of depth to the next: stores of
  // rows then reach all banks.
  template <int kRows>
  class Across {
   public:
    static constexpr int kBytes = kTile * kRows * 4;
    __device__ explicit Across(void* memory) : data_(static_cast<float*>(memory)) {}

    __device__ float4 Quad(int depth, int row) const {
      return *reinterpret_cast<const float4*>(data_ + Index(depth, row));
    }
    __device__ float Get(int row, int depth) const { return data_[Index(depth, row)]; }
    // Four of a row from `depth` on, a multiple of 4.
    __device__ void Store(int row, int depth, const float4& x) const {
      float* to = data_ + Index(depth, row);
      to[0] = x.x;
      to[kRows] = x.y;
      to[2 * kRows] = x.z;
      to[3 * kRows] = x.w;
    }
    template <int kColumns>
    __device__ void Store(int row, int depth, const Fragment<kColumns>& x) const {
#pragma unroll
      for (int j = 0; j < Fragment<kColumns>::kEach; ++j) {
        *reinterpret_cast<float4*>(data_ + Index(depth + Column(j), row + Row(0))) =
            make_float4(x.at[0][j], x.at[1][j], x.at[2][j], x.at[3][j]);
      }
    }

   private:
    __device__ static int Index(int depth, int row) {
      return depth * kRows + ((row / 4) ^ (depth / 4 % 8)) * 4 + row % 4;
    }
    float* data_;
  };

  template <int kDepth, int kColumns>
  class Down {
   public:
    static constexpr int kStride = kColumns + 4;
    static constexpr int kBytes = kDepth * kStride * 4;
    __device__ explicit Down(void* memory) : data_(static_cast<float*>(memory)) {}
    // What lies from `depth` on.
    __device__ Down From(int depth) const { return Down(data_ + depth * kStride); }

    __device__ float4 Quad(int depth, int column) const {
      return *reinterpret_cast<const float4*>(data_ + depth * kStride + column);
    }
    __device__ float Get(int depth, int column) const { return data_[depth * kStride + column]; }
    __device__ void Store(int depth, int column, const float4& x) const {
      *reinterpret_cast<float4*>(data_ + depth * kStride + column) = x;
    }
    template <int kFragmentColumns>
    __device__ void Store(int depth, int column, const Fragment<kFragmentColumns>& x) const {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < Fragment<kFragmentColumns>::kEach; j += 4) {
          Store(depth + Row(i), column + Column(j),
                make_float4(x.at[i][j], x.at[i][j + 1], x.at[i][j + 2], x.at[i][j + 3]));
        }
      }
    }

   private:
    float* data_;
  };

  // result += a b, and sums[i] += the sum of row Row(i) of a. Rows of a from `row` on, columns of b
  // from `column` on; depth is a multiple of 16.
  template <int kColumns, class A, class B>
  __device__ static void Multiply(const A& a, int row, const B& b, int column, int depth,
                                  Fragment<kColumns>* result, float sums[4]) {
    const int first_row = row + Row(0), first_column = column + Column(0);
#pragma unroll 4
    for (int k = 0; k < depth; ++k) {
      const float4 x = a.Quad(k, first_row);
      const float rows[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int n = 0; n < kColumns / 16; ++n) {
        const float4 y = b.Quad(k, first_column + 16 * n);
        const float columns[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            float& sum = result->at[i][4 * n + j];
            sum = fmaf(rows[i], columns[j], sum);
          }
        }
      }
      if (sums != nullptr) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[i] += rows[i];
      }
    }
  }
};

// ---- 16 bits ----

// (x, y) as pairs of bf16: x in the low half of a word.
struct SplitPair {
  unsigned high;
  unsigned low;

  __device__ SplitPair(float x, float y) {
    high = Pack(x, y);
    low = Pack(x - Low(high), y - High(high));
  }
  // Infinities stay, with nothing left to add to them.
  __device__ static SplitPair OfAny(float x, float y) {
    SplitPair pair(x, y);
    const float dx = isinf(x) ? 0 : x - Low(pair.high), dy = isinf(y) ? 0 : y - High(pair.high);
    pair.low = Pack(dx, dy);
    return pair;
  }
  __device__ static unsigned Pack(float x, float y) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(x, y);
    unsigned bits;
    memcpy(&bits, &pair, sizeof(bits));
    return bits;
  }
  __device__ static float Low(unsigned pair) { return __uint_as_float(pair << 16); }
  __device__ static float High(unsigned pair) { return __uint_as_float(pair & 0xffff0000u); }
};

struct SplitBf16 {
  using Raw = uint2;
  __device__ static float Widen(unsigned bits, Element element) {
    if (element == Element::kBf16) return __uint_as_float(bits << 16);
    __half half;
    memcpy(&half, &bits, sizeof(half));
    return __half2float(half);
  }
  __device__ static float4 Convert(const Raw& raw, Element element) {
    return make_float4(Widen(raw.x & 0xffff, element), Widen(raw.x >> 16, element),
                       Widen(raw.y & 0xffff, element), Widen(raw.y >> 16, element));
  }
  __device__ static Raw Nothing() { return make_uint2(0, 0); }
  __device__ static Raw Gather(const void* row, int64_t stride, int count) {
    const unsigned short* from = static_cast<const unsigned short*>(row);
    const unsigned a = from[0], b = count > 1 ? from[stride] : 0;
    const unsigned c = count > 2 ? from[2 * stride] : 0, d = count > 3 ? from[3 * stride] : 0;
    return make_uint2(a | b << 16, c | d << 16);
  }

  __device__ static int Row(int i) { return 8 * i + Lane() / 4; }
  __device__ static int Column(int j) { return j / 2 * 8 + Lane() % 4 * 2 + j % 2; }

  // Two planes of [kRows][kColumns], rows 16 bytes longer: 8 rows that follow each other begin in
  // different banks.
  template <int kRows, int kColumns>
  class Planes {
   public:
    static constexpr int kStride = kColumns + 8;
    static constexpr int kPlane = kRows * kStride;
    static constexpr int kBytes = 2 * kPlane * 2;
    __device__ explicit Planes(void* memory) : data_(static_cast<unsigned short*>(memory)) {}

    __device__ float Get(int row, int column) const {
      const unsigned short* at = data_ + row * kStride + column;
      return __uint_as_float(static_cast<unsigned>(at[0]) << 16) +
             __uint_as_float(static_cast<unsigned>(at[kPlane]) << 16);
    }
    __device__ void Store(int row, int column, const float4& x) const {
      const SplitPair first = SplitPair::OfAny(x.x, x.y), second = SplitPair::OfAny(x.z, x.w);
      uint2* to = reinterpret_cast<uint2*>(data_ + row * kStride + column);
      to[0] = make_uint2(first.high, second.high);
      to[kPlane / 4] = make_uint2(first.low, second.low);
    }
    template <int kFragmentColumns>
    __device__ void Store(int row, int column, const Fragment<kFragmentColumns>& x) const {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < Fragment<kFragmentColumns>::kEach; j += 2) {
          const SplitPair pair(x.at[i][j], x.at[i][j + 1]);
          unsigned* to =
              reinterpret_cast<unsigned*>(data_ + (row + Row(i)) * kStride + column + Column(j));
          to[0] = pair.high;
          to[kPlane / 2] = pair.low;
        }
      }
    }

   protected:
    // The 8 x 8 matrices of 16 x 16 elements: lane l tells ldmatrix where row l % 8 of matrix l / 8
    // begins. `rows_first`: matrix 1 is below matrix 0, else beside it.
    __device__ const unsigned short* RowOfMatrix(int row, int column, bool rows_first) const {
      const int matrix = Lane() / 8, second = matrix % 2 * 8, third = matrix / 2 * 8;
      return data_ + (row + Lane() % 8 + (rows_first ? second : third)) * kStride + column +
             (rows_first ? third : second);
    }

    unsigned short* data_;
  };

  template <int kRows>
  class Across : public Planes<kRows, kTile> {
   public:
    using Planes<kRows, kTile>::Planes;
    __device__ void LoadFirst(int row, int depth, int plane, unsigned a[4]) const {
      LdMatrixX4(a, this->RowOfMatrix(row, depth, true) + plane * this->kPlane);
    }
    // Of 16 columns: the registers of the first 8, then of the others.
    __device__ void LoadSecond(int depth, int column, int plane, unsigned b[4]) const {
      LdMatrixX4(b, this->RowOfMatrix(column, depth, false) + plane * this->kPlane);
    }
  };
  template <int kDepth, int kColumns>
  class Down : public Planes<kDepth, kColumns> {
   public:
    using Planes<kDepth, kColumns>::Planes;
    __device__ Down From(int depth) const { return Down(this->data_ + depth * this->kStride); }
    __device__ void LoadFirst(int row, int depth, int plane, unsigned a[4]) const {
      LdMatrixX4Transposed(a, this->RowOfMatrix(depth, row, false) + plane * this->kPlane);
    }
    __device__ void LoadSecond(int depth, int column, int plane, unsigned b[4]) const {
      LdMatrixX4Transposed(b, this->RowOfMatrix(depth, column, true) + plane * this->kPlane);
    }
  };

  // d += a b for 16 rows: tile `half` of the fragment's rows, columns 8 n and on.
  template <int kColumns>
  __device__ static void MultiplyOne(const unsigned a[4], const unsigned b[2], int half, int n,
                                     Fragment<kColumns>* result) {
    float d[4] = {result->at[2 * half][2 * n], result->at[2 * half][2 * n + 1],
                  result->at[2 * half + 1][2 * n], result->at[2 * half + 1][2 * n + 1]};
    MmaM16N8K16Bf16(d, a, b);
    result->at[2 * half][2 * n] = d[0];
    result->at[2 * half][2 * n + 1] = d[1];
    result->at[2 * half + 1][2 * n] = d[2];
    result->at[2 * half + 1][2 * n + 1] = d[3];
  }

  template <int kColumns, class A, class B>
  __device__ static void Multiply(const A& a, int row, const B& b, int column, int depth,
                                  Fragment<kColumns>* result, float sums[4]) {
    const unsigned ones[2] = {0x3f803f80u, 0x3f803f80u};
#pragma unroll 1
    for (int k = 0; k < depth; k += 16) {
      unsigned first[2][2][4];  // [16 rows][plane]
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int plane = 0; plane < 2; ++plane) {
          a.LoadFirst(row + 16 * half, k, plane, first[half][plane]);
        }
      }
#pragma unroll
      for (int n = 0; n < kColumns / 16; ++n) {
        unsigned second[2][4];  // [plane]
        b.LoadSecond(k, column + 16 * n, 0, second[0]);
        b.LoadSecond(k, column + 16 * n, 1, second[1]);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
          for (int side = 0; side < 2; ++side) {
            const int eight = 2 * n + side;
            MultiplyOne(first[half][0], second[0] + 2 * side, half, eight, result);
            MultiplyOne(first[half][0], second[1] + 2 * side, half, eight, result);
            MultiplyOne(first[half][1], second[0] + 2 * side, half, eight, result);
          }
        }
      }
      if (sums != nullptr) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float d[4] = {sums[2 * half], 0, sums[2 * half + 1], 0};
          MmaM16N8K16Bf16(d, first[half][0], ones);
          MmaM16N8K16Bf16(d, first[half][1], ones);
          sums[2 * half] = d[0];
          sums[2 * half + 1] = d[2];
        }
      }
    }
  }
};

// ---- Numbers ----

__device__ inline float NegativeInfinity() { return __int_as_float(0xff800000); }

// exp(x) for x <= 0, or NaN.
__device__ inline float ExpOf(float x) { return exp2f(x * 1.44269504f); }

// What brings sums at reference `from` to the reference `to`, which is not below it.
__device__ inline float Rescale(float from, float to) {
  if (from == to) return 1;
  return from == NegativeInfinity() ? 0 : ExpOf(from - to);
}
// What is subtracted for a reference: where there are no keys there is none.
__device__ inline float Shift(float reference) {
  return reference == NegativeInfinity() ? 0 : reference;
}

}  // namespace
}  // namespace tfb

#endif  // TFB_CORE_LINEAR_LINEAR_MATH_CUH_
