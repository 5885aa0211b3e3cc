#include "core/linear/linear_layer.h"

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstring>
#include <map>
#include <string>
#include <type_traits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/cuda/for_each.h"
#include "core/linear/linear_backward_steps.h"
#include "core/linear/linear_cuda.h"
#include "core/status.h"
#include "core/workspace.h"

namespace tfb {
namespace {

// Returns the number of query rows that see a key, over all heads.
double SeeingRows(const Problem& p) {
  if (p.kv_tokens == 0) return 0;
  const int64_t keyless = p.causal ? std::clamp<int64_t>(-p.causal_offset(), 0, p.query_tokens) : 0;
  return static_cast<double>(p.batch * p.query_heads * (p.query_tokens - keyless));
}

// Returns the same tensors for a segment: tokens are the second dimension of a mask and the third
// of all others.
std::vector<TensorSpec> OfSegment(std::vector<TensorSpec> specs) {
  for (TensorSpec& spec : specs) spec.shape[spec.shape.size() == 2 ? 1 : 2] = kSegmentTokens;
  return specs;
}

bool SameBits(const Tensor& a, const Tensor& b) {
  return a.bytes() == b.bytes() && std::memcmp(a.raw(), b.raw(), a.bytes()) == 0;
}

// Base is Layer or StreamingLayer.
template <class Base>
class LinearLayer : public Base {
 public:
  template <class... BaseArguments>
  LinearLayer(Device device, const FeatureMap& map, LinearParameters parameters,
              BaseArguments&&... base)
      : Base(std::forward<BaseArguments>(base)...),
        device_(device),
        map_(map),
        draw_(std::move(parameters.draw)),
        redraw_(parameters.redraw),
        has_channel_scale_(!parameters.channel_scale.empty()) {
    drawn_ = draw_(0);
    this->parameters_["w"] = drawn_.Clone();
    if (map.gated) this->parameters_["gate"] = std::move(parameters.gate);
    if (!has_channel_scale_) return;
    this->parameters_["channel_scale"] = std::move(parameters.channel_scale);
    scaled_ = drawn_.Clone();
  }

  size_t workspace_bytes(int threads) const override {
    if (device_ == Device::kCpu) return LinearWorkspaceBytes(this->problem(), map_, threads);
    const absl::StatusOr<CudaRuntime*> runtime = CudaRuntime::For(device_);
    if (!runtime.ok()) return 0;  // Setup tells
    return LinearCuda::WorkspaceBytes(**runtime, this->problem(), map_);
  }
  Cost cost() const override { return LinearCost(this->problem(), map_); }

  absl::Status CheckBackward() const override { return absl::OkStatus(); }
  size_t kept_bytes() const override {
    return device_ == Device::kCpu ? LinearKeptBytes(this->problem(), map_) : 0;
  }
  size_t backward_workspace_bytes(int threads) const override {
    Workspace workspace;
    LayOutMatrixGradient(workspace);
    const Problem& p = this->problem();
    return workspace.used() + (device_ == Device::kCpu
                                   ? LinearBackwardWorkspaceBytes(p, map_, threads)
                                   : LinearCuda::BackwardWorkspaceBytes(p, map_));
  }
  Cost backward_cost() const override { return LinearBackwardCost(this->problem(), map_); }
  std::vector<std::string> differentiable_outputs() const override {
    std::vector<std::string> names;
    for (const TensorSpec& output : this->outputs()) names.push_back(output.name);
    return names;
  }

  std::map<std::string, double> statistics() const override {
    const Problem& p = this->problem();
    const size_t state_bytes =
        device_ == Device::kCpu ? LinearStateBytes(p, map_) : LinearCuda::StateBytes(p, map_);
    std::map<std::string, double> statistics = {{"state_bytes", static_cast<double>(state_bytes)}};
    const double rows = static_cast<double>(p.batch * p.query_heads * p.query_tokens);
    if (!has_run_ || rows == 0) return statistics;
    const absl::StatusOr<int64_t> without_weight =
        device_ == Device::kCpu ? rows_without_weight_.load() : cuda_.RowsWithoutWeight();
    if (without_weight.ok()) {
      statistics["rows_without_weight"] = static_cast<double>(*without_weight) / rows;
    }
    return statistics;
  }

 protected:
  absl::Status DoSetup(const Inputs&, const Execution&) override {
    Tensor& w = this->parameters_["w"];
    if (redraw_ && SameBits(w, drawn_)) {
      drawn_ = draw_(setups_);
      CopyElements(drawn_.view(), w.view());
    }
    ++setups_;
    if (has_channel_scale_) ScaleChannels();
    if (device_ == Device::kCpu) return absl::OkStatus();
    TFB_ASSIGN_OR_RETURN(CudaRuntime * runtime, CudaRuntime::For(device_));
    constexpr bool kStreams = std::is_same_v<Base, StreamingLayer>;
    TFB_ASSIGN_OR_RETURN(
        cuda_, LinearCuda::Create(runtime, this->problem(), map_, matrix(), kStreams, gate()));
    return has_channel_scale_ ? UploadChannelScale(runtime) : absl::OkStatus();
  }

