#include "adaptive/decision_transformer/decision_transformer.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "adaptive/decision_transformer/decision_transformer_functors.h"
#include "attention/encoder_decoder/encoder_decoder.h"
#include "core/cuda/device_array.h"
#include "core/cuda/for_each.h"
#include "core/definition.h"
#include "core/layers/activation_rows.h"
#include "core/layers/attention/projected_attention.h"
#include "core/layers/copy_rows.h"
#include "core/layers/copy_tensor.h"
#include "core/layers/layer_definitions.h"
#include "core/layers/layer_norm.h"
#include "core/layers/layer_parameters.h"
#include "core/layers/matmul.h"
#include "core/layers/matmul_gradient.h"
#include "core/workspace.h"

namespace tfb::decision_transformer {
namespace {

TechniqueInfo Info() {
  TechniqueInfo info;
  info.name = "decision_transformer";
  info.family = "adaptive";
  info.title = "Decision Transformer";
  info.citation = "Chen et al. 2021, arXiv:2106.01345v2, section 3";
  info.input_kind = InputKind::kHidden;
  info.exactness = Exactness::kOwn;
  info.growth = 2;
  info.supports_noncausal = false;
  info.self_attention = true;
  return info;
}

// ---- The parts of the network, for the layer and the definition ----

constexpr int64_t kModalities = 3;

// One of the three kinds of token: the m-th has the tokens m, m + 3, ...
struct Modality {
  std::string input;  // "states"
  std::string embed;  // "embed.state"
  int64_t count;      // number of its tokens
  int64_t channels;
};
std::array<Modality, kModalities> ModalitiesOf(const Problem& problem,
                                               const DecisionTransformerOptions& options) {
  const int64_t tokens = problem.query_tokens;
  return {{{"returns", "embed.return", ReturnTokens(tokens), 1},
           {"states", "embed.state", StateTokens(tokens), options.state_dim},
           {"actions", "embed.action", ActionTokens(tokens), options.action_dim}}};
}

// A prediction from the hidden states of one modality's tokens.
struct Head {
  std::string output;  // "action"
  std::string name;    // "head.action"
  int64_t from;        // index of the modality
  int64_t count;       // number of that modality's tokens
  int64_t channels;
  Activation activation;
};
std::array<Head, 3> HeadsOf(const Problem& problem, const DecisionTransformerOptions& options) {
  const int64_t tokens = problem.query_tokens;
  const Activation of_action = options.action_tanh ? Activation::kTanh : Activation::kNone;
  return {{{"action", "head.action", 1, StateTokens(tokens), options.action_dim, of_action},
           {"state", "head.state", 2, ActionTokens(tokens), options.state_dim, Activation::kNone},
           {"return", "head.return", 2, ActionTokens(tokens), 1, Activation::kNone}}};
}

// Returns the tokens of modality m of [batch, tokens, channels].
template <class View>
View OfModality(const View& tokens, int64_t m, int64_t count) {
  return Slice(tokens, 1, m, count, kModalities);
}

// Returns the specs of all parameters but the GPT's.
std::vector<layers::ParameterSpec> ParameterSpecs(const Problem& problem,
                                                  const DecisionTransformerOptions& options) {
  const int64_t width = problem.model_dim();
  std::vector<layers::ParameterSpec> all;
  const auto add = [&all](const std::string& name, int64_t in, int64_t out) {
    all.push_back(layers::MatrixSpec(name + ".w", in, out));
    all.push_back({name + ".b", {out}, 0, all.back().deviation});
  };
  for (const Modality& m : ModalitiesOf(problem, options)) add(m.embed, m.channels, width);
  for (const Head& head : HeadsOf(problem, options)) add(head.name, width, head.channels);
  all.push_back({"embed.timestep", {options.max_timestep, width}, 0, 1});
  if (options.embed_norm) layers::AddSpecs(layers::NormSpecs("embed.norm", width), &all);
  return all;
}

Options OptionsOfGpt(const DecisionTransformerOptions& options) {
  return {{"part", "encoder"},
          {"block", "pre_norm"},
          {"layers", absl::StrCat(options.layers)},
          {"feed_forward_dim", absl::StrCat(options.feed_forward_dim)},
          {"activation", Name(options.activation)},
          {"recompute", options.recompute ? "true" : "false"}};
}

// ---- The layer ----

class DecisionTransformerLayer : public Layer {
 public:
  static absl::StatusOr<std::unique_ptr<Layer>> Create(const Problem& problem,
                                                       std::vector<TensorSpec> inputs,
                                                       std::vector<TensorSpec> outputs,
                                                       const DecisionTransformerOptions& options,
                                                       Device device, uint64_t seed) {
    std::unique_ptr<DecisionTransformerLayer> layer(new DecisionTransformerLayer(
        problem, std::move(inputs), std::move(outputs), options, device));
    TFB_ASSIGN_OR_RETURN(layer->gpt_, encoder_decoder::EncoderDecoder().Create(
                                          problem, OptionsOfGpt(options), device, seed));
    TFB_RETURN_IF_ERROR(
        layers::DrawParameters(ParameterSpecs(problem, options), seed, &layer->parameters_));
    layers::AddInnerParameters(*layer->gpt_, "", &layer->parameters_);
    return layer;
  }

