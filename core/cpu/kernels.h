// The innermost loops of the CPU engines, compiled once per instruction set and chosen at run time.
//
// All matrices are float, row-major; strides are in elements. Column counts are multiples of
// kColumnQuantum and the rows of B and C hold that many elements, so that no kernel has a column
// tail: callers pad.
#ifndef TFB_CORE_CPU_KERNELS_H_
#define TFB_CORE_CPU_KERNELS_H_

#include <cstdint>

namespace tfb {

constexpr int64_t kColumnQuantum = 16;  // the widest vector, in floats

// A row-major matrix of `rows` x `columns` scores, changed in place.
struct ScoreRows {
  float* scores;
  int64_t stride;
  int64_t rows;
  int64_t columns;
};

// exp of each score against its row's running maximum, as flash attention needs it: for each row r
//   new_max = max(max[r], max_c scores[r][c]);   rescale[r] = exp(max[r] - new_max)
//   scores[r][c] = exp(scores[r][c] - new_max);  sum[r] = sum[r] rescale[r] + sum_c scores[r][c];
//   max[r] = new_max
// exp(-inf) is exactly 0; while a row has seen no finite score, its maximum stays -inf and rescale
// is 1. NaN scores give NaN sums.
struct SoftmaxState {
  float* max;
  float* sum;
  float* rescale;
};

// One multiplicative weight per score, a ramp that falls to 0 with distance: clip((limit[r] + c) *
// slope, 0, 1) for column c. A weight of 0 hides its key as a mask does: neither its score nor a
// NaN in it counts.
struct Ramp {
  const float* limit;  // per row
  float slope;
};

// The random features of `columns` tokens from their projections. Column c of `values`
// [projections][stride] holds the projections p_r of token c, and then its features; what the
// exponents are relative to goes to `max`:
//   kExp      max = max_r p_r     values[r] = exp(p_r - max)
//   kExpPair  max = max_r |p_r|   values[r] = exp(p_r - max)
//                                 values[projections + r] = exp(-p_r - max)
//   kRelu     max = 0             values[r] = max(p_r, 0)
//   kSinCos   max = 0             values[r] = sin(p_r), values[projections + r] = cos(p_r)
// sum[c] is the sum of the token's features and dot[c] their product with `weights`, where that is
// not null. NaN projections give NaN features.
enum class Feature : uint8_t { kExp, kExpPair, kRelu, kSinCos };
struct FeatureColumns {
  float* values;
  int64_t stride;
  int64_t projections;
  int64_t columns;
};
struct FeatureSums {
  float* max;
  float* sum;
  const float* weights;  // one per feature
  float* dot;
};

// Turns products of query and key features into weights: row r sees its first visible[r] columns,
// with
//   scores[r][c] = exp(decay[c] - shift[r]) (product[r] scores[r][c] + key[r] total[c])
//                  + constant[r] seen[c]
// and 0 in the others, whatever stood there; sum[r] = sum_c scores[r][c].
struct PairWeights {
  const float* decay;  // per column
  const float* total;
  const float* seen;
  const float* shift;  // per row
  const float* product;
  const float* key;
  const float* constant;
  const int32_t* visible;
  float* sum;
};

// Pairs of tokens that rows and columns stand for. Codes are [slots][kPairColumns]: slot n has a pair
// where 0 <= row code - column code <= 1.
constexpr int64_t kPairColumns = 64;
struct TokenPairs {
  const int32_t* row_tokens;
  const int32_t* column_tokens;
  const int32_t* row_codes;
  const int32_t* column_codes;
  int64_t slots;
};

// Rows of floats to be held against one vector: rows index[0], index[1], ..., or 0, 1, ... where that
// is null.
struct IndexedRows {
  const float* rows;
  int64_t stride;
  const int32_t* index;
  int64_t count;
  int64_t columns;
};

struct CpuKernels {
  const char* name;  // "avx512", "avx2", "generic"
  int lanes;         // floats in a vector

  // C = A B, or C += A B where `accumulate`; A[i][k] is a[i * a_row + k * a_depth].
  void (*gemm)(int64_t rows, int64_t columns, int64_t depth, const float* a, int64_t a_row,
               int64_t a_depth, const float* b, int64_t b_row, float* c, int64_t c_row,
               bool accumulate);
  // C = A B + D, at the price of C = A B: D is added in registers. Its rows may overlap, as those of
  // a table of distances do (d_row = -1); 0 where d is null.
  void (*gemm_plus)(int64_t rows, int64_t columns, int64_t depth, const float* a, int64_t a_row,
                    int64_t a_depth, const float* b, int64_t b_row, const float* d, int64_t d_row,
                    float* c, int64_t c_row);

  // Softmax numerators in place (above). With a ramp the weights multiply the numerators and enter
  // the sum.
  void (*softmax)(const ScoreRows& rows, const SoftmaxState& state, const Ramp* ramp);

