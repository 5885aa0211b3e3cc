#include "core/layers/stack/segmented_layer.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/layers/copy_rows.h"
#include "core/layers/copy_tensor.h"
#include "core/layers/layer_parameters.h"
#include "core/layers/matmul.h"
#include "core/layers/recompute.h"
#include "core/layers/stack/stack_sizes.h"
#include "core/status.h"

namespace tfb::layers {
namespace {

TensorSpec SegmentSpec(const Problem& problem, const char* name, bool optional = false) {
  return {name, {problem.batch, kSegmentTokens, problem.model_dim()}, problem.dtype, optional};
}

std::vector<TensorSpec> SegmentOutputs(const Problem& problem,
                                       const std::vector<TensorSpec>& of_run,
                                       const std::vector<TensorSpec>& more) {
  std::vector<TensorSpec> outputs = {SegmentSpec(problem, "out")};
  if (std::any_of(of_run.begin(), of_run.end(),
                  [](const TensorSpec& spec) { return spec.name == "context"; })) {
    outputs.push_back(SegmentSpec(problem, "context", true));
  }
  outputs.insert(outputs.end(), more.begin(), more.end());
  return outputs;
}

bool IsOfTokens(const TensorSpec& spec) {
  return std::count(spec.shape.begin(), spec.shape.end(), kSegmentTokens) > 0;
}

std::vector<TensorSpec> SegmentInputs(const Problem& problem, const std::vector<TensorSpec>& more) {
  std::vector<TensorSpec> inputs = {SegmentSpec(problem, "x")};
  for (TensorSpec spec : more) {
    spec.optional = spec.optional || !IsOfTokens(spec);
    inputs.push_back(std::move(spec));
  }
  return inputs;
}
std::vector<std::string> NamesOfGiven(const std::vector<TensorSpec>& inputs) {
  std::vector<std::string> names;
  for (const TensorSpec& spec : inputs) {
    if (!IsOfTokens(spec) && !spec.optional) names.push_back(spec.name);
  }
  return names;
}
std::vector<TensorSpec> RunInputs(const Problem& problem, const std::vector<TensorSpec>& more) {
  std::vector<TensorSpec> inputs = {SegmentSpec(problem, "x")};
  inputs.insert(inputs.end(), more.begin(), more.end());
  for (TensorSpec& spec : inputs) {
    std::replace(spec.shape.begin(), spec.shape.end(), kSegmentTokens, problem.query_tokens);
  }
  return inputs;
}

}  // namespace

TensorSpec MemoriesSpec(const Problem& problem, int64_t layers, int64_t tokens) {
  return {kMemories, {problem.batch, layers, tokens, problem.model_dim()}, problem.dtype};
}

std::vector<TensorSpec> SegmentedOutputs(const Problem& problem) {
  std::vector<TensorSpec> outputs = HiddenOutputs(problem);
  outputs.push_back(
      {"context", {problem.batch, problem.query_tokens, problem.model_dim()}, problem.dtype, true});
  return outputs;
}

int64_t LongestSegment(const Problem& problem, int64_t segment) {
  return std::min(segment, std::max<int64_t>(problem.query_tokens, 1));
}

SegmentedLayer::SegmentedLayer(Device device, const Problem& problem, SegmentedStack stack)
    : StreamingLayer(problem, RunInputs(problem, stack.more_inputs), stack.outputs,
                     SegmentInputs(problem, stack.more_inputs),
                     SegmentOutputs(problem, stack.outputs, stack.more_outputs),
                     LongestSegment(problem, stack.segment)),
      device_(device),
      has_final_norm_(stack.final_norm),
      blocks_write_out_(stack.blocks_write_out),
      depends_on_split_(stack.depends_on_split),
      given_(NamesOfGiven(stack.more_inputs)),
      state_(std::move(stack.state)),
      blocks_(std::move(stack.blocks)),
      more_differentiable_(std::move(stack.more_differentiable)),
      more_stopped_(std::move(stack.more_stopped)),
      final_norm_names_(kFinalNorm) {
  parameters_ = std::move(stack.parameters);
}

TensorView SegmentedLayer::LayOutHidden(int64_t tokens, Workspace& workspace) const {
  const Shape shape = {problem().batch, tokens, problem().model_dim()};
  return TensorView(workspace.Take<float>(NumElements(shape)), DType::kF32, shape);
}

// A block's workspace covers the final norm's.
size_t SegmentedLayer::workspace_bytes(int threads) const {
  if (threads == asked_threads_) return asked_bytes_;
  size_t of_block = 0;
  for (const auto& block : blocks_) of_block = std::max(of_block, block->workspace_bytes(threads));
  asked_threads_ = threads;
  asked_bytes_ = of_block + Workspace::Measure([this](Workspace& workspace) {
                   LayOutHidden(max_segment_tokens(), workspace);
                 });
  return asked_bytes_;
}

Cost SegmentedLayer::cost() const {
  Cost cost;
  cost.flops = state_->flops(parameters_);
  cost.bytes = TensorBytes();
  return cost;
}

std::map<std::string, double> SegmentedLayer::statistics() const {
  std::map<std::string, double> statistics = state_->statistics(parameters_);
  for (const auto& block : blocks_) {
    for (const auto& [name, value] : block->attention().statistics()) statistics[name] += value;
  }
  if (device_ == Device::kCuda) statistics["cublas"] = MatMulUsesCublas(device_) ? 1 : 0;
  if (CheckBackward().ok()) statistics[kKeptBytesPerBlock] = KeptBytesPerBlock();
  return statistics;
}

absl::Status SegmentedLayer::Reset() {
  is_at_beginning_ = true;
  state_->Reset();
  for (const auto& block : blocks_) block->attention().Reset();
  return absl::OkStatus();
}

absl::Status SegmentedLayer::DoSetup(const Inputs&, const Execution& execution) {
  const DistanceRange range = state_->distances();
  const Tensor sinusoids = SinusoidsOf(range, problem().model_dim());
  for (const auto& block : blocks_) {
    TFB_RETURN_IF_ERROR(block->Setup(parameters_, {range, sinusoids.view()}, execution));
  }
  if (has_final_norm_) {
    TFB_ASSIGN_OR_RETURN(final_norm_, MakeLayerNorm(device_, parameters_, kFinalNorm));
  }
  TFB_RETURN_IF_ERROR(state_->Setup(parameters_));
  return Reset();
}

absl::Status SegmentedLayer::DoRun(const Inputs& inputs, const Outputs& outputs,
                                   const Execution& execution) {
  TFB_RETURN_IF_ERROR(Reset());
  const int64_t total = problem().query_tokens;
  TFB_RETURN_IF_ERROR(RecallGiven(inputs, execution));
  final_memories_ = outputs.Get(kMemories);
  TFB_RETURN_IF_ERROR(KeepGiven(inputs.Get(kMemories), execution));
  for (int64_t begin = 0; begin < total; begin += max_segment_tokens()) {
    const int64_t tokens = std::min(max_segment_tokens(), total - begin);
    TFB_RETURN_IF_ERROR(AppendSegment({begin, tokens, inputs, outputs}, execution));
  }
  for (const auto& block : blocks_) {
    TFB_RETURN_IF_ERROR(block->attention().KeepState(inputs, outputs, execution));
  }
  return absl::OkStatus();
}

absl::Status SegmentedLayer::DoAppend(int64_t tokens, const Inputs& segment, const Outputs& outputs,
                                      const Execution& execution) {
  final_memories_ = {};
  Execution without_kept = execution;  // there is no Backward of a stream
  without_kept.kept = {};
  TFB_RETURN_IF_ERROR(RecallGiven(segment, execution));
  return AppendSegment({0, tokens, segment, outputs}, without_kept);
}

absl::Status SegmentedLayer::RecallGiven(const Inputs& inputs, const Execution& execution) {
  if (given_.empty() || !is_at_beginning_) return absl::OkStatus();
  for (const std::string& name : given_) {
    if (!inputs.Get(name).empty()) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("input ", name, " is missing; the first segment has need of it"));
  }
  for (const auto& block : blocks_) TFB_RETURN_IF_ERROR(block->Recall(inputs, execution));
  return absl::OkStatus();
}

