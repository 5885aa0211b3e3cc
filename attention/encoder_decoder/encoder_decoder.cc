#include "attention/encoder_decoder/encoder_decoder.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "core/layers/copy_tensor.h"
#include "core/layers/feed_forward.h"
#include "core/layers/layer_definitions.h"
#include "core/layers/layer_norm.h"
#include "core/random.h"
#include "core/status.h"
#include "core/workspace.h"

namespace tfb::encoder_decoder {
namespace {

using layers::ParameterSpec;

using Part = EncoderDecoderOptions::Part;
using BlockKind = EncoderDecoderOptions::BlockKind;

const bool registered = RegisterTechnique<EncoderDecoder>();

TechniqueInfo Info() {
  TechniqueInfo info;
  info.name = "encoder_decoder";
  info.family = "attention";
  info.title = "Transformer encoder and decoder stacks";
  info.citation = "Vaswani et al. 2017, arXiv:1706.03762v7, section 3";
  info.input_kind = InputKind::kHidden;
  info.exactness = Exactness::kOwn;
  info.growth = 2;
  return info;
}

Activation ActivationOf(const EncoderDecoderOptions& options) {
  if (options.activation != Activation::kNone) return options.activation;
  return options.block == BlockKind::kSparse ? Activation::kGeluSigmoid : Activation::kRelu;
}

// ---- The parts of the network, for the layer, the definition and the parameters ----

// The name and kind of one sublayer of attention.
struct AttentionPlace {
  std::string name;  // "encoder0.attention"
  Problem problem;
  TechniqueSpec inner;
  bool cross;
  layers::FurtherInputs further;
  layers::FurtherOutputs choices;
};
// The names of one layer, whose feed-forward sublayer is the last.
struct LayerPlace {
  std::vector<AttentionPlace> attention;
  std::string ff;  // "encoder0.ff"
};
struct StackPlace {
  std::vector<LayerPlace> layers;
  std::string final_norm;  // empty: none
  bool on_memory;          // it transforms the memory, not x
};

// Returns the stacks in the order in which they run.
std::vector<StackPlace> StacksOf(const Problem& problem, const EncoderDecoderOptions& options) {
  Problem memory = problem, x = problem, cross = problem;
  memory.query_tokens = problem.kv_tokens;
  memory.causal = cross.causal = false;
  x.kv_tokens = problem.query_tokens;
  const auto stack = [&](const std::string& name, const Problem& self, bool decodes,
                         bool on_memory) {
    const std::string of_stack = options.part == Part::kBoth ? name + "." : "";
    StackPlace result;
    result.on_memory = on_memory;
    // A list of both stacks' techniques begins with the encoder's.
    const bool is_second = decodes && options.part == Part::kBoth;
    const int64_t before = is_second ? options.layers : 0;
    for (int64_t n = 0; n < options.layers; ++n) {
      const std::string layer = absl::StrCat(name, n, ".");
      LayerPlace place;
      const std::string attention = layer + (decodes ? "self" : "attention");
      const TechniqueSpec& inner = options.inner.Of(before + n);
      place.attention.push_back({attention, self, inner, false,
                                 layers::FurtherInputsOf(inner, self, {of_stack, attention + "."}),
                                 layers::FurtherOutputs(inner, self, attention + ".")});
      if (decodes) place.attention.push_back({layer + "cross", cross, {"dense", {}}, true, {}, {}});
      place.ff = layer + "ff";
      result.layers.push_back(std::move(place));
    }
    if (options.has_final_norm()) result.final_norm = name + "_norm";
    return result;
  };
  std::vector<StackPlace> stacks;
  if (options.part == Part::kEncoder) stacks.push_back(stack("encoder", x, false, false));
  if (options.part == Part::kBoth) stacks.push_back(stack("encoder", memory, false, true));
  if (options.part != Part::kEncoder) stacks.push_back(stack("decoder", x, true, false));
  return stacks;
}

// Returns the specs of all parameters but those of the inner techniques.
std::vector<ParameterSpec> ParameterSpecs(const Problem& problem,
                                          const EncoderDecoderOptions& options) {
  const int64_t width = problem.model_dim();
  const double residual_scale = options.block == BlockKind::kSparse
                                    ? 1 / std::sqrt(2.0 * static_cast<double>(options.layers))
                                    : 1;
  std::vector<ParameterSpec> all;
  const auto add = [&](const std::string& prefix, const std::vector<ParameterSpec>& specs) {
    for (ParameterSpec spec : specs) {
      if (spec.name == "w_o" || absl::EndsWith(spec.name, ".ff.w2")) {
        spec.deviation *= residual_scale;
      }
      spec.name = prefix + spec.name;
      all.push_back(std::move(spec));
    }
  };
  for (const StackPlace& stack : StacksOf(problem, options)) {
    for (const LayerPlace& layer : stack.layers) {
      for (const AttentionPlace& attention : layer.attention) {
        add(attention.name + ".",
            layers::ProjectionSpecs(attention.problem, options.bias, attention.inner));
        add("", layers::NormSpecs(attention.name + "_norm", width));
      }
      add("", layers::FeedForwardSpecs(layer.ff, width,
                                       FeedForwardDim(options.feed_forward_dim, width)));
      add("", layers::NormSpecs(layer.ff + "_norm", width));
    }
    if (!stack.final_norm.empty()) add("", layers::NormSpecs(stack.final_norm, width));
  }
  return all;
}

// ---- The layer ----

class EncoderDecoderLayer : public Layer {
 public:
  static absl::StatusOr<std::unique_ptr<Layer>> Create(const Problem& problem,
                                                       std::vector<TensorSpec> inputs,
                                                       std::vector<TensorSpec> outputs,
                                                       const EncoderDecoderOptions& options,
                                                       Device device, uint64_t seed) {
    std::unique_ptr<EncoderDecoderLayer> layer(
        new EncoderDecoderLayer(problem, std::move(inputs), std::move(outputs), options, device));
    TFB_RETURN_IF_ERROR(
        layers::DrawParameters(ParameterSpecs(problem, options), seed, &layer->parameters_));
    for (StackPlace& place : StacksOf(problem, options)) {
      Stack& stack = layer->stacks_.emplace_back();
      for (const LayerPlace& layer_place : place.layers) {
        Block& block = stack.blocks.emplace_back();
        for (const AttentionPlace& attention : layer_place.attention) {
          // Hidden states between the layers are fp32.
          const bool gives_x = problem.dtype == DType::kF32;
          TFB_ASSIGN_OR_RETURN(
              std::unique_ptr<Layer> inner,
              layers::CreateInner(attention.inner, attention.problem, device,
                                  RandomStream(seed, attention.name).Bits(0), gives_x));
          layers::AddInnerParameters(*inner, attention.name + ".inner.", &layer->parameters_);
          block.attention.push_back({attention,
                                     layers::ProjectedAttention(device, attention.problem,
                                                                attention.cross, std::move(inner)),
                                     {},
                                     layers::NormNames(attention.name + "_norm")});
          ++stack.sublayers;
        }
        block.feed_forward_names = layers::FeedForwardNames(layer_place.ff);
        block.norm_names = layers::NormNames(layer_place.ff + "_norm");
        ++stack.sublayers;
      }
      stack.kept.resize(stack.sublayers + 1);
      stack.inputs.resize(stack.blocks.size() + 1);
      stack.norm_names = layers::NormNames(place.final_norm);
      stack.place = std::move(place);
    }
    std::vector<std::pair<const layers::FurtherInputs*, const Layer*>> further;
    for (const Stack& stack : layer->stacks_) {
      for (const Block& block : stack.blocks) {
        for (const Attention& one : block.attention) {
          further.emplace_back(&one.place.further, &one.attention.inner());
        }
      }
    }
    layer->further_differentiate_ = layers::FurtherInputs::CheckBackward(further);
    return layer;
  }

