#include "harness/testing/tiny_technique.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <optional>
#include <utility>

#include "core/cuda/runtime.h"
#include "core/definition.h"
#include "core/random.h"
#include "core/schedule/block_schedule.h"
#include "core/schedule/pattern.h"
#include "core/workspace.h"
#include "harness/testing/tiny_backward.h"
#include "harness/testing/tiny_kernels.h"

namespace tfb {
namespace {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

const std::pair<TinyFault, const char*> kNames[] = {
    {TinyFault::kNone, "tiny"},
    {TinyFault::kWrongScale, "tiny_wrong_scale"},
    {TinyFault::kWindowOffByOne, "tiny_window_off_by_one"},
    {TinyFault::kEmptyRowIsNan, "tiny_empty_row_is_nan"},
    {TinyFault::kFiniteSentinel, "tiny_finite_sentinel"},
    {TinyFault::kReadsMaskedValues, "tiny_reads_masked_values"},
    {TinyFault::kDropsNan, "tiny_drops_nan"},
    {TinyFault::kLeavesEmptyRows, "tiny_leaves_empty_rows"},
    {TinyFault::kNoMaxSubtracted, "tiny_no_max_subtracted"},
    {TinyFault::kWrongLogSumExp, "tiny_wrong_log_sum_exp"},
    {TinyFault::kIgnoresStrides, "tiny_ignores_strides"},
    {TinyFault::kWritesBehindOutput, "tiny_writes_behind_output"},
    {TinyFault::kWorkspaceOverrun, "tiny_workspace_overrun"},
    {TinyFault::kReadsWorkspace, "tiny_reads_workspace"},
    {TinyFault::kDependsOnThreads, "tiny_depends_on_threads"},
    {TinyFault::kKeepsState, "tiny_keeps_state"},
    {TinyFault::kSeesFuture, "tiny_sees_future"},
    {TinyFault::kWrongGroup, "tiny_wrong_group"},
    {TinyFault::kTopLeftCausal, "tiny_top_left_causal"},
    {TinyFault::kAllocates, "tiny_allocates"},
    {TinyFault::kWrongFlops, "tiny_wrong_flops"},
    {TinyFault::kFlopsOfKeys, "tiny_flops_of_keys"},
    {TinyFault::kForgetsBytes, "tiny_forgets_bytes"},
    {TinyFault::kIgnoresParameters, "tiny_ignores_parameters"},
    {TinyFault::kForgetsInAppend, "tiny_forgets_in_append"},
    {TinyFault::kRoundsScores, "tiny_rounds_scores"},
    {TinyFault::kThreadsDefine, "tiny_threads_define"},
    {TinyFault::kDefinesBehindOutput, "tiny_defines_behind_output"},
    {TinyFault::kGradientWrongScale, "tiny_gradient_wrong_scale"},
    {TinyFault::kGradientMissesLastTile, "tiny_gradient_misses_last_tile"},
    {TinyFault::kGradientOfWholeVectors, "tiny_gradient_of_whole_vectors"},
    {TinyFault::kGradientOfOneHead, "tiny_gradient_of_one_head"},
    {TinyFault::kGradientTopLeftCausal, "tiny_gradient_top_left_causal"},
    {TinyFault::kGradientOfMaskedKeys, "tiny_gradient_of_masked_keys"},
    {TinyFault::kGradientReadsMasked, "tiny_gradient_reads_masked"},
    {TinyFault::kGradientOfEmptyRowIsNan, "tiny_gradient_of_empty_row_is_nan"},
    {TinyFault::kGradientSeesFuture, "tiny_gradient_sees_future"},
    {TinyFault::kGradientOfOneBatch, "tiny_gradient_of_one_batch"},
    {TinyFault::kGradientForgetsLogSumExp, "tiny_gradient_forgets_log_sum_exp"},
    {TinyFault::kGradientRoundsMean, "tiny_gradient_rounds_mean"},
    {TinyFault::kGradientOfRoundedOutput, "tiny_gradient_of_rounded_output"},
    {TinyFault::kGradientClips, "tiny_gradient_clips"},
    {TinyFault::kGradientRounds, "tiny_gradient_rounds"},
    {TinyFault::kGradientSumsIn16Bits, "tiny_gradient_sums_in_16_bits"},
    {TinyFault::kGradientOverflows, "tiny_gradient_overflows"},
    {TinyFault::kGradientOfDrawnParameters, "tiny_gradient_of_drawn_parameters"},
    {TinyFault::kGradientIgnoresStrides, "tiny_gradient_ignores_strides"},
    {TinyFault::kGradientDependsOnThreads, "tiny_gradient_depends_on_threads"},
    {TinyFault::kGradientDependsOnBatch, "tiny_gradient_depends_on_batch"},
    {TinyFault::kGradientKeepsState, "tiny_gradient_keeps_state"},
    {TinyFault::kGradientNeedsQueries, "tiny_gradient_needs_queries"},
    {TinyFault::kGradientOfLeftOutOutput, "tiny_gradient_of_left_out_output"},
    {TinyFault::kGradientOfLastRun, "tiny_gradient_of_last_run"},
    {TinyFault::kKeepingChangesOutput, "tiny_keeping_changes_output"},
    {TinyFault::kBackwardAllocates, "tiny_backward_allocates"},
    {TinyFault::kGradientWritesBehind, "tiny_gradient_writes_behind"},
    {TinyFault::kGradientWritesInputs, "tiny_gradient_writes_inputs"},
    {TinyFault::kBackwardWorkspaceOverrun, "tiny_backward_workspace_overrun"},
    {TinyFault::kKeptOverrun, "tiny_kept_overrun"},
    {TinyFault::kStopsUnknownGradient, "tiny_stops_unknown_gradient"},
    {TinyFault::kDefinitionReadsFloats, "tiny_definition_reads_floats"},
    {TinyFault::kKernelWritesBehindOutput, "tiny_kernel_writes_behind_output"},
    {TinyFault::kKernelReadsUnwritten, "tiny_kernel_reads_unwritten"},
    {TinyFault::kKernelDependsOnOrder, "tiny_kernel_depends_on_order"},
    {TinyFault::kHostPointer, "tiny_host_pointer"},
    {TinyFault::kDeviceScale, "tiny_device_scale"},
    {TinyFault::kAllocatesOnDevice, "tiny_allocates_on_device"},
    {TinyFault::kWaits, "tiny_waits"},
    {TinyFault::kOtherStream, "tiny_other_stream"},
};

// The positions of the tokens of q among those of k.
struct Span {
  int64_t first_query = 0;  // position of query 0
  int64_t first_key = 0;
};

class TinyLayer : public StreamingLayer {
 public:
  TinyLayer(const Problem& problem, const TinyOptions& options, TinyFault fault, Tensor gain)
      : StreamingLayer(problem, QkvInputs(problem), AttentionOutputs(problem),
                       SegmentInputs(problem), SegmentOutputs(problem), problem.kv_tokens),
        options_(options),
        fault_(fault) {
    drawn_gain_ = gain.Clone();
    parameters_["gain"] = std::move(gain);
  }

