// Compiled once per instruction set; see BUILD. TFB_KERNELS_NAME is the name of the set and of the
// table it defines.
//
// Everything here has internal linkage and nothing but <cstdint> and the kernel's header is
// included, so that no inline function compiled for a newer instruction set can be picked by the
// linker for a machine that lacks it.
#include "core/cpu/kernels.h"

namespace tfb {
namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
constexpr int kTileRows =
    6;  // 6 x 4 accumulators + 4 columns of B + 1 broadcast = 29 of 32 registers
constexpr int kTileVectors = 4;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
constexpr int kTileRows = 6;  // 6 x 2 accumulators + 2 of B + 1 broadcast = 15 of 16 registers
constexpr int kTileVectors = 2;
#else
constexpr int kLanes = 4;
constexpr int kTileRows = 4;
constexpr int kTileVectors = 2;
#endif

typedef float Floats __attribute__((vector_size(kLanes * 4), may_alias));
typedef float UnalignedFloats __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));
typedef int32_t Ints __attribute__((vector_size(kLanes * 4), may_alias));
typedef uint32_t Words __attribute__((vector_size(kLanes * 4), may_alias));
typedef int32_t UnalignedInts __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));

constexpr float kInfinity = __builtin_inff();

inline Floats Load(const float* p) { return *reinterpret_cast<const UnalignedFloats*>(p); }
inline void Store(float* p, Floats v) { *reinterpret_cast<UnalignedFloats*>(p) = v; }
inline Floats Broadcast(float value) { return value - Floats{}; }
inline Floats Max(Floats a, Floats b) { return a > b ? a : b; }  // b where either is NaN
inline Floats Min(Floats a, Floats b) { return a < b ? a : b; }

inline float HorizontalSum(Floats v) {
  float part[kLanes];
  Store(part, v);
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) part[i] += part[i + width];
  }
  return part[0];
}

// Transposes of 4 x 4 blocks in registers.
typedef float Four __attribute__((vector_size(16), aligned(4), may_alias));

// Rows become columns.
inline void Transpose4(Four (&row)[4]) {
  typedef int32_t Index __attribute__((vector_size(16)));
  const Four a = __builtin_shuffle(row[0], row[1], Index{0, 4, 1, 5});  // 00 10 01 11
  const Four b = __builtin_shuffle(row[2], row[3], Index{0, 4, 1, 5});
  const Four d = __builtin_shuffle(row[0], row[1], Index{2, 6, 3, 7});
  const Four e = __builtin_shuffle(row[2], row[3], Index{2, 6, 3, 7});
  row[0] = __builtin_shuffle(a, b, Index{0, 1, 4, 5});
  row[1] = __builtin_shuffle(a, b, Index{2, 3, 6, 7});
  row[2] = __builtin_shuffle(d, e, Index{0, 1, 4, 5});
  row[3] = __builtin_shuffle(d, e, Index{2, 3, 6, 7});
}

// Reduces each of four vectors to one number and returns the four numbers. This costs little more
// than one reduction.
template <class Combine>
inline void ReduceFour(const Floats (&v)[4], const Combine& combine, float* reduced) {
  float part[4][kLanes];
  Four half[4];
  for (int r = 0; r < 4; ++r) {
    Store(part[r], v[r]);
    half[r] = *reinterpret_cast<const Four*>(part[r]);
    for (int i = 4; i < kLanes; i += 4) {
      half[r] = combine(half[r], *reinterpret_cast<const Four*>(part[r] + i));
    }
  }
  Transpose4(half);
  *reinterpret_cast<Four*>(reduced) = combine(combine(half[0], half[1]), combine(half[2], half[3]));
}
inline void HorizontalSums(const Floats (&v)[4], float* sums) {
  ReduceFour(
      v, [](Four a, Four b) { return a + b; }, sums);
}
inline void HorizontalMaxs(const Floats (&v)[4], float* maxs) {
  ReduceFour(
      v, [](Four a, Four b) { return a > b ? a : b; }, maxs);
}

// exp(x) for x <= 0 or so: 2^n p(f) with n + f = x log2(e), |f| <= 1/2. Relative error
// below 1.2e-7; exactly 0 below -87.33 (where the result would be denormal); NaN for NaN. The
// polynomial is the Taylor series of 2^f to f^7, whose remainder at f = 1/2 is (ln 2 / 2)^8 / 8! =
// 5e-9.
inline Floats Exp(Floats x) {
  constexpr float kLog2E = 1.44269504088896341f;
  constexpr float kRound =
      12582912.0f;  // 1.5 2^23: adding it rounds to an integer held in the low mantissa bits
  // x log2(e) in two parts would matter only for large |x|, where the result is small; Cody and
  // Waite's split of ln 2 instead: r = x - n ln2_high - n ln2_low is exact to the last bit of x.
  const Floats shifted = x * kLog2E + kRound;
  const Floats n = shifted - kRound;
  const Floats r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  Floats p = Broadcast(1.0f / 5040);
  p = p * r + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  // Words may overflow, as they do where x is far below all whose result is not 0.
  const Words exponent = (reinterpret_cast<const Words&>(shifted) - 0x4B400000 + 127) << 23;
  const Floats result = p * reinterpret_cast<const Floats&>(exponent);
  return x < -87.33f ? Floats{} : result;
}

// sin(x) and cos(x) for |x| <= kSinCosRange, NaN for NaN and infinities. x = n pi / 2 + r with |r| <=
// pi / 4; pi / 2 in three parts (Cody and Waite), of which the first two have 8 and 9 bits, so that
// their products with n < 2^13 are exact. The polynomials are the Taylor series to r^9 and r^10, whose
// remainders at pi / 4 are (pi / 4)^11 / 11! = 2e-9 and (pi / 4)^12 / 12! = 1e-10.
constexpr float kSinCosRange = 8192;
inline Floats SinCos(Floats x, Floats* cos) {
  constexpr float kTwoOverPi = 0.636619772367581343f;
  constexpr float kRound = 12582912.0f;  // as in Exp
  const Floats shifted = x * kTwoOverPi + kRound;
  const Floats n = shifted - kRound;
  const Floats r =
      ((x - n * 1.5703125f) - n * 4.837512969970703125e-4f) - n * 7.549789948768648e-8f;
  const Floats square = r * r;
  Floats s = Broadcast(1.0f / 362880);
  s = s * square - 1.0f / 5040;
  s = s * square + 1.0f / 120;
  s = s * square - 1.0f / 6;
  s = s * square * r + r;
  Floats c = Broadcast(-1.0f / 3628800);
  c = c * square + 1.0f / 40320;
  c = c * square - 1.0f / 720;
  c = c * square + 1.0f / 24;
  c = c * square - 0.5f;
  c = c * square + 1.0f;
  // A quarter turn swaps the two; signs are those of the quadrant n mod 4.
  const Ints quadrant = reinterpret_cast<const Ints&>(shifted);
  const Ints swapped = (quadrant & 1) != 0;
  const Floats sine = swapped ? c : s, cosine = swapped ? s : c;
  const Ints sine_bits = reinterpret_cast<const Ints&>(sine) ^ ((quadrant & 2) << 30);
  const Ints cosine_bits = reinterpret_cast<const Ints&>(cosine) ^ (((quadrant + 1) & 2) << 30);
  *cos = reinterpret_cast<const Floats&>(cosine_bits);
  return reinterpret_cast<const Floats&>(sine_bits);
}

