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
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "core/cuda/device_array.h"
#include "core/flash/flash_engine.h"
#include "core/schedule/pattern.h"
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

// A part as a technique describes it.
struct FlashPartSpec {
  std::unique_ptr<Pattern> pattern;  // pattern over the places of the orders, where there are any
  // The token of each place, in one order for all heads or one for each key-value head after the
  // other; empty for the tensors' own order.
  std::vector<int32_t> query_order;
  std::vector<int32_t> key_order;
};

// A layer that computes one softmax over parts. The parts' problems say how many places each has.
class FlashPartsLayer : public Layer {
 public:
  size_t workspace_bytes(int threads) const override;
  // Counts the pairs of the parts' schedules, which Setup builds; the cost is absent before Setup.
  Cost cost() const override;

 protected:
  // `parts` are the parts' problems, with the numbers of tokens of their orders. Causal masks are
  // the patterns' task.
  FlashPartsLayer(const Problem& problem, Device device, std::vector<Problem> parts);

  // Returns as many parts as there are problems; Setup calls it.
  virtual std::vector<FlashPartSpec> DescribeParts() = 0;

  absl::Status DoSetup(const Inputs& inputs, const Execution& execution) override;
  absl::Status DoRun(const Inputs& inputs, const Outputs& outputs,
                     const Execution& execution) override;

 private:
  struct Orders {
    DeviceArray<int32_t> queries;
    DeviceArray<int32_t> keys;
  };

  Device device_;
  std::vector<Problem> problems_;
  std::vector<Orders> orders_;
  FlashParts parts_;
  std::vector<FlashCall> calls_;  // room for the calls of a Run
};

}  // namespace tfb

#endif  // TFB_CORE_FLASH_FLASH_PARTS_H_