  // Allocates the buffers of the problem's size; returns an error where there is no memory.
  virtual absl::Status Allocate() {
    const Problem& p = problem();
    for (Tensor* cache : {&keys_, &values_}) {
      const int64_t channels = cache == &keys_ ? p.head_dim : p.value_dim;
      TFB_ASSIGN_OR_RETURN(
          *cache, Tensor::Allocate(DType::kF32, {p.batch, p.kv_heads, p.kv_tokens, channels}));
    }
    return absl::OkStatus();
  }

  size_t workspace_bytes(int threads) const override {
    return Workspace::Measure([&](Workspace& w) { Scores(w, threads); });
  }

  Cost cost() const override {
    const Problem& p = problem();
    Cost cost;
    if (pairs_.has_value()) {
      const int64_t values = fault_ == TinyFault::kFlopsOfKeys ? p.head_dim : p.value_dim;
      cost.flops =
          2 * *pairs_ * static_cast<double>(p.batch) * static_cast<double>(p.head_dim + values);
    }
    cost.bytes = fault_ == TinyFault::kForgetsBytes ? AttentionBytes(p) : TensorBytes();
    return cost;
  }

  absl::Status CheckBackward() const override {
    if (fault_ == TinyFault::kNone || IsOfBackward(fault_)) return absl::OkStatus();
    return absl::UnimplementedError("a layer with a fault has no backward pass");
  }
  // The log-sum-exp of each row.
  size_t kept_bytes() const override {
    const Problem& p = problem();
    return static_cast<size_t>(p.batch * p.query_heads * p.query_tokens) * sizeof(float);
  }
  size_t backward_workspace_bytes(int threads) const override {
    return TinyBackward::WorkspaceBytes(problem(), threads);
  }
  Cost backward_cost() const override {
    const Problem& p = problem();
    Cost cost;
    // q k^T again, g v^T, and the products that make the gradients of q, k and v.
    if (pairs_.has_value()) {
      cost.flops = 2 * *pairs_ * static_cast<double>(p.batch) *
                   static_cast<double>(3 * p.head_dim + 2 * p.value_dim);
    }
    cost.bytes = 2 * TensorBytes();  // all tensors of the run, and their gradients
    return cost;
  }
  std::map<std::string, std::string> stopped_gradients() const override {
    if (fault_ == TinyFault::kStopsUnknownGradient) return {{"kk", "a fault"}};
    return {};
  }
  std::vector<std::string> differentiable_outputs() const override {
    return {"out", "log_sum_exp"};
  }

