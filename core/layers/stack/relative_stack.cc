#include "core/layers/stack/relative_stack.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/layers/feed_forward_dim.h"
#include "core/status.h"
#include "core/workspace.h"

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
  shape.pre_norm = pre_norm;
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

// ---- What the layers share ----

RelativeState::RelativeState(Device device, const Problem& problem, const RelativeStackShape& shape,
                             const MoreFlops& more_flops)
    : device_(device),
      problem_(problem),
      shape_(shape),
      more_flops_(more_flops),
      reach_{shape.memory, shape.same_length, LongestSegment(problem, shape.segment),
             shape.given_memory},
      segment_(device, reach_),
      lists_(shape.same_length ? shape.memory : 0) {
  for (int64_t begin = 0; begin < problem.query_tokens; begin += reach_.max_segment) {
    const int64_t first = reach_.given + begin;
    const int64_t tokens = std::min(reach_.max_segment, problem.query_tokens - begin);
    lists_.Add(tokens, first + tokens - reach_.FirstSeen(first));
  }
}

void RelativeState::Begin(const Segment& segment) {
  segment_.Set(next_token_, segment.tokens);
  next_token_ += segment.tokens;
}

MemoryReach::Context RelativeState::ContextOfSequence(const NamedTensors& parameters) const {
  MemoryReach::Context context = reach_.ContextOf(problem_.query_tokens, sizes().layers);
  if (sizes().span_ramp == 0) return context;
  context.pairs = 0;
  const double heads = static_cast<double>(sizes().layers * sizes().heads);
  for (const float z : Spans(parameters)) {
    context.pairs += reach_.Pairs(problem_.query_tokens, sizes().KeysWithin(z)) / heads;
  }
  return context;
}

// Returns the spans of all layers' heads; empty where they have none.
std::vector<float> RelativeState::Spans(const NamedTensors& parameters) const {
  std::vector<float> spans;
  for (int64_t n = 0; n < sizes().layers && sizes().span_ramp > 0; ++n) {
    const auto of_layer = parameters.at(LayerPrefix(n) + "span").span<float>();
    spans.insert(spans.end(), of_layer.begin(), of_layer.end());
  }
  return spans;
}

std::optional<double> RelativeState::flops(const NamedTensors& parameters) const {
  const double batch = static_cast<double>(problem_.batch);
  const double tokens = static_cast<double>(problem_.query_tokens);
  return StackFlops(sizes(), batch * tokens, batch * ContextOfSequence(parameters).pairs) +
         more_flops_.of_run;
}

double RelativeState::earlier_rows() const {
  double earlier = 0;
  for (int64_t begin = 0; begin < problem_.query_tokens; begin += reach_.max_segment) {
    earlier += static_cast<double>(reach_.given + begin - reach_.FirstSeen(reach_.given + begin));
  }
  return static_cast<double>(problem_.batch) * earlier;
}

std::optional<double> RelativeState::backward_flops(const NamedTensors& parameters) const {
  const double batch = static_cast<double>(problem_.batch);
  StackBackwardWork work;
  work.rows = batch * static_cast<double>(problem_.query_tokens);
  work.pairs = batch * ContextOfSequence(parameters).pairs;
  work.earlier = earlier_rows();
  work.normalizes_earlier = shape_.pre_norm;
  work.distances = distances_seen(parameters);
  return StackBackwardFlops(sizes(), work) + more_flops_.of_backward;
}

double RelativeState::distances_seen(const NamedTensors& parameters) const {
  const double all = static_cast<double>(std::min(lists_.longest(), distances().rows()));
  const std::vector<float> spans = Spans(parameters);
  if (spans.empty()) return all;
  double sum = 0;
  for (int64_t n = 0; n < sizes().layers; ++n) {
    const auto of_layer = spans.begin() + n * sizes().heads;
    const float longest = *std::max_element(of_layer, of_layer + sizes().heads);
    sum += std::min(all, sizes().KeysWithin(longest));
  }
  return sum / static_cast<double>(sizes().layers);
}