  size_t workspace_bytes(int threads) const override {
    const int64_t width = problem().model_dim();
    const int64_t rows = problem().batch * std::max(problem().query_tokens, problem().kv_tokens);
    size_t largest =
        std::max(FeedForward::workspace_bytes(device_, rows, {width, inner_dim(), width}, threads),
                 LayerNorm::workspace_bytes(device_, width, threads));
    for (const Stack& stack : stacks_) {
      for (const Block& block : stack.blocks) {
        for (const Attention& one : block.attention) {
          largest = std::max(largest, one.attention.workspace_bytes(threads));
        }
      }
    }
    return largest + Workspace::Measure([this](Workspace& workspace) { LayOut(workspace); });
  }

  Cost cost() const override {
    Cost cost;
    double flops = 0;
    bool is_known = true;
    for (const Stack& stack : stacks_) {
      for (const Block& block : stack.blocks) {
        for (const Attention& one : block.attention) {
          const Cost inner = one.attention.inner().cost();
          is_known = is_known && inner.flops.has_value();
          flops += one.attention.projection_flops() + inner.flops.value_or(0);
        }
        const Problem& of_rows = block.attention[0].place.problem;
        flops += 4 * static_cast<double>(of_rows.batch * of_rows.query_tokens) *
                 static_cast<double>(problem().model_dim() * inner_dim());
      }
    }
    if (is_known) cost.flops = flops;
    cost.bytes = TensorBytes();
    return cost;
  }

  // Returns kept_bytes_per_block (with part=both of a block of either stack) and, on a GPU, cublas: 1
  // where cuBLAS computes the products with matrices, else 0.
  std::map<std::string, double> statistics() const override {
    std::map<std::string, double> statistics;
    if (device_ == Device::kCuda) statistics["cublas"] = MatMulUsesCublas(device_) ? 1 : 0;
    if (CheckBackward().ok()) {
      statistics[kKeptBytesPerBlock] =
          static_cast<double>(BlockBytes()) / static_cast<double>(options_.layers);
    }
    return statistics;
  }

  absl::Status CheckBackward() const override {
    for (const Stack& stack : stacks_) {
      for (const Block& block : stack.blocks) {
        for (const Attention& one : block.attention) {
          TFB_RETURN_IF_ERROR(one.attention.CheckBackward());
        }
      }
    }
    return further_differentiate_;
  }
  size_t kept_bytes() const override {
    return Workspace::Measure([this](Workspace& workspace) {
      if (options_.recompute) {
        LayOutInputs(workspace, [](size_t, size_t, const TensorView&) {});
      } else {
        LayOutKept(workspace, [](size_t, size_t, const Kept&) {});
      }
    });
  }
  size_t backward_workspace_bytes(int threads) const override {
    const int64_t width = problem().model_dim();
    const int64_t rows = problem().batch * std::max(problem().query_tokens, problem().kv_tokens);
    size_t largest = std::max(
        {FeedForward::backward_workspace_bytes(device_, rows, feed_forward_sizes(), threads),
         LayerNorm::backward_workspace_bytes(device_, rows, width, threads),
         LayerNorm::workspace_bytes(device_, width, threads)});
    if (options_.recompute) {
      largest = std::max(
          largest, FeedForward::workspace_bytes(device_, rows, feed_forward_sizes(), threads));
    }
    for (const Stack& stack : stacks_) {
      for (const Block& block : stack.blocks) {
        for (const Attention& one : block.attention) {
          largest = std::max(largest, one.attention.backward_workspace_bytes(threads));
          if (options_.recompute) {
            largest = std::max(largest, one.attention.workspace_bytes(threads));
          }
        }
      }
    }
    return largest +
           Workspace::Measure([this](Workspace& workspace) { LayOutBackward(workspace); });
  }
  Cost backward_cost() const override {
    Cost cost;
    double flops = 0;
    bool is_known = true;
    for (const Stack& stack : stacks_) {
      for (const Block& block : stack.blocks) {
        for (const Attention& one : block.attention) {
          const Cost inner = one.attention.inner().backward_cost();
          is_known = is_known && inner.flops.has_value();
          flops += 2 * one.attention.projection_flops() + inner.flops.value_or(0);
        }
        const Problem& of_rows = block.attention[0].place.problem;
        flops += 8 * static_cast<double>(of_rows.batch * of_rows.query_tokens) *
                 static_cast<double>(problem().model_dim() * inner_dim());
      }
    }
    if (is_known) cost.flops = flops + (options_.recompute ? this->cost().flops.value_or(0) : 0);
    cost.bytes = 2 * TensorBytes();  // the tensors and their gradients
    return cost;
  }
  std::map<std::string, std::string> stopped_gradients() const override {
    std::map<std::string, std::string> stopped;
    for (const Stack& stack : stacks_) {
      for (const Block& block : stack.blocks) {
        for (const Attention& one : block.attention) {
          stopped.merge(one.attention.stopped_gradients(one.place.further, parameters_,
                                                        one.place.name + "."));
        }
      }
    }
    return stopped;
  }

