// Calls of sums of many terms, on every device: see core/cuda/run_sums.h.
#ifndef TFB_CORE_CUDA_SUM_IN_RUNS_H_
#define TFB_CORE_CUDA_SUM_IN_RUNS_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "core/cuda/for_each.h"
#include "core/cuda/run_sums.h"
#include "core/cuda/runtime.h"
#include "core/problem.h"
#include "core/status.h"
#include "core/technique.h"
#include "core/workspace.h"

namespace tfb {

// Returns null where there is no more than one run.
template <class Terms>
typename Terms::Number* TakePartialSums(const SumShape& shape, Workspace& workspace) {
  const int64_t sums = shape.rows * shape.columns * Terms::kSums;
  const int64_t runs = MostRuns(sums, shape.terms);
  return runs <= 1 ? nullptr : workspace.Take<typename Terms::Number>(sums * runs);
}

// Returns the workspace of SumInRuns, which does for fewer terms, too: 512 KiB at most.
template <class Terms>
size_t SumInRunsBytes(const SumShape& shape) {
  return Workspace::Measure(
      [&](Workspace& workspace) { TakePartialSums<Terms>(shape, workspace); });
}

// Makes the sums and takes them to where they belong: on the CPU in the execution's pool before it
// returns, on CUDA in kernels that it enqueues. It allocates nothing. Returns the errors of
// CudaRuntime::For and of the launches.
template <class Terms>
absl::Status SumInRuns(Device device, const SumShape& shape, const Terms& terms,
                       const Execution& execution) {
  Workspace workspace(execution.workspace);
  const int64_t sums = shape.rows * shape.columns * Terms::kSums;
  const TermRuns runs = RunsOf(sums, shape.terms);
  typename Terms::Number* const scratch = TakePartialSums<Terms>(shape, workspace);
  const PartialSums<Terms> partial = {terms, runs, shape.columns, scratch};
  const TotalSums<Terms> total = {terms, runs, shape.columns, scratch};
  const int64_t partial_rows = scratch == nullptr ? 0 : shape.rows * runs.count();
  if (device == Device::kCpu) {
    TFB_RETURN_IF_ERROR(ForEachInRows(device, partial_rows, shape.columns, partial, execution));
    return ForEachInRows(device, shape.rows, shape.columns, total, execution);
  }
  TFB_ASSIGN_OR_RETURN(CudaRuntime * runtime, CudaRuntime::For(device));
  const auto& kernels = KernelsOn<RunSumKernels<Terms>>(runtime->target());
  TFB_RETURN_IF_ERROR(
      ToStatus(kernels.partial(partial, partial_rows, shape.columns, execution.stream)));
  return ToStatus(kernels.total(total, shape.rows, shape.columns, execution.stream));
}

}  // namespace tfb

#endif  // TFB_CORE_CUDA_SUM_IN_RUNS_H_
