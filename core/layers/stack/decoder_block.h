// A layer of attention and a feed-forward network, post-norm or pre-norm as in
// memory/transformer_xl/transformer_xl.h.
//
// The backward pass of a segment computes it again from what went into the layer: the attention
// keeps what its own backward pass reads, the network keeps z (core/layers/feed_forward.h), and the
// block the states between the sublayers. Then each part's backward pass follows, the last one first
// (the chain rule), where a residual connection adds its gradient to what it passes by. Where some of
// the tokens were computed, all of it has the rows of these, and the gradient of the attention's input,
// which the keys make one of all tokens, is added to what passes by the layer.
#ifndef TFB_CORE_LAYERS_STACK_DECODER_BLOCK_H_
#define TFB_CORE_LAYERS_STACK_DECODER_BLOCK_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "core/cuda/row_list.h"
#include "core/layers/activation.h"
#include "core/layers/feed_forward.h"
#include "core/layers/layer_norm.h"
#include "core/layers/layer_parameters.h"
#include "core/layers/stack/block.h"
#include "core/layers/stack/stack_sizes.h"
#include "core/problem.h"
#include "core/technique.h"
#include "core/tensor.h"
#include "core/workspace.h"

namespace tfb::layers {

// Layer n of a stack.
struct LayerOfStack {
  Device device;
  StackSizes sizes;
  int64_t batch;
  int64_t max_tokens;  // of the longest segment
  int64_t n;

  int64_t max_rows() const { return batch * max_tokens; }
};

// The parts of a layer beside its attention.
struct Sublayers {
  LayerNorm attention_norm;
  LayerNorm feed_forward_norm;
  FeedForward feed_forward;

  // Copies the layer's parameters to the device. `output` is applied to the feed-forward network's
  // result, before the residual.
  static absl::StatusOr<Sublayers> Create(const LayerOfStack& layer, const NamedTensors& parameters,
                                          Activation output = Activation::kNone);
  // Returns the workspace of the one that needs most.
  static size_t workspace_bytes(const LayerOfStack& layer, int threads);

  // The backward pass has these; they are as those of FeedForward and LayerNorm.
  absl::Status SetUpBackward(const LayerOfStack& layer, const NamedTensors& parameters);
  static size_t kept_bytes(const LayerOfStack& layer, Activation output = Activation::kNone);
  static size_t backward_workspace_bytes(const LayerOfStack& layer, int threads,
                                         Activation output = Activation::kNone);
};

// The backward passes of the sublayers of one layer, which add to the gradients of its parameters.
class SublayerGradients {
 public:
  explicit SublayerGradients(int64_t layer)
      : attention_norm_(LayerPrefix(layer) + "attention_norm"),
        feed_forward_norm_(LayerPrefix(layer) + "ff_norm"),
        feed_forward_(LayerPrefix(layer) + "ff") {}

  TensorView gamma_of_attention(const Outputs& gradients) const {
    return gradients.Get(attention_norm_.gamma);
  }
  TensorView beta_of_attention(const Outputs& gradients) const {
    return gradients.Get(attention_norm_.beta);
  }
  // The tensors of a part's backward pass: see LayerNorm and FeedForward.
  struct Call {
    ConstTensorView x;
    ConstTensorView dy;
    ConstTensorView added;
    TensorView dx;
    RowList rows = {};
  };
  absl::Status OfAttentionNorm(const Sublayers& parts, const Call& call, const Outputs& gradients,
                               const Execution& execution) const {
    return OfNorm(parts.attention_norm, attention_norm_, call, gradients, execution);
  }
  absl::Status OfFeedForwardNorm(const Sublayers& parts, const Call& call, const Outputs& gradients,
                                 const Execution& execution) const {
    return OfNorm(parts.feed_forward_norm, feed_forward_norm_, call, gradients, execution);
  }
  absl::Status OfFeedForward(const Sublayers& parts, const Call& call, const Outputs& gradients,
                             const Execution& execution) const;

 private:
  static absl::Status OfNorm(const LayerNorm& norm, const NormNames& names, const Call& call,
                             const Outputs& gradients, const Execution& execution);

  NormNames attention_norm_;
  NormNames feed_forward_norm_;
  FeedForwardNames feed_forward_;
};

class DecoderBlock : public Block {
 public:
  DecoderBlock(const LayerOfStack& layer, bool pre_norm,
               std::unique_ptr<SegmentAttention> attention)
      : layer_(layer), pre_norm_(pre_norm), attention_(std::move(attention)), gradients_(layer.n) {}

  absl::Status Setup(const NamedTensors& parameters, const Distances& distances,
                     const Execution& execution) override;
  absl::Status Recall(const Inputs& given, const Execution& execution) override {
    return attention_->Recall(given, norm(), execution);
  }
  absl::Status Run(const Call& call, const Execution& execution) override;
  size_t workspace_bytes(int threads) const override;
  SegmentAttention& attention() override { return *attention_; }

  absl::Status CheckBackward() const override { return attention_->CheckBackward(); }
  size_t kept_bytes() const override { return attention_->kept_bytes(); }
  absl::Status SetUpBackward(const NamedTensors& parameters, const Distances& distances) override;
  size_t backward_workspace_bytes(int threads) const override;
  absl::Status Backward(const BackwardCall& call, const Execution& execution) override;

 private:
  // The segment again in fp32, each of the shape of what is computed, and memory of the sublayers.
  struct BackwardScratch {
    TensorView x;         // pre_norm: what the attention reads
    TensorView attended;  // what the attention writes
    TensorView g;         // what the feed-forward network reads
    TensorView y;         // what it writes, without the residual where pre_norm
    TensorView gradient;
    TensorView of_tokens;  // [batch, tokens, model_dim] in the memory of y
    absl::Span<std::byte> attention;
    absl::Span<std::byte> feed_forward;
  };
  // `rows`: those of some of the tokens; none: all tokens are computed.
  BackwardScratch LayOutBackward(int64_t tokens, std::optional<int64_t> rows,
                                 Workspace& workspace) const;
  absl::Status RunAgain(const BackwardCall& call, const BackwardScratch& scratch,
                        const Execution& execution) const;
  absl::Status PostNormBackward(const BackwardCall& call, const BackwardScratch& scratch,
                                const Execution& execution) const;
  absl::Status PreNormBackward(const BackwardCall& call, const BackwardScratch& scratch,
                               const Execution& execution) const;
  const LayerNorm* norm() const { return pre_norm_ ? &parts_.attention_norm : nullptr; }
  absl::Status PostNorm(const Call& call, const Execution& execution) const;
  absl::Status PreNorm(const Call& call, const Execution& execution) const;

  LayerOfStack layer_;
  bool pre_norm_;
  std::unique_ptr<SegmentAttention> attention_;
  Sublayers parts_;
  SublayerGradients gradients_;
};

}  // namespace tfb::layers

#endif  // TFB_CORE_LAYERS_STACK_DECODER_BLOCK_H_