 protected:
  absl::Status DoSetUpBackward(const Inputs& inputs, const Execution& execution) override {
    Workspace workspace(execution.workspace);
    const BackwardScratch scratch = LayOutBackward(workspace);
    Execution rest = execution;
    rest.workspace = workspace.Rest();
    // It depends on sizes and masks; hidden states are those of the network's inputs.
    for (Stack& stack : stacks_) {
      const ConstTensorView hidden = inputs.Get(stack.place.on_memory ? "memory" : "x");
      const TensorView x(scratch.input.mutable_data(), DType::kF32, hidden.shape());
      TFB_RETURN_IF_ERROR(AddScaled(device_, 1, hidden, 0, hidden, x, rest));
      for (size_t n = 0; n < stack.blocks.size(); ++n) {
        Block& block = stack.blocks[n];
        for (Attention& one : block.attention) {
          Walk walk;
          walk.inputs = &inputs;
          const Outputs none;
          walk.outputs = &none;
          walk.memory = inputs.Get("memory");
          walk.self_mask = SelfMask(stack, inputs);
          walk.cross_mask = inputs.Get("key_mask");
          TFB_RETURN_IF_ERROR(one.attention.SetUpBackward(parameters_, one.place.name + ".",
                                                          CallOf(one, x, {}, {}, walk), rest));
        }
        const std::string& ff = stack.place.layers[n].ff;
        TFB_RETURN_IF_ERROR(
            block.feed_forward.SetUpBackward(layers::FindParameter(parameters_, ff + ".w1"),
                                             layers::FindParameter(parameters_, ff + ".w2")));
      }
    }
    return absl::OkStatus();
  }

  absl::Status DoBackward(const BackwardCall& call, const Execution& execution) override {
    Workspace workspace(execution.workspace), memory(execution.kept);
    const TensorView between = TakeKept(memory);
    const BackwardScratch scratch = LayOutBackward(workspace);
    Execution rest = execution;
    rest.workspace = workspace.Rest();
    const auto copy = [&](const ConstTensorView& from, const TensorView& to) {
      return AddScaled(device_, 1, from, 0, from, to, rest);
    };
    const ConstTensorView dout = call.output_gradients.Get("out");
    if (!scratch.memory.empty()) {
      TFB_RETURN_IF_ERROR(ClearTensor(device_, scratch.memory, rest));
    }
    TFB_RETURN_IF_ERROR(CopyTensor(device_, dout, scratch.x, rest));
    for (size_t n = stacks_.size(); n-- > 0;) {
      Stack& stack = stacks_[n];
      const bool on_memory = stack.place.on_memory;
      const BackwardWalk walk = {
          call,
          call.inputs.Get(on_memory ? "memory" : "x"),
          between.empty() ? call.inputs.Get("memory") : ConstTensorView(between),
          SelfMask(stack, call.inputs),
          on_memory ? scratch.memory : scratch.x,
          scratch,
          rest};
      TFB_RETURN_IF_ERROR(StackBackward(stack, walk));
    }
    const TensorView dx = call.input_gradients.Get("x");
    const TensorView dmemory = call.input_gradients.Get("memory");
    if (!dx.empty()) TFB_RETURN_IF_ERROR(copy(scratch.x, dx));
    return dmemory.empty() ? absl::OkStatus() : copy(scratch.memory, dmemory);
  }

  // Runs the network up to the last attention, since the Setup of an attention layer reads its
  // input, which the layers below compute.
  absl::Status DoSetup(const Inputs& inputs, const Execution& execution) override {
    const auto norm = [this](const std::string& name) {
      return layers::MakeLayerNorm(device_, parameters_, name);
    };
    for (Stack& stack : stacks_) {
      for (size_t n = 0; n < stack.blocks.size(); ++n) {
        Block& block = stack.blocks[n];
        for (Attention& one : block.attention) {
          TFB_ASSIGN_OR_RETURN(one.norm, norm(one.place.name + "_norm"));
        }
        const std::string& ff = stack.place.layers[n].ff;
        TFB_ASSIGN_OR_RETURN(block.feed_forward, layers::MakeFeedForward(device_, parameters_, ff,
                                                                         ActivationOf(options_)));
        TFB_ASSIGN_OR_RETURN(block.feed_forward_norm, norm(ff + "_norm"));
      }
      if (stack.place.final_norm.empty()) continue;
      TFB_ASSIGN_OR_RETURN(stack.final_norm, norm(stack.place.final_norm));
    }
    return RunStacks(inputs, {{"out", {}}}, /*sets_up=*/true, execution);
  }

  absl::Status DoRun(const Inputs& inputs, const Outputs& outputs,
                     const Execution& execution) override {
    return RunStacks(inputs, outputs, /*sets_up=*/false, execution);
  }

