#include "core/layers/stack/relative_stack.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/layers/attention/relative_positions.h"
#include "core/layers/feed_forward_dim.h"
#include "core/status.h"

namespace tfb::layers {

RelativeStackShape ShapeOf(const Problem& problem, const RelativeStackOptions& options,
                           bool pre_norm) {
  RelativeStackShape shape;
  shape.sizes.layers = options.layers;
  shape.sizes.heads = problem.query_heads;
  shape.sizes.head_dim = problem.head_dim;
  shape.sizes.inner = FeedForwardDim(options.feed_forward_dim, problem.model_dim());
  shape.sizes.share_biases = options.share_biases;
  shape.sizes.final_norm = options.final_norm;
  shape.segment = options.segment;
  shape.memory = options.memory;
  shape.same_length = options.same_length;
  shape.max_distance = options.max_distance;
  shape.given_memory = options.given_memory;
  shape.pre_norm = shape.normalizes_memory = pre_norm;
  return shape;
}

absl::Status CheckRelativeStack(absl::string_view technique, const Problem& problem,
                                const RelativeStackOptions& options) {
  TFB_RETURN_IF_ERROR(CheckSelfAttention(technique, problem));
  if (options.given_memory > options.memory) {
    return absl::InvalidArgumentError(absl::StrCat("option given_memory is ", options.given_memory,
                                                   "; allowed with memory=", options.memory,
                                                   " are 0 to ", options.memory));
  }
  if (!options.same_length || options.memory > 0) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "option memory is 0; allowed with same_length=true, where a token is one of the keys it "
      "sees, are 1 to ",
      RelativeStackOptions::kMaxMemory));
}

std::vector<TensorSpec> GivenMemories(const Problem& problem, const RelativeStackOptions& options) {
  if (options.given_memory == 0) return {};
  return {MemoriesSpec(problem, options.layers, options.given_memory)};
}
std::vector<TensorSpec> FinalMemories(const Problem& problem, const RelativeStackOptions& options) {
  const int64_t kept = std::min(options.memory, options.given_memory + problem.query_tokens);
  if (kept == 0) return {};
  std::vector<TensorSpec> memories = {MemoriesSpec(problem, options.layers, kept)};
  memories[0].optional = true;
  return memories;
}

std::vector<TensorSpec> RelativeStackOutputs(const Problem& problem,
                                             const RelativeStackOptions& options) {
  std::vector<TensorSpec> outputs = SegmentedOutputs(problem);
  for (TensorSpec& spec : FinalMemories(problem, options)) outputs.push_back(std::move(spec));
  return outputs;
}

RelativeStackLayer::RelativeStackLayer(const Problem& problem, const RelativeStackShape& shape,
                                       const RelativeStackTensors& tensors, Device device)
    : SegmentedLayer(device, problem,
                     {shape.sizes.layers, shape.segment, shape.sizes.final_norm, tensors.outputs,
                      tensors.more_outputs, tensors.more_inputs}),
      shape_(shape),
      reach_{shape.memory, shape.same_length, max_segment_tokens(), shape.given_memory},
      segment_(device, reach_) {}

absl::StatusOr<std::unique_ptr<Layer>> RelativeStackLayer::Create(
    const Problem& problem, const RelativeStackShape& shape, const RelativeStackTensors& tensors,
    Device device, uint64_t seed) {
  std::unique_ptr<RelativeStackLayer> layer(
      new RelativeStackLayer(problem, shape, tensors, device));
  TFB_RETURN_IF_ERROR(layer->Initialize(StackParameters(shape.sizes), seed));
  return layer;
}

absl::Status RelativeStackLayer::Initialize(const std::vector<ParameterSpec>& parameters,
                                            uint64_t seed) {
  TFB_RETURN_IF_ERROR(DrawParameters(parameters, seed, &parameters_));
  for (int64_t n = 0; n < sizes().layers; ++n) {
    TFB_ASSIGN_OR_RETURN(RelativeAttention attention,
                         RelativeAttention::Create(device(), problem(), reach_, shape_.queries));
    attentions_.push_back(std::move(attention));
  }
  return absl::OkStatus();
}