  absl::Status Reset() override {
    cached_ = 0;
    return absl::OkStatus();
  }

 protected:
  TinyOptions options_;
  TinyFault fault_;
  int64_t cached_ = 0;           // tokens
  std::optional<double> pairs_;  // of all heads of a sequence

  // Counts the pairs with the schedule that an engine would walk.
  absl::Status DoSetup(const Inputs&, const Execution&) override {
    const Problem& p = problem();
    const bool all = fault_ == TinyFault::kWrongFlops;
    const int64_t window = all ? kMaxTokens : options_.window;
    const BandPattern pattern(p.causal_offset() - window, p.causal_offset() + window);
    Problem seen = p;
    seen.causal = p.causal && !all;
    pairs_ = BuildSchedule(seen, pattern).KeptPairs(p.query_heads);
    return absl::OkStatus();
  }

  absl::Status DoRun(const Inputs& inputs, const Outputs& outputs,
                     const Execution& execution) override {
    ConstTensorView k = inputs.Get("k");
    if (fault_ == TinyFault::kIgnoresStrides) k = ConstTensorView(k.data, k.dtype, k.shape());
    if (fault_ == TinyFault::kAllocates) {
      int* volatile kept = new int(1);  // not optimised away
      delete kept;
    }
    const bool reads = fault_ == TinyFault::kReadsWorkspace && execution.workspace.size() >= 4;
    const float found = reads ? *reinterpret_cast<const float*>(execution.workspace.data()) : 0;
    float* const kept =
        execution.kept.empty() ? nullptr : reinterpret_cast<float*>(execution.kept.data());
    if (kept != nullptr) last_kept_ = kept;
    Attend(inputs.Get("q"), k, inputs.Get("v"), inputs.Get("key_mask"), outputs, Whole(), execution,
           kept);
    if (fault_ == TinyFault::kKeptOverrun && kept != nullptr) {
      execution.kept.data()[kept_bytes()] = std::byte{0};
    }
    if (fault_ == TinyFault::kWritesBehindOutput) {
      const TensorView out = outputs.Get("out");
      if (out.is_contiguous()) out.Set(out.num_elements(), 0);
    }
    if (fault_ == TinyFault::kWorkspaceOverrun) {
      execution.workspace.data()[workspace_bytes(execution.pool->threads())] = std::byte{0};
    }
    if (reads && outputs.Get("out").num_elements() > 0) {
      outputs.Get("out").Set(0, outputs.Get("out").Get(0) + 1e-3 * found);
    }
    ++runs_;
    return absl::OkStatus();
  }

