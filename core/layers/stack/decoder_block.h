// A layer of attention and a feed-forward network, post-norm or pre-norm as in
// memory/transformer_xl/transformer_xl.h.
#ifndef TFB_CORE_LAYERS_STACK_DECODER_BLOCK_H_
#define TFB_CORE_LAYERS_STACK_DECODER_BLOCK_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/layers/activation.h"
#include "core/layers/feed_forward.h"
#include "core/layers/layer_norm.h"
#include "core/layers/stack/block.h"
#include "core/layers/stack/stack_sizes.h"
#include "core/problem.h"
#include "core/technique.h"

namespace tfb::layers {

// Layer n of a stack.
struct LayerOfStack {
  Device device;
  StackSizes sizes;
  int64_t max_rows;  // of the longest segment: its tokens in all batch rows
  int64_t n;
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
};

class DecoderBlock : public Block {
 public:
  DecoderBlock(const LayerOfStack& layer, bool pre_norm,
               std::unique_ptr<SegmentAttention> attention)
      : layer_(layer), pre_norm_(pre_norm), attention_(std::move(attention)) {}

  absl::Status Setup(const NamedTensors& parameters, const Distances& distances,
                     const Execution& execution) override;
  absl::Status Recall(const Inputs& given, const Execution& execution) override {
    return attention_->Recall(given, norm(), execution);
  }
  absl::Status Run(const Call& call, const Execution& execution) override;
  size_t workspace_bytes(int threads) const override;
  SegmentAttention& attention() override { return *attention_; }

 private:
  const LayerNorm* norm() const { return pre_norm_ ? &parts_.attention_norm : nullptr; }
  absl::Status PostNorm(const Call& call, const Execution& execution) const;
  absl::Status PreNorm(const Call& call, const Execution& execution) const;

  LayerOfStack layer_;
  bool pre_norm_;
  std::unique_ptr<SegmentAttention> attention_;
  Sublayers parts_;
};

}  // namespace tfb::layers

#endif  // TFB_CORE_LAYERS_STACK_DECODER_BLOCK_H_
