// A stack of layers that reads its hidden states segment by segment, in a Run as in a stream.
#ifndef TFB_CORE_LAYERS_STACK_SEGMENTED_LAYER_H_
#define TFB_CORE_LAYERS_STACK_SEGMENTED_LAYER_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "core/layers/layer_norm.h"
#include "core/layers/stack/decoder_layer.h"
#include "core/problem.h"
#include "core/technique.h"
#include "core/tensor.h"
#include "core/workspace.h"

namespace tfb::layers {

// Returns the specs of out and the optional context: [batch, query_tokens, model_dim], the input of
// the last layer's feed-forward network.
std::vector<TensorSpec> SegmentedOutputs(const Problem& problem);

// The name of the tensor of what went into each layer for the last tokens before the first, as an
// input, or up to the last, as an optional output of a Run: [batch, layers, tokens, model_dim].
// A stream reads it with its first segment.
inline constexpr char kMemories[] = "memories";
TensorSpec MemoriesSpec(const Problem& problem, int64_t layers, int64_t tokens);

// Returns layer n of [batch, layers, tokens, model_dim].
template <class View>
View OfLayer(const View& view, int64_t n) {
  View layer = Slice(view, 1, n, 1);
  layer.dims = {view.dim(0), view.dim(2), view.dim(3)};
  layer.strides = {view.stride(0), view.stride(2), view.stride(3)};
  layer.rank = 3;
  return layer;
}

class SegmentedLayer : public StreamingLayer {
 public:
  size_t workspace_bytes(int threads) const override;
  // The segments decide the mask, unless a technique overrides this.
  int64_t split_tokens() const override { return max_segment_tokens(); }

 protected:
  // Reads `segment` tokens at a time, or all where there are fewer. A segment's outputs are out;
  // context where `outputs`, those of a Run, have one; and `more`, the other outputs in `outputs`.
  // Segments read x and `more_inputs`, and a Run reads the same inputs for all tokens. Of an input
  // that has no dimension of tokens only a stream's first segment has need.
  SegmentedLayer(Device device, const Problem& problem, std::vector<TensorSpec> outputs,
                 int64_t layers, int64_t segment, const std::vector<TensorSpec>& more = {},
                 const std::vector<TensorSpec>& more_inputs = {});

  // Set where the next segment's `more` is written, and its inputs other than x: the tokens of the
  // tensors from `begin` on.
  virtual void SetOutputs(const Outputs& /*outputs*/, int64_t /*begin*/) {}
  virtual void SetInputs(const Inputs& /*inputs*/, int64_t /*begin*/) {}
  // Tells whether the next segment is a stream's first. Layers that read memories define it, and
  // Recall, which makes layer n remember rows [batch, tokens, model_dim], a segment's at most, that
  // went into it before.
  virtual bool IsAtBeginning() const { return false; }
  virtual absl::Status Recall(int64_t /*n*/, const ConstTensorView& /*rows*/,
                              const Execution& /*execution*/) {
    return absl::UnimplementedError("the layer reads no memories");
  }
  // Makes the layers remember what a stream is given beside the memories. The inputs have been
  // checked.
  virtual absl::Status RecallMore(const Inputs& /*inputs*/, const Execution& /*execution*/) {
    return absl::OkStatus();
  }
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
  // Hands what is given to the layers, if this is a stream's first segment.
  absl::Status RecallGiven(const Inputs& inputs, const Execution& execution);
  // Copies of a Run's tokens begin, ..., which go into layer n, those that are in the final memories.
  absl::Status Keep(int64_t n, int64_t begin, const ConstTensorView& rows,
                    const Execution& execution) const;
  absl::Status KeepGiven(const ConstTensorView& memories, const Execution& execution) const;

  Device device_;
  int64_t layers_;
  std::vector<std::string> given_;  // the inputs that have no dimension of tokens
  TensorView final_memories_;       // of a Run; empty where the caller does not want them
  int64_t begin_ = 0;               // of the segment, in a Run
};

}  // namespace tfb::layers

#endif  // TFB_CORE_LAYERS_STACK_SEGMENTED_LAYER_H_
