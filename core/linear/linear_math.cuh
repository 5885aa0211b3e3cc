// Products of tiles in shared memory, in two arithmetics with one interface:
//
//   Fp32       problems in f32: FMA units
//   SplitBf16  problems in 16 bits: tensor cores. A number is the sum of its bf16, the bf16 of what
//              that leaves, and so on, in as many planes: one for a bf16, two for an f16, three for
//              W, all of which lose nothing that fp32 has, so that exponents are those of fp32; two
//              for features, sums and weights: 2^-18 of a number is lost, and of the products of
//              planes the least is left out. The range is that of fp32, as features need it, and
//              sums are fp32. An infinity among W, queries or keys gives NaN.
//
// A block has 8 warps. A warp computes tiles of 32 rows and 16 or 32 columns; a lane holds the
// elements (FirstRow() + Row(i), FirstColumn() + Column(j)), i < 4, of which columns 2 n and 2 n + 1
// are neighbours. Of lane l, rows depend on l / 4 alone and columns on l % 4.
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

#include "core/cuda/register_tile.cuh"
#include "core/cuda/warp.cuh"
#include "core/linear/linear_kernels.h"

namespace tfb {
namespace {

constexpr int kTile = kLinearTile;  // tokens of a chunk, features of a tile, channels at a time
constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;

// Returns the same value, opaquely to the compiler, so that expressions of it are computed where
// they are needed, not hoisted out of a loop into registers that the loop lacks.
__device__ inline int Opaque(int x) {
#ifdef __CUDACC__
  asm volatile("" : "+r"(x));
#endif
  return x;
}

__device__ inline int Thread() { return Opaque(static_cast<int>(threadIdx.x)); }
__device__ inline int OpaqueLane() { return Thread() % kWarp; }
__device__ inline int OpaqueWarp() { return Thread() / kWarp; }

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

  __device__ static int FirstRow() { return OpaqueLane() / 4 * 4; }
  __device__ static int FirstColumn() { return OpaqueLane() % 4 * 4; }
  static constexpr int Row(int i) { return i; }
  static constexpr int Column(int j) { return j / 4 * 16 + j % 4; }
  static constexpr int kNeighbours = 4;  // columns of a lane that are side by side
  // Rows of floats that are so much longer than a multiple of 32 take the neighbours of 8 lanes, 2
  // rows of 4, in all banks.
  static constexpr int kPad = 4;

  // Rows are stored by depth. Groups of four rows are exchanged from one group of four of depth to
  // the next, so that stores of fragments' groups of two rows by four of depth use all banks. Those of
  // two rows, which a warp loads, use half of the banks.
  template <int kRows>
  class Across {
   public:
    static constexpr int kStep = kRows;  // distance to the next of depth, within four
    static constexpr int kBytes = kTile * kRows * 4;
    __device__ explicit Across(void* memory) : data_(static_cast<float*>(memory)) {}

    // Returns the first of four of depth and four rows; both numbers are multiples of 4.
    __device__ float* At(int depth, int row) const {
      const int four = depth / 4;
      return data_ + depth * kRows + (row / 4 ^ (four * 2 % 8 + four / 4 % 2)) * 4;
    }
    __device__ float Get(int row, int depth) const {
      return At(depth / 4 * 4, row / 4 * 4)[depth % 4 * kStep + row % 4];
    }
    // Stores four elements of a row.
    __device__ void Store(int row, int depth, const float4& x) const {
      float* to = At(depth, row / 4 * 4) + row % 4;
      to[0] = x.x;
      to[kStep] = x.y;
      to[2 * kStep] = x.z;
      to[3 * kStep] = x.w;
    }
    template <int kColumns>
    __device__ void Store(int row, int depth, const Fragment<kColumns>& x) const {
      const int first_row = row + FirstRow(), first_depth = depth + FirstColumn();
#pragma unroll
      for (int j = 0; j < Fragment<kColumns>::kEach; j += 4) {
        float* to = At(first_depth + Column(j), first_row);
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          *reinterpret_cast<float4*>(to + n * kStep) =
              make_float4(x.at[0][j + n], x.at[1][j + n], x.at[2][j + n], x.at[3][j + n]);
        }
      }
    }