MemoryReach::Context RelativeStackLayer::ContextOfSequence() const {
  MemoryReach::Context context = reach_.ContextOf(problem().query_tokens, sizes().layers);
  if (sizes().span_ramp == 0) return context;
  context.pairs = 0;
  const double heads = static_cast<double>(sizes().layers * sizes().heads);
  for (const float z : Spans()) {
    context.pairs += reach_.Pairs(problem().query_tokens, sizes().KeysWithin(z)) / heads;
  }
  return context;
}

// Returns the spans of all layers' heads; empty where they have none.
std::vector<float> RelativeStackLayer::Spans() const {
  std::vector<float> spans;
  for (int64_t n = 0; n < sizes().layers && sizes().span_ramp > 0; ++n) {
    const auto of_layer = parameters_.at(LayerPrefix(n) + "span").span<float>();
    spans.insert(spans.end(), of_layer.begin(), of_layer.end());
  }
  return spans;
}

Cost RelativeStackLayer::cost() const {
  const double batch = static_cast<double>(problem().batch);
  const double tokens = static_cast<double>(problem().query_tokens);
  Cost cost;
  cost.flops = StackFlops(sizes(), batch * tokens, batch * ContextOfSequence().pairs);
  cost.bytes = TensorBytes();
  return cost;
}

std::map<std::string, double> RelativeStackLayer::statistics() const {
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
  if (const std::vector<float> spans = Spans(); !spans.empty()) {
    statistics["mean_span"] =
        std::accumulate(spans.begin(), spans.end(), 0.0) / static_cast<double>(spans.size());
  }
  if (device() == Device::kCuda) statistics["cublas"] = MatMulUsesCublas(device()) ? 1 : 0;
  return statistics;
}

int64_t RelativeStackLayer::split_tokens() const {
  return shape_.same_length ? 0 : SegmentedLayer::split_tokens();
}

void RelativeStackLayer::Forget() {
  for (RelativeAttention& attention : attentions_) attention.Reset();
}

absl::Status RelativeStackLayer::DoSetup(const Inputs& inputs, const Execution& execution) {
  const DistanceRange range = {0, reach_.max_distance(), shape_.max_distance};
  const Tensor sinusoids = SinusoidsOf(range, problem().model_dim());
  layers_.clear();
  for (int64_t n = 0; n < sizes().layers; ++n) {
    TFB_RETURN_IF_ERROR(
        attentions_[n].Setup(RelativeAttention::ParametersOf(parameters_, sizes(), n), range,
                             sinusoids.view(), execution));
    TFB_ASSIGN_OR_RETURN(DecoderLayer layer, DecoderLayer::Create(device(), parameters_, n,
                                                                  shape_.feed_forward_output));
    layers_.push_back(std::move(layer));
  }
  return SegmentedLayer::DoSetup(inputs, execution);
}

absl::Status RelativeStackLayer::Recall(int64_t n, const ConstTensorView& rows,
                                        const Execution& execution) {
  if (!shape_.normalizes_memory) return attentions_[n].AppendKeys(rows, execution);
  Workspace workspace(execution.workspace);
  const TensorView normalized(workspace.Take<float>(rows.num_elements()), DType::kF32,
                              rows.shape());
  Execution rest = execution;
  rest.workspace = workspace.Rest();
  TFB_RETURN_IF_ERROR(layers_[n].attention_norm.Run(rows, normalized, rest));
  return attentions_[n].AppendKeys(normalized, rest);
}

void RelativeStackLayer::BeginSegment(const Segment& segment) {
  segment_.Set(attentions_[0].tokens(), segment.tokens);
}

absl::Status RelativeStackLayer::RunLayer(int64_t n, const DecoderLayer::Call& call,
                                          const Execution& execution) {
  return layers_[n].Run(
      shape_.pre_norm, call,
      [&](const ConstTensorView& x, const ConstTensorView& residual, const TensorView& y,
          const Execution& rest) { return Attend(n, x, residual, y, rest); },
      execution);
}

absl::Status RelativeStackLayer::Attend(int64_t n, const ConstTensorView& x,
                                        const ConstTensorView& residual, const TensorView& y,
                                        const Execution& execution) {
  return attentions_[n].Append(segment_, x, residual, y, execution);
}

size_t RelativeStackLayer::layer_workspace_bytes(int threads) const {
  return WorkspaceWith(attentions_[0].workspace_bytes(threads), threads);
}

}  // namespace tfb::layers
