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

// The rows of a matrix that is read.
struct ConstRows {
  const float* first;
  int64_t stride;  // from a row to the next
  const float* operator[](int64_t r) const { return first + r * stride; }
};

// The running state of flash attention's softmax: each score becomes exp of its difference to its
// row's running maximum. For each row r
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

// A multiplicative weight for each score, a ramp that falls to 0 with distance: clip((span[r] -
// (distance[r] - c) + length) / length, 0, 1) for column c. A weight of 0 hides its key as a mask
// does: neither its score nor a NaN in it counts. Distances are whole numbers below 2^24, so that
// weights between 0 and 1 keep the low bits of the span.
struct Ramp {
  const float* span;      // per row
  const float* distance;  // of column 0, per row
  float length;
};

// The rows of a softmax in its backward pass. With e = factor[r] exp(score - shift[r]), where shift is
// the row's log-sum-exp as it was rounded, factor corrects the rounding, and the ramp m, or m = 1
// without one,
//   p = m e,   the gradient of the score is p (g - delta[r])   with the gradient g of p,
//   span_gradient[r] += slope sum_{c: 0 < m < 1} e (g - delta[r])
// Hidden columns, those where bit first_bit + c of masks[r] is 0, and those where e is 0 have p = 0 and
// a gradient of 0, whatever g is. first_bit + columns is 64 at most where there are masks.
struct SoftmaxGradient {
  const float* shift;
  const float* factor;
  const float* delta;
  const uint64_t* masks;  // null: no column is hidden
  int64_t first_bit;
  const Ramp* ramp;      // null: m = 1
  float* span_gradient;  // with a ramp
};

// The random features of `columns` tokens from their projections. Column c of `values`
// [projections][stride] holds the projections p_r of token c, and is overwritten by its features;
// `max` receives the maximum that the exponents are relative to:
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

// What the gradients of a token's projections are made of. With f_r its features as `features` made
// them and d_r = gradients[r] + weights[r] factor + offset, column by column, the gradients of the
// projections p_r are, with the maximum of kExp and kExpPair held,
//   kExp      scale f_r d_r
//   kExpPair  scale (f_r d_r - f_(projections + r) d_(projections + r))
//   kRelu     scale d_r, and 0 where f_r is 0
//   kSinCos   scale (d_r f_(projections + r) - d_(projections + r) f_r)
// They overwrite f_r. sum[c] = sum_r d_r and product[c] = scale sum_r f_r d_r.
struct FeatureGradients {
  const float* gradients;  // [features][stride]
  const float* weights;    // one per feature
  const float* factor;     // per column
  const float* offset;
  const float* scale;
  float* sum;
  float* product;
};

// Turns products of query and key features into weights. Row r sees its first visible[r] columns,
// where
//   scores[r][c] = exp(decay[c] - shift[r]) (product[r] scores[r][c] + key[r] total[c])
//                  + constant[r] seen[c]
// and its other columns become 0, whatever they held; sum[r] = sum_c scores[r][c].
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

// Codes of the pairs of tokens that rows and columns stand for. Codes are [slots][kPairColumns]:
// slot n has a pair where 0 <= row code - column code <= 1.
constexpr int64_t kPairColumns = 64;
struct TokenPairs {
  const int32_t* row_tokens;
  const int32_t* column_tokens;
  const int32_t* row_codes;
  const int32_t* column_codes;
  int64_t slots;
};

// Rows of floats that are compared with one vector: rows index[0], index[1], ..., or rows 0, 1, ...
// where `index` is null.
struct IndexedRows {
  const float* rows;
  int64_t stride;
  const int32_t* index;
  int64_t count;
  int64_t columns;
};

// The zeros of a matrix B beside a diagonal: with `above`, B[k][c] is 0 where c > k + place; without,
// where c < k - place.
struct Zeros {
  bool above;
  int64_t place;
};

// Rows of memory that will be read or written soon, in the order in which they are named. A product
// asks for some of their cache lines between its blocks, while nothing else does: asked for at once, they
// would wait for the memory as their first reads do.
struct AheadRows {
  const char* first;
  int64_t stride;  // bytes from a row to the next
  int64_t bytes;   // of a row
  int64_t rows;
};
struct Ahead {
  AheadRows tensors[8];
  int64_t count;  // of tensors
  // The next line.
  int64_t tensor;
  int64_t row;
  int64_t byte;
};

