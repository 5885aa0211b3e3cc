#include "core/flash/key_value_cache.h"

#include <algorithm>
#include <utility>

#include "core/flash/rows.h"
#include "core/status.h"

namespace tfb {

absl::StatusOr<KeyValueCache> KeyValueCache::Create(const Problem& problem, int64_t window_tokens) {
  KeyValueCache cache;
  cache.kv_heads_ = problem.kv_heads;
  // A window of n tokens touches ceil((n - 1) / 64) + 1 tiles where it is worst aligned.
  cache.tiles_ = (std::max<int64_t>(window_tokens, 1) + 2 * kFlashTile - 2) / kFlashTile;
  const int64_t heads = problem.batch * problem.kv_heads;
  TFB_ASSIGN_OR_RETURN(
      cache.keys_,
      Tensor::Allocate(DType::kF32,
                       Shape{heads, cache.tiles_, PackedKeyDepth(problem.head_dim), kFlashTile}));
  TFB_ASSIGN_OR_RETURN(cache.values_,
                       Tensor::Allocate(DType::kF32, Shape{heads, cache.tiles_, kFlashTile,
                                                           PackedValueRow(problem.value_dim)}));
  TFB_ASSIGN_OR_RETURN(cache.finite_, Tensor::Allocate(DType::kU8, Shape{heads, cache.tiles_}));
  return cache;
}

void KeyValueCache::Append(const ConstTensorView& k, const ConstTensorView& v, ThreadPool* pool) {
  pool->ParallelFor(keys_.dim(0), [&](int64_t head, int) { AppendHead(head, k, v); });
  tokens_ += k.dim(2);
}

PackedKeysAndValues KeyValueCache::From(int64_t token) const {
  PackedKeysAndValues packed;
  packed.keys = keys_.view().At<float>(0);
  packed.values = values_.view().At<float>(0);
  packed.finite = finite_.view().At<uint8_t>(0);
  packed.tiles = tiles_;
  packed.first_tile = token / kFlashTile % tiles_;
  return packed;
}

void KeyValueCache::AppendHead(int64_t head, const ConstTensorView& k, const ConstTensorView& v) {
  const int64_t b = head / kv_heads_, h = head % kv_heads_;
  float key[kMaxHeadDim];
  for (int64_t t = 0; t < k.dim(2); ++t) {
    const int64_t place = (tokens_ + t) / kFlashTile % tiles_, row = (tokens_ + t) % kFlashTile;
    float* keys = keys_.view().MutableAt<float>(head, place);
    float* values = values_.view().MutableAt<float>(head, place);
    uint8_t& finite = *finite_.view().MutableAt<uint8_t>(head, place);
    if (row == 0) {  // columns of keys that do not exist yet are computed with, and then masked
      std::fill_n(keys, keys_.view().stride(1), 0.0f);
      std::fill_n(values, values_.view().stride(1), 0.0f);
      finite = 1;
    }
    LoadRow(k, k.Offset(b, h, t), k.stride(3), k.dim(3), key);
    for (int64_t c = 0; c < k.dim(3); ++c) keys[c * kFlashTile + row] = key[c];
    float* value = values + row * values_.dim(3);
    LoadRow(v, v.Offset(b, h, t), v.stride(3), v.dim(3), value);
    finite = finite != 0 && AllFinite(value, v.dim(3)) ? 1 : 0;
  }
}

}  // namespace tfb
