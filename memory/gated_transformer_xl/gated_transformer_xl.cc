#include "memory/gated_transformer_xl/gated_transformer_xl.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/layers/activation_rows.h"
#include "core/layers/attention/relative_attention.h"
#include "core/layers/gate.h"
#include "core/layers/layer_norm.h"
#include "core/layers/layer_parameters.h"
#include "core/layers/stack/block.h"
#include "core/layers/stack/decoder_block.h"
#include "core/layers/stack/relative_stack.h"
#include "core/layers/stack/stack_definition.h"
#include "core/workspace.h"

namespace tfb::gated_transformer_xl {
namespace {

using layers::LayerPrefix;
using layers::Rows;

using GateOption = GatedTransformerXlOptions::Gate;

const bool registered = RegisterTechnique<GatedTransformerXl>();

TechniqueInfo Info() {
  TechniqueInfo info;
  info.name = "gated_transformer_xl";
  info.family = "memory";
  info.title = "Gated Transformer-XL (GTrXL)";
  info.citation = "Parisotto et al. 2020, arXiv:1910.06764v1, section 3";
  info.input_kind = InputKind::kHidden;
  info.exactness = Exactness::kOwn;
  info.budget_option = "memory";
  info.growth = 1;
  info.supports_noncausal = false;
  return info;
}

// ---- Parameters ----

constexpr const char* kGateNames[] = {"attention_gate.", "ff_gate."};
constexpr const char* kMatrixBiases[] = {"b_r", "b_z", "b_h"};

std::vector<std::string> GateMatrices(GateOption gate) {
  switch (gate) {
    case GateOption::kGru:
      return {"w_r", "w_z", "w_g", "u_r", "u_z", "u_g"};
    case GateOption::kSigmoidTanh:
      return {"w_g", "u_g"};
    case GateOption::kSum:
      return {};
    default:
      return {"w_g"};
  }
}
bool HasBias(GateOption gate) { return gate != GateOption::kInput && gate != GateOption::kSum; }

std::vector<layers::ParameterSpec> ParametersOf(const layers::StackSizes& sizes,
                                                const GatedTransformerXlOptions& options) {
  std::vector<layers::ParameterSpec> specs = layers::StackParameters(sizes);
  for (int64_t n = 0; n < sizes.layers; ++n) {
    for (const char* gate : kGateNames) {
      const std::string prefix = LayerPrefix(n) + gate;
      for (const std::string& matrix : GateMatrices(options.gate)) {
        specs.push_back(layers::MatrixSpec(prefix + matrix, sizes.width(), sizes.width()));
      }
      if (HasBias(options.gate)) {
        specs.push_back({prefix + "b_g", {sizes.width()}, options.gate_bias, 0});
      }
      for (const char* bias : kMatrixBiases) {
        const double deviation = 1 / std::sqrt(static_cast<double>(sizes.width()));
        if (options.gate_biases) specs.push_back({prefix + bias, {sizes.width()}, 0, deviation});
      }
    }
  }
  return specs;
}

// ---- The layer ----

std::optional<GateKind> KindOf(GateOption gate) {
  switch (gate) {
    case GateOption::kGru:
      return GateKind::kGru;
    case GateOption::kInput:
      return GateKind::kInput;
    case GateOption::kOutput:
      return GateKind::kOutput;
    case GateOption::kHighway:
      return GateKind::kHighway;
    case GateOption::kSigmoidTanh:
      return GateKind::kSigmoidTanh;
    case GateOption::kSum:
      break;
  }
  return std::nullopt;
}

// Returns the FLOPs beside Transformer-XL's: the gates' products, and in a Run those of keys and
// values that are made a second time.
layers::RelativeState::MoreFlops MoreFlops(const Problem& problem,
                                           const GatedTransformerXlOptions& options) {
  const double rows = static_cast<double>(problem.batch * problem.query_tokens);
  const double width = static_cast<double>(problem.model_dim());
  const double matrices = static_cast<double>(2 * GateMatrices(options.gate).size());
  const double projections = options.normalise_memory ? 0 : 2;
  const double of_matrix = 2 * rows * static_cast<double>(options.layers) * width * width;
  return {of_matrix * (matrices + projections), 3 * of_matrix * matrices};
}

// The names of a gate's parameters, for their gradients.
struct GateNames {
  explicit GateNames(const std::string& gate)
      : w_r(gate + "w_r"),
        w_z(gate + "w_z"),
        w_g(gate + "w_g"),
        u_r(gate + "u_r"),
        u_z(gate + "u_z"),
        u_g(gate + "u_g"),
        b_g(gate + "b_g"),
        b_r(gate + "b_r"),
        b_z(gate + "b_z"),
        b_h(gate + "b_h") {}
  Gate::ParameterGradients Of(const Outputs& all) const {
    return {all.Get(w_r), all.Get(w_z), all.Get(w_g), all.Get(u_r), all.Get(u_z),
            all.Get(u_g), all.Get(b_g), all.Get(b_r), all.Get(b_z), all.Get(b_h)};
  }