  size_t workspace_bytes(int threads) const override {
    const int64_t width = problem().model_dim();
    size_t largest = std::max(gpt_->workspace_bytes(threads),
                              LayerNorm::workspace_bytes(device_, width, threads));
    const auto product = [&](int64_t count, int64_t in, int64_t out) {
      largest = std::max(largest,
                         MatMulWorkspaceBytes(device_, problem().batch * count, in, out, threads));
    };
    for (const Modality& m : modalities_) product(m.count, m.channels, width);
    for (const Head& head : heads_) product(head.count, width, head.channels);
    return largest + Workspace::Measure([this](Workspace& workspace) { LayOut(workspace); });
  }

  Cost cost() const override {
    Cost cost = gpt_->cost();
    double channels = 0;  // channels of all values and predictions
    for (const Modality& m : modalities_) channels += static_cast<double>(m.count * m.channels);
    for (const Head& head : heads_) channels += static_cast<double>(head.count * head.channels);
    if (cost.flops.has_value()) {
      *cost.flops += 2 * channels * static_cast<double>(problem().batch * problem().model_dim());
    }
    cost.bytes = TensorBytes();
    return cost;
  }

  std::map<std::string, double> statistics() const override { return gpt_->statistics(); }

  // ---- The backward pass. It embeds the inputs again, and keeps what the GPT keeps. ----

  absl::Status CheckBackward() const override { return gpt_->CheckBackward(); }
  size_t kept_bytes() const override { return gpt_->kept_bytes(); }
  size_t backward_workspace_bytes(int threads) const override {
    const int64_t width = problem().model_dim(), batch = problem().batch;
    size_t largest = std::max({workspace_bytes(threads), gpt_->backward_workspace_bytes(threads),
                               LayerNorm::backward_workspace_bytes(
                                   device_, batch * problem().query_tokens, width, threads)});
    const auto product = [&](int64_t count, int64_t in, int64_t out) {
      largest = std::max({largest, MatMulWorkspaceBytes(device_, batch * count, out, in, threads),
                          MatMulGradientWorkspaceBytes(device_, batch * count, in, out, threads)});
    };
    for (const Modality& m : modalities_) product(m.count, m.channels, width);
    for (const Head& head : heads_) product(head.count, width, head.channels);
    return largest +
           Workspace::Measure([this](Workspace& workspace) { LayOutBackward(workspace); });
  }
  // Each product of embeddings and heads has two for its gradients.
  Cost backward_cost() const override {
    Cost cost = gpt_->backward_cost();
    const Cost forward = this->cost(), of_gpt = gpt_->cost();
    if (cost.flops.has_value() && forward.flops.has_value() && of_gpt.flops.has_value()) {
      *cost.flops += 2 * (*forward.flops - *of_gpt.flops);
    }
    cost.bytes = 2 * TensorBytes() + static_cast<double>(kept_bytes());
    return cost;
  }
  std::map<std::string, std::string> stopped_gradients() const override {
    return gpt_->stopped_gradients();
  }
  std::vector<std::string> differentiable_outputs() const override {
    std::vector<std::string> names = {"out"};
    for (const Head& head : heads_) names.push_back(head.output);
    return names;
  }

