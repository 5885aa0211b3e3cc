// Passes over rows of hidden states that no engine has, on every device. Views are of the device's
// memory; all calls allocate nothing and on CUDA enqueue on the stream. The results do not depend
// on the number of threads.
#ifndef TFB_MEMORY_COMPRESSIVE_ROW_OPERATIONS_H_
#define TFB_MEMORY_COMPRESSIVE_ROW_OPERATIONS_H_

#include <cstdint>

#include "absl/status/status.h"
#include "core/problem.h"
#include "core/technique.h"
#include "core/tensor.h"

namespace tfb::compressive {

// Computes to [batch, blocks, channels] the mean or the maximum of each `rate` rows of `from`.
absl::Status PoolRows(Device device, bool max, int64_t rate, const TensorView& from,
                      const TensorView& to, const Execution& execution);

// A part of a softmax over the keys of two calls of engine flash: the outputs [batch, heads,
// tokens, head_dim] and log-sum-exps, f32 [batch, heads, tokens], contiguous. The merged result
// goes to `own`.
struct AttentionPart {
  TensorView out;
  TensorView log_sum_exp;
};
absl::Status MergeParts(Device device, const AttentionPart& own, const AttentionPart& other,
                        const Execution& execution);

// Computes use [batch, places] at (first + n) % places: the weight of key n, averaged over queries
// and heads,
//   1 / (heads tokens) sum_(h, i) exp(scale ((q_i + u) . k_n + (q_i + v) . r_d) - log_sum_exp_i)
// The sum is over the queries with d = first_distance + i - n >= 0; use is infinite where the sum
// is NaN, so that uses can be ordered. r is f32 [distances, heads, head_dim]; its last row stands
// for all farther ones.
struct ReceivedCall {
  TensorView q;  // [batch, heads, tokens, head_dim]
  TensorView k;  // [batch, heads, keys, head_dim]
  TensorView log_sum_exp;
  const float* distances = nullptr;        // r [distances, heads, head_dim]
  const float* distance_biases = nullptr;  // v . r [distances, heads]
  int64_t distance_rows = 0;
  const float* u = nullptr;  // [heads, head_dim]
  int64_t first_distance = 0;
  TensorView use;  // f32
  int64_t first = 0;
};
absl::Status ReceivedAttention(Device device, const ReceivedCall& call, const Execution& execution);

// Selects, from `rows` rows whose use is at places first, first + 1, ... of the ring, the `count`
// most used, ascending; among equal ones the earlier. `kept` i32 [batch, size], unless empty,
// receives them, then -1.
struct SelectRowsCall {
  TensorView use;
  int64_t first = 0;
  int64_t rows = 0;
  int64_t count = 0;
  int32_t* scratch = nullptr;   // [batch][rows]
  int32_t* selected = nullptr;  // [batch][count]
  TensorView kept;
};
absl::Status SelectRows(Device device, const SelectRowsCall& call, const Execution& execution);

// Computes to [batch] = || a - b ||, or with `mean_square` the mean of (a - b)^2, over all rows and
// channels of a [batch, rows, channels]; 0 where there are no rows. Row n of a is compared with row
// n / repeat of b.
absl::Status LossOfDifference(Device device, bool mean_square, const TensorView& a,
                              const TensorView& b, int64_t repeat, const TensorView& to,
                              const Execution& execution);

}  // namespace tfb::compressive

#endif  // TFB_MEMORY_COMPRESSIVE_ROW_OPERATIONS_H_