  std::string w_r, w_z, w_g, u_r, u_z, u_g, b_g, b_r, b_z, b_h;
};

class GatedBlock : public layers::Block {
 public:
  GatedBlock(const layers::LayerOfStack& layer, const GatedTransformerXlOptions& options,
             std::unique_ptr<layers::TransformerXlAttention> attention)
      : layer_(layer),
        options_(options),
        kind_(KindOf(options.gate)),
        attention_(std::move(attention)),
        gradients_(layer.n),
        gate_names_{GateNames(LayerPrefix(layer.n) + kGateNames[0]),
                    GateNames(LayerPrefix(layer.n) + kGateNames[1])} {}

  absl::Status Setup(const NamedTensors& parameters, const layers::Distances& distances,
                     const Execution& execution) override {
    for (size_t g = 0; g < gates_.size() && kind_.has_value(); ++g) {
      TFB_ASSIGN_OR_RETURN(gates_[g],
                           Gate::Create(layer_.device, *kind_, ParametersOfGate(parameters, g)));
    }
    TFB_RETURN_IF_ERROR(attention_->Setup(parameters, distances, execution));
    TFB_ASSIGN_OR_RETURN(parts_, layers::Sublayers::Create(layer_, parameters, activation()));
    return absl::OkStatus();
  }

  absl::Status Recall(const Inputs& given, const Execution& execution) override {
    return attention_->Recall(given, norm(), execution);
  }

  absl::Status Run(const Call& call, const Execution& execution) override {
    Workspace workspace(execution.workspace);
    const Scratch scratch = LayOut(call.state.num_elements(), workspace);
    const TensorView normalized(scratch.normalized, DType::kF32, call.state.shape());
    const TensorView update(scratch.update, DType::kF32, call.state.shape());
    Execution rest = execution;
    rest.workspace = workspace.Rest();
    layers::RelativeAttention& attention = attention_->own();

    TFB_RETURN_IF_ERROR(parts_.attention_norm.Run(call.input, normalized, rest));
    TFB_ASSIGN_OR_RETURN(const layers::RelativeAttention::Attended attended,
                         attention.Attend(attention_->segment(), normalized, rest));
    if (!options_.normalise_memory) {
      TFB_RETURN_IF_ERROR(attention.Replace(call.input, attended.rest));
    }
    // Without gates the sum is part of the product, as its residual.
    const bool sums = !kind_.has_value();
    TFB_RETURN_IF_ERROR(attention.Project(attended.context, sums ? call.input : ConstTensorView(),
                                          sums ? call.state : update, attended.rest, activation()));
    if (!sums) TFB_RETURN_IF_ERROR(gates_[0].Run(call.input, update, call.state, rest));
    if (!call.context.empty()) {
      TFB_RETURN_IF_ERROR(parts_.feed_forward_norm.Run(call.state, call.context, rest));
    }
    TFB_RETURN_IF_ERROR(parts_.feed_forward_norm.Run(call.state, normalized, rest));
    if (sums) return parts_.feed_forward.Run(normalized, call.state, call.output, rest);
    TFB_RETURN_IF_ERROR(parts_.feed_forward.Run(normalized, {}, update, rest));
    return gates_[1].Run(call.state, update, call.output, rest);
  }

