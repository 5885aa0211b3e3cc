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
#include "core/layers/list_rows.h"
#include "core/schedule/pattern.h"
#include "core/technique.h"
#include "core/workspace.h"

namespace tfb::longformer {

class MarkedGlobals {
 public:
  // `positions` are global in every sequence; of the tokens that the mask marks besides, the first
  // `most_marked` are.
  MarkedGlobals(Device device, const Problem& problem, std::vector<int64_t> positions,
                int64_t most_marked);

  size_t workspace_bytes(int threads) const;

  // Builds the engines. `window` is the pattern of a sequence without global tokens.
  absl::Status Setup(const Pattern& window);

  // Runs `local`, the call of the window, with the keys of the global tokens besides, and then
  // `global`, the call of the global rows. Both have the key mask; neither has the orders of the
  // global tokens.
  absl::Status Run(const ConstTensorView& global_mask, const FlashCall& local,
                   const FlashCall& global, const Execution& execution);

 private:
  struct Memory {
    GlobalLists lists;
    RowListMemory rows;  // on CUDA
  };
  Memory LayOut(Workspace& workspace) const;
  absl::Status FindGlobals(const FindGlobalsArguments& arguments, const Execution& execution) const;
  absl::Status RunGlobalRows(const Memory& memory, FlashCall call,
                             const Execution& execution) const;

  Device device_;
  Problem problem_;
  std::vector<int64_t> positions_;
  int64_t most_marked_;
  int64_t most_;                // global tokens of a sequence
  std::vector<Problem> parts_;  // problems of the window and of the list
  Problem rows_problem_;        // problem of the global rows
  DeviceArray<uint8_t> is_position_;
  FlashParts softmax_;
  std::vector<FlashCall> calls_;  // room for the calls of a Run
  FlashEngine rows_engine_;
};

}  // namespace tfb::longformer

#endif  // TFB_ATTENTION_LONGFORMER_MARKED_GLOBALS_H_
