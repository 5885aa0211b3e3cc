#include "memory/memorizing/memory_store.h"

#include <algorithm>
#include <cmath>

#include "Eigen/Core"
#include "core/cuda/runtime.h"
#include "core/flash/rows.h"
#include "core/status.h"
#include "memory/memorizing/memorizing_cuda.h"

namespace tfb {
namespace {

constexpr int64_t kTokensOfTask = 32;

void DivideByNorm(float* row, int64_t channels) {
  double square = 0;
  for (int64_t c = 0; c < channels; ++c) square += static_cast<double>(row[c]) * row[c];
  const double norm = std::max(std::sqrt(square), kLeastNorm);
  for (int64_t c = 0; c < channels; ++c) row[c] = static_cast<float>(row[c] / norm);
}

// The softmax of k scores, best first, over the rows of `values` in the slots. Returns false where
// none was found.
bool ReadSlots(const int32_t* slots, const float* scores, int64_t k, float scale,
               const float* values, Eigen::Ref<Eigen::ArrayXf> sum) {
  if (slots[0] < 0) return false;
  float weights = 0;
  sum.setZero();
  for (int64_t n = 0; n < k && slots[n] >= 0; ++n) {
    const float weight = std::exp(scale * (scores[n] - scores[0]));
    const float* value = values + slots[n] * sum.size();
    weights += weight;
    sum += weight * Eigen::Map<const Eigen::ArrayXf>(value, sum.size());
  }
  sum /= weights;
  return true;
}

}  // namespace

absl::StatusOr<MemoryStore> MemoryStore::Create(Device device, const Problem& problem,
                                                const StoreShape& shape) {
  MemoryStore store(device, problem, shape);
  if (device != Device::kCpu) store.dtype_ = problem.dtype;
  const int64_t bytes = store.rows() * shape.slots() * problem.head_dim * SizeOf(store.dtype_);
  TFB_ASSIGN_OR_RETURN(store.keys_, DeviceArray<std::byte>::Allocate(device, bytes));
  TFB_ASSIGN_OR_RETURN(store.values_, DeviceArray<std::byte>::Allocate(device, bytes));
  return store;
}

absl::Status MemoryStore::Setup(const ConstTensorView& gate, const ConstTensorView& scale) {
  TFB_ASSIGN_OR_RETURN(gates_, CopyFloats(device_, gate));
  TFB_ASSIGN_OR_RETURN(scales_, CopyFloats(device_, scale));
  return absl::OkStatus();
}

int64_t MemoryStore::entries() const { return std::max<int64_t>(kept() - shape_.lag, 0); }

void MemoryStore::StoreTokens(int32_t* slots, const TensorView& retrieved, int64_t offset) const {
  int32_t* const end = std::find(slots, slots + shape_.k, -1);
  const auto age = [this](int32_t slot) {
    return slot < oldest() ? slot - oldest() + shape_.slots() : slot - oldest();
  };
  std::sort(slots, end, [&age](int32_t a, int32_t b) { return age(a) < age(b); });
  int64_t* to = static_cast<int64_t*>(retrieved.mutable_data()) + offset;
  for (int64_t n = 0; n < shape_.k; ++n, to += retrieved.stride(3)) {
    *to = slots[n] < 0 ? -1 : tokens_ - kept() + age(slots[n]);
  }
}

TensorView MemoryStore::Ring(const DeviceArray<std::byte>& memory) const {
  return TensorView(memory.mutable_data(), dtype_, {rows(), shape_.slots(), problem_.head_dim});
}

MemoryStore::Scratch MemoryStore::LayOut(int64_t tokens, Workspace& workspace) const {
  const Shape queries = {rows(), tokens, problem_.head_dim};
  const int64_t hits = rows() * tokens * shape_.k;
  float* data = workspace.Take<float>(NumElements(queries));
  int32_t* slots = workspace.Take<int32_t>(hits);
  return {TensorView(data, DType::kF32, queries), slots, workspace.Take<float>(hits)};
}

SearchSizes MemoryStore::LargestSearch() const {
  return {rows(),         rows(),   shape_.max_segment, problem_.head_dim,
          shape_.slots(), shape_.k, shape_.selection};
}

size_t MemoryStore::workspace_bytes(int threads) const {
  return Workspace::Measure([&](Workspace& workspace) { LayOut(shape_.max_segment, workspace); }) +
         SearchWorkspaceBytes(device_, LargestSearch(), threads);
}

absl::Status MemoryStore::Read(const ConstTensorView& q, const TensorView& heads,
                               const TensorView& retrieved, const Execution& execution) const {
  const bool nothing = entries() == 0 && retrieved.empty();
  if (nothing || rows() == 0) return absl::OkStatus();
  Workspace workspace(execution.workspace);
  const Scratch scratch = LayOut(q.dim(2), workspace);
  Execution rest = execution;
  rest.workspace = workspace.Rest();
  TFB_RETURN_IF_ERROR(CopyRows(q, 0, /*unit=*/true, scratch.queries, 0, rest));

  SearchCall call;
  call.keys = Ring(keys_);
  call.queries = scratch.queries;
  call.entries = entries();
  call.oldest = oldest();
  call.k = shape_.k;
  call.selection = shape_.selection;
  call.slots = scratch.slots;
  call.scores = scratch.scores;
  TFB_RETURN_IF_ERROR(Search(device_, call, rest));
  if (device_ != Device::kCpu) return MixOnCuda(scratch, heads, retrieved, rest);
  MixOnCpu(scratch, heads, retrieved, rest);
  return absl::OkStatus();
}

absl::Status MemoryStore::Append(const ConstTensorView& k, const ConstTensorView& v,
                                 const Execution& execution) {
  // Of more tokens than there are slots the last ones stay.
  const int64_t skip = std::max<int64_t>(k.dim(2) - shape_.slots(), 0);
  const int64_t place = (tokens_ + skip) % shape_.slots();
  TFB_RETURN_IF_ERROR(CopyRows(k, skip, /*unit=*/true, Ring(keys_), place, execution));
  TFB_RETURN_IF_ERROR(CopyRows(v, skip, /*unit=*/false, Ring(values_), place, execution));
  tokens_ += k.dim(2);
  return absl::OkStatus();
}

absl::Status MemoryStore::CopyRows(const ConstTensorView& from, int64_t skip, bool unit,
                                   const TensorView& to, int64_t first_place,
                                   const Execution& execution) const {
  const int64_t tokens = from.dim(2) - skip, heads = problem_.query_heads, channels = from.dim(3);
  if (device_ != Device::kCpu) {
    const ConstTensorView kept = Slice(from, 2, skip, tokens);
    const CopyRowsArguments arguments = {
        ToDeviceView(kept), ToDeviceView(to), problem_.batch, heads, tokens,
        channels,           first_place,      to.dim(1),      unit};
    TFB_ASSIGN_OR_RETURN(CudaRuntime * runtime, CudaRuntime::For(device_));
    return ToStatus(
        KernelsOn<MemorizingKernels>(runtime->target()).copy_rows(arguments, execution.stream));
  }
  const int64_t tasks = (tokens + kTokensOfTask - 1) / kTokensOfTask;
  execution.pool->ParallelFor(rows() * tasks, [&](int64_t task, int) {
    const int64_t row = task / tasks, first = task % tasks * kTokensOfTask;
    for (int64_t t = first; t < std::min(first + kTokensOfTask, tokens); ++t) {
      float* place = to.MutableAt<float>(row, (first_place + t) % to.dim(1));
      LoadRow(from, from.Offset(row / heads, row % heads, skip + t), from.stride(3), channels,
              place);
      if (unit) DivideByNorm(place, channels);
    }
  });
  return absl::OkStatus();
}

void MemoryStore::MixOnCpu(const Scratch& found, const TensorView& heads,
                           const TensorView& retrieved, const Execution& execution) const {
  const int64_t tokens = heads.dim(2), channels = heads.dim(3), k = shape_.k;
  const int64_t tasks = (tokens + kTokensOfTask - 1) / kTokensOfTask;
  const TensorView values = Ring(values_);
  execution.pool->ParallelFor(rows() * tasks, [&](int64_t task, int) {
    float memory[kMaxHeadDim];
    Eigen::Map<Eigen::ArrayXf> of_memory(memory, channels);
    const int64_t row = task / tasks, first = task % tasks * kTokensOfTask;
    const int64_t b = row / problem_.query_heads, h = row % problem_.query_heads;
    const float gate = 1 / (1 + std::exp(-gates_.data()[h]));
    const float scale = std::abs(scales_.data()[h]);
    for (int64_t t = first; t < std::min(first + kTokensOfTask, tokens); ++t) {
      int32_t* slots = found.slots + (row * tokens + t) * k;
      const float* scores = found.scores + (row * tokens + t) * k;
      if (ReadSlots(slots, scores, k, scale, values.At<float>(row), of_memory)) {
        Eigen::Map<Eigen::ArrayXf, 0, Eigen::InnerStride<>> out(
            heads.MutableAt<float>(b, h, t), channels, Eigen::InnerStride<>(heads.stride(3)));
        out = gate * of_memory + (1 - gate) * out;
      }
      if (!retrieved.empty()) StoreTokens(slots, retrieved, retrieved.Offset(b, h, t));
    }
  });
}

absl::Status MemoryStore::MixOnCuda(const Scratch& found, const TensorView& heads,
                                    const TensorView& retrieved, const Execution& execution) const {
  MixArguments arguments = {};
  arguments.slots = found.slots;
  arguments.scores = found.scores;
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

}  // namespace tfb
