#include "adaptive/adaptive_span/adaptive_span.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "adaptive/adaptive_span/adaptive_span_cuda.h"
#include "core/cuda/device_array.h"
#include "core/cuda/for_each.h"
#include "core/cuda/runtime.h"
#include "core/cuda/sum_in_runs.h"
#include "core/flash/flash_technique.h"
#include "core/layers/matmul.h"
#include "core/random.h"

namespace tfb::adaptive_span {
namespace {

TechniqueInfo Info() {
  TechniqueInfo info = {"adaptive_span", "adaptive", "Adaptive attention span",
                        "Sukhbaatar et al. 2019, arXiv:1905.07799v2"};
  info.budget_option = "span";
  info.growth = 1;
  info.supports_noncausal = false;
  return info;
}

// A pattern in which head h sees the distances 1 to reach[h].
class SpanPattern : public Pattern {
 public:
  SpanPattern(std::vector<int64_t> reach, int64_t causal_offset)
      : reach_(std::move(reach)), causal_offset_(causal_offset) {}
  int64_t heads() const override { return static_cast<int64_t>(reach_.size()); }
  int64_t AddKeys(int64_t head, int64_t i, KeyList* keys) const override {
    keys->Add(i + causal_offset_ - reach_[head], i + causal_offset_);
    return i + 1;
  }

 private:
  std::vector<int64_t> reach_;
  int64_t causal_offset_;
};

// Returns the largest distance with a weight above 0: x < ramp + z.
int64_t Reach(const AdaptiveSpanOptions& options, double z) {
  return std::clamp<int64_t>(static_cast<int64_t>(std::ceil(options.ramp + z)) - 1, 0,
                             options.max_span);
}

Traced Clamp(const AdaptiveSpanOptions& options, const Traced& z) {
  return tfb::Clamp(z, 0, static_cast<double>(options.max_span));
}

// Returns the mean and the largest of spans, by name.
std::map<std::string, double> StatisticsOf(const std::vector<float>& spans) {
  double mean = 0, max = 0;
  for (const float span : spans) {
    mean += span / static_cast<double>(spans.size());
    max = std::max<double>(max, span);
  }
  return {{"mean_span", mean}, {"max_span", max}};
}

// Spans that are parameters: they are known before a Run.
class FixedSpans : public FlashStep {
 public:
  explicit FixedSpans(std::vector<float> spans) : spans_(std::move(spans)) {}
  void LayOut(Workspace*, Inputs*) override {}
  absl::Status Run(const Inputs&, const Outputs&, const Execution&) override {
    return absl::OkStatus();
  }
  std::map<std::string, double> statistics() const override { return StatisticsOf(spans_); }
  absl::Status CheckBackward(Device) const override { return absl::OkStatus(); }

 private:
  std::vector<float> spans_;
};

// Spans that a gate computes from the hidden states: z = max_span sigmoid(w . x + b) of every token
// and head, the tensor "spans" [batch, query_heads, query_tokens].
class DynamicSpans : public FlashStep {
 public:
  DynamicSpans(const Problem& problem, const AdaptiveSpanOptions& options,
               const NamedTensors& parameters)
      : problem_(problem), options_(options), parameters_(parameters) {}

  absl::Status Setup(Device device, const Inputs&, const Execution&) override {
    device_ = device;
    return SetUpGate();
  }

  void LayOut(Workspace*, Inputs* tensors) override {
    const Problem& p = problem_;
    tensors->Set("spans", ConstTensorView(spans_.data(), DType::kF32,
                                          {p.batch, p.query_heads, p.query_tokens}));
  }
  size_t workspace_bytes(Device device, int threads) const override {
    const Problem& p = problem_;
    if (device != Device::kCpu) return 0;
    return MatMulWorkspaceBytes(device, p.batch * p.query_tokens, p.model_dim(), p.query_heads,
                                threads);
  }
  absl::Status Run(const Inputs& tensors, const Outputs&, const Execution& execution) override {
    const ConstTensorView x = tensors.Get("x");
    has_run_ = true;
    return device_ == Device::kCpu ? ComputeSpansOnCpu(x, execution)
                                   : ComputeSpansOnCuda(x, execution);
  }

