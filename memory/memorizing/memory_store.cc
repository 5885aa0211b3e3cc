#include "memory/memorizing/memory_store.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "Eigen/Core"
#include "core/cuda/runtime.h"
#include "core/flash/rows.h"
#include "core/layers/copy_rows.h"
#include "core/status.h"
#include "memory/memorizing/memorizing_cuda.h"

namespace tfb::memorizing {
namespace {

constexpr int64_t kTokensOfTask = 32;

void MakeLength(float length, float* row, int64_t channels) {
  double square = 0;
  for (int64_t c = 0; c < channels; ++c) square += static_cast<double>(row[c]) * row[c];
  const double factor = length / std::max(std::sqrt(square), kLeastNorm);
  for (int64_t c = 0; c < channels; ++c) row[c] = static_cast<float>(row[c] * factor);
}

// Computes the softmax of k scores, best first, over the rows of `values` in the slots. Returns the
// log-sum-exp of the scaled scores, -inf where none was found.
float ReadSlots(const int32_t* slots, const float* scores, int64_t k, float scale,
                const float* values, Eigen::Ref<Eigen::ArrayXf> sum) {
  if (slots[0] < 0) return -std::numeric_limits<float>::infinity();
  for (int64_t n = 0; n < k && slots[n] >= 0; ++n) {  // the rows lie anywhere in memory
    const float* value = values + slots[n] * sum.size();
    for (int64_t c = 0; c < sum.size(); c += 16) __builtin_prefetch(value + c);
  }
  float weights = 0;
  sum.setZero();
  for (int64_t n = 0; n < k && slots[n] >= 0; ++n) {
    const float weight = std::exp(scale * (scores[n] - scores[0]));
    const float* value = values + slots[n] * sum.size();
    weights += weight;
    sum += weight * Eigen::Map<const Eigen::ArrayXf>(value, sum.size());
  }
  sum /= weights;
  return scale * scores[0] + std::log(weights);
}

float Logistic(float x) { return 1 / (1 + std::exp(-x)); }

// Returns [rows][channels] in float, each row divided by its norm.
std::vector<float> UnitRows(const ConstTensorView& rows) {
  std::vector<float> unit(static_cast<size_t>(rows.num_elements()));
  CopyElements(rows, TensorView(unit.data(), DType::kF32, rows.shape()));
  for (int64_t row = 0; row < rows.dim(0); ++row) {
    MakeLength(1, unit.data() + row * rows.dim(1), rows.dim(1));
  }
  return unit;
}

// Returns [batch, heads, tokens, head_dim] of one head.
TensorView OfHead(const TensorView& view, int64_t h) {
  TensorView head = Slice(view, 1, h, 1);
  head.dims = {view.dim(0), view.dim(2), view.dim(3)};
  head.strides = {view.stride(0), view.stride(2), view.stride(3)};
  head.rank = 3;
  return head;
}

}  // namespace

absl::Status CopyToRing(Device device, const CopyToRingCall& call, const Execution& execution) {
  const ConstTensorView& from = call.from;
  const int64_t batch = from.dim(0), heads = from.dim(1), channels = from.dim(3);
  const int64_t tokens = from.dim(2) - call.skip, places = call.to.dim(1);
  if (device != Device::kCpu) {
    const ConstTensorView copied = Slice(from, 2, call.skip, tokens);
    const CopyRowsArguments arguments = {ToDeviceView(copied),
                                         ToDeviceView(call.to),
                                         batch,
                                         heads,
                                         tokens,
                                         channels,
                                         call.first_place,
                                         places,
                                         call.length,
                                         call.scales};
    TFB_ASSIGN_OR_RETURN(CudaRuntime * runtime, CudaRuntime::For(device));
    return ToStatus(
        KernelsOn<MemorizingKernels>(runtime->target()).copy_rows(arguments, execution.stream));
  }
  const int64_t tasks = (tokens + kTokensOfTask - 1) / kTokensOfTask;
  execution.pool->ParallelFor(batch * heads * tasks, [&](int64_t task, int) {
    const int64_t row = task / tasks, first = task % tasks * kTokensOfTask, h = row % heads;
    const float length = call.length == RowLength::kScale ? std::abs(call.scales[h]) : 1;
    for (int64_t t = first; t < std::min(first + kTokensOfTask, tokens); ++t) {
      float* place = call.to.MutableAt<float>(row, (call.first_place + t) % places);
      LoadRow(from, from.Offset(row / heads, h, call.skip + t), from.stride(3), channels, place);
      if (call.length != RowLength::kKept) MakeLength(length, place, channels);
    }
  });
  return absl::OkStatus();
}

absl::StatusOr<MemoryStore> MemoryStore::Create(Device device, const Problem& problem,
                                                const StoreShape& shape) {
  MemoryStore store(device, problem, shape);
  if (device != Device::kCpu) store.dtype_ = problem.dtype;
  const int64_t bytes = store.key_rows() * shape.slots() * problem.head_dim * SizeOf(store.dtype_);
  TFB_ASSIGN_OR_RETURN(store.keys_, DeviceArray<std::byte>::Allocate(device, bytes));
  TFB_ASSIGN_OR_RETURN(store.values_, DeviceArray<std::byte>::Allocate(device, bytes));
  return store;
}

absl::Status MemoryStore::Setup(const Parameters& parameters) {
  if (!shape_.joins) {
    TFB_ASSIGN_OR_RETURN(gates_, CopyFloats(device_, parameters.gate));
  }
  TFB_ASSIGN_OR_RETURN(scales_, CopyFloats(device_, parameters.scale));
  if (shape_.has_null) {
    TFB_ASSIGN_OR_RETURN(null_keys_,
                         DeviceArray<float>::Create(device_, UnitRows(parameters.null_key)));
    TFB_ASSIGN_OR_RETURN(null_values_, CopyFloats(device_, parameters.null_value));
  }
  TFB_ASSIGN_OR_RETURN(
      dense_, FlashEngine::CreateForStream(device_, DenseProblem(shape_.max_segment, shape_.k)));
  return absl::OkStatus();
}

int64_t MemoryStore::entries() const { return std::max<int64_t>(kept() - shape_.lag, 0); }

TensorView MemoryStore::Ring(const DeviceArray<std::byte>& memory) const {
  const Shape shape = {key_rows(), shape_.slots(), problem_.head_dim};
  return TensorView(memory.mutable_data(), dtype_, shape);
}

TensorView MemoryStore::LayOutQueries(int64_t tokens, Workspace& workspace) const {
  const Shape shape = {rows(), tokens, problem_.head_dim};
  return TensorView(workspace.Take<float>(NumElements(shape)), DType::kF32, shape);
}

MemoryStore::Found MemoryStore::LayOutSlots(int64_t tokens, Workspace& workspace) const {
  Found found;
  found.slots = workspace.Take<int32_t>(rows() * tokens * shape_.k);
  found.scores = workspace.Take<float>(rows() * tokens * shape_.k);
  return found;
}

MemoryStore::Found MemoryStore::LayOutMean(int64_t tokens, Workspace& workspace) const {
  Found found;
  found.mean = workspace.Take<float>(rows() * tokens * problem_.head_dim);
  if (shape_.weighs()) found.log_sum_exp = workspace.Take<float>(rows() * tokens);
  return found;
}

SearchSizes MemoryStore::LargestSearch() const {
  return {key_rows(),     rows(),   shape_.max_segment, problem_.head_dim,
          shape_.slots(), shape_.k, shape_.selection};
}

Problem MemoryStore::DenseProblem(int64_t queries, int64_t entries) const {
  Problem problem = problem_;
  problem.query_tokens = queries;
  problem.kv_tokens = entries;
  problem.causal = false;
  return problem;
}

size_t MemoryStore::workspace_bytes(int threads) const {
  const int64_t tokens = shape_.max_segment;
  const auto bytes_of = [](const auto& lay_out) { return Workspace::Measure(lay_out); };
  size_t search = 0;
  if (shape_.lag > 0 || shape_.k < shape_.capacity) {
    search = bytes_of([&](Workspace& workspace) { LayOutSlots(tokens, workspace); }) +
             SearchWorkspaceBytes(device_, LargestSearch(), threads);
  }
  size_t dense = 0;  // with fewer entries, more heads are packed at a time
  for (int64_t entries = shape_.k; entries > 0; entries = (entries - 1) / kFlashTile * kFlashTile) {
    dense = std::max(dense, FlashEngine::WorkspaceBytes(device_, DenseProblem(tokens, entries),
                                                        /*relative_keys=*/false, threads));
  }
  dense += bytes_of([&](Workspace& workspace) { LayOutMean(tokens, workspace); });
  return bytes_of([&](Workspace& workspace) { LayOutQueries(tokens, workspace); }) +
         std::max(search, dense);
}

absl::Status MemoryStore::Read(const ConstTensorView& q, const TensorView& heads,
                               const ConstTensorView& log_sum_exp, const TensorView& retrieved,
                               const Execution& execution) {
  const bool nothing = entries() == 0 && !shape_.has_null && retrieved.empty();
  if (nothing || rows() == 0) return absl::OkStatus();
  Workspace workspace(execution.workspace);
  const TensorView queries = LayOutQueries(q.dim(2), workspace);
  Execution rest = execution;
  rest.workspace = workspace.Rest();
  const RowLength length = reads_all() ? RowLength::kScale : RowLength::kUnit;
  TFB_RETURN_IF_ERROR(CopyRows(q, 0, length, queries, 0, rest));
  TFB_ASSIGN_OR_RETURN(const Found found,
                       reads_all() ? ReadAll(queries, rest) : FindBest(queries, rest));
  const Reading reading = {queries, log_sum_exp, found};
  if (device_ != Device::kCpu) return MixOnCuda(reading, heads, retrieved, rest);
  MixOnCpu(reading, heads, retrieved, rest);
  return absl::OkStatus();
}

absl::StatusOr<MemoryStore::Found> MemoryStore::FindBest(const TensorView& queries,
                                                         const Execution& execution) const {
  Workspace workspace(execution.workspace);
  const Found found = LayOutSlots(queries.dim(1), workspace);
  SearchCall call;
  call.keys = Ring(keys_);
  call.queries = queries;
  call.entries = entries();
  call.oldest = oldest();
  call.k = shape_.k;
  call.selection = shape_.selection;
  call.slots = found.slots;
  call.scores = found.scores;
  Execution rest = execution;
  rest.workspace = workspace.Rest();
  TFB_RETURN_IF_ERROR(Search(device_, call, rest));
  return found;
}

// The keys are in the order of their slots, which makes no difference to a mean.
absl::StatusOr<MemoryStore::Found> MemoryStore::ReadAll(const TensorView& queries,
                                                        const Execution& execution) {
  Workspace workspace(execution.workspace);
  const int64_t tokens = queries.dim(1);
  const Found found = LayOutMean(tokens, workspace);
  if (entries() == 0) return found;
  const auto by_batch = [&](const TensorView& rows) { return SplitAxis(rows, 0, problem_.batch); };
  FlashCall call = dense_.NewCall();
  call.scale = 1;  // the queries contain the heads' scales
  call.q = by_batch(queries);
  call.k = Slice(by_batch(Ring(keys_)), 2, 0, entries());
  call.v = Slice(by_batch(Ring(values_)), 2, 0, entries());
  call.out = by_batch(TensorView(found.mean, DType::kF32, queries.shape()));
  if (shape_.weighs()) {
    call.log_sum_exp = by_batch(TensorView(found.log_sum_exp, DType::kF32, {rows(), tokens}));
  }
  Band all;
  all.high = entries();
  if (device_ == Device::kCpu) {
    call.schedule = &schedule_.Build(tokens, entries(), all);
  } else {
    call.band = &all;
  }
  Execution rest = execution;
  rest.workspace = workspace.Rest();
  TFB_RETURN_IF_ERROR(dense_.Run(DenseProblem(tokens, entries()), call, rest));
  return found;
}

absl::Status MemoryStore::Append(const ConstTensorView& k, const ConstTensorView& v,
                                 const Execution& execution) {
  // If there are more tokens than slots, the last ones stay.
  const int64_t skip = std::max<int64_t>(k.dim(2) - shape_.slots(), 0);
  const int64_t place = (tokens_ + skip) % shape_.slots();
  TFB_RETURN_IF_ERROR(CopyRows(k, skip, RowLength::kUnit, Ring(keys_), place, execution));
  TFB_RETURN_IF_ERROR(CopyRows(v, skip, RowLength::kKept, Ring(values_), place, execution));
  tokens_ += k.dim(2);
  return absl::OkStatus();
}

absl::Status MemoryStore::Recall(int64_t tokens, const ConstTensorView& k, const ConstTensorView& v,
                                 const Execution& execution) {
  tokens_ = tokens - k.dim(2);
  return Append(k, v, execution);
}

absl::Status MemoryStore::CopyTo(const TensorView& keys, const TensorView& values,
                                 const Execution& execution) const {
  if (rows() == 0) return absl::OkStatus();
  const auto copy = [&](const TensorView& ring, const TensorView& to) -> absl::Status {
    for (int64_t h = 0; h < problem_.kv_heads && !to.empty(); ++h) {
      CopyRowsCall call;
      call.from = OfHead(SplitAxis(ring, 0, problem_.batch), h);
      call.from_first = oldest();
      call.to = OfHead(to, h);
      call.rows = to.dim(2);
      TFB_RETURN_IF_ERROR(tfb::CopyRows(device_, call, execution));
    }
    return absl::OkStatus();
  };
  TFB_RETURN_IF_ERROR(copy(Ring(keys_), keys));
  return copy(Ring(values_), values);
}

absl::Status MemoryStore::CopyRows(const ConstTensorView& from, int64_t skip, RowLength length,
                                   const TensorView& to, int64_t first_place,
                                   const Execution& execution) const {
  return CopyToRing(device_, {from, skip, length, scales_.data(), to, first_place}, execution);
}

// Adds the null slot of head h to what was read.
void MemoryStore::AddNull(const Reading& reading, int64_t query, int64_t h, OneRead* read) const {
  const int64_t channels = problem_.head_dim, of_head = h / problem_.group() * channels;
  using Row = Eigen::Map<const Eigen::ArrayXf>;
  const Row q(reading.queries.At<float>(0) + query * channels, channels);
  const Row key(null_keys_.data() + of_head, channels),
      value(null_values_.data() + of_head, channels);
  const bool is_scaled = reading.found.slots == nullptr;
  const float score = (q * key).sum() * (is_scaled ? 1 : std::abs(scales_.data()[h]));
  const float largest = std::max(score, read->log_sum_exp);
  const float of_null = std::exp(score - largest), of_read = std::exp(read->log_sum_exp - largest);
  Eigen::Map<Eigen::ArrayXf> sum(read->sum, channels);
  if (of_read == 0) sum.setZero();
  sum = (of_null * value + of_read * sum) / (of_null + of_read);
  read->log_sum_exp = largest + std::log(of_null + of_read);
}

void MemoryStore::MixOnCpu(const Reading& reading, const TensorView& heads,
                           const TensorView& retrieved, const Execution& execution) const {
  const int64_t tokens = heads.dim(2), channels = heads.dim(3), k = shape_.k;
  const int64_t tasks = (tokens + kTokensOfTask - 1) / kTokensOfTask;
  const TensorView values = Ring(values_);
  const Found& found = reading.found;
  execution.pool->ParallelFor(rows() * tasks, [&](int64_t task, int) {
    float memory[kMaxHeadDim];
    const int64_t row = task / tasks, first = task % tasks * kTokensOfTask;
    const int64_t b = row / problem_.query_heads, h = row % problem_.query_heads;
    const float scale = std::abs(scales_.data()[h]);
    for (int64_t t = first; t < std::min(first + kTokensOfTask, tokens); ++t) {
      const int64_t query = row * tokens + t;
      int32_t* slots = found.slots == nullptr ? nullptr : found.slots + query * k;
      Eigen::Map<Eigen::ArrayXf> sum(memory, channels);
      OneRead read = {memory, -std::numeric_limits<float>::infinity()};
      if (slots != nullptr) {
        const float* of_row = values.At<float>(row / problem_.group());
        read.log_sum_exp = ReadSlots(slots, found.scores + query * k, k, scale, of_row, sum);
      } else if (entries() > 0) {
        sum = Eigen::Map<const Eigen::ArrayXf>(found.mean + query * channels, channels);
        if (shape_.weighs()) read.log_sum_exp = found.log_sum_exp[query];
      }
      const bool any = slots != nullptr ? slots[0] >= 0 : entries() > 0;
      if (shape_.has_null) AddNull(reading, query, h, &read);
      if (any || shape_.has_null) {
        const float gate =
            Logistic(shape_.joins ? read.log_sum_exp - *reading.log_sum_exp.At<float>(b, h, t)
                                  : gates_.data()[h]);
        Eigen::Map<Eigen::ArrayXf, 0, Eigen::InnerStride<>> out(
            heads.MutableAt<float>(b, h, t), channels, Eigen::InnerStride<>(heads.stride(3)));
        out = gate * sum + (1 - gate) * out;
      }
      if (!retrieved.empty()) StoreTokens(slots, retrieved, retrieved.Offset(b, h, t));
    }
  });
}

void MemoryStore::StoreTokens(int32_t* slots, const TensorView& retrieved, int64_t offset) const {
  const int64_t first = tokens_ - kept();
  const auto age = [this](int32_t slot) {
    return slot < oldest() ? slot - oldest() + shape_.slots() : slot - oldest();
  };
  if (slots != nullptr) {
    std::sort(slots, std::find(slots, slots + shape_.k, -1),
              [&age](int32_t a, int32_t b) { return age(a) < age(b); });
  }
  int64_t* to = static_cast<int64_t*>(retrieved.mutable_data()) + offset;
  for (int64_t n = 0; n < shape_.k; ++n, to += retrieved.stride(3)) {
    const bool exists = slots == nullptr ? n < entries() : slots[n] >= 0;
    *to = exists ? first + (slots == nullptr ? n : age(slots[n])) : -1;
  }
}

absl::Status MemoryStore::MixOnCuda(const Reading& reading, const TensorView& heads,
                                    const TensorView& retrieved, const Execution& execution) const {
  const Found& found = reading.found;
  MixArguments arguments = {};
  arguments.queries = reading.queries.At<float>(0);
  arguments.mean_log_sum_exp = found.log_sum_exp;
  if (shape_.joins) arguments.own_log_sum_exp = ToDeviceView(reading.log_sum_exp);
  if (shape_.has_null) {
    arguments.null_keys = null_keys_.data();
    arguments.null_values = null_values_.data();
  }
  arguments.group = problem_.group();
  arguments.slots = found.slots;
  arguments.scores = found.scores;
  arguments.mean = found.mean;
  arguments.entries = entries();
  arguments.values = ToDeviceView(Ring(values_));
  arguments.out = ToDeviceView(heads);
  arguments.gates = gates_.data();
  arguments.scales = scales_.data();
  if (!retrieved.empty()) {
    arguments.retrieved = static_cast<int64_t*>(retrieved.mutable_data());
    std::copy_n(retrieved.strides.data(), 4, arguments.retrieved_strides);
  }
  arguments.first_token = tokens_ - kept();
  arguments.oldest = oldest();
  arguments.places = shape_.slots();
  arguments.batch = problem_.batch;
  arguments.heads = problem_.query_heads;
  arguments.tokens = heads.dim(2);
  arguments.k = shape_.k;
  arguments.channels = problem_.head_dim;
  TFB_ASSIGN_OR_RETURN(CudaRuntime * runtime, CudaRuntime::For(device_));
  return ToStatus(KernelsOn<MemorizingKernels>(runtime->target()).mix(arguments, execution.stream));
}

}  // namespace tfb::memorizing
