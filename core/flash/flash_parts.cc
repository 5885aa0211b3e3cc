#include "core/flash/flash_parts.h"

#include <algorithm>
#include <utility>

#include "absl/container/inlined_vector.h"
#include "core/status.h"
#include "core/workspace.h"

namespace tfb {
namespace {

// Holds the calls of a softmax without allocating; 32 are as many as any technique has.
using PartCalls = absl::InlinedVector<FlashPartCall, 32>;

int64_t CudaSlots(const CudaRuntime& runtime, absl::Span<const Problem> parts) {
  int64_t slots = 0;
  for (const Problem& problem : parts) slots += FlashCuda::Slots(runtime, problem);
  return slots;
}

}  // namespace

size_t FlashParts::WorkspaceBytes(Device device, absl::Span<const Problem> parts,
                                  bool relative_keys, int threads) {
  if (device == Device::kCpu) return FlashWorkspaceBytesOfParts(parts, relative_keys, threads);
  const absl::StatusOr<CudaRuntime*> runtime = CudaRuntime::For(device);
  if (!runtime.ok()) return 0;  // Create returns the error
  size_t call = 0;
  for (const Problem& problem : parts) {
    call = std::max(call, FlashCuda::WorkspaceBytes(**runtime, problem));
  }
  if (parts.size() == 1) return call;
  return call + Workspace::Measure([&](Workspace& workspace) {
           workspace.Take<float>(CudaSlots(**runtime, parts) * FlashCuda::SlotFloats(parts[0]));
         });
}

absl::Status FlashParts::Run(absl::Span<const FlashCall> calls, const Execution& execution) const {
  if (calls.size() == 1) return engines_[0].Run(calls[0], execution);
  if (device_ != Device::kCpu) return RunOnCuda(calls, execution);
  PartCalls parts;
  for (size_t n = 0; n < calls.size(); ++n) parts.push_back({&engines_[n].problem(), &calls[n]});
  return FlashCpu(parts, execution);
}

absl::Status FlashParts::RunOnCuda(absl::Span<const FlashCall> calls,
                                   const Execution& execution) const {
  FlashCuda::SoftmaxPart part;
  part.slots = 0;
  for (const FlashEngine& engine : engines_) part.slots += engine.cuda().Slots(engine.problem());
  Workspace workspace(execution.workspace);
  part.rows = workspace.Take<float>(part.slots * FlashCuda::SlotFloats(engines_[0].problem()));
  Execution rest = execution;
  rest.workspace = workspace.Rest();
  for (size_t n = 0; n < calls.size(); ++n) {
    const FlashEngine& engine = engines_[n];
    part.is_last = n + 1 == calls.size();
    TFB_RETURN_IF_ERROR(engine.cuda().Run(engine.problem(), calls[n], part, rest));
    part.slot += engine.cuda().Slots(engine.problem());
  }
  return absl::OkStatus();
}

FlashPartsLayer::FlashPartsLayer(const Problem& problem, Device device, std::vector<Problem> parts)
    : Layer(problem, QkvInputs(problem), AttentionOutputs(problem)),
      device_(device),
      problems_(std::move(parts)) {
  for (Problem& part : problems_) part.causal = false;
}

size_t FlashPartsLayer::workspace_bytes(int threads) const {
  return FlashParts::WorkspaceBytes(device_, problems_, /*relative_keys=*/false, threads);
}

Cost FlashPartsLayer::cost() const {
  Cost cost;
  const Problem& p = problem();
  if (!calls_.empty()) {
    double pairs = 0;
    for (const FlashEngine& engine : parts_.engines()) {
      pairs += engine.schedule().KeptPairs(p.query_heads);
    }
    cost.flops = 2.0 * static_cast<double>(p.batch * (p.head_dim + p.value_dim)) * pairs;
  }
  cost.bytes = AttentionBytes(p);
  return cost;
}

absl::Status FlashPartsLayer::DoSetup(const Inputs&, const Execution&) {
  orders_.clear();
  std::vector<FlashEngine> engines;
  const std::vector<FlashPartSpec> specs = DescribeParts();
  for (size_t n = 0; n < specs.size(); ++n) {
    TFB_ASSIGN_OR_RETURN(FlashEngine engine,
                         FlashEngine::Create(device_, problems_[n], *specs[n].pattern));
    engines.push_back(std::move(engine));
    Orders orders;
    TFB_ASSIGN_OR_RETURN(orders.queries,
                         DeviceArray<int32_t>::Create(device_, specs[n].query_order));
    TFB_ASSIGN_OR_RETURN(orders.keys, DeviceArray<int32_t>::Create(device_, specs[n].key_order));
    orders_.push_back(std::move(orders));
  }
  parts_ = FlashParts(device_, std::move(engines));
  calls_.resize(specs.size());
  return absl::OkStatus();
}

absl::Status FlashPartsLayer::DoRun(const Inputs& inputs, const Outputs& outputs,
                                    const Execution& execution) {
  const auto order_of = [](const DeviceArray<int32_t>& tokens, int64_t places, int64_t group) {
    if (tokens.size() == 0) return TokenOrder();
    return TokenOrder{tokens.data(), 0, tokens.size() > places ? places : 0, group};
  };
  for (size_t n = 0; n < calls_.size(); ++n) {
    FlashCall& call = calls_[n];
    call = parts_.engines()[n].NewCall(inputs, outputs);
    call.query_order = order_of(orders_[n].queries, problems_[n].query_tokens, problem().group());
    call.key_order = order_of(orders_[n].keys, problems_[n].kv_tokens, 1);
  }
  return parts_.Run(calls_, execution);
}

}  // namespace tfb
