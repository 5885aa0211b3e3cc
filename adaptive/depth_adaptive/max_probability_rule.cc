#include "adaptive/depth_adaptive/max_probability_rule.h"

#include <algorithm>

#include "adaptive/depth_adaptive/max_probability_cuda.h"
#include "core/cuda/runtime.h"
#include "core/status.h"
#include "core/workspace.h"

namespace tfb::depth_adaptive {

size_t MaxProbabilityRule::workspace_bytes(int64_t rows, int threads) const {
  return Workspace::Measure([&](Workspace& workspace) { logits_.LayOut(rows, workspace); }) +
         logits_.workspace_bytes(rows, threads);
}

absl::Status MaxProbabilityRule::Decide(const layers::ExitRows& rows, uint8_t* leaves,
                                        const Execution& execution) {
  Workspace workspace(execution.workspace);
  const layers::ExitLogits::Scratch scratch = logits_.LayOut(rows.rows(), workspace);
  Execution rest = execution;
  rest.workspace = workspace.Rest();
  TFB_RETURN_IF_ERROR(logits_.Run(rows, scratch, rest));
  const float threshold = static_cast<float>(ConfidenceThreshold(options_, rows.layer));
  if (device_ != Device::kCpu) {
    TFB_ASSIGN_OR_RETURN(CudaRuntime * runtime, CudaRuntime::For(device_));
    return ToStatus(KernelsOn<MaxProbabilityKernels>(runtime->target())
                        .decide({scratch.logits, leaves, rows.rows(), options_.vocabulary,
                                 threshold, rows.list},
                                execution.stream));
  }
  constexpr int64_t kRowsOfTask = 16;
  rest.pool->ParallelForRanges(rows.rows(), kRowsOfTask, [&](int64_t first, int64_t end, int) {
    for (int64_t r = first; r < end; ++r) {
      const layers::SoftmaxTop top =
          layers::TopOf(options_.vocabulary, scratch.logits + r * logits_.row_floats());
      leaves[r] = 1 / top.sum >= threshold ? 1 : 0;  // false where the sum is NaN
    }
  });
  return absl::OkStatus();
}

}  // namespace tfb::depth_adaptive
