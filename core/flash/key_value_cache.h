// Keys and values of a stream in the layout of engine flash on the CPU, so that a call with a few
// new queries repacks nothing: at 4,000 keys of 64 channels that is 2 MiB a head to read instead of
// 2 MiB to read, 2 MiB to write and 2 MiB to read again.
#ifndef TFB_CORE_FLASH_KEY_VALUE_CACHE_H_
#define TFB_CORE_FLASH_KEY_VALUE_CACHE_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/statusor.h"
#include "core/flash/flash.h"
#include "core/problem.h"
#include "core/tensor.h"
#include "core/thread_pool.h"

namespace tfb {

// The last tokens of a stream, counted from 0. A ring of tiles of 64 tokens: a token is written
// once and never moved; the oldest tile makes room for the newest.
class KeyValueCache {
 public:
  KeyValueCache() = default;
  // For batch, kv_heads, head_dim and value_dim of the problem, and for windows of up to
  // `window_tokens` consecutive tokens, of which the last one appended is one. ResourceExhausted
  // where there is no memory for it.
  static absl::StatusOr<KeyValueCache> Create(const Problem& problem, int64_t window_tokens);

  int64_t tokens() const { return tokens_; }  // appended since the last Clear
  void Clear() { tokens_ = 0; }

  // The next tokens: k [batch, kv_heads, tokens, head_dim], v [batch, kv_heads, tokens, value_dim],
  // of any floating dtype and strides. Allocates nothing.
  void Append(const ConstTensorView& k, const ConstTensorView& v, ThreadPool* pool);

  // The first token of the tile that `token` is in: key 0 of a call whose window begins at `token`.
  // Its schedule hides the keys between the two.
  static int64_t TileBegin(int64_t token) { return token / kFlashTile * kFlashTile; }
  // The keys from TileBegin(token) on, for FlashCall::packed. Good until the next Append.
  PackedKeysAndValues From(int64_t token) const;

  size_t bytes() const { return keys_.bytes() + values_.bytes() + finite_.bytes(); }

 private:
  void AppendHead(int64_t head, const ConstTensorView& k, const ConstTensorView& v);

  Tensor keys_;    // [batch * kv_heads, tiles, key depth, 64]
  Tensor values_;  // [batch * kv_heads, tiles, 64, value row]
  Tensor finite_;  // [batch * kv_heads, tiles]
  int64_t kv_heads_ = 1;
  int64_t tiles_ = 0;
  int64_t tokens_ = 0;
};

}  // namespace tfb

#endif  // TFB_CORE_FLASH_KEY_VALUE_CACHE_H_
