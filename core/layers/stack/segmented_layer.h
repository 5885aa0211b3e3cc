// A stack of blocks that reads its hidden states segment by segment, in a Run as in a stream. What
// techniques differ in lies in their blocks (block.h).
//
// The backward pass. Gradients stop at what a segment reads of earlier tokens, so that
// each layer's segments are differentiated by themselves. A Run keeps what went into each layer but
// the first, and into the final norm, or came out of the last layer where the blocks write out: f32
// [batch, query_tokens, model_dim] each. From the last layer
// to the first, and in a layer from the last segment to the first, Backward computes a segment again
// from what the layer read, and then its gradients: one more forward pass in time, and of memory one
// segment's in the place of all tokens'. It does so always: there is no option recompute
// (core/layers/recompute.h).
#ifndef TFB_CORE_LAYERS_STACK_SEGMENTED_LAYER_H_
#define TFB_CORE_LAYERS_STACK_SEGMENTED_LAYER_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "core/layers/layer_norm.h"
#include "core/layers/layer_parameters.h"
#include "core/layers/stack/block.h"
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

// Returns the tokens of a Run's longest segment, where `segment` are read at a time.
int64_t LongestSegment(const Problem& problem, int64_t segment);

// What a SegmentedLayer is made of.
struct SegmentedStack {
  std::unique_ptr<StackState> state;
  std::vector<TensorSpec> outputs = {};       // of a Run: out, perhaps context, and more
  std::vector<TensorSpec> more_outputs = {};  // of a segment, beside out and the context
  // Inputs of a segment beside x, which a Run reads for all tokens. Of an input that has no
  // dimension of tokens only a stream's first segment has need.
  std::vector<TensorSpec> more_inputs = {};
  bool depends_on_split = false;  // whether another split of the stream gives another result
  int64_t segment = 1;            // tokens that are read at a time, or all where there are fewer
  // Outputs beside out and the context of which Backward takes gradients.
  std::vector<std::string> more_differentiable = {};
  bool final_norm = false;  // a norm of what the last layer writes: the parameters of kFinalNorm
  // Whether out is written by the blocks, of which several may have a part in it, and not by the stack
  // of what the last one leaves. They read its gradient in PastSegment::output_gradients.
  bool blocks_write_out = false;
  // Parameters that have no gradient, with the reasons: Layer::stopped_gradients.
  std::map<std::string, std::string> more_stopped = {};
  NamedTensors parameters = {};
  std::vector<std::unique_ptr<Block>> blocks = {};
};

class SegmentedLayer final : public StreamingLayer {
 public:
  SegmentedLayer(Device device, const Problem& problem, SegmentedStack stack);

  size_t workspace_bytes(int threads) const override;
  Cost cost() const override;
  // Returns the numbers of the state and of the attentions, kept_bytes_per_block, and cublas: on a
  // GPU, 1 where cuBLAS computes the products with matrices, else 0.
  std::map<std::string, double> statistics() const override;
  int64_t split_tokens() const override { return depends_on_split_ ? max_segment_tokens() : 0; }
  absl::Status Reset() override;

  absl::Status CheckBackward() const override;
  size_t kept_bytes() const override;
  size_t backward_workspace_bytes(int threads) const override;
  Cost backward_cost() const override;
  std::map<std::string, std::string> stopped_gradients() const override;
  std::vector<std::string> differentiable_outputs() const override;

 protected:
  absl::Status DoSetup(const Inputs& inputs, const Execution& execution) override;
  // Leaves the stream at the end of the sequence, as appending the sequence would.
  absl::Status DoRun(const Inputs& inputs, const Outputs& outputs,
                     const Execution& execution) override;
  absl::Status DoAppend(int64_t tokens, const Inputs& segment, const Outputs& outputs,
                        const Execution& execution) override;
  absl::Status DoSetUpBackward(const Inputs& inputs, const Execution& execution) override;
  absl::Status DoBackward(const BackwardCall& call, const Execution& execution) override;

 private:
  TensorView LayOutHidden(int64_t tokens, Workspace& workspace) const;
  absl::Status AppendSegment(const Segment& segment, const Execution& execution);
  // Copies what goes into layer n, or into the final norm, to the memory that a Run keeps, if any.
  absl::Status KeepState(int64_t n, const Segment& segment, const ConstTensorView& rows,
                         const Execution& execution) const;
  // Returns that of all tokens; n is 1 at least.
  TensorView KeptState(int64_t n, absl::Span<std::byte> kept) const;
  int64_t kept_states() const { return layers() - (has_final_norm_ || blocks_write_out_ ? 0 : 1); }
  size_t kept_state_bytes() const;  // of all of them
  // Returns the bytes of a state, and those of the block that keeps least beside it: what one layer
  // alone keeps, as memorizing's that has a store, is not of a further layer.
  double KeptBytesPerBlock() const;
  // Returns what layer n keeps; nothing where there is no such memory.
  absl::Span<std::byte> KeptOf(int64_t n, absl::Span<std::byte> kept) const;
  // Hands what is given to the layers, if this is a stream's first segment.
  absl::Status RecallGiven(const Inputs& inputs, const Execution& execution);
  // Copies of the segment's tokens, which go into layer n, those that are in the final memories.
  absl::Status Keep(int64_t n, int64_t begin, const ConstTensorView& rows,
                    const Execution& execution) const;
  absl::Status KeepGiven(const ConstTensorView& memories, const Execution& execution) const;
  int64_t layers() const { return static_cast<int64_t>(blocks_.size()); }

  struct BackwardScratch {
    TensorView gradient;  // of a layer's output and then input, f32 [batch, tokens, model_dim]
    absl::Span<std::byte> sums;
    absl::Span<std::byte> of_state;  // StackState::backward_memory_bytes()
  };
  BackwardScratch LayOutBackward(Workspace& workspace) const;
  absl::Status FinalNormBackward(const BackwardCall& call, const BackwardScratch& scratch,
                                 const Execution& execution) const;
  absl::Status LayerBackward(int64_t n, const BackwardCall& call, const BackwardScratch& scratch,
                             const Execution& execution) const;

  Device device_;
  bool has_final_norm_;
  bool blocks_write_out_;
  bool depends_on_split_;
  std::vector<std::string> given_;  // the inputs that have no dimension of tokens
  std::unique_ptr<StackState> state_;
  std::vector<std::unique_ptr<Block>> blocks_;  // they use the state
  std::vector<std::string> more_differentiable_;
  std::map<std::string, std::string> more_stopped_;
  LayerNorm final_norm_;
  NormNames final_norm_names_;
  Tensor sinusoids_;             // of the backward pass
  TensorView final_memories_;    // of a Run; empty where the caller does not want them
  bool is_at_beginning_ = true;  // of a stream
  // The answer of the last workspace_bytes, which every call asks again: it walks all layers.
  mutable int asked_threads_ = -1;
  mutable size_t asked_bytes_ = 0;
  mutable int asked_backward_threads_ = -1;
  mutable size_t asked_backward_bytes_ = 0;
};

}  // namespace tfb::layers

#endif  // TFB_CORE_LAYERS_STACK_SEGMENTED_LAYER_H_
