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
  return std::max(FeedForward::workspace_bytes(layer.device, layer.max_rows(),
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
    workspace.Take<float>(pre_norm_ ? layer_.max_rows() * layer_.sizes.width() : 0);
  });
  return normalized + std::max(attention_->workspace_bytes(threads),
                               Sublayers::workspace_bytes(layer_, threads));
}

absl::Status DecoderBlock::Run(const Call& call, const Execution& execution) {
  return pre_norm_ ? PreNorm(call, execution) : PostNorm(call, execution);
}

absl::Status DecoderBlock::PostNorm(const Call& call, const Execution& execution) const {
  const TensorView& state = call.state;
  TFB_RETURN_IF_ERROR(attention_->Run(
      {call.segment, call.input, call.input, state, norm(), call.some, call.kept}, execution));
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
  TFB_RETURN_IF_ERROR(attention_->Run(
      {call.segment, normalized, call.input, call.state, norm(), call.some, call.kept}, rest));
  if (!call.context.empty()) {
    TFB_RETURN_IF_ERROR(
        parts_.feed_forward_norm.Run(call.state, call.context, rest, call.some.rows));
  }
  TFB_RETURN_IF_ERROR(parts_.feed_forward_norm.Run(call.state, normalized, rest, call.some.rows));
  return parts_.feed_forward.Run(normalized, call.state, call.output, rest, call.some.rows);
}

// ---- The backward pass ----

namespace {

constexpr int64_t kRowsOfTask = 64;  // of copies

FeedForward::Sizes SizesOf(const LayerOfStack& layer) {
  return {layer.sizes.width(), layer.sizes.inner, layer.sizes.width()};
}

// Whether some of the segment's tokens were computed; the input and the gradient of those that were.
bool HasSome(const Block::BackwardCall& call) { return call.some.row_of_token != nullptr; }
ConstTensorView InputOf(const Block::BackwardCall& call) {
  return HasSome(call) ? call.some.input : call.segment.input();
}
TensorView GradientOf(const Block::BackwardCall& call) {
  return HasSome(call) ? call.some.gradient : call.gradient;
}

// Writes the rows of the computed tokens to their places in the gradient of all tokens.
void PlaceRows(const Block::BackwardCall& call, const ConstTensorView& rows, ThreadPool* pool) {
  const int64_t tokens = call.segment.tokens;
  pool->ParallelForRanges(rows.dim(0), kRowsOfTask, [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) {
      const int64_t place = call.some.tokens[r];
      std::copy_n(rows.At<float>(r), rows.dim(1),
                  call.gradient.MutableAt<float>(place / tokens, place % tokens));
    }
  });
}

}  // namespace

absl::Status Sublayers::SetUpBackward(const LayerOfStack& layer, const NamedTensors& parameters) {
  const std::string network = LayerPrefix(layer.n) + "ff.";
  return feed_forward.SetUpBackward(FindParameter(parameters, network + "w1"),
                                    FindParameter(parameters, network + "w2"));
}

size_t Sublayers::kept_bytes(const LayerOfStack& layer, Activation output) {
  return FeedForward::kept_bytes(layer.max_rows(), SizesOf(layer), output);
}

size_t Sublayers::backward_workspace_bytes(const LayerOfStack& layer, int threads,
                                           Activation output) {
  return std::max({workspace_bytes(layer, threads),
                   FeedForward::backward_workspace_bytes(layer.device, layer.max_rows(),
                                                         SizesOf(layer), threads, output),
                   LayerNorm::backward_workspace_bytes(layer.device, layer.max_rows(),
                                                       layer.sizes.width(), threads)});
}

absl::Status SublayerGradients::OfNorm(const LayerNorm& norm, const NormNames& names,
                                       const Call& call, const Outputs& gradients,
                                       const Execution& execution) {
  return norm.Backward({call.x, call.dy, call.added, call.dx, gradients.Get(names.gamma),
                        gradients.Get(names.beta), /*accumulate=*/true, call.rows},
                       execution);
}

absl::Status SublayerGradients::OfFeedForward(const Sublayers& parts, const Call& call,
                                              const Outputs& gradients,
                                              const Execution& execution) const {
  const FeedForwardNames& names = feed_forward_;
  return parts.feed_forward.Backward(
      {call.x, call.dy, call.added, call.dx, gradients.Get(names.w1), gradients.Get(names.b1),
       gradients.Get(names.w2), gradients.Get(names.b2), /*accumulate=*/true, call.rows},
      execution);
}

absl::Status DecoderBlock::SetUpBackward(const NamedTensors& parameters,
                                         const Distances& distances) {
  TFB_RETURN_IF_ERROR(parts_.SetUpBackward(layer_, parameters));
  return attention_->SetUpBackward(parameters, distances);
}

DecoderBlock::BackwardScratch DecoderBlock::LayOutBackward(int64_t tokens,
                                                           std::optional<int64_t> rows,
                                                           Workspace& workspace) const {
  const int64_t width = layer_.sizes.width();
  const Shape of_tokens = {layer_.batch, tokens, width};
  const Shape shape = rows.has_value() ? Shape{*rows, width} : of_tokens;
  const auto take = [&] {
    return TensorView(workspace.Take<float>(NumElements(of_tokens)), DType::kF32, shape);
  };
  const auto take_bytes = [&](size_t bytes) {
    return absl::MakeSpan(workspace.Take<std::byte>(static_cast<int64_t>(bytes)), bytes);
  };
  BackwardScratch scratch;
  if (pre_norm_) scratch.x = take();
  scratch.attended = take();
  scratch.g = take();
  scratch.y = take();
  scratch.gradient = take();
  scratch.of_tokens = TensorView(scratch.y.mutable_data(), DType::kF32, of_tokens);
  scratch.attention = take_bytes(attention_->again_bytes());
  scratch.feed_forward = take_bytes(Sublayers::kept_bytes(layer_));
  return scratch;
}