 protected:
  absl::Status DoSetup(const Inputs& inputs, const Execution& execution) override {
    const auto packed = [this](const std::string& name) {
      return PackedMatrix::Create(device_, Parameter(name + ".w"), Parameter(name + ".b"));
    };
    for (int64_t m = 0; m < kModalities; ++m) {
      TFB_ASSIGN_OR_RETURN(embeddings_[m], packed(modalities_[m].embed));
    }
    for (size_t n = 0; n < heads_.size(); ++n) {
      TFB_ASSIGN_OR_RETURN(head_matrices_[n], packed(heads_[n].name));
    }
    TFB_ASSIGN_OR_RETURN(timesteps_, CopyFloats(device_, Parameter("embed.timestep")));
    if (options_.embed_norm) {
      TFB_ASSIGN_OR_RETURN(norm_, layers::MakeLayerNorm(device_, parameters_, "embed.norm"));
    }
    NamedTensors of_gpt;
    for (const auto& [name, tensor] : gpt_->parameters()) {
      of_gpt[name] = parameters_.at(name).Clone();
    }
    TFB_RETURN_IF_ERROR(gpt_->SetParameters(std::move(of_gpt)));
    Workspace workspace(execution.workspace);
    const Scratch scratch = LayOut(workspace);
    const Execution rest = {execution.pool, workspace.Rest(), execution.stream};
    TFB_RETURN_IF_ERROR(Embed(inputs, scratch, rest));
    return gpt_->Setup(GptInputs(inputs, scratch), rest);
  }

  absl::Status DoRun(const Inputs& inputs, const Outputs& outputs,
                     const Execution& execution) override {
    Workspace workspace(execution.workspace);
    const Scratch scratch = LayOut(workspace);
    const Execution rest = {execution.pool, workspace.Rest(), execution.stream};
    TFB_RETURN_IF_ERROR(Embed(inputs, scratch, rest));
    const TensorView out = outputs.Get("out");
    gpt_outputs_.Set("out", out);
    Execution of_gpt = rest;
    of_gpt.kept = execution.kept;
    TFB_RETURN_IF_ERROR(gpt_->Run(GptInputs(inputs, scratch), gpt_outputs_, of_gpt));
    for (size_t n = 0; n < heads_.size(); ++n) {
      const Head& head = heads_[n];
      MatMulCall call;
      call.x = OfModality(out, head.from, head.count);
      call.y = outputs.Get(head.output);
      call.activation = head.activation;
      if (call.y.empty() || call.y.num_elements() == 0) continue;
      TFB_RETURN_IF_ERROR(MatMul(head_matrices_[n], call, rest));
    }
    return absl::OkStatus();
  }

  absl::Status DoSetUpBackward(const Inputs& inputs, const Execution& execution) override {
    const auto transposed = [this](const std::string& name) {
      return PackedMatrix::CreateTransposed(device_, {Parameter(name + ".w")});
    };
    for (int64_t m = 0; m < kModalities; ++m) {
      TFB_ASSIGN_OR_RETURN(embeddings_transposed_[m], transposed(modalities_[m].embed));
    }
    for (size_t n = 0; n < heads_.size(); ++n) {
      TFB_ASSIGN_OR_RETURN(heads_transposed_[n], transposed(heads_[n].name));
    }
    gpt_gradients_ = gpt_->parameter_gradients();
    for (const TensorSpec& spec : gpt_gradients_) of_gpt_.parameter_gradients.Set(spec.name, {});
    Workspace workspace(execution.workspace);
    const Scratch scratch = LayOut(workspace);
    const Execution rest = {execution.pool, workspace.Rest(), execution.stream};
    TFB_RETURN_IF_ERROR(Embed(inputs, scratch, rest));
    return gpt_->SetUpBackward(GptInputs(inputs, scratch), rest);
  }