 private:
  struct Attention {
    AttentionPlace place;
    layers::ProjectedAttention attention;
    LayerNorm norm;
    layers::NormNames norm_names;
  };
  struct Block {
    std::vector<Attention> attention;
    FeedForward feed_forward;
    LayerNorm feed_forward_norm;
    layers::FeedForwardNames feed_forward_names{""};
    layers::NormNames norm_names{""};
  };
  // Holds what a Run keeps of a sublayer.
  struct Kept {
    // [batch, tokens, model_dim], f32: what its LN reads, which is the sublayer's input with
    // pre_norm and else the residual sum. Empty where that is the stack's input.
    TensorView state;
    absl::Span<std::byte> sublayer;
  };
  struct Stack {
    StackPlace place;
    std::vector<Block> blocks;
    LayerNorm final_norm;
    layers::NormNames norm_names{""};
    size_t sublayers = 0;
    // In the memory of a call: what is kept of the sublayers, and of the final norm; or, with recompute,
    // what each block but the first reads, and the final norm.
    std::vector<Kept> kept;
    std::vector<TensorView> inputs;
  };
  struct Scratch {
    TensorView state;  // [batch, query_tokens, model_dim], f32: x between sublayers
    // [batch, kv_tokens, model_dim], f32: the memory between the stacks of `both`.
    TensorView memory;
    TensorView normalized;  // as large as the larger of them; empty for post_norm
  };
  // The arguments that the sublayers of one stack share in one run.
  struct Walk {
    TensorView state;
    TensorView normalized;
    ConstTensorView memory;
    ConstTensorView self_mask;
    ConstTensorView cross_mask;
    const Inputs* inputs = nullptr;    // the layer's
    const Outputs* outputs = nullptr;  // the layer's; without views in Setup
    bool sets_up;
    bool keeps_inputs = false;  // of blocks, and nothing within them
    Execution execution;
    bool keeps() const { return !execution.kept.empty(); }
  };

  EncoderDecoderLayer(const Problem& problem, std::vector<TensorSpec> inputs,
                      std::vector<TensorSpec> outputs, const EncoderDecoderOptions& options,
                      Device device)
      : Layer(problem, std::move(inputs), std::move(outputs)), options_(options), device_(device) {}

  int64_t inner_dim() const {
    return FeedForwardDim(options_.feed_forward_dim, problem().model_dim());
  }
  bool pre_norm() const { return options_.block != BlockKind::kPostNorm; }
  Scratch LayOut(Workspace& workspace) const {
    const Problem& p = problem();
    const auto take = [&](int64_t tokens) {
      const Shape shape = {p.batch, tokens, p.model_dim()};
      return TensorView(workspace.Take<float>(NumElements(shape)), DType::kF32, shape);
    };
    Scratch scratch;
    scratch.state = take(p.query_tokens);
    const bool both = options_.part == Part::kBoth;
    if (both) scratch.memory = take(p.kv_tokens);
    if (pre_norm()) {
      scratch.normalized = take(both ? std::max(p.query_tokens, p.kv_tokens) : p.query_tokens);
    }
    return scratch;
  }

  absl::Status RunStacks(const Inputs& inputs, const Outputs& outputs, bool sets_up,
                         const Execution& execution) {
    Workspace workspace(execution.workspace), memory(execution.kept);
    Scratch scratch = LayOut(workspace);
    if (!execution.kept.empty()) scratch.memory = TakeKept(memory);
    Walk walk;
    walk.sets_up = sets_up;
    walk.execution = execution;
    walk.execution.workspace = workspace.Rest();
    walk.keeps_inputs = options_.recompute && !execution.kept.empty();
    if (walk.keeps_inputs) walk.execution.kept = {};
    walk.memory = inputs.Get("memory");
    walk.inputs = &inputs;
    walk.outputs = &outputs;
    for (Stack& stack : stacks_) {
      const bool on_memory = stack.place.on_memory;
      walk.state = on_memory ? scratch.memory : scratch.state;
      if (pre_norm()) {
        walk.normalized =
            TensorView(scratch.normalized.mutable_data(), DType::kF32, walk.state.shape());
      }
      walk.self_mask = SelfMask(stack, inputs);
      walk.cross_mask = inputs.Get("key_mask");
      TFB_RETURN_IF_ERROR(RunStack(stack, on_memory ? inputs.Get("memory") : inputs.Get("x"),
                                   on_memory ? walk.state : outputs.Get("out"), walk));
      if (on_memory) walk.memory = walk.state;
    }
    return absl::OkStatus();
  }

  // Returns the mask of the keys of a stack's self-attention.
  ConstTensorView SelfMask(const Stack& stack, const Inputs& inputs) const {
    const bool masks = stack.place.on_memory || options_.part == Part::kEncoder;
    return masks ? inputs.Get("key_mask") : ConstTensorView();
  }

  // Setup ends with the last attention of the last stack.
  absl::Status RunStack(Stack& stack, const ConstTensorView& x, const TensorView& out,
                        const Walk& walk) {
    ConstTensorView input = x;
    for (size_t b = 0; b < stack.blocks.size(); ++b) {
      TFB_RETURN_IF_ERROR(KeepInput(stack, b, input, walk));
      bool is_all = false;
      TFB_RETURN_IF_ERROR(RunBlock(stack, b, out, walk, &input, &is_all));
      if (is_all) return absl::OkStatus();
    }
    if (stack.place.final_norm.empty()) return absl::OkStatus();
    TFB_RETURN_IF_ERROR(KeepInput(stack, stack.blocks.size(), input, walk));
    return stack.final_norm.Run(input, out, walk.execution);
  }

  // Runs block b on `input`, which becomes what it writes. Sets `is_all` where a Setup ends there.
  absl::Status RunBlock(Stack& stack, size_t b, const TensorView& out, const Walk& walk,
                        ConstTensorView* input, bool* is_all) {
    Block& block = stack.blocks[b];
    size_t n = FirstSublayer(stack, b);
    for (Attention& one : block.attention) {
      if (walk.sets_up) {
        TFB_RETURN_IF_ERROR(SetUpAttention(one, *input, walk));
        *is_all = &block == &stack.blocks.back() && &one == &block.attention.back() &&
                  &stack == &stacks_.back();
        if (*is_all) return absl::OkStatus();
      }
      const auto attend = [&](const ConstTensorView& from, const ConstTensorView& residual,
                              const TensorView& to) {
        return one.attention.Run(CallOf(one, from, residual, to, walk),
                                 ExecutionOf(stack, n, walk.execution));
      };
      const TensorView output = OutputOf(stack, n, out, walk);
      TFB_RETURN_IF_ERROR(
          RunSublayer(one.norm, attend, *input, StateOf(stack, n, walk), output, walk));
      *input = output;
      ++n;
    }
    const auto feed_forward = [&](const ConstTensorView& from, const ConstTensorView& residual,
                                  const TensorView& to) {
      return block.feed_forward.Run(from, residual, to, ExecutionOf(stack, n, walk.execution));
    };
    const TensorView output = OutputOf(stack, n, out, walk);
    TFB_RETURN_IF_ERROR(RunSublayer(block.feed_forward_norm, feed_forward, *input,
                                    StateOf(stack, n, walk), output, walk));
    *input = output;
    return absl::OkStatus();
  }
  static size_t FirstSublayer(const Stack& stack, size_t b) {
    return b * (stack.blocks[0].attention.size() + 1);
  }

