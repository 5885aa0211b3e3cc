// The backward pass of the tiny technique, with the faults of its gradients: the formulas stand in
// harness/testing/tiny_functors.h.
#ifndef TFB_HARNESS_TESTING_TINY_BACKWARD_H_
#define TFB_HARNESS_TESTING_TINY_BACKWARD_H_

#include <cstddef>

#include "absl/status/status.h"
#include "core/technique.h"
#include "harness/testing/tiny_functors.h"

namespace tfb {

size_t TinyBackwardWorkspaceBytes(const Problem& problem);

// Enqueues, or runs, the backward pass of `call`, whose fault, gains and mask are those of this
// pass. `log_sum_exp` [batch, query_heads, query_tokens] is what the run kept, `passes` how many the
// layer has done before.
absl::Status RunTinyBackward(Device device, const Problem& problem, TinyCall call,
                             const float* log_sum_exp, int passes, const BackwardCall& backward,
                             const Execution& execution);

}  // namespace tfb

#endif  // TFB_HARNESS_TESTING_TINY_BACKWARD_H_
