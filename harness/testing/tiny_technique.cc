#include "harness/testing/tiny_technique.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "core/cuda/device_array.h"
#include "core/cuda/for_each.h"
#include "core/cuda/runtime.h"
#include "core/definition.h"
#include "core/random.h"
#include "core/schedule/block_schedule.h"
#include "core/schedule/pattern.h"
#include "core/workspace.h"
#include "harness/testing/tiny_attention.h"
#include "harness/testing/tiny_backward.h"

namespace tfb {
namespace {

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
    {TinyFault::kDependsOnBatch, "tiny_depends_on_batch"},
    {TinyFault::kMaskedTileIsNan, "tiny_masked_tile_is_nan"},
    {TinyFault::kReadsMaskedKeys, "tiny_reads_masked_keys"},
    {TinyFault::kFourTiles, "tiny_four_tiles"},
    {TinyFault::kMissesLastTile, "tiny_misses_last_tile"},
    {TinyFault::kWholeVectors, "tiny_whole_vectors"},
    {TinyFault::kSmallSentinel, "tiny_small_sentinel"},
    {TinyFault::kNeedsLogSumExp, "tiny_needs_log_sum_exp"},
    {TinyFault::kIgnoresOutputStrides, "tiny_ignores_output_strides"},
    {TinyFault::kRefusesOddStrides, "tiny_refuses_odd_strides"},
    {TinyFault::kAppendAllocates, "tiny_append_allocates"},
    {TinyFault::kResetKeepsAToken, "tiny_reset_keeps_a_token"},
    {TinyFault::kValuesOfHeadDim, "tiny_values_of_head_dim"},
    {TinyFault::kAddsToSum, "tiny_adds_to_sum"},
    {TinyFault::kAddsToValues, "tiny_adds_to_values"},
    {TinyFault::kWritesDenormals, "tiny_writes_denormals"},
    {TinyFault::kMultipliesValues, "tiny_multiplies_values"},
    {TinyFault::kLimitsProducts, "tiny_limits_products"},
    {TinyFault::kDropsTies, "tiny_drops_ties"},
    {TinyFault::kSubtractsNorms, "tiny_subtracts_norms"},
    {TinyFault::kFewBatches, "tiny_few_batches"},
    {TinyFault::kDrawsAnew, "tiny_draws_anew"},
    {TinyFault::kIgnoresSeed, "tiny_ignores_seed"},
    {TinyFault::kAllocatesUnchecked, "tiny_allocates_unchecked"},
    {TinyFault::kFailsWithoutWork, "tiny_fails_without_work"},
    {TinyFault::kRefusesUsual, "tiny_refuses_usual"},
    {TinyFault::kRefusesInCreate, "tiny_refuses_in_create"},
    {TinyFault::kDefinesRowsInOrder, "tiny_defines_rows_in_order"},
    {TinyFault::kDefinesTheComputed, "tiny_defines_the_computed"},
    {TinyFault::kDeclaresOtherOutputs, "tiny_declares_other_outputs"},
    {TinyFault::kLacksCitation, "tiny_lacks_citation"},
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
    {TinyFault::kGradientIgnoresOwnStrides, "tiny_gradient_ignores_own_strides"},
    {TinyFault::kBackwardRefusesOddStrides, "tiny_backward_refuses_odd_strides"},
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
    {TinyFault::kDependsOnOrder, "tiny_depends_on_order"},
    {TinyFault::kHostPointer, "tiny_host_pointer"},
    {TinyFault::kDeviceScale, "tiny_device_scale"},
    {TinyFault::kAllocatesOnDevice, "tiny_allocates_on_device"},
    {TinyFault::kWaits, "tiny_waits"},
    {TinyFault::kHeadsInGridZ, "tiny_heads_in_grid_z"},
    {TinyFault::kOtherStream, "tiny_other_stream"},
    {TinyFault::kSetsUpOnOtherStream, "tiny_sets_up_on_other_stream"},
    {TinyFault::kResetsOnOtherStream, "tiny_resets_on_other_stream"},
};

// Tells whether a dimension of size 1 has another stride than in a contiguous tensor.
bool HasOddStrides(const ConstTensorView& view) {
  const ConstTensorView contiguous(view.data, view.dtype, view.shape());
  for (int axis = 0; axis < view.rank; ++axis) {
    if (view.dim(axis) == 1 && view.stride(axis) != contiguous.stride(axis)) return true;
  }
  return false;
}
absl::Status RefuseOddStrides(const ConstTensorView& view) {
  return HasOddStrides(view) ? absl::InternalError("a tensor has gaps") : absl::OkStatus();
}

class TinyLayer : public StreamingLayer {
 public:
  static absl::StatusOr<std::unique_ptr<Layer>> Make(const Problem& problem,
                                                     const TinyOptions& options, TinyFault fault,
                                                     Device device, uint64_t seed) {
    if (IsOfDevices(fault) && device == Device::kCpu) fault = TinyFault::kNone;
    std::unique_ptr<TinyLayer> layer(new TinyLayer(problem, options, fault, device));
    TFB_RETURN_IF_ERROR(layer->Allocate(seed));
    return layer;
  }