// SinCos for arguments of any size, one element at a time.
inline Floats WideSinCos(Floats x, Floats* cos) {
  Floats sin;
  for (int i = 0; i < kLanes; ++i) {
    sin[i] = static_cast<float>(__builtin_sin(x[i]));
    (*cos)[i] = static_cast<float>(__builtin_cos(x[i]));
  }
  return sin;
}

inline Floats Abs(Floats x) { return Max(x, -x); }
inline float HorizontalMax(Floats v) {
  float max = v[0];
  for (int i = 1; i < kLanes; ++i) max = v[i] > max ? v[i] : max;
  return max;
}

void SinCosOf(int64_t count, const float* x, float* sin, float* cos) {
  for (int64_t n = 0; n < count; n += kLanes) {
    float part[2][kLanes] = {};
    const int64_t left = count - n < kLanes ? count - n : kLanes;
    for (int64_t i = 0; i < left; ++i) part[0][i] = x[n + i];
    const Floats values = Load(part[0]);
    Floats cosine;
    const Floats sine = HorizontalMax(Abs(values)) <= kSinCosRange ? SinCos(values, &cosine)
                                                                   : WideSinCos(values, &cosine);
    Store(part[0], sine);
    Store(part[1], cosine);
    for (int64_t i = 0; i < left; ++i) {
      sin[n + i] = part[0][i];
      cos[n + i] = part[1][i];
    }
  }
}

// C[kRows][kVectors * kLanes] = A B + D, with the whole block of C in registers; D is 0 where d is
// null.
template <int kRows, int kVectors>
void GemmTile(int64_t depth, const float* a, int64_t a_row, int64_t a_depth, const float* b,
              int64_t b_row, float* c, int64_t c_row, const float* d, int64_t d_row) {
  // The unroll pragmas make the compiler see each element of `sum` as a register before it decides
  // where arrays live.
  Floats sum[kRows][kVectors];
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 8
    for (int j = 0; j < kVectors; ++j) sum[i][j] = Floats{};
  }
  for (int64_t k = 0; k < depth; ++k) {
    Floats column[kVectors];
#pragma GCC unroll 8
    for (int j = 0; j < kVectors; ++j) column[j] = Load(b + k * b_row + j * kLanes);
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
      const Floats value = Broadcast(a[i * a_row + k * a_depth]);
#pragma GCC unroll 8
      for (int j = 0; j < kVectors; ++j) sum[i][j] += value * column[j];
    }
  }
  if (d != nullptr) {
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 8
      for (int j = 0; j < kVectors; ++j) sum[i][j] += Load(d + i * d_row + j * kLanes);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 8
    for (int j = 0; j < kVectors; ++j) Store(c + i * c_row + j * kLanes, sum[i][j]);
  }
}

// Asks for the next lines. A block of a product takes some 200 ns, in which a core gets about 30
// lines from beyond its L2.
inline void AskFor(Ahead* ahead) {
  for (int n = 0; n < 8 && ahead->tensor < ahead->count; ++n) {
    const AheadRows& rows = ahead->tensors[ahead->tensor];
    __builtin_prefetch(rows.first + ahead->row * rows.stride + ahead->byte, 0, 2);
    ahead->byte += 64;
    if (ahead->byte < rows.bytes) continue;
    ahead->byte = 0;
    if (++ahead->row < rows.rows) continue;
    ahead->row = 0;
    ++ahead->tensor;
  }
}

// Computes all rows of one group of kVectors columns.
template <int kVectors>
void GemmColumns(int64_t rows, int64_t depth, const float* a, int64_t a_row, int64_t a_depth,
                 const float* b, int64_t b_row, float* c, int64_t c_row, const float* d,
                 int64_t d_row, Ahead* ahead) {
  int64_t i = 0;
  const auto next = [&](auto tile, int64_t tile_rows) {
    if (ahead != nullptr) AskFor(ahead);
    tile(depth, a + i * a_row, a_row, a_depth, b, b_row, c + i * c_row, c_row,
         d == nullptr ? nullptr : d + i * d_row, d_row);
    i += tile_rows;
  };
  // With one vector of columns, enough rows are in flight to hide the latency of an addition.
  if (kVectors == 1) {
    while (i + 8 <= rows) next(GemmTile<8, kVectors>, 8);
  }
  while (i + kTileRows <= rows) next(GemmTile<kTileRows, kVectors>, kTileRows);
  switch (rows - i) {
    case 5:
      return next(GemmTile<5, kVectors>, 5);
    case 4:
      return next(GemmTile<4, kVectors>, 4);
    case 3:
      return next(GemmTile<3, kVectors>, 3);
    case 2:
      return next(GemmTile<2, kVectors>, 2);
    case 1:
      return next(GemmTile<1, kVectors>, 1);
    default:
      return;
  }
}

void GemmPlus(int64_t rows, int64_t columns, int64_t depth, const float* a, int64_t a_row,
              int64_t a_depth, const float* b, int64_t b_row, const float* d, int64_t d_row,
              float* c, int64_t c_row, Ahead* ahead) {
  int64_t j = 0;
  const auto next = [&](auto gemm) {
    gemm(rows, depth, a, a_row, a_depth, b + j, b_row, c + j, c_row, d == nullptr ? nullptr : d + j,
         d_row, ahead);
  };
  for (; j + kTileVectors * kLanes <= columns; j += kTileVectors * kLanes) {
    next(GemmColumns<kTileVectors>);
  }
  switch ((columns - j + kLanes - 1) / kLanes) {
    case 3:
      return next(GemmColumns<3>);
    case 2:
      return next(GemmColumns<2>);
    case 1:
      return next(GemmColumns<1>);
    default:
      return;
  }
}

void Gemm(int64_t rows, int64_t columns, int64_t depth, const float* a, int64_t a_row,
          int64_t a_depth, const float* b, int64_t b_row, float* c, int64_t c_row,
          bool accumulate) {
  GemmPlus(rows, columns, depth, a, a_row, a_depth, b, b_row, accumulate ? c : nullptr, c_row, c,
           c_row, nullptr);
}

constexpr int64_t kTriangleColumns = 64;
static_assert(kTileVectors == 2 || kTileVectors == 4, "TriangleTile has a loop for each");

// Adds A B to vectors [kFrom, kTo) of a block of C in registers, for depths [begin, end).
template <int kFrom, int kTo, int kRows>
inline __attribute__((always_inline)) void MultiplyInto(Floats (&sum)[kRows][kTileVectors],
                                                        int64_t begin, int64_t end, const float* a,
                                                        int64_t a_row, int64_t a_depth,
                                                        const float* b) {
  for (int64_t k = begin; k < end; ++k) {
    Floats column[kTileVectors];
#pragma GCC unroll 8
    for (int j = kFrom; j < kTo; ++j) column[j] = Load(b + k * kTriangleColumns + j * kLanes);
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
      const Floats value = Broadcast(a[i * a_row + k * a_depth]);
#pragma GCC unroll 8
      for (int j = kFrom; j < kTo; ++j) sum[i][j] += value * column[j];
    }
  }
}