std::map<std::string, double> RelativeState::statistics(const NamedTensors& parameters) const {
  const MemoryReach::Context context = ContextOfSequence(parameters);
  const int64_t tokens = std::max<int64_t>(problem_.query_tokens, 1);
  std::map<std::string, double> statistics = {
      {"keys_per_token", context.pairs / static_cast<double>(tokens)},
      {"reach_tokens", static_cast<double>(context.reach)}};
  if (const std::vector<float> spans = Spans(parameters); !spans.empty()) {
    statistics["mean_span"] =
        std::accumulate(spans.begin(), spans.end(), 0.0) / static_cast<double>(spans.size());
  }
  return statistics;
}

// ---- The attention ----

TransformerXlAttention::TransformerXlAttention(const RelativeState& state, int64_t n,
                                               int64_t kv_heads, RelativeAttention own)
    : state_(&state), n_(n), own_(std::move(own)), names_(state.sizes(), n) {
  Problem problem = state.problem();
  problem.kv_heads = kv_heads;
  past_ = ListAttention(state.device(), problem, state.distances(), state.shape().pre_norm);
}

absl::Status TransformerXlAttention::Setup(const NamedTensors& parameters,
                                           const Distances& distances, const Execution& execution) {
  return own_.Setup(RelativeAttention::ParametersOf(parameters, state_->sizes(), n_),
                    distances.range, distances.sinusoids, execution);
}

absl::Status TransformerXlAttention::Recall(const Inputs& given, const LayerNorm* norm,
                                            const Execution& execution) {
  const ConstTensorView memories = given.Get(kMemories);
  if (memories.empty()) return absl::OkStatus();
  return own_.Recall(OfLayer(memories, n_), norm, execution);
}

absl::Status TransformerXlAttention::Run(const Call& call, const Execution& execution) {
  ConstTensorView keys_from = call.some.hidden;
  if (keys_from.empty()) return own_.Append(segment(), call.x, call.residual, call.y, execution);
  Workspace workspace(execution.workspace);
  Execution rest = execution;
  if (call.norm != nullptr) {
    const TensorView normalized(workspace.Take<float>(keys_from.num_elements()), DType::kF32,
                                keys_from.shape());
    rest.workspace = workspace.Rest();
    TFB_RETURN_IF_ERROR(call.norm->Run(keys_from, normalized, rest));
    keys_from = normalized;
  }
  return state_->device() == Device::kCpu
             ? own_.AppendFor(segment(), keys_from, {call.x, call.some.row_of_token}, call.residual,
                              call.y, rest)
             : own_.AppendForListed(segment(), keys_from, call.some.rows, call.x, call.residual,
                                    call.y, rest);
}

size_t TransformerXlAttention::workspace_bytes(int threads) const {
  const bool normalizes = state_->shape().some_tokens && state_->shape().pre_norm;
  return own_.workspace_bytes(threads) + Workspace::Measure([&](Workspace& workspace) {
           const LayerOfStack layer = state_->layer(n_);
           workspace.Take<float>(normalizes ? layer.max_rows() * layer.sizes.width() : 0);
         });
}

// ---- Its backward pass ----

TransformerXlAttention::EarlierTokens::EarlierTokens(const RelativeState& state, int64_t n,
                                                     const PastSegment& segment) {
  const int64_t given = state.reach().given, first = state.FirstSeen(segment);
  if (first < given) {
    parts_[count_++] = Slice(OfLayer(segment.inputs.Get(kMemories), n), 1, first, given - first);
  }
  const int64_t begin = std::max<int64_t>(first - given, 0);
  if (begin < segment.begin) {
    parts_[count_++] = Slice(segment.states, 1, begin, segment.begin - begin);
  }
}

absl::Status TransformerXlAttention::SetUpBackward(const NamedTensors& parameters,
                                                   const Distances& distances) {
  return past_.SetUp(RelativeAttention::ParametersOf(parameters, state_->sizes(), n_), own_.rule(),
                     own_.positions(), distances.sinusoids, state_->lists());
}

