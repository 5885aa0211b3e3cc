// A layer that runs engine flash under a pattern and a score rule, on any device. Most attention
// techniques are such a layer, or derive from it to change queries, keys or the rule.
#ifndef TFB_CORE_FLASH_FLASH_LAYER_H_
#define TFB_CORE_FLASH_FLASH_LAYER_H_

#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "core/flash/flash.h"
#include "core/flash/flash_engine.h"
#include "core/schedule/block_schedule.h"
#include "core/schedule/pattern.h"
#include "core/technique.h"
#include "core/workspace.h"

namespace tfb {

class FlashLayer : public Layer {
 public:
  // `scale` 0 means 1 / sqrt(head_dim).
  FlashLayer(const Problem& problem, std::vector<TensorSpec> inputs,
             std::vector<TensorSpec> outputs, Device device, std::unique_ptr<Pattern> pattern,
             double scale = 0);

  size_t workspace_bytes(int threads) const override;
  // Counts the pairs of the schedule, which Setup builds; the cost is absent before Setup.
  Cost cost() const override;

 protected:
  // Makes the rule from the parameters, and the pattern where it depends on them too; Setup calls
  // it before it builds the schedule. The tables that the rule points to must live as long as the
  // layer.
  virtual absl::Status BuildRule(const Inputs&, const Execution&, ScoreRule*) {
    return absl::OkStatus();
  }
  void set_pattern(std::unique_ptr<Pattern> pattern) { pattern_ = std::move(pattern); }

  // Changes the call before it runs; for example, it replaces queries and keys by its own, in
  // PrepareBytes of memory from the workspace.
  virtual absl::Status Prepare(const Inputs&, const Execution&, Workspace*, FlashCall*) {
    return absl::OkStatus();
  }
  virtual size_t PrepareBytes(int) const { return 0; }  // bytes for so many threads

  // Returns the FLOPs of one kept query-key pair: two products and the rule's additions.
  virtual double FlopsPerPair() const {
    return 2.0 * static_cast<double>(problem().head_dim + problem().value_dim);
  }

  absl::Status DoSetup(const Inputs& inputs, const Execution& execution) override;
  absl::Status DoRun(const Inputs& inputs, const Outputs& outputs,
                     const Execution& execution) override;

  // A constructor calls this where its rule will have relative keys: they need workspace.
  void set_uses_relative_keys() { uses_relative_keys_ = true; }

  Device device() const { return device_; }
  const BlockSchedule& schedule() const { return engine_.schedule(); }

 private:
  Device device_;
  std::unique_ptr<Pattern> pattern_;
  double scale_;
  ScoreRule rule_;
  bool uses_relative_keys_ = false;
  bool is_set_up_ = false;
  FlashEngine engine_;
};

}  // namespace tfb

#endif  // TFB_CORE_FLASH_FLASH_LAYER_H_
