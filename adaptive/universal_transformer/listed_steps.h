// The steps of a Universal Transformer on CUDA. Only the device knows how many tokens go on, and
// the host does not wait for it: after each step a kernel lists their rows in device memory
// (core/cuda/row_list.h), and the next step's kernels, launched for all rows, return at once beyond
// the list. Keys and values are projected without the step's time, for the tokens that the previous
// step has changed, and kept; each step adds its time to all of them, as on the CPU. Every step is
// launched, even after all tokens have halted. With halted=recomputed nothing but padding is left
// out.
#ifndef TFB_ADAPTIVE_UNIVERSAL_TRANSFORMER_LISTED_STEPS_H_
#define TFB_ADAPTIVE_UNIVERSAL_TRANSFORMER_LISTED_STEPS_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "adaptive/universal_transformer/shared_block.h"
#include "adaptive/universal_transformer/universal_transformer_cuda.h"
#include "core/cuda/row_list.h"
#include "core/cuda/runtime.h"
#include "core/flash/flash_engine.h"
#include "core/layers/list_rows.h"
#include "core/workspace.h"

namespace tfb::universal_transformer {

class ListedSteps : public UniversalSteps {
 public:
  ListedSteps(Device device, const Problem& problem, const UniversalTransformerOptions& options)
      : device_(device), problem_(problem), options_(options), sizes_(problem, options) {}
  absl::Status Setup() override;
  size_t workspace_bytes(int threads) const override;
  absl::Status Run(const SharedBlock& block, const Call& call, const Execution& execution) override;

 private:
  struct Scratch {
    float* state;            // H [rows, width]
    float* output;           // [rows, width]; null where the output is the state
    TensorView placed;       // H and its position, of the tokens that have changed
    TensorView read;         // U, then S
    TensorView attended;     // A
    TensorView queries;      // [batch, tokens, query_width] in the problem's dtype
    TensorView base;         // [rows, keys_values] of `placed`, the latest of each token
    TensorView keys_values;  // [batch, tokens, keys_values] with the time of the step
    TensorView context;      // [batch, tokens, context_width]
    TensorView inner;        // [rows, inner]
    // Used with separable convolutions.
    float* shown;
    float* shown_inner;
    TensorView convolved;
    TensorView convolved_inner;
    float* total;   // [rows]
    float* weight;  // [rows]
    // Lists of the tokens that take a step, and of those that took the previous one.
    RowListMemory lists[2];
  };
  struct Walk {
    const SharedBlock& block;
    const Call& call;
    Scratch scratch;
    Execution execution;
    const UniversalTransformerKernels* kernels;
    int64_t step = 0;
    // The lists of the tokens that take this step, and of those that the previous one has changed.
    // They are all tokens where there is no halting or this is the first step.
    RowList active = {};
    RowList changed = {};
  };

  Scratch LayOut(Workspace& workspace) const;
  HaltingArguments Halting(const Walk& walk, UniversalTransformerOptions::HaltFrom from) const;
  absl::Status Begin(const Walk& walk) const;
  absl::Status Read(const Walk& walk) const;
  absl::Status Project(const Walk& walk) const;
  absl::Status Attend(const Walk& walk) const;
  absl::Status Transit(const Walk& walk) const;
  absl::Status Convolve(const Walk& walk, const TensorView& rows, float* shown,
                        const DeviceArray<float>& kernel, int64_t size, const TensorView& y) const;
  absl::Status Keep(const Walk& walk) const;
  // Lists the tokens that go on, for step `step`.
  absl::Status List(Walk& walk, int64_t step) const;
  // Keep the states of a step, and what is known behind the last one.
  absl::Status KeepForBackward(const Walk& walk) const;
  absl::Status FinishKept(const Walk& walk) const;
  absl::Status WriteOut(const Walk& walk) const;

  Device device_;
  Problem problem_;
  UniversalTransformerOptions options_;
  UniversalSizes sizes_;
  FlashEngine engine_;
};

}  // namespace tfb::universal_transformer

#endif  // TFB_ADAPTIVE_UNIVERSAL_TRANSFORMER_LISTED_STEPS_H_