  // scores[r][c] += table[r * table_row + c].
  void (*add)(const ScoreRows& rows, const float* table, int64_t table_row);
  // scores[r][c] += terms[r][row_ids[r] == column_ids[c]].
  void (*add_by_label)(const ScoreRows& rows, const int32_t* row_ids, const int32_t* column_ids,
                       const float (*terms)[2]);
  // scores[r][c] = max(scores[r][c], 0) * table[r * table_row + c].
  void (*relu_multiply)(const ScoreRows& rows, const float* table, int64_t table_row);
  // scores[r][c] = -inf where bit first_bit + c of masks[r] is 0; first_bit + columns is 64 at most.
  void (*mask)(const ScoreRows& rows, const uint64_t* masks, int64_t first_bit);
  // Of 64 columns: clears bit c of masks[r] where the column's token is after the row's, if `causal`,
  // and where any slot does not have the pair.
  void (*hide_pairs)(int64_t rows, const TokenPairs& pairs, bool causal, uint64_t* masks);
  // scores[r][c] += self_bias where the tokens are the same; -= log of the number of slots that have
  // the pair, 1 at least.
  void (*adjust_pairs)(const ScoreRows& rows, const TokenPairs& pairs, float self_bias);
  // index[c] = the least n at which [v ; -v] is largest, with v_r = values[r * 64 + c], for 64 columns
  // c. NaN are smaller than all numbers.
  void (*signed_argmax)(int64_t rows, const float* values, int32_t* index);
  // The places r * stride + c, in their order, of scores with scores[r][c] - offset[r] >= bound[c].
  // Returns how many there are; `places` has room for all.
  int64_t (*reaching)(const ScoreRows& rows, const float* offset, const float* bound,
                      int32_t* places);
  // The largest scores[r][c] - offset[r] of each column and `group` consecutive rows, of which the
  // last may be fewer: maxima[n * stride + c] of group n. NaN are passed over.
  void (*group_maxima)(const ScoreRows& rows, const float* offset, int64_t group, float* maxima);
  // Of each column and four consecutive rows, of which the last may be fewer, the largest scores[r][c] -
  // offset[r], with r % 4 in the place of its two lowest bits: best[n * stride + c] of rows 4 n to
  // 4 n + 3. second[c] is the largest of those that are not the best of their four. NaN are passed
  // over; infinities may become NaN.
  void (*best_of_four)(const ScoreRows& rows, const float* offset, float* best, float* second);
  // bound[c]: what at least `wanted` numbers of column c reach, and if their differences allow, not
  // many more. -inf where there are not as many finite ones.
  void (*column_bounds)(const ScoreRows& rows, int64_t wanted, float* bound);
  // row[r][c] *= factor[r].
  void (*scale_rows)(const ScoreRows& rows, const float* factor);

  // to[c * 64 + r] = from[r * from_row + c] for 64 rows; columns is a multiple of 4.
  void (*transpose64)(const float* from, int64_t from_row, int64_t columns, float* to);

  // scores[r][c] = exp(scores[r][c] - shift[r]).
  void (*exp)(const ScoreRows& rows, const float* shift);

  void (*features)(Feature feature, const FeatureColumns& tokens, const FeatureSums& sums);
  // Of `count` numbers, any number of them; of finite ones to 2^-23, whatever their size. `sin` may be
  // `x`.
  void (*sin_cos)(int64_t count, const float* x, float* sin, float* cos);
  void (*pair_weights)(const ScoreRows& rows, const PairWeights& weights);
  // y[r * y_stride] = or += sum_c a[r * a_row + c] x[c]. Any number of columns.
  void (*matrix_vector)(int64_t rows, int64_t columns, const float* a, int64_t a_row,
                        const float* x, float* y, int64_t y_stride, bool accumulate);

  // Of each row y: dots[n] = sum_c x_c y_c and, unless it is null, squares[n] = sum_c y_c^2. Any
  // number of columns.
  void (*dots)(const IndexedRows& rows, const float* x, float* dots, float* squares);
  // In float64, for each row y, whatever the instruction set, bit for bit: scores[n] = sum_c x_c y_c,
  // or sum_c fl(x_c - y_c)^2 where `distance`, with fl rounding to float, so that products and
  // squares are exact. Column c is in sum c % 16; sum i + 8 is added to sum i, then i + 4, i + 2,
  // i + 1. Any number of columns.
  void (*exact_scores)(bool distance, const IndexedRows& rows, const float* x, double* scores);

  // Independent fused multiply-adds in registers, `iterations` times; returns the number of FLOPs
  // done. For measuring the peak.
  double (*fma_peak)(int64_t iterations);
};

// The best kernels that this machine runs, or null where `name` is not among them. The environment
// is not consulted.
const CpuKernels& BestCpuKernels();
const CpuKernels* FindCpuKernels(const char* name);

}  // namespace tfb

#endif  // TFB_CORE_CPU_KERNELS_H_