  size_t workspace_bytes(int threads) const override {
    const int64_t rows = layer_.max_rows(), width = layer_.sizes.width();
    const size_t own =
        Workspace::Measure([&](Workspace& workspace) { LayOut(rows * width, workspace); });
    const size_t gates =
        kind_.has_value() ? Gate::workspace_bytes(layer_.device, *kind_, rows, width, threads) : 0;
    const size_t of_replacing =
        options_.normalise_memory ? 0 : attention_->own().replace_workspace_bytes(threads);
    return own + std::max({gates, attention_->own().workspace_bytes(threads, of_replacing),
                           layers::Sublayers::workspace_bytes(layer_, threads)});
  }

  layers::SegmentAttention& attention() override { return *attention_; }

  absl::Status CheckBackward() const override { return attention_->CheckBackward(); }
  size_t kept_bytes() const override { return attention_->kept_bytes(); }

  absl::Status SetUpBackward(const NamedTensors& parameters,
                             const layers::Distances& distances) override {
    for (size_t g = 0; g < gates_.size() && kind_.has_value(); ++g) {
      TFB_RETURN_IF_ERROR(gates_[g].SetUpBackward(ParametersOfGate(parameters, g)));
    }
    TFB_RETURN_IF_ERROR(parts_.SetUpBackward(layer_, parameters));
    return attention_->SetUpBackward(parameters, distances);
  }

  size_t backward_workspace_bytes(int threads) const override {
    const int64_t rows = layer_.max_rows(), width = layer_.sizes.width();
    size_t gates = 0;
    if (kind_.has_value()) {
      gates = std::max(Gate::workspace_bytes(layer_.device, *kind_, rows, width, threads),
                       Gate::backward_workspace_bytes(layer_.device, *kind_, rows, width, threads));
    }
    return Workspace::Measure(
               [this](Workspace& workspace) { LayOutBackward(layer_.max_tokens, workspace); }) +
           std::max({gates, attention_->backward_workspace_bytes(threads),
                     layers::Sublayers::backward_workspace_bytes(layer_, threads, activation())});
  }

  absl::Status Backward(const BackwardCall& call, const Execution& execution) override {
    Workspace workspace(execution.workspace);
    const BackwardScratch scratch = LayOutBackward(call.segment.tokens, workspace);
    Execution rest = execution;
    rest.workspace = workspace.Rest();
    TFB_RETURN_IF_ERROR(RunAgain(call.segment, scratch, rest));
    TFB_RETURN_IF_ERROR(NetworkBackward(call, scratch, rest));
    return AttentionBackward(call, scratch, rest);
  }

