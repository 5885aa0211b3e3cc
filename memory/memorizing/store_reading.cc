#include "memory/memorizing/store_reading.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "core/cuda/for_each.h"
#include "core/cuda/runtime.h"
#include "core/cuda/sum_in_runs.h"
#include "core/status.h"

namespace tfb::memorizing {

absl::Status StoreReading::SetUp(const MemoryStore::Parameters& parameters) {
  if (!shape_.joins) {
    TFB_ASSIGN_OR_RETURN(gates_, CopyFloats(device_, parameters.gate));
  }
  TFB_ASSIGN_OR_RETURN(scales_, CopyFloats(device_, parameters.scale));
  if (!shape_.has_null) return absl::OkStatus();
  TFB_ASSIGN_OR_RETURN(null_values_, CopyFloats(device_, parameters.null_value));
  const int64_t channels = problem_.head_dim;
  std::vector<float> unit(static_cast<size_t>(problem_.kv_heads * channels)), lengths;
  CopyElements(parameters.null_key,
               TensorView(unit.data(), DType::kF32, parameters.null_key.shape()));
  for (int64_t h = 0; h < problem_.kv_heads; ++h) {
    float* row = unit.data() + h * channels;
    const double length = LengthOf(row, channels);
    for (int64_t c = 0; c < channels; ++c) row[c] = static_cast<float>(row[c] / length);
    lengths.push_back(static_cast<float>(length));
  }
  TFB_ASSIGN_OR_RETURN(null_keys_, DeviceArray<float>::Create(device_, unit));
  TFB_ASSIGN_OR_RETURN(null_lengths_, DeviceArray<float>::Create(device_, lengths));
  return absl::OkStatus();
}

// ---- What a Run keeps ----

StoreReading::Kept StoreReading::LayOutKept(Workspace& workspace) const {
  const Shape rows = {problem_.batch, problem_.kv_heads, given_rows_ + problem_.query_tokens,
                      problem_.head_dim};
  const Shape read = {problem_.batch, problem_.query_heads, problem_.query_tokens, shape_.k};
  Kept kept;
  kept.retrieved = TensorView(workspace.Take<int64_t>(NumElements(read)), DType::kI64, read);
  kept.keys = TensorView(workspace.Take<float>(NumElements(rows)), DType::kF32, rows);
  kept.values = TensorView(workspace.Take<float>(NumElements(rows)), DType::kF32, rows);
  return kept;
}

size_t StoreReading::kept_bytes() const {
  return Workspace::Measure([this](Workspace& workspace) { LayOutKept(workspace); });
}

absl::Status StoreReading::KeepGiven(const Kept& kept, const MemoryStore& store,
                                     const Execution& execution) const {
  if (given_rows_ == 0) return absl::OkStatus();
  return store.CopyTo(Slice(kept.keys, 2, 0, given_rows_), Slice(kept.values, 2, 0, given_rows_),
                      execution);
}

absl::Status StoreReading::Keep(const Kept& kept, int64_t begin, const ConstTensorView& k,
                                const ConstTensorView& v, const Execution& execution) const {
  const auto keep = [&](const ConstTensorView& from, RowLength length, const TensorView& to) {
    CopyToRingCall call;
    call.from = from;
    call.length = length;
    call.to =
        TensorView(to.mutable_data(), DType::kF32, {to.dim(0) * to.dim(1), to.dim(2), to.dim(3)});
    call.first_place = given_rows_ + begin;
    return CopyToRing(device_, call, execution);
  };
  TFB_RETURN_IF_ERROR(keep(k, RowLength::kUnit, kept.keys));
  return keep(v, RowLength::kKept, kept.values);
}

absl::Status StoreReading::CopyRetrieved(const TensorView& from, const TensorView& to,
                                         const Execution& execution) const {
  CopyOfTokens copy = {};
  copy.from = from.At<int64_t>(0);
  copy.to = to.MutableAt<int64_t>(0);
  std::copy_n(from.strides.data(), 4, copy.from_strides);
  std::copy_n(to.strides.data(), 4, copy.to_strides);
  copy.heads = from.dim(1);
  copy.tokens = from.dim(2);
  copy.k = from.dim(3);
  return ForEach(device_, from.num_elements(), copy, execution);
}

// ---- Reading again ----

StoreReads StoreReading::LayOut(int64_t tokens, bool has_gradients, Workspace& workspace) const {
  const int64_t slots = shape_.k + (shape_.has_null ? 1 : 0);
  StoreReads reads = {};
  reads.numbers = workspace.Take<QueryNumbers>(rows(tokens));
  reads.cosines = workspace.Take<float>(rows(tokens) * slots);
  reads.weights = workspace.Take<float>(rows(tokens) * slots);
  if (has_gradients) reads.products = workspace.Take<float>(rows(tokens) * slots);
  reads.heads = problem_.query_heads;
  reads.group = problem_.group();
  reads.tokens = tokens;
  reads.channels = problem_.head_dim;
  return reads;
}

size_t StoreReading::workspace_bytes() const {
  size_t of_sums = 0;
  const size_t of_reads = Workspace::Measure([&](Workspace& workspace) {
    const StoreReads reads = LayOut(shape_.max_segment, /*has_gradients=*/true, workspace);
    of_sums = SumInRunsBytes<SumsOfReads>(SumsOfReads::ShapeOf(reads, problem_.batch));
    if (!shape_.has_null) return;
    const SumShape of_null = SumsOfNull::ShapeOf(reads, problem_.batch);
    of_sums = std::max(of_sums, SumInRunsBytes<SumsOfNull>(of_null));
  });
  return of_reads + of_sums;
}

StoreReads StoreReading::ReadsOf(const Segment& segment, const ConstTensorView& dy,
                                 Workspace& workspace) const {
  StoreReads reads = LayOut(segment.q.dim(2), !dy.empty(), workspace);
  reads.q = ToDeviceView(segment.q);
  reads.local = ToDeviceView(segment.local);
  if (!dy.empty()) reads.dy = ToDeviceView(dy);
  reads.keys = ToDeviceView(segment.kept.keys);
  reads.values = ToDeviceView(segment.kept.values);
  reads.retrieved = segment.kept.retrieved.At<int64_t>(0);
  reads.first_row = given_rows_ - given_store_;
  if (shape_.has_null) {
    reads.null_keys = null_keys_.data();
    reads.null_values = null_values_.data();
    reads.null_lengths = null_lengths_.data();
  }
  reads.scales = scales_.data();
  if (shape_.joins) {
    reads.log_sum_exp = ToDeviceView(segment.log_sum_exp);
  } else {
    reads.gates = gates_.data();
  }
  reads.query_tokens = problem_.query_tokens;
  reads.begin = segment.begin;
  reads.k = shape_.k;
  return reads;
}

absl::Status StoreReading::Weigh(const StoreReads& reads, const TensorView& of_log_sum_exp,
                                 const Execution& execution) const {
  TFB_RETURN_IF_ERROR(
      ForEach(device_, rows(reads.tokens) * reads.slots(), ScoresOfReads{reads}, execution));
  float* const of_sums = of_log_sum_exp.empty() ? nullptr : of_log_sum_exp.MutableAt<float>(0);
  return ForEach(device_, rows(reads.tokens), WeightsOfReads{reads, of_sums}, execution);
}

absl::Status StoreReading::Mix(const Segment& segment, const TensorView& y,
                               const Execution& execution) const {
  Workspace workspace(execution.workspace);
  const StoreReads reads = ReadsOf(segment, /*dy=*/{}, workspace);
  TFB_RETURN_IF_ERROR(Weigh(reads, /*of_log_sum_exp=*/{}, execution));
  return ForEachInRows(device_, rows(reads.tokens), reads.channels,
                       MixOfReads{reads, ToDeviceView(y)}, execution);
}

// ---- Gradients ----

StoreReading::Sums StoreReading::LayOutSums(Workspace& workspace) const {
  const int64_t of_null = shape_.has_null ? problem_.kv_heads * problem_.head_dim : 0;
  Sums sums;
  sums.gate = workspace.Take<double>(problem_.query_heads);
  sums.scale = workspace.Take<double>(problem_.query_heads);
  sums.null_key = workspace.Take<double>(of_null);
  sums.null_value = workspace.Take<double>(of_null);
  return sums;
}

absl::Status StoreReading::Backward(const Segment& segment, const Gradients& gradients,
                                    const Execution& execution) const {
  Workspace workspace(execution.workspace);
  const StoreReads reads = ReadsOf(segment, gradients.dy, workspace);
  TFB_RETURN_IF_ERROR(Weigh(reads, gradients.dlog_sum_exp, execution));
  const Sums& sums = gradients.sums;
  Execution rest = execution;
  rest.workspace = workspace.Rest();
  const SumsOfReads of_reads = {reads, sums.gate, sums.scale};
  TFB_RETURN_IF_ERROR(
      SumInRuns(device_, SumsOfReads::ShapeOf(reads, problem_.batch), of_reads, rest));
  if (shape_.has_null) {
    const SumsOfNull of_null = {reads, sums.null_key, sums.null_value};
    TFB_RETURN_IF_ERROR(
        SumInRuns(device_, SumsOfNull::ShapeOf(reads, problem_.batch), of_null, rest));
  }
  // This may overwrite dy, which the sums have read.
  const GradientsOfReads of_queries = {reads, ToDeviceView(gradients.dq),
                                       ToDeviceView(gradients.dlocal)};
  return ForEachInRows(device_, rows(reads.tokens), reads.channels, of_queries, execution);
}

}  // namespace tfb::memorizing
