#include "adaptive/universal_transformer/steps_backward.h"

#include <algorithm>

#include "core/cuda/for_each.h"
#include "core/cuda/sum_in_runs.h"
#include "core/layers/copy_tensor.h"
#include "core/layers/for_each_listed.h"
#include "core/layers/heads.h"
#include "core/layers/matmul_gradient.h"
#include "core/schedule/band_schedule.h"
#include "core/status.h"

namespace tfb::universal_transformer {
namespace {

using HaltFrom = UniversalTransformerOptions::HaltFrom;
using Output = UniversalTransformerOptions::Output;

OutputKind KindOf(Output output) {
  return output == Output::kAccumulated ? OutputKind::kAccumulated
         : output == Output::kBasic     ? OutputKind::kBasic
                                        : OutputKind::kFrozen;
}

}  // namespace

StepsBackward::StepsBackward(Device device, const Problem& problem,
                             const UniversalTransformerOptions& options)
    : device_(device),
      problem_(problem),
      options_(options),
      sizes_(problem, options),
      attention_norm_("attention_norm"),
      transition_norm_("ff_norm") {
  band_.high = problem.causal ? 0 : problem.kv_tokens + kFlashTile;  // beyond all keys
}

absl::Status StepsBackward::SetUp(const NamedTensors& parameters) {
  const auto transposed = [&](std::vector<absl::string_view> names) {
    std::vector<ConstTensorView> matrices;
    for (const absl::string_view name : names) {
      matrices.push_back(layers::FindParameter(parameters, std::string(name)));
    }
    return PackedMatrix::CreateTransposed(device_, matrices);
  };
  TFB_ASSIGN_OR_RETURN(queries_, transposed({"attention.w_q"}));
  TFB_ASSIGN_OR_RETURN(keys_values_, transposed({"attention.w_k", "attention.w_v"}));
  TFB_ASSIGN_OR_RETURN(output_, transposed({"attention.w_o"}));
  TFB_ASSIGN_OR_RETURN(first_, transposed({"ff.w1"}));
  TFB_ASSIGN_OR_RETURN(second_, transposed({"ff.w2"}));
  Band band;
  band.high = problem_.causal ? 0 : problem_.kv_tokens;
  BandSchedule schedules(problem_.query_tokens);
  schedule_ = schedules.Build(problem_.query_tokens, problem_.kv_tokens, band);
  if (device_ == Device::kCpu) {
    by_keys_ = TransposedSchedule(schedule_);
    return absl::OkStatus();
  }
  TFB_ASSIGN_OR_RETURN(engine_, FlashEngine::CreateForStream(device_, problem_));
  TFB_ASSIGN_OR_RETURN(CudaRuntime * runtime, CudaRuntime::For(device_));
  TFB_ASSIGN_OR_RETURN(engine_backward_,
                       FlashBackwardCuda::Create(runtime, problem_, schedule_, /*rule=*/{}));
  return absl::OkStatus();
}

// ---- Memory ----

StepsBackward::Scratch StepsBackward::LayOut(Workspace& workspace) const {
  const UniversalSizes& s = sizes_;
  const auto floats = [&](int64_t channels) { return workspace.Take<float>(s.rows * channels); };
  const auto of_dtype = [&](int64_t channels) {
    const Shape shape = {problem_.batch, problem_.query_tokens, channels};
    std::byte* memory = workspace.Take<std::byte>(NumElements(shape) * SizeOf(problem_.dtype));
    return TensorView(memory, problem_.dtype, shape);
  };
  Scratch scratch = {};
  scratch.coefficients = floats(options_.steps);
  scratch.of_logits = floats(options_.steps);
  scratch.of_out = floats(s.width);
  scratch.of_ponder = floats(1);
  scratch.state = floats(s.width);
  scratch.read = floats(s.width);
  scratch.keys_values = of_dtype(s.keys_values());
  scratch.keys_values_gradient = floats(s.keys_values());
  scratch.of_keys = floats(s.width);
  scratch.placed = floats(s.width);
  scratch.queries = of_dtype(s.query_width);
  scratch.context = of_dtype(s.context_width);
  if (problem_.dtype != DType::kF32) scratch.context_rest = of_dtype(s.context_width);
  scratch.log_sum_exp = floats(problem_.query_heads);
  scratch.log_sum_exp_rest = floats(problem_.query_heads);
  if (device_ == Device::kCpu) {
    scratch.delta = floats(problem_.query_heads);
    scratch.place_of_row = workspace.Take<int32_t>(s.rows);
    scratch.row = workspace.Take<int32_t>(s.rows);
  } else {
    scratch.numbers = {floats(problem_.query_heads), floats(problem_.query_heads),
                       floats(problem_.query_heads), problem_.query_tokens};
    scratch.list = {workspace.Take<uint8_t>(s.rows), workspace.Take<int32_t>(s.rows),
                    workspace.Take<int32_t>(problem_.batch + 1)};
  }
  scratch.attended = floats(s.width);
  scratch.normalized = floats(s.width);
  scratch.inner = floats(s.inner);
  scratch.made = floats(s.width);
  scratch.gradient = floats(s.width);
  scratch.of_attended = floats(s.width);
  scratch.inner_gradient = floats(s.inner);
  scratch.context_gradient = floats(s.context_width);
  scratch.queries_gradient = floats(s.query_width);
  scratch.into_first = scratch.normalized;
  scratch.into_second = scratch.inner;
  if (options_.convolves()) {
    scratch.into_first = floats(s.width);
    scratch.into_second = floats(s.inner);
    scratch.shown = floats(s.width);
    scratch.shown_inner = floats(s.inner);
  }
  return scratch;
}

size_t StepsBackward::workspace_bytes(int threads) const {
  const UniversalSizes& s = sizes_;
  const auto product = [&](int64_t in, int64_t out) {
    return std::max({MatMulWorkspaceBytes(device_, s.rows, in, out, threads),
                     MatMulWorkspaceBytes(device_, s.rows, out, in, threads),
                     MatMulGradientWorkspaceBytes(device_, s.rows, in, out, threads)});
  };
  const size_t attention =
      device_ == Device::kCpu
          ? std::max(FlashWorkspaceBytes(problem_, /*relative_keys=*/false, threads),
                     FlashBackwardWorkspaceBytes(problem_, /*relative_keys=*/false, threads))
          : std::max(FlashEngine::StreamWorkspaceBytes(device_, problem_, /*relative_keys=*/false,
                                                       threads),
                     FlashBackwardCuda::WorkspaceBytes(problem_, /*sums=*/{}));
  const auto kernel = [&](int64_t size, int64_t channels) {
    const SumShape shape = {size, channels, s.rows};
    return options_.convolves() ? SumInRunsBytes<ConvolutionKernelGradient>(shape) : 0;
  };
  return Workspace::Measure([this](Workspace& workspace) { LayOut(workspace); }) +
         std::max({attention, kernel(kFirstKernel, s.width), kernel(kSecondKernel, s.inner),
                   LayerNorm::backward_workspace_bytes(device_, s.rows, s.width, threads),
                   LayerNorm::workspace_bytes(device_, s.width, threads),
                   product(s.width, s.query_width), product(s.width, s.keys_values()),
                   product(s.width, s.key_width), product(s.width, s.value_width),
                   product(s.context_width, s.width), product(s.width, s.inner),
                   product(s.inner, s.width),
                   MatMulGradientWorkspaceBytes(device_, s.rows, s.width, 1, threads)});
}

// ---- Halting ----

// Returns the last step that may have been taken: all that the host knows on CUDA is the limit.
int64_t StepsBackward::LastStep(const Call& call) const {
  if (device_ != Device::kCpu) return options_.steps;
  return *std::max_element(call.kept.computed, call.kept.computed + sizes_.rows);
}

const float* StepsBackward::HaltingWeight(const Walk& walk, HaltFrom from) const {
  const bool has_weight = options_.halts() && options_.halt_from == from;
  return has_weight ? walk.call.block.halting_weight.data() : nullptr;
}

// Loads U of the walk's step.
absl::Status StepsBackward::Read(const Walk& walk) const {
  const int64_t width = sizes_.width;
  ReadAgain read = {};
  read.of = walk.tokens;
  read.x = ToDeviceView(walk.call.x);
  read.states = walk.step == 0 ? nullptr : walk.call.kept.State(walk.step, sizes_);
  read.positions = walk.call.block.positions.data();
  read.time = walk.call.block.times.data() + walk.step * width;
  read.read = walk.scratch.read;
  read.placed = walk.scratch.placed;
  read.tokens = problem_.query_tokens;
  read.channels = width;
  return ForEachInRows(device_, sizes_.rows, width, read, walk.execution);
}

absl::Status StepsBackward::PrepareHalting(Walk& walk, int64_t last) const {
  const Scratch& scratch = walk.scratch;
  const StepsKept& kept = walk.call.kept;
  const int64_t rows = sizes_.rows, width = sizes_.width;
  const auto clear = [&](float* numbers) {
    return ClearTensor(device_, TensorView(numbers, DType::kF32, {options_.steps, rows}),
                       walk.execution);
  };
  TFB_RETURN_IF_ERROR(clear(scratch.coefficients));
  TFB_RETURN_IF_ERROR(clear(scratch.of_logits));
  TFB_RETURN_IF_ERROR(
      CopyTensor(device_, walk.call.out, ByRow(scratch.of_out, width), walk.execution));
  if (!options_.halts()) {
    float* const coefficients = scratch.coefficients + (options_.steps - 1) * rows;
    return ForEach(device_, rows, LastStepCounts{kept.stop, coefficients}, walk.execution);
  }
  TFB_RETURN_IF_ERROR(CopyTensor(
      device_, walk.call.ponder,
      TensorView(scratch.of_ponder, DType::kF32, {problem_.batch, problem_.query_tokens}),
      walk.execution));
  for (walk.step = 0; walk.step < last; ++walk.step) {
    walk.tokens = {kept.computed, nullptr, nullptr, walk.step};
    const bool is_before = options_.halt_from == HaltFrom::kBefore;
    if (is_before) TFB_RETURN_IF_ERROR(Read(walk));
    HaltingProducts products = {};
    products.stop = kept.stop;
    products.states = kept.State(walk.step + 1, sizes_);
    products.halting_rows = is_before ? scratch.read : products.states;
    products.weight = walk.call.block.halting_weight.data();
    products.bias = walk.call.block.halting_bias.data();
    products.of_out = scratch.of_out;
    products.logits = scratch.of_logits + walk.step * rows;
    products.products = scratch.coefficients + walk.step * rows;
    products.channels = width;
    products.step = walk.step;
    TFB_RETURN_IF_ERROR(ForEach(device_, rows, products, walk.execution));
  }
  return ForEach(
      device_, rows,
      HaltingGradients{kept.stop, kept.takes_remainder, scratch.of_ponder, scratch.of_logits,
                       scratch.coefficients, rows, KindOf(options_.output)},
      walk.execution);
}

// Adds dz of the step's tokens to the gradients of w and b.
absl::Status StepsBackward::AddHalting(const Walk& walk) const {
  const int64_t rows = sizes_.rows, width = sizes_.width;
  const TensorView of_weight = walk.call.parameters.Get("halting.w");
  const TensorView column = of_weight.empty()
                                ? TensorView()
                                : TensorView(of_weight.mutable_data(), DType::kF32, Shape{width, 1},
                                             Shape{of_weight.stride(0), 1});
  const float* const states = options_.halt_from == HaltFrom::kBefore
                                  ? walk.scratch.read
                                  : walk.call.kept.State(walk.step + 1, sizes_);
  return MatMulGradient(
      device_,
      {ConstTensorView(states, DType::kF32, {rows, width}),
       ConstTensorView(walk.scratch.of_logits + walk.step * rows, DType::kF32, {rows, 1}), column,
       walk.call.parameters.Get("halting.b"), /*accumulate=*/true, walk.rows},
      walk.execution);
}

// ---- A step again ----

absl::Status StepsBackward::List(Walk& walk) const {
  const Scratch& scratch = walk.scratch;
  walk.tokens = {walk.call.kept.computed, scratch.row, scratch.place_of_row, walk.step};
  walk.active = sizes_.rows;
  if (device_ != Device::kCpu) {
    // Padding takes no step, and a token that has halted no further one.
    const bool may_have_halted = walk.step > 0 && !options_.recomputes();
    walk.rows = {};
    if (!options_.halts() || (!may_have_halted && walk.call.key_mask.empty())) {
      return absl::OkStatus();
    }
    TFB_RETURN_IF_ERROR(ForEach(device_, sizes_.rows,
                                TellsTaking{walk.tokens, scratch.list.is_listed}, walk.execution));
    walk.rows = scratch.list.list(problem_.batch);
    return ListRows(device_, scratch.list, problem_.batch, problem_.query_tokens, walk.execution);
  }
  walk.active = 0;
  for (int64_t r = 0; r < sizes_.rows; ++r) {
    const bool takes_it = walk.tokens.Takes(r);
    scratch.place_of_row[r] = takes_it ? static_cast<int32_t>(walk.active) : -1;
    if (takes_it) scratch.row[walk.active++] = static_cast<int32_t>(r);
  }
  return absl::OkStatus();
}

FlashCall StepsBackward::FlashOf(const Walk& walk) const {
  const Scratch& scratch = walk.scratch;
  const UniversalSizes& s = sizes_;
  const int64_t batch = problem_.batch, heads = problem_.query_heads,
                tokens = problem_.query_tokens;
  FlashCall call;
  call.k = Heads(Slice(scratch.keys_values, 2, 0, s.key_width), problem_.kv_heads);
  call.v = Heads(Slice(scratch.keys_values, 2, s.key_width, s.value_width), problem_.kv_heads);
  call.key_mask = walk.call.key_mask;
  if (device_ != Device::kCpu) {
    call.q = Heads(scratch.queries, heads);
    call.out = Heads(scratch.context, heads);
    if (problem_.dtype != DType::kF32) call.out_rest = Heads(scratch.context_rest, heads);
    const Shape numbers = {batch, heads, tokens};
    call.log_sum_exp = TensorView(scratch.log_sum_exp, DType::kF32, numbers);
    call.log_sum_exp_rest = TensorView(scratch.log_sum_exp_rest, DType::kF32, numbers);
    call.band = &band_;
    call.asked = walk.rows;
    return call;
  }
  const auto of_places = [&](const TensorView& memory, int64_t channels) {
    return SharedHeads(TensorView(memory.mutable_data(), memory.dtype, {walk.active, channels}),
                       batch, heads);
  };
  call.q = of_places(scratch.queries, s.query_width);
  call.out = of_places(scratch.context, s.context_width);
  if (problem_.dtype != DType::kF32) {
    call.out_rest = of_places(scratch.context_rest, s.context_width);
  }
  const Shape numbers = {batch, heads, walk.active}, strides = {0, walk.active, 1};
  call.log_sum_exp = TensorView(scratch.log_sum_exp, DType::kF32, numbers, strides);
  call.log_sum_exp_rest = TensorView(scratch.log_sum_exp_rest, DType::kF32, numbers, strides);
  call.query_order.tokens = scratch.place_of_row;
  call.query_order.batch_stride = tokens;
  call.schedule = &schedule_;
  return call;
}

absl::Status StepsBackward::Attend(const Walk& walk) const {
  const FlashCall call = FlashOf(walk);
  return device_ == Device::kCpu ? FlashCpu(problem_, call, walk.execution)
                                 : engine_.Run(call, walk.execution);
}

absl::Status StepsBackward::RunAgain(const Walk& walk) const {
  const Scratch& scratch = walk.scratch;
  const SharedBlock& block = walk.call.block;
  const UniversalSizes& s = sizes_;
  const Execution& execution = walk.execution;
  TFB_RETURN_IF_ERROR(Read(walk));
  const auto by_place = [&](float* memory, int64_t channels) {
    return ByPlace(walk, memory, channels);
  };
  const TensorView u = by_place(scratch.placed, s.width);
  const TensorView queries(scratch.queries.mutable_data(), problem_.dtype,
                           {walk.active, s.query_width});
  const TensorView context(scratch.context.mutable_data(), problem_.dtype,
                           {walk.active, s.context_width});
  const RowList& rows = walk.rows;
  TFB_RETURN_IF_ERROR(MatMul(block.queries, {u, {}, queries, Activation::kNone, rows}, execution));
  TFB_RETURN_IF_ERROR(MatMul(block.keys_values,
                             {ByRow(scratch.read, s.width), {}, scratch.keys_values}, execution));
  TFB_RETURN_IF_ERROR(Attend(walk));
  const TensorView attended = by_place(scratch.attended, s.width);
  const TensorView a = by_place(scratch.normalized, s.width);
  TFB_RETURN_IF_ERROR(
      MatMul(block.output, {context, u, attended, Activation::kNone, rows}, execution));
  TFB_RETURN_IF_ERROR(block.attention_norm.Run(attended, a, execution, rows));
  if (options_.convolves()) {
    TFB_RETURN_IF_ERROR(Convolve(walk, First(walk), scratch.into_first));
  }
  const TensorView inner = by_place(scratch.inner, s.inner);
  TFB_RETURN_IF_ERROR(MatMul(
      block.first, {by_place(scratch.into_first, s.width), {}, inner, Activation::kRelu, rows},
      execution));
  if (options_.convolves()) {
    TFB_RETURN_IF_ERROR(Convolve(walk, Second(walk), scratch.into_second));
  }
  return MatMul(block.second,
                {by_place(scratch.into_second, s.inner), a, by_place(scratch.made, s.width),
                 Activation::kNone, rows},
                execution);
}

// ---- Convolutions ----

Convolution StepsBackward::ConvolutionOf(const Walk& walk) const {
  Convolution convolution = {};
  convolution.of = walk.tokens;
  convolution.tokens = problem_.query_tokens;
  return convolution;
}
Convolution StepsBackward::First(const Walk& walk) const {
  Convolution convolution = ConvolutionOf(walk);
  convolution.kernel = walk.call.block.first_kernel.data();
  convolution.rows = walk.scratch.normalized;
  convolution.shown = walk.call.kept.shown;
  convolution.channels = sizes_.width;
  convolution.size = kFirstKernel;
  convolution.before = before(kFirstKernel);
  return convolution;
}
Convolution StepsBackward::Second(const Walk& walk) const {
  Convolution convolution = ConvolutionOf(walk);
  convolution.kernel = walk.call.block.second_kernel.data();
  convolution.rows = walk.scratch.inner;
  convolution.shown = walk.call.kept.shown_inner;
  convolution.channels = sizes_.inner;
  convolution.size = kSecondKernel;
  convolution.before = before(kSecondKernel);
  return convolution;
}

absl::Status StepsBackward::Convolve(const Walk& walk, const Convolution& convolution,
                                     float* y) const {
  return ForEachInRows(device_, walk.active, convolution.channels, ConvolveAgain{convolution, y},
                       walk.execution);
}

absl::Status StepsBackward::ConvolveBackward(const Walk& walk, const Convolution& convolution,
                                             const float* dy, const TensorView& kernel_gradient,
                                             float* shown, float* gradient) const {
  const int64_t channels = convolution.channels;
  TFB_RETURN_IF_ERROR(ForEachInRows(device_, sizes_.rows, channels,
                                    ConvolutionRowsGradient{convolution, dy, shown},
                                    walk.execution));
  if (!kernel_gradient.empty()) {
    const ConvolutionKernelGradient of_kernel = {convolution, dy, ToDeviceView(kernel_gradient)};
    TFB_RETURN_IF_ERROR(
        SumInRuns(device_, {convolution.size, channels, walk.active}, of_kernel, walk.execution));
  }
  return ForEachInRows(device_, walk.active, channels,
                       TakeShownGradient{walk.tokens, shown, gradient, channels}, walk.execution);
}

// ---- The gradients of a step ----

absl::Status StepsBackward::TransitionBackward(const Walk& walk) const {
  const Scratch& scratch = walk.scratch;
  const UniversalSizes& s = sizes_;
  const Outputs& gradients = walk.call.parameters;
  const Execution& execution = walk.execution;
  const auto by_place = [&](float* memory, int64_t channels) {
    return ByPlace(walk, memory, channels);
  };
  MadeGradient made = {};
  made.of = walk.tokens;
  made.of_states = scratch.state;
  made.of_out = scratch.of_out;
  made.coefficients = scratch.coefficients + walk.step * s.rows;
  made.of_logits = scratch.of_logits + walk.step * s.rows;
  made.weight = HaltingWeight(walk, HaltFrom::kAfter);
  made.gradient = scratch.gradient;
  made.channels = s.width;
  TFB_RETURN_IF_ERROR(ForEachInRows(device_, walk.active, s.width, made, execution));
  const TensorView ds = by_place(scratch.gradient, s.width);
  TFB_RETURN_IF_ERROR(
      walk.call.block.transition_norm.Backward({by_place(scratch.made, s.width),
                                                ds,
                                                {},
                                                ds,
                                                gradients.Get(transition_norm_.gamma),
                                                gradients.Get(transition_norm_.beta),
                                                /*accumulate=*/true,
                                                walk.rows},
                                               execution));
  const TensorView into_second = by_place(scratch.into_second, s.inner);
  const TensorView into_first = by_place(scratch.into_first, s.width);
  const TensorView of_inner = by_place(scratch.inner_gradient, s.inner);
  const TensorView da = by_place(scratch.of_attended, s.width);
  TFB_RETURN_IF_ERROR(MatMulGradient(device_,
                                     {into_second, ds, gradients.Get("ff.w2"),
                                      gradients.Get("ff.b2"), /*accumulate=*/true, walk.rows},
                                     execution));
  TFB_RETURN_IF_ERROR(MatMul(second_, {ds, {}, of_inner, Activation::kNone, walk.rows}, execution));
  if (options_.convolves()) {
    TFB_RETURN_IF_ERROR(ConvolveBackward(walk, Second(walk), scratch.inner_gradient,
                                         gradients.Get("ff.k2"), scratch.shown_inner,
                                         scratch.inner_gradient));
  }
  TFB_RETURN_IF_ERROR(ForEachInListedRows(
      device_, walk.active, s.inner, ReluGradient{scratch.inner, scratch.inner_gradient, s.inner},
      walk.rows, execution));
  TFB_RETURN_IF_ERROR(MatMulGradient(device_,
                                     {into_first, of_inner, gradients.Get("ff.w1"),
                                      gradients.Get("ff.b1"), /*accumulate=*/true, walk.rows},
                                     execution));
  if (!options_.convolves()) {
    return MatMul(first_, {of_inner, ds, da, Activation::kNone, walk.rows}, execution);
  }
  TFB_RETURN_IF_ERROR(MatMul(first_, {of_inner, {}, da, Activation::kNone, walk.rows}, execution));
  TFB_RETURN_IF_ERROR(ConvolveBackward(walk, First(walk), scratch.of_attended,
                                       gradients.Get("ff.k1"), scratch.shown, scratch.of_attended));
  return AddTensor(device_, ds, da, execution);
}

absl::Status StepsBackward::FlashGradients(const Walk& walk, FlashBackwardCall call) const {
  const ConstTensorView out = call.forward->out;
  if (device_ != Device::kCpu) {
    TFB_ASSIGN_OR_RETURN(CudaRuntime * runtime, CudaRuntime::For(device_));
    call.numbers = walk.scratch.numbers;
    ConstTensorView marks;
    if (walk.is_listed()) {
      marks =
          ConstTensorView(walk.rows.is_listed, DType::kU8, {problem_.batch, problem_.query_tokens});
    }
    TFB_RETURN_IF_ERROR(FlashRowNumbers(runtime, call, out, /*log_sum_exp_gradient=*/{},
                                        engine_backward_.FactorsOf(problem_, *call.forward), marks,
                                        /*counts=*/true, walk.execution));
    return engine_backward_.Run(problem_, call, walk.execution);
  }
  call.schedule = &by_keys_;
  const TensorView delta(walk.scratch.delta, DType::kF32,
                         {problem_.batch, problem_.query_heads, walk.active}, {0, walk.active, 1});
  call.delta = delta;
  const auto once = [](const auto& view) {  // all batch rows share the rows
    return view.empty() ? view : Slice(view, 0, 0, 1);
  };
  FlashDelta(once(out), once(call.forward->out_rest), once(call.out_gradient), {}, once(delta),
             walk.execution.pool);
  return FlashBackwardCpu(problem_, call, walk.execution);
}

absl::Status StepsBackward::AttentionBackward(const Walk& walk) const {
  const Scratch& scratch = walk.scratch;
  const UniversalSizes& s = sizes_;
  const Outputs& gradients = walk.call.parameters;
  const Execution& execution = walk.execution;
  const TensorView da = ByPlace(walk, scratch.of_attended, s.width);
  TFB_RETURN_IF_ERROR(
      walk.call.block.attention_norm.Backward({ByPlace(walk, scratch.attended, s.width),
                                               da,
                                               {},
                                               da,
                                               gradients.Get(attention_norm_.gamma),
                                               gradients.Get(attention_norm_.beta),
                                               /*accumulate=*/true,
                                               walk.rows},
                                              execution));
  const auto add = [&](const ConstTensorView& x, const ConstTensorView& dy, const char* matrix,
                       const char* bias, const RowList& rows = {}) {
    return MatMulGradient(
        device_, {x, dy, gradients.Get(matrix), gradients.Get(bias), /*accumulate=*/true, rows},
        execution);
  };
  const ConstTensorView context(scratch.context.data, problem_.dtype,
                                {walk.active, s.context_width});
  const TensorView of_context = ByPlace(walk, scratch.context_gradient, s.context_width);
  TFB_RETURN_IF_ERROR(add(context, da, "attention.w_o", "attention.b_o", walk.rows));
  TFB_RETURN_IF_ERROR(
      MatMul(output_, {da, {}, of_context, Activation::kNone, walk.rows}, execution));

  const TensorView of_queries = ByPlace(walk, scratch.queries_gradient, s.query_width);
  const TensorView of_keys_values = ByRow(scratch.keys_values_gradient, s.keys_values());
  TFB_RETURN_IF_ERROR(ClearTensor(device_, of_queries, execution));
  TFB_RETURN_IF_ERROR(ClearTensor(device_, of_keys_values, execution));
  const FlashCall forward = FlashOf(walk);
  const auto heads_of = [&](float* memory, int64_t channels) {
    return device_ == Device::kCpu
               ? SharedHeads(ByPlace(walk, memory, channels), problem_.batch, problem_.query_heads)
               : Heads(ByRow(memory, channels), problem_.query_heads);
  };
  FlashBackwardCall backward;
  backward.forward = &forward;
  backward.out_gradient = heads_of(scratch.context_gradient, s.context_width);
  backward.q_gradient = heads_of(scratch.queries_gradient, s.query_width);
  const TensorView of_keys = Slice(of_keys_values, 2, 0, s.key_width);
  const TensorView of_values = Slice(of_keys_values, 2, s.key_width, s.value_width);
  backward.k_gradient = Heads(of_keys, problem_.kv_heads);
  backward.v_gradient = Heads(of_values, problem_.kv_heads);
  TFB_RETURN_IF_ERROR(FlashGradients(walk, backward));

  const ConstTensorView read = ByRow(scratch.read, s.width);
  TFB_RETURN_IF_ERROR(add(ByPlace(walk, scratch.placed, s.width), of_queries, "attention.w_q",
                          "attention.b_q", walk.rows));
  TFB_RETURN_IF_ERROR(add(read, of_keys, "attention.w_k", "attention.b_k"));
  TFB_RETURN_IF_ERROR(add(read, of_values, "attention.w_v", "attention.b_v"));
  // dU, and what keys and values give.
  TFB_RETURN_IF_ERROR(
      MatMul(queries_, {of_queries, da, da, Activation::kNone, walk.rows}, execution));
  return MatMul(keys_values_, {of_keys_values, {}, ByRow(scratch.of_keys, s.width)}, execution);
}

// Makes the gradient of H^(n-1) of that of H^n.
absl::Status StepsBackward::InputBackward(const Walk& walk) const {
  const Scratch& scratch = walk.scratch;
  const UniversalSizes& s = sizes_;
  InputGradient input = {};
  input.of = walk.tokens;
  input.of_placed = scratch.of_attended;
  input.of_logits = scratch.of_logits + walk.step * s.rows;
  input.weight = HaltingWeight(walk, HaltFrom::kBefore);
  input.of_read = scratch.of_keys;
  input.of_states = scratch.state;
  input.channels = s.width;
  TFB_RETURN_IF_ERROR(ForEachInRows(device_, s.rows, s.width, input, walk.execution));
  const TensorView times = walk.call.parameters.Get("t");
  if (times.empty()) return absl::OkStatus();
  const TensorView of_read(scratch.of_keys, DType::kF32, {s.rows, s.width});
  const TensorView of_time(times.MutableAt<float>(walk.step), DType::kF32, Shape{s.width},
                           Shape{times.stride(1)});
  return MatMulGradient(device_, {of_read, of_read, {}, of_time}, walk.execution);
}

absl::Status StepsBackward::Run(const Call& call, const Execution& execution) const {
  Workspace workspace(execution.workspace);
  Walk walk = {call, LayOut(workspace), execution};
  walk.execution.workspace = workspace.Rest();
  const Scratch& scratch = walk.scratch;
  const UniversalSizes& s = sizes_;
  const int64_t last = LastStep(call);
  TFB_RETURN_IF_ERROR(PrepareHalting(walk, last));
  const auto clear = [&](float* memory, int64_t channels) {
    return ClearTensor(device_, ByRow(memory, channels), walk.execution);
  };
  TFB_RETURN_IF_ERROR(clear(scratch.state, s.width));
  if (options_.convolves()) {
    TFB_RETURN_IF_ERROR(clear(scratch.shown, s.width));
    TFB_RETURN_IF_ERROR(clear(scratch.shown_inner, s.inner));
  }
  for (walk.step = last - 1; walk.step >= 0; --walk.step) {
    TFB_RETURN_IF_ERROR(List(walk));
    TFB_RETURN_IF_ERROR(RunAgain(walk));
    TFB_RETURN_IF_ERROR(TransitionBackward(walk));
    TFB_RETURN_IF_ERROR(AttentionBackward(walk));
    TFB_RETURN_IF_ERROR(InputBackward(walk));
    if (options_.halts()) TFB_RETURN_IF_ERROR(AddHalting(walk));
  }
  if (call.x_gradient.empty()) return absl::OkStatus();
  return CopyTensor(device_, ByRow(scratch.state, s.width), call.x_gradient, walk.execution);
}

}  // namespace tfb::universal_transformer