  // With a = w . x + b, z = max_span sigmoid(a) and da = dz max_span sigmoid(a) sigmoid(-a): dw = sum da
  // x, db = sum da, and dx = sum over heads of da w. 1 - z / max_span would have lost what z rounds
  // where a gate is all but open.
  absl::Status CheckBackward(Device) const override { return absl::OkStatus(); }
  size_t backward_workspace_bytes(Device, int) const override {
    return std::max(SumInRunsBytes<AddToWeight>(ShapeOfSums(problem_.model_dim())),
                    SumInRunsBytes<AddToBias>(ShapeOfSums(1)));
  }
  absl::Status Backward(const Inputs& tensors, const Outputs& gradients,
                        const ParameterGradients& parameters, const Execution& execution) override {
    const Problem& p = problem_;
    const GateGradients of = {gradients.Get("spans").MutableAt<float>(0), slopes_.data(), p.batch,
                              p.query_heads, p.query_tokens};
    const auto sums_of = [&](const char* name) {
      return parameters.sums() + parameters.PlaceOf(parameters_.at(name).raw());
    };
    const AddToWeight to_weight = {of, ToDeviceView(tensors.Get("x")), p.model_dim(),
                                   sums_of("span_weight")};
    TFB_RETURN_IF_ERROR(SumInRuns(device_, ShapeOfSums(p.model_dim()), to_weight, execution));
    TFB_RETURN_IF_ERROR(
        SumInRuns(device_, ShapeOfSums(1), AddToBias{of, sums_of("span_bias")}, execution));
    const TensorView of_x = gradients.Get("x");
    if (of_x.empty()) return absl::OkStatus();
    const AddToHidden to_hidden = {of, gate_weight_.data(), p.model_dim(), ToDeviceView(of_x)};
    return ForEachInRows(device_, p.batch * p.query_tokens, p.model_dim(), to_hidden, execution);
  }

  double flops() const override {
    const Problem& p = problem_;
    return 2.0 * static_cast<double>(p.batch * p.query_heads * p.query_tokens * p.model_dim());
  }
  // On a GPU the last Run must be done for these, which are of its spans.
  std::map<std::string, double> statistics() const override {
    if (!has_run_) return {};
    return StatisticsOf(OnHost());
  }
  // Returns the kept pairs of all heads and batch rows.
  std::optional<double> KeptPairs() const {
    if (!has_run_) return std::nullopt;
    const Problem& p = problem_;
    double pairs = 0;
    const std::vector<float> spans = OnHost();
    for (size_t n = 0; n < spans.size(); ++n) {
      const int64_t past = static_cast<int64_t>(n) % p.query_tokens + p.causal_offset();
      pairs += static_cast<double>(std::clamp<int64_t>(past, 0, Reach(options_, spans[n])));
    }
    if (pairs > 0) return pairs;
    return std::nullopt;
  }

 private:
  // Returns the shape of sums over all tokens, for each head.
  SumShape ShapeOfSums(int64_t columns) const {
    return {problem_.query_heads, columns, problem_.batch * problem_.query_tokens};
  }
  absl::Status SetUpGate() {
    const Problem& p = problem_;
    const ConstTensorView weight = parameters_.at("span_weight").view();
    const ConstTensorView bias = parameters_.at("span_bias").view();
    has_run_ = false;
    TFB_ASSIGN_OR_RETURN(
        spans_, DeviceArray<float>::Allocate(device_, p.batch * p.query_heads * p.query_tokens));
    TFB_ASSIGN_OR_RETURN(slopes_, DeviceArray<float>::Allocate(device_, spans_.size()));
    TFB_ASSIGN_OR_RETURN(gate_weight_, CopyFloats(device_, weight));
    if (device_ == Device::kCpu) {
      TFB_ASSIGN_OR_RETURN(gate_, PackedMatrix::Create(device_, Transpose(weight, 0, 1), bias));
    } else {
      TFB_ASSIGN_OR_RETURN(gate_bias_, CopyFloats(device_, bias));
    }
    return absl::OkStatus();
  }

