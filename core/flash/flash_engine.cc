#include "core/flash/flash_engine.h"

#include "core/status.h"

namespace tfb {

absl::StatusOr<FlashEngine> FlashEngine::Create(Device device, const Problem& problem,
                                                const Pattern& pattern, const ScoreRule& rule) {
  FlashEngine engine;
  engine.device_ = device;
  engine.problem_ = problem;
  engine.rule_ = rule;
  const bool on_cpu = device == Device::kCpu;
  engine.schedule_ =
      BuildSchedule(problem, pattern, on_cpu ? kFlashTile : FlashCudaQueries(problem.dtype));
  if (on_cpu) return engine;
  TFB_ASSIGN_OR_RETURN(CudaRuntime * runtime, CudaRuntime::For(device));
  TFB_ASSIGN_OR_RETURN(engine.cuda_, FlashCuda::Create(runtime, problem, &engine.schedule_, rule));
  engine.rule_.soft_span.span = nullptr;  // the device has a copy
  return engine;
}

size_t FlashEngine::WorkspaceBytes(Device device, const Problem& problem, bool relative_keys,
                                   int threads) {
  if (device == Device::kCpu) return FlashWorkspaceBytes(problem, relative_keys, threads);
  const absl::StatusOr<CudaRuntime*> runtime = CudaRuntime::For(device);
  return runtime.ok() ? FlashCuda::WorkspaceBytes(**runtime, problem) : 0;
}

FlashCall FlashEngine::NewCall() const {
  FlashCall call;
  call.schedule = &schedule_;
  call.rule = rule_;
  return call;
}

absl::Status FlashEngine::Run(const FlashCall& call, const Execution& execution) const {
  return device_ == Device::kCpu ? FlashCpu(problem_, call, execution)
                                 : cuda_.Run(problem_, call, execution);
}

}  // namespace tfb