// C += A B for one block of C. Vector j of B is zeros at depths below step[j] where kAbove, and else
// from step[j + 1] on.
template <int kRows, bool kAbove>
void TriangleTile(const int64_t* step, const float* a, int64_t a_row, int64_t a_depth,
                  const float* b, float* c) {
  Floats sum[kRows][kTileVectors];
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 8
    for (int j = 0; j < kTileVectors; ++j) sum[i][j] = Load(c + i * kTriangleColumns + j * kLanes);
  }
  MultiplyInto<0, kAbove ? 1 : kTileVectors>(sum, step[0], step[1], a, a_row, a_depth, b);
  MultiplyInto<kAbove ? 0 : 1, kAbove ? 2 : kTileVectors>(sum, step[1], step[2], a, a_row, a_depth,
                                                          b);
  if constexpr (kTileVectors == 4) {
    MultiplyInto<kAbove ? 0 : 2, kAbove ? 3 : 4>(sum, step[2], step[3], a, a_row, a_depth, b);
    MultiplyInto<kAbove ? 0 : 3, 4>(sum, step[3], step[4], a, a_row, a_depth, b);
  }
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 8
    for (int j = 0; j < kTileVectors; ++j) {
      Store(c + i * kTriangleColumns + j * kLanes, sum[i][j]);
    }
  }
}

template <bool kAbove>
void TriangleColumns(int64_t rows, const int64_t* step, const float* a, int64_t a_row,
                     int64_t a_depth, const float* b, float* c) {
  int64_t i = 0;
  const auto next = [&](auto tile, int64_t tile_rows) {
    tile(step, a + i * a_row, a_row, a_depth, b, c + i * kTriangleColumns);
    i += tile_rows;
  };
  while (i + kTileRows <= rows) next(TriangleTile<kTileRows, kAbove>, kTileRows);
  while (i + 2 <= rows) next(TriangleTile<2, kAbove>, 2);
  if (i < rows) next(TriangleTile<1, kAbove>, 1);
}

void GemmTriangle(int64_t rows, int64_t depth, const float* a, int64_t a_row, int64_t a_depth,
                  const float* b, const Zeros& zeros, float* c) {
  const auto within = [&](int64_t k) { return k < 0 ? 0 : k > depth ? depth : k; };
  const int64_t place = zeros.above ? -zeros.place : zeros.place;
  for (int64_t first = 0; first < kTriangleColumns; first += kTileVectors * kLanes) {
    int64_t step[kTileVectors + 1];
    for (int j = 0; j <= kTileVectors; ++j) step[j] = within(first + j * kLanes + place);
    step[zeros.above ? kTileVectors : 0] = zeros.above ? depth : 0;
    const auto multiply = zeros.above ? TriangleColumns<true> : TriangleColumns<false>;
    multiply(rows, step, a, a_row, a_depth, b + first, c + first);
  }
}

// The ramp of one row.
struct RowRamp {
  RowRamp() = default;
  RowRamp(const Ramp& ramp, int64_t r)
      : span(ramp.span[r]),
        distance(ramp.distance[r]),
        length(ramp.length),
        slope(1 / ramp.length) {}
  // Returns the weights at columns c, c + 1, ... before they are clipped; `lane` is {0, 1, 2, ...}.
  Floats Weight(int64_t c, Floats lane) const {
    return (span - ((distance - static_cast<float>(c)) - lane) + length) * slope;
  }
  float span, distance, length, slope;
};
inline Floats Lane() {
  Floats lane = {};
  for (int i = 0; i < kLanes; ++i) lane[i] = static_cast<float>(i);
  return lane;
}

// Hides the keys whose weight is 0.
void HideBeyondRamp(float* row, int64_t columns, const RowRamp& ramp) {
  const Floats lane = Lane();
  for (int64_t c = 0; c < columns; c += kLanes) {
    const Floats weight = ramp.Weight(c, lane);
    Store(row + c, weight > 0.0f ? Load(row + c) : Broadcast(-kInfinity));
  }
}