  absl::Status DoBackward(const BackwardCall& call, const Execution& execution) override {
    if (fault_ == TinyFault::kBackwardAllocates) {
      int* volatile taken = new int(1);  // not optimised away
      delete taken;
    }
    TinyBackward::Numbers numbers;
    numbers.problem = &problem();
    const bool drawn = fault_ == TinyFault::kGradientOfDrawnParameters;
    numbers.gain = drawn ? &drawn_gain_ : &parameters_.at("gain");
    const bool top_left = fault_ == TinyFault::kGradientTopLeftCausal;
    const int64_t first = top_left ? 0 : problem().causal_offset();
    const int64_t ahead = fault_ == TinyFault::kGradientSeesFuture ? 1 : 0;
    const auto sees = [this, first, ahead](int64_t i, int64_t j) {
      return Sees(i + first, j) || (ahead == 1 && j == i + first + 1);
    };
    numbers.sees = std::cref(sees);
    const bool last = fault_ == TinyFault::kGradientOfLastRun;
    numbers.log_sum_exp = last ? last_kept_ : reinterpret_cast<const float*>(execution.kept.data());
    numbers.fault = fault_;
    numbers.passes = passes_++;
    TinyBackward(numbers, call, execution).Run();
    return absl::OkStatus();
  }

  absl::Status DoAppend(int64_t tokens, const Inputs& segment, const Outputs& outputs,
                        const Execution& execution) override {
    const Problem& p = problem();
    if (cached_ + tokens > p.kv_tokens) {
      return absl::OutOfRangeError("more tokens are appended than the layer has room for");
    }
    const auto store = [&](const ConstTensorView& from, Tensor* to) {
      const TensorView room = Slice(to->view(), 2, cached_, tokens);
      ForEachOffset(from, room, [&](int64_t a, int64_t b) { room.Set(b, from.Get(a)); });
    };
    store(segment.Get("k"), &keys_);
    store(segment.Get("v"), &values_);
    const int64_t all = cached_ + tokens;
    const Tensor& keys = keys_;
    const Tensor& values = values_;
    Attend(segment.Get("q"), Slice(keys.view(), 2, 0, all), Slice(values.view(), 2, 0, all), {},
           outputs, {cached_, 0}, execution, /*kept=*/nullptr);
    cached_ = all - (fault_ == TinyFault::kForgetsInAppend && tokens > 1 ? 1 : 0);
    return absl::OkStatus();
  }

 private:
  static std::vector<TensorSpec> SegmentInputs(const Problem& p) {
    return {{"q", {p.batch, p.query_heads, kSegmentTokens, p.head_dim}, p.dtype, false},
            {"k", {p.batch, p.kv_heads, kSegmentTokens, p.head_dim}, p.dtype, false},
            {"v", {p.batch, p.kv_heads, kSegmentTokens, p.value_dim}, p.dtype, false}};
  }
  static std::vector<TensorSpec> SegmentOutputs(const Problem& p) {
    return {{"out", {p.batch, p.query_heads, kSegmentTokens, p.value_dim}, p.dtype, false}};
  }

  float* Scores(Workspace& workspace, int threads) const {
    return workspace.Take<float>((problem().kv_tokens + problem().value_dim) * threads);
  }

  Span Whole() const {
    const bool top_left = fault_ == TinyFault::kTopLeftCausal;
    return {top_left ? 0 : problem().causal_offset(), 0};
  }