absl::Status SegmentedLayer::KeepGiven(const ConstTensorView& memories,
                                       const Execution& execution) const {
  if (final_memories_.empty() || memories.empty()) return absl::OkStatus();
  const int64_t count = final_memories_.dim(2) - problem().query_tokens;
  if (count <= 0) return absl::OkStatus();
  for (int64_t n = 0; n < layers(); ++n) {
    TFB_RETURN_IF_ERROR(CopyAllRows(device_,
                                    Slice(OfLayer(memories, n), 1, memories.dim(2) - count, count),
                                    Slice(OfLayer(final_memories_, n), 1, 0, count), execution));
  }
  return absl::OkStatus();
}

absl::Status SegmentedLayer::Keep(int64_t n, int64_t begin, const ConstTensorView& rows,
                                  const Execution& execution) const {
  if (final_memories_.empty()) return absl::OkStatus();
  // The memories begin with this token of the Run, a given one where it is below 0.
  const int64_t first_kept = problem().query_tokens - final_memories_.dim(2);
  const int64_t first = std::max(begin, first_kept), count = begin + rows.dim(1) - first;
  if (count <= 0) return absl::OkStatus();
  return CopyAllRows(device_, Slice(rows, 1, first - begin, count),
                     Slice(OfLayer(final_memories_, n), 1, first - first_kept, count), execution);
}