   private:
    float* data_;
  };

  template <int kDepth, int kColumns>
  class Down {
   public:
    static constexpr int kStep = kColumns + 4;
    static constexpr int kBytes = kDepth * kStep * 4;
    __device__ explicit Down(void* memory) : data_(static_cast<float*>(memory)) {}
    // Returns the part from `depth` on.
    __device__ Down From(int depth) const { return Down(At(depth, 0)); }

    __device__ float* At(int depth, int column) const { return data_ + depth * kStep + column; }
    __device__ float Get(int depth, int column) const { return *At(depth, column); }
    __device__ void Store(int depth, int column, const float4& x) const {
      *reinterpret_cast<float4*>(At(depth, column)) = x;
    }
    template <int kFragmentColumns>
    __device__ void Store(int depth, int column, const Fragment<kFragmentColumns>& x) const {
      float* to = At(depth + FirstRow(), column + FirstColumn());
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < Fragment<kFragmentColumns>::kEach; j += 4) {
          *reinterpret_cast<float4*>(to + i * kStep + j * 4) =
              make_float4(x.at[i][j], x.at[i][j + 1], x.at[i][j + 2], x.at[i][j + 3]);
        }
      }
    }

   private:
    float* data_;
  };

  // Adds a b to result, and the sum of the lane's row i of a to sums[i]. Rows of a count from `row`
  // on, columns of b from `column` on; depth is a multiple of 16.
  template <int kColumns, class A, class B>
  __device__ static void Multiply(const A& a, int row, const B& b, int column, int depth,
                                  Fragment<kColumns>* result, float sums[4] = nullptr) {
    const int first_row = row + FirstRow(), first_column = column + FirstColumn();
#pragma unroll 1
    for (int k = 0; k < depth; k += 4) {
      const float* first = a.At(k, first_row);
      const float* second[kColumns / 16];
#pragma unroll
      for (int n = 0; n < kColumns / 16; ++n) second[n] = b.At(k, first_column + Column(4 * n));
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        float rows[4], columns[4];
        LoadVectors(first + step * A::kStep, rows);
#pragma unroll
        for (int n = 0; n < kColumns / 16; ++n) {
          LoadVectors(second[n] + step * B::kStep, columns);
          AddOuterProduct(rows, columns, result->at, 4 * n);
        }
        if (sums == nullptr) continue;
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[i] += rows[i];
      }
    }
  }

  template <int kRows>
  using Inputs = Across<kRows>;
  using Matrix = Across<kTile>;
  template <class Tile>
  __device__ static void StoreInputs(const Tile& tile, int row, int channel, const Raw& raw,
                                     Element) {
    tile.Store(row, channel, raw);
  }
  template <int kColumns, class A, class B>
  __device__ static void Project(Element, const A& inputs, int row, const B& w, int column,
                                 int depth, Fragment<kColumns>* result) {
    Multiply(inputs, row, w, column, depth, result);
  }
};

// ---- 16 bits ----

// Rounds two numbers to 16 bits, the first in the low half of a word.
__device__ inline unsigned PackBf16(float x, float y) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(x, y);
  unsigned bits;
  memcpy(&bits, &pair, sizeof(bits));
  return bits;
}
__device__ inline unsigned PackF16(float x, float y) {
  const __half2 pair = __floats2half2_rn(x, y);
  unsigned bits;
  memcpy(&bits, &pair, sizeof(bits));
  return bits;
}
__device__ inline float LowBf16(unsigned pair) { return __uint_as_float(pair << 16); }
__device__ inline float HighBf16(unsigned pair) { return __uint_as_float(pair & 0xffff0000u); }