  absl::Status DoBackward(const BackwardCall& call, const Execution& execution) override {
    for (const auto& [name, gradient] : call.parameter_gradients) {
      if (!gradient.empty()) TFB_RETURN_IF_ERROR(ClearTensor(device_, gradient, execution));
    }
    Workspace workspace(execution.workspace);
    const BackwardScratch scratch = LayOutBackward(workspace);
    Execution rest = {execution.pool, workspace.Rest(), execution.stream};
    if (scratch.hidden.num_elements() == 0) return absl::OkStatus();
    // An empty one stands for zeros.
    TFB_RETURN_IF_ERROR(
        CopyTensor(device_, call.output_gradients.Get("out"), scratch.hidden, rest));
    for (size_t n = 0; n < heads_.size(); ++n) {
      TFB_RETURN_IF_ERROR(HeadBackward(n, call, scratch, rest));
    }
    // The GPT reads and writes the problem's dtype.
    if (problem().dtype != DType::kF32) {
      TFB_RETURN_IF_ERROR(CopyAllRows(device_, scratch.hidden, scratch.of_out, rest));
    }
    TFB_RETURN_IF_ERROR(EmbedTokens(call.inputs, scratch.forward, rest));
    if (options_.embed_norm) {
      TFB_RETURN_IF_ERROR(norm_.Run(scratch.forward.tokens, scratch.x, rest));
    }
    of_gpt_.inputs = GptInputs(call.inputs, {scratch.forward.tokens, scratch.x});
    of_gpt_.outputs.Set("out", call.outputs.Get("out"));
    of_gpt_.output_gradients.Set("out", scratch.of_out);
    of_gpt_.input_gradients.Set("x", scratch.of_x);
    for (const TensorSpec& spec : gpt_gradients_) {
      of_gpt_.parameter_gradients.Set(spec.name, call.parameter_gradients.Get(spec.name));
    }
    rest.kept = execution.kept;
    TFB_RETURN_IF_ERROR(gpt_->Backward(of_gpt_, rest));
    return EmbeddingsBackward(call, scratch, rest);
  }

 private:
  struct Scratch {
    TensorView tokens;  // f32 [batch, tokens, model_dim]
    TensorView x;       // the GPT's input, in the problem's dtype: `tokens` itself, if that is f32
  };

  DecisionTransformerLayer(const Problem& problem, std::vector<TensorSpec> inputs,
                           std::vector<TensorSpec> outputs,
                           const DecisionTransformerOptions& options, Device device)
      : Layer(problem, std::move(inputs), std::move(outputs)),
        options_(options),
        device_(device),
        modalities_(ModalitiesOf(problem, options)),
        heads_(HeadsOf(problem, options)) {
    for (const Modality& m : modalities_) names_of_embeddings_.emplace_back(m.embed);
    for (const Head& head : heads_) names_of_heads_.emplace_back(head.name);
  }

  ConstTensorView Parameter(const std::string& name) const { return parameters_.at(name).view(); }

  Scratch LayOut(Workspace& workspace) const {
    const Problem& p = problem();
    const Shape shape = {p.batch, p.query_tokens, p.model_dim()};
    Scratch scratch;
    scratch.tokens = TensorView(workspace.Take<float>(NumElements(shape)), DType::kF32, shape);
    scratch.x = scratch.tokens;
    if (p.dtype != DType::kF32) {
      scratch.x = TensorView(workspace.Take<uint16_t>(NumElements(shape)), p.dtype, shape);
    }
    return scratch;
  }