// Replaces the scores of one row by their softmax numerators relative to `max`; returns vectors'
// sum. Four accumulators hide the latency of the addition; which of them a column belongs to does
// not depend on the columns behind it, so that more hidden keys at the end change no bit of the
// sum.
template <bool kRamp>
Floats ExpRow(float* row, int64_t columns, float max, const RowRamp& ramp) {
  const Floats lane = Lane();
  const auto numerators = [&](int64_t c) {
    Floats p = Exp(Load(row + c) - max);
    if (kRamp) p *= Max(Min(ramp.Weight(c, lane), Broadcast(1.0f)), Floats{});
    Store(row + c, p);
    return p;
  };
  Floats sum[4] = {};
  int64_t c = 0;
  for (; c + 4 * kLanes <= columns; c += 4 * kLanes) {
    for (int u = 0; u < 4; ++u) sum[u] += numerators(c + u * kLanes);
  }
#pragma GCC unroll 3
  for (int u = 0; u < 3; ++u, c += kLanes) {
    if (c < columns) sum[u] += numerators(c);
  }
  return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

Floats MaxRow(const float* row, int64_t columns) {
  Floats max[4];
  for (Floats& m : max) m = Broadcast(-kInfinity);
  int64_t c = 0;
  for (; c + 4 * kLanes <= columns; c += 4 * kLanes) {
    for (int u = 0; u < 4; ++u) max[u] = Max(Load(row + c + u * kLanes), max[u]);
  }
  for (; c < columns; c += kLanes) max[0] = Max(Load(row + c), max[0]);
  return Max(Max(max[0], max[1]), Max(max[2], max[3]));
}

// Handles up to four rows at once, so that the work per row (rescaling, the final reductions) is
// done for all four together.
void SoftmaxOfRows(float* scores, int64_t stride, int64_t rows, int64_t columns, float* max,
                   float* sum, float* rescale, const Ramp* ramp, int64_t first) {
  Floats part[4] = {};
  for (int64_t r = 0; r < rows; ++r) {
    float* row = scores + r * stride;
    if (ramp != nullptr) HideBeyondRamp(row, columns, RowRamp(*ramp, first + r));
    part[r] = MaxRow(row, columns);
  }
  float row_max[4], row_sum[4];
  HorizontalMaxs(part, row_max);
  Floats change = {};
  for (int64_t r = 0; r < rows; ++r) {
    const float new_max = row_max[r] > max[r] ? row_max[r] : max[r];
    // In a row that has seen no key, subtracting 0 turns -inf into a numerator of 0, where -inf -
    // -inf would be NaN.
    const float shift = new_max == -kInfinity ? 0.0f : new_max;
    float* row = scores + r * stride;
    part[r] = ramp == nullptr ? ExpRow<false>(row, columns, shift, RowRamp())
                              : ExpRow<true>(row, columns, shift, RowRamp(*ramp, first + r));
    change[r] = new_max == max[r] ? 0.0f : max[r] - new_max;
    max[r] = new_max;
  }
  HorizontalSums(part, row_sum);
  const Floats factor = Exp(change);  // Exp(0) is 1
  for (int64_t r = 0; r < rows; ++r) {
    rescale[r] = factor[r];
    sum[r] = sum[r] * factor[r] + row_sum[r];
  }
}

void Softmax(const ScoreRows& rows, const SoftmaxState& state, const Ramp* ramp) {
  for (int64_t r = 0; r < rows.rows; r += 4) {
    SoftmaxOfRows(rows.scores + r * rows.stride, rows.stride, rows.rows - r < 4 ? rows.rows - r : 4,
                  rows.columns, state.max + r, state.sum + r, state.rescale + r, ramp, r);
  }
}

// Applies `change(values, r, c)` to every vector of scores.
template <class Change>
void ForEachVector(const ScoreRows& rows, Change change) {
  for (int64_t r = 0; r < rows.rows; ++r) {
    float* row = rows.scores + r * rows.stride;
    for (int64_t c = 0; c < rows.columns; c += kLanes) Store(row + c, change(Load(row + c), r, c));
  }
}

void Add(const ScoreRows& rows, const float* table, int64_t table_row) {
  ForEachVector(
      rows, [=](Floats s, int64_t r, int64_t c) { return s + Load(table + r * table_row + c); });
}

void AddByLabel(const ScoreRows& rows, const int32_t* row_ids, const int32_t* column_ids,
                const float (*terms)[2]) {
  ForEachVector(rows, [=](Floats s, int64_t r, int64_t c) {
    const Ints same = *reinterpret_cast<const UnalignedInts*>(column_ids + c) == row_ids[r];
    return s + (same ? Broadcast(terms[r][1]) : Broadcast(terms[r][0]));
  });
}

void ReluMultiply(const ScoreRows& rows, const float* table, int64_t table_row) {
  ForEachVector(rows, [=](Floats s, int64_t r, int64_t c) {
    return Max(Floats{}, s) * Load(table + r * table_row + c);
  });
}

// Returns all ones in the lanes whose bit of `bits` is set.
inline Ints LanesOf(uint64_t bits) {
  Ints lane_bit = {};
  for (int i = 0; i < kLanes; ++i) lane_bit[i] = 1 << i;
  return ((static_cast<int32_t>(bits & 0xFFFF) - Ints{}) & lane_bit) != 0;
}

void Mask(const ScoreRows& rows, const uint64_t* masks, int64_t first_bit) {
  ForEachVector(rows, [=](Floats s, int64_t r, int64_t c) {
    return LanesOf(masks[r] >> (first_bit + c)) ? s : Broadcast(-kInfinity);
  });
}

template <bool kMasks, bool kRamp>
void SoftmaxBackwardRow(float* scores, float* gradients, int64_t columns, int64_t r,
                        const SoftmaxGradient& softmax) {
  const Floats lane = Lane();
  // A row that sees no key has a shift of -inf.
  const float shift = softmax.shift[r] == -kInfinity ? kInfinity : softmax.shift[r];
  const float factor = softmax.factor[r], delta = softmax.delta[r];
  const RowRamp ramp = kRamp ? RowRamp(*softmax.ramp, r) : RowRamp();
  Floats span = {};
  for (int64_t c = 0; c < columns; c += kLanes) {
    const Floats e = Exp(Load(scores + c) - shift) * factor;
    const Floats difference = Load(gradients + c) - delta;
    Floats p = e;
    if (kRamp) {
      const Floats weight = ramp.Weight(c, lane);
      p *= Max(Min(weight, Broadcast(1.0f)), Floats{});
      const Floats slanted = weight > 0.0f ? (weight < 1.0f ? e * difference : Floats{}) : Floats{};
      span += e == 0.0f ? Floats{} : slanted;
    }
    Floats gradient = p == 0.0f ? Floats{} : p * difference;
    if (kMasks) {
      const Ints seen = LanesOf(softmax.masks[r] >> (softmax.first_bit + c));
      p = seen ? p : Floats{};
      gradient = seen ? gradient : Floats{};
    }
    Store(scores + c, p);
    Store(gradients + c, gradient);
  }
  if (kRamp) softmax.span_gradient[r] += ramp.slope * HorizontalSum(span);
}

void SoftmaxBackward(const ScoreRows& rows, float* gradients, int64_t gradient_row,
                     const SoftmaxGradient& softmax) {
  const auto row = softmax.ramp != nullptr
                       ? (softmax.masks != nullptr ? SoftmaxBackwardRow<true, true>
                                                   : SoftmaxBackwardRow<false, true>)
                       : (softmax.masks != nullptr ? SoftmaxBackwardRow<true, false>
                                                   : SoftmaxBackwardRow<false, false>);
  for (int64_t r = 0; r < rows.rows; ++r) {
    row(rows.scores + r * rows.stride, gradients + r * gradient_row, rows.columns, r, softmax);
  }
}

// Sums a diagonal after the other, 16 of them at a time where all lie within the columns.
void AddDiagonals(const ScoreRows& rows, float* sums) {
  const int64_t diagonals = rows.rows + rows.columns - 1;
  for (int64_t first = 0; first < diagonals; first += kLanes) {
    // Diagonal d has column d - (rows - 1) + r in row r.
    const int64_t column = first - (rows.rows - 1);
    const int64_t begin = column < 0 ? -column : 0;
    const int64_t last = rows.columns - kLanes - column;  // the last row with a whole vector
    const int64_t end = last + 1 < rows.rows ? last + 1 : rows.rows;
    Floats sum[2] = {};
    for (int64_t r = begin; r < end; ++r) {
      sum[r % 2] += Load(rows.scores + r * rows.stride + column + r);
    }
    float part[kLanes];
    Store(part, sum[0] + sum[1]);
    const int64_t count = diagonals - first < kLanes ? diagonals - first : kLanes;
    for (int64_t d = 0; d < count; ++d) {
      float rest = begin < end ? part[d] : 0.0f;
      for (int64_t r = column + d < 0 ? -(column + d) : 0; r < begin && r < rows.rows; ++r) {
        if (column + d + r < rows.columns) rest += rows.scores[r * rows.stride + column + d + r];
      }
      for (int64_t r = end > begin ? end : begin; r < rows.rows && column + d + r < rows.columns;
           ++r) {
        rest += rows.scores[r * rows.stride + column + d + r];
      }
      sums[first + d] += rest;
    }
  }
}

template <int kVectors>
void AddSumsOfColumns(const ScoreRows& rows, int64_t c, float* sums) {
  Floats sum[kVectors];
#pragma GCC unroll 4
  for (int j = 0; j < kVectors; ++j) sum[j] = Floats{};
  for (int64_t r = 0; r < rows.rows; ++r) {
    const float* row = rows.scores + r * rows.stride + c;
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) sum[j] += Load(row + j * kLanes);
  }
#pragma GCC unroll 4
  for (int j = 0; j < kVectors; ++j) {
    float* to = sums + c + j * kLanes;
    Store(to, Load(to) + sum[j]);
  }
}
void AddColumnSums(const ScoreRows& rows, float* sums) {
  int64_t c = 0;
  for (; c + 4 * kLanes <= rows.columns; c += 4 * kLanes) AddSumsOfColumns<4>(rows, c, sums);
  for (; c < rows.columns; c += kLanes) AddSumsOfColumns<1>(rows, c, sums);
}

void AddSumsByLabel(const ScoreRows& rows, const int32_t* row_ids, const int32_t* column_ids,
                    float (*sums)[2]) {
  for (int64_t r = 0; r < rows.rows; ++r) {
    Floats same = {}, other = {};
    for (int64_t c = 0; c < rows.columns; c += kLanes) {
      const Floats score = Load(rows.scores + r * rows.stride + c);
      const Ints is_same = *reinterpret_cast<const UnalignedInts*>(column_ids + c) == row_ids[r];
      same += is_same ? score : Floats{};
      other += is_same ? Floats{} : score;
    }
    sums[r][0] += HorizontalSum(other);
    sums[r][1] += HorizontalSum(same);
  }
}