  // Keeps what block b reads, or behind the last one the final norm.
  absl::Status KeepInput(const Stack& stack, size_t b, const ConstTensorView& input,
                         const Walk& walk) const {
    if (!walk.keeps_inputs || b == 0) return absl::OkStatus();
    return AddScaled(device_, 1, input, 0, input, stack.inputs[b], walk.execution);
  }

  // Returns the execution of a sublayer, with its own part of what is kept.
  static Execution ExecutionOf(const Stack& stack, size_t n, Execution execution) {
    if (!execution.kept.empty()) execution.kept = stack.kept[n].sublayer;
    return execution;
  }
  // Returns where the LN of a sublayer, or for n = sublayers the final one, reads its input.
  static TensorView StateOf(const Stack& stack, size_t n, const Walk& walk) {
    return walk.keeps() ? stack.kept[n].state : walk.state;
  }
  // Returns what a sublayer writes.
  TensorView OutputOf(const Stack& stack, size_t n, const TensorView& out, const Walk& walk) const {
    const bool is_last = n + 1 == stack.sublayers;
    if (is_last && stack.place.final_norm.empty()) return out;
    return pre_norm() || is_last ? StateOf(stack, n + 1, walk) : walk.state;
  }

  static layers::ProjectedAttention::Call CallOf(Attention& one, const ConstTensorView& from,
                                                 const ConstTensorView& residual,
                                                 const TensorView& to, const Walk& walk) {
    const bool cross = one.place.cross;
    return {{from, cross ? walk.memory : ConstTensorView(),
             cross ? walk.cross_mask : walk.self_mask, &one.place.further.From(*walk.inputs)},
            residual,
            to,
            &one.place.choices.From(*walk.outputs)};
  }

  absl::Status SetUpAttention(Attention& one, const ConstTensorView& input, const Walk& walk) {
    if (pre_norm()) TFB_RETURN_IF_ERROR(one.norm.Run(input, walk.normalized, walk.execution));
    const ConstTensorView from = pre_norm() ? walk.normalized : input;
    return one.attention.Setup(parameters_, one.place.name + ".", CallOf(one, from, {}, {}, walk),
                               walk.execution);
  }

  // Runs one residual sublayer, where compute(from, residual, to) sets `to` = S(from) + residual.
  // `sum` is for the residual sum of post_norm.
  template <class Compute>
  absl::Status RunSublayer(const LayerNorm& norm, const Compute& compute,
                           const ConstTensorView& input, const TensorView& sum,
                           const TensorView& output, const Walk& walk) {
    if (pre_norm()) {
      TFB_RETURN_IF_ERROR(norm.Run(input, walk.normalized, walk.execution));
      return compute(walk.normalized, input, output);
    }
    TFB_RETURN_IF_ERROR(compute(input, input, sum));
    return norm.Run(sum, output, walk.execution);
  }

  // ---- The backward pass ----

  FeedForward::Sizes feed_forward_sizes() const {
    return {problem().model_dim(), inner_dim(), problem().model_dim()};
  }
  TensorView TakeHidden(int64_t tokens, Workspace& workspace) const {
    const Shape shape = {problem().batch, tokens, problem().model_dim()};
    return TensorView(workspace.Take<float>(NumElements(shape)), DType::kF32, shape);
  }

  // Lays out what a Run keeps, and calls put(stack, n, kept) for each of its parts. Returns the
  // memory between the stacks of `both`.
  template <class Put>
  TensorView LayOutKept(Workspace& workspace, const Put& put) const {
    for (size_t s = 0; s < stacks_.size(); ++s) {
      const Stack& stack = stacks_[s];
      const int64_t tokens = stack.blocks[0].attention[0].place.problem.query_tokens;
      size_t n = 0;
      const auto take = [&](bool has_state, size_t bytes) {
        Kept kept;
        if (has_state) kept.state = TakeHidden(tokens, workspace);
        kept.sublayer =
            absl::MakeSpan(workspace.Take<std::byte>(static_cast<int64_t>(bytes)), bytes);
        put(s, n++, kept);
      };
      for (const Block& block : stack.blocks) {
        for (const Attention& one : block.attention) {
          take(!pre_norm() || n > 0, one.attention.kept_bytes());
        }
        take(true, FeedForward::kept_bytes(problem().batch * tokens, feed_forward_sizes()));
      }
      take(!stack.place.final_norm.empty(), 0);
    }
    return options_.part == Part::kBoth ? TakeHidden(problem().kv_tokens, workspace) : TensorView();
  }
  // Does the same with recompute: put(stack, b, input).
  template <class Put>
  TensorView LayOutInputs(Workspace& workspace, const Put& put) const {
    for (size_t s = 0; s < stacks_.size(); ++s) {
      const Stack& stack = stacks_[s];
      const int64_t tokens = stack.blocks[0].attention[0].place.problem.query_tokens;
      const size_t end = stack.blocks.size() + (stack.place.final_norm.empty() ? 0 : 1);
      for (size_t b = 1; b < end; ++b) put(s, b, TakeHidden(tokens, workspace));
    }
    return options_.part == Part::kBoth ? TakeHidden(problem().kv_tokens, workspace) : TensorView();
  }
  // Returns what a Run keeps of all blocks, as if the first one kept as much as those behind it.
  size_t BlockBytes() const {
    size_t bytes = 0;
    for (const Stack& stack : stacks_) {
      const int64_t tokens = stack.blocks[0].attention[0].place.problem.query_tokens;
      for (const Block& block : stack.blocks) {
        bytes += Workspace::Measure([&](Workspace& memory) {
          if (options_.recompute || pre_norm()) TakeHidden(tokens, memory);
          if (!options_.recompute) LayOutBlock(stack, block, memory, [](const Kept&) {});
        });
      }
    }
    return bytes;
  }
  TensorView TakeKept(Workspace& memory) {
    if (options_.recompute) {
      return LayOutInputs(memory, [this](size_t stack, size_t b, const TensorView& input) {
        stacks_[stack].inputs[b] = input;
      });
    }
    return LayOutKept(memory, [this](size_t stack, size_t n, const Kept& kept) {
      stacks_[stack].kept[n] = kept;
    });
  }

