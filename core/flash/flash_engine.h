// Engine flash for one problem, pattern and score rule, on any device: what techniques use.
#ifndef TFB_CORE_FLASH_FLASH_ENGINE_H_
#define TFB_CORE_FLASH_FLASH_ENGINE_H_

#include <cstddef>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/flash/flash.h"
#include "core/flash/flash_cuda.h"
#include "core/problem.h"
#include "core/schedule/block_schedule.h"
#include "core/schedule/pattern.h"
#include "core/technique.h"

namespace tfb {

class FlashEngine {
 public:
  FlashEngine() = default;
  // Builds the schedule, and takes it and the rule's tables to the device. On the CPU they are used
  // where they lie: what the rule points to must live as long as the engine.
  static absl::StatusOr<FlashEngine> Create(Device device, const Problem& problem,
                                            const Pattern& pattern, const ScoreRule& rule = {});

  // For a stream, whose calls differ in their tokens: at most those of `largest`. Each brings its
  // keys (see KeyValueCache), and a schedule on the CPU or a band on CUDA.
  static absl::StatusOr<FlashEngine> CreateForStream(Device device, const Problem& largest,
                                                     const ScoreRule& rule = {});

  // Of a call. On a device that is not there: 0, and Create tells.
  static size_t WorkspaceBytes(Device device, const Problem& problem, bool relative_keys,
                               int threads);
  // Of any call of a stream.
  static size_t StreamWorkspaceBytes(Device device, const Problem& largest, bool relative_keys,
                                     int threads);

  // A call with its rule and, but for streams, its schedule, to be completed by tensors.
  FlashCall NewCall() const;
  // With the tensors of attention by their usual names: q, k, v, key_mask, out and log_sum_exp.
  FlashCall NewCall(const Inputs& inputs, const Outputs& outputs) const;
  // Allocates nothing and, on a GPU, does not synchronise.
  absl::Status Run(const FlashCall& call, const Execution& execution) const {
    return Run(problem_, call, execution);
  }
  // A call of a stream, with its own numbers of tokens.
  absl::Status Run(const Problem& problem, const FlashCall& call, const Execution& execution) const;

  const Problem& problem() const { return problem_; }
  const FlashCuda& cuda() const { return cuda_; }
  const BlockSchedule& schedule() const { return schedule_; }

 private:
  Device device_ = Device::kCpu;
  Problem problem_;
  BlockSchedule schedule_;
  bool has_schedule_ = false;
  ScoreRule rule_;
  FlashCuda cuda_;  // on other devices than the CPU
};

}  // namespace tfb

#endif  // TFB_CORE_FLASH_FLASH_ENGINE_H_
