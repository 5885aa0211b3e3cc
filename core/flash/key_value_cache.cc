#include "core/flash/key_value_cache.h"

#include <algorithm>
#include <utility>

#include "core/flash/key_ring.h"
#include "core/flash/rows.h"
#include "core/status.h"

namespace tfb {

absl::StatusOr<KeyValueCache::Memory> KeyValueCache::Allocate(Device device, DType dtype,
                                                              const Shape& shape) {
  Memory memory;
  if (device == Device::kCpu) {
    TFB_ASSIGN_OR_RETURN(memory.on_host, Tensor::Allocate(dtype, shape));
    memory.view = memory.on_host.view();
    return memory;
  }
  TFB_ASSIGN_OR_RETURN(CudaRuntime * runtime, CudaRuntime::For(device));
  const size_t bytes = static_cast<size_t>(NumElements(shape) * SizeOf(dtype));
  TFB_ASSIGN_OR_RETURN(memory.on_device, runtime->Allocate(bytes));
  memory.view = TensorView(memory.on_device.data(), dtype, shape);
  return memory;
}

absl::StatusOr<KeyValueCache> KeyValueCache::Create(Device device, const Problem& problem,
                                                    int64_t window_tokens) {
  KeyValueCache cache;
  cache.device_ = device;
  cache.kv_heads_ = problem.kv_heads;
  // A window of n tokens touches at most ceil((n - 1) / 64) + 1 tiles, in the worst alignment.
  cache.tiles_ = (std::max<int64_t>(window_tokens, 1) + 2 * kFlashTile - 2) / kFlashTile;
  if (device != Device::kCpu) {
    const auto ring = [&](int64_t channels) {
      return Allocate(device, problem.dtype,
                      {problem.batch, problem.kv_heads, cache.tiles_ * kFlashTile, channels});
    };
    TFB_ASSIGN_OR_RETURN(cache.keys_, ring(problem.head_dim));
    TFB_ASSIGN_OR_RETURN(cache.values_, ring(problem.value_dim));
    return cache;
  }
  const int64_t heads = problem.batch * problem.kv_heads;
  TFB_ASSIGN_OR_RETURN(
      cache.keys_, Allocate(device, DType::kF32,
                            {heads, cache.tiles_, PackedKeyDepth(problem.head_dim), kFlashTile}));
  TFB_ASSIGN_OR_RETURN(cache.values_, Allocate(device, DType::kF32,
                                               {heads, cache.tiles_, kFlashTile,
                                                PackedValueRow(problem.value_dim)}));
  TFB_ASSIGN_OR_RETURN(cache.finite_, Allocate(device, DType::kU8, {heads, cache.tiles_}));
  return cache;
}

absl::Status KeyValueCache::Append(const ConstTensorView& k, const ConstTensorView& v,
                                   const Execution& execution) {
  if (device_ == Device::kCpu) {
    execution.pool->ParallelFor(keys_.view.dim(0),
                                [&](int64_t head, int) { AppendHead(head, k, v); });
  } else {
    TFB_RETURN_IF_ERROR(AppendOnCuda(k, v, execution));
  }
  tokens_ += k.dim(2);
  return absl::OkStatus();
}

void KeyValueCache::SetKeys(int64_t token, FlashCall* call) const {
  const int64_t first_tile = token / kFlashTile % tiles_;
  if (device_ == Device::kCpu) {
    PackedKeysAndValues& packed = call->packed;
    packed.keys = keys_.view.At<float>(0);
    packed.values = values_.view.At<float>(0);
    packed.finite = finite_.view.At<uint8_t>(0);
    packed.tiles = tiles_;
    packed.first_tile = first_tile;
  } else {
    call->k = keys_.view;
    call->v = values_.view;
    call->ring = {tiles_, first_tile};
  }
}

void KeyValueCache::AppendHead(int64_t head, const ConstTensorView& k, const ConstTensorView& v) {
  const int64_t b = head / kv_heads_, h = head % kv_heads_;
  float key[kMaxHeadDim];
  for (int64_t t = 0; t < k.dim(2); ++t) {
    const int64_t place = (tokens_ + t) / kFlashTile % tiles_, row = (tokens_ + t) % kFlashTile;
    float* keys = keys_.view.MutableAt<float>(head, place);
    float* values = values_.view.MutableAt<float>(head, place);
    uint8_t& finite = *finite_.view.MutableAt<uint8_t>(head, place);
    // Keys that do not exist yet still take part in products, and are masked afterwards.
    if (row == 0) {
      std::fill_n(keys, keys_.view.stride(1), 0.0f);
      std::fill_n(values, values_.view.stride(1), 0.0f);
      finite = 1;
    }
    LoadRow(k, k.Offset(b, h, t), k.stride(3), k.dim(3), key);
    for (int64_t c = 0; c < k.dim(3); ++c) keys[c * kFlashTile + row] = key[c];
    float* value = values + row * values_.view.dim(3);
    LoadRow(v, v.Offset(b, h, t), v.stride(3), v.dim(3), value);
    finite = finite != 0 && AllFinite(value, v.dim(3)) ? 1 : 0;
  }
}

absl::Status KeyValueCache::AppendOnCuda(const ConstTensorView& k, const ConstTensorView& v,
                                         const Execution& execution) const {
  KeyRingArguments arguments;
  arguments.keys = {ToDeviceView(k), ToDeviceView(keys_.view), k.dim(3)};
  arguments.values = {ToDeviceView(v), ToDeviceView(values_.view), v.dim(3)};
  arguments.batch = k.dim(0);
  arguments.heads = kv_heads_;
  arguments.tokens = k.dim(2);
  arguments.places = tiles_ * kFlashTile;
  arguments.first_place = tokens_ % arguments.places;
  TFB_ASSIGN_OR_RETURN(CudaRuntime * runtime, CudaRuntime::For(device_));
  return ToStatus(KernelsOn<KeyRingKernels>(runtime->target()).append(arguments, execution.stream));
}

}  // namespace tfb
