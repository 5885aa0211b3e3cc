// A stack of layers that reads its hidden states segment by segment, in a Run as in a stream.
#ifndef TFB_MEMORY_TRANSFORMER_XL_SEGMENTED_LAYER_H_
#define TFB_MEMORY_TRANSFORMER_XL_SEGMENTED_LAYER_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "core/layers/layer_norm.h"
#include "core/problem.h"
#include "core/technique.h"
#include "core/tensor.h"
#include "core/workspace.h"
#include "memory/transformer_xl/decoder_layer.h"

namespace tfb::transformer_xl {

// Returns the specs of out and the optional context: [batch, query_tokens, model_dim], the input of
// the last layer's feed-forward network.
std::vector<TensorSpec> SegmentedOutputs(const Problem& problem);

class SegmentedLayer : public StreamingLayer {
 public:
  size_t workspace_bytes(int threads) const override;
  // The segments decide the mask, unless a technique overrides this.
  int64_t split_tokens() const override { return max_segment_tokens(); }

 protected:
  // Reads `segment` tokens at a time, or all where there are fewer. A segment's outputs are out;
  // context where `outputs`, those of a Run, have one; and `more`, the other outputs in `outputs`.
  // Segments read x and `more_inputs`, and a Run reads the same inputs for all tokens.
  SegmentedLayer(const Problem& problem, std::vector<TensorSpec> outputs, int64_t layers,
                 int64_t segment, const std::vector<TensorSpec>& more = {},
                 const std::vector<TensorSpec>& more_inputs = {});

  // Set where the next segment's `more` is written, and its inputs other than x: the tokens of the
  // tensors from `begin` on.
  virtual void SetOutputs(const Outputs& /*outputs*/, int64_t /*begin*/) {}
  virtual void SetInputs(const Inputs& /*inputs*/, int64_t /*begin*/) {}
  // Begins the next segment, of so many tokens.
  virtual void BeginSegment(int64_t tokens) = 0;
  // Runs layer n on the segment. The call has a context in the last layer only.
  virtual absl::Status RunLayer(int64_t n, const DecoderLayer::Call& call,
                                const Execution& execution) = 0;
  // The norm of what the last layer writes; null where there is none.
  virtual const LayerNorm* final_norm() const { return nullptr; }
  // Covers that norm's workspace, too.
  virtual size_t layer_workspace_bytes(int threads) const = 0;

  // Leaves the stream at the end of the sequence, as appending the sequence would.
  absl::Status DoRun(const Inputs& inputs, const Outputs& outputs,
                     const Execution& execution) override;
  absl::Status DoAppend(int64_t tokens, const Inputs& segment, const Outputs& outputs,
                        const Execution& execution) override;

 private:
  TensorView LayOutState(int64_t tokens, Workspace& workspace) const;
  absl::Status AppendSegment(const ConstTensorView& x, const TensorView& out,
                             const TensorView& context, const Execution& execution);

  int64_t layers_;
};

}  // namespace tfb::transformer_xl

#endif  // TFB_MEMORY_TRANSFORMER_XL_SEGMENTED_LAYER_H_
