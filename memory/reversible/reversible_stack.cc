#include "memory/reversible/reversible_stack.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/layers/attention/projected_attention.h"
#include "core/layers/feed_forward_dim.h"
#include "core/layers/matmul.h"
#include "core/random.h"
#include "core/status.h"

namespace tfb::reversible {
namespace {

std::vector<layers::ParameterSpec> BlockParameters(const std::string& prefix, int64_t width,
                                                   int64_t inner) {
  std::vector<layers::ParameterSpec> specs = layers::FeedForwardSpecs(prefix + "g", width, inner);
  for (const char* norm : {"f_norm", "g_norm"}) {
    layers::AddSpecs(layers::NormSpecs(prefix + norm, width), &specs);
  }
  return specs;
}

absl::Status OfF(const TechniqueSpec& f, const absl::Status& status) {
  return absl::Status(status.code(),
                      absl::StrCat("f ", ToBracketedString(f), ": ", status.message()));
}

// Creates the layer of f, if f writes a hidden state.
absl::StatusOr<std::unique_ptr<Layer>> CreateF(const TechniqueSpec& f, const Problem& problem,
                                               Device device, uint64_t seed) {
  TFB_ASSIGN_OR_RETURN(const Technique* technique, Registry::Global().Find(f.technique));
  auto layer = technique->Create(problem, f.options, device, seed);
  if (!layer.ok()) return OfF(f, layer.status());
  const Shape wanted = HiddenOutputs(problem)[0].shape;
  const TensorSpec& out = (*layer)->outputs()[0];
  if (out.shape != wanted) {
    return OfF(f, absl::InvalidArgumentError(absl::StrCat("its out is ", ShapeString(out.shape),
                                                          "; allowed is ", ShapeString(wanted))));
  }
  return layer;
}

}  // namespace

std::string BlockPrefix(int64_t block) { return absl::StrCat("layer", block, "."); }

layers::FurtherInputs InputsOfF(const ReversibleOptions& options, const Problem& problem,
                                int64_t block) {
  return layers::FurtherInputs(options.f.Of(block), problem, {"x"},
                               {"", BlockPrefix(block) + "f."});
}

absl::StatusOr<ReversibleStack> ReversibleStack::Create(const Problem& problem,
                                                        const ReversibleOptions& options,
                                                        Device device, uint64_t seed,
                                                        NamedTensors* parameters) {
  ReversibleStack stack;
  stack.problem_ = problem;
  stack.options_ = options;
  stack.device_ = device;
  const int64_t width = problem.model_dim();
  for (int64_t n = 0; n < options.layers; ++n) {
    const std::string prefix = BlockPrefix(n);
    TFB_RETURN_IF_ERROR(layers::DrawParameters(
        BlockParameters(prefix, width, FeedForwardDim(options.feed_forward_dim, width)), seed,
        parameters));
    Block& block = stack.blocks_.emplace_back(prefix);
    TFB_ASSIGN_OR_RETURN(block.f, CreateF(options.f.Of(n), problem, device,
                                          RandomStream(seed, absl::StrCat(prefix, "f")).Bits(0)));
    layers::AddInnerParameters(*block.f, absl::StrCat(prefix, "f."), parameters);
    block.further = InputsOfF(options, problem, n);
    for (const TensorSpec& spec : block.f->inputs()) block.f_inputs.Set(spec.name, {});
    block.f_outputs.Set("out", {});
    BackwardCall& call = block.f_call;
    call.inputs = block.f_inputs;
    call.outputs.Set("out", {});
    call.output_gradients.Set("out", {});
    for (const TensorSpec& spec : block.f->input_gradients()) {
      call.input_gradients.Set(spec.name, {});
    }
    for (const TensorSpec& spec : block.f->parameter_gradients()) {
      call.parameter_gradients.Set(spec.name, {});
      block.f_parameters.push_back(absl::StrCat(prefix, "f.", spec.name));
    }
  }
  std::vector<std::pair<const layers::FurtherInputs*, const Layer*>> further;
  for (const Block& block : stack.blocks_) further.emplace_back(&block.further, block.f.get());
  stack.further_differentiate_ = layers::FurtherInputs::CheckBackward(further);
  return stack;
}

absl::Status ReversibleStack::Setup(const NamedTensors& parameters, const Streams& streams,
                                    const Inputs& inputs, const Execution& execution) {
  for (int64_t n = 0; n < blocks(); ++n) {
    Block& block = blocks_[n];
    const std::string prefix = BlockPrefix(n);
    TFB_ASSIGN_OR_RETURN(block.f_norm,
                         layers::MakeLayerNorm(device_, parameters, prefix + "f_norm"));
    TFB_ASSIGN_OR_RETURN(block.g_norm,
                         layers::MakeLayerNorm(device_, parameters, prefix + "g_norm"));
    TFB_ASSIGN_OR_RETURN(
        block.g, layers::MakeFeedForward(device_, parameters, prefix + "g", options_.activation));
    TFB_RETURN_IF_ERROR(
        block.f->SetParameters(layers::WithoutPrefix(parameters, absl::StrCat(prefix, "f."))));
    TFB_RETURN_IF_ERROR(AddF(block, 1, streams, inputs, /*sets_up=*/true, execution));
    TFB_RETURN_IF_ERROR(AddG(block, 1, streams, execution));
  }
  return absl::OkStatus();
}

int64_t ReversibleStack::inner_dim() const {
  return FeedForwardDim(options_.feed_forward_dim, problem_.model_dim());
}

int64_t ReversibleStack::chunk_tokens() const {
  return std::max<int64_t>((problem_.query_tokens + options_.chunks - 1) / options_.chunks, 1);
}

ReversibleStack::Scratch ReversibleStack::LayOut(int64_t tokens, DType dtype,
                                                 Workspace& workspace) const {
  const Shape shape = {problem_.batch, tokens, problem_.model_dim()};
  const auto take = [&] {
    return TensorView(workspace.Take<std::byte>(NumElements(shape) * SizeOf(dtype)), dtype, shape);
  };
  Scratch scratch;
  scratch.normalized = take();
  scratch.update = take();
  return scratch;
}

size_t ReversibleStack::workspace_bytes(int threads) const {
  const int64_t width = problem_.model_dim(), tokens = chunk_tokens();
  const size_t norm = LayerNorm::workspace_bytes(device_, width, threads);
  size_t f = norm;
  for (const Block& block : blocks_) f = std::max(f, block.f->workspace_bytes(threads));
  const size_t g =
      std::max(norm, FeedForward::workspace_bytes(device_, problem_.batch * tokens,
                                                  {width, inner_dim(), width}, threads));
  const auto scratch = [&](int64_t count, DType dtype) {
    return Workspace::Measure([&](Workspace& workspace) { LayOut(count, dtype, workspace); });
  };
  return std::max(f + scratch(problem_.query_tokens, problem_.dtype),
                  g + scratch(tokens, DType::kF32));
}

// first += sign F(second). Setup has set up f before.
absl::Status ReversibleStack::AddF(Block& block, float sign, const Streams& streams,
                                   const Inputs& inputs, bool sets_up, const Execution& execution) {
  Workspace workspace(execution.workspace);
  const Scratch scratch = LayOut(problem_.query_tokens, problem_.dtype, workspace);
  Execution rest = execution;
  rest.workspace = workspace.Rest();
  TFB_RETURN_IF_ERROR(block.f_norm.Run(streams.second, scratch.normalized, rest));
  block.f_inputs.Set("x", scratch.normalized);
  for (const auto& [name, view] : block.further.From(inputs)) block.f_inputs.Set(name, view);
  block.f_outputs.Set("out", scratch.update);
  if (sets_up) TFB_RETURN_IF_ERROR(block.f->Setup(block.f_inputs, rest));
  TFB_RETURN_IF_ERROR(block.f->Run(block.f_inputs, block.f_outputs, rest));
  return AddScaled(device_, 1, streams.first, sign, scratch.update, streams.first, rest);
}

// second += sign G(first), for some tokens at a time.
absl::Status ReversibleStack::AddG(const Block& block, float sign, const Streams& streams,
                                   const Execution& execution) const {
  for (int64_t begin = 0; begin < problem_.query_tokens; begin += chunk_tokens()) {
    const int64_t tokens = std::min(chunk_tokens(), problem_.query_tokens - begin);
    Workspace workspace(execution.workspace);
    const Scratch scratch = LayOut(tokens, DType::kF32, workspace);
    Execution rest = execution;
    rest.workspace = workspace.Rest();
    const TensorView second = Slice(streams.second, 1, begin, tokens);
    TFB_RETURN_IF_ERROR(
        block.g_norm.Run(Slice(streams.first, 1, begin, tokens), scratch.normalized, rest));
    TFB_RETURN_IF_ERROR(block.g.Run(scratch.normalized, {}, scratch.update, rest));
    TFB_RETURN_IF_ERROR(AddScaled(device_, 1, second, sign, scratch.update, second, rest));
  }
  return absl::OkStatus();
}

absl::Status ReversibleStack::Forward(const Streams& streams, const Inputs& inputs,
                                      const Execution& execution) {
  for (Block& block : blocks_) {
    TFB_RETURN_IF_ERROR(AddF(block, 1, streams, inputs, /*sets_up=*/false, execution));
    TFB_RETURN_IF_ERROR(AddG(block, 1, streams, execution));
  }
  return absl::OkStatus();
}

absl::Status ReversibleStack::Inverse(const Streams& streams, const Inputs& inputs,
                                      const Execution& execution) {
  for (int64_t n = blocks() - 1; n >= 0; --n) {
    TFB_RETURN_IF_ERROR(AddG(blocks_[n], -1, streams, execution));
    TFB_RETURN_IF_ERROR(AddF(blocks_[n], -1, streams, inputs, /*sets_up=*/false, execution));
  }
  return absl::OkStatus();
}

// ---- The backward pass ----

absl::Status ReversibleStack::CheckBackward() const {
  for (const Block& block : blocks_) TFB_RETURN_IF_ERROR(block.f->CheckBackward());
  return further_differentiate_;
}

ReversibleStack::BackwardScratch ReversibleStack::LayOutBackward(int64_t tokens, DType dtype,
                                                                 size_t kept_bytes,
                                                                 Workspace& workspace) const {
  BackwardScratch scratch;
  scratch.forward = LayOut(tokens, dtype, workspace);
  const Scratch gradients = LayOut(tokens, dtype, workspace);
  scratch.of_normalized = gradients.normalized;
  scratch.of_update = gradients.update;
  scratch.kept =
      absl::MakeSpan(workspace.Take<std::byte>(static_cast<int64_t>(kept_bytes)), kept_bytes);
  return scratch;
}

size_t ReversibleStack::g_kept_bytes() const {
  const int64_t width = problem_.model_dim();
  return FeedForward::kept_bytes(problem_.batch * chunk_tokens(), {width, inner_dim(), width});
}

size_t ReversibleStack::backward_workspace_bytes(int threads) const {
  const int64_t width = problem_.model_dim(), tokens = chunk_tokens();
  const int64_t all_rows = problem_.batch * problem_.query_tokens, rows = problem_.batch * tokens;
  const FeedForward::Sizes sizes = {width, inner_dim(), width};
  const size_t norm =
      std::max(LayerNorm::workspace_bytes(device_, width, threads),
               LayerNorm::backward_workspace_bytes(device_, all_rows, width, threads));
  const auto scratch = [&](int64_t count, DType dtype, size_t kept) {
    return Workspace::Measure(
        [&](Workspace& workspace) { LayOutBackward(count, dtype, kept, workspace); });
  };
  size_t largest = scratch(tokens, DType::kF32, g_kept_bytes()) +
                   std::max({norm, FeedForward::workspace_bytes(device_, rows, sizes, threads),
                             FeedForward::backward_workspace_bytes(device_, rows, sizes, threads)});
  for (const Block& block : blocks_) {
    largest =
        std::max(largest, scratch(problem_.query_tokens, problem_.dtype, block.f->kept_bytes()) +
                              std::max({norm, block.f->workspace_bytes(threads),
                                        block.f->backward_workspace_bytes(threads)}));
  }
  return largest;
}

absl::Status ReversibleStack::SetUpBackward(const NamedTensors& parameters,
                                            const ConstTensorView& x, const Inputs& inputs,
                                            const Execution& execution) {
  for (int64_t n = 0; n < blocks(); ++n) {
    Block& block = blocks_[n];
    const std::string prefix = BlockPrefix(n);
    TFB_RETURN_IF_ERROR(block.g.SetUpBackward(layers::FindParameter(parameters, prefix + "g.w1"),
                                              layers::FindParameter(parameters, prefix + "g.w2")));
    Workspace workspace(execution.workspace);
    const Scratch scratch = LayOut(problem_.query_tokens, problem_.dtype, workspace);
    Execution rest = execution;
    rest.workspace = workspace.Rest();
    TFB_RETURN_IF_ERROR(block.f_norm.Run(x, scratch.normalized, rest));
    block.f_inputs.Set("x", scratch.normalized);
    for (const auto& [name, view] : block.further.From(inputs)) block.f_inputs.Set(name, view);
    TFB_RETURN_IF_ERROR(block.f->SetUpBackward(block.f_inputs, rest));
  }
  return absl::OkStatus();
}

// With x_1, x_2 and y_1, y_2 as in reversible.h, and dy their gradients:
//   dx_1 = dy_1 + G'(y_1)^T dy_2,   dx_2 = dy_2 + F'(x_2)^T dx_1
absl::Status ReversibleStack::Backward(const Streams& streams, const Streams& gradients,
                                       const BackwardCall& call, const Execution& execution) {
  for (int64_t n = blocks() - 1; n >= 0; --n) {
    TFB_RETURN_IF_ERROR(BackwardG(blocks_[n], streams, gradients, call, execution));
    TFB_RETURN_IF_ERROR(BackwardF(blocks_[n], streams, gradients, call, execution));
  }
  return absl::OkStatus();
}

absl::Status ReversibleStack::BackwardG(Block& block, const Streams& streams,
                                        const Streams& gradients, const BackwardCall& call,
                                        const Execution& execution) const {
  const Outputs& parameters = call.parameter_gradients;
  // A sequence without tokens is one empty chunk, whose gradients of parameters are 0.
  const int64_t all_tokens = std::max<int64_t>(problem_.query_tokens, 1);
  for (int64_t begin = 0; begin < all_tokens; begin += chunk_tokens()) {
    const int64_t tokens = std::min(chunk_tokens(), problem_.query_tokens - begin);
    const auto part = [&](const TensorView& view) { return Slice(view, 1, begin, tokens); };
    const TensorView first = part(streams.first), second = part(streams.second);
    const TensorView of_first = part(gradients.first), of_second = part(gradients.second);
    Workspace workspace(execution.workspace);
    const BackwardScratch scratch = LayOutBackward(tokens, DType::kF32, g_kept_bytes(), workspace);
    Execution rest = execution;
    rest.workspace = workspace.Rest();
    rest.kept = scratch.kept;
    const TensorView normalized = scratch.forward.normalized, update = scratch.forward.update;
    TFB_RETURN_IF_ERROR(block.g_norm.Run(first, normalized, rest));
    TFB_RETURN_IF_ERROR(block.g.Run(normalized, {}, update, rest));
    TFB_RETURN_IF_ERROR(AddScaled(device_, 1, second, -1, update, second, rest));
    const bool adds = begin > 0;
    TFB_RETURN_IF_ERROR(block.g.Backward({normalized,
                                          of_second,
                                          {},
                                          scratch.of_normalized,
                                          parameters.Get(block.g_names.w1),
                                          parameters.Get(block.g_names.b1),
                                          parameters.Get(block.g_names.w2),
                                          parameters.Get(block.g_names.b2),
                                          adds},
                                         rest));
    TFB_RETURN_IF_ERROR(block.g_norm.Backward(
        {first, scratch.of_normalized, of_first, of_first, parameters.Get(block.g_norm_names.gamma),
         parameters.Get(block.g_norm_names.beta), adds},
        rest));
  }
  return absl::OkStatus();
}

absl::Status ReversibleStack::BackwardF(Block& block, const Streams& streams,
                                        const Streams& gradients, const BackwardCall& call,
                                        const Execution& execution) const {
  Workspace workspace(execution.workspace);
  const BackwardScratch scratch =
      LayOutBackward(problem_.query_tokens, problem_.dtype, block.f->kept_bytes(), workspace);
  Execution rest = execution;
  rest.workspace = workspace.Rest();
  rest.kept = scratch.kept;
  const TensorView normalized = scratch.forward.normalized, update = scratch.forward.update;
  TFB_RETURN_IF_ERROR(block.f_norm.Run(streams.second, normalized, rest));
  block.f_inputs.Set("x", normalized);
  for (const auto& [name, view] : block.further.From(call.inputs)) block.f_inputs.Set(name, view);
  block.f_outputs.Set("out", update);
  TFB_RETURN_IF_ERROR(block.f->Run(block.f_inputs, block.f_outputs, rest));
  TFB_RETURN_IF_ERROR(AddScaled(device_, 1, streams.first, -1, update, streams.first, rest));

  TFB_RETURN_IF_ERROR(
      AddScaled(device_, 1, gradients.first, 0, gradients.first, scratch.of_update, rest));
  BackwardCall& of_f = block.f_call;
  for (const auto& [name, view] : block.f_inputs) of_f.inputs.Set(name, view);
  of_f.outputs.Set("out", update);
  of_f.output_gradients.Set("out", scratch.of_update);
  for (const auto& [name, view] : block.further.GradientsFrom(call.input_gradients)) {
    if (of_f.input_gradients.Find(name) != nullptr) of_f.input_gradients.Set(name, view);
  }
  of_f.input_gradients.Set("x", scratch.of_normalized);
  auto outside = block.f_parameters.begin();
  for (const auto& [name, view] : of_f.parameter_gradients) {
    of_f.parameter_gradients.Set(name, call.parameter_gradients.Get(*outside++));
  }
  TFB_RETURN_IF_ERROR(block.f->Backward(of_f, rest));
  return block.f_norm.Backward(
      {streams.second, scratch.of_normalized, gradients.second, gradients.second,
       call.parameter_gradients.Get(block.f_norm_names.gamma),
       call.parameter_gradients.Get(block.f_norm_names.beta)},
      rest);
}

std::map<std::string, std::string> ReversibleStack::stopped_gradients() const {
  std::map<std::string, std::string> stopped;
  for (int64_t n = 0; n < blocks(); ++n) {
    const Block& block = blocks_[n];
    for (const auto& [name, reason] : block.f->stopped_gradients()) {
      const std::string outside = block.further.Outside(name);
      stopped[outside.empty() ? absl::StrCat(BlockPrefix(n), "f.", name) : outside] = reason;
    }
  }
  return stopped;
}

std::optional<double> ReversibleStack::backward_flops() const {
  const std::optional<double> again = flops();
  if (!again.has_value()) return std::nullopt;
  const double rows = static_cast<double>(problem_.batch * problem_.query_tokens);
  const double width = static_cast<double>(problem_.model_dim());
  double flops = *again;
  for (const Block& block : blocks_) {
    const Cost f = block.f->backward_cost();
    if (!f.flops.has_value()) return std::nullopt;
    flops += *f.flops + 8 * rows * width * static_cast<double>(inner_dim());
  }
  return flops;
}

std::optional<double> ReversibleStack::flops() const {
  const double rows = static_cast<double>(problem_.batch * problem_.query_tokens);
  const double width = static_cast<double>(problem_.model_dim());
  double flops = 0;
  for (const Block& block : blocks_) {
    const Cost f = block.f->cost();
    if (!f.flops.has_value()) return std::nullopt;
    flops += *f.flops + 4 * rows * width * static_cast<double>(inner_dim());
  }
  return flops;
}

}  // namespace tfb::reversible