struct CpuKernels {
  const char* name;  // "avx512", "avx2", "generic"
  int lanes;         // floats in a vector

  // C = A B, or C += A B where `accumulate`; A[i][k] is a[i * a_row + k * a_depth].
  void (*gemm)(int64_t rows, int64_t columns, int64_t depth, const float* a, int64_t a_row,
               int64_t a_depth, const float* b, int64_t b_row, float* c, int64_t c_row,
               bool accumulate);
  // C = A B + D, in the time of C = A B, since D is added in registers. The rows of D may overlap,
  // as those of a table of distances do (d_row = -1); D is 0 where d is null. Asks for what is `ahead`,
  // where that is not null.
  void (*gemm_plus)(int64_t rows, int64_t columns, int64_t depth, const float* a, int64_t a_row,
                    int64_t a_depth, const float* b, int64_t b_row, const float* d, int64_t d_row,
                    float* c, int64_t c_row, Ahead* ahead);
  // C += A B without the products with vectors of zeros; B and C are [..][64], and B is not read
  // where all of a vector is zeros.
  void (*gemm_triangle)(int64_t rows, int64_t depth, const float* a, int64_t a_row, int64_t a_depth,
                        const float* b, const Zeros& zeros, float* c);

  // Replaces scores by softmax numerators in place, as SoftmaxState says. With a ramp, the weights
  // multiply the numerators and enter the sum.
  void (*softmax)(const ScoreRows& rows, const SoftmaxState& state, const Ramp* ramp);

  // Replaces scores by p, and in `gradients` the gradients of p by those of the scores: see
  // SoftmaxGradient.
  void (*softmax_backward)(const ScoreRows& rows, float* gradients, int64_t gradient_row,
                           const SoftmaxGradient& softmax);
  // sums[rows - 1 + c - r] += scores[r][c].
  void (*add_diagonals)(const ScoreRows& rows, float* sums);
  // sums[c] += sum_r scores[r][c].
  void (*add_columns)(const ScoreRows& rows, float* sums);
  // sums[r][row_ids[r] == column_ids[c]] += scores[r][c].
  void (*add_sums_by_label)(const ScoreRows& rows, const int32_t* row_ids,
                            const int32_t* column_ids, float (*sums)[2]);
  // For relu_multiply, whose operands were `products` and the table: scores are the gradients of its
  // results and become those of the products; products[r][c] becomes the gradient of the factor,
  // score times relu(product). Both are 0 where the score is 0.
  void (*relu_multiply_backward)(const ScoreRows& rows, float* products, int64_t product_row,
                                 const float* table, int64_t table_row);

  // scores[r][c] += table[r * table_row + c].
  void (*add)(const ScoreRows& rows, const float* table, int64_t table_row);
  // scores[r][c] += terms[r][row_ids[r] == column_ids[c]].
  void (*add_by_label)(const ScoreRows& rows, const int32_t* row_ids, const int32_t* column_ids,
                       const float (*terms)[2]);
  // scores[r][c] = max(scores[r][c], 0) * table[r * table_row + c].
  void (*relu_multiply)(const ScoreRows& rows, const float* table, int64_t table_row);
  // scores[r][c] = -inf where bit first_bit + c of masks[r] is 0; first_bit + columns is 64 at most.
  void (*mask)(const ScoreRows& rows, const uint64_t* masks, int64_t first_bit);
  // For 64 columns: clears bit c of masks[r] where the column's token is after the row's, if
  // `causal`, and where any slot does not have the pair.
  void (*hide_pairs)(int64_t rows, const TokenPairs& pairs, bool causal, uint64_t* masks);
  // scores[r][c] += self_bias where the tokens are the same; otherwise subtracts the log of the
  // number of slots that have the pair, counted as 1 at least.
  void (*adjust_pairs)(const ScoreRows& rows, const TokenPairs& pairs, float self_bias);
  // index[c] = the least n at which [v ; -v] is largest, with v_r = values[r * 64 + c], for 64 columns
  // c. NaN are smaller than all numbers.
  void (*signed_argmax)(int64_t rows, const float* values, int32_t* index);
  // Writes to `places` the offsets r * stride + c, in ascending order, of the scores with
  // scores[r][c] - offset[r] >= bound[c]. Returns how many there are; `places` has room for all of
  // them.
  int64_t (*reaching)(const ScoreRows& rows, const float* offset, const float* bound,
                      int32_t* places);
  // Writes the largest scores[r][c] - offset[r] of each column over each group of `group`
  // consecutive rows, of which the last may be smaller: maxima[n * stride + c] is that of group n.
  // NaN are ignored.
  void (*group_maxima)(const ScoreRows& rows, const float* offset, int64_t group, float* maxima);
  // For each column and each four consecutive rows, of which the last may be fewer: writes the
  // largest scores[r][c] - offset[r], with r % 4 in its two lowest bits, to best[n * stride + c]
  // for rows 4 n to 4 n + 3. second[c] is the largest of the numbers that are not the best of their
  // four. NaN are ignored; infinities may become NaN.
  void (*best_of_four)(const ScoreRows& rows, const float* offset, float* best, float* second);
  // Sets bound[c] to a number that at least `wanted` numbers of column c reach and, where their
  // differences allow it, few more; to -inf where fewer than `wanted` are finite.
  void (*column_bounds)(const ScoreRows& rows, int64_t wanted, float* bound);
  // row[r][c] *= factor[r].
  void (*scale_rows)(const ScoreRows& rows, const float* factor);
  // to[r][c] = (from[r][c] + bias[c]) factor, where a null bias is 0. Returns whether all of them are
  // finite.
  bool (*load_scaled)(const ScoreRows& to, const ConstRows& from, const float* bias, float factor);