void ReluMultiplyBackward(const ScoreRows& rows, float* products, int64_t product_row,
                          const float* table, int64_t table_row) {
  for (int64_t r = 0; r < rows.rows; ++r) {
    float* row = rows.scores + r * rows.stride;
    float* of_row = products + r * product_row;
    for (int64_t c = 0; c < rows.columns; c += kLanes) {
      const Floats gradient = Load(row + c), product = Load(of_row + c);
      const Floats factor = Load(table + r * table_row + c);
      const Ints passes = (gradient != 0.0f) & (product > 0.0f);
      Store(row + c, passes ? gradient * factor : Floats{});
      Store(of_row + c, passes ? gradient * product : Floats{});
    }
  }
}

// Bit i says whether lane i of `mask`, all ones or zeros, is set.
inline uint64_t BitsOf(Ints mask) {
#if defined(__AVX512F__)
  typedef int32_t Plain __attribute__((vector_size(kLanes * 4)));
  return static_cast<uint16_t>(__builtin_ia32_cvtd2mask512((Plain)mask));
#else
  typedef float Plain __attribute__((vector_size(kLanes * 4)));
#if defined(__AVX2__)
  return static_cast<uint64_t>(__builtin_ia32_movmskps256((Plain)mask));
#else
  return static_cast<uint64_t>(__builtin_ia32_movmskps((Plain)mask));
#endif
#endif
}
inline Ints LoadInts(const int32_t* p) { return *reinterpret_cast<const UnalignedInts*>(p); }
// All ones in lanes where 0 <= row - column <= 1.
inline Ints HasPair(int32_t row, Ints column) {
  const Ints difference = row - column;
  return (difference & ~1) == 0;
}

void HidePairs(int64_t rows, const TokenPairs& pairs, bool causal, uint64_t* masks) {
  for (int64_t r = 0; r < rows; ++r) {
    uint64_t seen = 0;
    for (int64_t c = 0; c < kPairColumns; c += kLanes) {
      Ints kept = Ints{} == 0;
      if (causal) kept &= LoadInts(pairs.column_tokens + c) <= pairs.row_tokens[r];
      for (int64_t n = 0; n < pairs.slots; ++n) {
        kept &= HasPair(pairs.row_codes[n * kPairColumns + r],
                        LoadInts(pairs.column_codes + n * kPairColumns + c));
      }
      seen |= BitsOf(kept) << c;
    }
    masks[r] &= seen;
  }
}

// log(n) of small numbers n >= 1, to 3e-7: with n = 2^e m, m in [2/3, 4/3), the series of
// 2 artanh(t), t = (m - 1) / (m + 1), |t| <= 1/5.
inline Floats LogOfCount(Ints n) {
  const Floats value = __builtin_convertvector(n, Floats);
  const Ints bits = reinterpret_cast<const Ints&>(value);
  const Ints exponent = (bits - 0x3F2AAAAB) >> 23;
  const Ints mantissa = bits - (exponent << 23);
  const Floats m = reinterpret_cast<const Floats&>(mantissa);
  const Floats t = (m - 1.0f) / (m + 1.0f), t2 = t * t;
  const Floats series = t * (2.0f + t2 * (2.0f / 3 + t2 * (2.0f / 5 + t2 * (2.0f / 7))));
  return __builtin_convertvector(exponent, Floats) * 0.693147181f + series;
}

void AdjustPairs(const ScoreRows& rows, const TokenPairs& pairs, float self_bias) {
  ForEachVector(rows, [=](Floats s, int64_t r, int64_t c) {
    if (pairs.slots > 0) {
      Ints count = {};
      for (int64_t n = 0; n < pairs.slots; ++n) {
        count -= HasPair(pairs.row_codes[n * kPairColumns + r],
                         LoadInts(pairs.column_codes + n * kPairColumns + c));
      }
      s -= LogOfCount(count > 1 ? count : 1 - Ints{});
    }
    const Ints same = LoadInts(pairs.column_tokens + c) == pairs.row_tokens[r];
    return s + (same ? Broadcast(self_bias) : Floats{});
  });
}

void SignedArgmax(int64_t rows, const float* values, int32_t* index) {
  constexpr int kVectors = 64 / kLanes;
  Floats largest[kVectors];
  Ints at[kVectors] = {};
  for (Floats& x : largest) x = Broadcast(-kInfinity);
  for (int sign = 0; sign < 2; ++sign) {
    for (int64_t r = 0; r < rows; ++r) {
      for (int u = 0; u < kVectors; ++u) {
        const Floats v = Load(values + r * 64 + u * kLanes);
        const Floats x = sign == 0 ? v : -v;
        const Ints larger = x > largest[u];
        largest[u] = larger ? x : largest[u];
        at[u] = larger ? static_cast<int32_t>(sign * rows + r) - Ints{} : at[u];
      }
    }
  }
  for (int u = 0; u < kVectors; ++u) {
    *reinterpret_cast<UnalignedInts*>(index + u * kLanes) = at[u];
  }
}

void ScaleRows(const ScoreRows& rows, const float* factor) {
  ForEachVector(rows, [=](Floats s, int64_t r, int64_t) { return s * factor[r]; });
}

// All ones in the lanes that hold an infinity or NaN, whose difference to itself is NaN.
inline Ints NotFinite(Floats v) { return (v - v) != 0.0f; }
inline bool IsNone(Ints found) {
  int32_t any = 0;
  for (int i = 0; i < kLanes; ++i) any |= found[i];
  return any == 0;
}

bool LoadScaled(const ScoreRows& to, const ConstRows& from, const float* bias, float factor) {
  Ints found = {};
  ForEachVector(to, [&](Floats, int64_t r, int64_t c) {
    Floats value = Load(from[r] + c);
    if (bias != nullptr) value += Load(bias + c);
    value *= factor;
    found |= NotFinite(value);
    return value;
  });
  return IsNone(found);
}

bool AllFinite(const ConstRows& matrix, int64_t rows, int64_t columns) {
  Ints found = {};
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < columns; c += kLanes) found |= NotFinite(Load(matrix[r] + c));
  }
  return IsNone(found);
}

#if defined(__AVX512F__)
// Exchanges, within 2 kStep x 2 kStep blocks of a 16 x 16 matrix, the kStep x kStep blocks beside
// their diagonals. Steps of 1, 2, 4 and 8 transpose the matrix.
template <int kStep>
inline void ExchangeBlocks(Floats (&row)[kLanes]) {
  Ints low, high;  // elements of 16 on are those of the second row
#pragma GCC unroll 16
  for (int e = 0; e < kLanes; ++e) {
    low[e] = (e & kStep) == 0 ? e : e - kStep + kLanes;
    high[e] = (e & kStep) == 0 ? e + kStep : e + kLanes;
  }
#pragma GCC unroll 16
  for (int r = 0; r < kLanes; ++r) {
    if ((r & kStep) != 0) continue;
    const Floats first = row[r], second = row[r + kStep];
    row[r] = __builtin_shuffle(first, second, low);
    row[r + kStep] = __builtin_shuffle(first, second, high);
  }
}

