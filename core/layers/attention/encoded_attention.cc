#include "core/layers/attention/encoded_attention.h"

#include <algorithm>
#include <map>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/cuda/device_array.h"
#include "core/definition.h"
#include "core/layers/copy_tensor.h"
#include "core/layers/matmul.h"
#include "core/layers/matmul_gradient.h"
#include "core/layers/recompute.h"
#include "core/random.h"
#include "core/status.h"
#include "core/workspace.h"

namespace tfb::layers {
namespace {

int64_t ProjectionCount(const EncodedAttentionPlan& plan) {
  return plan.shared ? 1 : plan.applications;
}

// Returns the prefix of the parameters of application n.
std::string Prefix(const EncodedAttentionPlan& plan, int64_t n) {
  return ProjectionCount(plan) == 1 ? "" : absl::StrCat("application", n, ".");
}

// Returns the further inputs of application n.
FurtherInputs FurtherOf(const Problem& problem, const EncodedAttentionPlan& plan, int64_t n) {
  const bool is_alone = plan.applications == 1;
  return FurtherInputsOf(plan.inner.Of(n), problem,
                         {"", is_alone ? "" : absl::StrCat("application", n, ".")});
}

absl::Status CheckCount(const EncodedAttentionPlan& plan) {
  return plan.inner.CheckCount("inner", absl::StrCat("layers=", plan.applications),
                               {plan.applications});
}

class EncodedAttentionLayer : public Layer {
 public:
  EncodedAttentionLayer(const Problem& problem, const EncodedAttentionPlan& plan,
                        MakeEncodings make_encodings, Device device)
      : Layer(problem, EncodedAttentionInputs(problem, plan), HiddenOutputs(problem)),
        plan_(plan),
        make_encodings_(std::move(make_encodings)),
        device_(device),
        kept_(static_cast<size_t>(plan.applications)) {
    for (int64_t n = 0; n < plan.applications; ++n) {
      further_.push_back(FurtherOf(problem, plan, n));
    }
  }

  absl::Status Build(const std::vector<ParameterSpec>& own, uint64_t seed) {
    TFB_RETURN_IF_ERROR(DrawParameters(own, seed, &parameters_));
    for (const ParameterSpec& spec : own) {
      own_bytes_ += 4 * static_cast<double>(NumElements(spec.shape));
    }
    // u is fp32: an inner technique that reads it expects the problem's dtype.
    const bool gives_x = problem().dtype == DType::kF32;
    for (int64_t n = 0; n < ProjectionCount(plan_); ++n) {
      const std::string prefix = Prefix(plan_, n);
      TFB_RETURN_IF_ERROR(DrawParameters(
          WithPrefix(prefix, ProjectionSpecs(problem(), plan_.bias, plan_.inner.Of(n))), seed,
          &parameters_));
      const uint64_t inner_seed = prefix.empty() ? seed : RandomStream(seed, prefix).Bits(0);
      TFB_ASSIGN_OR_RETURN(std::unique_ptr<Layer> inner,
                           CreateInner(plan_.inner.Of(n), problem(), device_, inner_seed, gives_x));
      AddInnerParameters(*inner, prefix + "inner.", &parameters_);
      attention_.emplace_back(device_, problem(), /*cross=*/false, std::move(inner));
    }
    std::vector<std::pair<const FurtherInputs*, const Layer*>> further;
    for (int64_t n = 0; n < plan_.applications; ++n) {
      further.emplace_back(&further_[n], &attention_[IndexOf(n)].inner());
    }
    further_differentiate_ = FurtherInputs::CheckBackward(further);
    return absl::OkStatus();
  }

  size_t workspace_bytes(int threads) const override {
    size_t bytes = 0;
    for (const ProjectedAttention& attention : attention_) {
      bytes = std::max(bytes, attention.workspace_bytes(threads));
    }
    return bytes + Workspace::Measure([this](Workspace& workspace) { TakeState(workspace); });
  }