  struct BackwardScratch {
    Scratch forward;     // the tokens before their norm; x only where there is none
    TensorView x;        // the GPT's input, in the problem's dtype
    TensorView hidden;   // gradient of the hidden states, f32 [batch, tokens, model_dim]
    TensorView of_out;   // the same in the problem's dtype: `hidden` itself, if that is f32
    TensorView of_x;     // gradient of the GPT's input, in that dtype
    TensorView tokens;   // gradient of the tokens, f32
    float* predictions;  // of one head, then their gradients
    TokenChain chain;    // on CUDA
  };
  BackwardScratch LayOutBackward(Workspace& workspace) const {
    const Problem& p = problem();
    const Shape shape = {p.batch, p.query_tokens, p.model_dim()};
    const auto take = [&](DType dtype) {
      std::byte* memory = workspace.Take<std::byte>(NumElements(shape) * SizeOf(dtype));
      return TensorView(memory, dtype, shape);
    };
    BackwardScratch scratch;
    scratch.forward = LayOut(workspace);
    scratch.x = options_.embed_norm ? take(p.dtype) : scratch.forward.x;
    scratch.hidden = take(DType::kF32);
    scratch.of_out = p.dtype == DType::kF32 ? scratch.hidden : take(p.dtype);
    scratch.of_x = take(p.dtype);
    scratch.tokens = take(DType::kF32);
    int64_t largest = 0;
    for (const Head& head : heads_) {
      largest = std::max(largest, p.batch * head.count * head.channels);
    }
    scratch.predictions = workspace.Take<float>(largest);
    const int64_t links = device_ == Device::kCpu ? 0 : p.batch * p.query_tokens;
    scratch.chain.next = workspace.Take<int32_t>(links);
    scratch.chain.is_first = workspace.Take<int32_t>(links);
    return scratch;
  }

  // y = activation(h W + b):  du = dy activation'(u),  dW = h^T du,  db = sum du,  dh += du W^T
  absl::Status HeadBackward(size_t n, const BackwardCall& call, const BackwardScratch& scratch,
                            const Execution& execution) const {
    const Head& head = heads_[n];
    ConstTensorView du = call.output_gradients.Get(head.output);
    if (du.empty() || du.num_elements() == 0) return absl::OkStatus();
    const ConstTensorView h = OfModality(call.outputs.Get("out"), head.from, head.count);
    if (head.activation != Activation::kNone) {
      const TensorView u(scratch.predictions, DType::kF32, du.shape());
      TFB_RETURN_IF_ERROR(MatMul(head_matrices_[n], {h, {}, u}, execution));
      TFB_RETURN_IF_ERROR(MultiplyByDerivative(device_, head.activation, u, du, u, execution));
      du = u;
    }
    TFB_RETURN_IF_ERROR(MatMulGradient(device_,
                                       {h, du, call.parameter_gradients.Get(names_of_heads_[n].w),
                                        call.parameter_gradients.Get(names_of_heads_[n].b)},
                                       execution));
    const TensorView dh = OfModality(scratch.hidden, head.from, head.count);
    return MatMul(heads_transposed_[n], {du, dh, dh}, execution);
  }

  // Takes the gradient of the GPT's input through the norm, and then to values and parameters.
  absl::Status EmbeddingsBackward(const BackwardCall& call, const BackwardScratch& scratch,
                                  const Execution& execution) const {
    const Outputs& gradients = call.parameter_gradients;
    if (options_.embed_norm) {
      TFB_RETURN_IF_ERROR(norm_.Backward({scratch.forward.tokens,
                                          scratch.of_x,
                                          {},
                                          scratch.tokens,
                                          gradients.Get("embed.norm.gamma"),
                                          gradients.Get("embed.norm.beta")},
                                         execution));
    } else {
      TFB_RETURN_IF_ERROR(CopyAllRows(device_, scratch.of_x, scratch.tokens, execution));
    }
    for (int64_t m = 0; m < kModalities; ++m) {
      const Modality& modality = modalities_[m];
      if (modality.count == 0) continue;
      const TensorView of_tokens = OfModality(scratch.tokens, m, modality.count);
      TFB_RETURN_IF_ERROR(MatMulGradient(
          device_,
          {call.inputs.Get(modality.input), of_tokens, gradients.Get(names_of_embeddings_[m].w),
           gradients.Get(names_of_embeddings_[m].b)},
          execution));
      const TensorView of_values = call.input_gradients.Get(modality.input);
      if (of_values.empty()) continue;
      TFB_RETURN_IF_ERROR(MatMul(embeddings_transposed_[m], {of_tokens, {}, of_values}, execution));
    }
    return AddToTimesteps(call.inputs.Get("timesteps"), scratch, gradients.Get("embed.timestep"),
                          execution);
  }