  size_t workspace_bytes(int) const override {
    return Workspace::Measure([&](Workspace& w) { Take(w); });
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
    if (fault_ == TinyFault::kNone || IsOfBackward(fault_) || IsOfDevices(fault_)) {
      return absl::OkStatus();
    }
    return absl::UnimplementedError("a layer with a fault has no backward pass");
  }
  // The log-sum-exp of each row.
  size_t kept_bytes() const override {
    const Problem& p = problem();
    return static_cast<size_t>(p.batch * p.query_heads * p.query_tokens) * sizeof(float);
  }
  size_t backward_workspace_bytes(int) const override {
    return TinyBackwardWorkspaceBytes(problem());
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
    cached_ = fault_ == TinyFault::kResetKeepsAToken ? std::min<int64_t>(cached_, 1) : 0;
    return fault_ == TinyFault::kResetsOnOtherStream ? CopyDrawnGain() : absl::OkStatus();
  }

 protected:
  // Counts the pairs with the schedule that an engine would walk.
  absl::Status DoSetup(const Inputs&, const Execution& execution) override {
    const Problem& p = problem();
    const bool all = fault_ == TinyFault::kWrongFlops;
    const int64_t window = all ? kMaxTokens : options_.window;
    const BandPattern pattern(p.causal_offset() - window, p.causal_offset() + window);
    Problem seen = p;
    seen.causal = p.causal && !all;
    pairs_ = BuildSchedule(seen, pattern).KeptPairs(p.query_heads);
    return UploadGain(execution.stream);
  }

  absl::Status DoRun(const Inputs& inputs, const Outputs& outputs,
                     const Execution& given) override {
    TFB_ASSIGN_OR_RETURN(const Execution execution,
                         Interfere(fault_ == TinyFault::kAllocates, given));
    float* const kept =
        execution.kept.empty() ? nullptr : reinterpret_cast<float*>(execution.kept.data());
    if (kept != nullptr) last_kept_ = kept;
    if (fault_ == TinyFault::kFailsWithoutWork && outputs.Get("out").num_elements() == 0) {
      return absl::InternalError("a grid is empty");
    }
    if (fault_ == TinyFault::kRefusesOddStrides) {
      TFB_RETURN_IF_ERROR(RefuseOddStrides(inputs.Get("q")));
    }
    const bool top_left = fault_ == TinyFault::kTopLeftCausal;
    TFB_RETURN_IF_ERROR(Attend(inputs.Get("q"), inputs.Get("k"), inputs.Get("v"),
                               inputs.Get("key_mask"), outputs,
                               top_left ? 0 : problem().causal_offset(), execution, kept));
    ++runs_;
    return absl::OkStatus();
  }

  absl::Status DoBackward(const BackwardCall& backward, const Execution& given) override {
    TFB_ASSIGN_OR_RETURN(const Execution execution,
                         Interfere(fault_ == TinyFault::kBackwardAllocates, given));
    if (fault_ == TinyFault::kBackwardRefusesOddStrides) {
      TFB_RETURN_IF_ERROR(RefuseOddStrides(backward.inputs.Get("q")));
    }
    TinyCall call =
        MakeTinyCall(backward.inputs.Get("q"), backward.inputs.Get("k"), backward.inputs.Get("v"),
                     backward.inputs.Get("key_mask"), problem().causal);
    call.fault = fault_;
    call.gain = fault_ == TinyFault::kGradientOfDrawnParameters ? drawn_gain_.data() : Gain();
    if (fault_ == TinyFault::kDeviceScale) call.scale *= 1.001f;
    call.behind = options_.window;
    const int64_t future = fault_ == TinyFault::kGradientSeesFuture ? 1 : 0;
    call.ahead = problem().causal ? future : options_.window;
    if (fault_ == TinyFault::kGradientTopLeftCausal) call.first_query = 0;
    const bool ends_in_tile_of_one = call.keys > 64 && call.keys % 64 == 1;
    if (fault_ == TinyFault::kGradientMissesLastTile && ends_in_tile_of_one) --call.seen_keys;
    const bool last = fault_ == TinyFault::kGradientOfLastRun;
    const float* const kept =
        last ? last_kept_ : reinterpret_cast<const float*>(execution.kept.data());
    return RunTinyBackward(device_, problem(), call, kept, passes_++, backward, execution);
  }

