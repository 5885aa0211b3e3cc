#include "core/flash/flash_parts.h"

#include <algorithm>
#include <utility>

#include "core/status.h"
#include "core/workspace.h"

namespace tfb {
namespace {

// Slots that the parts need: none for one alone; on the CPU none for the last, which adds the
// others to its own as it ends.
int64_t SlotsOf(Device device, absl::Span<const Problem> parts) {
  if (parts.size() == 1) return 0;
  if (device == Device::kCpu) return static_cast<int64_t>(parts.size()) - 1;
  int64_t slots = 0;
  for (const Problem& problem : parts) slots += FlashEngine::PartSlots(device, problem);
  return slots;
}

}  // namespace

size_t FlashPartsWorkspaceBytes(Device device, absl::Span<const Problem> parts, bool relative_keys,
                                int threads) {
  size_t call = 0;
  for (const Problem& problem : parts) {
    call = std::max(call, FlashEngine::WorkspaceBytes(device, problem, relative_keys, threads));
  }
  return call + Workspace::Measure([&](Workspace& workspace) {
           workspace.Take<float>(SlotsOf(device, parts) * SoftmaxPartFloats(parts[0]));
         });
}

absl::Status RunFlashParts(Device device, absl::Span<FlashPart> parts, const Execution& execution) {
  if (parts.size() == 1) return parts[0].engine->Run(parts[0].call, execution);
  int64_t slots = 0;
  for (const FlashPart& part : parts) {
    slots += FlashEngine::PartSlots(device, part.engine->problem());
  }
  const int64_t kept = device == Device::kCpu ? slots - 1 : slots;
  Workspace workspace(execution.workspace);
  float* rows = workspace.Take<float>(kept * SoftmaxPartFloats(parts[0].engine->problem()));
  Execution rest = execution;
  rest.workspace = workspace.Rest();
  int64_t slot = 0;
  for (FlashPart& part : parts) {
    part.call.part = {rows, slot, slots, &part == &parts.back()};
    TFB_RETURN_IF_ERROR(part.engine->Run(part.call, rest));
    slot += FlashEngine::PartSlots(device, part.engine->problem());
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
  return FlashPartsWorkspaceBytes(device_, problems_, /*relative_keys=*/false, threads);
}

Cost FlashPartsLayer::cost() const {
  Cost cost;
  const Problem& p = problem();
  if (!parts_.empty()) {
    double pairs = 0;
    for (const Part& part : parts_) pairs += part.engine.schedule().KeptPairs(p.query_heads);
    cost.flops = 2.0 * static_cast<double>(p.batch * (p.head_dim + p.value_dim)) * pairs;
  }
  cost.bytes = AttentionBytes(p);
  return cost;
}

absl::Status FlashPartsLayer::DoSetup(const Inputs&, const Execution&) {
  parts_.clear();
  const std::vector<FlashPartSpec> specs = DescribeParts();
  for (size_t n = 0; n < specs.size(); ++n) {
    Part part;
    TFB_ASSIGN_OR_RETURN(part.engine,
                         FlashEngine::Create(device_, problems_[n], *specs[n].pattern));
    TFB_ASSIGN_OR_RETURN(part.query_order,
                         DeviceArray<int32_t>::Create(device_, specs[n].query_order));
    TFB_ASSIGN_OR_RETURN(part.key_order, DeviceArray<int32_t>::Create(device_, specs[n].key_order));
    parts_.push_back(std::move(part));
  }
  calls_.resize(parts_.size());
  return absl::OkStatus();
}

absl::Status FlashPartsLayer::DoRun(const Inputs& inputs, const Outputs& outputs,
                                    const Execution& execution) {
  const auto order_of = [](const DeviceArray<int32_t>& tokens, int64_t places, int64_t group) {
    if (tokens.size() == 0) return TokenOrder();
    return TokenOrder{tokens.data(), 0, tokens.size() > places ? places : 0, group};
  };
  for (size_t n = 0; n < parts_.size(); ++n) {
    const Part& part = parts_[n];
    FlashCall call = part.engine.NewCall();
    call.q = inputs.Get("q");
    call.k = inputs.Get("k");
    call.v = inputs.Get("v");
    call.key_mask = inputs.Get("key_mask");
    call.out = outputs.Get("out");
    call.log_sum_exp = outputs.Get("log_sum_exp");
    call.query_order = order_of(part.query_order, problems_[n].query_tokens, problem().group());
    call.key_order = order_of(part.key_order, problems_[n].kv_tokens, 1);
    calls_[n] = {&part.engine, call};
  }
  return RunFlashParts(device_, absl::MakeSpan(calls_), execution);
}

}  // namespace tfb
