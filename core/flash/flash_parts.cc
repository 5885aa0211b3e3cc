#include "core/flash/flash_parts.h"

#include <algorithm>

#include "core/status.h"
#include "core/workspace.h"

namespace tfb {
namespace {

// Slots of the parts but, on the CPU, the last: there it adds the others to its own as it ends.
int64_t SlotsOf(Device device, absl::Span<const Problem> parts) {
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

}  // namespace tfb
