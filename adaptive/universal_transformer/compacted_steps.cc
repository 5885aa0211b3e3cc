#include "adaptive/universal_transformer/compacted_steps.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/flash/flash.h"
#include "core/flash/rows.h"
#include "core/status.h"

namespace tfb::universal_transformer {
namespace {

using HaltFrom = UniversalTransformerOptions::HaltFrom;
using Output = UniversalTransformerOptions::Output;

constexpr int64_t kRowsOfTask = 16;

void ForEach(int64_t count, const Execution& execution, absl::FunctionRef<void(int64_t)> body) {
  execution.pool->ParallelForRanges(count, kRowsOfTask, [&](int64_t first, int64_t end, int) {
    for (int64_t n = first; n < end; ++n) body(n);
  });
}

// Returns [batch, tokens, heads * channels] as [batch, heads, tokens, channels].
template <class View>
View Heads(const View& view, int64_t heads) {
  return Transpose(SplitAxis(view, 2, heads), 1, 2);
}

TensorView Floats(float* data, int64_t rows, int64_t channels) {
  return TensorView(data, DType::kF32, {rows, channels});
}

}  // namespace

CompactedSteps::CompactedSteps(const Problem& problem, const UniversalTransformerOptions& options)
    : problem_(problem),
      options_(options),
      sizes_(problem, options),
      schedule_(problem.query_tokens) {}

// ---- Memory ----

CompactedSteps::Scratch CompactedSteps::LayOut(Workspace& workspace) const {
  const UniversalSizes& s = sizes_;
  const auto floats = [&](int64_t channels) { return workspace.Take<float>(s.rows * channels); };
  const auto of_dtype = [&](const Shape& shape) {
    std::byte* memory = workspace.Take<std::byte>(NumElements(shape) * SizeOf(problem_.dtype));
    return TensorView(memory, problem_.dtype, shape);
  };
  Scratch scratch = {};
  scratch.state = floats(s.width);
  if (options_.keeps_outputs()) scratch.output = floats(s.width);
  scratch.base = floats(s.keys_values());
  scratch.projected = of_dtype({problem_.batch, problem_.query_tokens, s.projected()});
  scratch.placed = floats(s.width);
  scratch.made = floats(s.width);
  scratch.products = floats(std::max(s.query_width, s.keys_values()));
  scratch.context = of_dtype({s.rows, s.context_width});
  scratch.inner = floats(s.inner);
  if (options_.convolves()) {
    scratch.shown = floats(s.width);
    scratch.shown_inner = floats(s.inner);
    scratch.convolved = floats(std::max(s.width, s.inner));
  }
  scratch.total = floats(1);
  scratch.weight = floats(1);
  scratch.row = workspace.Take<int32_t>(s.rows);
  scratch.just_halted = workspace.Take<int32_t>(s.rows);
  scratch.token = workspace.Take<int32_t>(s.rows);
  scratch.is_token = workspace.Take<uint8_t>(s.rows);
  scratch.has_halted = workspace.Take<uint8_t>(s.rows);
  scratch.first_of_batch = workspace.Take<int64_t>(problem_.batch + 1);
  return scratch;
}

size_t CompactedSteps::workspace_bytes(int threads) const {
  const UniversalSizes& s = sizes_;
  const auto product = [&](int64_t in, int64_t out) {
    return MatMulWorkspaceBytes(Device::kCpu, s.rows, in, out, threads);
  };
  Problem one_batch = problem_;
  one_batch.batch = 1;
  return Workspace::Measure([this](Workspace& workspace) { LayOut(workspace); }) +
         std::max({FlashWorkspaceBytes(one_batch, /*relative_keys=*/false, threads),
                   LayerNorm::workspace_bytes(Device::kCpu, s.width, threads),
                   product(s.width, s.query_width), product(s.width, s.keys_values()),
                   product(s.context_width, s.width), product(s.width, s.inner),
                   product(s.inner, s.width)});
}

// ---- A run ----

absl::Status CompactedSteps::Run(const SharedBlock& block, const Call& call,
                                 const Execution& execution) {
  Workspace workspace(execution.workspace);
  Walk walk = {block, call, LayOut(workspace), execution};
  walk.execution.workspace = workspace.Rest();
  Begin(walk);
  for (; walk.step < options_.steps && walk.active > 0; ++walk.step) {
    Gather(walk);
    TFB_RETURN_IF_ERROR(Project(walk));
    TFB_RETURN_IF_ERROR(Attend(walk));
    TFB_RETURN_IF_ERROR(Transit(walk));
    KeepStates(walk);
    if (!call.kept.empty()) KeepForBackward(walk);
    if (options_.halts()) Compact(walk);
  }
  if (!call.kept.empty()) TFB_RETURN_IF_ERROR(FinishKept(walk));
  WriteOut(walk);
  return absl::OkStatus();
}

// Sets H^0 = x; every token goes on that is not padding.
void CompactedSteps::Begin(Walk& walk) const {
  const Scratch& scratch = walk.scratch;
  const UniversalSizes& s = sizes_;
  const ConstTensorView& x = walk.call.x;
  const int64_t tokens = problem_.query_tokens;
  const ConstTensorView& mask = walk.call.key_mask;
  const TensorView& projected = scratch.projected;
  ForEach(s.rows, walk.execution, [&](int64_t r) {
    const int64_t b = r / tokens, t = r % tokens;
    const bool is_token = mask.empty() || *mask.At<uint8_t>(b, t) != 0;
    scratch.is_token[r] = is_token;
    scratch.has_halted[r] = 0;
    scratch.total[r] = 0;
    walk.call.ponder[r] = is_token && !options_.halts() ? static_cast<float>(options_.steps) : 0;
    walk.call.steps[r] = is_token && !options_.halts() ? static_cast<int32_t>(options_.steps) : 0;
    LoadRow(x, x.Offset(b, t), x.stride(2), s.width, scratch.state + r * s.width);
    if (options_.keeps_outputs()) std::fill_n(scratch.output + r * s.width, s.width, 0.0f);
    if (is_token) return;
    float* zeros = scratch.base + r * s.keys_values();
    std::fill_n(zeros, s.keys_values(), 0.0f);
    StoreRow(zeros, s.keys_values(), projected, r * s.projected() + s.query_width, 1);
  });
  scratch.first_of_batch[0] = 0;
  for (int64_t r = 0; r < s.rows; ++r) {
    if (scratch.is_token[r]) {
      scratch.row[walk.active] = static_cast<int32_t>(r);
      scratch.token[walk.active++] = static_cast<int32_t>(r % tokens);
    }
    if ((r + 1) % tokens == 0) scratch.first_of_batch[(r + 1) / tokens] = walk.active;
  }
  walk.changed = walk.active;
  if (!walk.call.kept.empty()) std::fill_n(walk.call.kept.computed, s.rows, 0);
}

void CompactedSteps::KeepForBackward(const Walk& walk) const {
  const StepsKept& kept = walk.call.kept;
  float* const states = kept.State(walk.step + 1, sizes_);
  ForEach(sizes_.rows, walk.execution, [&](int64_t r) {
    std::copy_n(walk.scratch.state + r * sizes_.width, sizes_.width, states + r * sizes_.width);
  });
  for (int64_t place = 0; place < walk.active; ++place) {
    kept.computed[walk.scratch.row[place]] = static_cast<int32_t>(walk.step + 1);
  }
}
absl::Status CompactedSteps::FinishKept(const Walk& walk) const {
  std::copy_n(walk.call.steps, sizes_.rows, walk.call.kept.stop);
  return walk.call.kept.KeepShown(Device::kCpu, sizes_, walk.scratch.shown,
                                  walk.scratch.shown_inner, walk.execution);
}

// Gathers the step's input of each listed token, with and without the time.
void CompactedSteps::Gather(const Walk& walk) const {
  const Scratch& scratch = walk.scratch;
  const int64_t width = sizes_.width;
  const float* time = walk.block.times.data() + walk.step * width;
  const bool decides = options_.halts() && options_.halt_from == HaltFrom::kBefore;
  ForEach(walk.changed, walk.execution, [&](int64_t place) {
    const int64_t r = scratch.row[place];
    const float* state = scratch.state + r * width;
    const float* position = walk.block.positions.data() + r % problem_.query_tokens * width;
    float* placed = scratch.placed + place * width;
    for (int64_t c = 0; c < width; ++c) placed[c] = state[c] + position[c];
    if (place >= walk.active) return;
    float* read = scratch.made + place * width;
    for (int64_t c = 0; c < width; ++c) read[c] = placed[c] + time[c];
    if (decides) Decide(walk, place, read);
  });
}

// Decides whether one token halts that has not, from the step's probability of the row `of`.
void CompactedSteps::Decide(const Walk& walk, int64_t place, const float* of) const {
  const Scratch& scratch = walk.scratch;
  const int64_t r = scratch.row[place];
  if (scratch.has_halted[r] != 0) return;
  const float p = walk.block.HaltingProbability(of, sizes_.width);
  const float remainder = 1 - scratch.total[r];
  scratch.total[r] += p;
  const bool reaches = Reaches(options_, scratch.total[r]);
  const bool halts = reaches || walk.step + 1 == options_.steps;
  const bool takes_remainder = reaches || (halts && options_.remainder_at_limit);
  scratch.has_halted[r] = halts;
  if (!walk.call.kept.empty()) walk.call.kept.takes_remainder[r] = takes_remainder ? 1 : 0;
  scratch.weight[place] = takes_remainder ? remainder : p;
  walk.call.steps[r] = static_cast<int32_t>(walk.step + 1);
  walk.call.ponder[r] = static_cast<float>(walk.step + 1) + (takes_remainder ? remainder : 0.0f);
}

// Projects queries of the tokens that go on, and keys and values of all tokens of their sequences.
absl::Status CompactedSteps::Project(const Walk& walk) const {
  const Scratch& scratch = walk.scratch;
  const UniversalSizes& s = sizes_;
  const float* time = walk.block.projected_times.data() + walk.step * s.projected();
  const TensorView& projected = scratch.projected;
  TFB_RETURN_IF_ERROR(MatMul(walk.block.queries,
                             {Floats(scratch.placed, walk.active, s.width),
                              {},
                              Floats(scratch.products, walk.active, s.query_width)},
                             walk.execution));
  ForEach(walk.active, walk.execution, [&](int64_t place) {
    float* query = scratch.products + place * s.query_width;
    for (int64_t c = 0; c < s.query_width; ++c) query[c] += time[c];
    StoreRow(query, s.query_width, projected, scratch.row[place] * s.projected(), 1);
  });

  TFB_RETURN_IF_ERROR(MatMul(walk.block.keys_values,
                             {Floats(scratch.placed, walk.changed, s.width),
                              {},
                              Floats(scratch.products, walk.changed, s.keys_values())},
                             walk.execution));
  ForEach(walk.changed, walk.execution, [&](int64_t place) {
    std::copy_n(scratch.products + place * s.keys_values(), s.keys_values(),
                scratch.base + scratch.row[place] * s.keys_values());
  });
  ForEach(s.rows, walk.execution, [&](int64_t r) {
    const int64_t b = r / problem_.query_tokens;
    const bool goes_on = scratch.first_of_batch[b] < scratch.first_of_batch[b + 1];
    if (!goes_on || !scratch.is_token[r]) return;
    constexpr int64_t kPart = 256;
    for (int64_t first = 0; first < s.keys_values(); first += kPart) {
      const int64_t count = std::min(kPart, s.keys_values() - first);
      const float* base = scratch.base + r * s.keys_values() + first;
      float sum[kPart];
      for (int64_t c = 0; c < count; ++c) sum[c] = base[c] + time[s.query_width + first + c];
      StoreRow(sum, count, projected, r * s.projected() + s.query_width + first, 1);
    }
  });
  return absl::OkStatus();
}

// Computes A = LN(U + MultiHead(U)).
absl::Status CompactedSteps::Attend(const Walk& walk) {
  const Scratch& scratch = walk.scratch;
  for (int64_t b = 0; b < problem_.batch; ++b) {
    if (scratch.first_of_batch[b] < scratch.first_of_batch[b + 1]) {
      TFB_RETURN_IF_ERROR(AttendBatch(walk, b));
    }
  }
  const TensorView a = Floats(scratch.placed, walk.active, sizes_.width);
  TFB_RETURN_IF_ERROR(MatMul(walk.block.output,
                             {Slice(scratch.context, 0, 0, walk.active),
                              Floats(scratch.made, walk.active, sizes_.width), a},
                             walk.execution));
  return walk.block.attention_norm.Run(a, a, walk.execution);
}

absl::Status CompactedSteps::AttendBatch(const Walk& walk, int64_t b) {
  const Scratch& scratch = walk.scratch;
  const UniversalSizes& s = sizes_;
  const int64_t first = scratch.first_of_batch[b];
  Problem problem = problem_;
  problem.batch = 1;
  problem.query_tokens = scratch.first_of_batch[b + 1] - first;
  const bool is_all = problem.query_tokens == problem.kv_tokens;

  const TensorView projected = Slice(scratch.projected, 0, b, 1);
  FlashCall call;
  call.q = Heads(Slice(projected, 2, 0, s.query_width), problem.query_heads);
  call.k = Heads(Slice(projected, 2, s.query_width, s.key_width), problem.kv_heads);
  call.v = Heads(Slice(projected, 2, s.query_width + s.key_width, s.value_width), problem.kv_heads);
  if (!walk.call.key_mask.empty()) call.key_mask = Slice(walk.call.key_mask, 0, b, 1);
  const Shape shape = {1, problem.query_tokens, s.context_width};
  call.out = Heads(TensorView(Slice(scratch.context, 0, first, problem.query_tokens).mutable_data(),
                              problem.dtype, shape),
                   problem.query_heads);
  if (!is_all) {
    call.query_order.tokens = scratch.token + first;
    call.out_by_row = true;
    call.rule.tokens.causal = problem.causal;
  }
  Band band;
  band.high = problem.causal && is_all ? 0 : problem.kv_tokens;
  call.schedule = &schedule_.Build(problem.query_tokens, problem.kv_tokens, band);
  return FlashCpu(problem, call, walk.execution);
}

// Computes S = LN(A + Transition(A)).
absl::Status CompactedSteps::Transit(const Walk& walk) const {
  const Scratch& scratch = walk.scratch;
  const TensorView a = Floats(scratch.placed, walk.active, sizes_.width);
  const TensorView inner = Floats(scratch.inner, walk.active, sizes_.inner);
  const TensorView s = Floats(scratch.made, walk.active, sizes_.width);
  TensorView into_first = a, into_second = inner;
  if (options_.convolves()) {
    into_first = Floats(scratch.convolved, walk.active, sizes_.width);
    into_second = Floats(scratch.convolved, walk.active, sizes_.inner);
    Convolve(walk, a, scratch.shown, walk.block.first_kernel, kFirstKernel);
  }
  TFB_RETURN_IF_ERROR(
      MatMul(walk.block.first, {into_first, {}, inner, Activation::kRelu}, walk.execution));
  if (options_.convolves()) {
    Convolve(walk, inner, scratch.shown_inner, walk.block.second_kernel, kSecondKernel);
  }
  TFB_RETURN_IF_ERROR(MatMul(walk.block.second, {into_second, a, s}, walk.execution));
  return walk.block.transition_norm.Run(s, s, walk.execution);
}

// Copies the rows to the memory that all tokens see, and convolves it into `convolved`.
void CompactedSteps::Convolve(const Walk& walk, const TensorView& rows, float* shown,
                              const DeviceArray<float>& kernel, int64_t size) const {
  const Scratch& scratch = walk.scratch;
  const int64_t channels = rows.dim(1), tokens = problem_.query_tokens;
  const float* from = static_cast<const float*>(rows.data);
  ForEach(walk.active, walk.execution, [&](int64_t place) {
    std::copy_n(from + place * channels, channels, shown + scratch.row[place] * channels);
  });
  const int64_t before = problem_.causal ? size - 1 : (size - 1) / 2;
  ForEach(walk.active, walk.execution, [&](int64_t place) {
    const int64_t r = scratch.row[place], t = scratch.token[place];
    float* sum = scratch.convolved + place * channels;
    std::fill_n(sum, channels, 0.0f);
    for (int64_t j = 0; j < size; ++j) {
      const int64_t other = t + j - before;
      if (other < 0 || other >= tokens || !scratch.is_token[r - t + other]) continue;
      const float* of_other = shown + (r - t + other) * channels;
      const float* factor = kernel.data() + j * channels;
      for (int64_t c = 0; c < channels; ++c) sum[c] += factor[c] * of_other[c];
    }
  });
}

// Keeps H^n of the tokens that were computed, and adds their states to the output.
void CompactedSteps::KeepStates(const Walk& walk) const {
  const Scratch& scratch = walk.scratch;
  const int64_t width = sizes_.width;
  const bool decides = options_.halts() && options_.halt_from == HaltFrom::kAfter;
  ForEach(walk.active, walk.execution, [&](int64_t place) {
    const int64_t r = scratch.row[place];
    const float* made = scratch.made + place * width;
    std::copy_n(made, width, scratch.state + r * width);
    if (decides) Decide(walk, place, made);
    // A token that halted in an earlier step is computed for the others alone.
    if (options_.keeps_outputs() && walk.call.steps[r] == walk.step + 1) AddToOutput(walk, place);
  });
}

void CompactedSteps::AddToOutput(const Walk& walk, int64_t place) const {
  const Scratch& scratch = walk.scratch;
  const int64_t width = sizes_.width;
  const float* made = scratch.made + place * width;
  float* output = scratch.output + scratch.row[place] * width;
  if (options_.output == Output::kFrozen) {
    std::copy_n(made, width, output);
    return;
  }
  const float weight = scratch.weight[place];
  const float kept = options_.output == Output::kBasic ? 1 - weight : 1;
  for (int64_t c = 0; c < width; ++c) output[c] = kept * output[c] + weight * made[c];
}

// Tells whether all tokens of a sequence go on, for the one of them that has not halted.
bool CompactedSteps::Stays(const Walk& walk, int64_t b) const {
  if (!options_.recomputes()) return false;
  const int64_t tokens = problem_.query_tokens;
  bool stays = false;
  for (int64_t r = b * tokens; r < (b + 1) * tokens; ++r) {
    stays |= walk.scratch.is_token[r] != 0 && walk.scratch.has_halted[r] == 0;
  }
  return stays;
}

// Lists the tokens that go on, and behind them those that have just halted in a sequence in which
// some go on: their keys and values must be computed from their last state.
void CompactedSteps::Compact(Walk& walk) const {
  const Scratch& scratch = walk.scratch;
  int64_t active = 0, halted = 0;
  for (int64_t b = 0, place = 0; b < problem_.batch; ++b) {
    const int64_t first = active, first_halted = halted, end = scratch.first_of_batch[b + 1];
    const bool stays = Stays(walk, b);
    for (; place < end; ++place) {
      if (scratch.has_halted[scratch.row[place]] != 0 && !stays) {
        scratch.just_halted[halted++] = scratch.row[place];
      } else {
        scratch.row[active] = scratch.row[place];
        scratch.token[active++] = scratch.token[place];
      }
    }
    if (active == first) halted = first_halted;
    scratch.first_of_batch[b + 1] = active;
  }
  std::copy_n(scratch.just_halted, halted, scratch.row + active);
  walk.active = active;
  walk.changed = active + halted;
}

void CompactedSteps::WriteOut(const Walk& walk) const {
  const Scratch& scratch = walk.scratch;
  const int64_t width = sizes_.width;
  const TensorView& out = walk.call.out;
  ForEach(sizes_.rows, walk.execution, [&](int64_t r) {
    float* row = (options_.keeps_outputs() ? scratch.output : scratch.state) + r * width;
    if (!scratch.is_token[r]) std::fill_n(row, width, 0.0f);
    const int64_t b = r / problem_.query_tokens, t = r % problem_.query_tokens;
    const Call& call = walk.call;
    StoreRow(row, width, out, out.Offset(b, t), out.stride(2));
    if (!call.ponder_out.empty()) {
      StoreRow(call.ponder + r, 1, call.ponder_out, call.ponder_out.Offset(b, t), 1);
    }
    if (!call.steps_out.empty()) *call.steps_out.MutableAt<int32_t>(b, t) = call.steps[r];
  });
}

}  // namespace tfb::universal_transformer