absl::Status SegmentedLayer::AppendSegment(const Segment& segment, const Execution& execution) {
  const ConstTensorView x = segment.Input("x");
  const TensorView out = segment.Output("out");
  is_at_beginning_ = false;
  state_->Begin(segment);
  Workspace workspace(execution.workspace);
  const TensorView hidden = LayOutHidden(segment.tokens, workspace);
  Execution rest = execution;
  rest.workspace = workspace.Rest();
  rest.kept = {};  // is not the blocks'
  const bool last_writes_out = !has_final_norm_ && !blocks_write_out_;
  for (int64_t n = 0; n < layers(); ++n) {
    const bool is_last = n + 1 == layers();
    const ConstTensorView input = n == 0 ? x : ConstTensorView(hidden);
    TFB_RETURN_IF_ERROR(Keep(n, segment.begin, input, rest));
    TFB_RETURN_IF_ERROR(KeepState(n, segment, input, execution));
    TFB_RETURN_IF_ERROR(blocks_[n]->Run({segment,
                                         input,
                                         hidden,
                                         is_last && last_writes_out ? out : hidden,
                                         is_last ? segment.Output("context") : TensorView(),
                                         {},
                                         KeptOf(n, execution.kept)},
                                        rest));
  }
  if (last_writes_out) return absl::OkStatus();
  TFB_RETURN_IF_ERROR(KeepState(layers(), segment, hidden, execution));
  return has_final_norm_ ? final_norm_.Run(hidden, out, rest) : absl::OkStatus();
}

// ---- The backward pass ----

absl::Status SegmentedLayer::CheckBackward() const {
  TFB_RETURN_IF_ERROR(state_->CheckBackward());
  for (const auto& block : blocks_) TFB_RETURN_IF_ERROR(block->CheckBackward());
  return absl::OkStatus();
}

size_t SegmentedLayer::kept_bytes() const {
  size_t bytes = kept_state_bytes();
  for (const auto& block : blocks_) bytes += block->kept_bytes();
  return bytes;
}

double SegmentedLayer::KeptBytesPerBlock() const {
  const int64_t rows = problem().batch * problem().query_tokens;
  const double state = static_cast<double>(rows * problem().model_dim() * SizeOf(DType::kF32));
  size_t least = blocks_[0]->kept_bytes();
  for (const auto& block : blocks_) least = std::min(least, block->kept_bytes());
  return state + static_cast<double>(least);
}