  absl::Status DoAppend(int64_t tokens, const Inputs& segment, const Outputs& outputs,
                        const Execution& given) override {
    const Problem& p = problem();
    TFB_ASSIGN_OR_RETURN(const Execution execution,
                         Interfere(fault_ == TinyFault::kAppendAllocates, given));
    if (cached_ + tokens > p.kv_tokens) {
      return absl::OutOfRangeError("more tokens are appended than the layer has room for");
    }
    const TensorView keys = Cached(keys_, p.head_dim), values = Cached(values_, p.value_dim);
    const auto store = [&](const ConstTensorView& from, const TensorView& cache) {
      const TinyCopy copy = {ToDeviceView(from), ToDeviceView(Slice(cache, 2, cached_, tokens)),
                             p.kv_heads, tokens};
      return ForEachInRows(device_, p.batch * p.kv_heads * tokens, cache.dim(3), copy, execution);
    };
    TFB_RETURN_IF_ERROR(store(segment.Get("k"), keys));
    TFB_RETURN_IF_ERROR(store(segment.Get("v"), values));
    const int64_t first_query = cached_, all = cached_ + tokens;
    cached_ = all - (fault_ == TinyFault::kForgetsInAppend && tokens > 1 ? 1 : 0);
    TFB_RETURN_IF_ERROR(Attend(segment.Get("q"), Slice(keys, 2, 0, all), Slice(values, 2, 0, all),
                               {}, outputs, first_query, execution, /*kept=*/nullptr));
    if (fault_ != TinyFault::kResetsOnOtherStream || all < p.kv_tokens) return absl::OkStatus();
    // What Reset has to undo.
    TFB_ASSIGN_OR_RETURN(CudaRuntime* const runtime, CudaRuntime::For(device_));
    return runtime->Fill(gain_.mutable_data(), 0, gain_.bytes(), execution.stream);
  }

 private:
  TinyLayer(const Problem& problem, const TinyOptions& options, TinyFault fault, Device device)
      : StreamingLayer(problem, QkvInputs(problem), AttentionOutputs(problem),
                       SegmentInputs(problem), SegmentOutputs(problem), problem.kv_tokens),
        options_(options),
        fault_(fault),
        device_(device) {}

  static std::vector<TensorSpec> SegmentInputs(const Problem& p) {
    return {{"q", {p.batch, p.query_heads, kSegmentTokens, p.head_dim}, p.dtype, false},
            {"k", {p.batch, p.kv_heads, kSegmentTokens, p.head_dim}, p.dtype, false},
            {"v", {p.batch, p.kv_heads, kSegmentTokens, p.value_dim}, p.dtype, false}};
  }
  static std::vector<TensorSpec> SegmentOutputs(const Problem& p) {
    return {{"out", {p.batch, p.query_heads, kSegmentTokens, p.value_dim}, p.dtype, false}};
  }

  // Draws the parameter and allocates the buffers of the problem's size; returns an error where
  // there is no memory.
  absl::Status Allocate(uint64_t seed) {
    const Problem& p = problem();
    TFB_ASSIGN_OR_RETURN(Tensor gain, Tensor::Allocate(DType::kF32, {p.query_heads}));
    static std::atomic<uint64_t> layers{0};
    if (fault_ == TinyFault::kDrawsAnew) seed += layers++;
    if (fault_ == TinyFault::kIgnoresSeed) seed = 1;
    FillUniform(&gain, seed, "gain", 0.5, 1);
    const int64_t rows = p.batch * p.kv_heads * p.kv_tokens * SizeOf(p.dtype);
    if (fault_ == TinyFault::kAllocatesUnchecked) {
      void* const memory = std::malloc(static_cast<size_t>(rows * p.head_dim));
      *static_cast<volatile char*>(memory) = 0;
      std::free(memory);
    }
    TFB_ASSIGN_OR_RETURN(keys_, DeviceArray<uint8_t>::Allocate(device_, rows * p.head_dim));
    TFB_ASSIGN_OR_RETURN(values_, DeviceArray<uint8_t>::Allocate(device_, rows * p.value_dim));
    TFB_ASSIGN_OR_RETURN(gain_, DeviceArray<float>::Allocate(device_, p.query_heads));
    TFB_ASSIGN_OR_RETURN(drawn_gain_, CopyFloats(device_, gain.view()));
    parameters_["gain"] = std::move(gain);
    return absl::OkStatus();
  }

