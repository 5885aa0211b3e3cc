#include "adaptive/universal_transformer/listed_steps.h"

#include <algorithm>

#include "adaptive/universal_transformer/universal_transformer_functors.h"
#include "core/cuda/for_each.h"
#include "core/layers/copy_tensor.h"
#include "core/layers/layers_cuda.h"
#include "core/status.h"

namespace tfb::universal_transformer {
namespace {

using HaltFrom = UniversalTransformerOptions::HaltFrom;
using HaltWhen = UniversalTransformerOptions::HaltWhen;
using Output = UniversalTransformerOptions::Output;

template <class View>
View Heads(const View& view, int64_t heads) {
  return Transpose(SplitAxis(view, 2, heads), 1, 2);
}

float* FloatsOf(const TensorView& view) { return static_cast<float*>(view.mutable_data()); }

}  // namespace

absl::Status ListedSteps::Setup() {
  TFB_ASSIGN_OR_RETURN(engine_, FlashEngine::CreateForStream(device_, problem_));
  return absl::OkStatus();
}

ListedSteps::Scratch ListedSteps::LayOut(Workspace& workspace) const {
  const UniversalSizes& s = sizes_;
  const auto floats = [&](int64_t channels) {
    return TensorView(workspace.Take<float>(s.rows * channels), DType::kF32, {s.rows, channels});
  };
  const auto of_dtype = [&](int64_t channels) {
    const Shape shape = {problem_.batch, problem_.query_tokens, channels};
    std::byte* memory = workspace.Take<std::byte>(NumElements(shape) * SizeOf(problem_.dtype));
    return TensorView(memory, problem_.dtype, shape);
  };
  Scratch scratch = {};
  scratch.state = FloatsOf(floats(s.width));
  if (options_.keeps_outputs()) scratch.output = FloatsOf(floats(s.width));
  scratch.placed = floats(s.width);
  scratch.read = floats(s.width);
  scratch.attended = floats(s.width);
  scratch.queries = of_dtype(s.query_width);
  scratch.base = floats(s.keys_values());
  scratch.keys_values = of_dtype(s.keys_values());
  scratch.context = of_dtype(s.context_width);
  scratch.inner = floats(s.inner);
  if (options_.convolves()) {
    scratch.shown = FloatsOf(floats(s.width));
    scratch.shown_inner = FloatsOf(floats(s.inner));
    scratch.convolved = floats(s.width);
    scratch.convolved_inner = floats(s.inner);
  }
  scratch.total = FloatsOf(floats(1));
  scratch.weight = FloatsOf(floats(1));
  if (!options_.halts()) return scratch;
  uint8_t* goes_on = workspace.Take<uint8_t>(s.rows);
  for (RowListMemory& list : scratch.lists) {
    list.is_listed = goes_on;
    list.rows = workspace.Take<int32_t>(s.rows);
    list.begins = workspace.Take<int32_t>(problem_.batch + 1);
  }
  return scratch;
}

size_t ListedSteps::workspace_bytes(int threads) const {
  const UniversalSizes& s = sizes_;
  const auto product = [&](int64_t in, int64_t out) {
    return MatMulWorkspaceBytes(device_, s.rows, in, out, threads);
  };
  return Workspace::Measure([this](Workspace& workspace) { LayOut(workspace); }) +
         std::max({FlashEngine::StreamWorkspaceBytes(device_, problem_, /*relative_keys=*/false,
                                                     threads),
                   product(s.width, s.query_width), product(s.width, s.keys_values()),
                   product(s.context_width, s.width), product(s.width, s.inner),
                   product(s.inner, s.width)});
}

absl::Status ListedSteps::Run(const SharedBlock& block, const Call& call,
                              const Execution& execution) {
  if (sizes_.rows == 0) return absl::OkStatus();
  TFB_ASSIGN_OR_RETURN(CudaRuntime * runtime, CudaRuntime::For(device_));
  Workspace workspace(execution.workspace);
  Walk walk = {block, call, LayOut(workspace), execution,
               &KernelsOn<UniversalTransformerKernels>(runtime->target())};
  walk.execution.workspace = workspace.Rest();
  TFB_RETURN_IF_ERROR(Begin(walk));
  if (options_.halts() && !call.key_mask.empty()) {
    TFB_RETURN_IF_ERROR(List(walk, 0));
    walk.changed = walk.active;
  }
  for (; walk.step < options_.steps; ++walk.step) {
    TFB_RETURN_IF_ERROR(Read(walk));
    TFB_RETURN_IF_ERROR(Project(walk));
    TFB_RETURN_IF_ERROR(Attend(walk));
    TFB_RETURN_IF_ERROR(Transit(walk));
    TFB_RETURN_IF_ERROR(Keep(walk));
    if (!call.kept.empty()) TFB_RETURN_IF_ERROR(KeepForBackward(walk));
    if (options_.halts() && !options_.recomputes() && walk.step + 1 < options_.steps) {
      TFB_RETURN_IF_ERROR(List(walk, walk.step + 1));
    }
  }
  if (!call.kept.empty()) TFB_RETURN_IF_ERROR(FinishKept(walk));
  return WriteOut(walk);
}

absl::Status ListedSteps::KeepForBackward(const Walk& walk) const {
  const Shape shape = {sizes_.rows, sizes_.width};
  return CopyTensor(device_, TensorView(walk.scratch.state, DType::kF32, shape),
                    TensorView(walk.call.kept.State(walk.step + 1, sizes_), DType::kF32, shape),
                    walk.execution);
}

absl::Status ListedSteps::FinishKept(const Walk& walk) const {
  const StepsKept& kept = walk.call.kept;
  const int64_t recomputed = options_.recomputes() ? options_.steps : 0;
  TFB_RETURN_IF_ERROR(ForEach(
      device_, sizes_.rows,
      KeepSteps{walk.call.steps, kept.stop, kept.computed, static_cast<int32_t>(recomputed)},
      walk.execution));
  return kept.KeepShown(device_, sizes_, walk.scratch.shown, walk.scratch.shown_inner,
                        walk.execution);
}

absl::Status ListedSteps::List(Walk& walk, int64_t step) const {
  const RowListMemory& memory = walk.scratch.lists[step % 2];
  walk.changed = walk.active;
  walk.active = memory.list(problem_.batch);
  return ListRows(device_, memory, problem_.batch, problem_.query_tokens, walk.execution);
}

absl::Status ListedSteps::Begin(const Walk& walk) const {
  BeginStepsArguments a = {};
  a.x = ToDeviceView(walk.call.x);
  const ConstTensorView& mask = walk.call.key_mask;
  if (!mask.empty()) {
    a.key_mask = static_cast<const uint8_t*>(mask.data);
    a.mask_strides[0] = mask.stride(0);
    a.mask_strides[1] = mask.stride(1);
  }
  a.state = walk.scratch.state;
  a.output = walk.scratch.output;
  a.total = walk.scratch.total;
  a.ponder = walk.call.ponder;
  a.stop = walk.call.steps;
  a.goes_on = walk.scratch.lists[0].is_listed;
  a.keys_values = FloatsOf(walk.scratch.base);
  a.rows = sizes_.rows;
  a.tokens = problem_.query_tokens;
  a.channels = sizes_.width;
  a.key_channels = sizes_.keys_values();
  a.limit = options_.steps;
  a.halts = options_.halts();
  return ToStatus(walk.kernels->begin(a, walk.execution.stream));
}

// Returns no halting where the network does not halt at that point.
HaltingArguments ListedSteps::Halting(const Walk& walk, HaltFrom from) const {
  HaltingArguments a = {};
  if (!options_.halts() || options_.halt_from != from) return a;
  a.weight_of_channels = walk.block.halting_weight.data();
  a.bias = walk.block.halting_bias.data();
  a.threshold = static_cast<float>(options_.threshold);
  a.above = options_.halt_when == HaltWhen::kAbove;
  a.remainder_at_limit = options_.remainder_at_limit;
  a.limit = options_.steps;
  a.total = walk.scratch.total;
  a.weight = walk.scratch.weight;
  a.ponder = walk.call.ponder;
  a.takes_remainder = walk.call.kept.takes_remainder;
  return a;
}

absl::Status ListedSteps::Read(const Walk& walk) const {
  ReadStatesArguments a = {};
  a.state = walk.scratch.state;
  a.positions = walk.block.positions.data();
  a.time = walk.block.times.data() + walk.step * sizes_.width;
  a.placed = FloatsOf(walk.scratch.placed);
  a.read = FloatsOf(walk.scratch.read);
  a.list = walk.changed;
  a.stop = walk.call.steps;
  a.rows = sizes_.rows;
  a.tokens = problem_.query_tokens;
  a.channels = sizes_.width;
  a.step = walk.step;
  a.halting = Halting(walk, HaltFrom::kBefore);
  return ToStatus(walk.kernels->read(a, walk.execution.stream));
}

// Projects queries of the tokens that take the step, and keys and values of those that have
// changed; the step's time, a row of a table, is added to all keys and values.
absl::Status ListedSteps::Project(const Walk& walk) const {
  const Scratch& scratch = walk.scratch;
  const TensorView queries(scratch.queries.mutable_data(), problem_.dtype,
                           {sizes_.rows, sizes_.query_width});
  const TensorView keys_values(scratch.keys_values.mutable_data(), problem_.dtype,
                               {sizes_.rows, sizes_.keys_values()});
  TFB_RETURN_IF_ERROR(MatMul(walk.block.queries,
                             {scratch.read, {}, queries, Activation::kNone, walk.active},
                             walk.execution));
  TFB_RETURN_IF_ERROR(MatMul(walk.block.keys_values,
                             {scratch.placed, {}, scratch.base, Activation::kNone, walk.changed},
                             walk.execution));
  const float* time =
      walk.block.projected_times.data() + walk.step * sizes_.projected() + sizes_.query_width;
  return FinishCuda(device_, 1, scratch.base, time, Activation::kNone, {}, keys_values,
                    walk.execution);
}

// Computes A = LN(U + MultiHead(U)).
absl::Status ListedSteps::Attend(const Walk& walk) const {
  const Scratch& scratch = walk.scratch;
  const UniversalSizes& s = sizes_;
  Band band;
  // No key lies beyond this band.
  band.high = problem_.causal ? 0 : problem_.kv_tokens + kFlashTile;
  const auto of_batches = [&](const TensorView& rows) {
    return TensorView(rows.mutable_data(), DType::kF32,
                      {problem_.batch, problem_.query_tokens, rows.dim(1)});
  };
  const TensorView u = of_batches(scratch.read), a = of_batches(scratch.attended);
  FlashCall call = engine_.NewCall();
  call.q = Heads(scratch.queries, problem_.query_heads);
  call.k = Heads(Slice(scratch.keys_values, 2, 0, s.key_width), problem_.kv_heads);
  call.v = Heads(Slice(scratch.keys_values, 2, s.key_width, s.value_width), problem_.kv_heads);
  call.key_mask = walk.call.key_mask;
  call.out = Heads(scratch.context, problem_.query_heads);
  call.band = &band;
  call.asked = walk.active;
  TFB_RETURN_IF_ERROR(engine_.Run(call, walk.execution));
  TFB_RETURN_IF_ERROR(MatMul(
      walk.block.output, {scratch.context, u, a, Activation::kNone, walk.active}, walk.execution));
  return walk.block.attention_norm.Run(a, a, walk.execution, walk.active);
}

// Computes S = LN(A + Transition(A)).
absl::Status ListedSteps::Transit(const Walk& walk) const {
  const Scratch& scratch = walk.scratch;
  TensorView into_first = scratch.attended, into_second = scratch.inner;
  if (options_.convolves()) {
    into_first = scratch.convolved;
    into_second = scratch.convolved_inner;
    TFB_RETURN_IF_ERROR(Convolve(walk, scratch.attended, scratch.shown, walk.block.first_kernel,
                                 kFirstKernel, into_first));
  }
  TFB_RETURN_IF_ERROR(MatMul(walk.block.first,
                             {into_first, {}, scratch.inner, Activation::kRelu, walk.active},
                             walk.execution));
  if (options_.convolves()) {
    TFB_RETURN_IF_ERROR(Convolve(walk, scratch.inner, scratch.shown_inner, walk.block.second_kernel,
                                 kSecondKernel, into_second));
  }
  TFB_RETURN_IF_ERROR(
      MatMul(walk.block.second,
             {into_second, scratch.attended, scratch.read, Activation::kNone, walk.active},
             walk.execution));
  return walk.block.transition_norm.Run(scratch.read, scratch.read, walk.execution, walk.active);
}

absl::Status ListedSteps::Convolve(const Walk& walk, const TensorView& rows, float* shown,
                                   const DeviceArray<float>& kernel, int64_t size,
                                   const TensorView& y) const {
  ShowRowsArguments show = {};
  show.from = FloatsOf(rows);
  show.shown = shown;
  show.recomputes = options_.recomputes();
  show.stop = walk.call.steps;
  show.rows = sizes_.rows;
  show.channels = rows.dim(1);
  show.step = walk.step;
  show.list = walk.active;
  TFB_RETURN_IF_ERROR(ToStatus(walk.kernels->show(show, walk.execution.stream)));
  ConvolveArguments a = {};
  a.shown = shown;
  a.kernel = kernel.data();
  a.y = FloatsOf(y);
  a.stop = walk.call.steps;
  a.rows = sizes_.rows;
  a.tokens = problem_.query_tokens;
  a.channels = rows.dim(1);
  a.size = size;
  a.before = problem_.causal ? size - 1 : (size - 1) / 2;
  a.list = walk.active;
  return ToStatus(walk.kernels->convolve(a, walk.execution.stream));
}

absl::Status ListedSteps::Keep(const Walk& walk) const {
  KeepStatesArguments a = {};
  a.made = FloatsOf(walk.scratch.read);
  a.state = walk.scratch.state;
  a.output = walk.scratch.output;
  a.weight = options_.halts() ? walk.scratch.weight : nullptr;
  a.is_mix = options_.output == Output::kBasic;
  a.is_last = options_.output == Output::kFrozen;
  a.recomputes = options_.recomputes();
  a.stop = walk.call.steps;
  a.goes_on = walk.scratch.lists[0].is_listed;
  a.list = walk.active;
  a.rows = sizes_.rows;
  a.channels = sizes_.width;
  a.step = walk.step;
  a.halting = Halting(walk, HaltFrom::kAfter);
  return ToStatus(walk.kernels->keep(a, walk.execution.stream));
}

absl::Status ListedSteps::WriteOut(const Walk& walk) const {
  WriteStatesArguments a = {};
  a.from = walk.scratch.output != nullptr ? walk.scratch.output : walk.scratch.state;
  a.ponder = walk.call.ponder;
  a.stop = walk.call.steps;
  a.out = ToDeviceView(walk.call.out);
  if (!walk.call.ponder_out.empty()) a.ponder_out = ToDeviceView(walk.call.ponder_out);
  const TensorView& steps = walk.call.steps_out;
  if (!steps.empty()) {
    a.steps_out = static_cast<int32_t*>(steps.mutable_data());
    a.steps_strides[0] = steps.stride(0);
    a.steps_strides[1] = steps.stride(1);
  }
  a.rows = sizes_.rows;
  a.tokens = problem_.query_tokens;
  a.channels = sizes_.width;
  return ToStatus(walk.kernels->write(a, walk.execution.stream));
}

}  // namespace tfb::universal_transformer