  absl::Status DoRun(const Inputs& inputs, const Outputs& outputs,
                     const Execution& execution) override {
    LinearCall call = CallOf(inputs, outputs);
    has_run_ = true;
    if (device_ != Device::kCpu) return cuda_.Run(this->problem(), call, execution);
    rows_without_weight_ = 0;
    call.rows_without_weight = &rows_without_weight_;
    return LinearCpu(this->problem(), call, execution);
  }

  absl::Status DoBackward(const BackwardCall& tensors, const Execution& execution) override {
    LinearBackwardCall call;
    static_cast<LinearInputs&>(call) = InputsOf(tensors.inputs);
    call.out = tensors.outputs.Get("out");
    call.out_gradient = tensors.output_gradients.Get("out");
    call.log_sum_exp_gradient = tensors.output_gradients.Get("log_sum_exp");
    call.q_gradient = tensors.input_gradients.Get("q");
    call.k_gradient = tensors.input_gradients.Get("k");
    call.v_gradient = tensors.input_gradients.Get("v");
    call.w_gradient = tensors.parameter_gradients.Get("w");
    call.gate_gradient = tensors.parameter_gradients.Get("gate");
    const TensorView scale_gradient = tensors.parameter_gradients.Get("channel_scale");
    if (!has_channel_scale_ || (call.w_gradient.empty() && scale_gradient.empty())) {
      return RunBackward(call, execution);
    }
    // The engine's W is the scaled one.
    Workspace workspace(execution.workspace);
    const TensorView scaled_gradient(LayOutMatrixGradient(workspace), DType::kF32, scaled_.shape());
    call.w_gradient = scaled_gradient;
    Execution rest = execution;
    rest.workspace = workspace.Rest();
    TFB_RETURN_IF_ERROR(RunBackward(call, rest));
    const ConstTensorView w = ParameterOf("w");
    const bool on_host = device_ == Device::kCpu;
    const ThroughChannelScale through = {
        scaled_gradient.template At<float>(),
        on_host ? w.At<float>() : matrix_on_device_.template As<float>(),
        on_host ? ParameterOf("channel_scale").template At<float>()
                : channel_scale_on_device_.template As<float>(),
        w.dim(1),
        w.dim(2),
        ToDeviceView(tensors.parameter_gradients.Get("w")),
        ToDeviceView(scale_gradient)};
    return ForEach(device_, w.dim(0) * w.dim(2), through, execution);
  }

  LinearInputs InputsOf(const Inputs& inputs) const {
    LinearInputs call;
    call.q = inputs.Get("q");
    call.k = inputs.Get("k");
    call.v = inputs.Get("v");
    call.key_mask = inputs.Get("key_mask");
    call.w = matrix();
    call.gate = gate();
    call.map = map_;
    return call;
  }
  LinearCall CallOf(const Inputs& inputs, const Outputs& outputs) const {
    LinearCall call;
    static_cast<LinearInputs&>(call) = InputsOf(inputs);
    call.out = outputs.Get("out");
    call.log_sum_exp = outputs.Get("log_sum_exp");
    return call;
  }

  Device device() const { return device_; }
  const FeatureMap& map() const { return map_; }
  LinearCuda& cuda() { return cuda_; }

 private:
  ConstTensorView ParameterOf(absl::string_view name) const {
    return this->parameters_.find(name)->second.view();
  }
  // Returns W in the engine's layout.
  ConstTensorView matrix() const {
    return has_channel_scale_ ? ConstTensorView(scaled_.view()) : ParameterOf("w");
  }
  ConstTensorView gate() const { return map_.gated ? ParameterOf("gate") : ConstTensorView(); }
  // Takes memory for the gradient of the scaled W, where there is one.
  float* LayOutMatrixGradient(Workspace& workspace) const {
    return workspace.Take<float>(has_channel_scale_ ? scaled_.num_elements() : 0);
  }
  absl::Status RunBackward(const LinearBackwardCall& call, const Execution& execution) const {
    return device_ == Device::kCpu ? LinearBackwardCpu(this->problem(), call, execution)
                                   : cuda_.Backward(this->problem(), call, execution);
  }
  // Uploads what the gradient of the channel scale is made of.
  absl::Status UploadChannelScale(CudaRuntime* runtime) {
    const Tensor& w = this->parameters_["w"];
    const Tensor& scale = this->parameters_["channel_scale"];
    TFB_ASSIGN_OR_RETURN(matrix_on_device_, runtime->Upload(w.raw(), w.bytes()));
    TFB_ASSIGN_OR_RETURN(channel_scale_on_device_, runtime->Upload(scale.raw(), scale.bytes()));
    return absl::OkStatus();
  }
  void ScaleChannels() {
    const ConstTensorView w = ParameterOf("w"), scale = ParameterOf("channel_scale");
    for (int64_t h = 0; h < w.dim(0); ++h) {
      for (int64_t r = 0; r < w.dim(1); ++r) {
        for (int64_t c = 0; c < w.dim(2); ++c) {
          *scaled_.view().template MutableAt<float>(h, r, c) =
              *w.At<float>(h, r, c) * *scale.At<float>(h, c);
        }
      }
    }
  }