  // Adds the tokens' gradients to the rows of their timesteps, in the order of the tokens. On the CPU a
  // task has some of the channels.
  absl::Status AddToTimesteps(const ConstTensorView& timesteps, const BackwardScratch& scratch,
                              const TensorView& table, const Execution& execution) const {
    constexpr int64_t kChannelsOfTask = 16;
    if (table.empty()) return absl::OkStatus();
    const TensorView& of_tokens = scratch.tokens;
    const RowsOfTimesteps rows = TableRowsOf(timesteps);
    const int64_t tokens = of_tokens.dim(0) * of_tokens.dim(1);
    if (device_ != Device::kCpu) {
      TFB_RETURN_IF_ERROR(
          ForEach(device_, tokens, LinkTokens{rows, tokens, scratch.chain}, execution));
      const AddChains add = {rows, scratch.chain, TensorRows(of_tokens).view(),
                             TensorRows(table).view()};
      return ForEachInRows(device_, tokens, of_tokens.dim(2), add, execution);
    }
    execution.pool->ParallelForRanges(
        of_tokens.dim(2), kChannelsOfTask, [&](int64_t begin, int64_t end, int) {
          for (int64_t row = 0; row < tokens; ++row) {
            const float* from = of_tokens.At<float>() + row * of_tokens.dim(2);
            float* to = table.MutableAt<float>(rows.Of(row));
            for (int64_t c = begin; c < end; ++c) to[c * table.stride(1)] += from[c];
          }
        });
    return absl::OkStatus();
  }

  // Embeds the inputs.
  absl::Status Embed(const Inputs& inputs, const Scratch& scratch, const Execution& execution) {
    TFB_RETURN_IF_ERROR(EmbedTokens(inputs, scratch, execution));
    return options_.embed_norm ? norm_.Run(scratch.tokens, scratch.x, execution) : absl::OkStatus();
  }
  // Does it without the norm. Each of the three products writes every third row of the tokens, added
  // to its timestep's row.
  absl::Status EmbedTokens(const Inputs& inputs, const Scratch& scratch,
                           const Execution& execution) const {
    if (scratch.tokens.num_elements() == 0) return absl::OkStatus();
    TFB_RETURN_IF_ERROR(EmbedTimesteps(inputs.Get("timesteps"), scratch.tokens, execution));
    for (int64_t m = 0; m < kModalities; ++m) {
      const int64_t count = modalities_[m].count;
      if (count == 0) continue;
      MatMulCall call;
      call.x = inputs.Get(modalities_[m].input);
      call.residual = OfModality(scratch.tokens, m, count);
      call.y = OfModality(options_.embed_norm ? scratch.tokens : scratch.x, m, count);
      TFB_RETURN_IF_ERROR(MatMul(embeddings_[m], call, execution));
    }
    return absl::OkStatus();
  }

  RowsOfTimesteps TableRowsOf(const ConstTensorView& timesteps) const {
    return {static_cast<const int32_t*>(timesteps.data),
            {timesteps.stride(0), timesteps.stride(1)},
            options_.max_timestep,
            problem().query_tokens};
  }

  absl::Status EmbedTimesteps(const ConstTensorView& timesteps, const TensorView& tokens,
                              const Execution& execution) const {
    const EmbeddingOfTimesteps embedding = {TableRowsOf(timesteps), timesteps_.data(),
                                            static_cast<float*>(tokens.mutable_data()),
                                            tokens.dim(2)};
    return ForEachInRows(device_, tokens.dim(0) * tokens.dim(1), tokens.dim(2), embedding,
                         execution);
  }

  const Inputs& GptInputs(const Inputs& inputs, const Scratch& scratch) {
    const ConstTensorView key_mask = inputs.Get("key_mask");
    Inputs& of_gpt = key_mask.empty() ? gpt_inputs_ : masked_gpt_inputs_;
    of_gpt.Set("x", scratch.x);
    if (!key_mask.empty()) of_gpt.Set("key_mask", key_mask);
    return of_gpt;
  }

