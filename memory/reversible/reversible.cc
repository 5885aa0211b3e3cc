#include "memory/reversible/reversible.h"

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/layers/attention/projected_attention.h"
#include "core/layers/copy_tensor.h"
#include "core/layers/feed_forward_dim.h"
#include "core/layers/layer_definitions.h"
#include "core/layers/matmul.h"
#include "core/layers/recompute.h"
#include "core/status.h"
#include "core/workspace.h"
#include "memory/reversible/reversible_stack.h"

namespace tfb::reversible {
namespace {

using Output = ReversibleOptions::Output;

TechniqueInfo Info() {
  TechniqueInfo info;
  info.name = "reversible";
  info.family = "memory";
  info.title = "Reversible residual layers with chunked feed-forward";
  info.citation = "Gomez et al. 2017, arXiv:1707.04585v1; Kitaev et al. 2020, arXiv:2001.04451v2";
  info.input_kind = InputKind::kHidden;
  info.exactness = Exactness::kOwn;
  info.growth = 2;
  return info;
}

// Checks that the technique is registered, and keeps the options that differ from its defaults.
absl::Status CheckF(TechniqueSpec* f) {
  TFB_ASSIGN_OR_RETURN(const Technique* technique, Registry::Global().Find(f->technique));
  if (technique->info().input_kind != InputKind::kHidden) {
    return absl::InvalidArgumentError(
        absl::StrCat("the input of ", f->technique, " is ", Name(technique->info().input_kind),
                     "; as a layer it is multi_head[inner=", f->technique, "]"));
  }
  TFB_ASSIGN_OR_RETURN(f->options, technique->Canonical(f->options));
  for (const OptionSpec& option : technique->info().options) {
    const auto found = f->options.find(option.name);
    if (found->second == option.default_value) f->options.erase(found);
  }
  return absl::OkStatus();
}

class ReversibleLayer : public Layer {
 public:
  ReversibleLayer(const Problem& problem, std::vector<TensorSpec> inputs,
                  std::vector<TensorSpec> outputs, Output output, Device device,
                  ReversibleStack stack, NamedTensors parameters)
      : Layer(problem, std::move(inputs), std::move(outputs)),
        output_(output),
        device_(device),
        stack_(std::move(stack)) {
    parameters_ = std::move(parameters);
  }

  size_t workspace_bytes(int threads) const override {
    return stack_.workspace_bytes(threads) +
           Workspace::Measure([this](Workspace& workspace) { TakeStreams(workspace); });
  }

  Cost cost() const override {
    Cost cost;
    cost.flops = stack_.flops();
    cost.bytes = TensorBytes();
    return cost;
  }

  absl::Status CheckBackward() const override { return stack_.CheckBackward(); }
  size_t kept_bytes() const override {
    return Workspace::Measure([this](Workspace& workspace) { TakeStreams(workspace); });
  }
  size_t backward_workspace_bytes(int threads) const override {
    return stack_.backward_workspace_bytes(threads) +
           Workspace::Measure([this](Workspace& workspace) {
             TakeStreams(workspace);
             TakeStreams(workspace);
           });
  }
  Cost backward_cost() const override {
    Cost cost;
    cost.flops = stack_.backward_flops();
    cost.bytes = 2 * TensorBytes();  // the tensors and their gradients
    return cost;
  }
  std::map<std::string, std::string> stopped_gradients() const override {
    return stack_.stopped_gradients();
  }

  // Returns the statistics of the first block's f, and kept_bytes_per_block, which is 0: a Run keeps
  // the streams behind the last block.
  std::map<std::string, double> statistics() const override {
    std::map<std::string, double> statistics = stack_.f(0).statistics();
    if (CheckBackward().ok()) statistics[kKeptBytesPerBlock] = 0;
    return statistics;
  }

