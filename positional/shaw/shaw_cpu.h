// Shaw's own step on the CPU: the softmax over the bins of the clipped offsets (see shaw.h).
#ifndef TFB_POSITIONAL_SHAW_SHAW_CPU_H_
#define TFB_POSITIONAL_SHAW_SHAW_CPU_H_

#include <cstddef>
#include <cstdint>

#include "core/technique.h"
#include "core/tensor.h"
#include "positional/shaw/shaw_sizes.h"

namespace tfb::shaw {

// Engine flash's results for the keys that are not near.
struct FarKeys {
  float* rows;         // o: [far_parts][batch, query_heads, query_tokens, value_dim]
  float* log_sum_exp;  // for the content alone, [far_parts][batch, query_heads, query_tokens]
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

}  // namespace tfb::shaw

#endif  // TFB_POSITIONAL_SHAW_SHAW_CPU_H_