size_t SegmentedLayer::kept_state_bytes() const {
  return Workspace::Measure([this](Workspace& workspace) {
    const Shape shape = {problem().batch, problem().query_tokens, problem().model_dim()};
    workspace.Take<float>(kept_states() * NumElements(shape));
  });
}

absl::Span<std::byte> SegmentedLayer::KeptOf(int64_t n, absl::Span<std::byte> kept) const {
  if (kept.empty()) return {};
  size_t begin = kept_state_bytes();
  for (int64_t before = 0; before < n; ++before) {
    begin += blocks_[before]->kept_bytes();
  }
  return kept.subspan(begin, blocks_[n]->kept_bytes());
}

TensorView SegmentedLayer::KeptState(int64_t n, absl::Span<std::byte> kept) const {
  const Shape shape = {problem().batch, problem().query_tokens, problem().model_dim()};
  float* const states = reinterpret_cast<float*>(kept.data());
  return TensorView(states + (n - 1) * NumElements(shape), DType::kF32, shape);
}

absl::Status SegmentedLayer::KeepState(int64_t n, const Segment& segment,
                                       const ConstTensorView& rows,
                                       const Execution& execution) const {
  if (execution.kept.empty() || n == 0) return absl::OkStatus();
  return CopyAllRows(device_, rows,
                     Slice(KeptState(n, execution.kept), 1, segment.begin, segment.tokens),
                     execution);
}

SegmentedLayer::BackwardScratch SegmentedLayer::LayOutBackward(Workspace& workspace) const {
  size_t sums = 0;
  for (const auto& block : blocks_) sums = std::max(sums, block->attention().sums_bytes());
  BackwardScratch scratch;
  scratch.gradient = LayOutHidden(problem().query_tokens, workspace);
  const auto take = [&](size_t bytes) {
    return absl::MakeSpan(workspace.Take<std::byte>(static_cast<int64_t>(bytes)), bytes);
  };
  scratch.sums = take(sums);
  scratch.of_state = take(state_->backward_memory_bytes());
  return scratch;
}

size_t SegmentedLayer::backward_workspace_bytes(int threads) const {
  if (threads == asked_backward_threads_) return asked_backward_bytes_;
  const int64_t rows = problem().batch * problem().query_tokens;
  size_t bytes = has_final_norm_ ? LayerNorm::backward_workspace_bytes(
                                       device_, rows, problem().model_dim(), threads)
                                 : 0;
  for (const auto& block : blocks_) {
    bytes = std::max(bytes, block->backward_workspace_bytes(threads));
  }
  asked_backward_threads_ = threads;
  asked_backward_bytes_ =
      bytes + Workspace::Measure([this](Workspace& workspace) { LayOutBackward(workspace); });
  return asked_backward_bytes_;
}

Cost SegmentedLayer::backward_cost() const {
  Cost cost;
  cost.flops = state_->backward_flops(parameters_);
  cost.bytes = 2 * TensorBytes() + static_cast<double>(kept_bytes());  // and all gradients
  return cost;
}

std::map<std::string, std::string> SegmentedLayer::stopped_gradients() const {
  std::map<std::string, std::string> stopped = more_stopped_;
  for (const TensorSpec& input : inputs()) {
    const bool is_given = std::count(given_.begin(), given_.end(), input.name) > 0;
    if (is_given && IsFloating(input.dtype)) {
      stopped[input.name] = "it is of an earlier run, at whose end the paper stops the gradient";
    }
  }
  return stopped;
}

std::vector<std::string> SegmentedLayer::differentiable_outputs() const {
  std::vector<std::string> names;
  for (const TensorSpec& output : outputs()) {
    if (output.name == "out" || output.name == "context") names.push_back(output.name);
  }
  names.insert(names.end(), more_differentiable_.begin(), more_differentiable_.end());
  return names;
}