// Transposes 16 rows of whole vectors of columns.
inline void TransposeVectors(const float* from, int64_t from_row, int64_t columns, float* to) {
  for (int64_t c = 0; c < columns; c += kLanes) {
    Floats row[kLanes];
#pragma GCC unroll 16
    for (int r = 0; r < kLanes; ++r) row[r] = Load(from + r * from_row + c);
    ExchangeBlocks<1>(row);
    ExchangeBlocks<2>(row);
    ExchangeBlocks<4>(row);
    ExchangeBlocks<8>(row);
#pragma GCC unroll 16
    for (int r = 0; r < kLanes; ++r) Store(to + (c + r) * 64, row[r]);
  }
}
constexpr bool kTransposesVectors = true;
#else
inline void TransposeVectors(const float*, int64_t, int64_t, float*) {}
constexpr bool kTransposesVectors = false;
#endif

// A block of 16 rows after the other, in the order of memory.
void Transpose64(const float* from, int64_t from_row, int64_t columns, float* to) {
  const int64_t whole = kTransposesVectors ? columns - columns % 16 : 0;
  for (int64_t first = 0; first < 64; first += 16) {
    TransposeVectors(from + first * from_row, from_row, whole, to + first);
    for (int64_t c = whole; c < columns; c += 4) {
      for (int64_t r = first; r < first + 16; r += 4) {
        Four block[4];
        for (int i = 0; i < 4; ++i) {
          block[i] = *reinterpret_cast<const Four*>(from + (r + i) * from_row + c);
        }
        Transpose4(block);
        for (int i = 0; i < 4; ++i) *reinterpret_cast<Four*>(to + (c + i) * 64 + r) = block[i];
      }
    }
  }
}

void ExpRows(const ScoreRows& rows, const float* shift) {
  ForEachVector(rows, [=](Floats s, int64_t r, int64_t) { return Exp(s - shift[r]); });
}

// Returns the largest magnitude in kVectors vectors of each row; NaN are ignored.
template <int kVectors>
float LargestOf(const float* values, int64_t stride, int64_t rows) {
  Floats largest[kVectors] = {};
  for (int64_t r = 0; r < rows; ++r) {
    for (int u = 0; u < kVectors; ++u) {
      largest[u] = Max(Abs(Load(values + r * stride + u * kLanes)), largest[u]);
    }
  }
  for (int u = 1; u < kVectors; ++u) largest[0] = Max(largest[u], largest[0]);
  return HorizontalMax(largest[0]);
}

// Handles kVectors vectors of tokens side by side, so that their sums stay in registers.
template <Feature kFeature, int kVectors>
void FeatureVectors(float* values, int64_t stride, int64_t projections, int64_t c,
                    const FeatureSums& sums) {
  values += c;
  Floats max[kVectors] = {}, sum[kVectors] = {}, dot[kVectors] = {};
  if (kFeature == Feature::kExp || kFeature == Feature::kExpPair) {
    for (Floats& m : max) m = Broadcast(-kInfinity);
    for (int64_t r = 0; r < projections; ++r) {
      for (int u = 0; u < kVectors; ++u) {
        const Floats p = Load(values + r * stride + u * kLanes);
        max[u] = Max(kFeature == Feature::kExpPair ? Max(p, -p) : p, max[u]);
      }
    }
  }
  const auto store = [&](int64_t r, int u, Floats feature) {
    Store(values + r * stride + u * kLanes, feature);
    sum[u] += feature;
    if (sums.weights != nullptr) dot[u] += feature * sums.weights[r];
  };
  const bool wide = kFeature == Feature::kSinCos &&
                    !(LargestOf<kVectors>(values, stride, projections) <= kSinCosRange);
  for (int64_t r = 0; r < projections; ++r) {
    for (int u = 0; u < kVectors; ++u) {
      const Floats p = Load(values + r * stride + u * kLanes);
      if (kFeature == Feature::kSinCos) {
        Floats cosine;
        const Floats sine = wide ? WideSinCos(p, &cosine) : SinCos(p, &cosine);
        store(r, u, sine);
        store(projections + r, u, cosine);
      } else if (kFeature == Feature::kRelu) {
        store(r, u, Max(Floats{}, p));
      } else {
        store(r, u, Exp(p - max[u]));
        if (kFeature == Feature::kExpPair) store(projections + r, u, Exp(-p - max[u]));
      }
    }
  }
  for (int u = 0; u < kVectors; ++u) {
    Store(sums.max + c + u * kLanes, max[u]);
    Store(sums.sum + c + u * kLanes, sum[u]);
    if (sums.weights != nullptr) Store(sums.dot + c + u * kLanes, dot[u]);
  }
}

template <Feature kFeature, int kVectors>
void FeatureGradientVectors(const FeatureColumns& tokens, int64_t c, const FeatureGradients& g) {
  const int64_t stride = tokens.stride, second = tokens.projections;
  Floats factor[kVectors], offset[kVectors], scale[kVectors], sum[kVectors] = {},
                                                              product[kVectors] = {};
  for (int u = 0; u < kVectors; ++u) {
    factor[u] = Load(g.factor + c + u * kLanes);
    offset[u] = Load(g.offset + c + u * kLanes);
    scale[u] = Load(g.scale + c + u * kLanes);
  }
  for (int64_t r = 0; r < tokens.projections; ++r) {
    for (int u = 0; u < kVectors; ++u) {
      // Returns the gradient of a feature.
      const auto gradient = [&](int64_t feature, Floats value) {
        const Floats d = Load(g.gradients + feature * stride + c + u * kLanes) +
                         g.weights[feature] * factor[u] + offset[u];
        sum[u] += d;
        product[u] += value * d;
        return d;
      };
      float* at = tokens.values + r * stride + c + u * kLanes;
      const Floats f = Load(at);
      const Floats d = gradient(r, f);
      if (kFeature == Feature::kExp) {
        Store(at, scale[u] * (f * d));
      } else if (kFeature == Feature::kRelu) {
        Store(at, scale[u] * d * (f > 0.0f ? Broadcast(1.0f) : Floats{}));
      } else {
        const Floats other = Load(at + second * stride);
        const Floats of_other = gradient(second + r, other);
        Store(at, scale[u] * (kFeature == Feature::kExpPair ? f * d - other * of_other
                                                            : d * other - of_other * f));
      }
    }
  }
  for (int u = 0; u < kVectors; ++u) {
    Store(g.sum + c + u * kLanes, sum[u]);
    Store(g.product + c + u * kLanes, scale[u] * product[u]);
  }
}

// Calls body(vectors, first column) for groups of 4, 2 and 1 vectors of columns; `vectors` is an
// integral constant.
template <int kVectors>
struct VectorCount {
  static constexpr int value = kVectors;
};
template <class Body>
void ForEachColumnGroup(int64_t columns, Body body) {
  int64_t c = 0;
  for (; c + 4 * kLanes <= columns; c += 4 * kLanes) body(VectorCount<4>(), c);
  for (; c + 2 * kLanes <= columns; c += 2 * kLanes) body(VectorCount<2>(), c);
  for (; c < columns; c += kLanes) body(VectorCount<1>(), c);
}

// Calls body(feature) with the feature as an integral constant.
template <Feature kFeature>
struct FeatureConstant {
  static constexpr Feature value = kFeature;
};
template <class Body>
void WithFeature(Feature feature, Body body) {
  switch (feature) {
    case Feature::kExp:
      return body(FeatureConstant<Feature::kExp>());
    case Feature::kExpPair:
      return body(FeatureConstant<Feature::kExpPair>());
    case Feature::kRelu:
      return body(FeatureConstant<Feature::kRelu>());
    case Feature::kSinCos:
      return body(FeatureConstant<Feature::kSinCos>());
  }
}