size_t DecoderBlock::backward_workspace_bytes(int threads) const {
  return std::max(attention_->backward_workspace_bytes(threads),
                  Sublayers::backward_workspace_bytes(layer_, threads)) +
         Workspace::Measure([this](Workspace& workspace) {
           LayOutBackward(layer_.max_tokens, std::nullopt, workspace);
         });
}

absl::Status DecoderBlock::Backward(const BackwardCall& call, const Execution& execution) {
  Workspace workspace(execution.workspace);
  const BackwardScratch scratch = LayOutBackward(
      call.segment.tokens,
      HasSome(call) ? std::optional<int64_t>(call.some.input.dim(0)) : std::nullopt, workspace);
  Execution rest = execution;
  rest.workspace = workspace.Rest();
  TFB_RETURN_IF_ERROR(RunAgain(call, scratch, rest));
  return pre_norm_ ? PreNormBackward(call, scratch, rest) : PostNormBackward(call, scratch, rest);
}

absl::Status DecoderBlock::RunAgain(const BackwardCall& call, const BackwardScratch& scratch,
                                    const Execution& execution) const {
  const ConstTensorView input = InputOf(call);
  Execution attend = execution, feed = execution;
  attend.kept = scratch.attention;
  feed.kept = scratch.feed_forward;
  if (pre_norm_) TFB_RETURN_IF_ERROR(parts_.attention_norm.Run(input, scratch.x, execution));
  const RowList& rows = call.some.rows;
  TFB_RETURN_IF_ERROR(
      attention_->RunAgain({call.segment, pre_norm_ ? ConstTensorView(scratch.x) : input, input,
                            scratch.attended, norm(), call.some.row_of_token, rows},
                           attend));
  const LayerNorm& norm = pre_norm_ ? parts_.feed_forward_norm : parts_.attention_norm;
  TFB_RETURN_IF_ERROR(norm.Run(scratch.attended, scratch.g, execution, rows));
  return parts_.feed_forward.Run(
      scratch.g, pre_norm_ ? ConstTensorView() : ConstTensorView(scratch.g), scratch.y, feed, rows);
}

absl::Status DecoderBlock::PostNormBackward(const BackwardCall& call,
                                            const BackwardScratch& scratch,
                                            const Execution& execution) const {
  const Outputs& gradients = call.segment.parameter_gradients;
  Execution attend = execution, feed = execution;
  attend.kept = scratch.attention;
  feed.kept = scratch.feed_forward;
  const RowList& rows = call.some.rows;
  const TensorView dy = GradientOf(call);
  // Rows beside a list stay 0.
  const TensorView dg = rows.rows != nullptr ? dy : scratch.gradient;
  TFB_RETURN_IF_ERROR(
      gradients_.OfFeedForwardNorm(parts_, {scratch.y, dy, {}, dy, rows}, gradients, execution));
  TFB_RETURN_IF_ERROR(
      gradients_.OfFeedForward(parts_, {scratch.g, dy, dy, dg, rows}, gradients, feed));
  if (!call.context_gradient.empty()) {
    TFB_RETURN_IF_ERROR(Add(layer_.device, dg, call.context_gradient, dg, execution));
  }
  TFB_RETURN_IF_ERROR(gradients_.OfAttentionNorm(parts_, {scratch.attended, dg, {}, dg, rows},
                                                 gradients, execution));
  if (HasSome(call)) PlaceRows(call, dg, execution.pool);
  return attention_->Backward({call.segment,
                               InputOf(call),
                               dg,
                               HasSome(call) ? call.gradient : dg,
                               call.gradient,
                               norm(),
                               {},
                               {},
                               call.some.row_of_token,
                               rows},
                              attend);
}

absl::Status DecoderBlock::PreNormBackward(const BackwardCall& call, const BackwardScratch& scratch,
                                           const Execution& execution) const {
  const Outputs& gradients = call.segment.parameter_gradients;
  Execution attend = execution, feed = execution;
  attend.kept = scratch.attention;
  feed.kept = scratch.feed_forward;
  const RowList& rows = call.some.rows;
  const TensorView dh = GradientOf(call), dx = scratch.gradient;
  TFB_RETURN_IF_ERROR(
      gradients_.OfFeedForward(parts_, {scratch.g, dh, {}, dx, rows}, gradients, feed));
  if (!call.context_gradient.empty()) {
    TFB_RETURN_IF_ERROR(Add(layer_.device, dx, call.context_gradient, dx, execution));
  }
  TFB_RETURN_IF_ERROR(gradients_.OfFeedForwardNorm(parts_, {scratch.attended, dx, dh, dh, rows},
                                                   gradients, execution));
  if (HasSome(call)) PlaceRows(call, dh, execution.pool);
  const TensorView& of_input = HasSome(call) ? scratch.of_tokens : dx;
  TFB_RETURN_IF_ERROR(attention_->Backward({call.segment,
                                            scratch.x,
                                            dh,
                                            {},
                                            of_input,
                                            norm(),
                                            gradients_.gamma_of_attention(gradients),
                                            gradients_.beta_of_attention(gradients),
                                            call.some.row_of_token,
                                            rows},
                                           attend));
  return gradients_.OfAttentionNorm(
      parts_, {call.segment.input(), of_input, call.gradient, call.gradient}, gradients, execution);
}

}  // namespace tfb::layers