  // Copies the parameter to where the layer runs.
  absl::Status UploadGain(void* stream) const {
    const Tensor& gain = parameters().at("gain");
    if (device_ == Device::kCpu) {
      absl::c_copy(gain.span<float>(), gain_.mutable_data());
      return absl::OkStatus();
    }
    if (fault_ == TinyFault::kSetsUpOnOtherStream) return CopyDrawnGain();
    TFB_ASSIGN_OR_RETURN(CudaRuntime* const runtime, CudaRuntime::For(device_));
    return runtime->CopyToDevice(gain_.mutable_data(), gain.raw(), gain.bytes(), stream);
  }
  // Copies the parameter as it was drawn, on the default stream.
  absl::Status CopyDrawnGain() const {
    TFB_ASSIGN_OR_RETURN(CudaRuntime* const runtime, CudaRuntime::For(device_));
    return runtime->CopyWithinDevice(gain_.mutable_data(), drawn_gain_.data(), gain_.bytes());
  }

  const float* Gain() const {
    if (fault_ == TinyFault::kIgnoresParameters) return drawn_gain_.data();
    if (fault_ == TinyFault::kHostPointer) return parameters().at("gain").span<float>().data();
    return gain_.data();
  }

  TensorView Cached(const DeviceArray<uint8_t>& cache, int64_t channels) const {
    const Problem& p = problem();
    return {cache.mutable_data(), p.dtype, {p.batch, p.kv_heads, p.kv_tokens, channels}};
  }

  struct Scratch {
    float *weights, *factors, *unwritten;
  };
  Scratch Take(Workspace& workspace) const {
    const Problem& p = problem();
    const int64_t rows = p.batch * p.query_heads * p.query_tokens;
    return {workspace.Take<float>(rows * p.kv_tokens), workspace.Take<float>(rows),
            workspace.Take<float>(1)};
  }

  // Does what a call may not do: allocates, waits, or returns another stream.
  absl::StatusOr<Execution> Interfere(bool allocates, Execution execution) const {
    if (allocates) {
      int* volatile taken = new int(1);  // not optimised away
      delete taken;
    }
    if (!IsOfDevices(fault_)) return execution;
    TFB_ASSIGN_OR_RETURN(CudaRuntime* const runtime, CudaRuntime::For(device_));
    if (fault_ == TinyFault::kWaits) TFB_RETURN_IF_ERROR(runtime->Synchronize(execution.stream));
    if (fault_ == TinyFault::kAllocatesOnDevice) {
      TFB_RETURN_IF_ERROR(runtime->Allocate(4).status());
    }
    if (fault_ == TinyFault::kOtherStream) execution.stream = nullptr;
    return execution;
  }