  DecisionTransformerOptions options_;
  Device device_;
  std::array<Modality, kModalities> modalities_;
  std::array<Head, 3> heads_;
  std::array<PackedMatrix, kModalities> embeddings_;
  std::array<PackedMatrix, 3> head_matrices_;
  std::array<PackedMatrix, kModalities> embeddings_transposed_;
  std::array<PackedMatrix, 3> heads_transposed_;
  struct AffineNames {
    explicit AffineNames(const std::string& name) : w(name + ".w"), b(name + ".b") {}
    std::string w, b;
  };
  std::vector<AffineNames> names_of_embeddings_, names_of_heads_;
  DeviceArray<float> timesteps_;  // embed.timestep
  LayerNorm norm_;
  std::unique_ptr<Layer> gpt_;
  // The names are in here before a Run, which must not allocate.
  Inputs gpt_inputs_ = {{"x", {}}};
  Inputs masked_gpt_inputs_ = {{"x", {}}, {"key_mask", {}}};
  Outputs gpt_outputs_ = {{"out", {}}};
  BackwardCall of_gpt_ = {masked_gpt_inputs_, {{"out", {}}}, {{"out", {}}}, {{"x", {}}}, {}};
  std::vector<TensorSpec> gpt_gradients_;
};

// ---- The definition ----

class Network {
 public:
  Network(const Problem& problem, const DecisionTransformerOptions& options,
          const NamedTensors& parameters)
      : problem_(problem), options_(options), parameters_(parameters) {}

  // Returns the tokens, rounded where the GPT reads 16 bits.
  Tensor Tokens(const Inputs& inputs) const {
    const int64_t width = problem_.model_dim();
    const DoubleTensor table = Parameter("embed.timestep");
    const DoubleTensor timesteps(inputs.Get("timesteps"));
    const auto modalities = ModalitiesOf(problem_, options_);
    std::array<DoubleTensor, kModalities> values;
    for (int64_t m = 0; m < kModalities; ++m) {
      values[m] = DoubleTensor(inputs.Get(modalities[m].input));
    }
    Tensor tokens(ReadDType(), {problem_.batch, problem_.query_tokens, width});
    std::vector<double> token(width);
    for (int64_t b = 0; b < problem_.batch; ++b) {
      for (int64_t i = 0; i < problem_.query_tokens; ++i) {
        const int64_t m = i % kModalities, t = i / kModalities;
        Affine(values[m].Row(b, t), modalities[m].embed, &token);
        const double last = static_cast<double>(options_.max_timestep - 1);
        const double timestep =
            std::clamp(timesteps.at(b * ReturnTokens(problem_.query_tokens) + t), 0.0, last);
        for (int64_t c = 0; c < width; ++c) {
          token[c] += table.Row(static_cast<int64_t>(timestep))[c];
        }
        if (options_.embed_norm) Normalize(&token);
        for (int64_t c = 0; c < width; ++c) {
          tokens.view().Set(tokens.view().Offset(b, i, c), token[c]);
        }
      }
    }
    return tokens;
  }

  // Returns the dtype in which a part of the network reads another's result.
  DType ReadDType() const { return problem_.dtype == DType::kF32 ? DType::kF64 : problem_.dtype; }

  // Returns the predictions from hidden states [batch, tokens, model_dim].
  Tensor Predictions(const Head& head, const ConstTensorView& hidden) const {
    const DoubleTensor h(hidden);
    Tensor predictions(DType::kF64, {problem_.batch, head.count, head.channels});
    std::vector<double> y(head.channels);
    for (int64_t b = 0; b < problem_.batch; ++b) {
      for (int64_t t = 0; t < head.count; ++t) {
        Affine(h.Row(b, kModalities * t + head.from), head.name, &y);
        for (int64_t c = 0; c < head.channels; ++c) {
          const double value = head.activation == Activation::kTanh ? std::tanh(y[c]) : y[c];
          *predictions.view().MutableAt<double>(b, t, c) = value;
        }
      }
    }
    return predictions;
  }

 private:
  DoubleTensor Parameter(const std::string& name) const {
    return DoubleTensor(parameters_.at(name).view());
  }