  // Tells whether the query at `position` sees key j, apart from padding.
  bool Sees(int64_t position, int64_t j) const {
    const int64_t ahead = fault_ == TinyFault::kSeesFuture ? 1 : 0;
    if (problem().causal && j > position + ahead) return false;
    const int64_t window = options_.window - (fault_ == TinyFault::kWindowOffByOne ? 1 : 0);
    return std::abs(position - j) <= window;
  }

  void Attend(const ConstTensorView& q, const ConstTensorView& k, const ConstTensorView& v,
              const ConstTensorView& key_mask, const Outputs& outputs, const Span& span,
              const Execution& execution, float* kept) {
    const int64_t queries = q.dim(2);
    Workspace workspace(execution.workspace);
    float* const scratch = Scores(workspace, execution.pool->threads());
    const int threads = execution.pool->threads();
    execution.pool->ParallelFor(
        q.dim(0) * q.dim(1) * queries, [&, q, k, v](int64_t task, int worker) {
          const int64_t row = (problem().kv_tokens + problem().value_dim) * worker;
          AttendRow(task / queries / q.dim(1), task / queries % q.dim(1), task % queries, q, k, v,
                    key_mask, outputs, span, threads, scratch + row,
                    kept == nullptr ? nullptr : kept + task);
        });
  }

  void AttendRow(int64_t b, int64_t h, int64_t i, const ConstTensorView& q,
                 const ConstTensorView& k, const ConstTensorView& v,
                 const ConstTensorView& key_mask, const Outputs& outputs, const Span& span,
                 int threads, float* s, float* kept) const {
    const Problem& p = problem();
    const int64_t keys = k.dim(2);
    const int64_t kv_head =
        fault_ == TinyFault::kWrongGroup ? h % p.kv_heads : h / (p.query_heads / p.kv_heads);
    const Tensor& gain =
        fault_ == TinyFault::kIgnoresParameters ? drawn_gain_ : parameters_.at("gain");
    float scale = gain.span<float>()[h] / std::sqrt(static_cast<float>(p.head_dim));
    if (fault_ == TinyFault::kWrongScale) scale *= 1.001f;
    const float not_seen = fault_ == TinyFault::kFiniteSentinel ? -1e30f : kMinusInfinity;
    float max = kMinusInfinity;
    for (int64_t j = 0; j < keys; ++j) {
      s[j] = not_seen;
      const bool token = key_mask.empty() || *key_mask.At<uint8_t>(b, j) != 0;
      if (token && Sees(i + span.first_query, j + span.first_key)) {
        float dot = 0;
        for (int64_t c = 0; c < p.head_dim; ++c) {
          dot += static_cast<float>(q.Get(q.Offset(b, h, i, c))) *
                 static_cast<float>(k.Get(k.Offset(b, kv_head, j, c)));
        }
        s[j] = scale * dot;
        if (fault_ == TinyFault::kRoundsScores) s[j] = static_cast<float>(BFloat16(s[j]));
        if (fault_ == TinyFault::kDropsNan && std::isnan(s[j])) s[j] = not_seen;
      }
      if (s[j] > max || std::isnan(s[j])) max = s[j];
    }
    if (fault_ == TinyFault::kNoMaxSubtracted) max = max == kMinusInfinity ? max : 0;
    const TensorView out = outputs.Get("out");
    const bool seen = max != kMinusInfinity;
    if (!seen && fault_ == TinyFault::kLeavesEmptyRows) return;
    float sum = 0;
    float* const y = s + keys;
    std::fill_n(y, p.value_dim, 0.0f);
    const bool reversed = fault_ == TinyFault::kDependsOnThreads && threads > 1;
    for (int64_t n = 0; n < keys; ++n) {
      const int64_t j = reversed ? keys - 1 - n : n;
      const bool skipped = s[j] == kMinusInfinity;
      if (skipped && fault_ != TinyFault::kReadsMaskedValues) continue;
      const float weight = skipped ? 0 : std::exp(s[j] - max);
      sum += weight;
      for (int64_t c = 0; c < p.value_dim; ++c) {
        y[c] += weight * static_cast<float>(v.Get(v.Offset(b, kv_head, j, c)));
      }
    }
    const float factor = seen || fault_ == TinyFault::kEmptyRowIsNan ? 1 / sum : 0;
    const bool shifted = fault_ == TinyFault::kKeepsState && runs_ > 0;
    for (int64_t c = 0; c < p.value_dim; ++c) {
      out.Set(out.Offset(b, h, i, c), y[c] * factor * (shifted ? 1.0001f : 1.0f));
    }
    const float base = fault_ == TinyFault::kWrongLogSumExp ? 0 : max;
    const float log_sum_exp = seen ? base + std::log(sum) : kMinusInfinity;
    if (kept != nullptr) {
      *kept = log_sum_exp;
      if (fault_ == TinyFault::kKeepingChangesOutput) out.Set(out.Offset(b, h, i, 0), 0.125);
    }
    const TensorView lse = outputs.Get("log_sum_exp");
    if (!lse.empty()) lse.Set(lse.Offset(b, h, i), log_sum_exp);
  }