struct SplitBf16 {
  using Raw = uint2;
  __device__ static float4 Convert(const Raw& raw, Element element) {
    if (element == Element::kBf16) {
      return make_float4(LowBf16(raw.x), HighBf16(raw.x), LowBf16(raw.y), HighBf16(raw.y));
    }
    __half2 pairs[2];
    memcpy(pairs, &raw, sizeof(raw));
    return make_float4(__half2float(pairs[0].x), __half2float(pairs[0].y), __half2float(pairs[1].x),
                       __half2float(pairs[1].y));
  }
  __device__ static Raw Nothing() { return make_uint2(0, 0); }
  __device__ static Raw Gather(const void* row, int64_t stride, int count) {
    const unsigned short* from = static_cast<const unsigned short*>(row);
    const unsigned a = from[0], b = count > 1 ? from[stride] : 0;
    const unsigned c = count > 2 ? from[2 * stride] : 0, d = count > 3 ? from[3 * stride] : 0;
    return make_uint2(a | b << 16, c | d << 16);
  }

  __device__ static int FirstRow() { return OpaqueLane() / 4; }
  __device__ static int FirstColumn() { return OpaqueLane() % 4 * 2; }
  static constexpr int Row(int i) { return 8 * i; }
  static constexpr int Column(int j) { return j / 2 * 8 + j % 2; }
  static constexpr int kNeighbours = 2;  // as in Fp32: here 16 lanes, 4 rows of 4
  static constexpr int kPad = 8;

  // Planes of [kRows][kColumns], whose sum the elements are; rows are 16 bytes longer, so that 8
  // consecutive ones begin in different banks.
  template <int kCount, int kRows, int kColumns, bool kDown>
  class Planes {
   public:
    static constexpr int kPlanes = kCount;
    static constexpr int kStride = kColumns + 8;
    // The distances to 16 further along depth, and along the other dimension.
    static constexpr int kDepth16 = kDown ? 16 * kStride : 16;
    static constexpr int kOther16 = kDown ? 16 : 16 * kStride;
    static constexpr int kPlane = kRows * kStride;
    static constexpr int kBytes = kPlanes * kPlane * 2;
    __device__ explicit Planes(void* memory) : data_(static_cast<unsigned short*>(memory)) {}