  // Computes y = x W + b.
  void Affine(const double* x, const std::string& name, std::vector<double>* y) const {
    const DoubleTensor w = Parameter(name + ".w"), b = Parameter(name + ".b");
    const int64_t out = b.size(), in = w.size() / out;
    std::copy_n(b.data(), out, y->begin());
    for (int64_t k = 0; k < in; ++k) {
      for (int64_t c = 0; c < out; ++c) (*y)[c] += x[k] * w.Row(k)[c];
    }
  }

  void Normalize(std::vector<double>* token) const {
    layers::DefineNormOfRow(Parameter("embed.norm.gamma").data(),
                            Parameter("embed.norm.beta").data(),
                            static_cast<int64_t>(token->size()), token->data());
  }

  const Problem& problem_;
  const DecisionTransformerOptions& options_;
  const NamedTensors& parameters_;
};

}  // namespace

std::vector<double> ReturnsToGo(absl::Span<const double> rewards) {
  std::vector<double> returns(rewards.begin(), rewards.end());
  for (size_t t = returns.size(); t-- > 1;) returns[t - 1] += returns[t];
  return returns;
}

namespace {

class DecisionTransformer : public TechniqueOf<DecisionTransformerOptions> {
 public:
  DecisionTransformer() : TechniqueOf(Info()) {}

  absl::StatusOr<TechniqueSpec> Counterpart(const Problem&, const Options& options) const override {
    TFB_ASSIGN_OR_RETURN(Options canonical, Canonical(options));
    return TechniqueSpec{info().name, std::move(canonical)};
  }

 private:
  std::vector<TensorSpec> ReadTensors(const Problem& problem,
                                      const DecisionTransformerOptions& options) const override {
    std::vector<TensorSpec> tensors;
    for (const Modality& m : ModalitiesOf(problem, options)) {
      tensors.push_back({m.input, {problem.batch, m.count, m.channels}, problem.dtype});
    }
    tensors.push_back(
        {"timesteps", {problem.batch, ReturnTokens(problem.query_tokens)}, DType::kI32});
    tensors.push_back({"key_mask", {problem.batch, problem.kv_tokens}, DType::kU8, true});
    return tensors;
  }

  std::vector<TensorSpec> WrittenTensors(const Problem& problem,
                                         const DecisionTransformerOptions& options) const override {
    std::vector<TensorSpec> tensors = HiddenOutputs(problem);
    for (const Head& head : HeadsOf(problem, options)) {
      tensors.push_back(
          {head.output, {problem.batch, head.count, head.channels}, problem.dtype, true});
    }
    return tensors;
  }

  absl::StatusOr<std::unique_ptr<Layer>> MakeLayer(const Problem& problem,
                                                   const DecisionTransformerOptions& options,
                                                   Device device, uint64_t seed) const override {
    return DecisionTransformerLayer::Create(problem, ReadTensors(problem, options),
                                            WrittenTensors(problem, options), options, device,
                                            seed);
  }

  absl::Status Definition(const Problem& problem, const DecisionTransformerOptions& options,
                          const NamedTensors& parameters, const Inputs& inputs,
                          const DefinitionRequest& request, NamedTensors* outputs) const override {
    const Network network(problem, options, parameters);
    const Tensor tokens = network.Tokens(inputs);
    Inputs of_gpt = {{"x", tokens.view()}};
    if (const ConstTensorView mask = inputs.Get("key_mask"); !mask.empty()) {
      of_gpt.Set("key_mask", mask);
    }
    TFB_RETURN_IF_ERROR(encoder_decoder::EncoderDecoder().Define(
        problem, OptionsOfGpt(options), parameters, of_gpt, request.OfPart(), outputs));
    const Tensor hidden = outputs->at("out").CloneAs(network.ReadDType());
    for (const Head& head : HeadsOf(problem, options)) {
      (*outputs)[head.output] = network.Predictions(head, hidden.view());
    }
    return absl::OkStatus();
  }
};

const bool registered = RegisterTechnique<DecisionTransformer>();

}  // namespace
}  // namespace tfb::decision_transformer
