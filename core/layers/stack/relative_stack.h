// A stack whose layers have Transformer-XL's attention and memory: everything of transformer_xl's
// layer except how attention and feed-forward network are joined to the state.
#ifndef TFB_CORE_LAYERS_STACK_RELATIVE_STACK_H_
#define TFB_CORE_LAYERS_STACK_RELATIVE_STACK_H_

#include <cstddef>
#include <cstdint>
#include <map>
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
  RelativeAttention::Queries queries = RelativeAttention::Queries::kAll;
};

RelativeStackShape ShapeOf(const Problem& problem, const RelativeStackOptions& options);

// Returns InvalidArgument where the problem or the memory does not fit the technique.
absl::Status CheckRelativeStack(absl::string_view technique, const Problem& problem,
                                const RelativeStackOptions& options);

// Returns the specs of the input `memories`, if some are given, and of the output, if it holds a
// token: [batch, layers, tokens, model_dim], what went into each layer.
std::vector<TensorSpec> GivenMemories(const Problem& problem, const RelativeStackOptions& options);
std::vector<TensorSpec> FinalMemories(const Problem& problem, const RelativeStackOptions& options);

class RelativeStackLayer : public SegmentedLayer {
 public:
  Cost cost() const override;
  // reach_tokens: earlier tokens that can change the last one, through all layers. keys_per_token:
  // the keys that a token sees in one layer and head, on average, itself included. mean_span: the
  // mean span of the heads that have one, in tokens. cache_bytes: the keys and values of all
  // layers. cublas: on a GPU, 1 where cuBLAS computes the products with matrices, else 0.
  std::map<std::string, double> statistics() const override;
  // With same_length the mask does not depend on segments.
  int64_t split_tokens() const override;
  absl::Status Reset() override;

 protected:
  RelativeStackLayer(const Problem& problem, std::vector<TensorSpec> outputs,
                     const RelativeStackShape& shape, Device device,
                     const std::vector<TensorSpec>& more_of_segments = {},
                     const std::vector<TensorSpec>& more_inputs = {});
  // Draws the parameters and allocates memory for keys and values. The factory calls it.
  absl::Status Initialize(const std::vector<ParameterSpec>& parameters, uint64_t seed);

  absl::Status DoSetup(const Inputs& inputs, const Execution& execution) override;
  void BeginSegment(int64_t tokens) override;
  bool IsAtBeginning() const override { return attentions_[0].tokens() == 0; }
  absl::Status Recall(int64_t n, const ConstTensorView& rows, const Execution& execution) override;

  const LayerNorm* final_norm() const override {
    return sizes().final_norm ? &final_norm_ : nullptr;
  }
  // Tells whether a layer normalises its memory before it makes keys and values.
  virtual bool normalizes_memory() const { return false; }
  // Returns the activation of a feed-forward network's output.
  virtual Activation feed_forward_output() const { return Activation::kNone; }

  Device device() const { return device_; }
  const StackSizes& sizes() const { return shape_.sizes; }
  const MemoryReach& reach() const { return reach_; }
  int64_t max_rows() const { return problem().batch * max_segment_tokens(); }
  const SegmentView& segment() const { return segment_; }
  RelativeAttention& attention(int64_t n) { return attentions_[n]; }
  const RelativeAttention& attention(int64_t n) const { return attentions_[n]; }
  const DecoderLayer& layer(int64_t n) const { return layers_[n]; }

 private:
  // Returns the context of a sequence; pairs of a head are those of the mean head.
  MemoryReach::Context ContextOfSequence() const;
  std::vector<float> Spans() const;

  RelativeStackShape shape_;
  Device device_;
  MemoryReach reach_;
  SegmentView segment_;
  std::vector<RelativeAttention> attentions_;
  std::vector<DecoderLayer> layers_;
  LayerNorm final_norm_;
};

}  // namespace tfb::layers

#endif  // TFB_CORE_LAYERS_STACK_RELATIVE_STACK_H_
