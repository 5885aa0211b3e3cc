#include "adaptive/universal_transformer/steps_backward.h"

#include <algorithm>
#include <cmath>

#include "absl/functional/function_ref.h"
#include "core/flash/flash_backward.h"
#include "core/flash/rows.h"
#include "core/layers/heads.h"
#include "core/layers/matmul_gradient.h"
#include "core/schedule/band_schedule.h"
#include "core/status.h"
#include "core/zeros.h"

namespace tfb::universal_transformer {
namespace {

using HaltFrom = UniversalTransformerOptions::HaltFrom;
using Output = UniversalTransformerOptions::Output;

constexpr int64_t kRowsOfTask = 16;
constexpr int64_t kChannelsOfTask = 16;
constexpr int64_t kMostSteps = 32;

void ForEach(int64_t count, const Execution& execution, absl::FunctionRef<void(int64_t)> body) {
  execution.pool->ParallelForRanges(count, kRowsOfTask, [&](int64_t first, int64_t end, int) {
    for (int64_t n = first; n < end; ++n) body(n);
  });
}

float Dot(const float* a, const float* b, int64_t size) {
  double sum = 0;
  for (int64_t c = 0; c < size; ++c) sum += static_cast<double>(a[c]) * b[c];
  return static_cast<float>(sum);
}

}  // namespace

StepsBackward::StepsBackward(const Problem& problem, const UniversalTransformerOptions& options)
    : problem_(problem),
      options_(options),
      sizes_(problem, options),
      attention_norm_("attention_norm"),
      transition_norm_("ff_norm") {}

absl::Status StepsBackward::SetUp(const NamedTensors& parameters) {
  const auto transposed = [&](std::vector<absl::string_view> names) {
    std::vector<ConstTensorView> matrices;
    for (const absl::string_view name : names) {
      matrices.push_back(layers::FindParameter(parameters, std::string(name)));
    }
    return PackedMatrix::CreateTransposed(Device::kCpu, matrices);
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
  by_keys_ = TransposedSchedule(schedule_);
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
  scratch.state = floats(s.width);
  scratch.read = floats(s.width);
  scratch.keys_values = of_dtype(s.keys_values());
  scratch.keys_values_gradient = floats(s.keys_values());
  scratch.of_keys = floats(s.width);
  scratch.placed = floats(s.width);
  scratch.queries = of_dtype(s.query_width);
  scratch.context = of_dtype(s.context_width);
  scratch.log_sum_exp = floats(problem_.query_heads);
  scratch.delta = floats(problem_.query_heads);
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
  scratch.place_of_row = workspace.Take<int32_t>(s.rows);
  scratch.row = workspace.Take<int32_t>(s.rows);
  return scratch;
}

size_t StepsBackward::workspace_bytes(int threads) const {
  const UniversalSizes& s = sizes_;
  const auto product = [&](int64_t in, int64_t out) {
    return std::max({MatMulWorkspaceBytes(Device::kCpu, s.rows, in, out, threads),
                     MatMulWorkspaceBytes(Device::kCpu, s.rows, out, in, threads),
                     MatMulGradientWorkspaceBytes(s.rows, in, out, threads)});
  };
  return Workspace::Measure([this](Workspace& workspace) { LayOut(workspace); }) +
         std::max({FlashWorkspaceBytes(problem_, /*relative_keys=*/false, threads),
                   FlashBackwardWorkspaceBytes(problem_, /*relative_keys=*/false, threads),
                   LayerNorm::backward_workspace_bytes(Device::kCpu, s.rows, s.width, threads),
                   LayerNorm::workspace_bytes(Device::kCpu, s.width, threads),
                   product(s.width, s.query_width), product(s.width, s.keys_values()),
                   product(s.width, s.key_width), product(s.width, s.value_width),
                   product(s.context_width, s.width), product(s.width, s.inner),
                   product(s.inner, s.width)});
}

// ---- Halting ----

// Loads U of step `step` + 1.
void StepsBackward::LoadRead(const Walk& walk, int64_t r, int64_t step, float* to) const {
  const int64_t width = sizes_.width, b = r / problem_.query_tokens, t = r % problem_.query_tokens;
  const ConstTensorView& x = walk.call.x;
  if (step == 0) {
    LoadRow(x, x.Offset(b, t), x.stride(2), width, to);
  } else {
    std::copy_n(walk.call.kept.State(step, sizes_) + r * width, width, to);
  }
  const float* position = walk.call.block.positions.data() + t * width;
  const float* time = walk.call.block.times.data() + step * width;
  for (int64_t c = 0; c < width; ++c) to[c] = to[c] + position[c] + time[c];
}

void StepsBackward::PrepareHalting(const Walk& walk) const {
  const Scratch& scratch = walk.scratch;
  std::fill_n(scratch.coefficients, options_.steps * sizes_.rows, 0.0f);
  std::fill_n(scratch.of_logits, options_.steps * sizes_.rows, 0.0f);
  ForEach(sizes_.rows, walk.execution, [&](int64_t r) {
    if (!is_token(walk, r)) return;
    if (options_.halts()) return PrepareRow(walk, r);
    scratch.coefficients[(options_.steps - 1) * sizes_.rows + r] = 1;
  });
}

void StepsBackward::PrepareRow(const Walk& walk, int64_t r) const {
  const Scratch& scratch = walk.scratch;
  const int64_t width = sizes_.width, rows = sizes_.rows, count = walk.call.kept.stop[r];
  const int64_t b = r / problem_.query_tokens, t = r % problem_.query_tokens;
  float p[kMostSteps], w[kMostSteps], of_w[kMostSteps], of_state[kMostSteps];  // the last is q
  float* const g = scratch.made + r * width;  // whose memory is free here
  float* const u = scratch.placed + r * width;
  LoadRow(walk.call.out, walk.call.out.Offset(b, t), walk.call.out.stride(2), width, g);
  float total = 0, before = 0;
  for (int64_t n = 0; n < count; ++n) {
    const float* state = walk.call.kept.State(n + 1, sizes_) + r * width;
    of_state[n] = Dot(g, state, width);
    if (options_.halt_from == HaltFrom::kBefore) {
      LoadRead(walk, r, n, u);
      state = u;
    }
    p[n] = walk.call.block.HaltingProbability(state, width);
    before = total;
    total += p[n];
    w[n] = p[n];
  }
  const bool takes_remainder =
      options_.remainder_at_limit || count < options_.steps || Reaches(options_, total);
  if (takes_remainder) w[count - 1] = 1 - before;

  const auto coefficient = [&](int64_t n) -> float& { return scratch.coefficients[n * rows + r]; };
  std::fill_n(of_w, count, 0.0f);
  switch (options_.output) {
    case Output::kAccumulated:
      for (int64_t n = 0; n < count; ++n) {
        coefficient(n) = w[n];
        of_w[n] = of_state[n];
      }
      break;
    case Output::kBasic: {
      float mixed = 0;  // g . Y^(n-1)
      for (int64_t n = 0; n < count; ++n) {
        of_w[n] = of_state[n] - mixed;
        mixed += w[n] * of_w[n];
      }
      float kept = 1;
      for (int64_t n = count - 1; n >= 0; --n) {
        coefficient(n) = w[n] * kept;
        of_w[n] *= kept;
        kept *= 1 - w[n];
      }
      break;
    }
    case Output::kFrozen:
      coefficient(count - 1) = 1;
      break;
  }
  const ConstTensorView& ponder = walk.call.ponder;
  const float of_ponder =
      ponder.empty() ? 0.0f : static_cast<float>(ponder.Get(ponder.Offset(b, t)));
  const float of_remainder = takes_remainder ? of_w[count - 1] + of_ponder : 0;
  for (int64_t n = 0; n < count; ++n) {
    float of_p = of_w[n] - of_remainder;
    if (n == count - 1) of_p = takes_remainder ? 0 : of_w[n];
    scratch.of_logits[n * rows + r] = of_p * p[n] * (1 - p[n]);
  }
}

// Adds dz to the gradients of w and b, in the order of the rows.
void StepsBackward::AddHalting(const Walk& walk) const {
  const Scratch& scratch = walk.scratch;
  const TensorView of_weight = walk.call.parameters.Get("halting.w");
  const TensorView of_bias = walk.call.parameters.Get("halting.b");
  const float* of_logits = scratch.of_logits + walk.step * sizes_.rows;
  const float* states = options_.halt_from == HaltFrom::kBefore
                            ? scratch.read
                            : walk.call.kept.State(walk.step + 1, sizes_);
  walk.execution.pool->ParallelForRanges(
      of_weight.empty() ? 0 : sizes_.width, kChannelsOfTask, [&](int64_t begin, int64_t end, int) {
        for (int64_t place = 0; place < walk.active; ++place) {
          const int64_t r = scratch.row[place];
          for (int64_t c = begin; c < end; ++c) {
            *of_weight.MutableAt<float>(c) += of_logits[r] * states[r * sizes_.width + c];
          }
        }
      });
  for (int64_t place = 0; place < walk.active && !of_bias.empty(); ++place) {
    *of_bias.MutableAt<float>(0) += of_logits[scratch.row[place]];
  }
}

// ---- A step again ----

void StepsBackward::List(Walk& walk) const {
  const Scratch& scratch = walk.scratch;
  walk.active = 0;
  for (int64_t r = 0; r < sizes_.rows; ++r) {
    const bool takes_it = walk.call.kept.computed[r] > walk.step;
    scratch.place_of_row[r] = takes_it ? static_cast<int32_t>(walk.active) : -1;
    if (takes_it) scratch.row[walk.active++] = static_cast<int32_t>(r);
  }
}

FlashCall StepsBackward::FlashOf(const Walk& walk) const {
  const Scratch& scratch = walk.scratch;
  const UniversalSizes& s = sizes_;
  const auto of_places = [&](const TensorView& memory, int64_t channels) {
    return SharedHeads(TensorView(memory.mutable_data(), memory.dtype, {walk.active, channels}),
                       problem_.batch, problem_.query_heads);
  };
  FlashCall call;
  call.q = of_places(scratch.queries, s.query_width);
  call.k = Heads(Slice(scratch.keys_values, 2, 0, s.key_width), problem_.kv_heads);
  call.v = Heads(Slice(scratch.keys_values, 2, s.key_width, s.value_width), problem_.kv_heads);
  call.key_mask = walk.call.key_mask;
  call.out = of_places(scratch.context, s.context_width);
  call.log_sum_exp =
      TensorView(scratch.log_sum_exp, DType::kF32,
                 {problem_.batch, problem_.query_heads, walk.active}, {0, walk.active, 1});
  call.query_order.tokens = scratch.place_of_row;
  call.query_order.batch_stride = problem_.query_tokens;
  call.schedule = &schedule_;
  return call;
}

absl::Status StepsBackward::RunAgain(const Walk& walk) const {
  const Scratch& scratch = walk.scratch;
  const SharedBlock& block = walk.call.block;
  const UniversalSizes& s = sizes_;
  const Execution& execution = walk.execution;
  ForEach(s.rows, execution, [&](int64_t r) {
    float* const read = scratch.read + r * s.width;
    if (!is_token(walk, r)) {
      std::fill_n(read, s.width, 0.0f);
      return;
    }
    LoadRead(walk, r, walk.step, read);
    const int32_t place = scratch.place_of_row[r];
    if (place >= 0) std::copy_n(read, s.width, scratch.placed + place * s.width);
  });
  const auto by_place = [&](float* memory, int64_t channels) {
    return ByPlace(walk, memory, channels);
  };
  const TensorView u = by_place(scratch.placed, s.width);
  const TensorView read(scratch.read, DType::kF32,
                        {problem_.batch, problem_.query_tokens, s.width});
  const TensorView queries(scratch.queries.mutable_data(), problem_.dtype,
                           {walk.active, s.query_width});
  const TensorView context(scratch.context.mutable_data(), problem_.dtype,
                           {walk.active, s.context_width});
  TFB_RETURN_IF_ERROR(MatMul(block.queries, {u, {}, queries}, execution));
  TFB_RETURN_IF_ERROR(MatMul(block.keys_values, {read, {}, scratch.keys_values}, execution));
  TFB_RETURN_IF_ERROR(FlashCpu(problem_, FlashOf(walk), execution));
  const TensorView attended = by_place(scratch.attended, s.width);
  const TensorView a = by_place(scratch.normalized, s.width);
  TFB_RETURN_IF_ERROR(MatMul(block.output, {context, u, attended}, execution));
  TFB_RETURN_IF_ERROR(block.attention_norm.Run(attended, a, execution));
  if (options_.convolves()) Convolve(walk, First(walk), scratch.into_first);
  TFB_RETURN_IF_ERROR(MatMul(block.first,
                             {by_place(scratch.into_first, s.width),
                              {},
                              by_place(scratch.inner, s.inner),
                              Activation::kRelu},
                             execution));
  if (options_.convolves()) Convolve(walk, Second(walk), scratch.into_second);
  return MatMul(block.second,
                {by_place(scratch.into_second, s.inner), a, by_place(scratch.made, s.width)},
                execution);
}

// ---- Convolutions ----

StepsBackward::Convolution StepsBackward::First(const Walk& walk) const {
  return {walk.call.block.first_kernel, kFirstKernel, sizes_.width, walk.scratch.normalized,
          walk.call.kept.shown};
}
StepsBackward::Convolution StepsBackward::Second(const Walk& walk) const {
  return {walk.call.block.second_kernel, kSecondKernel, sizes_.inner, walk.scratch.inner,
          walk.call.kept.shown_inner};
}

template <class Body>
void StepsBackward::ForEachSeen(const Walk& walk, int64_t r, int64_t size, const Body& body) const {
  const int64_t tokens = problem_.query_tokens, t = r % tokens;
  for (int64_t j = 0; j < size; ++j) {
    const int64_t other = t + j - before(size);
    if (other < 0 || other >= tokens || !is_token(walk, r - t + other)) continue;
    body(r - t + other, j);
  }
}

void StepsBackward::Convolve(const Walk& walk, const Convolution& convolution, float* y) const {
  const int64_t channels = convolution.channels;
  ForEach(walk.active, walk.execution, [&](int64_t place) {
    float* sum = y + place * channels;
    std::fill_n(sum, channels, 0.0f);
    ForEachSeen(walk, walk.scratch.row[place], convolution.size, [&](int64_t other, int64_t j) {
      const int32_t place_of_other = walk.scratch.place_of_row[other];
      const float* row = place_of_other >= 0 ? convolution.rows + place_of_other * channels
                                             : convolution.shown + other * channels;
      const float* factor = convolution.kernel.data() + j * channels;
      for (int64_t c = 0; c < channels; ++c) sum[c] += factor[c] * row[c];
    });
  });
}

void StepsBackward::ConvolveBackward(const Walk& walk, const Convolution& convolution,
                                     const float* dy, const TensorView& kernel_gradient,
                                     float* shown, float* gradient) const {
  const int64_t channels = convolution.channels;
  const Scratch& scratch = walk.scratch;
  // A task has some of the channels: the sums over tokens are in their order.
  walk.execution.pool->ParallelForRanges(
      channels, kChannelsOfTask, [&](int64_t begin, int64_t end, int) {
        for (int64_t place = 0; place < walk.active; ++place) {
          const float* of_y = dy + place * channels;
          ForEachSeen(walk, scratch.row[place], convolution.size, [&](int64_t other, int64_t j) {
            const int32_t place_of_other = scratch.place_of_row[other];
            const float* row = place_of_other >= 0 ? convolution.rows + place_of_other * channels
                                                   : convolution.shown + other * channels;
            const float* factor = convolution.kernel.data() + j * channels;
            for (int64_t c = begin; c < end; ++c) {
              shown[other * channels + c] += factor[c] * of_y[c];
            }
            for (int64_t c = begin; c < end && !kernel_gradient.empty(); ++c) {
              *kernel_gradient.MutableAt<float>(j, c) += of_y[c] * row[c];
            }
          });
        }
      });
  ForEach(walk.active, walk.execution, [&](int64_t place) {
    float* of_row = shown + scratch.row[place] * channels;
    std::copy_n(of_row, channels, gradient + place * channels);
    std::fill_n(of_row, channels, 0.0f);
  });
}

// ---- The gradients of a step ----

absl::Status StepsBackward::TransitionBackward(const Walk& walk) const {
  const Scratch& scratch = walk.scratch;
  const UniversalSizes& s = sizes_;
  const Outputs& gradients = walk.call.parameters;
  const auto by_place = [&](float* memory, int64_t channels) {
    return ByPlace(walk, memory, channels);
  };
  const float* coefficients = scratch.coefficients + walk.step * s.rows;
  const float* of_logits = scratch.of_logits + walk.step * s.rows;
  const bool adds_logit = options_.halts() && options_.halt_from == HaltFrom::kAfter;
  ForEach(walk.active, walk.execution, [&](int64_t place) {
    const int64_t r = scratch.row[place];
    const int64_t b = r / problem_.query_tokens, t = r % problem_.query_tokens;
    float* ds = scratch.gradient + place * s.width;
    const float* state = scratch.state + r * s.width;
    const ConstTensorView& out = walk.call.out;
    LoadRow(out, out.Offset(b, t), out.stride(2), s.width, ds);
    for (int64_t c = 0; c < s.width; ++c) ds[c] = state[c] + coefficients[r] * ds[c];
    for (int64_t c = 0; c < s.width && adds_logit; ++c) {
      ds[c] += of_logits[r] * walk.call.block.halting_weight.data()[c];
    }
  });
  const TensorView ds = by_place(scratch.gradient, s.width);
  TFB_RETURN_IF_ERROR(
      walk.call.block.transition_norm.Backward({by_place(scratch.made, s.width),
                                                ds,
                                                {},
                                                ds,
                                                gradients.Get(transition_norm_.gamma),
                                                gradients.Get(transition_norm_.beta),
                                                /*accumulate=*/true},
                                               walk.execution));
  const TensorView into_second = by_place(scratch.into_second, s.inner);
  const TensorView into_first = by_place(scratch.into_first, s.width);
  const TensorView of_inner = by_place(scratch.inner_gradient, s.inner);
  const TensorView da = by_place(scratch.of_attended, s.width);
  TFB_RETURN_IF_ERROR(MatMulGradient(
      {into_second, ds, gradients.Get("ff.w2"), gradients.Get("ff.b2"), /*accumulate=*/true},
      walk.execution));
  TFB_RETURN_IF_ERROR(MatMul(second_, {ds, {}, of_inner}, walk.execution));
  if (options_.convolves()) {
    ConvolveBackward(walk, Second(walk), scratch.inner_gradient, gradients.Get("ff.k2"),
                     scratch.shown_inner, scratch.inner_gradient);
  }
  ForEach(walk.active, walk.execution, [&](int64_t place) {
    for (int64_t c = place * s.inner; c < (place + 1) * s.inner; ++c) {
      if (!(scratch.inner[c] > 0)) scratch.inner_gradient[c] = 0;
    }
  });
  TFB_RETURN_IF_ERROR(MatMulGradient(
      {into_first, of_inner, gradients.Get("ff.w1"), gradients.Get("ff.b1"), /*accumulate=*/true},
      walk.execution));
  if (!options_.convolves()) return MatMul(first_, {of_inner, ds, da}, walk.execution);
  TFB_RETURN_IF_ERROR(MatMul(first_, {of_inner, {}, da}, walk.execution));
  ConvolveBackward(walk, First(walk), scratch.of_attended, gradients.Get("ff.k1"), scratch.shown,
                   scratch.of_attended);
  ForEach(walk.active, walk.execution, [&](int64_t place) {
    for (int64_t c = place * s.width; c < (place + 1) * s.width; ++c) {
      scratch.of_attended[c] += scratch.gradient[c];
    }
  });
  return absl::OkStatus();
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
                                               /*accumulate=*/true},
                                              execution));
  const ConstTensorView context(scratch.context.data, problem_.dtype,
                                {walk.active, s.context_width});
  const TensorView of_context = ByPlace(walk, scratch.context_gradient, s.context_width);
  TFB_RETURN_IF_ERROR(MatMulGradient({context, da, gradients.Get("attention.w_o"),
                                      gradients.Get("attention.b_o"), /*accumulate=*/true},
                                     execution));
  TFB_RETURN_IF_ERROR(MatMul(output_, {da, {}, of_context}, execution));

  const TensorView of_queries = ByPlace(walk, scratch.queries_gradient, s.query_width);
  const TensorView of_keys_values(scratch.keys_values_gradient, DType::kF32,
                                  {problem_.batch, problem_.query_tokens, s.keys_values()});
  SetToZero(of_queries, execution.pool);
  SetToZero(of_keys_values, execution.pool);
  const FlashCall forward = FlashOf(walk);
  FlashBackwardCall backward;
  backward.forward = &forward;
  backward.schedule = &by_keys_;
  backward.out_gradient = SharedHeads(of_context, problem_.batch, problem_.query_heads);
  const TensorView delta(scratch.delta, DType::kF32,
                         {problem_.batch, problem_.query_heads, walk.active}, {0, walk.active, 1});
  backward.delta = delta;
  FlashDelta(Slice(forward.out, 0, 0, 1), Slice(backward.out_gradient, 0, 0, 1), {},
             Slice(delta, 0, 0, 1), execution.pool);  // all batch rows share the rows
  backward.q_gradient = SharedHeads(of_queries, problem_.batch, problem_.query_heads);
  const TensorView of_keys = Slice(of_keys_values, 2, 0, s.key_width);
  const TensorView of_values = Slice(of_keys_values, 2, s.key_width, s.value_width);
  backward.k_gradient = Heads(of_keys, problem_.kv_heads);
  backward.v_gradient = Heads(of_values, problem_.kv_heads);
  TFB_RETURN_IF_ERROR(FlashBackwardCpu(problem_, backward, execution));

  const ConstTensorView read(scratch.read, DType::kF32,
                             {problem_.batch, problem_.query_tokens, s.width});
  const auto add = [&](const ConstTensorView& x, const ConstTensorView& dy, const char* matrix,
                       const char* bias) {
    return MatMulGradient({x, dy, gradients.Get(matrix), gradients.Get(bias), /*accumulate=*/true},
                          execution);
  };
  TFB_RETURN_IF_ERROR(
      add(ByPlace(walk, scratch.placed, s.width), of_queries, "attention.w_q", "attention.b_q"));
  TFB_RETURN_IF_ERROR(add(read, of_keys, "attention.w_k", "attention.b_k"));
  TFB_RETURN_IF_ERROR(add(read, of_values, "attention.w_v", "attention.b_v"));
  // dU, and what keys and values give.
  const TensorView of_read(scratch.of_keys, DType::kF32,
                           {problem_.batch, problem_.query_tokens, s.width});
  TFB_RETURN_IF_ERROR(MatMul(queries_, {of_queries, da, da}, execution));
  return MatMul(keys_values_, {of_keys_values, {}, of_read}, execution);
}

