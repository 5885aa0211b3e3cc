#include "core/run_allocations.h"

#include "core/allocations.h"
#include "core/status.h"
#include "core/testing.h"

namespace tfb {

absl::StatusOr<int64_t> AllocationsOfRun(Layer& layer, const Inputs& inputs) {
  NamedTensors outputs = NanOutputs(layer.outputs());
  const Outputs written = MutableViewsOf(outputs);
  ThreadPool pool(2);
  Tensor workspace(DType::kU8, {static_cast<int64_t>(layer.workspace_bytes(2))});
  Execution execution;
  execution.pool = &pool;
  execution.workspace = absl::MakeSpan(static_cast<std::byte*>(workspace.raw()), workspace.bytes());
  TFB_RETURN_IF_ERROR(layer.Setup(inputs, execution));
  const int64_t before = AllocationCount();
  const absl::Status status = layer.Run(inputs, written, execution);
  const int64_t allocations = AllocationCount() - before;
  TFB_RETURN_IF_ERROR(status);
  return allocations;
}

}  // namespace tfb