    __device__ float Get(int row, int column) const {
      float sum = 0;
#pragma unroll
      for (int p = 0; p < kPlanes; ++p) {
        const unsigned bits = data_[row * kStride + column + p * kPlane];
        sum += __uint_as_float(bits << 16);
      }
      return sum;
    }
    // An infinity stays one: the rest after it is 0.
    __device__ void Store(int row, int column, float4 x) const {
      uint2* to = reinterpret_cast<uint2*>(data_ + row * kStride + column);
#pragma unroll
      for (int p = 0; p < kPlanes; ++p) {
        const uint2 part = make_uint2(PackBf16(x.x, x.y), PackBf16(x.z, x.w));
        to[p * kPlane / 4] = part;
        x.x = isinf(x.x) ? 0 : x.x - LowBf16(part.x);
        x.y = isinf(x.y) ? 0 : x.y - HighBf16(part.x);
        x.z = isinf(x.z) ? 0 : x.z - LowBf16(part.y);
        x.w = isinf(x.w) ? 0 : x.w - HighBf16(part.y);
      }
    }
    // Stores four elements that are bf16 to the first plane alone.
    __device__ void StoreFirst(int row, int column, const Raw& raw) const {
      *reinterpret_cast<uint2*>(data_ + row * kStride + column) = raw;
    }
    template <int kFragmentColumns>
    __device__ void Store(int row, int column, const Fragment<kFragmentColumns>& x) const {
      unsigned short* first = data_ + (row + FirstRow()) * kStride + column + FirstColumn();
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < Fragment<kFragmentColumns>::kEach; j += 2) {
          const unsigned high = PackBf16(x.at[i][j], x.at[i][j + 1]);
          unsigned* to = reinterpret_cast<unsigned*>(first + Row(i) * kStride + Column(j));
          to[0] = high;
          to[kPlane / 2] = PackBf16(x.at[i][j] - LowBf16(high), x.at[i][j + 1] - HighBf16(high));
        }
      }
    }

    // Returns the lane's address for ldmatrix of 16 x 16 elements from `first` on, at depth 0: the
    // beginning of row l % 8 of the 8 x 8 matrix l / 8. The four registers are those of mma's first
    // operand, or of its second for 8 columns and for the next 8.
    __device__ const unsigned short* Start(int first, bool is_first_operand) const {
      const int lane = OpaqueLane(), matrix = lane / 8;
      const bool second_below =
          is_first_operand != kDown;  // matrix 1 is below matrix 0, not beside it
      const int below = second_below ? matrix % 2 : matrix / 2;
      const int beside = second_below ? matrix / 2 : matrix % 2;
      return data_ + ((kDown ? 0 : first) + lane % 8 + 8 * below) * kStride + (kDown ? first : 0) +
             8 * beside;
    }
    __device__ static void Load(const unsigned short* from, unsigned registers[4]) {
      if (kDown) {
        LdMatrixX4Transposed(registers, from);
      } else {
        LdMatrixX4(registers, from);
      }
    }

   protected:
    unsigned short* data_;
  };

  template <int kRows, int kCount = 2>
  using Across = Planes<kCount, kRows, kTile, false>;
  template <int kRows>
  using Inputs = Across<kRows>;
  using Matrix = Across<kTile, 3>;
  template <int kDepth, int kColumns>
  class Down : public Planes<2, kDepth, kColumns, true> {
   public:
    using Planes<2, kDepth, kColumns, true>::Planes;
    __device__ Down From(int depth) const { return Down(this->data_ + depth * this->kStride); }
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

  // Planes i of a and j of b are multiplied where i + j is below b's number. `sums` are those of the
  // rows of a, where it is not null.
  template <int kColumns, class A, class B>
  __device__ static void Multiply(const A& a, int row, const B& b, int column, int depth,
                                  Fragment<kColumns>* result, float sums[4] = nullptr) {
    const unsigned ones[2] = {0x3f803f80u, 0x3f803f80u};
    const unsigned short* of_a = a.Start(row, true);
    const unsigned short* of_b = b.Start(column, false);
#pragma unroll 1
    for (int k = 0; k < depth; k += 16, of_a += A::kDepth16, of_b += B::kDepth16) {
      unsigned first[2][2][4];  // 16 rows each
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        A::Load(of_a + i * A::kPlane, first[i][0]);
        A::Load(of_a + i * A::kPlane + A::kOther16, first[i][1]);
      }
#pragma unroll
      for (int n = 0; n < kColumns / 16; ++n) {
#pragma unroll
        for (int j = 0; j < B::kPlanes; ++j) {
          unsigned second[4];
          B::Load(of_b + j * B::kPlane + n * B::kOther16, second);
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            if (i + j >= B::kPlanes) continue;
            MultiplyOne(first[i][0], second, 0, 2 * n, result);
            MultiplyOne(first[i][1], second, 1, 2 * n, result);
            MultiplyOne(first[i][0], second + 2, 0, 2 * n + 1, result);
            MultiplyOne(first[i][1], second + 2, 1, 2 * n + 1, result);
          }
        }
      }
      if (sums == nullptr) continue;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float d[4] = {sums[2 * half], 0, sums[2 * half + 1], 0};
#pragma unroll
        for (int i = 0; i < 2; ++i) MmaM16N8K16Bf16(d, first[i][half], ones);
        sums[2 * half] = d[0];
        sums[2 * half + 1] = d[2];
      }
    }
  }

  // Multiplies inputs of so many planes with W. A projection becomes an exponent, so that its absolute
  // error counts, and tensor cores cut each sum towards zero (MmaSums of the simulator): 80 cuts at the
  // size of a projection, which 256 channels of f16 would take, are more error than the roundings of as
  // many fp32 additions. So the products of 16 channels, those of the lesser planes first, are a sum of
  // their own, and fp32 additions put these sums together. Two planes are taken for 16 rows at a time,
  // for want of registers.
  template <int kPlanes, int kColumns, class A, class B>
  __device__ static void ProjectPlanes(const A& a, int row, const B& w, int column, int depth,
                                       Fragment<kColumns>* result) {
    constexpr int kHalves = kPlanes == 1 ? 2 : 1;  // of the rows, taken together
    const unsigned short* of_a = a.Start(row, true);
    const unsigned short* of_w = w.Start(column, false);
#pragma unroll 1
    for (int k = 0; k < depth; k += 16, of_a += A::kDepth16, of_w += B::kDepth16) {
#pragma unroll
      for (int half = 0; half < 2; half += kHalves) {
        unsigned first[kPlanes][kHalves][4];
#pragma unroll
        for (int i = 0; i < kPlanes; ++i) {
#pragma unroll
          for (int h = 0; h < kHalves; ++h) {
            A::Load(of_a + i * A::kPlane + (half + h) * A::kOther16, first[i][h]);
          }
        }
#pragma unroll
        for (int n = 0; n < kColumns / 16; ++n) {
          float sums[kHalves][2][4] = {};
#pragma unroll
          for (int j = B::kPlanes - 1; j >= 0; --j) {
            unsigned second[4];
            B::Load(of_w + j * B::kPlane + n * B::kOther16, second);
#pragma unroll
            for (int i = kPlanes - 1; i >= 0; --i) {
              if (i + j >= B::kPlanes) continue;
#pragma unroll
              for (int h = 0; h < kHalves; ++h) {
                MmaM16N8K16Bf16(sums[h][0], first[i][h], second);
                MmaM16N8K16Bf16(sums[h][1], first[i][h], second + 2);
              }
            }
          }
#pragma unroll
          for (int h = 0; h < kHalves; ++h) {
#pragma unroll
            for (int d = 0; d < 4; ++d) {
              result->at[2 * (half + h) + d / 2][4 * n + d % 2] += sums[h][0][d];
              result->at[2 * (half + h) + d / 2][4 * n + 2 + d % 2] += sums[h][1][d];
            }
          }
        }
      }
    }
  }

  template <class Tile>
  __device__ static void StoreInputs(const Tile& tile, int row, int channel, const Raw& raw,
                                     Element element) {
    if (element == Element::kBf16) {
      tile.StoreFirst(row, channel, raw);
    } else {
      tile.Store(row, channel, Convert(raw, element));
    }
  }
  template <int kColumns, class A, class B>
  __device__ static void Project(Element element, const A& inputs, int row, const B& w, int column,
                                 int depth, Fragment<kColumns>* result) {
    if (element == Element::kBf16) {
      ProjectPlanes<1>(inputs, row, w, column, depth, result);
    } else {
      ProjectPlanes<2>(inputs, row, w, column, depth, result);
    }
  }
};

// ---- Numbers ----

// Returns exp(x) for x <= 0, or NaN for NaN.
__device__ inline float ExpOf(float x) { return exp2f(x * 1.44269504f); }

// Returns the factor that changes sums at reference `from` to the reference `to`, which is not
// below it.
__device__ inline float Rescale(float from, float to) {
  if (from == to) return 1;
  return from == -INFINITY ? 0 : ExpOf(from - to);
}
// Returns what the rho_j of a key that is seen counts as in a reference: NaN as 0, since a maximum
// would ignore it, and -inf as the least number, since it stands for no keys.
__device__ inline float AsReference(float log_scale) {
  return isnan(log_scale) ? 0 : fmaxf(log_scale, kLeastReference);
}
// Returns what is subtracted for a reference: 0 where there are no keys.
__device__ inline float Shift(float reference) { return reference == -INFINITY ? 0 : reference; }

}  // namespace
}  // namespace tfb

#endif  // TFB_CORE_LINEAR_LINEAR_MATH_CUH_