  Device device_;
  FeatureMap map_;
  DrawMatrix draw_;
  bool redraw_;
  bool has_channel_scale_;
  Tensor scaled_;  // W with the channel scale, from Setup on
  Tensor drawn_;   // the last matrix from draw_
  int64_t setups_ = 0;
  bool has_run_ = false;
  std::atomic<int64_t> rows_without_weight_{0};
  // Used on other devices than the CPU, from Setup on.
  LinearCuda cuda_;
  DeviceBuffer matrix_on_device_;  // W without the channel scale
  DeviceBuffer channel_scale_on_device_;
};

class LinearStreamingLayer : public LinearLayer<StreamingLayer> {
 public:
  // On the CPU `state` has LinearStateBytes; Setup, which comes before the first Append, resets it.
  LinearStreamingLayer(Device device, const FeatureMap& map, LinearParameters parameters,
                       Tensor state, const Problem& problem, const std::vector<TensorSpec>& inputs,
                       const std::vector<TensorSpec>& outputs)
      : LinearLayer(device, map, std::move(parameters), problem, inputs, outputs, OfSegment(inputs),
                    OfSegment(outputs), std::max<int64_t>(problem.kv_tokens, 1)),
        state_(std::move(state)) {}

  absl::Status Reset() override {
    if (device() == Device::kCpu) {
      LinearReset(problem(), map(), state());
    } else {
      cuda().Reset();
    }
    return absl::OkStatus();
  }

 protected:
  absl::Status DoSetup(const Inputs& inputs, const Execution& execution) override {
    TFB_RETURN_IF_ERROR(LinearLayer::DoSetup(inputs, execution));
    return Reset();
  }
  absl::Status DoAppend(int64_t tokens, const Inputs& segment, const Outputs& outputs,
                        const Execution& execution) override {
    const LinearCall call = CallOf(segment, outputs);
    if (device() != Device::kCpu) return cuda().Append(problem(), tokens, call, execution);
    return LinearAppend(problem(), tokens, call, state(), execution);
  }

 private:
  absl::Span<std::byte> state() {
    return absl::MakeSpan(static_cast<std::byte*>(state_.raw()), state_.bytes());
  }
  Tensor state_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Layer>> MakeLinearLayer(const Problem& problem,
                                                       std::vector<TensorSpec> inputs,
                                                       std::vector<TensorSpec> outputs,
                                                       Device device, const FeatureMap& map,
                                                       LinearParameters parameters) {
  if (problem.causal && map.stabiliser != KeyStabiliser::kSequence) {
    Problem head = problem;
    head.batch = head.kv_heads = 1;
    Tensor state;
    if (device == Device::kCpu) {
      TFB_ASSIGN_OR_RETURN(
          state,
          Tensor::Allocate(DType::kU8, Shape{problem.batch, problem.kv_heads,
                                             static_cast<int64_t>(LinearStateBytes(head, map))}));
    }
    return std::make_unique<LinearStreamingLayer>(device, map, std::move(parameters),
                                                  std::move(state), problem, inputs, outputs);
  }
  return std::make_unique<LinearLayer<Layer>>(device, map, std::move(parameters), problem,
                                              std::move(inputs), std::move(outputs));
}

Cost LinearCost(const Problem& p, const FeatureMap& map) {
  const double projection = 2.0 * static_cast<double>(map.projections * p.head_dim);
  const double sums = 2.0 * static_cast<double>(map.features() * (p.value_dim + 1));
  const double keys = static_cast<double>(p.batch * p.kv_heads * p.kv_tokens);
  const double matrices = map.per_head ? static_cast<double>(p.kv_heads) : 1;
  Cost cost;
  cost.flops = (keys + SeeingRows(p)) * (projection + sums);
  cost.bytes = AttentionBytes(p) + matrices * static_cast<double>(map.projections * p.head_dim * 4);
  return cost;
}

Cost LinearBackwardCost(const Problem& p, const FeatureMap& map) {
  const double projection = 2.0 * static_cast<double>(map.projections * p.head_dim);
  const double sums = 2.0 * static_cast<double>(map.features() * (p.value_dim + 1));
  const double keys = static_cast<double>(p.batch * p.kv_heads * p.kv_tokens);
  Cost cost;
  cost.flops = (keys + SeeingRows(p)) * (3 * projection + 2 * sums);
  if (p.causal) *cost.flops += keys * sums;
  cost.bytes = 2 * *LinearCost(p, map).bytes;
  return cost;
}

}  // namespace tfb