void Features(Feature feature, const FeatureColumns& tokens, const FeatureSums& sums) {
  WithFeature(feature, [&](auto kind) {
    ForEachColumnGroup(tokens.columns, [&](auto vectors, int64_t c) {
      FeatureVectors<kind.value, vectors.value>(tokens.values, tokens.stride, tokens.projections, c,
                                                sums);
    });
  });
}

void FeatureGradientsOf(Feature feature, const FeatureColumns& tokens,
                        const FeatureGradients& gradients) {
  WithFeature(feature, [&](auto kind) {
    ForEachColumnGroup(tokens.columns, [&](auto vectors, int64_t c) {
      FeatureGradientVectors<kind.value, vectors.value>(tokens, c, gradients);
    });
  });
}

void PairWeightRows(const ScoreRows& rows, const PairWeights& w) {
  Ints lane = {};
  for (int i = 0; i < kLanes; ++i) lane[i] = i;
  for (int64_t r = 0; r < rows.rows; ++r) {
    float* row = rows.scores + r * rows.stride;
    Floats sum = {};
    for (int64_t c = 0; c < rows.columns; c += kLanes) {
      const Floats decay = Exp(Load(w.decay + c) - w.shift[r]);
      const Floats weight = decay * (w.product[r] * Load(row + c) + w.key[r] * Load(w.total + c)) +
                            w.constant[r] * Load(w.seen + c);
      const Floats kept = lane < w.visible[r] - static_cast<int32_t>(c) ? weight : Floats{};
      Store(row + c, kept);
      sum += kept;
    }
    w.sum[r] = HorizontalSum(sum);
  }
}

// Takes rows four at a time; where their number is not a multiple of four, the last rows are
// computed again.
void MatrixVector(int64_t rows, int64_t columns, const float* a, int64_t a_row, const float* x,
                  float* y, int64_t y_stride, bool accumulate) {
  const int64_t whole = columns / kLanes * kLanes;
  for (int64_t r = 0; r < rows; r += 4) {
    const int64_t count = rows - r < 4 ? rows - r : 4;
    const float* row[4];
    for (int i = 0; i < 4; ++i) row[i] = a + (r + (i < count ? i : 0)) * a_row;
    Floats sum[4] = {};
    for (int64_t c = 0; c < whole; c += kLanes) {
      const Floats value = Load(x + c);
      for (int i = 0; i < 4; ++i) sum[i] += Load(row[i] + c) * value;
    }
    float total[4];
    HorizontalSums(sum, total);
    for (int64_t i = 0; i < count; ++i) {
      for (int64_t c = whole; c < columns; ++c) total[i] += row[i][c] * x[c];
      float& to = y[(r + i) * y_stride];
      to = accumulate ? to + total[i] : total[i];
    }
  }
}

inline const float* RowOf(const IndexedRows& rows, int64_t n) {
  return rows.rows + (rows.index == nullptr ? n : rows.index[n]) * rows.stride;
}

// Indexed rows lie anywhere in memory, and the hardware prefetcher cannot predict which is next.
inline void PrefetchRow(const IndexedRows& rows, int64_t n) {
  const float* row = RowOf(rows, n);
  for (int64_t c = 0; c < rows.columns; c += 16) __builtin_prefetch(row + c);
}

// Like MatrixVector, and also computes each row's product with itself where kSquares.
template <bool kSquares>
void DotsOf(const IndexedRows& rows, const float* x, float* dots, float* squares) {
  const int64_t whole = rows.columns / kLanes * kLanes;
  for (int64_t n = 0; n < rows.count; n += 4) {
    const int64_t count = rows.count - n < 4 ? rows.count - n : 4;
    const float* row[4];
    for (int i = 0; i < 4; ++i) row[i] = RowOf(rows, n + (i < count ? i : 0));
    if (rows.index != nullptr) {
      for (int64_t ahead = n + 4; ahead < n + 8 && ahead < rows.count; ++ahead) {
        PrefetchRow(rows, ahead);
      }
    }
    Floats dot[4], square[4];
    for (int i = 0; i < 4; ++i) {  // row by row, so that memory is read in order
      Floats d = {}, s = {};
      for (int64_t c = 0; c < whole; c += kLanes) {
        const Floats y = Load(row[i] + c);
        d += y * Load(x + c);
        if (kSquares) s += y * y;
      }
      dot[i] = d;
      square[i] = s;
    }
    float of_dots[4], of_squares[4] = {};
    HorizontalSums(dot, of_dots);
    if (kSquares) HorizontalSums(square, of_squares);
    for (int64_t i = 0; i < count; ++i) {
      for (int64_t c = whole; c < rows.columns; ++c) of_dots[i] += row[i][c] * x[c];
      dots[n + i] = of_dots[i];
      if (!kSquares) continue;
      // Apart from the products, which are then rounded as they are without squares.
      for (int64_t c = whole; c < rows.columns; ++c) of_squares[i] += row[i][c] * row[i][c];
      squares[n + i] = of_squares[i];
    }
  }
}

void Dots(const IndexedRows& rows, const float* x, float* dots, float* squares) {
  if (squares == nullptr) return DotsOf<false>(rows, x, dots, squares);
  DotsOf<true>(rows, x, dots, squares);
}

int64_t Reaching(const ScoreRows& rows, const float* offset, const float* bound, int32_t* places) {
  int64_t count = 0;
  for (int64_t r = 0; r < rows.rows; ++r) {
    const float* row = rows.scores + r * rows.stride;
    for (int64_t first = 0; first < rows.columns; first += 64) {
      const int64_t columns = rows.columns - first < 64 ? rows.columns - first : 64;
      uint64_t reached = 0;
      for (int64_t c = 0; c < columns; c += kLanes) {
        reached |= BitsOf(Load(row + first + c) - offset[r] >= Load(bound + first + c)) << c;
      }
      for (; reached != 0; reached &= reached - 1) {
        places[count++] = static_cast<int32_t>(r * rows.stride + first + __builtin_ctzll(reached));
      }
    }
  }
  return count;
}

void GroupMaxima(const ScoreRows& rows, const float* offset, int64_t group, float* maxima) {
  for (int64_t first = 0; first < rows.rows; first += group, maxima += rows.stride) {
    const int64_t end = first + group < rows.rows ? first + group : rows.rows;
    for (int64_t c = 0; c < rows.columns; c += kLanes) {
      Floats largest = Floats{} - __builtin_inff();
      for (int64_t r = first; r < end; ++r) {
        largest = Max(Load(rows.scores + r * rows.stride + c) - offset[r], largest);
      }
      Store(maxima + c, largest);
    }
  }
}

void BestOfFour(const ScoreRows& rows, const float* offset, float* best, float* second) {
  for (int64_t c = 0; c < rows.columns; c += kLanes) {
    Floats rest = Floats{} - __builtin_inff();
    for (int64_t first = 0; first < rows.rows; first += 4) {
      const int64_t end = first + 4 < rows.rows ? first + 4 : rows.rows;
      Floats largest = Floats{} - __builtin_inff();
      for (int64_t r = first; r < end; ++r) {
        const Floats score = Load(rows.scores + r * rows.stride + c) - offset[r];
        const Floats tagged = (Floats)(((Ints)score & ~3) | static_cast<int32_t>(r - first));
        rest = Max(Min(largest, tagged), rest);
        largest = Max(tagged, largest);
      }
      Store(best + first / 4 * rows.stride + c, largest);
    }
    Store(second + c, rest);
  }
}