 protected:
  absl::Status DoSetup(const Inputs& inputs, const Execution& execution) override {
    Workspace workspace(execution.workspace);
    TFB_ASSIGN_OR_RETURN(const ReversibleStack::Streams streams,
                         Begin(inputs.Get("x"), workspace, execution));
    return stack_.Setup(parameters_, streams, inputs, Rest(execution, workspace));
  }

  absl::Status DoRun(const Inputs& inputs, const Outputs& outputs,
                     const Execution& execution) override {
    Workspace workspace(execution.workspace), memory(execution.kept);
    TFB_ASSIGN_OR_RETURN(
        const ReversibleStack::Streams streams,
        Begin(inputs.Get("x"), execution.kept.empty() ? workspace : memory, execution));
    TFB_RETURN_IF_ERROR(stack_.Forward(streams, inputs, Rest(execution, workspace)));
    const TensorView out = outputs.Get("out");
    if (output_ != Output::kConcatenate) {
      const float share = output_ == Output::kMean ? 0.5f : 1;
      return AddScaled(device_, share, streams.first, share, streams.second, out, execution);
    }
    const int64_t width = problem().model_dim();
    TFB_RETURN_IF_ERROR(Copy(streams.first, Slice(out, 2, 0, width), execution));
    return Copy(streams.second, Slice(out, 2, width, width), execution);
  }

  absl::Status DoSetUpBackward(const Inputs& inputs, const Execution& execution) override {
    return stack_.SetUpBackward(parameters_, inputs.Get("x"), inputs, execution);
  }

  // Starts with copies of the streams that the Run kept, which the blocks undo.
  absl::Status DoBackward(const BackwardCall& call, const Execution& execution) override {
    Workspace workspace(execution.workspace), memory(execution.kept);
    const ReversibleStack::Streams kept = TakeStreams(memory), streams = TakeStreams(workspace);
    const ReversibleStack::Streams gradients = TakeStreams(workspace);
    TFB_RETURN_IF_ERROR(Copy(kept.first, streams.first, execution));
    TFB_RETURN_IF_ERROR(Copy(kept.second, streams.second, execution));
    const ConstTensorView dout = call.output_gradients.Get("out");
    const int64_t width = problem().model_dim();
    for (const bool is_second : {false, true}) {
      const TensorView& gradient = is_second ? gradients.second : gradients.first;
      if (dout.empty()) {
        TFB_RETURN_IF_ERROR(ClearTensor(device_, gradient, execution));
      } else if (output_ == Output::kConcatenate) {
        TFB_RETURN_IF_ERROR(
            Copy(Slice(dout, 2, is_second ? width : 0, width), gradient, execution));
      } else {
        const float share = output_ == Output::kMean ? 0.5f : 1;
        TFB_RETURN_IF_ERROR(AddScaled(device_, share, dout, 0, dout, gradient, execution));
      }
    }
    TFB_RETURN_IF_ERROR(stack_.Backward(streams, gradients, call, Rest(execution, workspace)));
    const TensorView dx = call.input_gradients.Get("x");
    if (dx.empty()) return absl::OkStatus();
    return Add(device_, gradients.first, gradients.second, dx, execution);
  }

 private:
  ReversibleStack::Streams TakeStreams(Workspace& workspace) const {
    const Problem& p = problem();
    const Shape shape = {p.batch, p.query_tokens, p.model_dim()};
    const auto take = [&] {
      return TensorView(workspace.Take<float>(NumElements(shape)), DType::kF32, shape);
    };
    const TensorView first = take();
    return {first, take()};
  }
  absl::StatusOr<ReversibleStack::Streams> Begin(const ConstTensorView& x, Workspace& workspace,
                                                 const Execution& execution) const {
    const ReversibleStack::Streams streams = TakeStreams(workspace);
    TFB_RETURN_IF_ERROR(Copy(x, streams.first, execution));
    TFB_RETURN_IF_ERROR(Copy(x, streams.second, execution));
    return streams;
  }
  absl::Status Copy(const ConstTensorView& from, const TensorView& to,
                    const Execution& execution) const {
    return AddScaled(device_, 1, from, 0, from, to, execution);
  }
  static Execution Rest(const Execution& execution, const Workspace& workspace) {
    Execution rest = execution;
    rest.workspace = workspace.Rest();
    rest.kept = {};  // the blocks keep nothing
    return rest;
  }

