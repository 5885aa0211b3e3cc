#include "core/layers/stack/decoder_layer.h"

#include <algorithm>
#include <string>

#include "core/status.h"
#include "core/workspace.h"

namespace tfb::layers {

absl::StatusOr<DecoderLayer> DecoderLayer::Create(Device device, const NamedTensors& parameters,
                                                  int64_t n, Activation output) {
  const std::string prefix = LayerPrefix(n);
  DecoderLayer layer;
  TFB_ASSIGN_OR_RETURN(layer.attention_norm,
                       MakeLayerNorm(device, parameters, prefix + "attention_norm"));
  TFB_ASSIGN_OR_RETURN(layer.feed_forward, MakeFeedForward(device, parameters, prefix + "ff",
                                                           Activation::kRelu, output));
  TFB_ASSIGN_OR_RETURN(layer.feed_forward_norm,
                       MakeLayerNorm(device, parameters, prefix + "ff_norm"));
  return layer;
}

size_t DecoderLayer::workspace_bytes(Device device, const StackSizes& sizes, int64_t rows,
                                     bool pre_norm, size_t attention_bytes, int threads) {
  const int64_t width = sizes.width();
  const size_t normalized = Workspace::Measure(
      [&](Workspace& workspace) { workspace.Take<float>(pre_norm ? rows * width : 0); });
  return normalized +
         std::max({attention_bytes,
                   FeedForward::workspace_bytes(device, rows, {width, sizes.inner, width}, threads),
                   LayerNorm::workspace_bytes(device, width, threads)});
}

absl::Status DecoderLayer::Run(bool pre_norm, const Call& call, Attention attention,
                               const Execution& execution) const {
  return pre_norm ? PreNorm(call, attention, execution) : PostNorm(call, attention, execution);
}

absl::Status DecoderLayer::PostNorm(const Call& call, Attention attention,
                                    const Execution& execution) const {
  const TensorView& state = call.state;
  TFB_RETURN_IF_ERROR(attention(call.input, call.input, state, execution));
  if (!call.context.empty()) {
    TFB_RETURN_IF_ERROR(attention_norm.Run(state, call.context, execution, call.rows));
  }
  TFB_RETURN_IF_ERROR(attention_norm.Run(state, state, execution, call.rows));
  TFB_RETURN_IF_ERROR(feed_forward.Run(state, state, state, execution, call.rows));
  return feed_forward_norm.Run(state, call.output, execution, call.rows);
}

absl::Status DecoderLayer::PreNorm(const Call& call, Attention attention,
                                   const Execution& execution) const {
  Workspace workspace(execution.workspace);
  const TensorView normalized(workspace.Take<float>(call.state.num_elements()), DType::kF32,
                              call.state.shape());
  Execution rest = execution;
  rest.workspace = workspace.Rest();
  TFB_RETURN_IF_ERROR(attention_norm.Run(call.input, normalized, rest, call.rows));
  TFB_RETURN_IF_ERROR(attention(normalized, call.input, call.state, rest));
  if (!call.context.empty()) {
    TFB_RETURN_IF_ERROR(feed_forward_norm.Run(call.state, call.context, rest, call.rows));
  }
  TFB_RETURN_IF_ERROR(feed_forward_norm.Run(call.state, normalized, rest, call.rows));
  return feed_forward.Run(normalized, call.state, call.output, rest, call.rows);
}

}  // namespace tfb::layers