  Tensor drawn_gain_;
  int runs_ = 0, passes_ = 0;
  const float* last_kept_ = nullptr;  // of the last Run that kept memory
  Tensor keys_;                       // keys of appended segments
  Tensor values_;
};

TinyKernelFault KernelFault(TinyFault fault) {
  switch (fault) {
    case TinyFault::kKernelWritesBehindOutput:
      return TinyKernelFault::kWritesBehindOutput;
    case TinyFault::kKernelReadsUnwritten:
      return TinyKernelFault::kReadsUnwritten;
    case TinyFault::kKernelDependsOnOrder:
      return TinyKernelFault::kDependsOnOrder;
    default:
      return TinyKernelFault::kNone;
  }
}

// Does the same with kernels, on a GPU or in the simulator.
class TinyDeviceLayer : public TinyLayer {
 public:
  TinyDeviceLayer(const Problem& problem, const TinyOptions& options, TinyFault fault, Tensor gain,
                  CudaRuntime* runtime)
      : TinyLayer(problem, options, fault, std::move(gain)), runtime_(runtime) {}

  absl::Status Allocate() override {
    const Problem& p = problem();
    const size_t rows = static_cast<size_t>(p.batch * p.kv_heads * p.kv_tokens * SizeOf(p.dtype));
    TFB_ASSIGN_OR_RETURN(keys_, runtime_->Allocate(rows * p.head_dim));
    TFB_ASSIGN_OR_RETURN(values_, runtime_->Allocate(rows * p.value_dim));
    TFB_ASSIGN_OR_RETURN(gain_, runtime_->Allocate(p.query_heads * sizeof(float)));
    return absl::OkStatus();
  }

  size_t workspace_bytes(int) const override {
    return Workspace::Measure([&](Workspace& w) { Scores(w); });
  }
  absl::Status CheckBackward() const override {
    return absl::UnimplementedError("the layer has a backward pass on the CPU alone");
  }

 protected:
  absl::Status DoSetup(const Inputs& inputs, const Execution& execution) override {
    TFB_RETURN_IF_ERROR(TinyLayer::DoSetup(inputs, execution));
    const Tensor& gain = parameters().at("gain");
    return runtime_->CopyToDevice(gain_.data(), gain.raw(), gain.bytes(), execution.stream);
  }

  absl::Status DoRun(const Inputs& inputs, const Outputs& outputs,
                     const Execution& execution) override {
    if (fault_ == TinyFault::kWaits) TFB_RETURN_IF_ERROR(runtime_->Synchronize(execution.stream));
    if (fault_ == TinyFault::kAllocatesOnDevice)
      TFB_RETURN_IF_ERROR(runtime_->Allocate(4).status());
    return Attend(inputs.Get("q"), inputs.Get("k"), inputs.Get("v"), inputs.Get("key_mask"),
                  outputs, problem().causal_offset(), execution);
  }