  absl::Status ComputeSpansOnCpu(const ConstTensorView& x, const Execution& execution) {
    const Problem& p = problem_;
    float* spans = spans_.mutable_data();
    MatMulCall call;
    call.x = x;
    call.y = TensorView(spans, DType::kF32, {p.batch, p.query_tokens, p.query_heads},
                        {p.query_heads * p.query_tokens, 1, p.query_tokens});
    TFB_RETURN_IF_ERROR(MatMul(gate_, call, execution));
    const float most = static_cast<float>(options_.max_span);
    for (int64_t n = 0; n < spans_.size(); ++n) {
      const float e = std::exp(-spans[n]);
      spans[n] = most / (1 + e);
      slopes_.mutable_data()[n] = most / ((1 + e) * (1 + 1 / e));
    }
    return absl::OkStatus();
  }

  absl::Status ComputeSpansOnCuda(const ConstTensorView& x, const Execution& execution) {
    const Problem& p = problem_;
    GateArguments arguments;
    arguments.x = ToDeviceView(x);
    arguments.weight = gate_weight_.data();
    arguments.bias = gate_bias_.data();
    arguments.spans = spans_.mutable_data();
    arguments.slopes = slopes_.mutable_data();
    arguments.batch = p.batch;
    arguments.tokens = p.query_tokens;
    arguments.channels = p.model_dim();
    arguments.heads = p.query_heads;
    arguments.max_span = static_cast<float>(options_.max_span);
    TFB_ASSIGN_OR_RETURN(CudaRuntime * runtime, CudaRuntime::For(device_));
    return ToStatus(
        KernelsOn<AdaptiveSpanKernels>(runtime->target()).gate(arguments, execution.stream));
  }

  std::vector<float> OnHost() const {
    std::vector<float> spans(spans_.size());
    if (!spans_.Read(spans.data()).ok()) spans.clear();
    return spans;
  }

  Problem problem_;
  AdaptiveSpanOptions options_;
  const NamedTensors& parameters_;
  Device device_ = Device::kCpu;
  DeviceArray<float> spans_;   // [batch, query_heads, query_tokens]
  DeviceArray<float> slopes_;  // derivatives of the spans by a
  bool has_run_ = false;       // since the last Setup
  PackedMatrix gate_;          // on the CPU
  DeviceArray<float> gate_weight_;
  DeviceArray<float> gate_bias_;  // on CUDA
};

class AdaptiveSpan : public FlashTechnique<AdaptiveSpanOptions> {
 public:
  AdaptiveSpan() : FlashTechnique(Info()) {}

 private:
  std::vector<TensorSpec> ReadTensors(const Problem& problem,
                                      const AdaptiveSpanOptions& options) const override {
    std::vector<TensorSpec> tensors = QkvInputs(problem);
    if (options.dynamic) tensors.push_back(HiddenInputs(problem)[0]);
    return tensors;
  }

  absl::StatusOr<NamedTensors> Draw(const Job& job) const override {
    const Problem& p = job.problem;
    const AdaptiveSpanOptions& options = job.options;
    NamedTensors parameters;
    if (options.positions) {
      Tensor position(DType::kF32, {options.max_span, p.head_dim});
      FillNormal(&position, job.seed, "position", 0, 0.02);
      // The positions have the queries' precision, like everything that is multiplied by queries.
      parameters["position"] = position.CloneAs(p.dtype);
    }
    if (options.dynamic) {
      Tensor weight(DType::kF32, {p.query_heads, p.model_dim()});
      FillNormal(&weight, job.seed, "span_weight", 0,
                 1 / std::sqrt(static_cast<double>(p.model_dim())));
      const double share =
          std::clamp(options.span / static_cast<double>(options.max_span), 1e-6, 1 - 1e-6);
      Tensor bias(DType::kF32, {p.query_heads});
      Fill(bias.view(), std::log(share / (1 - share)));  // a hidden state of 0 gives z = span
      parameters["span_weight"] = std::move(weight);
      parameters["span_bias"] = std::move(bias);
      return parameters;
    }
    Tensor span(DType::kF32, {p.query_heads});
    const RandomStream stream(job.seed, "span");
    for (int64_t h = 0; h < p.query_heads; ++h) {
      span.view().Set(h, Clamp(options, -options.span * std::log(stream.Uniform(h))).value());
    }
    parameters["span"] = std::move(span);
    return parameters;
  }