  struct BackwardScratch {
    TensorView x;         // f32, the gradient of the hidden state of the stack on x
    TensorView memory;    // likewise of the memory; empty where there is none
    TensorView input;     // a sublayer's input, computed again
    TensorView gradient;  // with pre_norm, its gradient
    // With recompute: what a block writes, and what its sublayers keep.
    TensorView again;
    absl::Span<std::byte> block;
  };
  BackwardScratch LayOutBackward(Workspace& workspace) const {
    const Problem& p = problem();
    const bool has_memory = options_.part != Part::kEncoder;
    const int64_t most = has_memory ? std::max(p.query_tokens, p.kv_tokens) : p.query_tokens;
    BackwardScratch scratch;
    scratch.x = TakeHidden(p.query_tokens, workspace);
    if (has_memory) scratch.memory = TakeHidden(p.kv_tokens, workspace);
    scratch.input = TakeHidden(most, workspace);
    if (pre_norm()) scratch.gradient = TakeHidden(most, workspace);
    if (!options_.recompute) return scratch;
    scratch.again = TakeHidden(most, workspace);
    size_t largest = 0;
    for (const Stack& stack : stacks_) {
      for (const Block& block : stack.blocks) {
        largest = std::max(largest, Workspace::Measure([&](Workspace& memory) {
                             LayOutBlock(stack, block, memory, [](const Kept&) {});
                           }));
      }
    }
    scratch.block =
        absl::MakeSpan(workspace.Take<std::byte>(static_cast<int64_t>(largest)), largest);
    return scratch;
  }

  // Lays out what the sublayers of a block keep, and calls put(kept) for each. With pre_norm the first
  // one's state is the block's input, which lies elsewhere.
  template <class Put>
  void LayOutBlock(const Stack& stack, const Block& block, Workspace& memory,
                   const Put& put) const {
    const int64_t tokens = stack.blocks[0].attention[0].place.problem.query_tokens;
    bool is_first = true;
    const auto take = [&](size_t bytes) {
      Kept kept;
      if (!pre_norm() || !is_first) kept.state = TakeHidden(tokens, memory);
      kept.sublayer = absl::MakeSpan(memory.Take<std::byte>(static_cast<int64_t>(bytes)), bytes);
      is_first = false;
      put(kept);
    };
    for (const Attention& one : block.attention) take(one.attention.kept_bytes());
    take(FeedForward::kept_bytes(problem().batch * tokens, feed_forward_sizes()));
  }

  // Holds what the sublayers of one stack share in one backward pass.
  struct BackwardWalk {
    const BackwardCall& call;
    ConstTensorView x;       // the stack's input; with recompute, the block's
    ConstTensorView memory;  // what cross attention reads
    ConstTensorView self_mask;
    TensorView d;  // the gradient of the hidden state, which goes backwards
    BackwardScratch scratch;
    Execution execution;
  };

  // Computes block b once more, from `input`, for what its sublayers keep.
  absl::Status RunAgain(Stack& stack, size_t b, ConstTensorView input, const BackwardWalk& walk) {
    Workspace memory(walk.scratch.block);
    size_t n = FirstSublayer(stack, b);
    LayOutBlock(stack, stack.blocks[b], memory, [&](const Kept& kept) { stack.kept[n++] = kept; });
    const auto like_d = [&](const TensorView& buffer) {
      return TensorView(buffer.mutable_data(), DType::kF32, walk.d.shape());
    };
    const TensorView again = like_d(walk.scratch.again);
    if (pre_norm() && b > 0) stack.kept[FirstSublayer(stack, b)].state = stack.inputs[b];
    stack.kept[n].state = again;  // of what comes behind the block, which is done
    const Outputs none;
    Walk forward;
    forward.state = again;
    forward.normalized = like_d(walk.scratch.input);
    forward.memory = walk.memory;
    forward.self_mask = walk.self_mask;
    forward.cross_mask = walk.call.inputs.Get("key_mask");
    forward.inputs = &walk.call.inputs;
    forward.outputs = &none;
    forward.sets_up = false;
    forward.execution = walk.execution;
    forward.execution.kept = walk.scratch.block;
    bool is_all = false;
    return RunBlock(stack, b, again, forward, &input, &is_all);
  }

  absl::Status StackBackward(Stack& stack, const BackwardWalk& walk) {
    if (!stack.place.final_norm.empty()) {
      const TensorView& state = options_.recompute ? stack.inputs[stack.blocks.size()]
                                                   : stack.kept[stack.sublayers].state;
      TFB_RETURN_IF_ERROR(
          NormBackward(stack.final_norm, stack.norm_names, state, walk.d, {}, walk));
    }
    for (size_t b = stack.blocks.size(); b-- > 0;) {
      if (!options_.recompute) {
        TFB_RETURN_IF_ERROR(BlockBackward(stack, b, walk));
        continue;
      }
      BackwardWalk of_block = walk;
      if (b > 0) of_block.x = stack.inputs[b];
      TFB_RETURN_IF_ERROR(RunAgain(stack, b, of_block.x, of_block));
      TFB_RETURN_IF_ERROR(BlockBackward(stack, b, of_block));
    }
    return absl::OkStatus();
  }

  absl::Status BlockBackward(Stack& stack, size_t b, const BackwardWalk& walk) {
    Block& block = stack.blocks[b];
    size_t n = FirstSublayer(stack, b) + block.attention.size() + 1;
    const auto feed_forward = [&](const ConstTensorView& from, const ConstTensorView& added,
                                  const TensorView& to, const Execution& execution) {
      const Outputs& parameters = walk.call.parameter_gradients;
      const layers::FeedForwardNames& names = block.feed_forward_names;
      return block.feed_forward.Backward(
          {from, walk.d, added, to, parameters.Get(names.w1), parameters.Get(names.b1),
           parameters.Get(names.w2), parameters.Get(names.b2)},
          execution);
    };
    TFB_RETURN_IF_ERROR(SublayerBackward(stack, --n, block.feed_forward_norm, block.norm_names,
                                         NormBefore(stack, b, block.attention.size()), feed_forward,
                                         walk));
    for (size_t a = block.attention.size(); a-- > 0;) {
      Attention& one = block.attention[a];
      const auto attend = [&](const ConstTensorView& from, const ConstTensorView& added,
                              const TensorView& to, const Execution& execution) {
        return AttentionBackward(one, from, added, to, walk, execution);
      };
      TFB_RETURN_IF_ERROR(SublayerBackward(stack, --n, one.norm, one.norm_names,
                                           NormBefore(stack, b, a), attend, walk));
    }
    return absl::OkStatus();
  }