  Output output_;
  Device device_;
  ReversibleStack stack_;
};

// ---- The definition ----

void AddTo(const Tensor& update, double sign, Tensor* stream) {
  for (int64_t n = 0; n < update.num_elements(); ++n) {
    stream->span<double>()[n] += sign * update.span<double>()[n];
  }
}

}  // namespace

void ReversibleOptions::Describe(OptionBinder& bind) {
  bind.Int("layers", &layers, 1, 64, "reversible blocks");
  bind.Techniques(
      "f", &f,
      "techniques on hidden states, as multi_head[inner=longformer]; one for all blocks, "
      "or one for each, as 2*multi_head/2*learned",
      CheckF, "the attention, as a layer, of all blocks or block by block");
  DescribeFeedForwardDim(bind, &feed_forward_dim);
  bind.Choice("activation", &activation,
              {{"relu", Activation::kRelu},
               {"gelu", Activation::kGelu},
               {"gelu_tanh", Activation::kGeluTanh},
               {"gelu_sigmoid", Activation::kGeluSigmoid}},
              "of the feed-forward network");
  bind.Int("chunks", &chunks, 1, 65536,
           "parts of the tokens that the feed-forward network is computed for in turn");
  bind.Choice(
      "output", &output,
      {{"concatenate", Output::kConcatenate}, {"mean", Output::kMean}, {"sum", Output::kSum}},
      "what becomes of the two streams: out has 2 model_dim channels where concatenated");
}

absl::StatusOr<Tensor> DefineBranch(const ReversibleNetwork& network, int64_t block, Branch branch,
                                    const Tensor& x) {
  const std::string prefix = BlockPrefix(block);
  if (branch == Branch::kG) {
    return layers::DefineFeedForward(network.parameters, prefix + "g", network.options.activation,
                                     layers::DefineNorm(network.parameters, prefix + "g_norm", x),
                                     network.request.pool);
  }
  const DType dtype = network.problem.dtype;
  const auto rounded = [dtype](Tensor tensor) {
    return dtype == DType::kF32 ? std::move(tensor) : tensor.CloneAs(dtype);
  };
  const Tensor normalized = rounded(layers::DefineNorm(network.parameters, prefix + "f_norm", x));
  const TechniqueSpec& f = network.options.f.Of(block);
  TFB_ASSIGN_OR_RETURN(const Technique* technique, Registry::Global().Find(f.technique));
  layers::FurtherInputs further = InputsOfF(network.options, network.problem, block);
  Inputs inputs = further.From(network.inputs);
  inputs.Set("x", normalized.view());
  NamedTensors outputs;
  TFB_RETURN_IF_ERROR(technique->Define(network.problem, f.options,
                                        layers::WithoutPrefix(network.parameters, prefix + "f."),
                                        inputs, network.request.OfPart(), &outputs));
  return rounded(std::move(outputs.at("out"))).CloneAs(DType::kF64);
}

absl::Status DefineForward(const ReversibleNetwork& network, Tensor* first, Tensor* second) {
  for (int64_t n = 0; n < network.options.layers; ++n) {
    TFB_ASSIGN_OR_RETURN(const Tensor f, DefineBranch(network, n, Branch::kF, *second));
    AddTo(f, 1, first);
    TFB_ASSIGN_OR_RETURN(const Tensor g, DefineBranch(network, n, Branch::kG, *first));
    AddTo(g, 1, second);
  }
  return absl::OkStatus();
}

absl::Status DefineInverse(const ReversibleNetwork& network, Tensor* first, Tensor* second) {
  for (int64_t n = network.options.layers - 1; n >= 0; --n) {
    TFB_ASSIGN_OR_RETURN(const Tensor g, DefineBranch(network, n, Branch::kG, *first));
    AddTo(g, -1, second);
    TFB_ASSIGN_OR_RETURN(const Tensor f, DefineBranch(network, n, Branch::kF, *second));
    AddTo(f, -1, first);
  }
  return absl::OkStatus();
}

namespace {

class Reversible : public TechniqueOf<ReversibleOptions> {
 public:
  Reversible() : TechniqueOf(Info()) {}

