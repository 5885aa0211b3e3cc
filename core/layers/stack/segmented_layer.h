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

// What a stack has in a Run and in a stream, without its layers.
struct SegmentedStack {
  int64_t layers = 1;
  int64_t segment = 1;      // tokens that are read at a time, or all where there are fewer
  bool final_norm = false;  // a norm of what the last layer writes: the parameters of kFinalNorm
  std::vector<TensorSpec> outputs;       // of a Run: out, perhaps context, and more
  std::vector<TensorSpec> more_outputs;  // of a segment, beside out and the context
  // Inputs of a segment beside x, which a Run reads for all tokens. Of an input that has no
  // dimension of tokens only a stream's first segment has need.
  std::vector<TensorSpec> more_inputs;
};

class SegmentedLayer : public StreamingLayer {
 public:
  size_t workspace_bytes(int threads) const override;
  // The segments decide the mask, unless a technique overrides this.
  int64_t split_tokens() const override { return max_segment_tokens(); }
  absl::Status Reset() final;

 protected:
  SegmentedLayer(Device device, const Problem& problem, const SegmentedStack& stack);

  // A segment of a call: its tokens are `tokens` ones of the call's tensors, from `begin` on.
  struct Segment {
    int64_t begin;
    int64_t tokens;
    const Inputs& inputs;
    const Outputs& outputs;
  };
  // Begins the next segment.
  virtual void BeginSegment(const Segment& segment) = 0;
  // Runs layer n on the segment. The call has a context in the last layer only.
  virtual absl::Status RunLayer(int64_t n, const DecoderLayer::Call& call,
                                const Execution& execution) = 0;
  // Covers the final norm's workspace, too.
  virtual size_t layer_workspace_bytes(int threads) const = 0;
  virtual void Forget() = 0;  // forgets all tokens
  // Makes layer n remember rows [batch, tokens, model_dim], a segment's at most, that went into it
  // before. Layers that read memories define it.
  virtual absl::Status Recall(int64_t /*n*/, const ConstTensorView& /*rows*/,
                              const Execution& /*execution*/) {
    return absl::UnimplementedError("the layer reads no memories");
  }
  // Makes the layers remember what a stream is given beside the memories. The inputs have been
  // checked.
  virtual absl::Status RecallMore(const Inputs& /*inputs*/, const Execution& /*execution*/) {
    return absl::OkStatus();
  }

  // Sets up the final norm and begins a new stream. Stacks call it when their layers are set up.
  absl::Status DoSetup(const Inputs& inputs, const Execution& execution) override;
  // Leaves the stream at the end of the sequence, as appending the sequence would.
  absl::Status DoRun(const Inputs& inputs, const Outputs& outputs,
                     const Execution& execution) override;
  absl::Status DoAppend(int64_t tokens, const Inputs& segment, const Outputs& outputs,
                        const Execution& execution) override;

  Device device() const { return device_; }

 private:
  TensorView LayOutState(int64_t tokens, Workspace& workspace) const;
  absl::Status AppendSegment(const Segment& segment, const Execution& execution);
  // Hands what is given to the layers, if this is a stream's first segment.
  absl::Status RecallGiven(const Inputs& inputs, const Execution& execution);
  // Copies of the segment's tokens, which go into layer n, those that are in the final memories.
  absl::Status Keep(int64_t n, int64_t begin, const ConstTensorView& rows,
                    const Execution& execution) const;
  absl::Status KeepGiven(const ConstTensorView& memories, const Execution& execution) const;

  Device device_;
  int64_t layers_;
  bool has_final_norm_;
  LayerNorm final_norm_;
  std::vector<std::string> given_;  // the inputs that have no dimension of tokens
  TensorView final_memories_;       // of a Run; empty where the caller does not want them
  bool is_at_beginning_ = true;     // of a stream
};

}  // namespace tfb::layers

#endif  // TFB_CORE_LAYERS_STACK_SEGMENTED_LAYER_H_
