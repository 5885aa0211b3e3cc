// Longformer's attention with global tokens that an input names, other ones in each sequence.
//
// The lists of a call's global tokens are made on the device, and the host does not know their
// lengths. Local rows are one softmax over two parts with disjoint keys: the window, whose keys
// that are global are hidden, and the list of global tokens. Global rows are a call over all keys,
// which writes over the local rows of these tokens.
#ifndef TFB_ATTENTION_LONGFORMER_MARKED_GLOBALS_H_
#define TFB_ATTENTION_LONGFORMER_MARKED_GLOBALS_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "attention/longformer/longformer_cuda.h"
#include "core/cuda/device_array.h"
#include "core/flash/flash_parts.h"
#include "core/flash/plan.h"
#include "core/layers/list_rows.h"
#include "core/schedule/pattern.h"
#include "core/technique.h"
#include "core/workspace.h"

namespace tfb::longformer {

class MarkedGlobalsLayer : public Layer {
 public:
  // `positions` are global in every sequence; of the tokens that the input global_mask marks
  // besides, the first `most_marked` are. `window` is the pattern of a sequence without global
  // tokens, over places of `order`. Global rows read q_global and so on where these are inputs.
  MarkedGlobalsLayer(const Problem& problem, std::vector<TensorSpec> inputs, Device device,
                     std::vector<int64_t> positions, int64_t most_marked, FunctionPattern window,
                     PlaceOrder order);

  size_t workspace_bytes(int threads) const override;
  Cost cost() const override;  // without FLOPs: they depend on the mask

 protected:
  absl::Status DoSetup(const Inputs& inputs, const Execution& execution) override;
  absl::Status DoRun(const Inputs& inputs, const Outputs& outputs,
                     const Execution& execution) override;

 private:
  struct Memory {
    GlobalLists lists;
    RowListMemory rows;  // on CUDA
  };
  Memory LayOut(Workspace& workspace) const;
  absl::Status FindGlobals(const Inputs& inputs, const GlobalLists& lists,
                           const Execution& execution) const;
  absl::Status RunLocalRows(const Inputs& inputs, const Outputs& outputs, const Memory& memory,
                            const Execution& execution);
  absl::Status RunGlobalRows(const Inputs& inputs, const Outputs& outputs, const Memory& memory,
                             const Execution& execution) const;

  Device device_;
  std::vector<int64_t> positions_;
  int64_t most_marked_;
  int64_t most_;  // global tokens of a sequence
  FunctionPattern window_;
  PlaceOrder order_;
  bool has_own_tensors_;
  std::vector<Problem> parts_;  // problems of the window and of the list
  Problem rows_problem_;        // problem of the global rows
  DeviceArray<uint8_t> is_position_;
  DeviceArray<int32_t> order_tokens_;
  FlashParts softmax_;
  std::vector<FlashCall> calls_;  // room for the calls of a Run
  FlashEngine rows_engine_;
};

}  // namespace tfb::longformer

#endif  // TFB_ATTENTION_LONGFORMER_MARKED_GLOBALS_H_
