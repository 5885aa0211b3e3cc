// One layer of the stack without its attention, which the caller brings: two normalisations and a
// feed-forward network, post-norm or pre-norm as in memory/transformer_xl/transformer_xl.h.
#ifndef TFB_CORE_LAYERS_STACK_DECODER_LAYER_H_
#define TFB_CORE_LAYERS_STACK_DECODER_LAYER_H_

#include <cstddef>
#include <cstdint>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/cuda/row_list.h"
#include "core/layers/feed_forward.h"
#include "core/layers/layer_norm.h"
#include "core/layers/stack/stack_sizes.h"
#include "core/problem.h"
#include "core/technique.h"
#include "core/tensor.h"

namespace tfb::layers {

struct DecoderLayer {
  LayerNorm attention_norm;
  LayerNorm feed_forward_norm;
  FeedForward feed_forward;

  // Copies the parameters of layer n to the device. `output` is applied to the feed-forward
  // network's result, before the residual.
  static absl::StatusOr<DecoderLayer> Create(Device device, const NamedTensors& parameters,
                                             int64_t n, Activation output = Activation::kNone);

  // Returns the scratch of a Run on up to `rows` rows with an attention that needs
  // `attention_bytes`.
  static size_t workspace_bytes(Device device, const StackSizes& sizes, int64_t rows, bool pre_norm,
                                size_t attention_bytes, int threads);

  // y = attention(x) + residual; y may be the residual, and x. The execution's workspace is the
  // part that is left for it.
  using Attention =
      absl::FunctionRef<absl::Status(const ConstTensorView& x, const ConstTensorView& residual,
                                     const TensorView& y, const Execution& execution)>;
  // The tensors are [batch, tokens, model_dim]. `state`, f32, holds the hidden state between the
  // sublayers; it may be the input, and the output. `context`, unless empty, becomes the
  // feed-forward network's input. `rows` are, on CUDA, the rows to compute.
  struct Call {
    ConstTensorView input;
    TensorView state;
    TensorView output;
    TensorView context;
    RowList rows = {};
  };
  absl::Status Run(bool pre_norm, const Call& call, Attention attention,
                   const Execution& execution) const;

 private:
  absl::Status PostNorm(const Call& call, Attention attention, const Execution& execution) const;
  absl::Status PreNorm(const Call& call, Attention attention, const Execution& execution) const;
};

}  // namespace tfb::layers

#endif  // TFB_CORE_LAYERS_STACK_DECODER_LAYER_H_