absl::Status SegmentedLayer::DoSetUpBackward(const Inputs&, const Execution&) {
  const DistanceRange range = state_->distances();
  sinusoids_ = SinusoidsOf(range, problem().model_dim());
  state_->SetUpBackward();
  for (const auto& block : blocks_) {
    TFB_RETURN_IF_ERROR(block->SetUpBackward(parameters_, {range, sinusoids_.view()}));
  }
  return absl::OkStatus();
}

absl::Status SegmentedLayer::DoBackward(const BackwardCall& call, const Execution& execution) {
  for (const auto& [name, gradient] : call.parameter_gradients) {
    if (!gradient.empty()) TFB_RETURN_IF_ERROR(ClearTensor(device_, gradient, execution));
  }
  Workspace workspace(execution.workspace);
  const BackwardScratch scratch = LayOutBackward(workspace);
  Execution rest = execution;
  rest.workspace = workspace.Rest();
  TFB_RETURN_IF_ERROR(FinalNormBackward(call, scratch, rest));
  const ConstTensorView next_states(
      execution.kept.data(), DType::kF32,
      {kept_states(), problem().batch, problem().query_tokens, problem().model_dim()});
  TFB_RETURN_IF_ERROR(state_->BeginBackward(
      {next_states, call.output_gradients, call.parameter_gradients}, scratch.of_state, rest));
  for (int64_t n = layers() - 1; n >= 0; --n) {
    TFB_RETURN_IF_ERROR(LayerBackward(n, call, scratch, rest));
  }
  const TensorView dx = call.input_gradients.Get("x");
  return dx.empty() ? absl::OkStatus() : CopyAllRows(device_, scratch.gradient, dx, rest);
}

absl::Status SegmentedLayer::FinalNormBackward(const BackwardCall& call,
                                               const BackwardScratch& scratch,
                                               const Execution& execution) const {
  const ConstTensorView dout = call.output_gradients.Get("out");
  if (blocks_write_out_ || dout.empty()) {
    TFB_RETURN_IF_ERROR(ClearTensor(device_, scratch.gradient, execution));
    return absl::OkStatus();
  }
  if (!has_final_norm_) return CopyAllRows(device_, dout, scratch.gradient, execution);
  return final_norm_.Backward({KeptState(layers(), execution.kept),
                               dout,
                               {},
                               scratch.gradient,
                               call.parameter_gradients.Get(final_norm_names_.gamma),
                               call.parameter_gradients.Get(final_norm_names_.beta)},
                              execution);
}

absl::Status SegmentedLayer::LayerBackward(int64_t n, const BackwardCall& call,
                                           const BackwardScratch& scratch,
                                           const Execution& execution) const {
  const int64_t longest = max_segment_tokens(), total = problem().query_tokens;
  const ConstTensorView states =
      n == 0 ? call.inputs.Get("x") : ConstTensorView(KeptState(n, execution.kept));
  const ConstTensorView next_states =
      blocks_write_out_ ? ConstTensorView(KeptState(n + 1, execution.kept)) : ConstTensorView();
  const ConstTensorView of_context =
      n + 1 == layers() ? call.output_gradients.Get("context") : ConstTensorView();
  Execution rest = execution;
  rest.kept = {};
  TFB_RETURN_IF_ERROR(ClearBytes(device_, scratch.sums, execution));
  for (int64_t begin = (total - 1) / longest * longest; begin >= 0; begin -= longest) {
    const int64_t tokens = std::min(longest, total - begin);
    if (tokens == 0) break;
    const PastSegment segment = {begin,
                                 tokens,
                                 states,
                                 next_states,
                                 call.inputs,
                                 call.output_gradients,
                                 call.parameter_gradients,
                                 KeptOf(n, execution.kept),
                                 scratch.sums};
    TFB_RETURN_IF_ERROR(blocks_[n]->Backward(
        {segment, Slice(scratch.gradient, 1, begin, tokens),
         of_context.empty() ? of_context : Slice(of_context, 1, begin, tokens)},
        rest));
  }
  return absl::OkStatus();
}

}  // namespace tfb::layers
