#include "memory/transformer_xl/transformer_xl.h"

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "memory/transformer_xl/decoder_layer.h"
#include "memory/transformer_xl/relative_attention.h"
#include "memory/transformer_xl/segmented_layer.h"
#include "memory/transformer_xl/stack.h"
#include "memory/transformer_xl/stack_definition.h"
#include "positional/transformer_xl_relative/relative_positions.h"

namespace tfb {
namespace {

const bool registered = RegisterTechnique<TransformerXl>();

TechniqueInfo Info() {
  TechniqueInfo info;
  info.name = "transformer_xl";
  info.family = "memory";
  info.title = "Transformer-XL segment recurrence";
  info.citation = "Dai et al. 2019, arXiv:1901.02860v3, sections 3.2 and 3.3";
  info.input_kind = InputKind::kHidden;
  info.exactness = Exactness::kExact;
  info.budget_option = "memory";
  info.growth = 1;
  info.supports_noncausal = false;
  info.devices = {Device::kCpu, Device::kCuda};
  return info;
}

absl::Status CheckProblem(const Problem& problem, const TransformerXlOptions& options) {
  TFB_RETURN_IF_ERROR(CheckSelfAttention("transformer_xl", problem));
  if (options.same_length && options.memory == 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "option memory is 0; allowed with same_length=true, where a token is one of the keys it "
        "sees, are 1 to ",
        TransformerXlOptions::kMaxMemory));
  }
  return absl::OkStatus();
}

StackSizes SizesOf(const Problem& problem, const TransformerXlOptions& options) {
  return {options.layers, problem.query_heads, problem.head_dim,
          options.feed_forward * problem.model_dim(), options.share_biases};
}

// ---- The layer ----

class TransformerXlLayer : public SegmentedLayer {
 public:
  static absl::StatusOr<std::unique_ptr<Layer>> Create(const Problem& problem,
                                                       const TransformerXlOptions& options,
                                                       Device device, uint64_t seed) {
    auto layer =
        std::unique_ptr<TransformerXlLayer>(new TransformerXlLayer(problem, options, device));
    TFB_ASSIGN_OR_RETURN(layer->parameters_, DrawParameters(StackParameters(layer->sizes_), seed));
    for (int64_t n = 0; n < options.layers; ++n) {
      TFB_ASSIGN_OR_RETURN(RelativeAttention attention,
                           RelativeAttention::Create(device, problem, layer->reach_));
      layer->attentions_.push_back(std::move(attention));
    }
    return layer;
  }

  Cost cost() const override {
    const double batch = static_cast<double>(problem().batch);
    const double tokens = static_cast<double>(problem().query_tokens);
    Cost cost;
    cost.flops = StackFlops(sizes_, batch * tokens, batch * ContextOfSequence().pairs);
    cost.bytes = TensorBytes();
    return cost;
  }

  // reach_tokens: earlier tokens that can change the last one, through all layers. keys_per_token:
  // those that a token sees in one layer, on average, itself included. cache_bytes: the keys and
  // values of all layers. cublas: on a GPU, 1 where cuBLAS makes the products with matrices, else 0.
  std::map<std::string, double> statistics() const override {
    const MemoryReach::Context context = ContextOfSequence();
    const int64_t tokens = std::max<int64_t>(problem().query_tokens, 1);
    double cache_bytes = 0;
    for (const RelativeAttention& attention : attentions_) {
      cache_bytes += static_cast<double>(attention.cache_bytes());
    }
    std::map<std::string, double> statistics = {
        {"cache_bytes", cache_bytes},
        {"keys_per_token", context.pairs / static_cast<double>(tokens)},
        {"reach_tokens", static_cast<double>(context.reach)}};
    if (device_ == Device::kCuda) statistics["cublas"] = MatMulUsesCublas(device_) ? 1 : 0;
    return statistics;
  }

  int64_t split_tokens() const override {
    return options_.same_length ? 0 : SegmentedLayer::split_tokens();
  }

  absl::Status Reset() override {
    for (RelativeAttention& attention : attentions_) attention.Reset();
    return absl::OkStatus();
  }

 protected:
  absl::Status DoSetup(const Inputs&, const Execution& execution) override {
    const DistanceRange range = {0, reach_.max_distance(), options_.clamp_length};
    const Tensor sinusoids = SinusoidsOf(range, problem().model_dim());
    layers_.clear();
    for (int64_t n = 0; n < options_.layers; ++n) {
      TFB_RETURN_IF_ERROR(
          attentions_[n].Setup(RelativeAttention::ParametersOf(parameters_, sizes_, n), range,
                               sinusoids.view(), execution));
      TFB_ASSIGN_OR_RETURN(DecoderLayer layer, DecoderLayer::Create(device_, parameters_, n));
      layers_.push_back(std::move(layer));
    }
    return absl::OkStatus();
  }