 private:
  // The segment again, each [batch, tokens, model_dim] in fp32, and memory of the sublayers.
  struct BackwardScratch {
    TensorView x;           // what the attention reads
    TensorView attended;    // what it gives the first gate
    TensorView g;           // what the gate writes
    TensorView normalized;  // what the feed-forward network reads
    TensorView network;     // what it gives the second gate
    TensorView gradient;
    TensorView of_update;  // the gradient of what a sublayer gives its gate
    absl::Span<std::byte> attention;
    absl::Span<std::byte> feed_forward;
    absl::Span<std::byte> gates[2];
  };
  BackwardScratch LayOutBackward(int64_t tokens, Workspace& workspace) const {
    const Shape shape = {layer_.batch, tokens, layer_.sizes.width()};
    const auto take_bytes = [&](size_t bytes) {
      return absl::MakeSpan(workspace.Take<std::byte>(static_cast<int64_t>(bytes)), bytes);
    };
    BackwardScratch scratch;
    for (TensorView* view : {&scratch.x, &scratch.attended, &scratch.g, &scratch.normalized,
                             &scratch.network, &scratch.gradient, &scratch.of_update}) {
      *view = TensorView(workspace.Take<float>(NumElements(shape)), DType::kF32, shape);
    }
    scratch.attention = take_bytes(attention_->again_bytes());
    scratch.feed_forward = take_bytes(layers::Sublayers::kept_bytes(layer_, activation()));
    const size_t of_gate =
        kind_.has_value() ? Gate::kept_bytes(*kind_, layer_.max_rows(), layer_.sizes.width()) : 0;
    for (absl::Span<std::byte>& gate : scratch.gates) gate = take_bytes(of_gate);
    return scratch;
  }
  static Execution WithKept(const Execution& execution, absl::Span<std::byte> kept) {
    Execution with_kept = execution;
    with_kept.kept = kept;
    return with_kept;
  }
  absl::Status RunAgain(const layers::PastSegment& segment, const BackwardScratch& scratch,
                        const Execution& execution) const {
    const ConstTensorView input = segment.input();
    TFB_RETURN_IF_ERROR(parts_.attention_norm.Run(input, scratch.x, execution));
    TFB_RETURN_IF_ERROR(attention_->RunAgain({segment, scratch.x, {}, scratch.attended, norm()},
                                             WithKept(execution, scratch.attention)));
    if (options_.relu) {
      TFB_RETURN_IF_ERROR(Activate(layer_.device, Activation::kRelu, scratch.attended,
                                   scratch.attended, execution));
    }
    const bool sums = !kind_.has_value();
    TFB_RETURN_IF_ERROR(sums ? Add(layer_.device, input, scratch.attended, scratch.g, execution)
                             : gates_[0].Run(input, scratch.attended, scratch.g,
                                             WithKept(execution, scratch.gates[0])));
    TFB_RETURN_IF_ERROR(parts_.feed_forward_norm.Run(scratch.g, scratch.normalized, execution));
    TFB_RETURN_IF_ERROR(parts_.feed_forward.Run(scratch.normalized, {}, scratch.network,
                                                WithKept(execution, scratch.feed_forward)));
    if (sums) return absl::OkStatus();
    // Nothing reads this gate's result; the gradient's memory is free.
    return gates_[1].Run(scratch.g, scratch.network, scratch.gradient,
                         WithKept(execution, scratch.gates[1]));
  }

  // Take the gradient through the second gate and the network, and through the first gate and the
  // attention.
  absl::Status NetworkBackward(const BackwardCall& call, const BackwardScratch& scratch,
                               const Execution& execution) const {
    const Outputs& gradients = call.segment.parameter_gradients;
    const TensorView &dg = call.gradient, &dx = scratch.gradient;
    TFB_RETURN_IF_ERROR(GateBackward(1, {scratch.g, scratch.network, dg, dg, scratch.of_update},
                                     gradients, scratch, execution));
    TFB_RETURN_IF_ERROR(
        gradients_.OfFeedForward(parts_, {scratch.normalized, scratch.of_update, {}, dx}, gradients,
                                 WithKept(execution, scratch.feed_forward)));
    if (!call.context_gradient.empty()) {
      TFB_RETURN_IF_ERROR(Add(layer_.device, dx, call.context_gradient, dx, execution));
    }
    return gradients_.OfFeedForwardNorm(parts_, {scratch.g, dx, dg, dg}, gradients, execution);
  }
  absl::Status AttentionBackward(const BackwardCall& call, const BackwardScratch& scratch,
                                 const Execution& execution) const {
    const Outputs& gradients = call.segment.parameter_gradients;
    const ConstTensorView input = call.segment.input();
    const TensorView &dh = call.gradient, &dx = scratch.gradient, &dy = scratch.of_update;
    TFB_RETURN_IF_ERROR(
        GateBackward(0, {input, scratch.attended, dh, dh, dy}, gradients, scratch, execution));
    if (options_.relu) {
      TFB_RETURN_IF_ERROR(MultiplyByDerivative(layer_.device, Activation::kRelu, scratch.attended,
                                               dy, dy, execution));
    }
    TFB_RETURN_IF_ERROR(attention_->Backward({call.segment,
                                              scratch.x,
                                              dy,
                                              {},
                                              dx,
                                              norm(),
                                              gradients_.gamma_of_attention(gradients),
                                              gradients_.beta_of_attention(gradients)},
                                             WithKept(execution, scratch.attention)));
    return gradients_.OfAttentionNorm(parts_, {input, dx, dh, dh}, gradients, execution);
  }
  // Computes the gradients of a gate, or of a sum, where dx is dout.
  absl::Status GateBackward(size_t g, Gate::BackwardCall call, const Outputs& gradients,
                            const BackwardScratch& scratch, const Execution& execution) const {
    if (!kind_.has_value()) {
      return AddScaled(layer_.device, 1, call.dout, 0, call.dout, call.dy, execution);
    }
    call.parameters = gate_names_[g].Of(gradients);
    call.accumulate = true;
    return gates_[g].Backward(call, WithKept(execution, scratch.gates[g]));
  }

