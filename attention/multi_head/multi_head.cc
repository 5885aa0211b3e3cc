#include "attention/multi_head/multi_head.h"

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/cuda/device_array.h"
#include "core/status.h"

namespace tfb::multi_head {
namespace {

TechniqueInfo Info() {
  TechniqueInfo info;
  info.name = "multi_head";
  info.family = "attention";
  info.title = "Multi-head attention on hidden states";
  info.citation = "Vaswani et al. 2017, arXiv:1706.03762v7, section 3.2.2";
  info.input_kind = InputKind::kHidden;
  info.exactness = Exactness::kExact;
  info.growth = 2;
  return info;
}

layers::AttentionInputs InputsOf(const Inputs& inputs, layers::FurtherInputs& further) {
  return {inputs.Get("x"), inputs.Get("memory"), inputs.Get("key_mask"), &further.From(inputs)};
}

class MultiHeadLayer : public Layer {
 public:
  static absl::StatusOr<std::unique_ptr<Layer>> Create(const Problem& problem,
                                                       std::vector<TensorSpec> inputs,
                                                       std::vector<TensorSpec> outputs,
                                                       const MultiHeadOptions& options,
                                                       Device device, uint64_t seed) {
    NamedTensors parameters;
    TFB_RETURN_IF_ERROR(layers::DrawParameters(
        layers::ProjectionSpecs(problem, options.bias, options.inner), seed, &parameters));
    TFB_ASSIGN_OR_RETURN(
        std::unique_ptr<Layer> inner,
        layers::CreateInner(options.inner, problem, device, seed, /*gives_x=*/true));
    layers::AddInnerParameters(*inner, "inner.", &parameters);
    std::unique_ptr<MultiHeadLayer> layer(new MultiHeadLayer(
        problem, std::move(inputs), std::move(outputs), options, device, std::move(inner)));
    layer->parameters_ = std::move(parameters);
    return layer;
  }

  size_t workspace_bytes(int threads) const override { return attention_.workspace_bytes(threads); }

  Cost cost() const override {
    Cost cost;
    const Cost inner = attention_.inner().cost();
    if (inner.flops.has_value()) cost.flops = attention_.projection_flops() + *inner.flops;
    cost.bytes = TensorBytes();
    return cost;
  }

  std::map<std::string, double> statistics() const override {
    std::map<std::string, double> statistics = attention_.inner().statistics();
    if (device_ == Device::kCuda) statistics["cublas"] = MatMulUsesCublas(device_) ? 1 : 0;
    return statistics;
  }

  absl::Status CheckBackward() const override { return attention_.CheckBackward(); }
  size_t kept_bytes() const override { return attention_.kept_bytes(); }
  size_t backward_workspace_bytes(int threads) const override {
    return attention_.backward_workspace_bytes(threads);
  }
  Cost backward_cost() const override {
    Cost cost;
    const Cost inner = attention_.inner().backward_cost();
    if (inner.flops.has_value()) cost.flops = 2 * attention_.projection_flops() + *inner.flops;
    cost.bytes = 2 * TensorBytes();  // the tensors and their gradients
    return cost;
  }
  std::map<std::string, std::string> stopped_gradients() const override {
    return attention_.stopped_gradients(further_, parameters_, "");
  }