  absl::Status Attend(const ConstTensorView& q, ConstTensorView k, const ConstTensorView& v,
                      const ConstTensorView& key_mask, const Outputs& outputs, int64_t first_query,
                      const Execution& execution, float* kept) {
    if (fault_ == TinyFault::kIgnoresStrides) k = ConstTensorView(k.data, k.dtype, k.shape());
    TinyCall call = MakeTinyCall(q, k, v, key_mask, problem().causal);
    call.fault = fault_;
    call.first_query = first_query;
    call.behind = options_.window - (fault_ == TinyFault::kWindowOffByOne ? 1 : 0);
    const int64_t future = fault_ == TinyFault::kSeesFuture ? 1 : 0;
    call.ahead = problem().causal ? std::min(future, call.behind) : call.behind;
    call.gain = Gain();
    const bool wrong = fault_ == TinyFault::kWrongScale || fault_ == TinyFault::kDeviceScale;
    if (wrong) call.scale *= 1.001f;
    call.reversed = (fault_ == TinyFault::kDependsOnThreads && execution.pool->threads() > 1) ||
                    (fault_ == TinyFault::kDependsOnBatch && call.batch > 1);
    const bool ends_in_tile_of_one = call.keys > 64 && call.keys % 64 == 1;
    if (fault_ == TinyFault::kMissesLastTile && ends_in_tile_of_one) --call.seen_keys;
    const bool below_a_tile = fault_ == TinyFault::kWholeVectors && call.keys < 64;
    if (below_a_tile) call.seen_keys = call.keys / 4 * 4;
    if (fault_ == TinyFault::kFourTiles) call.seen_keys = std::min<int64_t>(call.keys, 256);
    TensorView out = outputs.Get("out");
    if (fault_ == TinyFault::kIgnoresOutputStrides) {
      out = TensorView(out.mutable_data(), out.dtype, out.shape());
    }

    Workspace workspace(execution.workspace);
    const Scratch scratch = Take(workspace);
    TinyTensors tensors;
    tensors.q = ToDeviceView(q);
    tensors.k = ToDeviceView(k);
    tensors.v = ToDeviceView(v);
    tensors.out = ToDeviceView(out);
    tensors.log_sum_exp = ToDeviceView(outputs.Get("log_sum_exp"));
    tensors.weights = scratch.weights;
    tensors.factors = scratch.factors;
    tensors.unwritten = scratch.unwritten;
    tensors.kept = kept;
    tensors.overrun =
        reinterpret_cast<unsigned char*>(execution.workspace.data() + workspace_bytes(1));
    if (fault_ == TinyFault::kKeptOverrun && kept != nullptr) {
      tensors.overrun = reinterpret_cast<unsigned char*>(execution.kept.data() + kept_bytes());
    }
    tensors.changed = (fault_ == TinyFault::kKeepsState && runs_ > 0) ||
                      (fault_ == TinyFault::kKeepingChangesOutput && kept != nullptr) ||
                      (fault_ == TinyFault::kNeedsLogSumExp && tensors.log_sum_exp.data == nullptr);
    return RunTinyAttention(device_, call, tensors, execution);
  }

  TinyOptions options_;
  TinyFault fault_;
  Device device_;
  DeviceArray<float> gain_, drawn_gain_;
  DeviceArray<uint8_t> keys_, values_;  // of appended segments
  int64_t cached_ = 0;                  // tokens
  std::optional<double> pairs_;         // of all heads of a sequence
  int runs_ = 0, passes_ = 0;
  const float* last_kept_ = nullptr;  // of the last Run that kept memory
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
    if (fault_ == TinyFault::kRefusesUsual && problem.query_tokens != 1) {
      return absl::UnimplementedError("there may be one token");
    }
    if (fault_ == TinyFault::kRefusesInCreate && problem.group() > 1) {
      return absl::UnimplementedError("heads share no keys");
    }
    return TinyLayer::Make(problem, options, fault_, device, seed);
  }

  std::vector<TensorSpec> WrittenTensors(const Problem& problem,
                                         const TinyOptions&) const override {
    std::vector<TensorSpec> specs = AttentionOutputs(problem);
    if (fault_ == TinyFault::kDeclaresOtherOutputs) specs.pop_back();
    return specs;
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
          if (fault_ == TinyFault::kDefinesRowsInOrder && !request.rows.empty()) {
            i = absl::c_find(request.rows, i) - request.rows.begin();
          }
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
    if (fault_ == TinyFault::kDefinesTheComputed && request.computed != nullptr) {
      outputs->at("out") = request.computed->at("out").CloneAs(DType::kF64);
    }
    return absl::OkStatus();
  }

 private:
  static TechniqueInfo Info(TinyFault fault) {
    TechniqueInfo info;
    info.name = TinyName(fault);
    info.family = "attention";
    info.title = "Windowed attention in plain loops";
    if (fault != TinyFault::kLacksCitation) info.citation = "made up for tests";
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
bool IsOfDevices(TinyFault fault) { return fault >= TinyFault::kDependsOnOrder; }

std::string TinyName(TinyFault fault) {
  for (const auto& [candidate, name] : kNames) {
    if (candidate == fault) return name;
  }
  return "?";
}

std::unique_ptr<Technique> MakeTiny(TinyFault fault) { return std::make_unique<Tiny>(fault); }

}  // namespace tfb