  Gate::Parameters ParametersOfGate(const NamedTensors& parameters, size_t g) const {
    const auto parameter = [&](const char* name) {
      return layers::FindParameter(parameters,
                                   absl::StrCat(LayerPrefix(layer_.n), kGateNames[g], name));
    };
    return {parameter("w_r"), parameter("w_z"), parameter("w_g"), parameter("u_r"),
            parameter("u_z"), parameter("u_g"), parameter("b_g"), parameter("b_r"),
            parameter("b_z"), parameter("b_h")};
  }
  // Returns that of the rows of earlier segments.
  const LayerNorm* norm() const {
    return options_.normalise_memory ? &parts_.attention_norm : nullptr;
  }
  struct Scratch {
    float* normalized;  // [batch, tokens, model_dim]
    float* update;      // of the same shape: a gate's input from its sublayer
  };
  Scratch LayOut(int64_t elements, Workspace& workspace) const {
    return {workspace.Take<float>(elements),
            kind_.has_value() ? workspace.Take<float>(elements) : nullptr};
  }
  // Returns that of what a sublayer adds.
  Activation activation() const { return options_.relu ? Activation::kRelu : Activation::kNone; }

  layers::LayerOfStack layer_;
  GatedTransformerXlOptions options_;
  std::optional<GateKind> kind_;  // none: sums
  std::unique_ptr<layers::TransformerXlAttention> attention_;
  layers::Sublayers parts_;
  std::array<Gate, 2> gates_;  // those of kGateNames
  layers::SublayerGradients gradients_;
  std::array<GateNames, 2> gate_names_;
};

// ---- The definition ----

// Evaluates the formulas of the header, for one sequence.
class GatedDefinition {
 public:
  GatedDefinition(const layers::StackDefinition& stack, const GatedTransformerXlOptions& options,
                  const DefinitionRequest& request)
      : stack_(stack), options_(options), request_(request) {}

  // Tells which token is the first that token p sees; given ones come before token 0.
  int64_t FirstSeen(int64_t p) const {
    const int64_t from = options_.same_length ? p + 1 : p / options_.segment * options_.segment;
    return std::max<int64_t>(options_.given_memory + from - options_.memory, 0);
  }

  // `context` receives the input of the last feed-forward network.
  Rows Forward(const Rows& x, const layers::SequenceMemories& memories, Rows* context) const {
    Rows h = x;
    for (int64_t n = 0; n < options_.layers; ++n) {
      memories.Keep(n, h);
      const Rows attended = Attention(n, h, memories.Given(n, h.channels()));
      const Rows g = Gated(LayerPrefix(n) + "attention_gate.", h, Update(attended));
      *context = stack_.FeedForwardNorm(n, g);
      h = Gated(LayerPrefix(n) + "ff_gate.", g, Update(stack_.FeedForward(n, *context)));
    }
    return stack_.FinalNorm(h);
  }

 private:
  static double Logistic(double value) { return 1 / (1 + std::exp(-value)); }