  // Returns the LN of the sublayer before attention `a` of block b, or before its feed-forward
  // where a is the number of attentions; null where walk.x is what it wrote.
  const LayerNorm* NormBefore(const Stack& stack, size_t b, size_t a) const {
    if (a > 0) return &stack.blocks[b].attention[a - 1].norm;
    return b == 0 || options_.recompute ? nullptr : &stack.blocks[b - 1].feed_forward_norm;
  }

  // Takes walk.d, the gradient of a sublayer's output, to that of its input, where compute(from,
  // added, to, execution) sets `to` = the gradient of S's input + added.
  template <class Compute>
  absl::Status SublayerBackward(const Stack& stack, size_t n, const LayerNorm& norm,
                                const layers::NormNames& names, const LayerNorm* before,
                                const Compute& compute, const BackwardWalk& walk) const {
    const Execution execution = ExecutionOf(stack, n, walk.execution);
    const auto like_d = [&](const TensorView& buffer) {
      return TensorView(buffer.mutable_data(), DType::kF32, walk.d.shape());
    };
    const TensorView input = like_d(walk.scratch.input);
    if (pre_norm()) {
      const ConstTensorView x = stack.kept[n].state.empty() ? walk.x : stack.kept[n].state;
      const TensorView gradient = like_d(walk.scratch.gradient);
      TFB_RETURN_IF_ERROR(norm.Run(x, input, walk.execution));
      TFB_RETURN_IF_ERROR(compute(input, {}, gradient, execution));
      return NormBackward(norm, names, x, gradient, walk.d, walk);
    }
    TFB_RETURN_IF_ERROR(NormBackward(norm, names, stack.kept[n].state, walk.d, {}, walk));
    if (before == nullptr) return compute(walk.x, walk.d, walk.d, execution);
    TFB_RETURN_IF_ERROR(before->Run(stack.kept[n - 1].state, input, walk.execution));
    return compute(input, walk.d, walk.d, execution);
  }

  // Sets walk.d = the gradient of an LN's input, with the gradient dy of its output, + added.
  absl::Status NormBackward(const LayerNorm& norm, const layers::NormNames& names,
                            const ConstTensorView& x, const ConstTensorView& dy,
                            const ConstTensorView& added, const BackwardWalk& walk) const {
    const Outputs& parameters = walk.call.parameter_gradients;
    return norm.Backward(
        {x, dy, added, walk.d, parameters.Get(names.gamma), parameters.Get(names.beta)},
        walk.execution);
  }

  static absl::Status AttentionBackward(Attention& one, const ConstTensorView& from,
                                        const ConstTensorView& added, const TensorView& to,
                                        const BackwardWalk& walk, const Execution& execution) {
    const bool cross = one.place.cross;
    const TensorView of_memory = cross ? walk.scratch.memory : TensorView();
    return one.attention.Backward({{from, cross ? walk.memory : ConstTensorView(),
                                    cross ? walk.call.inputs.Get("key_mask") : walk.self_mask,
                                    &one.place.further.From(walk.call.inputs)},
                                   walk.d,
                                   added,
                                   to,
                                   of_memory,
                                   &one.place.further.GradientsFrom(walk.call.input_gradients),
                                   walk.call.parameter_gradients,
                                   /*accumulate=*/false,
                                   of_memory},
                                  execution);
  }

  EncoderDecoderOptions options_;
  Device device_;
  std::vector<Stack> stacks_;
  absl::Status further_differentiate_;
};

// ---- The definition ----

// Evaluates the formulas of the header on hidden states, f64 [batch, tokens, model_dim].
class Network {
 public:
  // It adds the choices of attention to `outputs`.
  Network(const EncoderDecoderOptions& options, const NamedTensors& parameters,
          const DefinitionRequest& request, NamedTensors* outputs)
      : options_(options), parameters_(parameters), request_(request), outputs_(outputs) {}

  // `mask` is the mask of self-attention, `memory_mask` that of attention to the memory; `inputs`
  // are the network's.
  absl::StatusOr<Tensor> Forward(const StackPlace& stack, const ConstTensorView& x,
                                 const ConstTensorView& mask, const ConstTensorView& memory,
                                 const ConstTensorView& memory_mask, const Inputs& inputs) const {
    Tensor h(DType::kF64, x.shape());
    CopyElements(x, h.view());
    for (const LayerPlace& layer : stack.layers) {
      for (const AttentionPlace& place : layer.attention) {
        const bool pre_norm = options_.block != BlockKind::kPostNorm;
        const Tensor input = pre_norm ? Norm(h, place.name + "_norm") : h.Clone();
        layers::FurtherInputs further = place.further;
        const std::string prefix = place.name + ".";
        // What the layer chose in this attention, where it may be followed.
        NamedTensors computed, attended;
        DefinitionRequest request = request_.OfPart();
        if (request_.computed != nullptr) {
          computed = layers::WithoutPrefix(*request_.computed, prefix);
          request.computed = &computed;
        }
        TFB_RETURN_IF_ERROR(layers::DefineProjectedAttention(
            place.problem, place.inner, parameters_, prefix,
            {input.view(), place.cross ? memory : ConstTensorView(),
             place.cross ? memory_mask : mask, &further.From(inputs)},
            request, &attended));
        h = Plus(h, attended.at("out"));
        for (auto& [name, tensor] : attended) {
          if (name != "out") (*outputs_)[prefix + name] = std::move(tensor);
        }
        if (!pre_norm) h = Norm(h, place.name + "_norm");
      }
      if (options_.block == BlockKind::kPostNorm) {
        h = Norm(Plus(h, FeedForwardOf(h, layer.ff)), layer.ff + "_norm");
      } else {
        h = Plus(h, FeedForwardOf(Norm(h, layer.ff + "_norm"), layer.ff));
      }
    }
    return stack.final_norm.empty() ? std::move(h) : Norm(h, stack.final_norm);
  }

