// The backward pass of PlannedLayer.
#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/cuda/for_each.h"
#include "core/flash/crop.h"
#include "core/flash/planned_layer.h"
#include "core/layers/copy_tensor.h"
#include "core/status.h"
#include "core/zeros.h"

namespace tfb {
namespace {

// Adds rows of f32, the places of an order, to the tokens that these name, in the order of places, on
// the CPU.
void AddRowsByToken(const ConstTensorView& rows, const TokenOrder& order, const TensorView& to,
                    ThreadPool* pool) {
  const int64_t heads = rows.dim(1), channels = rows.dim(3);
  pool->ParallelFor(rows.dim(0) * heads, [&](int64_t task, int) {
    const int64_t b = task / heads, h = task % heads;
    for (int64_t place = 0; place < rows.dim(2); ++place) {
      const int64_t token = order(b, h, place);
      if (token < 0) continue;
      const float* from = rows.At<float>(b, h, place);
      float* sum = to.MutableAt<float>(b, h, token);
      for (int64_t c = 0; c < channels; ++c) sum[c * to.stride(3)] += from[c];
    }
  });
}

}  // namespace

absl::Status PlannedLayer::CheckBackward() const {
  for (const FlashRows& rows : plan_.rows()) {
    if (rows.log_sum_exp.empty()) {
      return absl::UnimplementedError(
          absl::StrCat("there is no log-sum-exp of the softmax that writes ", rows.out));
    }
  }
  for (const std::shared_ptr<FlashStep>& step : plan_.steps()) {
    TFB_RETURN_IF_ERROR(step->CheckBackward(device_));
  }
  for (const ScoreTerm* term : terms_) TFB_RETURN_IF_ERROR(term->CheckBackward(device_));
  return absl::OkStatus();
}

absl::Status PlannedLayer::Clear(const TensorView& view, const Execution& execution) const {
  if (device_ != Device::kCpu) return ClearTensor(device_, view, execution);
  SetToZero(view, execution.pool);
  return absl::OkStatus();
}

std::vector<std::string> PlannedLayer::differentiable_outputs() const {
  std::vector<std::string> names;
  for (const TensorSpec& output : outputs()) {
    if (output.name == "out" || output.name == "log_sum_exp") names.push_back(output.name);
  }
  return names;
}

size_t PlannedLayer::kept_bytes() const {
  return Workspace::Measure([&](Workspace& workspace) {
    for (const KeptTensor& kept : kept_tensors_) TakeKept(kept, &workspace);
  });
}

size_t PlannedLayer::BackwardScratchBytes(int threads) const {
  size_t bytes = terms_.empty() ? 0 : GradientMap::kWorkspaceBytes;
  for (const std::shared_ptr<FlashStep>& step : plan_.steps()) {
    bytes = std::max({bytes, step->workspace_bytes(device_, threads),
                      step->backward_workspace_bytes(device_, threads)});
  }
  for (const Sizes& sizes : sizes_) {
    for (const Problem& part : sizes.parts) {
      bytes =
          std::max(bytes, device_ == Device::kCpu
                              ? FlashBackwardWorkspaceBytes(part, sizes.has_relative_keys, threads)
                              : FlashBackwardCuda::WorkspaceBytes(part, sizes.sums));
    }
  }
  return bytes;
}

size_t PlannedLayer::backward_workspace_bytes(int threads) const {
  return backward_bytes_ + BackwardScratchBytes(threads);
}

PlannedLayer::BackwardMemory PlannedLayer::LayOutBackward(const BackwardCall& call,
                                                          Workspace* workspace) {
  const Problem& p = problem();
  LayOut(call.inputs, workspace);
  int64_t rows = 0, places = 0;  // the most of a softmax, and of one that writes places
  for (const FlashRows& softmax : plan_.rows()) {
    const int64_t of_head = plan_.ProblemOf(softmax, softmax.parts[0], device_).query_tokens;
    const int64_t all =
        p.batch * softmax.heads.size() * (softmax.out_by_place ? of_head : softmax.queries.size());
    rows = std::max(rows, all);
    if (softmax.out_by_place) places = std::max(places, all);
  }
  BackwardMemory memory;
  if (device_ == Device::kCpu) {
    memory.delta = workspace->Take<float>(rows);
  } else {
    for (float** number : {&memory.numbers.shift, &memory.numbers.rest, &memory.numbers.delta}) {
      *number = workspace->Take<float>(rows);
    }
  }
  memory.by_place = workspace->Take<float>(places * p.head_dim);
  memory.sums_begin = workspace->used();
  if (device_ != Device::kCpu) memory.zero = workspace->Take<float>(1);
  const auto take = [&](const Shape& shape) {
    return TensorView(workspace->Take<float>(NumElements(shape)), DType::kF32, shape);
  };
  const bool is_measured = call.inputs.size() == 0;
  for (const TensorSpec& input : inputs()) {
    if (!IsFloating(input.dtype)) continue;
    const TensorView wanted = call.input_gradients.Get(input.name);
    if (input.dtype == DType::kF32) {
      gradients_.Set(input.name, wanted);
    } else {
      gradients_.Set(input.name, is_measured || !wanted.empty() ? take(input.shape) : TensorView());
    }
  }
  for (const auto& [name, tensor] : tensors_) {
    const bool is_input =
        std::any_of(inputs().begin(), inputs().end(),
                    [&, &name = name](const TensorSpec& i) { return i.name == name; });
    if (!is_input && IsFloating(tensor.dtype)) gradients_.Set(name, take(tensor.shape()));
  }
  for (ScoreTerm* term : terms_) term->LayOutGradients(device_, p, workspace);
  parameter_gradients_.LayOut(workspace);
  memory.sums_end = workspace->used();
  return memory;
}

absl::StatusOr<PlannedLayer::PartBackward> PlannedLayer::SetUpPart(const Softmax& softmax,
                                                                   size_t n) const {
  const FlashRows& rows = *softmax.rows;
  const FlashPart& part = *softmax.parts[n].part;
  const FlashEngine& engine = softmax.engines.engines()[n];
  PartBackward backward;
  if (device_ != Device::kCpu) {
    TFB_ASSIGN_OR_RETURN(CudaRuntime * runtime, CudaRuntime::For(device_));
    Problem problem = engine.problem();
    problem.causal |= part.causal && !rows.marked.tensor.empty();
    TFB_ASSIGN_OR_RETURN(backward.cuda, FlashBackwardCuda::Create(
                                            runtime, problem, BuildSchedule(problem, *part.seen()),
                                            RuleOf(rows, part)));
    return backward;
  }
  backward.schedule = TransposedSchedule(engine.schedule());
  const RelativeKeys* keys = engine.NewCall().rule.relative_keys;
  if (keys == nullptr) return backward;
  backward.relative_keys =
      RelativeKeyVectors(*keys, problem().head_dim, ProductScale(engine.problem(), rows.scale));
  return backward;
}

void PlannedLayer::FindFirstWriters() {
  wholly_set_.clear();
  if (device_ != Device::kCpu) return;  // on CUDA calls always add
  for (const std::shared_ptr<FlashStep>& step : plan_.steps()) {
    if (step->adds_before_softmaxes()) return;
  }
  struct Region {
    TokenRange heads;
    TokenRange tokens;
    bool Meets(const Region& other) const {
      return heads.begin < other.heads.end && other.heads.begin < heads.end &&
             tokens.begin < other.tokens.end && other.tokens.begin < tokens.end;
    }
  };
  std::map<std::string, std::vector<Region>> written;
  std::map<std::string, int64_t> rows_set;
  for (size_t n = 0; n < softmaxes_.size(); ++n) {
    const FlashRows& rows = *softmaxes_[n].rows;
    const int64_t group = problem().group();
    const TokenRange kv_heads = {rows.heads.begin / group, rows.heads.end / group};
    for (size_t p = 0; p < softmaxes_[n].parts.size(); ++p) {
      const FlashPart& part = *softmaxes_[n].parts[p].part;
      PartBackward& backward = backward_parts_[n][p];
      // Tells whether the part sets a gradient: it is the first to write there, and only as this one.
      const auto sets = [&](const std::string& name, bool is_whole, const Region& region) {
        std::vector<Region>& others = written[name];
        const bool is_first = std::none_of(
            others.begin(), others.end(), [&](const Region& other) { return region.Meets(other); });
        others.push_back(region);
        if (is_first && is_whole) rows_set[name] += region.heads.size() * region.tokens.size();
        return is_first && is_whole;
      };
      const bool is_alone = part.q != part.k && part.q != part.v;  // keys come after queries
      const bool has_all_queries =
          is_alone && part.query_order.empty() && !rows.out_by_place && rows.marked.tensor.empty();
      const bool has_all_keys = is_alone && part.key_order.empty();
      backward.sets_q = sets(part.q, has_all_queries, {rows.heads, rows.queries});
      backward.sets_k = sets(part.k, has_all_keys, {kv_heads, part.keys});
      backward.sets_v = sets(part.v, has_all_keys, {kv_heads, part.keys});
    }
  }
  for (const TensorSpec& input : inputs()) {
    const auto set = rows_set.find(input.name);
    if (set != rows_set.end() && set->second == input.shape[1] * input.shape[2]) {
      wholly_set_.insert(input.name);
    }
  }
}

absl::Status PlannedLayer::DoSetUpBackward(const Inputs&, const Execution&) {
  backward_parts_.clear();
  for (const Softmax& softmax : softmaxes_) {
    std::vector<PartBackward>& parts = backward_parts_.emplace_back();
    for (size_t n = 0; n < softmax.parts.size(); ++n) {
      TFB_ASSIGN_OR_RETURN(PartBackward part, SetUpPart(softmax, n));
      parts.push_back(std::move(part));
    }
  }
  FindFirstWriters();
  parameter_gradients_ = ParameterGradients(parameters(), WrittenBySteps(plan_));
  Workspace::Measure([&](Workspace& workspace) { LayOutBackward(BackwardCall(), &workspace); });
  for (ScoreTerm* term : terms_) {
    TFB_RETURN_IF_ERROR(term->SetUpGradients(device_, parameter_gradients_));
  }
  return absl::OkStatus();
}

absl::Status PlannedLayer::FindRowNumbers(const Softmax& softmax, const ConstTensorView& out,
                                          const BackwardMemory& memory, DType factors,
                                          FlashBackwardCall* call,
                                          const Execution& execution) const {
  const FlashRows& rows = *softmax.rows;
  const ConstTensorView* of_output = output_gradients_.Find(rows.log_sum_exp);
  const ConstTensorView log_sum_exp_gradient = Crop(
      of_output != nullptr ? *of_output : ConstTensorView(gradients_.Get(rows.log_sum_exp)), rows);
  if (device_ == Device::kCpu) {
    const TensorView delta(memory.delta, DType::kF32, {out.dim(0), out.dim(1), out.dim(2)});
    FlashDelta(out, call->forward->out_rest, call->out_gradient, log_sum_exp_gradient, delta,
               execution.pool);
    call->delta = delta;
    return absl::OkStatus();
  }
  TFB_ASSIGN_OR_RETURN(CudaRuntime * runtime, CudaRuntime::For(device_));
  call->numbers = memory.numbers;
  call->numbers.rows = out.dim(2);
  const bool is_marked = !rows.marked.tensor.empty();
  const ConstTensorView marks = is_marked ? tensors_.Get(rows.marked.tensor) : call->overwritten;
  return FlashRowNumbers(runtime, *call, out, log_sum_exp_gradient, factors, marks, is_marked,
                         execution);
}

DType PlannedLayer::FactorsOf(size_t index) const {
  const Softmax& softmax = softmaxes_[index];
  DType factors = problem().dtype;
  for (size_t n = 0; device_ != Device::kCpu && n < softmax.parts.size(); ++n) {
    const DType of_part = backward_parts_[index][n].cuda.FactorsOf(
        softmax.engines.engines()[n].problem(), CallOf(softmax, n, Outputs()));
    if (of_part == DType::kF32) factors = of_part;
  }
  return factors;
}

absl::Status PlannedLayer::BackwardOf(size_t index, const ConstTensorView& all_out,
                                      const BackwardMemory& memory, const Execution& execution) {
  const Softmax& softmax = softmaxes_[index];
  const FlashRows& rows = *softmax.rows;
  const bool is_marked = !rows.marked.tensor.empty();
  const int64_t group = problem().group();
  const TokenRange kv_heads = {rows.heads.begin / group, rows.heads.end / group};
  const ConstTensorView* of_output = output_gradients_.Find(rows.out);
  const ConstTensorView* of_step = tensors_.Find(rows.out);
  const ConstTensorView out = Crop(of_step != nullptr ? *of_step : all_out, rows);
  const ConstTensorView out_gradient =
      Crop(of_output != nullptr ? *of_output : ConstTensorView(gradients_.Get(rows.out)), rows);
  FlashBackwardCall backward;
  backward.out_gradient = out_gradient;
  // A softmax does not own the rows that one over marked queries writes.
  for (const FlashRows& other : plan_.rows()) {
    if (is_marked || other.marked.tensor.empty()) continue;
    backward.overwritten = Crop(tensors_.Get(other.marked.tensor), 1, rows.queries);
  }
  for (size_t n = 0; n < softmax.parts.size(); ++n) {
    const FlashPart& part = *softmax.parts[n].part;
    const FlashCall forward = is_marked && device_ == Device::kCpu
                                  ? MarkedCallOf(softmax, Outputs())
                                  : CallOf(softmax, n, Outputs());
    backward.forward = &forward;
    if (n == 0) {
      TFB_RETURN_IF_ERROR(
          FindRowNumbers(softmax, out, memory, FactorsOf(index), &backward, execution));
    }
    const PartBackward& own = backward_parts_[index][n];
    backward.schedule = &own.schedule;
    backward.relative_keys = &own.relative_keys;
    backward.terms = {};  // parts have terms of their own
    const TensorView q_gradient = Crop(gradients_.Get(part.q), rows.heads, rows.queries);
    backward.q_gradient = q_gradient;
    if (rows.out_by_place && !q_gradient.empty()) {
      backward.q_gradient = TensorView(memory.by_place, DType::kF32,
                                       {out.dim(0), out.dim(1), out.dim(2), q_gradient.dim(3)});
      TFB_RETURN_IF_ERROR(Clear(backward.q_gradient, execution));
    }
    backward.k_gradient = Crop(gradients_.Get(part.k), kv_heads, part.keys);
    backward.v_gradient = Crop(gradients_.Get(part.v), kv_heads, part.keys);
    backward.sets_q = own.sets_q;
    backward.sets_k = own.sets_k;
    backward.sets_v = own.sets_v;
    for (const std::shared_ptr<ScoreTerm>& term : part.terms) {
      term->BindGradients(gradients_, &backward.terms);
    }
    const Problem& problem = softmax.engines.engines()[n].problem();
    TFB_RETURN_IF_ERROR(device_ == Device::kCpu ? FlashBackwardCpu(problem, backward, execution)
                                                : own.cuda.Run(problem, backward, execution));
    if (!rows.out_by_place || q_gradient.empty()) continue;
    if (device_ == Device::kCpu) {
      AddRowsByToken(backward.q_gradient, forward.query_order, q_gradient, execution.pool);
    } else {
      TFB_ASSIGN_OR_RETURN(CudaRuntime * runtime, CudaRuntime::For(device_));
      TFB_RETURN_IF_ERROR(
          AddRowsByToken(runtime, backward.q_gradient, forward.query_order, q_gradient, execution));
    }
  }
  return absl::OkStatus();
}

absl::Status PlannedLayer::DoBackward(const BackwardCall& call, const Execution& execution) {
  Workspace workspace(execution.workspace);
  const BackwardMemory memory = LayOutBackward(call, &workspace);
  LayOutKept(execution.kept);
  const ConstTensorView out = call.outputs.Get("out");
  const ConstTensorView given = call.output_gradients.Get("out");
  const ConstTensorView zeros(memory.zero, DType::kF32, out.shape(), Shape(out.rank, 0));
  output_gradients_.Set("out",
                        device_ == Device::kCpu || !given.empty() ? OrZeros(given, out) : zeros);
  output_gradients_.Set("log_sum_exp", call.output_gradients.Get("log_sum_exp"));
  parameter_gradients_.SetOutputs(&call.parameter_gradients);
  Execution rest = execution;
  rest.workspace = workspace.Rest();
  TFB_RETURN_IF_ERROR(ClearBytes(
      device_, execution.workspace.subspan(memory.sums_begin, memory.sums_end - memory.sums_begin),
      rest));
  for (const auto& [name, gradient] : call.input_gradients) {
    if (gradient.empty() || wholly_set_.count(name) > 0) continue;
    TFB_RETURN_IF_ERROR(Clear(gradient, execution));
  }
  for (const std::shared_ptr<FlashStep>& step : plan_.steps()) {
    TFB_RETURN_IF_ERROR(step->RunAgain(tensors_, rest));
  }
  for (auto step = plan_.steps().rbegin(); step != plan_.steps().rend(); ++step) {
    TFB_RETURN_IF_ERROR((*step)->FinishBackward(tensors_, output_gradients_, gradients_,
                                                parameter_gradients_, rest));
  }
  for (size_t n = 0; n < softmaxes_.size(); ++n) {
    TFB_RETURN_IF_ERROR(BackwardOf(n, out, memory, rest));
  }
  for (const ScoreTerm* term : terms_) {
    TFB_RETURN_IF_ERROR(term->AddGradients(parameter_gradients_, rest));
  }
  for (auto step = plan_.steps().rbegin(); step != plan_.steps().rend(); ++step) {
    TFB_RETURN_IF_ERROR((*step)->Backward(tensors_, gradients_, parameter_gradients_, rest));
  }
  for (const TensorSpec& input : inputs()) {
    const TensorView wanted = call.input_gradients.Get(input.name);
    if (wanted.empty() || input.dtype == DType::kF32) continue;
    TFB_RETURN_IF_ERROR(CopyTensor(device_, gradients_.Get(input.name), wanted, execution));
  }
  return parameter_gradients_.Write(device_, execution);
}

}  // namespace tfb