  Rows Attention(int64_t n, const Rows& h, const Rows& given) const {
    const Rows normalized = stack_.AttentionNorm(n, h);
    const Rows earlier = layers::Held(request_, h);
    if (options_.normalise_memory) {
      Rows list = given;
      list.Append(earlier);
      const layers::StackDefinition::Stopped stopped = {
          stack_.AttentionNorm(n, list), [this](int64_t p) {
            return options_.given_memory + p / options_.segment * options_.segment;
          }};
      return stack_.Attention(
          n, normalized, [this](int64_t p) { return FirstSeen(p); }, stack_.AttentionNorm(n, given),
          request_.stopped == nullptr ? nullptr : &stopped);
    }
    Rows context(0, h.channels());
    for (int64_t begin = 0; begin < h.rows(); begin += options_.segment) {
      const Rows own = normalized.Sub(begin, std::min(options_.segment, h.rows() - begin));
      Rows seen = given;
      seen.Append(earlier.Sub(0, begin));
      seen.Append(own);
      context.Append(stack_.Context(n, stack_.Project(n, "w_q", own),
                                    {stack_.Project(n, "w_k", seen), stack_.Project(n, "w_v", seen),
                                     [&](int64_t p) { return FirstSeen(begin + p); }}));
    }
    return stack_.Project(n, "w_o", context);
  }

  Rows Update(const Rows& of_sublayer) const {
    return options_.relu ? of_sublayer.Relu() : of_sublayer;
  }

  Rows Gated(const std::string& gate, const Rows& x, const Rows& y) const {
    const auto matrix = [&](const char* name) { return stack_.Matrix(gate + name); };
    if (options_.gate == GateOption::kSum) return x.Plus(y);
    if (options_.gate == GateOption::kGru) return Gru(gate, x, y);
    const bool of_y = options_.gate == GateOption::kSigmoidTanh;
    const Rows a = (of_y ? y : x).Times(matrix("w_g"), stack_.pool());
    const Rows u = of_y ? y.Times(matrix("u_g"), stack_.pool()) : y;
    std::vector<double> b(x.channels(), 0);
    if (HasBias(options_.gate)) b = stack_.Vector(gate + "b_g");
    Rows g = x;
    for (int64_t t = 0; t < x.rows(); ++t) {
      for (int64_t c = 0; c < x.channels(); ++c) {
        if (options_.gate == GateOption::kInput) {
          g[t][c] = Logistic(a[t][c]) * x[t][c] + y[t][c];
        } else if (options_.gate == GateOption::kOutput) {
          g[t][c] = x[t][c] + Logistic(a[t][c] - b[c]) * y[t][c];
        } else if (options_.gate == GateOption::kHighway) {
          const double open = Logistic(a[t][c] + b[c]);
          g[t][c] = open * x[t][c] + (1 - open) * y[t][c];
        } else {
          g[t][c] = x[t][c] + Logistic(a[t][c] - b[c]) * std::tanh(u[t][c]);
        }
      }
    }
    return g;
  }

  Rows Gru(const std::string& gate, const Rows& x, const Rows& y) const {
    const auto sum = [&](const char* w, const Rows& of_y, const char* u, const Rows& of_x) {
      return of_y.Times(stack_.Matrix(gate + w), stack_.pool())
          .Plus(of_x.Times(stack_.Matrix(gate + u), stack_.pool()));
    };
    const std::vector<double> b = stack_.Vector(gate + "b_g");
    const auto biased = [&](const Rows& rows, const char* bias) {
      return options_.gate_biases ? rows.PlusEach(stack_.Vector(gate + bias)) : rows;
    };
    Rows reset = biased(sum("w_r", y, "u_r", x), "b_r").Map(Logistic);
    for (int64_t t = 0; t < x.rows(); ++t) {
      for (int64_t c = 0; c < x.channels(); ++c) reset[t][c] *= x[t][c];
    }
    const Rows z = biased(sum("w_z", y, "u_z", x), "b_z");
    const Rows candidate = biased(sum("w_g", y, "u_g", reset), "b_h");
    Rows g = x;
    for (int64_t t = 0; t < x.rows(); ++t) {
      for (int64_t c = 0; c < x.channels(); ++c) {
        const double open = Logistic(z[t][c] - b[c]);
        g[t][c] = (1 - open) * x[t][c] + open * std::tanh(candidate[t][c]);
      }
    }
    return g;
  }

