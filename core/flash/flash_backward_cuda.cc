#include "core/flash/flash_backward_cuda.h"

#include <algorithm>

#include "core/cuda/for_each.h"
#include "core/cuda/sum_in_runs.h"
#include "core/flash/flash_backward_sums.h"
#include "core/status.h"
#include "core/workspace.h"

namespace tfb {
namespace {

int64_t TilesOf(int64_t tokens) { return (tokens + kFlashTile - 1) / kFlashTile; }

int64_t BlocksOfOffsets(const Problem& p) {
  return p.query_tokens == 0 || p.kv_tokens == 0
             ? 0
             : TilesOf(p.query_tokens) + TilesOf(p.kv_tokens) - 1;
}

// Returns how many offsets j - i the pairs have.
int64_t Offsets(const Problem& p) {
  return p.query_tokens == 0 || p.kv_tokens == 0 ? 0 : p.query_tokens + p.kv_tokens - 1;
}

bool IsThere(const TensorView& view) { return !view.empty(); }

// The kernels of a call's gradients of queries, and of keys and values.
struct OwnerKernels {
  const char* (*queries)(const FlashBackwardArguments&, void*);
  const char* (*keys)(const FlashBackwardArguments&, void*);
};
OwnerKernels KernelsOf(CudaTarget target, DType factors) {
  if (factors == DType::kBF16) {
    const auto& kernels = KernelsOn<FlashBackwardBf16Kernels>(target);
    return {kernels.queries, kernels.keys};
  }
  if (factors == DType::kF16) {
    const auto& kernels = KernelsOn<FlashBackwardF16Kernels>(target);
    return {kernels.queries, kernels.keys};
  }
  const auto& kernels = KernelsOn<FlashBackwardKernels>(target);
  return {kernels.queries, kernels.keys};
}

// Returns the dtype of the factors of a call's products. Kernels on tensor cores have no score rule.
DType FactorsOfCall(DType dtype, const FlashBackwardArguments& b) {
  const ScoreRule& rule = b.forward.rule;
  const bool is_plain = rule.is_plain() && rule.content_bias == nullptr &&
                        b.forward.schedule.row_begin != nullptr &&
                        b.widest() <= kFlashBackwardDim16;
  return is_plain ? dtype : DType::kF32;
}

Element ElementOf(DType dtype) {
  return dtype == DType::kBF16  ? Element::kBf16
         : dtype == DType::kF16 ? Element::kF16
                                : Element::kF32;
}

// Returns the call by its schedule alone.
FlashCall BySchedule(FlashCall forward) {
  forward.asked = {};
  forward.band = nullptr;
  return forward;
}

}  // namespace

ScoreSums ScoreSums::OfLabels() {
  ScoreSums sums;
  sums.labels = true;
  return sums;
}
ScoreSums ScoreSums::OfOffsets() {
  ScoreSums sums;
  sums.offsets = true;
  return sums;
}
ScoreSums ScoreSums::OfRelativeKeys() {
  ScoreSums sums = OfOffsets();
  sums.relative_keys = true;
  return sums;
}
ScoreSums ScoreSums::OfKeyOrder() {
  ScoreSums sums;
  sums.key_order = true;
  return sums;
}

bool ScoreSums::operator==(const ScoreSums& other) const {
  return content_bias == other.content_bias && labels == other.labels && offsets == other.offsets &&
         relative_keys == other.relative_keys && key_order == other.key_order;
}

ScoreSums& ScoreSums::operator|=(const ScoreSums& other) {
  content_bias |= other.content_bias;
  labels |= other.labels;
  offsets |= other.offsets;
  relative_keys |= other.relative_keys;
  key_order |= other.key_order;
  return *this;
}

// Kernels store these sums by block; they are 0 at first.
struct FlashBackwardCuda::Parts {
  float* content_bias = nullptr;
  float* labels = nullptr;
  float* bias = nullptr;
  float* relu_multiplier = nullptr;
  float* positions = nullptr;
  float* relative_keys = nullptr;
  float* k_by_place = nullptr;
  float* v_by_place = nullptr;
};

FlashBackwardCuda::Parts FlashBackwardCuda::LayOut(const Problem& p, const ScoreSums& sums,
                                                   Workspace* workspace) {
  const int64_t rows = p.batch * p.query_heads,
                offsets = p.query_heads * BlocksOfOffsets(p) * kBlockOffsets;
  const auto take = [&](bool wanted, int64_t floats) {
    return wanted ? workspace->Take<float>(floats) : nullptr;
  };
  Parts parts;
  parts.content_bias = take(sums.content_bias, rows * TilesOf(p.kv_tokens) * p.head_dim);
  parts.labels = take(sums.labels, rows * TilesOf(p.query_tokens) * 2 * (p.head_dim + 1));
  parts.bias = take(sums.offsets, offsets);
  parts.relu_multiplier = take(sums.offsets, offsets);
  parts.positions = take(sums.offsets, offsets);
  parts.relative_keys = take(sums.relative_keys, offsets * p.head_dim);
  const int64_t places = p.batch * p.kv_heads * p.kv_tokens;
  parts.k_by_place = take(sums.key_order, places * p.head_dim);
  parts.v_by_place = take(sums.key_order, places * p.value_dim);
  return parts;
}

size_t FlashBackwardCuda::WorkspaceBytes(const Problem& problem, const ScoreSums& sums) {
  const SumShape of_bias = {problem.query_heads, problem.head_dim, Offsets(problem)};
  return Workspace::Measure([&](Workspace& workspace) { LayOut(problem, sums, &workspace); }) +
         (sums.offsets ? SumInRunsBytes<AddPositionBiasSums>(of_bias) : 0);
}

absl::StatusOr<FlashBackwardCuda> FlashBackwardCuda::Create(CudaRuntime* runtime,
                                                            const Problem& problem,
                                                            const BlockSchedule& schedule,
                                                            const ScoreRule& rule) {
  FlashBackwardCuda backward;
  TFB_ASSIGN_OR_RETURN(backward.flash_,
                       FlashCuda::CreateForBackward(runtime, problem, schedule, rule));
  const TransposedSchedule transposed(schedule);
  TFB_ASSIGN_OR_RETURN(backward.begin_,
                       DeviceArray<int64_t>::Create(runtime->device(), transposed.begin()));
  const std::vector<QueryRun>& runs = transposed.runs();
  TFB_ASSIGN_OR_RETURN(backward.runs_,
                       runtime->Upload(runs.data(), runs.size() * sizeof(QueryRun)));
  backward.transposed_ = {transposed.heads(), transposed.chunks(), backward.begin_.data(),
                          backward.runs_.As<QueryRun>()};
  return backward;
}

ScoreSums FlashBackwardCuda::SumsOf(const FlashBackwardCall& call, const ScoreRule& rule) {
  const ScoreGradients& terms = call.terms;
  const bool has_relative_keys = rule.relative_key_rows.rows != nullptr;
  ScoreSums sums;
  sums.content_bias = terms.content_bias != nullptr;
  sums.labels = rule.label_keys.keys != nullptr &&
                (terms.label_keys != nullptr || terms.label_biases != nullptr ||
                 terms.position_bias != nullptr);
  sums.relative_keys = terms.relative_keys != nullptr && has_relative_keys;
  sums.offsets = terms.bias != nullptr || terms.relu_multiplier != nullptr || sums.relative_keys ||
                 (terms.position_bias != nullptr && has_relative_keys);
  sums.key_order = call.forward->key_order.tokens != nullptr &&
                   (IsThere(call.k_gradient) || IsThere(call.v_gradient));
  return sums;
}

DType FlashBackwardCuda::FactorsOf(const Problem& p, const FlashCall& forward) const {
  const auto arguments = flash_.ArgumentsOf(p, BySchedule(forward));
  if (!arguments.ok()) return DType::kF32;  // Run returns the error
  FlashBackwardArguments b = {};
  b.forward = *arguments;
  return FactorsOfCall(p.dtype, b);
}

absl::Status FlashBackwardCuda::Run(const Problem& p, const FlashBackwardCall& call,
                                    const Execution& execution) const {
  CudaRuntime* const runtime = flash_.runtime();
  FlashBackwardArguments b = {};
  TFB_ASSIGN_OR_RETURN(b.forward, flash_.ArgumentsOf(p, BySchedule(*call.forward)));
  b.transposed = transposed_;
  b.out_gradient = ToDeviceView(call.out_gradient);
  b.numbers = call.numbers;
  b.q_gradient = ToDeviceView(call.q_gradient);
  b.k_gradient = ToDeviceView(call.k_gradient);
  b.v_gradient = ToDeviceView(call.v_gradient);
  b.span = call.terms.span;

  const ScoreSums sums = SumsOf(call, b.forward.rule);
  Workspace workspace(execution.workspace);
  const Parts parts = LayOut(p, sums, &workspace);
  TFB_RETURN_IF_ERROR(
      runtime->Fill(execution.workspace.data(), 0, workspace.used(), execution.stream));
  b.content_bias = parts.content_bias;
  b.labels = parts.labels;
  b.bias = call.terms.bias != nullptr ? parts.bias : nullptr;
  b.relu_multiplier = call.terms.relu_multiplier != nullptr ? parts.relu_multiplier : nullptr;
  b.positions = parts.positions;
  b.relative_keys = parts.relative_keys;
  b.keys_by_place = sums.key_order;
  const auto by_place = [&](float* rows, int64_t channels) {
    return TensorView(rows, DType::kF32, {p.batch, p.kv_heads, p.kv_tokens, channels});
  };
  const TensorView k_by_place = by_place(parts.k_by_place, p.head_dim);
  const TensorView v_by_place = by_place(parts.v_by_place, p.value_dim);
  if (sums.key_order) {
    if (IsThere(call.k_gradient)) b.k_gradient = ToDeviceView(k_by_place);
    if (IsThere(call.v_gradient)) b.v_gradient = ToDeviceView(v_by_place);
  }

  // Tiles of queries are filled from a list, where there is one. The owners of offsets need tiles of
  // neighbours.
  FlashBackwardArguments of_asked = b;
  if (call.forward->asked.rows != nullptr && p.dtype == DType::kF32) {
    TFB_ASSIGN_OR_RETURN(const FlashArguments asked, flash_.ArgumentsOf(p, *call.forward));
    if (asked.packs_asked) of_asked.forward = asked;
  }
  const OwnerKernels kernels = KernelsOf(runtime->target(), FactorsOfCall(p.dtype, b));
  if (IsThere(call.q_gradient) || b.labels != nullptr || b.span != nullptr) {
    TFB_RETURN_IF_ERROR(ToStatus(kernels.queries(of_asked, execution.stream)));
  }
  if (IsThere(call.k_gradient) || IsThere(call.v_gradient) || b.content_bias != nullptr) {
    TFB_RETURN_IF_ERROR(ToStatus(kernels.keys(of_asked, execution.stream)));
  }
  if (b.has_offset_sums()) {
    TFB_RETURN_IF_ERROR(
        ToStatus(KernelsOn<FlashBackwardKernels>(runtime->target()).offsets(b, execution.stream)));
  }
  const auto add_by_token = [&](const TensorView& rows, const TensorView& to) -> absl::Status {
    if (!sums.key_order || to.empty()) return absl::OkStatus();
    return AddRowsByToken(runtime, rows, call.forward->key_order, to, execution);
  };
  TFB_RETURN_IF_ERROR(add_by_token(k_by_place, call.k_gradient));
  TFB_RETURN_IF_ERROR(add_by_token(v_by_place, call.v_gradient));
  Execution rest = execution;
  rest.workspace = workspace.Rest();
  return AddSums(b, call.terms, rest);
}

absl::Status FlashBackwardCuda::AddSums(const FlashBackwardArguments& b,
                                        const ScoreGradients& terms,
                                        const Execution& execution) const {
  const FlashArguments& a = b.forward;
  const Device device = flash_.runtime()->device();
  const int64_t heads = a.query_heads, dim = a.head_dim, position = a.rule.query_position;
  const int64_t blocks = b.offset_blocks(), tiles = a.schedule.query_tiles;
  const auto of_offset = [&](const float* parts, int64_t row) {
    return SumOfOffset{parts, blocks, tiles, row};
  };
  const SumOfTiles labels = {b.labels, a.batch, heads, tiles, 2 * (dim + 1)};
  if (b.content_bias != nullptr) {
    const SumOfTiles sum = {b.content_bias, a.batch, heads, b.key_tiles(), dim};
    TFB_RETURN_IF_ERROR(
        ForEach(device, heads * dim, AddSumOfTiles{sum, terms.content_bias}, execution));
  }
  if (terms.label_keys != nullptr || terms.label_biases != nullptr) {
    const AddLabelSums add = {labels, dim, terms.label_keys, terms.label_biases};
    TFB_RETURN_IF_ERROR(ForEach(device, heads * labels.row, add, execution));
  }
  // The pairs' offsets j - i.
  const int64_t first = 1 - a.query_tokens, end = a.kv_tokens;
  const auto add_table = [&](const float* parts, const DistanceEntries& entries,
                             float* to) -> absl::Status {
    if (to == nullptr || blocks == 0) return absl::OkStatus();
    const int64_t low = std::max<int64_t>(first - position + entries.zero, 0);
    const int64_t high = std::min(end - position + entries.zero, entries.row);
    if (high <= low) return absl::OkStatus();
    return ForEach(
        device, heads * (high - low),
        AddTableSums{of_offset(parts, 1), position, low, high - low, entries.zero, entries.row, to},
        execution);
  };
  TFB_RETURN_IF_ERROR(add_table(b.bias, a.rule.bias, terms.bias));
  TFB_RETURN_IF_ERROR(add_table(b.relu_multiplier, a.rule.relu_multiplier, terms.relu_multiplier));
  const RelativeKeyRows& keys = a.rule.relative_key_rows;
  if (b.relative_keys != nullptr && blocks > 0) {
    const int64_t offsets = keys.high - keys.low + 1;
    const AddRelativeKeySums add = {of_offset(b.relative_keys, dim),
                                    of_offset(b.positions, 1),
                                    position,
                                    a.rule.position_bias,
                                    a.scale,
                                    keys.low,
                                    offsets,
                                    dim,
                                    (dim + 15) / 16 * 16,
                                    terms.relative_keys};
    TFB_RETURN_IF_ERROR(ForEach(device, heads * offsets * dim, add, execution));
  }
  if (terms.position_bias == nullptr) return absl::OkStatus();
  AddPositionBiasSums add = {};
  add.gradients = of_offset(b.positions, 1);
  add.keys = keys;
  add.first_offset = std::max(first, keys.low + position);
  add.first_key = add.first_offset - position - keys.low;
  add.scale = a.scale;
  add.labels = labels;
  if (b.labels != nullptr) add.label_keys = a.rule.label_keys;
  add.dim = dim;
  add.to = terms.position_bias;
  const int64_t end_offset = std::min(end, keys.high + 1 + position);
  const bool has_keys = blocks > 0 && keys.rows != nullptr && end_offset > add.first_offset;
  return SumInRuns(device, {heads, dim, has_keys ? end_offset - add.first_offset : 0}, add,
                   execution);
}

absl::Status AddRowsByToken(CudaRuntime* runtime, const ConstTensorView& rows,
                            const TokenOrder& order, const TensorView& to,
                            const Execution& execution) {
  AddByTokenArguments a = {};
  a.rows = rows.At<float>();
  a.batch = rows.dim(0);
  a.heads = rows.dim(1);
  a.places = rows.dim(2);
  a.channels = rows.dim(3);
  a.order = order;
  a.to = ToDeviceView(to);
  a.tokens = to.dim(2);
  return ToStatus(KernelsOn<FlashSumKernels>(runtime->target()).add_by_token(a, execution.stream));
}

absl::Status FlashRowNumbers(CudaRuntime* runtime, const FlashBackwardCall& call,
                             const ConstTensorView& out,
                             const ConstTensorView& log_sum_exp_gradient, DType factors,
                             const ConstTensorView& marks, bool counts,
                             const Execution& execution) {
  FlashDeltaArguments a = {};
  a.out = ToDeviceView(out);
  a.out_rest = ToDeviceView(call.forward->out_rest);
  a.out_gradient = ToDeviceView(call.out_gradient);
  a.factors = ElementOf(factors);
  a.log_sum_exp = ToDeviceView(call.forward->log_sum_exp);
  a.rest = ToDeviceView(call.forward->log_sum_exp_rest);
  a.log_sum_exp_gradient = ToDeviceView(log_sum_exp_gradient);
  if (!marks.empty()) {
    a.marks = static_cast<const uint8_t*>(marks.data);
    a.marks_stride = marks.stride(0);
    a.counts_marked = counts;
  }
  a.batch = out.dim(0);
  a.heads = out.dim(1);
  a.value_dim = static_cast<int>(out.dim(3));
  a.numbers = call.numbers;
  return ToStatus(KernelsOn<FlashBackwardKernels>(runtime->target()).delta(a, execution.stream));
}

}  // namespace tfb