  absl::Status DoAppend(int64_t tokens, const Inputs& segment, const Outputs& outputs,
                        const Execution& execution) override {
    const Problem& p = problem();
    if (cached_ + tokens > p.kv_tokens) {
      return absl::OutOfRangeError("more tokens are appended than the layer has room for");
    }
    const TensorView keys = Cached(keys_, p.head_dim), values = Cached(values_, p.value_dim);
    const auto store = [&](const ConstTensorView& from, const TensorView& cache) {
      const TinyCopy copy = {ToDeviceView(from),
                             ToDeviceView(Slice(cache, 2, cached_, tokens)),
                             p.batch,
                             p.kv_heads,
                             tokens,
                             cache.dim(3)};
      return ToStatus(KernelsOn<TinyKernels>(runtime_->target()).copy(copy, execution.stream));
    };
    TFB_RETURN_IF_ERROR(store(segment.Get("k"), keys));
    TFB_RETURN_IF_ERROR(store(segment.Get("v"), values));
    const int64_t first_query = cached_;
    cached_ += tokens;
    return Attend(segment.Get("q"), Slice(keys, 2, 0, cached_), Slice(values, 2, 0, cached_), {},
                  outputs, first_query, execution);
  }

 private:
  float* Scores(Workspace& workspace) const {
    const Problem& p = problem();
    return workspace.Take<float>(p.batch * p.query_heads * p.query_tokens * (p.kv_tokens + 1));
  }

  TensorView Cached(const DeviceBuffer& cache, int64_t channels) const {
    const Problem& p = problem();
    return {cache.data(), p.dtype, {p.batch, p.kv_heads, p.kv_tokens, channels}};
  }

  absl::Status Attend(const ConstTensorView& q, const ConstTensorView& k, const ConstTensorView& v,
                      const ConstTensorView& key_mask, const Outputs& outputs, int64_t first_query,
                      const Execution& execution) {
    TinyCall call = {};
    call.q = ToDeviceView(q);
    call.k = ToDeviceView(k);
    call.v = ToDeviceView(v);
    call.out = ToDeviceView(outputs.Get("out"));
    call.log_sum_exp = ToDeviceView(outputs.Get("log_sum_exp"));
    call.key_mask = static_cast<const unsigned char*>(key_mask.data);
    call.mask_strides[0] = key_mask.stride(0);
    call.mask_strides[1] = key_mask.stride(1);
    const bool mistaken = fault_ == TinyFault::kHostPointer;
    call.gain = mistaken ? parameters().at("gain").span<float>().data() : gain_.As<float>();
    Workspace workspace(execution.workspace);
    call.scores = Scores(workspace);
    call.batch = q.dim(0);
    call.heads = q.dim(1);
    call.group = problem().group();
    call.queries = q.dim(2);
    call.keys = k.dim(2);
    call.head_dim = q.dim(3);
    call.value_dim = v.dim(3);
    call.first_query = first_query;
    call.window = options_.window;
    call.score_factor = fault_ == TinyFault::kDeviceScale ? 1.001f : 1;
    call.causal = problem().causal;
    call.fault = KernelFault(fault_);
    void* const stream = fault_ == TinyFault::kOtherStream ? nullptr : execution.stream;
    return ToStatus(KernelsOn<TinyKernels>(runtime_->target()).attend(call, stream));
  }

  CudaRuntime* runtime_;
  DeviceBuffer keys_, values_;  // keys and values of appended segments
  DeviceBuffer gain_;
};

class Tiny : public TechniqueOf<TinyOptions> {
 public:
  explicit Tiny(TinyFault fault) : TechniqueOf(Info(fault)), fault_(fault) {}

