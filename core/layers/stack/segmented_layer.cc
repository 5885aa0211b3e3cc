#include "core/layers/stack/segmented_layer.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/layers/copy_rows.h"
#include "core/layers/layer_parameters.h"
#include "core/layers/matmul.h"
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
      depends_on_split_(stack.depends_on_split),
      given_(NamesOfGiven(stack.more_inputs)),
      state_(std::move(stack.state)),
      blocks_(std::move(stack.blocks)) {
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
  TFB_RETURN_IF_ERROR(RecallGiven(segment, execution));
  return AppendSegment({0, tokens, segment, outputs}, execution);
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
  for (int64_t n = 0; n < layers(); ++n) {
    const bool is_last = n + 1 == layers();
    const ConstTensorView input = n == 0 ? x : ConstTensorView(hidden);
    TFB_RETURN_IF_ERROR(Keep(n, segment.begin, input, rest));
    TFB_RETURN_IF_ERROR(
        blocks_[n]->Run({segment, input, hidden, is_last && !has_final_norm_ ? out : hidden,
                         is_last ? segment.Output("context") : TensorView()},
                        rest));
  }
  return has_final_norm_ ? final_norm_.Run(hidden, out, rest) : absl::OkStatus();
}

}  // namespace tfb::layers