  absl::StatusOr<TechniqueSpec> Counterpart(const Problem& problem,
                                            const Options& options) const override {
    TFB_ASSIGN_OR_RETURN(ReversibleOptions parsed, ParseOptions<ReversibleOptions>(options));
    TFB_ASSIGN_OR_RETURN(parsed.f, layers::CounterpartOf(problem, parsed.f));
    OptionBinder binder;
    parsed.Describe(binder);
    return TechniqueSpec{info().name, binder.Values()};
  }

 private:
  std::vector<TensorSpec> ReadTensors(const Problem& problem,
                                      const ReversibleOptions& options) const override {
    std::vector<TensorSpec> tensors = HiddenInputs(problem);
    tensors.push_back({"key_mask", {problem.batch, problem.kv_tokens}, DType::kU8, true});
    for (int64_t n = 0; n < options.layers; ++n) InputsOfF(options, problem, n).AddTo(&tensors);
    return tensors;
  }

  std::vector<TensorSpec> WrittenTensors(const Problem& problem,
                                         const ReversibleOptions& options) const override {
    std::vector<TensorSpec> tensors = HiddenOutputs(problem);
    if (options.output == Output::kConcatenate) tensors[0].shape.back() *= 2;
    return tensors;
  }

  absl::Status Check(const Problem& problem, const ReversibleOptions& options) const override {
    if (problem.kv_tokens != problem.query_tokens) {
      return absl::InvalidArgumentError(
          absl::StrCat("reversible is self-attention: kv_tokens is ", problem.kv_tokens,
                       "; allowed is query_tokens, ", problem.query_tokens));
    }
    return options.f.CheckCount("f", absl::StrCat("layers=", options.layers), {options.layers});
  }

  absl::StatusOr<std::unique_ptr<Layer>> MakeLayer(const Problem& problem,
                                                   const ReversibleOptions& options, Device device,
                                                   uint64_t seed) const override {
    NamedTensors parameters;
    TFB_ASSIGN_OR_RETURN(ReversibleStack stack,
                         ReversibleStack::Create(problem, options, device, seed, &parameters));
    return std::make_unique<ReversibleLayer>(problem, ReadTensors(problem, options),
                                             WrittenTensors(problem, options), options.output,
                                             device, std::move(stack), std::move(parameters));
  }

  absl::Status Definition(const Problem& problem, const ReversibleOptions& options,
                          const NamedTensors& parameters, const Inputs& inputs,
                          const DefinitionRequest& request, NamedTensors* outputs) const override {
    const ReversibleNetwork network = {problem, options, parameters, inputs, request};
    const ConstTensorView x = inputs.Get("x");
    Tensor first(DType::kF64, x.shape());
    CopyElements(x, first.view());
    Tensor second = first.Clone();
    TFB_RETURN_IF_ERROR(DefineForward(network, &first, &second));
    if (options.output != Output::kConcatenate) {
      AddTo(second, 1, &first);
      for (double& y : first.span<double>()) y *= options.output == Output::kMean ? 0.5 : 1;
      (*outputs)["out"] = std::move(first);
      return absl::OkStatus();
    }
    Tensor out(DType::kF64, WrittenTensors(problem, options)[0].shape);
    const int64_t width = problem.model_dim();
    CopyElements(first.view(), Slice(out.view(), 2, 0, width));
    CopyElements(second.view(), Slice(out.view(), 2, width, width));
    (*outputs)["out"] = std::move(out);
    return absl::OkStatus();
  }
};

const bool registered = RegisterTechnique<Reversible>();

}  // namespace
}  // namespace tfb::reversible
