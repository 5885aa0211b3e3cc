#include "core/flash/flash_layer.h"

#include <utility>

namespace tfb {

FlashLayer::FlashLayer(const Problem& problem, std::vector<TensorSpec> inputs,
                       std::vector<TensorSpec> outputs, Device device,
                       std::unique_ptr<Pattern> pattern, double scale)
    : Layer(problem, std::move(inputs), std::move(outputs)),
      device_(device),
      pattern_(std::move(pattern)),
      scale_(scale) {}

size_t FlashLayer::workspace_bytes(int threads) const {
  if (device_ == Device::kCpu) {
    return PrepareBytes(threads) + FlashWorkspaceBytes(problem(), uses_relative_keys_, threads);
  }
  const absl::StatusOr<CudaRuntime*> runtime = CudaRuntime::For(device_);
  if (!runtime.ok()) return 0;  // Setup tells
  return PrepareBytes(threads) + FlashCuda::WorkspaceBytes(**runtime, problem());
}

Cost FlashLayer::cost() const {
  Cost cost;
  if (has_schedule_) {
    cost.flops = static_cast<double>(problem().batch) * schedule_.KeptPairs(problem().query_heads) *
                 FlopsPerPair();
  }
  cost.bytes = AttentionBytes(problem());
  return cost;
}

absl::Status FlashLayer::DoSetup(const Inputs& inputs, const Execution& execution) {
  TFB_RETURN_IF_ERROR(BuildRule(inputs, execution, &rule_));
  const bool on_cpu = device_ == Device::kCpu;
  schedule_ =
      BuildSchedule(problem(), *pattern_, on_cpu ? kFlashTile : FlashCudaQueries(problem().dtype));
  has_schedule_ = true;
  if (on_cpu) return absl::OkStatus();
  TFB_ASSIGN_OR_RETURN(CudaRuntime * runtime, CudaRuntime::For(device_));
  TFB_ASSIGN_OR_RETURN(cuda_, FlashCuda::Create(runtime, problem(), &schedule_, rule_));
  rule_.soft_span.span = nullptr;  // the device has a copy
  return absl::OkStatus();
}

absl::Status FlashLayer::DoRun(const Inputs& inputs, const Outputs& outputs,
                               const Execution& execution) {
  FlashCall call;
  call.q = inputs.Get("q");
  call.k = inputs.Get("k");
  call.v = inputs.Get("v");
  call.key_mask = inputs.Get("key_mask");
  call.out = outputs.Get("out");
  call.log_sum_exp = outputs.Get("log_sum_exp");
  call.schedule = &schedule_;
  call.rule = rule_;
  call.scale = scale_;
  Workspace workspace(execution.workspace);
  TFB_RETURN_IF_ERROR(Prepare(inputs, execution, &workspace, &call));
  Execution rest = execution;
  rest.workspace = workspace.Rest();
  return device_ == Device::kCpu ? FlashCpu(problem(), call, rest)
                                 : cuda_.Run(problem(), call, rest);
}

}  // namespace tfb
