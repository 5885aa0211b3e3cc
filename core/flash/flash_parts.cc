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

int64_t CudaSplits(const CudaRuntime& runtime, absl::Span<const Problem> parts) {
  int64_t splits = 0;
  for (const Problem& problem : parts) splits += FlashCuda::Splits(runtime, problem);
  return splits;
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
           workspace.Take<float>(CudaSplits(**runtime, parts) * FlashCuda::FloatsOfSplit(parts[0]));
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
  part.splits = 0;
  for (const FlashEngine& engine : engines_) part.splits += engine.cuda().Splits(engine.problem());
  Workspace workspace(execution.workspace);
  part.rows = workspace.Take<float>(part.splits * FlashCuda::FloatsOfSplit(engines_[0].problem()));
  Execution rest = execution;
  rest.workspace = workspace.Rest();
  for (size_t n = 0; n < calls.size(); ++n) {
    const FlashEngine& engine = engines_[n];
    part.is_last = n + 1 == calls.size();
    TFB_RETURN_IF_ERROR(engine.cuda().Run(engine.problem(), calls[n], part, rest));
    part.first_split += engine.cuda().Splits(engine.problem());
  }
  return absl::OkStatus();
}

}  // namespace tfb
