// Shaw's own step on the CPU: the softmax over the bins of the clipped offsets (see shaw.h).
#ifndef TFB_POSITIONAL_SHAW_SHAW_CPU_H_
#define TFB_POSITIONAL_SHAW_SHAW_CPU_H_

#include <cstddef>
#include <cstdint>

#include "core/technique.h"
#include "core/tensor.h"
#include "positional/shaw/shaw_sizes.h"

namespace tfb::shaw {

// Engine flash's results for the keys that are not near: those before a query, and those behind it
// where there are far_parts 2.
struct FarKeys {
  const float* rows[2];         // o: [batch, query_heads, query_tokens, value_dim]
  const float* log_sum_exp[2];  // for the content alone, [batch, query_heads, query_tokens]
};

struct ShawCall {
  ConstTensorView q, k, v;
  ConstTensorView key_mask;  // or empty
  FarKeys far;
  const float* key_table;    // P^K [table_heads][bins][head_dim]
  const float* value_table;  // P^V [table_heads][bins][value_row], zero beyond value_dim; or null
  TensorView out;
  TensorView log_sum_exp;  // or empty
};

size_t ShawCpuWorkspaceBytes(const ShawSizes& sizes, int threads);
// Runs the step. It allocates nothing; the result does not depend on the number of threads.
void ShawCpu(const ShawSizes& sizes, const ShawCall& call, const Execution& execution);

// The gradients of the step's results, and those of what it reads, which are added to. With g =
// dL/dy, e = dL/dl, l the log-sum-exp, and for a query the bins b with their weights w_b,
//
//   D    = sum_b w_b g . (o_b + P^V_b) - e
//   ds_b = w_b (g . (o_b + P^V_b) - D)
//   do_b = w_b g,  dl_b = ds_b                              of far keys; of near ones o is v_j, and
//   dk_j = ds_b q / sqrt(head_dim),  dq = sum_b ds_b (P^K_b + [near] k_j) / sqrt(head_dim)
//   dP^K_b = sum over queries ds_b q / sqrt(head_dim),  dP^V_b = sum over queries w_b g
struct ShawGradients {
  ConstTensorView out;          // g
  ConstTensorView log_sum_exp;  // e, f32, or empty
  TensorView q, k, v;           // f32, or empty: not wanted
  float* far_rows[2];
  float* far_log_sum_exp[2];
  double* key_table;    // [table_heads][bins][head_dim]
  double* value_table;  // [table_heads][bins][value_dim], where there is a value table
};

size_t ShawCpuBackwardWorkspaceBytes(const ShawSizes& sizes, int threads);
// Adds the gradients of a call, whose `out` and `log_sum_exp` are not read. It allocates nothing,
// and the bits of the sums do not depend on the number of threads. A masked key has no gradient,
// and a query whose g and e are 0 gives none.
void ShawCpuBackward(const ShawSizes& sizes, const ShawCall& call, const ShawGradients& gradients,
                     const Execution& execution);

}  // namespace tfb::shaw

#endif  // TFB_POSITIONAL_SHAW_SHAW_CPU_H_