  absl::StatusOr<TechniqueSpec> Counterpart(const Problem&, const Options&) const override {
    return TechniqueSpec{TinyName(TinyFault::kNone), {}};
  }

 protected:
  absl::StatusOr<std::unique_ptr<Layer>> MakeLayer(const Problem& problem,
                                                   const TinyOptions& options, Device device,
                                                   uint64_t seed) const override {
    TFB_ASSIGN_OR_RETURN(Tensor gain, Tensor::Allocate(DType::kF32, {problem.query_heads}));
    FillUniform(&gain, seed, "gain", 0.5, 1);
    std::unique_ptr<TinyLayer> layer;
    if (device == Device::kCpu) {
      layer = std::make_unique<TinyLayer>(problem, options, fault_, std::move(gain));
    } else {
      TFB_ASSIGN_OR_RETURN(CudaRuntime* const runtime, CudaRuntime::For(device));
      layer = std::make_unique<TinyDeviceLayer>(problem, options, fault_, std::move(gain), runtime);
    }
    TFB_RETURN_IF_ERROR(layer->Allocate());
    return layer;
  }

  absl::Status Definition(const Problem& problem, const TinyOptions& options,
                          const NamedTensors& parameters, const Inputs& inputs,
                          const DefinitionRequest& request, NamedTensors* outputs) const override {
    const DoubleTensor q(inputs.Get("q")), k(inputs.Get("k"));
    const DoubleTensor in_double(parameters.at("gain").view());
    const bool reads_floats = fault_ == TinyFault::kDefinitionReadsFloats;
    const auto gain = [&](int64_t h) {
      return reads_floats ? *parameters.at("gain").view().At<float>(h) : in_double.at(h);
    };
    const KeyMask is_token(inputs);
    const bool splits = fault_ == TinyFault::kThreadsDefine && request.pool != nullptr;
    const int64_t part = splits ? problem.head_dim / request.pool->threads() : 0;
    DefineAttention(
        problem, inputs, request,
        [&](int64_t b, int64_t h, int64_t i, int64_t j) {
          const int64_t position = i + problem.causal_offset();
          if (problem.causal && j > position) return kNotSeen;
          if (std::abs(position - j) > options.window || !is_token(b, j)) return kNotSeen;
          const double *query = q.Row(b, h, i), *key = k.Row(b, h / problem.group(), j);
          return gain(h) / std::sqrt(static_cast<double>(problem.head_dim)) *
                 (Dot(query, key, part) + Dot(query + part, key + part, problem.head_dim - part));
        },
        outputs);
    if (fault_ == TinyFault::kDefinesBehindOutput) {
      const absl::Span<double> out = outputs->at("out").span<double>();
      out.data()[out.size()] = 0;
    }
    return absl::OkStatus();
  }

 private:
  static TechniqueInfo Info(TinyFault fault) {
    TechniqueInfo info;
    info.name = TinyName(fault);
    info.family = "attention";
    info.title = "Windowed attention in plain loops";
    info.citation = "made up for tests";
    info.exactness = Exactness::kExact;
    info.budget_option = "window";
    info.growth = 2;
    info.devices = {Device::kCpu, Device::kCuda};
    return info;
  }

  TinyFault fault_;
};

}  // namespace

std::vector<TinyFault> AllTinyFaults() {
  std::vector<TinyFault> faults;
  for (const auto& entry : kNames) faults.push_back(entry.first);
  return faults;
}

bool IsOfBackward(TinyFault fault) {
  return fault >= TinyFault::kGradientWrongScale && !IsOfDevices(fault);
}
bool IsOfDevices(TinyFault fault) { return fault >= TinyFault::kKernelWritesBehindOutput; }

std::string TinyName(TinyFault fault) {
  for (const auto& [candidate, name] : kNames) {
    if (candidate == fault) return name;
  }
  return "?";
}

std::unique_ptr<Technique> MakeTiny(TinyFault fault) { return std::make_unique<Tiny>(fault); }

}  // namespace tfb