  // Returns the cost. FLOPs are multi_head's: additions of encodings are not counted, as those of
  // biases are not. A Run reads only the rows of the encodings' parameters that it adds.
  Cost cost() const override {
    Cost cost;
    cost.bytes = TensorBytes() - own_bytes_ +
                 4 * static_cast<double>(plan_.rows_added * problem().model_dim());
    double flops = 0;
    for (int64_t n = 0; n < plan_.applications; ++n) {
      const ProjectedAttention& attention = attention_[IndexOf(n)];
      const Cost inner = attention.inner().cost();
      if (!inner.flops.has_value()) return cost;
      flops += attention.projection_flops() + *inner.flops;
    }
    cost.flops = flops;
    return cost;
  }

  std::map<std::string, double> statistics() const override {
    std::map<std::string, double> statistics = attention_[0].inner().statistics();
    if (device_ == Device::kCuda) statistics["cublas"] = MatMulUsesCublas(device_) ? 1 : 0;
    if (CheckBackward().ok()) {
      statistics[kKeptBytesPerBlock] =
          static_cast<double>(kept_bytes()) / static_cast<double>(plan_.applications);
    }
    return statistics;
  }

  absl::Status CheckBackward() const override {
    for (const ProjectedAttention& attention : attention_) {
      TFB_RETURN_IF_ERROR(attention.CheckBackward());
    }
    return further_differentiate_;
  }
  size_t kept_bytes() const override {
    return Workspace::Measure([this](Workspace& workspace) {
      for (int64_t n = 0; n < plan_.applications; ++n) LayOutKept(n, workspace);
    });
  }
  size_t backward_workspace_bytes(int threads) const override {
    const Problem& p = problem();
    size_t bytes = MatMulGradientWorkspaceBytes(device_, p.batch * p.query_tokens, p.model_dim(),
                                                p.model_dim(), threads);
    for (const ProjectedAttention& attention : attention_) {
      bytes = std::max(bytes, attention.backward_workspace_bytes(threads));
      if (plan_.recompute) bytes = std::max(bytes, attention.workspace_bytes(threads));
    }
    return bytes + Workspace::Measure([this](Workspace& workspace) { LayOutBackward(workspace); });
  }
  Cost backward_cost() const override {
    Cost cost;
    cost.bytes = 2 * *this->cost().bytes;  // the tensors and their gradients
    double flops = 0;
    for (int64_t n = 0; n < plan_.applications; ++n) {
      const ProjectedAttention& attention = attention_[IndexOf(n)];
      const Cost inner = attention.inner().backward_cost();
      if (!inner.flops.has_value()) return cost;
      flops += 2 * attention.projection_flops() + *inner.flops;
    }
    cost.flops = flops + (plan_.recompute ? this->cost().flops.value_or(0) : 0);
    return cost;
  }
  std::map<std::string, std::string> stopped_gradients() const override {
    std::map<std::string, std::string> stopped;
    for (int64_t n = 0; n < plan_.applications; ++n) {
      stopped.merge(attention_[IndexOf(n)].stopped_gradients(further_[n], parameters_,
                                                             Prefix(plan_, IndexOf(n))));
    }
    return stopped;
  }

 protected:
  absl::Status DoSetUpBackward(const Inputs& inputs, const Execution& execution) override {
    Workspace workspace(execution.workspace);
    const TensorView state = LayOutBackward(workspace).du;
    Execution rest = execution;
    rest.workspace = workspace.Rest();
    for (int64_t n = 0; n < ProjectionCount(plan_); ++n) {
      TFB_ASSIGN_OR_RETURN(const ConstTensorView u, Encode(n, inputs.Get("x"), state, rest));
      TFB_RETURN_IF_ERROR(attention_[n].SetUpBackward(
          parameters_, Prefix(plan_, n),
          {{u, {}, inputs.Get("key_mask"), &further_[n].From(inputs)}, {}, {}}, rest));
    }
    return absl::OkStatus();
  }

