// One softmax over keys that lie in several calls of engine flash.
//
// Where a query's keys are best reached in different ways - a window in the order of the tokens, a
// column of every l-th token in that of their residues, global tokens from a tensor of their own -
// each way is a call with its own schedule, token orders, key tensors and score rule. Part p
// computes
//
//   o_p = sum_j exp(s_ij - m_p) v_j,   l_p = sum_j exp(s_ij - m_p),   m_p = max_j s_ij
//
// for every query i over its own keys j, and with m = max_p m_p the whole is
//
//   y_i = sum_p exp(m_p - m) o_p / sum_p exp(m_p - m) l_p
//
// exactly. The parts' keys must be disjoint: a key in two parts counts twice.
#ifndef TFB_CORE_FLASH_FLASH_PARTS_H_
#define TFB_CORE_FLASH_FLASH_PARTS_H_

#include <cstddef>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "core/flash/flash_engine.h"
#include "core/technique.h"

namespace tfb {

class FlashParts {
 public:
  FlashParts() = default;
  // Takes one engine a part. Their problems may differ in kv_tokens only.
  FlashParts(Device device, std::vector<FlashEngine> engines)
      : device_(device), engines_(std::move(engines)) {}

  // Returns the scratch of a Run for parts of these problems: that of a call, and the parts'
  // results, which on the CPU are of a few heads at a time.
  static size_t WorkspaceBytes(Device device, absl::Span<const Problem> parts, bool relative_keys,
                               int threads);

  const std::vector<FlashEngine>& engines() const { return engines_; }
  // Runs one call a part, each made by its engine's NewCall. All write the same out and
  // log_sum_exp, and a query order names each of its tokens once. Run allocates nothing and, on a
  // GPU, does not synchronise.
  absl::Status Run(absl::Span<const FlashCall> calls, const Execution& execution) const;

 private:
  absl::Status RunOnCuda(absl::Span<const FlashCall> calls, const Execution& execution) const;

  Device device_ = Device::kCpu;
  std::vector<FlashEngine> engines_;
};

}  // namespace tfb

#endif  // TFB_CORE_FLASH_FLASH_PARTS_H_
