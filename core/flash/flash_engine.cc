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
  engine.has_schedule_ = true;
  engine.schedule_ =
      BuildSchedule(problem, pattern, on_cpu ? kFlashTile : FlashCudaQueries(problem.dtype));
  if (on_cpu) return engine;
  TFB_ASSIGN_OR_RETURN(CudaRuntime * runtime, CudaRuntime::For(device));
  TFB_ASSIGN_OR_RETURN(engine.cuda_, FlashCuda::Create(runtime, problem, &engine.schedule_, rule));
  engine.rule_.soft_span.span = nullptr;  // the device has a copy
  return engine;
}

absl::StatusOr<FlashEngine> FlashEngine::CreateForStream(Device device, const Problem& largest,
                                                         const ScoreRule& rule) {
  FlashEngine engine;
  engine.device_ = device;
  engine.problem_ = largest;
  engine.rule_ = rule;
  if (device == Device::kCpu) return engine;
  TFB_ASSIGN_OR_RETURN(CudaRuntime * runtime, CudaRuntime::For(device));
  TFB_ASSIGN_OR_RETURN(engine.cuda_, FlashCuda::Create(runtime, largest, nullptr, rule));
  engine.rule_.soft_span.span = nullptr;  // the device has a copy
  return engine;
}

size_t FlashEngine::WorkspaceBytes(Device device, const Problem& problem, bool relative_keys,
                                   int threads) {
  if (device == Device::kCpu) return FlashWorkspaceBytes(problem, relative_keys, threads);
  const absl::StatusOr<CudaRuntime*> runtime = CudaRuntime::For(device);
  return runtime.ok() ? FlashCuda::WorkspaceBytes(**runtime, problem) : 0;
}

size_t FlashEngine::StreamWorkspaceBytes(Device device, const Problem& largest, bool relative_keys,
                                         int threads) {
  return device == Device::kCpu ? FlashWorkspaceBytesPacked(largest, relative_keys, threads)
                                : WorkspaceBytes(device, largest, relative_keys, threads);
}

FlashCall FlashEngine::NewCall() const {
  FlashCall call;
  if (has_schedule_) call.schedule = &schedule_;
  call.rule = rule_;
  return call;
}

FlashCall FlashEngine::NewCall(const Inputs& inputs, const Outputs& outputs) const {
  FlashCall call = NewCall();
  call.q = inputs.Get("q");
  call.k = inputs.Get("k");
  call.v = inputs.Get("v");
  call.key_mask = inputs.Get("key_mask");
  call.out = outputs.Get("out");
  call.log_sum_exp = outputs.Get("log_sum_exp");
  return call;
}

absl::Status FlashEngine::Run(const Problem& problem, const FlashCall& call,
                              const Execution& execution) const {
  return device_ == Device::kCpu ? FlashCpu(problem, call, execution)
                                 : cuda_.Run(problem, call, execution);
}

}  // namespace tfb