  absl::Status DoBackward(const BackwardCall& call, const Execution& execution) override {
    Workspace workspace(execution.workspace), memory(execution.kept);
    const BackwardScratch scratch = LayOutBackward(workspace);
    const TensorView& du = scratch.du;
    Execution rest = execution;
    rest.workspace = workspace.Rest();
    LayOutAllKept(memory);
    ConstTensorView dh = call.output_gradients.Get("out");
    if (dh.empty()) {
      TFB_RETURN_IF_ERROR(ClearTensor(device_, du, rest));
      dh = du;
    }
    for (int64_t n = plan_.applications - 1; n >= 0; --n) {
      const AttentionInputs inputs = {
          kept_[n].u, {}, call.inputs.Get("key_mask"), &further_[n].From(call.inputs)};
      rest.kept = plan_.recompute ? scratch.attention : kept_[n].attention;
      if (plan_.recompute) {
        TFB_RETURN_IF_ERROR(attention_[IndexOf(n)].Run({inputs, {}, scratch.again}, rest));
      }
      const bool is_first = n == plan_.applications - 1;  // of those that go backwards
      TFB_RETURN_IF_ERROR(
          attention_[IndexOf(n)].Backward({inputs,
                                           dh,
                                           {},
                                           du,
                                           {},
                                           &further_[n].GradientsFrom(call.input_gradients),
                                           call.parameter_gradients,
                                           plan_.shared && !is_first},
                                          rest));
      TFB_RETURN_IF_ERROR(EncodingsBackward(n, du, call, rest));
      if (n > 0 && plan_.scale != 1) {
        TFB_RETURN_IF_ERROR(
            AddScaled(device_, static_cast<float>(plan_.scale), du, 0, du, du, rest));
      }
      dh = du;
    }
    const TensorView dx = call.input_gradients.Get("x");
    if (dx.empty()) return absl::OkStatus();
    return AddScaled(device_, static_cast<float>(plan_.scale), du, 0, du, dx, rest);
  }

  absl::Status DoSetup(const Inputs& inputs, const Execution& execution) override {
    TFB_ASSIGN_OR_RETURN(const Encodings encodings, make_encodings_(parameters_));
    repeat_ = encodings.repeat;
    TFB_ASSIGN_OR_RETURN(positions_, ToDevice(encodings.positions));
    TFB_ASSIGN_OR_RETURN(times_, ToDevice(encodings.times));
    return Apply(inputs, {}, execution, /*sets_up=*/true);
  }
  absl::Status DoRun(const Inputs& inputs, const Outputs& outputs,
                     const Execution& execution) override {
    return Apply(inputs, outputs.Get("out"), execution, /*sets_up=*/false);
  }

 private:
  absl::StatusOr<DeviceArray<float>> ToDevice(const Tensor& tensor) const {
    if (tensor.empty()) return DeviceArray<float>();
    return CopyFloats(device_, tensor.view());
  }
  // Returns the index of application n in attention_.
  int64_t IndexOf(int64_t n) const { return plan_.shared ? 0 : n; }
  TensorView TakeState(Workspace& workspace) const {
    const Problem& p = problem();
    const Shape shape = {p.batch, p.query_tokens, p.model_dim()};
    return TensorView(workspace.Take<float>(NumElements(shape)), DType::kF32, shape);
  }

  // Return P^n and t^n as additions to a hidden state; empty where there is none.
  ConstTensorView Positions(int64_t n) const {
    const Problem& p = problem();
    const int64_t size = p.query_tokens * p.model_dim();
    const int64_t first = repeat_ ? 0 : n * size;
    if (size == 0 || first + size > positions_.size()) return {};
    return ConstTensorView(positions_.data() + first, DType::kF32,
                           {p.batch, p.query_tokens, p.model_dim()}, {0, p.model_dim(), 1});
  }
  ConstTensorView Time(int64_t n) const {
    const Problem& p = problem();
    if (times_.size() == 0) return {};
    return ConstTensorView(times_.data() + n * p.model_dim(), DType::kF32,
                           {p.batch, p.query_tokens, p.model_dim()}, {0, 0, 1});
  }