// Makes the gradient of H^(n-1) of that of H^n.
absl::Status StepsBackward::InputBackward(const Walk& walk) const {
  const Scratch& scratch = walk.scratch;
  const UniversalSizes& s = sizes_;
  const float* of_logits = scratch.of_logits + walk.step * s.rows;
  const bool adds_logit = options_.halts() && options_.halt_from == HaltFrom::kBefore;
  const float* weight = walk.call.block.halting_weight.data();
  ForEach(s.rows, walk.execution, [&](int64_t r) {
    const int32_t place = scratch.place_of_row[r];
    float *state = scratch.state + r * s.width, *of_keys = scratch.of_keys + r * s.width;
    if (place >= 0) {
      const float* of_read = scratch.of_attended + place * s.width;
      for (int64_t c = 0; c < s.width; ++c) {
        of_keys[c] += of_read[c] + (adds_logit ? of_logits[r] * weight[c] : 0.0f);
        state[c] = 0;
      }
    }
    for (int64_t c = 0; c < s.width; ++c) state[c] += of_keys[c];
  });
  const TensorView times = walk.call.parameters.Get("t");
  if (times.empty()) return absl::OkStatus();
  const TensorView of_read(scratch.of_keys, DType::kF32, {s.rows, s.width});
  const TensorView of_time(times.MutableAt<float>(walk.step), DType::kF32, Shape{s.width},
                           Shape{times.stride(1)});
  return MatMulGradient({of_read, of_read, {}, of_time}, walk.execution);
}

