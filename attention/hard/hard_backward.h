// The gradients of hard attention on the CPU: the formulas are in hard.h.
#ifndef TFB_ATTENTION_HARD_HARD_BACKWARD_H_
#define TFB_ATTENTION_HARD_HARD_BACKWARD_H_

#include <cstddef>

#include "core/problem.h"
#include "core/technique.h"
#include "core/tensor.h"

namespace tfb::hard {

// The tensors of hard.h, each of any strides.
struct HardBackwardCall {
  ConstTensorView q, k, v;
  ConstTensorView key_mask;      // or empty
  ConstTensorView index;         // i32 [batch, query_heads, query_tokens], as chosen
  ConstTensorView baseline;      // or empty: 0
  ConstTensorView out_gradient;  // or empty: 0
  // The call writes these, of which each may be empty. Only sampling gives q and k gradients.
  TensorView q_gradient, k_gradient, v_gradient;
  float scale = 1;
};

// Returns the workspace: keys, packed and not, of as many heads as fit 32 MiB, at least of one;
// three floats a query; and for each thread the scores of 64 queries against 512 keys.
size_t HardBackwardCpuWorkspaceBytes(const Problem& problem, int threads);
// Writes the gradients. It allocates nothing. The result does not depend on the number of threads.
void HardBackwardCpu(const Problem& problem, const HardBackwardCall& call,
                     const Execution& execution);

}  // namespace tfb::hard

#endif  // TFB_ATTENTION_HARD_HARD_BACKWARD_H_