  // A Run keeps this of an application: with recompute, u alone.
  struct Kept {
    TensorView u;
    absl::Span<std::byte> attention;
  };
  void LayOutAllKept(Workspace& memory) {
    for (int64_t n = 0; n < plan_.applications; ++n) kept_[n] = LayOutKept(n, memory);
  }
  Kept LayOutKept(int64_t n, Workspace& workspace) const {
    Kept kept;
    kept.u = TakeState(workspace);
    if (plan_.recompute) return kept;
    kept.attention = TakeBytes(attention_[IndexOf(n)].kept_bytes(), workspace);
    return kept;
  }
  static absl::Span<std::byte> TakeBytes(size_t bytes, Workspace& workspace) {
    return absl::MakeSpan(workspace.Take<std::byte>(static_cast<int64_t>(bytes)), bytes);
  }

  struct BackwardScratch {
    TensorView du;
    // With recompute: what an application writes, and what its attention keeps.
    TensorView again;
    absl::Span<std::byte> attention;
  };
  BackwardScratch LayOutBackward(Workspace& workspace) const {
    BackwardScratch scratch;
    scratch.du = TakeState(workspace);
    if (!plan_.recompute) return scratch;
    scratch.again = TakeState(workspace);
    size_t largest = 0;
    for (const ProjectedAttention& attention : attention_) {
      largest = std::max(largest, attention.kept_bytes());
    }
    scratch.attention = TakeBytes(largest, workspace);
    return scratch;
  }

  // Writes the gradients of application n's encodings; applications come last first.
  absl::Status EncodingsBackward(int64_t n, const TensorView& du, const BackwardCall& call,
                                 const Execution& execution) const {
    const TensorView p = call.parameter_gradients.Get(plan_.positions_parameter);
    if (n == plan_.applications - 1 && !p.empty()) {  // rows that no token has
      TFB_RETURN_IF_ERROR(ClearTensor(device_, p, execution));
    }
    const int64_t table = repeat_ ? 0 : n;
    if (!p.empty() && table < p.dim(0)) {
      TensorView rows =
          Slice(Slice(p, 0, table, 1), 1, plan_.first_position, problem().query_tokens);
      rows = TensorView(rows.mutable_data(), rows.dtype, Shape{rows.dim(1), rows.dim(2)},
                        Shape{rows.stride(1), rows.stride(2)});
      for (int64_t b = 0; b < du.dim(0); ++b) {
        const ConstTensorView of_batch(du.At<float>(b), DType::kF32, rows.shape());
        TFB_RETURN_IF_ERROR(AddTensor(device_, of_batch, rows, execution));
      }
    }
    const TensorView t = call.parameter_gradients.Get(plan_.times_parameter);
    if (t.empty()) return absl::OkStatus();
    const TensorView row(t.MutableAt<float>(n), DType::kF32, Shape{t.dim(1)}, Shape{t.stride(1)});
    return MatMulGradient(device_, {du, du, {}, row}, execution);
  }

  // Returns the input of application n's attention: u, in `state` where something is added.
  absl::StatusOr<ConstTensorView> Encode(int64_t n, ConstTensorView h, const TensorView& state,
                                         const Execution& execution) const {
    const ConstTensorView positions = Positions(n), time = Time(n);
    if (!positions.empty()) {
      TFB_RETURN_IF_ERROR(
          AddScaled(device_, static_cast<float>(plan_.scale), h, 1, positions, state, execution));
      h = state;
    }
    if (!time.empty()) {
      TFB_RETURN_IF_ERROR(Add(device_, h, time, state, execution));
      h = state;
    }
    return h;
  }