  // Tells whether all are finite.
  bool (*all_finite)(const ConstRows& matrix, int64_t rows, int64_t columns);
  // sums[r] = sum_c a[r][c] b[r][c] in float64, without the columns where b is 0, whatever a is there;
  // with the same bits in every instruction set.
  void (*row_dots)(const ConstRows& a, const ConstRows& b, int64_t rows, int64_t columns,
                   double* sums);

  // to[c * 64 + r] = from[r * from_row + c] for 64 rows; columns is a multiple of 4.
  void (*transpose64)(const float* from, int64_t from_row, int64_t columns, float* to);

  // scores[r][c] = exp(scores[r][c] - shift[r]).
  void (*exp)(const ScoreRows& rows, const float* shift);

  void (*features)(Feature feature, const FeatureColumns& tokens, const FeatureSums& sums);
  // Replaces features by the gradients of their projections.
  void (*feature_gradients)(Feature feature, const FeatureColumns& tokens,
                            const FeatureGradients& gradients);
  // Computes sin and cos of `count` numbers, which may be any number; the error for a finite x is
  // at most 2^-23, whatever its size. `sin` may be `x`.
  void (*sin_cos)(int64_t count, const float* x, float* sin, float* cos);
  void (*pair_weights)(const ScoreRows& rows, const PairWeights& weights);
  // y[r * y_stride] = or += sum_c a[r * a_row + c] x[c]. The number of columns is arbitrary.
  void (*matrix_vector)(int64_t rows, int64_t columns, const float* a, int64_t a_row,
                        const float* x, float* y, int64_t y_stride, bool accumulate);

  // For each row y: dots[n] = sum_c x_c y_c and, unless `squares` is null, squares[n] = sum_c
  // y_c^2. The number of columns is arbitrary.
  void (*dots)(const IndexedRows& rows, const float* x, float* dots, float* squares);
  // Computes in float64, with the same bits in every instruction set, for each row y: scores[n] =
  // sum_c x_c y_c, or sum_c fl(x_c - y_c)^2 where `distance`, with fl rounding to float, so that
  // products and squares are exact. Column c is added to sum c % 16; then sum i + 8 is added to sum
  // i, then i + 4, i + 2, i + 1. The number of columns is arbitrary.
  void (*exact_scores)(bool distance, const IndexedRows& rows, const float* x, double* scores);

  // Executes independent fused multiply-adds in registers, `iterations` times, to measure the
  // processor's peak; returns the number of FLOPs done.
  double (*fma_peak)(int64_t iterations);
};

// BestCpuKernels returns the best kernels that this machine runs; FindCpuKernels returns those of
// that name, or null where this machine does not run them. Neither reads the environment.
const CpuKernels& BestCpuKernels();
const CpuKernels* FindCpuKernels(const char* name);

}  // namespace tfb

#endif  // TFB_CORE_CPU_KERNELS_H_
