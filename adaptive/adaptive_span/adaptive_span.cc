#include "adaptive/adaptive_span/adaptive_span.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include "adaptive/adaptive_span/adaptive_span_cuda.h"
#include "core/cuda/device_array.h"
#include "core/cuda/runtime.h"
#include "core/definition.h"
#include "core/flash/flash_layer.h"
#include "core/layers/matmul.h"
#include "core/random.h"

namespace tfb::adaptive_span {
namespace {

const bool registered = RegisterTechnique<AdaptiveSpan>();

TechniqueInfo Info() {
  TechniqueInfo info;
  info.name = "adaptive_span";
  info.family = "adaptive";
  info.title = "Adaptive attention span";
  info.citation = "Sukhbaatar et al. 2019, arXiv:1905.07799v2";
  info.exactness = Exactness::kExact;
  info.budget_option = "span";
  info.growth = 1;
  info.supports_noncausal = false;
  info.devices = {Device::kCpu, Device::kCuda};
  return info;
}

// A pattern in which head h sees the distances 1 to reach[h].
class SpanPattern : public Pattern {
 public:
  SpanPattern(std::vector<int64_t> reach, int64_t causal_offset)
      : reach_(std::move(reach)), causal_offset_(causal_offset) {}
  int64_t heads() const override { return static_cast<int64_t>(reach_.size()); }
  bool Allows(int64_t head, int64_t i, int64_t j) const override {
    const int64_t distance = i + causal_offset_ - j;
    return distance >= 1 && distance <= reach_[head];
  }
  void KeyRanges(int64_t head, int64_t query_begin, int64_t query_end,
                 std::vector<KeyRange>* ranges) const override {
    BandPattern(causal_offset_ - reach_[head], causal_offset_ - 1)
        .KeyRanges(head, query_begin, query_end, ranges);
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

double Clamp(const AdaptiveSpanOptions& options, double z) {
  return std::clamp(z, 0.0, static_cast<double>(options.max_span));
}

class AdaptiveSpanLayer : public FlashLayer {
 public:
  AdaptiveSpanLayer(const Problem& problem, std::vector<TensorSpec> inputs,
                    const AdaptiveSpanOptions& options, Device device, uint64_t seed)
      : FlashLayer(problem, std::move(inputs), AttentionOutputs(problem), device, nullptr),
        options_(options) {
    if (options.positions) {
      set_uses_relative_keys();
      Tensor position(DType::kF32, {options.max_span, problem.head_dim});
      FillNormal(&position, seed, "position", 0, 0.02);
      // The positions have the queries' precision, like everything that is multiplied by queries.
      parameters_["position"] = position.CloneAs(problem.dtype);
    }
    if (options.dynamic) {
      Tensor weight(DType::kF32, {problem.query_heads, problem.model_dim()});
      FillNormal(&weight, seed, "span_weight", 0,
                 1 / std::sqrt(static_cast<double>(problem.model_dim())));
      Tensor bias(DType::kF32, {problem.query_heads});
      const double share =
          std::clamp(options.span / static_cast<double>(options.max_span), 1e-6, 1 - 1e-6);
      Fill(bias.view(), std::log(share / (1 - share)));  // a hidden state of 0 gives z = span
      parameters_["span_weight"] = std::move(weight);
      parameters_["span_bias"] = std::move(bias);
    } else {
      Tensor span(DType::kF32, {problem.query_heads});
      const RandomStream stream(seed, "span");
      for (int64_t h = 0; h < problem.query_heads; ++h) {
        span.span<float>()[h] =
            static_cast<float>(Clamp(options, -options.span * std::log(stream.Uniform(h))));
      }
      parameters_["span"] = std::move(span);
    }
  }

  // On a GPU the last Run must be done: the kept pairs depend on its data.
  Cost cost() const override {
    Cost cost = FlashLayer::cost();
    if (options_.dynamic) {  // the schedule covers max_span
      cost.flops.reset();
      const double pairs = KeptPairs();
      if (pairs > 0) {
        const Problem& p = problem();
        const double gate =
            2.0 * static_cast<double>(p.batch * p.query_heads * p.query_tokens * p.model_dim());
        cost.flops = pairs * FlopsPerPair() + gate;
      }
    }
    return cost;
  }

  // On a GPU the last Run must be done for these, too.
  std::map<std::string, double> statistics() const override {
    double mean = 0, max = 0;
    const std::vector<float> spans = Spans();
    for (const float span : spans) {
      mean += span / static_cast<double>(spans.size());
      max = std::max<double>(max, span);
    }
    return {{"mean_span", mean}, {"max_span", max}};
  }

 protected:
  absl::Status BuildRule(const Inputs& inputs, const Execution& execution,
                         ScoreRule* rule) override {
    std::vector<int64_t> reach(1, options_.max_span);
    if (options_.dynamic) {
      TFB_RETURN_IF_ERROR(SetUpGate());
      TFB_RETURN_IF_ERROR(ComputeSpans(inputs.Get("x"), execution));
    } else {
      reach.clear();
      fixed_spans_.clear();
      for (const float span : parameters_.at("span").span<float>()) {
        fixed_spans_.push_back(static_cast<float>(Clamp(options_, span)));
        reach.push_back(Reach(options_, fixed_spans_.back()));
      }
      rule->soft_span = FixedSpans();
    }
    if (options_.positions) SetUpPositions(*std::max_element(reach.begin(), reach.end()), rule);
    set_pattern(std::make_unique<SpanPattern>(std::move(reach), problem().causal_offset()));
    return absl::OkStatus();
  }

  // The gate no longer needs its scratch when attention takes the same memory.
  absl::Status Prepare(const Inputs& inputs, const Execution& execution, Workspace*,
                       FlashCall* call) override {
    if (!options_.dynamic) return absl::OkStatus();
    call->rule.soft_span = DynamicSpans();
    return ComputeSpans(inputs.Get("x"), execution);
  }
  size_t PrepareBytes(int threads) const override {
    if (!options_.dynamic || device() != Device::kCpu) return 0;
    const Problem& p = problem();
    return MatMulWorkspaceBytes(device(), p.batch * p.query_tokens, p.model_dim(), p.query_heads,
                                threads);
  }

  double FlopsPerPair() const override {
    return FlashLayer::FlopsPerPair() +
           (options_.positions ? 2.0 * static_cast<double>(problem().head_dim) : 0.0);
  }

 private:
  SoftSpan FixedSpans() const {
    SoftSpan soft_span;
    soft_span.span = fixed_spans_.data();
    soft_span.count = static_cast<int64_t>(fixed_spans_.size());
    soft_span.head_stride = 1;
    soft_span.ramp = static_cast<float>(options_.ramp);
    return soft_span;
  }
  SoftSpan DynamicSpans() const {
    SoftSpan soft_span;
    soft_span.span = dynamic_spans_.data();
    soft_span.count = dynamic_spans_.size();
    soft_span.batch_stride = problem().query_heads * problem().query_tokens;
    soft_span.head_stride = problem().query_tokens;
    soft_span.query_stride = 1;
    soft_span.ramp = static_cast<float>(options_.ramp);
    return soft_span;
  }

  void SetUpPositions(int64_t farthest, ScoreRule* rule) {
    const Problem& p = problem();
    const Tensor& position = parameters_.at("position");
    const ConstTensorView table(position.raw(), position.dtype(),
                                {1, options_.max_span, p.head_dim});
    const int64_t offset = p.causal_offset();
    positions_ = RelativeKeys(table, std::max(offset - farthest, 1 - p.query_tokens),
                              std::min(offset - 1, p.kv_tokens - 1),
                              [offset](int64_t e) { return offset - e - 1; });
    rule->relative_keys = &positions_;
  }

  absl::Status SetUpGate() {
    const Problem& p = problem();
    const ConstTensorView weight = parameters_.at("span_weight").view();
    const ConstTensorView bias = parameters_.at("span_bias").view();
    TFB_ASSIGN_OR_RETURN(dynamic_spans_, DeviceArray<float>::Allocate(
                                             device(), p.batch * p.query_heads * p.query_tokens));
    if (device() == Device::kCpu) {
      TFB_ASSIGN_OR_RETURN(gate_, PackedMatrix::Create(device(), Transpose(weight, 0, 1), bias));
    } else {
      TFB_ASSIGN_OR_RETURN(gate_weight_, CopyFloats(device(), weight));
      TFB_ASSIGN_OR_RETURN(gate_bias_, CopyFloats(device(), bias));
    }
    return absl::OkStatus();
  }

  // Computes z of every token and head.
  absl::Status ComputeSpans(const ConstTensorView& x, const Execution& execution) {
    return device() == Device::kCpu ? ComputeSpansOnCpu(x, execution)
                                    : ComputeSpansOnCuda(x, execution);
  }

  absl::Status ComputeSpansOnCpu(const ConstTensorView& x, const Execution& execution) {
    const Problem& p = problem();
    float* spans = dynamic_spans_.mutable_data();
    MatMulCall call;
    call.x = x;
    call.y = TensorView(spans, DType::kF32, {p.batch, p.query_tokens, p.query_heads},
                        {p.query_heads * p.query_tokens, 1, p.query_tokens});
    TFB_RETURN_IF_ERROR(MatMul(gate_, call, execution));
    for (int64_t n = 0; n < dynamic_spans_.size(); ++n) {
      spans[n] = static_cast<float>(options_.max_span) / (1 + std::exp(-spans[n]));
    }
    return absl::OkStatus();
  }

  absl::Status ComputeSpansOnCuda(const ConstTensorView& x, const Execution& execution) {
    const Problem& p = problem();
    GateArguments arguments;
    arguments.x = ToDeviceView(x);
    arguments.weight = gate_weight_.data();
    arguments.bias = gate_bias_.data();
    arguments.spans = dynamic_spans_.mutable_data();
    arguments.batch = p.batch;
    arguments.tokens = p.query_tokens;
    arguments.channels = p.model_dim();
    arguments.heads = p.query_heads;
    arguments.max_span = static_cast<float>(options_.max_span);
    TFB_ASSIGN_OR_RETURN(CudaRuntime * runtime, CudaRuntime::For(device()));
    return ToStatus(
        KernelsOn<AdaptiveSpanKernels>(runtime->target()).gate(arguments, execution.stream));
  }

  // Returns the spans of the last Run, on the host; empty before Setup.
  std::vector<float> Spans() const {
    if (!options_.dynamic) return fixed_spans_;
    std::vector<float> spans(dynamic_spans_.size());
    if (!dynamic_spans_.Read(spans.data()).ok()) spans.clear();
    return spans;
  }
  // Returns the kept pairs of all heads, where spans are dynamic.
  double KeptPairs() const {
    const Problem& p = problem();
    double pairs = 0;
    const std::vector<float> spans = Spans();
    for (size_t n = 0; n < spans.size(); ++n) {
      const int64_t past = static_cast<int64_t>(n) % p.query_tokens + p.causal_offset();
      pairs += static_cast<double>(std::clamp<int64_t>(past, 0, Reach(options_, spans[n])));
    }
    return pairs;
  }

  AdaptiveSpanOptions options_;
  std::vector<float> fixed_spans_;    // [query_heads]
  DeviceArray<float> dynamic_spans_;  // [batch, query_heads, query_tokens]
  RelativeKeys positions_;
  PackedMatrix gate_;  // on the CPU
  DeviceArray<float> gate_weight_;
  DeviceArray<float> gate_bias_;
};

}  // namespace

AdaptiveSpan::AdaptiveSpan() : TechniqueOf(Info()) {}

std::vector<TensorSpec> AdaptiveSpan::ReadTensors(const Problem& problem,
                                                  const AdaptiveSpanOptions& options) const {
  std::vector<TensorSpec> tensors = QkvInputs(problem);
  if (options.dynamic) tensors.push_back(HiddenInputs(problem)[0]);
  return tensors;
}

absl::StatusOr<std::unique_ptr<Layer>> AdaptiveSpan::MakeLayer(const Problem& problem,
                                                               const AdaptiveSpanOptions& options,
                                                               Device device, uint64_t seed) const {
  return std::make_unique<AdaptiveSpanLayer>(problem, ReadTensors(problem, options), options,
                                             device, seed);
}

absl::Status AdaptiveSpan::Definition(const Problem& problem, const AdaptiveSpanOptions& options,
                                      const NamedTensors& parameters, const Inputs& inputs,
                                      const DefinitionRequest& request,
                                      NamedTensors* outputs) const {
  const DoubleTensor q(inputs.Get("q")), k(inputs.Get("k")), x(inputs.Get("x"));
  const auto parameter = [&](const char* name) {
    const auto found = parameters.find(name);
    return found == parameters.end() ? DoubleTensor() : DoubleTensor(found->second.view());
  };
  const DoubleTensor position = parameter("position"), span = parameter("span"),
                     weight = parameter("span_weight"), bias = parameter("span_bias");
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

}  // namespace tfb::adaptive_span