  // Runs the applications; Setup runs up to the attention that is set up last.
  absl::Status Apply(const Inputs& inputs, const TensorView& out, const Execution& execution,
                     bool sets_up) {
    Workspace workspace(execution.workspace), memory(execution.kept);
    TensorView state = TakeState(workspace);
    Execution rest = execution;
    rest.workspace = workspace.Rest();
    const bool keeps = !execution.kept.empty();
    ConstTensorView h = inputs.Get("x");
    const int64_t applications = sets_up ? ProjectionCount(plan_) : plan_.applications;
    if (keeps) LayOutAllKept(memory);
    for (int64_t n = 0; n < applications; ++n) {
      if (keeps) {
        rest.kept = kept_[n].attention;
        state = kept_[n].u;
      }
      TFB_ASSIGN_OR_RETURN(h, Encode(n, h, state, rest));
      ProjectedAttention& attention = attention_[IndexOf(n)];
      const bool last = n == applications - 1;
      // What the next application reads is encoded in place.
      const TensorView next = keeps && !last ? kept_[n + 1].u : state;
      const ProjectedAttention::Call call = {
          {h, {}, inputs.Get("key_mask"), &further_[n].From(inputs)}, {}, last ? out : next};
      if (sets_up) TFB_RETURN_IF_ERROR(attention.Setup(parameters_, Prefix(plan_, n), call, rest));
      if (sets_up && last) break;
      TFB_RETURN_IF_ERROR(attention.Run(call, rest));
      h = next;
    }
    return absl::OkStatus();
  }

  EncodedAttentionPlan plan_;
  MakeEncodings make_encodings_;
  Device device_;
  std::vector<FurtherInputs> further_;  // of each application
  std::vector<ProjectedAttention> attention_;
  DeviceArray<float> positions_;
  DeviceArray<float> times_;
  bool repeat_ = false;
  absl::Status further_differentiate_;
  std::vector<Kept> kept_;  // of each application, in the memory of the call at hand
  double own_bytes_ = 0;    // bytes of the encodings' parameters
};

}  // namespace

std::vector<TensorSpec> EncodedAttentionInputs(const Problem& problem,
                                               const EncodedAttentionPlan& plan) {
  std::vector<TensorSpec> tensors = HiddenInputs(problem);
  tensors.push_back({"key_mask", {problem.batch, problem.kv_tokens}, DType::kU8, true});
  for (int64_t n = 0; n < plan.applications; ++n) {
    FurtherOf(problem, plan, n).AddTo(&tensors);
  }
  return tensors;
}

absl::StatusOr<std::unique_ptr<Layer>> CreateEncodedAttention(const Problem& problem,
                                                              const EncodedAttentionPlan& plan,
                                                              const std::vector<ParameterSpec>& own,
                                                              MakeEncodings make_encodings,
                                                              Device device, uint64_t seed) {
  TFB_RETURN_IF_ERROR(CheckCount(plan));
  auto layer =
      std::make_unique<EncodedAttentionLayer>(problem, plan, std::move(make_encodings), device);
  TFB_RETURN_IF_ERROR(layer->Build(own, seed));
  return layer;
}

absl::Status DefineEncodedAttention(const Problem& problem, const EncodedAttentionPlan& plan,
                                    DefineEncoding encoding, const NamedTensors& parameters,
                                    const Inputs& inputs, const DefinitionRequest& request,
                                    NamedTensors* outputs) {
  TFB_RETURN_IF_ERROR(CheckCount(plan));
  Tensor h = Tensor(DType::kF64, inputs.Get("x").shape());
  CopyElements(inputs.Get("x"), h.view());
  for (int64_t n = 0; n < plan.applications; ++n) {
    ForEachOf(request.pool, problem.query_tokens, [&](int64_t p) {
      for (int64_t c = 0; c < problem.model_dim(); ++c) {
        const double added = encoding(n, p, c);
        for (int64_t b = 0; b < problem.batch; ++b) {
          double& x = *h.view().MutableAt<double>(b, p, c);
          x = plan.scale * x + added;
        }
      }
    });
    const bool last = n == plan.applications - 1;
    FurtherInputs further = FurtherOf(problem, plan, n);
    NamedTensors attended;
    TFB_RETURN_IF_ERROR(
        DefineProjectedAttention(problem, plan.inner.Of(n), parameters, Prefix(plan, n),
                                 {h.view(), {}, inputs.Get("key_mask"), &further.From(inputs)},
                                 last ? request : request.OfPart(), &attended));
    h = std::move(attended.at("out"));
    if (last && request.weights && attended.count("weights") > 0) {
      (*outputs)["weights"] = std::move(attended.at("weights"));
    }
  }
  (*outputs)["out"] = std::move(h);
  return absl::OkStatus();
}

}  // namespace tfb::layers
