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

struct CpuKernels {
  const char* name;  // "avx512", "avx2", "generic"
  int lanes;         // floats in a vector

  // C = A B, or C += A B where `accumulate`; A[i][k] is a[i * a_row + k * a_depth].
  void (*gemm)(int64_t rows, int64_t columns, int64_t depth, const float* a, int64_t a_row,
               int64_t a_depth, const float* b, int64_t b_row, float* c, int64_t c_row,
               bool accumulate);

  // Softmax numerators in place (above). With a ramp the weights multiply the numerators and enter
  // the sum.
  void (*softmax)(const ScoreRows& rows, const SoftmaxState& state, const Ramp* ramp);

  // scores[r][c] += table[r * table_row + c].
  void (*add)(const ScoreRows& rows, const float* table, int64_t table_row);
  // scores[r][c] = max(scores[r][c], 0) * table[r * table_row + c].
  void (*relu_multiply)(const ScoreRows& rows, const float* table, int64_t table_row);
  // scores[r][c] = -inf where bit c of masks[r] is 0; columns is 64 at most.
  void (*mask)(const ScoreRows& rows, const uint64_t* masks);
  // row[r][c] *= factor[r].
  void (*scale_rows)(const ScoreRows& rows, const float* factor);

  // to[c * 64 + r] = from[r * from_row + c] for 64 rows; columns is a multiple of 4.
  void (*transpose64)(const float* from, int64_t from_row, int64_t columns, float* to);

  // scores[r][c] = exp(scores[r][c] - shift[r]).
  void (*exp)(const ScoreRows& rows, const float* shift);

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
