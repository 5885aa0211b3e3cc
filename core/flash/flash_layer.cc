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
  return PrepareBytes(threads) +
         FlashEngine::WorkspaceBytes(device_, problem(), uses_relative_keys_, threads);
}

Cost FlashLayer::cost() const {
  Cost cost;
  if (is_set_up_) {
    cost.flops = static_cast<double>(problem().batch) *
                 schedule().KeptPairs(problem().query_heads) * FlopsPerPair();
  }
  cost.bytes = TensorBytes();
  return cost;
}

absl::Status FlashLayer::DoSetup(const Inputs& inputs, const Execution& execution) {
  TFB_RETURN_IF_ERROR(BuildRule(inputs, execution, &rule_));
  TFB_ASSIGN_OR_RETURN(engine_, FlashEngine::Create(device_, problem(), *pattern_, rule_));
  is_set_up_ = true;
  return absl::OkStatus();
}

absl::Status FlashLayer::DoRun(const Inputs& inputs, const Outputs& outputs,
                               const Execution& execution) {
  FlashCall call = engine_.NewCall(inputs, outputs);
  call.scale = scale_;
  Workspace workspace(execution.workspace);
  TFB_RETURN_IF_ERROR(Prepare(inputs, execution, &workspace, &call));
  Execution rest = execution;
  rest.workspace = workspace.Rest();
  return engine_.Run(call, rest);
}

}  // namespace tfb
