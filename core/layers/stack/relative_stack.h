// A stack whose layers have Transformer-XL's attention and memory.
#ifndef TFB_CORE_LAYERS_STACK_RELATIVE_STACK_H_
#define TFB_CORE_LAYERS_STACK_RELATIVE_STACK_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "core/layers/activation.h"
#include "core/layers/attention/relative_attention.h"
#include "core/layers/stack/decoder_layer.h"
#include "core/layers/stack/segmented_layer.h"
#include "core/layers/stack/stack_options.h"
#include "core/layers/stack/stack_sizes.h"
#include "core/technique.h"

namespace tfb::layers {

struct RelativeStackShape {
  StackSizes sizes;
  int64_t segment = 1;
  int64_t memory = 0;
  bool same_length = false;
  int64_t max_distance = 0;
  int64_t given_memory = 0;
  bool pre_norm = false;           // as in memory/transformer_xl/transformer_xl.h
  bool normalizes_memory = false;  // whether keys and values are of normalised rows
  Activation feed_forward_output = Activation::kNone;  // of a feed-forward network's output
  RelativeAttention::Queries queries = RelativeAttention::Queries::kAll;
};

// The tensors of such a stack beside x: see SegmentedStack.
struct RelativeStackTensors {
  std::vector<TensorSpec> outputs;
  std::vector<TensorSpec> more_outputs = {};
  std::vector<TensorSpec> more_inputs = {};
};

// With pre_norm the memory is normalised as what the layer reads is.
RelativeStackShape ShapeOf(const Problem& problem, const RelativeStackOptions& options,
                           bool pre_norm = false);

// Returns InvalidArgument where the problem or the memory does not fit the technique.
absl::Status CheckRelativeStack(absl::string_view technique, const Problem& problem,
                                const RelativeStackOptions& options);

// Returns the specs of the input `memories`, if some are given, and of the output, if it holds a
// token: [batch, layers, tokens, model_dim], what went into each layer.
std::vector<TensorSpec> GivenMemories(const Problem& problem, const RelativeStackOptions& options);
std::vector<TensorSpec> FinalMemories(const Problem& problem, const RelativeStackOptions& options);
// Returns the specs of out, context and the final memories.
std::vector<TensorSpec> RelativeStackOutputs(const Problem& problem,
                                             const RelativeStackOptions& options);

// The stack of memory/transformer_xl/transformer_xl.h. A technique whose layers differ from these
// defines RunLayer, or Attend where only attention differs.
class RelativeStackLayer : public SegmentedLayer {
 public:
  // Makes the layer of a stack with the parameters of StackParameters.
  static absl::StatusOr<std::unique_ptr<Layer>> Create(const Problem& problem,
                                                       const RelativeStackShape& shape,
                                                       const RelativeStackTensors& tensors,
                                                       Device device, uint64_t seed);

  Cost cost() const override;
  // reach_tokens: earlier tokens that can change the last one, through all layers. keys_per_token:
  // the keys that a token sees in one layer and head, on average, itself included. mean_span: the
  // mean span of the heads that have one, in tokens. cache_bytes: the keys and values of all
  // layers. cublas: on a GPU, 1 where cuBLAS computes the products with matrices, else 0.
  std::map<std::string, double> statistics() const override;
  // With same_length the mask does not depend on segments.
  int64_t split_tokens() const override;

 protected:
  RelativeStackLayer(const Problem& problem, const RelativeStackShape& shape,
                     const RelativeStackTensors& tensors, Device device);
  // Draws the parameters and allocates memory for keys and values. The factory calls it.
  absl::Status Initialize(const std::vector<ParameterSpec>& parameters, uint64_t seed);

  absl::Status DoSetup(const Inputs& inputs, const Execution& execution) override;
  void BeginSegment(const Segment& segment) override;
  absl::Status RunLayer(int64_t n, const DecoderLayer::Call& call,
                        const Execution& execution) override;
  size_t layer_workspace_bytes(int threads) const override;
  void Forget() override;
  absl::Status Recall(int64_t n, const ConstTensorView& rows, const Execution& execution) override;
  // Computes the attention of layer n: y = attention(x) W_o + residual.
  virtual absl::Status Attend(int64_t n, const ConstTensorView& x, const ConstTensorView& residual,
                              const TensorView& y, const Execution& execution);

  const StackSizes& sizes() const { return shape_.sizes; }
  const MemoryReach& reach() const { return reach_; }
  int64_t max_rows() const { return problem().batch * max_segment_tokens(); }
  const SegmentView& segment() const { return segment_; }
  RelativeAttention& attention(int64_t n) { return attentions_[n]; }
  const RelativeAttention& attention(int64_t n) const { return attentions_[n]; }
  const DecoderLayer& layer(int64_t n) const { return layers_[n]; }
  // Returns the workspace of RunLayer with an attention that needs `attention_bytes`.
  size_t WorkspaceWith(size_t attention_bytes, int threads) const {
    return DecoderLayer::workspace_bytes(device(), sizes(), max_rows(), shape_.pre_norm,
                                         attention_bytes, threads);
  }

 private:
  // Returns the context of a sequence; pairs of a head are those of the mean head.
  MemoryReach::Context ContextOfSequence() const;
  std::vector<float> Spans() const;

  RelativeStackShape shape_;
  MemoryReach reach_;
  SegmentView segment_;
  std::vector<RelativeAttention> attentions_;
  std::vector<DecoderLayer> layers_;
};

}  // namespace tfb::layers

#endif  // TFB_CORE_LAYERS_STACK_RELATIVE_STACK_H_
