#include "core/layers/attention/list_attention.h"

#include "absl/strings/str_cat.h"
#include "core/cuda/for_each.h"
#include "core/cuda/runtime.h"
#include "core/cuda/sum_in_runs.h"
#include "core/flash/flash_engine.h"
#include "core/layers/attention/position_products.h"
#include "core/layers/copy_rows.h"
#include "core/layers/copy_tensor.h"
#include "core/layers/matmul_gradient.h"
#include "core/schedule/band_schedule.h"
#include "core/status.h"
#include "core/zeros.h"

namespace tfb::layers {
namespace {

constexpr int64_t kRowsOfTask = 64;  // of copies

}  // namespace

void ListSchedules::Build() {
  for (auto& [sizes, list] : lists_) {
    list.band = {};
    list.band.high = most_ == kOfOthers ? list.keys : list.keys - list.tokens;
    if (most_ > 0) list.band.low = list.band.high - (most_ - 1);
    BandSchedule schedules(list.tokens);
    list.schedule = schedules.Build(list.tokens, list.keys, list.band);
    list.by_keys = TransposedSchedule(list.schedule);
  }
}

int64_t ListSchedules::longest_segment() const {
  return static_cast<int64_t>(Largest([](int64_t tokens, int64_t) { return tokens; }));
}
int64_t ListSchedules::longest() const {
  return static_cast<int64_t>(Largest([](int64_t, int64_t keys) { return keys; }));
}

// ---- The engine ----

ListEngine::ListEngine(Device device, const Problem& problem) : device_(device), problem_(problem) {
  problem_.dtype = DType::kF32;
}

absl::Status ListEngine::SetUp(const ListSchedules& lists, const ScoreRule& rule) {
  if (device_ == Device::kCpu) return absl::OkStatus();
  TFB_ASSIGN_OR_RETURN(CudaRuntime * runtime, CudaRuntime::For(device_));
  on_device_.clear();
  for (const auto& [sizes, list] : lists) {
    TFB_ASSIGN_OR_RETURN(
        FlashBackwardCuda engine,
        FlashBackwardCuda::Create(runtime, ProblemOf(list.tokens, list.keys), list.schedule, rule));
    on_device_.emplace(sizes, std::move(engine));
  }
  return absl::OkStatus();
}

Problem ListEngine::ProblemOf(int64_t tokens, int64_t keys) const {
  Problem problem = problem_;
  problem.query_tokens = tokens;
  problem.kv_tokens = keys;
  return problem;
}

TensorView ListEngine::TakeNumbers(int64_t tokens, std::optional<int64_t> rows,
                                   Workspace& workspace) const {
  const int64_t heads = problem_.query_heads, of_head = rows.value_or(tokens);
  const int64_t batch = rows.has_value() ? 1 : problem_.batch;
  return TensorView(workspace.Take<float>(batch * heads * of_head), DType::kF32,
                    {problem_.batch, heads, of_head},
                    {rows.has_value() ? 0 : heads * of_head, of_head, 1});
}

size_t ListEngine::workspace_bytes(const ListSchedules& lists, bool relative_keys,
                                   int threads) const {
  return lists.Largest([&](int64_t tokens, int64_t keys) {
    return FlashEngine::WorkspaceBytes(device_, ProblemOf(tokens, keys), relative_keys, threads);
  });
}

size_t ListEngine::backward_workspace_bytes(const ListSchedules& lists, bool relative_keys,
                                            int threads) const {
  ScoreSums sums;
  if (relative_keys) sums = ScoreSums::OfRelativeKeys();
  sums.content_bias = relative_keys;
  return lists.Largest([&](int64_t tokens, int64_t keys) {
    const Problem problem = ProblemOf(tokens, keys);
    return device_ == Device::kCpu ? FlashBackwardWorkspaceBytes(problem, relative_keys, threads)
                                   : FlashBackwardCuda::WorkspaceBytes(problem, sums);
  });
}

absl::Status ListEngine::Run(const ListSchedules::List& list, const FlashCall& call,
                             const Execution& execution) const {
  const Problem problem = ProblemOf(list.tokens, list.keys);
  return device_ == Device::kCpu ? FlashCpu(problem, call, execution)
                                 : OnDevice(list).forward().Run(problem, call, execution);
}

ListEngine::RowScratch ListEngine::LayOutRows(int64_t tokens, std::optional<int64_t> rows,
                                              Workspace& workspace) const {
  RowScratch scratch;
  if (device_ == Device::kCpu) {
    scratch.delta = TakeNumbers(tokens, rows, workspace);
    return scratch;
  }
  for (float** number : {&scratch.numbers.shift, &scratch.numbers.rest, &scratch.numbers.delta}) {
    *number = workspace.Take<float>(problem_.batch * problem_.query_heads * tokens);
  }
  scratch.numbers.rows = tokens;
  return scratch;
}

absl::Status ListEngine::Backward(const ListSchedules::List& list, FlashBackwardCall call,
                                  const ConstTensorView& log_sum_exp_gradient,
                                  const RowScratch& rows, const Execution& execution) const {
  const ConstTensorView out = call.forward->out;
  const Problem problem = ProblemOf(list.tokens, list.keys);
  if (device_ != Device::kCpu) {
    TFB_ASSIGN_OR_RETURN(CudaRuntime * runtime, CudaRuntime::For(device_));
    call.numbers = rows.numbers;
    const uint8_t* const is_asked = call.forward->asked.is_listed;
    ConstTensorView marks;
    if (is_asked != nullptr) {
      marks = ConstTensorView(is_asked, DType::kU8, {problem.batch, list.tokens});
    }
    TFB_RETURN_IF_ERROR(FlashRowNumbers(runtime, call, out, log_sum_exp_gradient,
                                        OnDevice(list).FactorsOf(problem, *call.forward), marks,
                                        /*counts=*/true, execution));
    return OnDevice(list).Run(problem, call, execution);
  }
  call.schedule = &list.by_keys;
  call.delta = rows.delta;
  // Some of the tokens are rows that all batch rows share.
  const bool is_shared = rows.delta.stride(0) == 0;
  const auto once = [&](const auto& view) {
    return view.empty() || !is_shared ? view : Slice(view, 0, 0, 1);
  };
  FlashDelta(once(out), once(call.forward->out_rest), once(call.out_gradient),
             once(log_sum_exp_gradient), once(rows.delta), execution.pool);
  return FlashBackwardCpu(problem, call, execution);
}

// ---- Names and parameters ----

ListAttention::Names::Names(const StackSizes& sizes, int64_t layer) {
  const std::string own = LayerPrefix(layer), biases = BiasPrefix(sizes, layer);
  w_q = own + "w_q";
  w_k = own + "w_k";
  w_v = own + "w_v";
  w_o = own + "w_o";
  w_r = own + "w_r";
  u = biases + "u";
  v = biases + "v";
  span = own + "span";
  relative_keys = own + "relative_keys";
}

ListAttention::ListAttention(Device device, const Problem& problem, const DistanceRange& range,
                             bool normalizes_earlier)
    : device_(device),
      problem_(problem),
      engine_(device, problem),
      range_(range),
      normalizes_earlier_(normalizes_earlier) {}

absl::Status ListAttention::SetUp(const RelativeAttention::Parameters& parameters,
                                  const ScoreRule& rule, const RelativePositions& positions,
                                  const ConstTensorView& sinusoids, const ListSchedules& lists) {
  const auto pack = [this](const std::vector<ConstTensorView>& matrices) {
    return PackedMatrix::Create(device_, matrices);
  };
  const auto pack_transposed = [this](const std::vector<ConstTensorView>& matrices) {
    return PackedMatrix::CreateTransposed(device_, matrices);
  };
  TFB_ASSIGN_OR_RETURN(queries_, pack({parameters.w_q}));
  TFB_ASSIGN_OR_RETURN(keys_values_, pack({parameters.w_k, parameters.w_v}));
  TFB_ASSIGN_OR_RETURN(output_, pack({parameters.w_o}));
  TFB_ASSIGN_OR_RETURN(queries_transposed_, pack_transposed({parameters.w_q}));
  TFB_ASSIGN_OR_RETURN(keys_values_transposed_, pack_transposed({parameters.w_k, parameters.w_v}));
  TFB_ASSIGN_OR_RETURN(output_transposed_, pack_transposed({parameters.w_o}));
  rule_ = rule;
  has_span_ = !parameters.span.empty();
  positions_ = &positions;
  sinusoids_ = sinusoids;
  if (device_ == Device::kCpu) {
    distances_ = RelativeKeyVectors(*positions.distances(), problem_.head_dim,
                                    ProductScale(problem_, /*scale=*/0));
    return absl::OkStatus();
  }
  // The rule of a stream's engine has no spans, of which the device has a copy.
  ScoreRule with_spans = rule;
  if (has_span_) with_spans.soft_span.span = parameters.span.At<float>();
  TFB_RETURN_IF_ERROR(engine_.SetUp(lists, with_spans));
  return device_positions_.SetUp(device_, ProblemOfDistances(), range_, positions, sinusoids,
                                 /*here=*/0);
}

// ---- The attention ----

TensorView ListAttention::Take(int64_t rows, int64_t channels, Workspace& workspace) const {
  const Shape shape = {problem_.batch, rows, channels};
  return TensorView(workspace.Take<float>(NumElements(shape)), DType::kF32, shape);
}

TensorView ListAttention::TakeQueries(int64_t tokens, std::optional<int64_t> rows,
                                      Workspace& workspace) const {
  const int64_t width = problem_.model_dim();
  if (!rows.has_value()) return Take(tokens, width, workspace);
  return TensorView(workspace.Take<float>(*rows * width), DType::kF32, {*rows, width});
}

ListAttention::Memory ListAttention::LayOut(int64_t tokens, int64_t keys, Workspace& workspace,
                                            std::optional<int64_t> rows) const {
  Memory memory;
  memory.list = Take(keys, problem_.model_dim(), workspace);
  memory.q = TakeQueries(tokens, rows, workspace);
  memory.keys_values = Take(keys, 2 * kv_width(), workspace);
  memory.context = TakeQueries(tokens, rows, workspace);
  memory.log_sum_exp = engine_.TakeNumbers(tokens, rows, workspace);
  if (device_ != Device::kCpu) {
    memory.log_sum_exp_rest = engine_.TakeNumbers(tokens, rows, workspace);
  }
  return memory;
}

size_t ListAttention::memory_bytes(const ListSchedules& lists) const {
  return Workspace::Measure(
      [&](Workspace& workspace) { LayOut(lists.longest_segment(), lists.longest(), workspace); });
}

size_t ListAttention::workspace_bytes(const ListSchedules& lists, int threads) const {
  const int64_t width = problem_.model_dim(), rows = problem_.batch * lists.longest();
  return std::max({engine_.workspace_bytes(lists, /*relative_keys=*/true, threads),
                   LayerNorm::workspace_bytes(device_, width, threads),
                   MatMulWorkspaceBytes(device_, rows, width, 2 * kv_width(), threads),
                   MatMulWorkspaceBytes(device_, rows, width, width, threads)});
}

FlashCall ListAttention::FlashOf(const Call& of, const Memory& memory) const {
  const auto keys_or_values = [&](int64_t n) {
    return Heads(Slice(memory.keys_values, 2, n * kv_width(), kv_width()), problem_.kv_heads);
  };
  FlashCall call;
  call.q = HeadsOf(memory.q);
  call.k = keys_or_values(0);
  call.v = keys_or_values(1);
  call.out = HeadsOf(memory.context);
  call.log_sum_exp = memory.log_sum_exp;
  call.log_sum_exp_rest = memory.log_sum_exp_rest;
  if (of.computes_some()) {
    call.query_order.tokens = of.some.row_of_token;
    call.query_order.batch_stride = of.list.tokens;
  }
  call.schedule = &of.list.schedule;
  if (of.rows.rows != nullptr) {
    call.band = &of.list.band;
    call.asked = of.rows;
  }
  call.rule = rule_;
  call.rule.query_position = of.list.keys - of.list.tokens;
  return call;
}

absl::Status ListAttention::Attend(const Call& call, const Memory& memory,
                                   const Execution& execution) const {
  const auto read = [&](const ConstTensorView& rows, const LayerNorm* norm, int64_t place) {
    const TensorView to = Slice(memory.list, 1, place, rows.dim(1));
    return norm != nullptr ? norm->Run(rows, to, execution)
                           : CopyAllRows(device_, rows, to, execution);
  };
  int64_t place = 0;
  for (const ConstTensorView& part : call.earlier) {
    TFB_RETURN_IF_ERROR(read(part, call.norm, place));
    place += part.dim(1);
  }
  TFB_RETURN_IF_ERROR(read(call.x, call.computes_some() ? call.norm : nullptr, place));
  const TensorView own = Slice(memory.list, 1, place, call.list.tokens);
  const ConstTensorView queries = call.computes_some() ? call.some.x : ConstTensorView(own);
  TFB_RETURN_IF_ERROR(
      MatMul(queries_, {queries, {}, memory.q, Activation::kNone, call.rows}, execution));
  TFB_RETURN_IF_ERROR(MatMul(keys_values_, {memory.list, {}, memory.keys_values}, execution));
  return engine_.Run(call.list, FlashOf(call, memory), execution);
}

absl::Status ListAttention::Project(const ConstTensorView& context, const ConstTensorView& residual,
                                    const TensorView& y, const Execution& execution,
                                    Activation activation, const RowList& rows) const {
  return MatMul(output_, {context, residual, y, activation, rows}, execution);
}

// ---- The backward pass ----

ListAttention::Sums ListAttention::LayOutSums(Workspace& workspace) const {
  Sums sums;
  if (device_ == Device::kCpu) {
    sums.positions.LayOut(ProblemOfDistances(), range_, problem_.model_dim(), &workspace);
  } else {
    sums.device_positions = DevicePositionGradients::Sums(ProblemOfDistances(), range_, &workspace);
  }
  sums.span = workspace.Take<double>(problem_.query_heads);
  return sums;
}

size_t ListAttention::sums_bytes() const {
  return Workspace::Measure([this](Workspace& workspace) { LayOutSums(workspace); });
}

ListAttention::Scratch ListAttention::LayOutBackward(int64_t tokens, int64_t keys,
                                                     std::optional<int64_t> rows,
                                                     Workspace& workspace) const {
  Scratch scratch;
  scratch.q = TakeQueries(tokens, rows, workspace);
  scratch.keys_values = Take(keys, 2 * kv_width(), workspace);
  scratch.rows = engine_.LayOutRows(tokens, rows, workspace);
  scratch.span = Take(problem_.query_heads, tokens, workspace);
  scratch.earlier = Take(normalizes_earlier_ ? keys - tokens : 0, problem_.model_dim(), workspace);
  return scratch;
}

size_t ListAttention::backward_workspace_bytes(const ListSchedules& lists, int threads) const {
  const int64_t width = problem_.model_dim(), rows = problem_.batch * lists.longest();
  const size_t scratch = lists.Largest([&](int64_t tokens, int64_t keys) {
    return Workspace::Measure([&](Workspace& workspace) {
      Take(tokens, width, workspace);  // the context's gradient
      LayOutBackward(tokens, keys, std::nullopt, workspace);
    });
  });
  return scratch +
         std::max({engine_.backward_workspace_bytes(lists, /*relative_keys=*/true, threads),
                   SumInRunsBytes<SumsOfHeads>(ShapeOfSpanSums(lists.longest_segment())),
                   GradientMap::kWorkspaceBytes,
                   MatMulWorkspaceBytes(device_, rows, 2 * kv_width(), width, threads),
                   MatMulWorkspaceBytes(device_, rows, width, width, threads),
                   MatMulGradientWorkspaceBytes(device_, rows, width, kv_width(), threads),
                   MatMulGradientWorkspaceBytes(device_, rows, width, width, threads),
                   LayerNorm::backward_workspace_bytes(device_, rows, width, threads)});
}

absl::Status ListAttention::ProjectBackward(const ConstTensorView& context,
                                            const ConstTensorView& dy,
                                            const TensorView& context_gradient,
                                            const Gradients& gradients, const Execution& execution,
                                            const RowList& rows) const {
  TFB_RETURN_IF_ERROR(MatMulGradient(
      device_,
      {context, dy, gradients.parameters.Get(gradients.names.w_o), {}, /*accumulate=*/true, rows},
      execution));
  return MatMul(output_transposed_, {dy, {}, context_gradient, Activation::kNone, rows}, execution);
}

absl::Status ListAttention::Backward(const Call& forward, const Memory& memory,
                                     const BackwardCall& call, const Gradients& gradients,
                                     const Execution& execution) const {
  const int64_t tokens = forward.list.tokens, earlier = forward.list.keys - tokens;
  Workspace workspace(execution.workspace), of_sums(gradients.sums);
  const Scratch scratch = LayOutBackward(tokens, forward.list.keys, RowsOfSome(forward), workspace);
  const Sums sums = LayOutSums(of_sums);
  Execution rest = execution;
  rest.workspace = workspace.Rest();
  TFB_RETURN_IF_ERROR(AttentionBackward(forward, memory, call, scratch, sums, rest));

  const auto add_product = [&](const ConstTensorView& x, const ConstTensorView& dy,
                               const std::string& name, const RowList& rows = {}) {
    return MatMulGradient(
        device_, {x, dy, gradients.parameters.Get(name), {}, /*accumulate=*/true, rows}, rest);
  };
  const Names& names = gradients.names;
  const TensorView& of_list = scratch.keys_values;
  const ConstTensorView queries = forward.computes_some()
                                      ? forward.some.x
                                      : ConstTensorView(Slice(memory.list, 1, earlier, tokens));
  TFB_RETURN_IF_ERROR(add_product(queries, scratch.q, names.w_q, forward.rows));
  TFB_RETURN_IF_ERROR(add_product(memory.list, Slice(of_list, 2, 0, kv_width()), names.w_k));
  TFB_RETURN_IF_ERROR(
      add_product(memory.list, Slice(of_list, 2, kv_width(), kv_width()), names.w_v));
  TFB_RETURN_IF_ERROR(EarlierBackward(forward, scratch, gradients, rest));
  if (gradients.is_last) TFB_RETURN_IF_ERROR(AddSums(sums, gradients, rest));
  TFB_RETURN_IF_ERROR(QueriesBackward(forward, memory, call, scratch, rest));
  return MatMul(keys_values_transposed_, {Slice(of_list, 1, earlier, tokens), call.dx, call.dx},
                rest);
}

absl::Status ListAttention::QueriesBackward(const Call& forward, const Memory& memory,
                                            const BackwardCall& call, const Scratch& scratch,
                                            const Execution& execution) const {
  const bool is_listed = forward.rows.rows != nullptr;
  if (!forward.computes_some() && !is_listed) {
    return MatMul(queries_transposed_, {scratch.q, call.added, call.dx}, execution);
  }
  if (call.added.data != call.dx.data) {  // an empty one stands for zeros
    TFB_RETURN_IF_ERROR(CopyTensor(device_, call.added, call.dx, execution));
  }
  if (is_listed) {
    return MatMul(queries_transposed_,
                  {scratch.q, call.dx, call.dx, Activation::kNone, forward.rows}, execution);
  }
  const TensorView& of_rows = memory.q;  // whose memory is free now
  TFB_RETURN_IF_ERROR(MatMul(queries_transposed_, {scratch.q, {}, of_rows}, execution));
  const int64_t tokens = forward.list.tokens, width = problem_.model_dim();
  execution.pool->ParallelForRanges(
      problem_.batch * tokens, kRowsOfTask, [&](int64_t begin, int64_t end, int) {
        for (int64_t place = begin; place < end; ++place) {
          const int32_t row = forward.some.row_of_token[place];
          if (row < 0) continue;
          const float* from = of_rows.At<float>(row);
          float* to = call.dx.MutableAt<float>(place / tokens, place % tokens);
          for (int64_t c = 0; c < width; ++c) to[c] += from[c];
        }
      });
  return absl::OkStatus();
}

absl::Status ListAttention::BackwardOfOutput(const Call& forward, const Memory& memory,
                                             const OutputBackwardCall& call,
                                             const Gradients& gradients,
                                             const Execution& execution) const {
  Workspace workspace(execution.workspace);
  const TensorView of_context = TakeQueries(forward.list.tokens, RowsOfSome(forward), workspace);
  Execution rest = execution;
  rest.workspace = workspace.Rest();
  TFB_RETURN_IF_ERROR(
      ProjectBackward(memory.context, call.dy, of_context, gradients, rest, forward.rows));
  const BackwardCall inner = {of_context, {}, {}, call.added, call.dx};
  return Backward(forward, memory, inner, gradients, rest);
}

absl::Status ListAttention::AttentionBackward(const Call& forward, const Memory& memory,
                                              const BackwardCall& call, const Scratch& scratch,
                                              const Sums& sums, const Execution& execution) const {
  TFB_RETURN_IF_ERROR(ClearTensor(device_, scratch.keys_values, execution));
  // An empty one stands for zeros.
  TFB_RETURN_IF_ERROR(CopyTensor(device_, call.q_gradient, scratch.q, execution));
  const FlashCall attend = FlashOf(forward, memory);
  FlashBackwardCall backward;
  backward.forward = &attend;
  backward.relative_keys = &distances_;
  backward.out_gradient = HeadsOf(call.context_gradient);
  const auto keys_or_values = [&](int64_t n) {
    return Heads(Slice(scratch.keys_values, 2, n * kv_width(), kv_width()), problem_.kv_heads);
  };
  backward.q_gradient = HeadsOf(scratch.q);
  backward.k_gradient = keys_or_values(0);
  backward.v_gradient = keys_or_values(1);
  if (device_ == Device::kCpu) {
    sums.positions.Bind(&backward.terms);
  } else {
    sums.device_positions.Bind(&backward.terms);
  }
  if (has_span_) {
    TFB_RETURN_IF_ERROR(ClearTensor(device_, scratch.span, execution));
    backward.terms.span = static_cast<float*>(scratch.span.mutable_data());
  }
  TFB_RETURN_IF_ERROR(
      engine_.Backward(forward.list, backward, call.log_sum_exp_gradient, scratch.rows, execution));
  return has_span_ ? AddSpanSums(scratch, forward.list.tokens, sums, execution) : absl::OkStatus();
}

absl::Status ListAttention::AddSpanSums(const Scratch& scratch, int64_t tokens, const Sums& sums,
                                        const Execution& execution) const {
  const SumsOfHeads of_heads = {static_cast<const float*>(scratch.span.data), problem_.query_heads,
                                tokens, sums.span};
  return SumInRuns(device_, ShapeOfSpanSums(tokens), of_heads, execution);
}

// The earlier rows are constant, and the norm that they are read with is not.
absl::Status ListAttention::EarlierBackward(const Call& forward, const Scratch& scratch,
                                            const Gradients& gradients,
                                            const Execution& execution) const {
  if (forward.norm == nullptr || (gradients.gamma.empty() && gradients.beta.empty())) {
    return absl::OkStatus();
  }
  int64_t place = 0;
  for (const ConstTensorView& part : forward.earlier) {
    const TensorView of_part = Slice(scratch.earlier, 1, place, part.dim(1));
    TFB_RETURN_IF_ERROR(MatMul(keys_values_transposed_,
                               {Slice(scratch.keys_values, 1, place, part.dim(1)), {}, of_part},
                               execution));
    TFB_RETURN_IF_ERROR(forward.norm->Backward(
        {part, of_part, {}, {}, gradients.gamma, gradients.beta, /*accumulate=*/true}, execution));
    place += part.dim(1);
  }
  return absl::OkStatus();
}

absl::Status ListAttention::AddSums(const Sums& sums, const Gradients& gradients,
                                    const Execution& execution) const {
  const auto gradient = [&](const std::string& name) { return gradients.parameters.Get(name); };
  const Names& names = gradients.names;
  const RelativePositionGradients::Destinations to = {
      gradient(names.w_r), gradient(names.relative_keys), gradient(names.u), gradient(names.v)};
  if (device_ == Device::kCpu) {
    sums.positions.AddTo(*positions_, sinusoids_, /*here=*/0, to, execution.pool);
  } else {
    TFB_RETURN_IF_ERROR(device_positions_.AddTo(sums.device_positions, to, execution));
  }
  const TensorView span = gradient(names.span);
  if (span.empty()) return absl::OkStatus();
  const AddDoubleRows of_heads = {sums.span, problem_.query_heads, TensorRows(span).view()};
  return ForEachInRows(device_, 1, problem_.query_heads, of_heads, execution);
}

}  // namespace tfb::layers