void ColumnBounds(const ScoreRows& rows, int64_t wanted, float* bound) {
  constexpr int kHalvings = 14;  // halvings of the range of a column
  constexpr float kLargest = 0x1p126f;
  for (int64_t c = 0; c < rows.columns; c += kLanes) {
    const float* column = rows.scores + c;
    Floats low = Floats{} + kLargest, high = -low;
    for (int64_t r = 0; r < rows.rows; ++r) {
      const Floats value = Load(column + r * rows.stride);
      low = Min(value, low);
      high = Max(value, high);
    }
    low = Max(low, Floats{} - kLargest);
    Floats reached = Floats{} - __builtin_inff();
    for (int n = 0; n < kHalvings; ++n) {
      const Floats middle = 0.5f * (low + high);
      Ints count = {};
      for (int64_t r = 0; r < rows.rows; ++r) count -= Load(column + r * rows.stride) >= middle;
      const Ints enough = count >= static_cast<int32_t>(wanted);
      reached = enough ? middle : reached;
      low = enough ? middle : low;
      high = enough ? high : middle;
    }
    Store(bound + c, reached);
  }
}

// Keeps sixteen sums in float64; a vector of doubles has half as many lanes as one of floats.
constexpr int kHalfLanes = kLanes / 2;
constexpr int kSums = 16;
constexpr int kSumVectors = kSums / kHalfLanes;
typedef float HalfFloats __attribute__((vector_size(kHalfLanes * 4), aligned(4), may_alias));
typedef double Doubles __attribute__((vector_size(kLanes * 4), may_alias));

inline double PairwiseSum(Doubles (&sum)[kSumVectors]) {
  for (int width = kSumVectors / 2; width > 0; width /= 2) {
    for (int v = 0; v < width; ++v) sum[v] += sum[v + width];
  }
  double part[kHalfLanes];
  __builtin_memcpy(part, &sum[0], sizeof(part));
  for (int width = kHalfLanes / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) part[i] += part[i + width];
  }
  return part[0];
}

// Adds sixteen columns of a row to the sums.
template <bool kDistance>
inline void AddColumns(const float* x, const float* y, Doubles (&sum)[kSumVectors]) {
#pragma GCC unroll 8
  for (int v = 0; v < kSumVectors; ++v) {
    const HalfFloats from = *reinterpret_cast<const HalfFloats*>(y + v * kHalfLanes);
    const HalfFloats to = *reinterpret_cast<const HalfFloats*>(x + v * kHalfLanes);
    if (kDistance) {
      const Doubles difference = __builtin_convertvector(to - from, Doubles);
      sum[v] += difference * difference;
    } else {
      sum[v] += __builtin_convertvector(to, Doubles) * __builtin_convertvector(from, Doubles);
    }
  }
}

template <bool kDistance>
void ExactScoresOf(const IndexedRows& rows, const float* x, double* scores) {
  constexpr int64_t kAhead = 4;
  const int64_t whole = rows.columns / kSums * kSums;
  float x_tail[kSums] = {}, y_tail[kSums] = {};
  for (int64_t c = whole; c < rows.columns; ++c) x_tail[c - whole] = x[c];
  for (int64_t n = 0; n < rows.count; ++n) {
    const float* y = RowOf(rows, n);
    if (rows.index != nullptr && n + kAhead < rows.count) PrefetchRow(rows, n + kAhead);
    Doubles sum[kSumVectors] = {};
    for (int64_t c = 0; c < whole; c += kSums) AddColumns<kDistance>(x + c, y + c, sum);
    if (whole < rows.columns) {
      for (int64_t c = whole; c < rows.columns; ++c) y_tail[c - whole] = y[c];
      AddColumns<kDistance>(x_tail, y_tail, sum);
    }
    scores[n] = PairwiseSum(sum);
  }
}

void ExactScores(bool distance, const IndexedRows& rows, const float* x, double* scores) {
  (distance ? ExactScoresOf<true> : ExactScoresOf<false>)(rows, x, scores);
}

void RowDots(const ConstRows& a, const ConstRows& b, int64_t rows, int64_t columns, double* sums) {
  for (int64_t r = 0; r < rows; ++r) {
    Doubles sum[kSumVectors] = {};
    for (int64_t c = 0; c < columns; c += kSums) {
#pragma GCC unroll 8
      for (int v = 0; v < kSumVectors; ++v) {
        const int64_t at = c + v * kHalfLanes;
        const HalfFloats factor = *reinterpret_cast<const HalfFloats*>(b[r] + at);
        const HalfFloats value = *reinterpret_cast<const HalfFloats*>(a[r] + at);
        const HalfFloats counted = factor != 0.0f ? value : HalfFloats{};
        sum[v] +=
            __builtin_convertvector(counted, Doubles) * __builtin_convertvector(factor, Doubles);
      }
    }
    sums[r] = PairwiseSum(sum);
  }
}

double FmaPeak(int64_t iterations) {
  // 12 independent chains are more than latency (4 or 5) x throughput (2) needs. The compiler
  // cannot shorten a chain, since every step rounds.
  constexpr int kChains = 12;
  Floats chain[kChains];
  for (int i = 0; i < kChains; ++i) chain[i] = Broadcast(1.0f + 0.001f * static_cast<float>(i));
  const Floats factor = Broadcast(0.999f), term = Broadcast(0.001f);
  for (int64_t n = 0; n < iterations; ++n) {
#pragma GCC unroll 12
    for (int i = 0; i < kChains; ++i) chain[i] = chain[i] * factor + term;
  }
  Floats sum = {};
  for (const Floats& value : chain) sum += value;
  const float result = HorizontalSum(sum);
  asm volatile("" : : "m"(result));
  return 2.0 * kLanes * kChains * static_cast<double>(iterations);
}

}  // namespace

#define TFB_CONCAT_INNER(a, b) a##b
#define TFB_CONCAT(a, b) TFB_CONCAT_INNER(a, b)
#define TFB_STRING_INNER(a) #a
#define TFB_STRING(a) TFB_STRING_INNER(a)

extern const CpuKernels TFB_CONCAT(kCpuKernels_, TFB_KERNELS_NAME);
const CpuKernels TFB_CONCAT(kCpuKernels_, TFB_KERNELS_NAME) = {TFB_STRING(TFB_KERNELS_NAME),
                                                               kLanes,
                                                               Gemm,
                                                               GemmPlus,
                                                               GemmTriangle,
                                                               Softmax,
                                                               SoftmaxBackward,
                                                               AddDiagonals,
                                                               AddColumnSums,
                                                               AddSumsByLabel,
                                                               ReluMultiplyBackward,
                                                               Add,
                                                               AddByLabel,
                                                               ReluMultiply,
                                                               Mask,
                                                               HidePairs,
                                                               AdjustPairs,
                                                               SignedArgmax,
                                                               Reaching,
                                                               GroupMaxima,
                                                               BestOfFour,
                                                               ColumnBounds,
                                                               ScaleRows,
                                                               LoadScaled,
                                                               AllFinite,
                                                               RowDots,
                                                               Transpose64,
                                                               ExpRows,
                                                               Features,
                                                               FeatureGradientsOf,
                                                               SinCosOf,
                                                               PairWeightRows,
                                                               MatrixVector,
                                                               Dots,
                                                               ExactScores,
                                                               FmaPeak};

}  // namespace tfb
