#include "core/layers/stack/decoder_block.h"

#include <algorithm>
#include <string>

#include "core/layers/layer_parameters.h"
#include "core/status.h"
#include "core/workspace.h"

namespace tfb::layers {

absl::StatusOr<Sublayers> Sublayers::Create(const LayerOfStack& layer,
                                            const NamedTensors& parameters, Activation output) {
  const std::string prefix = LayerPrefix(layer.n);
  Sublayers parts;
  TFB_ASSIGN_OR_RETURN(parts.attention_norm,
                       MakeLayerNorm(layer.device, parameters, prefix + "attention_norm"));
  TFB_ASSIGN_OR_RETURN(parts.feed_forward, MakeFeedForward(layer.device, parameters, prefix + "ff",
                                                           Activation::kRelu, output));
  TFB_ASSIGN_OR_RETURN(parts.feed_forward_norm,
                       MakeLayerNorm(layer.device, parameters, prefix + "ff_norm"));
  return parts;
}

size_t Sublayers::workspace_bytes(const LayerOfStack& layer, int threads) {
  const int64_t width = layer.sizes.width();
  return std::max(FeedForward::workspace_bytes(layer.device, layer.max_rows,
                                               {width, layer.sizes.inner, width}, threads),
                  LayerNorm::workspace_bytes(layer.device, width, threads));
}

absl::Status DecoderBlock::Setup(const NamedTensors& parameters, const Distances& distances,
                                 const Execution& execution) {
  TFB_RETURN_IF_ERROR(attention_->Setup(parameters, distances, execution));
  TFB_ASSIGN_OR_RETURN(parts_, Sublayers::Create(layer_, parameters));
  return absl::OkStatus();
}

size_t DecoderBlock::workspace_bytes(int threads) const {
  const size_t normalized = Workspace::Measure([this](Workspace& workspace) {
    workspace.Take<float>(pre_norm_ ? layer_.max_rows * layer_.sizes.width() : 0);
  });
  return normalized + std::max(attention_->workspace_bytes(threads),
                               Sublayers::workspace_bytes(layer_, threads));
}

absl::Status DecoderBlock::Run(const Call& call, const Execution& execution) {
  return pre_norm_ ? PreNorm(call, execution) : PostNorm(call, execution);
}

absl::Status DecoderBlock::PostNorm(const Call& call, const Execution& execution) const {
  const TensorView& state = call.state;
  TFB_RETURN_IF_ERROR(
      attention_->Run({call.segment, call.input, call.input, state, norm(), call.some}, execution));
  if (!call.context.empty()) {
    TFB_RETURN_IF_ERROR(parts_.attention_norm.Run(state, call.context, execution, call.some.rows));
  }
  TFB_RETURN_IF_ERROR(parts_.attention_norm.Run(state, state, execution, call.some.rows));
  TFB_RETURN_IF_ERROR(parts_.feed_forward.Run(state, state, state, execution, call.some.rows));
  return parts_.feed_forward_norm.Run(state, call.output, execution, call.some.rows);
}

absl::Status DecoderBlock::PreNorm(const Call& call, const Execution& execution) const {
  Workspace workspace(execution.workspace);
  const TensorView normalized(workspace.Take<float>(call.state.num_elements()), DType::kF32,
                              call.state.shape());
  Execution rest = execution;
  rest.workspace = workspace.Rest();
  TFB_RETURN_IF_ERROR(parts_.attention_norm.Run(call.input, normalized, rest, call.some.rows));
  TFB_RETURN_IF_ERROR(
      attention_->Run({call.segment, normalized, call.input, call.state, norm(), call.some}, rest));
  if (!call.context.empty()) {
    TFB_RETURN_IF_ERROR(
        parts_.feed_forward_norm.Run(call.state, call.context, rest, call.some.rows));
  }
  TFB_RETURN_IF_ERROR(parts_.feed_forward_norm.Run(call.state, normalized, rest, call.some.rows));
  return parts_.feed_forward.Run(normalized, call.state, call.output, rest, call.some.rows);
}

}  // namespace tfb::layers