 protected:
  absl::Status DoSetup(const Inputs& inputs, const Execution& execution) override {
    return attention_.Setup(parameters_, "", {InputsOf(inputs, further_), {}, {}}, execution);
  }
  absl::Status DoRun(const Inputs& inputs, const Outputs& outputs,
                     const Execution& execution) override {
    return attention_.Run({InputsOf(inputs, further_), {}, outputs.Get("out"), &outputs},
                          execution);
  }
  absl::Status DoSetUpBackward(const Inputs& inputs, const Execution& execution) override {
    TFB_ASSIGN_OR_RETURN(zero_, DeviceArray<float>::Create(device_, {0}));
    return attention_.SetUpBackward(parameters_, "", {InputsOf(inputs, further_), {}, {}},
                                    execution);
  }
  absl::Status DoBackward(const BackwardCall& call, const Execution& execution) override {
    const ConstTensorView given = call.output_gradients.Get("out"), out = call.outputs.Get("out");
    const ConstTensorView zeros(zero_.data(), DType::kF32, out.shape(), Shape(out.rank, 0));
    return attention_.Backward({InputsOf(call.inputs, further_),
                                given.empty() ? zeros : given,
                                {},
                                call.input_gradients.Get("x"),
                                call.input_gradients.Get("memory"),
                                &further_.GradientsFrom(call.input_gradients),
                                call.parameter_gradients},
                               execution);
  }

 private:
  MultiHeadLayer(const Problem& problem, std::vector<TensorSpec> inputs,
                 std::vector<TensorSpec> outputs, const MultiHeadOptions& options, Device device,
                 std::unique_ptr<Layer> inner)
      : Layer(problem, std::move(inputs), std::move(outputs)),
        device_(device),
        further_(layers::FurtherInputsOf(options.inner, problem)),
        attention_(device, problem, options.cross, std::move(inner)) {}

  Device device_;
  layers::FurtherInputs further_;
  layers::ProjectedAttention attention_;
  DeviceArray<float> zero_;  // an output's gradient that is left out
};

class MultiHead : public TechniqueOf<MultiHeadOptions> {
 public:
  MultiHead() : TechniqueOf(Info()) {}

  absl::StatusOr<TechniqueSpec> Counterpart(const Problem& problem,
                                            const Options& options) const override {
    return layers::WithCounterpartInside<MultiHeadOptions>(*this, problem, options);
  }

 private:
  std::vector<TensorSpec> ReadTensors(const Problem& problem,
                                      const MultiHeadOptions& options) const override {
    std::vector<TensorSpec> tensors = HiddenInputs(problem);
    if (options.cross) {
      tensors.push_back(
          {"memory", {problem.batch, problem.kv_tokens, problem.model_dim()}, problem.dtype});
    }
    tensors.push_back({"key_mask", {problem.batch, problem.kv_tokens}, DType::kU8, true});
    layers::FurtherInputsOf(options.inner, problem).AddTo(&tensors);
    return tensors;
  }

  std::vector<TensorSpec> WrittenTensors(const Problem& problem,
                                         const MultiHeadOptions& options) const override {
    std::vector<TensorSpec> tensors = HiddenOutputs(problem);
    for (TensorSpec& spec : layers::FurtherOutputsOf(options.inner, problem)) {
      tensors.push_back(std::move(spec));
    }
    return tensors;
  }

  absl::Status Check(const Problem& problem, const MultiHeadOptions& options) const override {
    if (options.cross || problem.kv_tokens == problem.query_tokens) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat("without cross, keys are of the same tokens as queries: kv_tokens is ",
                     problem.kv_tokens, "; allowed is query_tokens, ", problem.query_tokens));
  }

  absl::StatusOr<std::unique_ptr<Layer>> MakeLayer(const Problem& problem,
                                                   const MultiHeadOptions& options, Device device,
                                                   uint64_t seed) const override {
    return MultiHeadLayer::Create(problem, ReadTensors(problem, options),
                                  WrittenTensors(problem, options), options, device, seed);
  }

  absl::Status Definition(const Problem& problem, const MultiHeadOptions& options,
                          const NamedTensors& parameters, const Inputs& inputs,
                          const DefinitionRequest& request, NamedTensors* outputs) const override {
    layers::FurtherInputs further = layers::FurtherInputsOf(options.inner, problem);
    return layers::DefineProjectedAttention(problem, options.inner, parameters, "",
                                            InputsOf(inputs, further), request, outputs);
  }
};

const bool registered = RegisterTechnique<MultiHead>();

}  // namespace
}  // namespace tfb::multi_head