  void BeginSegment(int64_t tokens) override { segment_.Set(attentions_[0].tokens(), tokens); }

  absl::Status RunLayer(int64_t n, const DecoderLayer::Call& call,
                        const Execution& execution) override {
    return layers_[n].Run(
        options_.pre_norm, call,
        [&](const ConstTensorView& x, const ConstTensorView& residual, const TensorView& y,
            const Execution& rest) {
          return attentions_[n].Append(segment_, x, residual, y, rest);
        },
        execution);
  }

  size_t layer_workspace_bytes(int threads) const override {
    return DecoderLayer::workspace_bytes(device_, sizes_, problem().batch * max_segment_tokens(),
                                         options_.pre_norm, attentions_[0].workspace_bytes(threads),
                                         threads);
  }

 private:
  TransformerXlLayer(const Problem& problem, const TransformerXlOptions& options, Device device)
      : SegmentedLayer(problem, SegmentedOutputs(problem), options.layers, options.segment),
        options_(options),
        device_(device),
        sizes_(SizesOf(problem, options)),
        reach_{options.memory, options.same_length, max_segment_tokens()},
        segment_(device, reach_) {}

  MemoryReach::Context ContextOfSequence() const {
    return reach_.ContextOf(problem().query_tokens, options_.layers);
  }

  TransformerXlOptions options_;
  Device device_;
  StackSizes sizes_;
  MemoryReach reach_;
  SegmentView segment_;
  std::vector<RelativeAttention> attentions_;
  std::vector<DecoderLayer> layers_;
};

}  // namespace

// ---- The definition ----

absl::StatusOr<NamedTensors> DefineTransformerXl(const Problem& problem,
                                                 const TransformerXlOptions& options,
                                                 const NamedTensors& parameters,
                                                 const ConstTensorView& x,
                                                 absl::Span<const int64_t> begins) {
  const StackSizes sizes = SizesOf(problem, options);
  TFB_RETURN_IF_ERROR(CheckProblem(problem, options));
  TFB_RETURN_IF_ERROR(CheckParameters(StackParameters(sizes), parameters));
  if (problem.query_tokens > 0 && (begins.empty() || begins[0] != 0)) {
    return absl::InvalidArgumentError("the first segment does not begin at token 0");
  }
  const auto first_seen = [&](int64_t p) {
    const auto next = std::upper_bound(begins.begin(), begins.end(), p);
    const int64_t from = options.same_length ? p + 1 : *(next - 1);
    return std::max<int64_t>(from - options.memory, 0);
  };
  const StackDefinition stack(sizes, parameters, options.clamp_length);
  const auto attention = [&](int64_t n, const Rows&, const Rows& input) {
    return stack.Attention(n, input, first_seen);
  };
  NamedTensors outputs;
  for (const char* name : {"out", "context"}) outputs[name] = Tensor(DType::kF64, x.shape());
  for (int64_t b = 0; b < problem.batch; ++b) {
    Rows context(0, problem.model_dim());
    const Rows out = stack.Forward(SequenceOf(x, b), options.pre_norm, attention, &context);
    StoreSequence(out, b, outputs["out"].view());
    StoreSequence(context, b, outputs["context"].view());
  }
  return outputs;
}

TransformerXl::TransformerXl() : TechniqueOf(Info()) {}

absl::StatusOr<std::unique_ptr<Layer>> TransformerXl::MakeLayer(const Problem& problem,
                                                                const TransformerXlOptions& options,
                                                                Device device,
                                                                uint64_t seed) const {
  TFB_RETURN_IF_ERROR(CheckProblem(problem, options));
  return TransformerXlLayer::Create(problem, options, device, seed);
}

std::vector<TensorSpec> TransformerXl::WrittenTensors(const Problem& problem,
                                                      const TransformerXlOptions&) const {
  return SegmentedOutputs(problem);
}

absl::Status TransformerXl::Definition(const Problem& problem, const TransformerXlOptions& options,
                                       const NamedTensors& parameters, const Inputs& inputs,
                                       const DefinitionRequest&, NamedTensors* outputs) const {
  std::vector<int64_t> begins;
  for (int64_t t = 0; t < problem.query_tokens; t += options.segment) begins.push_back(t);
  TFB_ASSIGN_OR_RETURN(*outputs,
                       DefineTransformerXl(problem, options, parameters, inputs.Get("x"), begins));
  return absl::OkStatus();
}

absl::StatusOr<TechniqueSpec> TransformerXl::Counterpart(const Problem& problem,
                                                         const Options& options) const {
  TFB_ASSIGN_OR_RETURN(Options whole_past, Canonical(options));
  const std::string tokens = absl::StrCat(std::max<int64_t>(problem.query_tokens, 1));
  whole_past["memory"] = tokens;
  whole_past["segment"] = tokens;
  whole_past["same_length"] = "false";
  return TechniqueSpec{info().name, std::move(whole_past)};
}

}  // namespace tfb