  const layers::StackDefinition& stack_;
  const GatedTransformerXlOptions& options_;
  const DefinitionRequest& request_;
};

}  // namespace

GatedTransformerXl::GatedTransformerXl() : TechniqueOf(Info()) {}

std::vector<TensorSpec> GatedTransformerXl::ReadTensors(
    const Problem& problem, const GatedTransformerXlOptions& options) const {
  std::vector<TensorSpec> inputs = HiddenInputs(problem);
  for (TensorSpec& spec : layers::GivenMemories(problem, options)) {
    inputs.push_back(std::move(spec));
  }
  return inputs;
}
std::vector<TensorSpec> GatedTransformerXl::WrittenTensors(
    const Problem& problem, const GatedTransformerXlOptions& options) const {
  return layers::RelativeStackOutputs(problem, options);
}

absl::Status GatedTransformerXl::Check(const Problem& problem,
                                       const GatedTransformerXlOptions& options) const {
  if (options.gate_biases && options.gate != GateOption::kGru) {
    return absl::InvalidArgumentError("option gate_biases is true; allowed is that with gate=gru");
  }
  return layers::CheckRelativeStack("gated_transformer_xl", problem, options);
}

absl::StatusOr<std::unique_ptr<Layer>> GatedTransformerXl::MakeLayer(
    const Problem& problem, const GatedTransformerXlOptions& options, Device device,
    uint64_t seed) const {
  const layers::RelativeStackShape shape =
      layers::ShapeOf(problem, options, /*pre_norm=*/options.normalise_memory);
  auto state =
      std::make_unique<layers::RelativeState>(device, problem, shape, MoreFlops(problem, options));
  const layers::RelativeState& shared = *state;
  return layers::MakeRelativeStack(
      {std::move(state),
       layers::RelativeStackOutputs(problem, options),
       {},
       layers::GivenMemories(problem, options),
       // Where the memory is not normalised a key depends on whether it is the segment's.
       /*depends_on_split=*/!options.normalise_memory},
      shared, ParametersOf(shape.sizes, options), seed,
      [&](const layers::LayerOfStack& layer,
          std::unique_ptr<layers::TransformerXlAttention> attention) {
        return std::make_unique<GatedBlock>(layer, options, std::move(attention));
      });
}

absl::Status GatedTransformerXl::Definition(const Problem& problem,
                                            const GatedTransformerXlOptions& options,
                                            const NamedTensors& parameters, const Inputs& inputs,
                                            const DefinitionRequest& request,
                                            NamedTensors* outputs) const {
  const layers::StackSizes sizes = layers::ShapeOf(problem, options).sizes;
  TFB_RETURN_IF_ERROR(layers::CheckParameters(ParametersOf(sizes, options), parameters));
  const layers::StackDefinition stack(sizes, parameters, options.max_distance, request.pool);
  const GatedDefinition definition(stack, options, request);
  const ConstTensorView x = inputs.Get("x");
  layers::SequenceMemories::AddOutputs(layers::FinalMemories(problem, options), outputs);
  for (const char* name : {"out", "context"}) (*outputs)[name] = Tensor(DType::kF64, x.shape());
  for (int64_t b = 0; b < problem.batch; ++b) {
    Rows context(0, problem.model_dim());
    const layers::SequenceMemories memories(inputs.Get(layers::kMemories), outputs, b);
    layers::StoreSequence(definition.Forward(layers::SequenceOf(x, b), memories, &context), b,
                          (*outputs)["out"].view());
    layers::StoreSequence(context, b, (*outputs)["context"].view());
  }
  return absl::OkStatus();
}

absl::StatusOr<TechniqueSpec> GatedTransformerXl::Counterpart(const Problem& problem,
                                                              const Options& options) const {
  TFB_ASSIGN_OR_RETURN(Options whole_past, Canonical(options));
  const int64_t tokens = std::max<int64_t>(problem.query_tokens, 1);
  TFB_ASSIGN_OR_RETURN(const auto parsed, ParseOptions<GatedTransformerXlOptions>(options));
  whole_past["memory"] = absl::StrCat(parsed.given_memory + tokens);
  whole_past["segment"] = absl::StrCat(tokens);
  whole_past["same_length"] = "false";
  return TechniqueSpec{info().name, std::move(whole_past)};
}

}  // namespace tfb::gated_transformer_xl