 private:
  static Tensor Plus(const Tensor& a, const Tensor& b) {
    Tensor sum = a.Clone();
    for (int64_t n = 0; n < sum.num_elements(); ++n) sum.span<double>()[n] += b.span<double>()[n];
    return sum;
  }

  Tensor Norm(const Tensor& h, const std::string& name) const {
    return layers::DefineNorm(parameters_, name, h);
  }
  Tensor FeedForwardOf(const Tensor& h, const std::string& name) const {
    return layers::DefineFeedForward(parameters_, name, ActivationOf(options_), h, request_.pool);
  }

  const EncoderDecoderOptions& options_;
  const NamedTensors& parameters_;
  const DefinitionRequest& request_;
  NamedTensors* outputs_;
};

}  // namespace

EncoderDecoder::EncoderDecoder() : TechniqueOf(Info()) {}

std::vector<TensorSpec> EncoderDecoder::ReadTensors(const Problem& problem,
                                                    const EncoderDecoderOptions& options) const {
  std::vector<TensorSpec> tensors = HiddenInputs(problem);
  if (options.part != Part::kEncoder) {
    tensors.push_back(
        {"memory", {problem.batch, problem.kv_tokens, problem.model_dim()}, problem.dtype});
  }
  tensors.push_back({"key_mask", {problem.batch, problem.kv_tokens}, DType::kU8, true});
  for (const StackPlace& stack : StacksOf(problem, options)) {
    for (const LayerPlace& layer : stack.layers) {
      for (const AttentionPlace& attention : layer.attention) attention.further.AddTo(&tensors);
    }
  }
  return tensors;
}

std::vector<TensorSpec> EncoderDecoder::WrittenTensors(const Problem& problem,
                                                       const EncoderDecoderOptions& options) const {
  std::vector<TensorSpec> tensors = HiddenOutputs(problem);
  for (const StackPlace& stack : StacksOf(problem, options)) {
    for (const LayerPlace& layer : stack.layers) {
      for (const AttentionPlace& attention : layer.attention) attention.choices.AddTo(&tensors);
    }
  }
  return tensors;
}

absl::Status EncoderDecoder::Check(const Problem& problem,
                                   const EncoderDecoderOptions& options) const {
  if (options.part == Part::kEncoder && problem.kv_tokens != problem.query_tokens) {
    return absl::InvalidArgumentError(
        absl::StrCat("with part=encoder keys are of the same tokens as queries: kv_tokens is ",
                     problem.kv_tokens, "; allowed is query_tokens, ", problem.query_tokens));
  }
  std::vector<int64_t> counts = {options.layers};
  if (options.part == Part::kBoth) counts.push_back(2 * options.layers);
  return options.inner.CheckCount("inner", absl::StrCat("layers=", options.layers), counts);
}

absl::StatusOr<std::unique_ptr<Layer>> EncoderDecoder::MakeLayer(
    const Problem& problem, const EncoderDecoderOptions& options, Device device,
    uint64_t seed) const {
  return EncoderDecoderLayer::Create(problem, ReadTensors(problem, options),
                                     WrittenTensors(problem, options), options, device, seed);
}

absl::Status EncoderDecoder::Definition(const Problem& problem,
                                        const EncoderDecoderOptions& options,
                                        const NamedTensors& parameters, const Inputs& inputs,
                                        const DefinitionRequest& request,
                                        NamedTensors* outputs) const {
  const Network network(options, parameters, request, outputs);
  const ConstTensorView key_mask = inputs.Get("key_mask");
  Tensor encoded;
  for (const StackPlace& stack : StacksOf(problem, options)) {
    const ConstTensorView memory = encoded.empty() ? inputs.Get("memory") : encoded.view();
    const bool masks_self = stack.on_memory || options.part == Part::kEncoder;
    TFB_ASSIGN_OR_RETURN(
        Tensor h,
        network.Forward(stack, stack.on_memory ? memory : inputs.Get("x"),
                        masks_self ? key_mask : ConstTensorView(), memory, key_mask, inputs));
    (stack.on_memory ? encoded : (*outputs)["out"]) = std::move(h);
  }
  return absl::OkStatus();
}

absl::StatusOr<TechniqueSpec> EncoderDecoder::Counterpart(const Problem& problem,
                                                          const Options& options) const {
  return layers::WithCounterpartInside<EncoderDecoderOptions>(*this, problem, options);
}

int64_t ParameterCount(const Problem& problem, const EncoderDecoderOptions& options) {
  const int64_t width = problem.model_dim(),
                inner = FeedForwardDim(options.feed_forward_dim, width);
  const int64_t queries = problem.query_heads * problem.head_dim;
  const int64_t keys = problem.kv_heads * problem.head_dim;
  const int64_t values = problem.kv_heads * problem.value_dim;
  const int64_t context = problem.query_heads * problem.value_dim;
  const int64_t attention = width * (queries + keys + values + context) +
                            (options.bias ? queries + keys + values + width : 0);
  const int64_t feed_forward = 2 * width * inner + inner + width;
  const int64_t norm = 2 * width;
  const int64_t encoder = attention + feed_forward + 2 * norm;
  const int64_t decoder = 2 * attention + feed_forward + 3 * norm;
  const int64_t final_norm = options.has_final_norm() ? norm : 0;
  const int64_t of_encoder = options.layers * encoder + final_norm;
  const int64_t of_decoder = options.layers * decoder + final_norm;
  return (options.part == Part::kDecoder ? 0 : of_encoder) +
         (options.part == Part::kEncoder ? 0 : of_decoder);
}

int64_t LanguageModelParameterCount(const Problem& problem, const EncoderDecoderOptions& options,
                                    int64_t vocabulary, int64_t positions) {
  return ParameterCount(problem, options) + (vocabulary + positions) * problem.model_dim();
}

}  // namespace tfb::encoder_decoder