size_t TransformerXlAttention::backward_workspace_bytes(int threads) const {
  return std::max(past_.workspace_bytes(state_->lists(), threads),
                  past_.backward_workspace_bytes(state_->lists(), threads));
}

ListAttention::Call TransformerXlAttention::ListOf(const PastSegment& segment,
                                                   const EarlierTokens& earlier,
                                                   const LayerNorm* norm, const ConstTensorView& x,
                                                   const int32_t* row_of_token,
                                                   const RowList& rows) const {
  const ListSchedules::List& list = state_->ListOf(segment);
  if (row_of_token == nullptr) return {list, earlier, norm, x, {}, rows};
  return {list, earlier, norm, segment.input(), {x, row_of_token}};
}

ListAttention::Memory TransformerXlAttention::MemoryOf(const PastSegment& segment,
                                                       absl::Span<std::byte> again,
                                                       std::optional<int64_t> rows) const {
  Workspace memory(again);
  const ListSchedules::List& list = state_->ListOf(segment);
  return past_.LayOut(list.tokens, list.keys, memory, rows);
}

namespace {

std::optional<int64_t> RowsOfSome(const ConstTensorView& x, const int32_t* row_of_token) {
  return row_of_token != nullptr ? std::optional<int64_t>(x.dim(0)) : std::nullopt;
}

}  // namespace

absl::Status TransformerXlAttention::RunAgain(const AgainCall& call, const Execution& execution) {
  const ListAttention::Memory memory =
      MemoryOf(call.segment, execution.kept, RowsOfSome(call.x, call.row_of_token));
  const EarlierTokens earlier = EarlierThan(call.segment);
  TFB_RETURN_IF_ERROR(
      past_.Attend(ListOf(call.segment, earlier, call.norm, call.x, call.row_of_token, call.rows),
                   memory, execution));
  return past_.Project(memory.context, call.residual, call.y, execution, Activation::kNone,
                       call.rows);
}

absl::Status TransformerXlAttention::Backward(const BackwardCall& call,
                                              const Execution& execution) {
  const EarlierTokens earlier = EarlierThan(call.segment);
  return past_.BackwardOfOutput(
      ListOf(call.segment, earlier, call.norm, call.x, call.row_of_token, call.rows),
      MemoryOf(call.segment, execution.kept, RowsOfSome(call.x, call.row_of_token)),
      {call.dy, call.added, call.dx}, GradientsOf(call), execution);
}

// ---- The layer ----

absl::StatusOr<std::unique_ptr<Layer>> MakeRelativeStack(
    SegmentedStack stack, const RelativeState& shared, const std::vector<ParameterSpec>& parameters,
    uint64_t seed, const MakeBlock& make) {
  const RelativeStackShape& shape = shared.shape();
  TFB_RETURN_IF_ERROR(DrawParameters(parameters, seed, &stack.parameters));
  stack.segment = shape.segment;
  stack.final_norm = shape.sizes.final_norm;
  stack.depends_on_split |= !shape.same_length;
  const bool queries_apart = shape.some_tokens && shared.device() == Device::kCpu;
  for (int64_t n = 0; n < shape.sizes.layers; ++n) {
    TFB_ASSIGN_OR_RETURN(
        RelativeAttention own,
        RelativeAttention::Create(
            shared.device(), shared.problem(), shared.reach(),
            queries_apart ? RelativeAttention::Queries::kSome : RelativeAttention::Queries::kAll));
    const int64_t kv_heads =
        stack.parameters.at(LayerPrefix(n) + "w_k").dim(1) / shape.sizes.head_dim;
    TFB_ASSIGN_OR_RETURN(std::unique_ptr<Block> block,
                         make(shared.layer(n), std::make_unique<TransformerXlAttention>(
                                                   shared, n, kv_heads, std::move(own))));
    stack.blocks.push_back(std::move(block));
  }
  return std::make_unique<SegmentedLayer>(shared.device(), shared.problem(), std::move(stack));
}

}  // namespace tfb::layers