absl::Status StepsBackward::Run(const Call& call, const Execution& execution) const {
  Workspace workspace(execution.workspace);
  Walk walk = {call, LayOut(workspace), execution};
  walk.execution.workspace = workspace.Rest();
  const Scratch& scratch = walk.scratch;
  const UniversalSizes& s = sizes_;
  PrepareHalting(walk);
  std::fill_n(scratch.state, s.rows * s.width, 0.0f);
  if (options_.convolves()) {
    std::fill_n(scratch.shown, s.rows * s.width, 0.0f);
    std::fill_n(scratch.shown_inner, s.rows * s.inner, 0.0f);
  }
  for (walk.step = options_.steps - 1; walk.step >= 0; --walk.step) {
    List(walk);
    if (walk.active == 0) continue;
    TFB_RETURN_IF_ERROR(RunAgain(walk));
    TFB_RETURN_IF_ERROR(TransitionBackward(walk));
    TFB_RETURN_IF_ERROR(AttentionBackward(walk));
    TFB_RETURN_IF_ERROR(InputBackward(walk));
    if (options_.halts()) AddHalting(walk);
  }
  if (call.x_gradient.empty()) return absl::OkStatus();
  ForEach(s.rows, walk.execution, [&](int64_t r) {
    const int64_t b = r / problem_.query_tokens, t = r % problem_.query_tokens;
    StoreRow(scratch.state + r * s.width, s.width, call.x_gradient, call.x_gradient.Offset(b, t),
             call.x_gradient.stride(2));
  });
  return absl::OkStatus();
}

}  // namespace tfb::universal_transformer
