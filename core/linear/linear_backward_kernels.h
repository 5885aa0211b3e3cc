// The CUDA kernels of engine linear's backward pass as C++ sees them: plain data and launchers.
//
// linear_gradient.h has the formulas, linear_backward.cu how they are evaluated. Every pointer is to
// device memory.
#ifndef TFB_CORE_LINEAR_LINEAR_BACKWARD_KERNELS_H_
#define TFB_CORE_LINEAR_LINEAR_BACKWARD_KERNELS_H_

#include <stdint.h>

#include "core/cuda/device_view.h"
#include "core/cuda/kernel_table.h"
#include "core/linear/linear_kernels.h"

namespace tfb {

// Chunks of tokens whose parts of W's gradient one block sums.
constexpr int64_t kLinearPartChunks = 8;

// Numbers of the tokens of chunks, keys or queries: [chunks * 64] and, of matrices, a row a token.
struct LinearTokenRows {
  float* features;         // [features]: F or E
  float* gradients;        // [projections], of projections
  float* input_gradients;  // [head_dim]
  float* factor;           // of the tensor's row, which makes it x
  float* half_square;      // |x|^2 / 2
  float* maximum;          // that F or E are relative to: M
  float* total;            // the sum of the features
  float* product;          // sum_r of a feature times its gradient
  int32_t* maximum_row;    // the first feature that is the largest
};

struct LinearKeyNumbers {
  float* seen;       // 1 for a token, 0 for padding
  float* log_scale;  // rho_j; -inf for padding
  float* decay;      // G_j
  float* logit;      // u . k_j + b
  float* scale;      // exp(rho_j - R) in the sums of its chunk
  float* gate_gradient;
  // Where causal, R, S and the number of tokens over the keys up to this one.
  float* running_reference;
  float* running_maximum;
  float* running_tokens;
};

struct LinearQueryNumbers {
  float* active;  // 0 for a row without weight, which has no gradient
  float* valid;   // NaN for a row that is not finite, else 1
  float* query;   // factors of phi_ir = query F_ir + query_epsilon
  float* query_epsilon;
  float* key;               // b_i
  float* key_epsilon;       // b'_i
  float* constant;          // b'_i sum_r phi_ir
  float* reference;         // R_i
  float* carried;           // b_i exp(R - R_i) for the R of the sums that the row reads
  float* log_scale;         // what D_i is divided by, without the factors that all rows share
  float* extra;             // d'_i, and after the rows d'_i dZ_i
  float* denominator;       // D_i
  float* pair_sum;          // the sum of t_ij over the keys of the chunk
  float* offset;            // what dphi_ir is for all r
  float* gradient_sum;      // sum_r dphi_ir
  float* maximum_gradient;  // dS_i
  float* rows;              // dN_i and behind it dZ_i: [value_dim + 1]
  float* weights;           // where causal, of a chunk: a_ij, [64][64]
  float* pairs;             // where causal, of a chunk: b_i exp(rho_j - R_i) t_ij, [64][64]
};

// Numbers of the chunks of keys: [heads][key_chunks + 1]. Those before a chunk; the last are of all
// keys.
struct LinearKeyChunks {
  float* reference;  // R
  float* maximum;    // the largest M_j
  float* tokens;
  float* scale_reference;  // R in the sums of the chunk itself
  float* own_reference;    // of the chunk alone
  float* own_maximum;
  float* own_tokens;
  int64_t* own_maximum_key;  // the first with the maximum, or -1
  int64_t* maximum_key;      // [heads]: of the sequence
};

// Numbers of the chunks of queries: [heads][query_chunks + 1], number n + 1 after chunk n and number
// 0 of all queries.
struct LinearQueryChunks {
  float* reference;        // the least R_i
  float* scale_reference;  // the same in the sums of chunk n, at n
  float* own_reference;    // of chunk n alone, at n
};

// What goes through the chunks of a head from the last to the first, at n: sums over chunk n alone,
// and what comes from the chunks after it.
struct LinearChainNumbers {
  double* own_rows;  // sums of products of queries, and of keys
  double* own_columns;
  double* own_maximum;  // of maximum_gradient, since the last key that took it
  float* takes;         // 1 where a key of the chunk takes it
  double* rows;
  double* columns;
  double* maximum;
};

struct LinearBackwardArguments {
  LinearArguments forward;
  DeviceView out_gradient;          // null: 0
  DeviceView log_sum_exp_gradient;  // null: 0
  // Written where they are not null.
  DeviceView q_gradient;
  DeviceView k_gradient;
  DeviceView v_gradient;

  // Key-value heads of all batch rows are taken some at a time: `heads` from `first_head` on.
  int64_t first_head;
  int64_t heads;
  int64_t group;         // query heads of a key-value head
  int64_t key_chunks;    // at least 1
  int64_t query_chunks;  // at least 1; where causal, of the queries at the places of the keys
  int64_t features;
  int64_t columns;  // value_dim + 1: values, and 1 behind them
  int64_t sum;      // floats of sums: [features + 1][columns]
  int64_t parts;    // of W's gradient, of a head
  bool has_maximum_gradient;
  bool is_running_maximum;  // each key may be the maximum of some rows

  // Rows of keys are [heads][key_chunks][64], those of queries [heads][group][query_chunks][64].
  LinearTokenRows keys, queries;
  LinearKeyNumbers key;
  LinearQueryNumbers query;
  LinearKeyChunks key_chunk;
  LinearQueryChunks query_chunk;
  LinearChainNumbers chain;
  // sum_j exp(rho_j - R) E_jr (v_j, 1) over the keys before a chunk, and behind the features sum_j
  // (v_j, 1): [heads][key_chunks + 1][sum]. Kernels write those of chunk n at n.
  float* key_sums;
  // sum_i exp(R - R_i) b_i phi_ir (dN_i, dZ_i) over the queries after a chunk, and behind the
  // features sum_i b'_i sum_r phi_ir (dN_i, dZ_i): [heads][query_chunks + 1][sum], as
  // LinearQueryChunks.
  float* query_sums;
  float* w_parts;     // [heads][parts][projections][head_dim]
  float* gate_parts;  // [heads][key_chunks][head_dim + 1]
};

// Each launcher enqueues on the stream and returns null, or a text that says why it could not.
struct LinearBackwardKernels {
  using Launcher = const char* (*)(const LinearBackwardArguments& arguments, void* stream);
  Launcher features;         // features of keys and queries
  Launcher key_sums;         // sums over the keys of each chunk
  Launcher rows;             // D_i, dN_i, dZ_i and the pairs of each chunk
  Launcher query_sums;       // sums over the queries of each chunk
  Launcher query_gradients;  // gradients of the projections of queries
  Launcher key_gradients;    // those of keys, and of values
  Launcher inputs;           // gradients of queries and keys, and parts of the gates'
  Launcher matrix;           // parts of W's
};

}  // namespace tfb

#endif  // TFB_CORE_LINEAR_LINEAR_BACKWARD_KERNELS_H_