  absl::StatusOr<FlashPlan> Describe(const Job& job) const override {
    const AdaptiveSpanOptions& options = job.options;
    FlashPlan plan(job.problem);
    std::vector<int64_t> reach(1, options.max_span);
    if (options.dynamic) {
      const auto spans = std::make_shared<DynamicSpans>(job.problem, options, job.parameters);
      plan.ShareStep(spans);
      plan.Add<SpanTerm>("spans", options.ramp, [spans] { return spans->KeptPairs(); });
    } else {
      std::vector<Traced> spans;
      std::vector<float> values;
      reach.clear();
      for (const float& span : job.parameters.at("span").span<float>()) {
        spans.push_back(Clamp(options, Trace(span)));
        values.push_back(static_cast<float>(spans.back().value()));
        reach.push_back(Reach(options, values.back()));
      }
      plan.AddStep<FixedSpans>(values);
      plan.Add<SpanTerm>(std::move(spans), options.ramp);
    }
    if (options.positions) plan.Add<RelativeKeyTerm>(Positions(job, reach));
    plan.Sees(SpanPattern(std::move(reach), job.problem.causal_offset()));
    return plan;
  }

  // Returns how to make the keys of the distances that any head reaches.
  static RelativeKeyTerm::Make Positions(const Job& job, const std::vector<int64_t>& reach) {
    const int64_t offset = job.problem.causal_offset();
    const int64_t farthest = *std::max_element(reach.begin(), reach.end());
    const int64_t low = std::max(offset - farthest, 1 - job.problem.query_tokens);
    const int64_t high = std::min(offset - 1, job.problem.kv_tokens - 1);
    return [=, &position = job.parameters.at("position")](ThreadPool*) {
      const ConstTensorView table(position.raw(), position.dtype(),
                                  {1, position.dim(0), position.dim(1)});
      return RelativeKeys(table, low, high, [offset](int64_t e) { return offset - e - 1; });
    };
  }

  absl::Status Definition(const Problem& problem, const AdaptiveSpanOptions& options,
                          const NamedTensors& parameters, const Inputs& inputs,
                          const DefinitionRequest& request, NamedTensors* outputs) const override {
    const DoubleTensor q(inputs.Get("q")), k(inputs.Get("k")), x(inputs.Get("x"));
    const DoubleTensor position(parameters, "position"), span(parameters, "span"),
        weight(parameters, "span_weight"), bias(parameters, "span_bias");
    const KeyMask is_token(inputs);
    const double scale = 1 / std::sqrt(static_cast<double>(problem.head_dim));
    const double reach = static_cast<double>(options.max_span);
    // This is z of every (batch, head, query), computed once a row.
    std::vector<double> z(problem.batch * problem.query_heads * problem.query_tokens);
    for (int64_t b = 0; b < problem.batch; ++b) {
      for (int64_t h = 0; h < problem.query_heads; ++h) {
        for (int64_t i = 0; i < problem.query_tokens; ++i) {
          double& value = z[(b * problem.query_heads + h) * problem.query_tokens + i];
          if (options.dynamic) {
            const double sum = bias.at(h) + Dot(weight.Row(h), x.Row(b, i), problem.model_dim());
            value = reach / (1 + std::exp(-sum));
          } else {
            value = std::min(std::max(span.at(h), 0.0), reach);
          }
        }
      }
    }
    DefineAttention(
        problem, inputs, request,
        [&](int64_t b, int64_t h, int64_t i, int64_t j) {
          const int64_t distance = i + problem.causal_offset() - j;
          if (distance < 1 || distance > options.max_span || !is_token(b, j)) return kNotSeen;
          const double span_of_row = z[(b * problem.query_heads + h) * problem.query_tokens + i];
          const double mask = std::min(
              (options.ramp + span_of_row - static_cast<double>(distance)) / options.ramp, 1.0);
          if (mask <= 0) return kNotSeen;
          const double* key = k.Row(b, h / problem.group(), j);
          double score = Dot(q.Row(b, h, i), key, problem.head_dim);
          if (options.positions) {
            score += Dot(q.Row(b, h, i), position.Row(distance - 1), problem.head_dim);
          }
          return scale * score + std::log(mask);
        },
        outputs);
    return absl::OkStatus();
  }
};

const bool registered = RegisterTechnique<AdaptiveSpan>();

}  // namespace
}  // namespace tfb::adaptive_span
