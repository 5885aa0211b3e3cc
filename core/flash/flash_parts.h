// One softmax over keys that lie in several calls of engine flash.
//
// Where a query's keys are best reached in different ways - a window in the order of the tokens, a
// column of every l-th token in that of their residues, global tokens from a tensor of their own -
// each way is a call with its own schedule, token orders, key tensors and score rule. Part p leaves
//
//   o_p = sum_j exp(s_ij - m_p) v_j,   l_p = sum_j exp(s_ij - m_p),   m_p = max_j s_ij
//
// of every query i over its own keys j, and with m = max_p m_p the whole is
//
//   y_i = sum_p exp(m_p - m) o_p / sum_p exp(m_p - m) l_p
//
// exactly. The parts' keys must be disjoint: a key of two parts counts twice.
#ifndef TFB_CORE_FLASH_FLASH_PARTS_H_
#define TFB_CORE_FLASH_FLASH_PARTS_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "core/cuda/device_array.h"
#include "core/flash/flash_engine.h"
#include "core/schedule/pattern.h"
#include "core/technique.h"

namespace tfb {

// A call of `engine`. All parts write the same out and log_sum_exp; a query order names each of its
// tokens once.
struct FlashPart {
  const FlashEngine* engine;
  FlashCall call;
};

// Scratch of RunFlashParts for parts of these problems: their results, [slots][batch][query_heads]
// [query_tokens][value_dim + 2] floats, and the most that one call needs.
size_t FlashPartsWorkspaceBytes(Device device, absl::Span<const Problem> parts, bool relative_keys,
                                int threads);

// Allocates nothing and, on a GPU, does not synchronise.
absl::Status RunFlashParts(Device device, absl::Span<FlashPart> parts, const Execution& execution);

// A part as a technique says it.
struct FlashPartSpec {
  std::unique_ptr<Pattern> pattern;  // over places of the orders, where there are any
  // Place -> token, one order for all heads or one for each key-value head after the other; empty:
  // the tensors' own order.
  std::vector<int32_t> query_order;
  std::vector<int32_t> key_order;
};

// A layer that is one softmax over parts. Their problems say how many places each has.
class FlashPartsLayer : public Layer {
 public:
  size_t workspace_bytes(int threads) const override;
  // Counts the pairs of the parts' schedules, which Setup builds: absent before it.
  Cost cost() const override;

 protected:
  // `parts`: of each, with the tokens of its orders. Their causal masks are their patterns' own.
  FlashPartsLayer(const Problem& problem, Device device, std::vector<Problem> parts);

  // Part of Setup: as many as there are problems.
  virtual std::vector<FlashPartSpec> DescribeParts() = 0;

  absl::Status DoSetup(const Inputs& inputs, const Execution& execution) override;
  absl::Status DoRun(const Inputs& inputs, const Outputs& outputs,
                     const Execution& execution) override;

 private:
  struct Part {
    FlashEngine engine;
    DeviceArray<int32_t> query_order;
    DeviceArray<int32_t> key_order;
  };

  Device device_;
  std::vector<Problem> problems_;
  std::vector<Part> parts_;
  std::vector<FlashPart> calls_;  // room for those of a Run
};

}  // namespace tfb

#endif  // TFB_CORE_FLASH_FLASH_PARTS_H_
