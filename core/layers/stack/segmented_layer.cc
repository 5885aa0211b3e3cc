#include "core/layers/stack/segmented_layer.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/layers/copy_rows.h"
#include "core/layers/layer_parameters.h"
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

// Returns the tokens begin, ..., begin + count - 1; empty where there is no tensor.
TensorView Tokens(const TensorView& view, int64_t begin, int64_t count) {
  return view.empty() ? view : Slice(view, 1, begin, count);
}

// Copies rows [batch, tokens, model_dim], all of them.
absl::Status CopyAll(Device device, const ConstTensorView& from, const TensorView& to,
                     const Execution& execution) {
  CopyRowsCall copy;
  copy.from = from;
  copy.to = to;
  copy.rows = from.dim(1);
  return CopyRows(device, copy, execution);
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

SegmentedLayer::SegmentedLayer(Device device, const Problem& problem, const SegmentedStack& stack)
    : StreamingLayer(problem, RunInputs(problem, stack.more_inputs), stack.outputs,
                     SegmentInputs(problem, stack.more_inputs),
                     SegmentOutputs(problem, stack.outputs, stack.more_outputs),
                     std::min(stack.segment, std::max<int64_t>(problem.query_tokens, 1))),
      device_(device),
      layers_(stack.layers),
      has_final_norm_(stack.final_norm),
      given_(NamesOfGiven(stack.more_inputs)) {}

TensorView SegmentedLayer::LayOutState(int64_t tokens, Workspace& workspace) const {
  const Shape shape = {problem().batch, tokens, problem().model_dim()};
  return TensorView(workspace.Take<float>(NumElements(shape)), DType::kF32, shape);
}

size_t SegmentedLayer::workspace_bytes(int threads) const {
  return layer_workspace_bytes(threads) + Workspace::Measure([&](Workspace& workspace) {
           LayOutState(max_segment_tokens(), workspace);
         });
}

absl::Status SegmentedLayer::Reset() {
  is_at_beginning_ = true;
  Forget();
  return absl::OkStatus();
}

absl::Status SegmentedLayer::DoSetup(const Inputs&, const Execution&) {
  if (has_final_norm_) {
    TFB_ASSIGN_OR_RETURN(final_norm_, MakeLayerNorm(device_, parameters_, kFinalNorm));
  }
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
  const ConstTensorView memories = inputs.Get(kMemories);
  for (int64_t n = 0; n < layers_ && !memories.empty(); ++n) {
    for (int64_t begin = 0; begin < memories.dim(2); begin += max_segment_tokens()) {
      const int64_t count = std::min(max_segment_tokens(), memories.dim(2) - begin);
      TFB_RETURN_IF_ERROR(Recall(n, Slice(OfLayer(memories, n), 1, begin, count), execution));
    }
  }
  return RecallMore(inputs, execution);
}

absl::Status SegmentedLayer::KeepGiven(const ConstTensorView& memories,
                                       const Execution& execution) const {
  if (final_memories_.empty() || memories.empty()) return absl::OkStatus();
  const int64_t count = final_memories_.dim(2) - problem().query_tokens;
  if (count <= 0) return absl::OkStatus();
  for (int64_t n = 0; n < layers_; ++n) {
    TFB_RETURN_IF_ERROR(CopyAll(device_,
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
  return CopyAll(device_, Slice(rows, 1, first - begin, count),
                 Slice(OfLayer(final_memories_, n), 1, first - first_kept, count), execution);
}

absl::Status SegmentedLayer::AppendSegment(const Segment& segment, const Execution& execution) {
  const ConstTensorView x = Slice(segment.inputs.Get("x"), 1, segment.begin, segment.tokens);
  const TensorView out = Tokens(segment.outputs.Get("out"), segment.begin, segment.tokens);
  is_at_beginning_ = false;
  BeginSegment(segment);
  Workspace workspace(execution.workspace);
  const TensorView state = LayOutState(segment.tokens, workspace);
  Execution rest = execution;
  rest.workspace = workspace.Rest();
  for (int64_t n = 0; n < layers_; ++n) {
    const bool is_last = n + 1 == layers_;
    DecoderLayer::Call call;
    call.input = n == 0 ? x : state;
    call.state = state;
    call.output = is_last && !has_final_norm_ ? out : state;
    if (is_last) {
      call.context = Tokens(segment.outputs.Get("context"), segment.begin, segment.tokens);
    }
    TFB_RETURN_IF_ERROR(Keep(n, segment.begin, call.input, rest));
    TFB_RETURN_IF_ERROR(RunLayer(n, call, rest));
  }
  return has_final_norm_ ? final_norm_.Run(state, out, rest) : absl::OkStatus();
}

}  // namespace tfb::layers
