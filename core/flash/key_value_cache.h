// A cache of a stream's keys and values in the layout that engine flash reads, so that a call with
// a few new queries repacks nothing: at 4,000 keys of 64 channels that is 2 MiB a head to read
// instead of 2 MiB to read, 2 MiB to write and 2 MiB to read again. On the CPU it is in fp32 in the
// layout of its engine; on CUDA in the problem's dtype, row by row.
#ifndef TFB_CORE_FLASH_KEY_VALUE_CACHE_H_
#define TFB_CORE_FLASH_KEY_VALUE_CACHE_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/cuda/runtime.h"
#include "core/flash/flash.h"
#include "core/problem.h"
#include "core/technique.h"
#include "core/tensor.h"

namespace tfb {

// Holds the last tokens of a stream, counted from 0, in a ring of tiles of 64 tokens. A token is
// written once and never moved; the newest tile replaces the oldest.
class KeyValueCache {
 public:
  KeyValueCache() = default;
  // Creates a cache for batch, kv_heads, head_dim, value_dim and dtype of the problem, and for
  // windows of up to `window_tokens` consecutive tokens that end with the last token appended.
  // Returns ResourceExhausted where there is no memory for it.
  static absl::StatusOr<KeyValueCache> Create(Device device, const Problem& problem,
                                              int64_t window_tokens);

  int64_t tokens() const { return tokens_; }  // tokens appended since the last Clear
  void Clear() { tokens_ = 0; }

  // Appends the next tokens, at most a window: k [batch, kv_heads, tokens, head_dim], v [batch,
  // kv_heads, tokens, value_dim], in memory of the device, of any floating dtype and strides. It
  // allocates nothing; on CUDA it enqueues on the stream.
  absl::Status Append(const ConstTensorView& k, const ConstTensorView& v,
                      const Execution& execution);

  // Takes back the last tokens, at most the last Append's, so that an Append replaces them.
  void TakeBack(int64_t tokens) { tokens_ -= tokens; }

  // Returns the first token of the tile that `token` is in, which is key 0 of a call whose window
  // begins at `token`. The call's schedule or band hides the keys between the two.
  static int64_t TileBegin(int64_t token) { return token / kFlashTile * kFlashTile; }
  // Sets the keys of the call to those from TileBegin(token) on: its `packed`, or k, v and `ring`.
  // They are valid until the next Append.
  void SetKeys(int64_t token, FlashCall* call) const;

  size_t bytes() const { return keys_.bytes() + values_.bytes() + finite_.bytes(); }

 private:
  // Contiguous memory of one device.
  struct Memory {
    Tensor on_host;
    DeviceBuffer on_device;
    TensorView view;

    size_t bytes() const { return static_cast<size_t>(view.num_elements() * SizeOf(view.dtype)); }
  };
  static absl::StatusOr<Memory> Allocate(Device device, DType dtype, const Shape& shape);

  void AppendHead(int64_t head, const ConstTensorView& k, const ConstTensorView& v);
  absl::Status AppendOnCuda(const ConstTensorView& k, const ConstTensorView& v,
                            const Execution& execution) const;

  Device device_ = Device::kCpu;
  // CPU: [batch * kv_heads, tiles, key depth, 64], [batch * kv_heads, tiles, 64, value row],
  // [batch * kv_heads, tiles]. CUDA: [batch, kv_heads, tiles * 64, head_dim | value_dim].
  Memory keys_;
  Memory values_;
  Memory finite_;
  int64_t kv_heads_ = 1;
  int64_t tiles_ = 0;
  int64_t tokens_ = 0;
};

}  // namespace tfb

#endif  // TFB_CORE_FLASH_KEY_VALUE_CACHE_H_
