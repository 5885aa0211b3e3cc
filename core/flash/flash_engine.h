// Engine flash for one problem, pattern and score rule, on any device. PlannedLayer runs a plan by
// such engines; layers whose keys grow segment by segment have one of their own.
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
  // Builds the schedule and copies it and the rule's tables to the device. On the CPU the engine
  // reads the rule's tables in place, so they must live as long as the engine.
  static absl::StatusOr<FlashEngine> Create(Device device, const Problem& problem,
                                            const Pattern& pattern, const ScoreRule& rule = {});

  // Creates an engine for a stream, whose calls have at most the tokens of `largest`. Each call
  // brings its keys (see KeyValueCache), and a schedule on the CPU or a band on CUDA.
  static absl::StatusOr<FlashEngine> CreateForStream(Device device, const Problem& largest,
                                                     const ScoreRule& rule = {});

  // Returns the workspace of a call in bytes. Returns 0 on a device that is not present; Create
  // then says why.
  static size_t WorkspaceBytes(Device device, const Problem& problem, bool relative_keys,
                               int threads);
  // Returns the workspace of any call of a stream in bytes.
  static size_t StreamWorkspaceBytes(Device device, const Problem& largest, bool relative_keys,
                                     int threads);

  // Returns a call with its rule and, except for streams, its schedule; the caller adds the
  // tensors.
  FlashCall NewCall() const;
  // Returns a call with the tensors of attention by their usual names: q, k, v, key_mask, out and
  // log_sum_exp.
  FlashCall NewCall(const Inputs& inputs, const Outputs& outputs) const;
  // Runs a call. It allocates nothing and, on a GPU, does not synchronise.
  absl::Status Run(const FlashCall& call, const Execution& execution) const {
    return Run(problem_, call, execution);
  }
  // Runs a call of a stream, with its own numbers of tokens.
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
  FlashCuda cuda_;  // used on other devices than the CPU
};

}  // namespace tfb

#endif  // TFB_CORE_FLASH_FLASH_ENGINE_H_
