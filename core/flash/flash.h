// Engine flash: exact attention over a block schedule, tile by tile, without a tokens x tokens
// matrix.
//
//   s_ij = scale (q_i + u) . k_j                                content
//        + scale (q_i + w) . r_(j-i)                            relative keys, where there are any
//        + scale (q_i + w) . l_[a_i = b_j]                      label keys, by the tokens' ids a, b
//   s_ij = relu(s_ij) multiplier_(j-i)                          where there is a ReLU multiplier
//   s_ij = s_ij + bias_(j-i)                                    where there is a distance bias
//   s_ij = s_ij + self_bias [i = j] - log N_ij                  of tokens, where the call says so
//   y_i  = sum_j m_ij exp(s_ij) v_j / sum_j m_ij exp(s_ij)      m_ij = 1, or the soft span's ramp
//
// over the keys j that the schedule, the key mask and the soft span let query i see. A row without
// any key gives y_i = 0 and a log-sum-exp of -inf. Online softmax: Milakov and Gimelshein,
// arXiv:1805.02867v2; tiling: Dao et al., arXiv:2205.14135v2, algorithm 1.
//
// The rule's tables are plain arrays indexed by the offset j - i, so that the engines of all
// devices read the same data.
#ifndef TFB_CORE_FLASH_FLASH_H_
#define TFB_CORE_FLASH_FLASH_H_

#include <cstdint>
#include <functional>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "core/cuda/row_list.h"
#include "core/problem.h"
#include "core/schedule/block_schedule.h"
#include "core/technique.h"
#include "core/tensor.h"

namespace tfb {

constexpr int64_t kFlashTile =
    64;  // queries and keys of a schedule's tile, as the CPU engine wants them

// One number per head and offset j - i, from -(query_tokens - 1) to kv_tokens - 1. A row is padded
// by a tile on the right, so that a kernel may read whole tiles.
class DistanceTable {
 public:
  DistanceTable() = default;
  // value(head, offset) for each offset.
  DistanceTable(int64_t heads, int64_t query_tokens, int64_t kv_tokens,
                const std::function<float(int64_t head, int64_t offset)>& value);

  bool empty() const { return values_.empty(); }
  int64_t heads() const { return heads_; }
  int64_t row() const { return row_; }    // floats of a head
  int64_t zero() const { return zero_; }  // index of offset 0 in a row
  const std::vector<float>& values() const { return values_; }
  // Of head h % heads, for pointer arithmetic with offsets: At(h, j - i)[n] is the entry of offset
  // j - i + n.
  const float* At(int64_t head, int64_t offset) const {
    return values_.data() + head % heads_ * row_ + offset + zero_;
  }
  size_t bytes() const { return values_.size() * sizeof(float); }

 private:
  int64_t heads_ = 1;
  int64_t row_ = 0;
  int64_t zero_ = 0;  // index of offset 0
  std::vector<float> values_;
};

// One vector per head and offset j - i in [low, high]; zero outside. Stored in panels of 64
// offsets, [head_dim][64], the first panel beginning at a multiple of 64.
class RelativeKeys {
 public:
  RelativeKeys() = default;
  // row(offset) is the row of `table` [table_heads, rows, head_dim] that offset has; head h reads
  // table h % table_heads.
  RelativeKeys(const ConstTensorView& table, int64_t low, int64_t high,
               const std::function<int64_t(int64_t offset)>& row);

  bool empty() const { return panels_.empty(); }
  int64_t heads() const { return heads_; }
  int64_t low() const { return low_; }
  int64_t high() const { return high_; }
  // The panel of offsets 64 p to 64 p + 63, or null where all of them are outside [low, high].
  const float* Panel(int64_t head, int64_t p) const {
    if (p < first_panel_ || p >= first_panel_ + panel_count_) return nullptr;
    return panels_.data() +
           ((head % heads_) * panel_count_ + (p - first_panel_)) * head_dim_ * kFlashTile;
  }
  // Whether offsets 16 n to 16 n + 15, of a panel that exists, all have the vector of the offset
  // before them, as those beyond a clipped distance do.
  bool Repeats(int64_t head, int64_t n) const {
    constexpr int64_t kOfPanel = kFlashTile / kBlock;
    return repeats_[(head % heads_ * panel_count_ - first_panel_) * kOfPanel + n];
  }
  static constexpr int64_t kBlock = 16;
  size_t bytes() const { return panels_.size() * sizeof(float); }

 private:
  bool BlockRepeats(int64_t head, int64_t index) const;

  int64_t heads_ = 1;
  int64_t low_ = 0;
  int64_t high_ = -1;
  int64_t head_dim_ = 0;
  int64_t first_panel_ = 0;
  int64_t panel_count_ = 0;
  std::vector<float> panels_;
  std::vector<bool> repeats_;  // [heads][panels][kFlashTile / kBlock]
};

// Two vectors per head: one for pairs of a query and a key of different ids, one for pairs of the
// same. The ids are the call's.
struct LabelKeys {
  const float* keys = nullptr;  // [heads][2][head_dim], that of equal ids second; null: none
  int64_t heads = 1;            // head h reads h % heads
};

// Query i of head h sees key j at distance x = i + causal_offset - j with weight clip((ramp + z -
// x) / ramp, 0, 1), where z = span[b batch_stride + h head_stride + i query_stride]. Keys of weight
// 0 are not visited.
struct SoftSpan {
  const float* span = nullptr;  // null: none
  int64_t count = 0;            // floats there
  int64_t batch_stride = 0;
  int64_t head_stride = 0;
  int64_t query_stride = 0;
  float ramp = 1;  // > 0, in tokens
};

// What is not there does not act. Tables are indexed by the offset j - i - query_position.
struct ScoreRule {
  const float* content_bias = nullptr;   // u [query_heads, head_dim]
  const float* position_bias = nullptr;  // w [query_heads, head_dim]
  const RelativeKeys* relative_keys = nullptr;
  LabelKeys label_keys;
  const DistanceTable* relu_multiplier = nullptr;
  const DistanceTable* bias = nullptr;
  SoftSpan soft_span;
  // Of query 0 among the keys. 0 makes j - i the offset; the call's causal offset makes it minus
  // the distance, whatever the number of keys, so that one table serves all calls of a stream.
  int64_t query_position = 0;
};

// The schedule's row n is token tokens[b batch_stride + h / group head_stride + n] of the tensors;
// without one it is token n. h is a query head for queries, of which `group` share an order, and a
// key-value head for keys. Tokens may be a part of the tensor's, in any order: engines gather. On
// the CPU an order of queries may name a token below 0, which is none: no such row is computed.
struct TokenOrder {
  const int32_t* tokens = nullptr;
  int64_t batch_stride = 0;
  int64_t head_stride = 0;
  int64_t group = 1;

  int64_t operator()(int64_t b, int64_t h, int64_t n) const {
    return tokens == nullptr ? n : tokens[b * batch_stride + h / group * head_stride + n];
  }
};

// What a call says of pairs of tokens by which they are, not by where they stand in its orders: for
// calls that gather tokens by content. i and j are the tokens that the orders name.
//
// Slot n shows key j to query i where 0 <= a_n(i) - b_n(j) <= 1, with codes a of queries and b of
// keys: their chunks, say, in the n-th of several sortings.
struct TokenRule {
  bool causal = false;  // hides keys j > i
  int64_t own = -1;     // hides keys that slot `own` does not show; -1: none
  float self_bias = 0;  // joins the score of i = j
  // Divides the weight by the number of slots that show j to i, at least 1: of a key that as many
  // calls or places of one softmax have, the copies count as one.
  bool counts = false;
  // Codes of a slot, batch and query head or key-value head, one a token.
  const int32_t* query_codes = nullptr;
  const int32_t* key_codes = nullptr;
  int64_t slots = 0;  // kMaxTokenSlots at most
  int64_t slot_stride = 0;
  int64_t batch_stride = 0;
  int64_t head_stride = 0;

  bool hides() const { return causal || own >= 0; }
  bool adjusts() const { return self_bias != 0 || counts; }
};
constexpr int64_t kMaxTokenSlots = 64;

// Keys and values in the layout that the CPU engine computes with (see KeyValueCache), a ring of
// tiles for each head: the call's key tile t is tile (first_tile + t) % tiles.
struct PackedKeysAndValues {
  const float* keys = nullptr;      // [batch * kv_heads][tiles][PackedKeyDepth(head_dim)][64 keys]
  const float* values = nullptr;    // [batch * kv_heads][tiles][64 keys][PackedValueRow(value_dim)]
  const uint8_t* finite = nullptr;  // [batch * kv_heads][tiles] whether all values of the tile are
  int64_t tiles = 0;
  int64_t first_tile = 0;

  bool empty() const { return keys == nullptr; }
};
constexpr int64_t PackedKeyDepth(int64_t head_dim) { return (head_dim + 3) / 4 * 4; }
constexpr int64_t PackedValueRow(int64_t value_dim) { return (value_dim + 15) / 16 * 16; }

// CUDA: k and v are rings of tiles of 64 tokens, and key tile t of the call is tile (first_tile + t)
// % tiles of theirs.
struct KeyRing {
  int64_t tiles = 0;  // 0: none
  int64_t first_tile = 0;
};

// q, k, v and out may each be f32, bf16 or f16, with any strides. The problem's tokens are the
// schedule's rows; where there is a token order, the tensors may have more.
struct FlashCall {
  ConstTensorView q;           // [batch, query_heads, query_tokens, head_dim]
  ConstTensorView k;           // [batch, kv_heads, kv_tokens, head_dim]
  ConstTensorView v;           // [batch, kv_heads, kv_tokens, value_dim]
  ConstTensorView key_mask;    // u8 [batch, kv_tokens], or empty
  ConstTensorView query_ids;   // i32 [batch, query_tokens], where the rule has label keys
  ConstTensorView key_ids;     // i32 [batch, kv_tokens], where it has
  TensorView out;              // [batch, query_heads, query_tokens, value_dim]
  TensorView log_sum_exp;      // f32 [batch, query_heads, query_tokens], or empty
  TokenOrder query_order;      // of q, query_ids, out and log_sum_exp
  bool out_by_row = false;     // rows of out and log_sum_exp are the schedule's, not tokens
  TokenOrder key_order;        // of k, v, key_mask and key_ids
  PackedKeysAndValues packed;  // in the place of k, v and key_order, where it is not empty
  KeyRing ring;                // CUDA alone
  const BlockSchedule* schedule = nullptr;
  const Band* band = nullptr;  // CUDA alone: in the place of a schedule
  // CUDA alone, with a band: rows of the schedule that are computed; of others nothing is read or
  // written. A tile takes the next queries of the list, wherever they are, so that work goes with its
  // length, where the rule has relative keys of f32 queries alone, or nothing. Else a tile is as ever,
  // and left out where none of its queries is listed.
  RowList asked;
  ScoreRule rule;
  TokenRule tokens;
  double scale = 0;  // 0: 1 / sqrt(head_dim)
};

// Whether the call brings the ids that label keys go by.
absl::Status CheckIds(const FlashCall& call);

// Whether the rule's slots are what the engines take.
absl::Status CheckTokenRule(const TokenRule& rule);

// Scratch of one call in bytes: packed keys and values of as many heads as fit 4 MiB (at least one
// head) and, for each thread, the scores of 64 queries against 512 keys; twice those where the rule
// has relative keys.
size_t FlashWorkspaceBytes(const Problem& problem, bool relative_keys, int threads);
// The same of calls with packed keys and values: the threads' scratch alone, whatever the tokens.
size_t FlashWorkspaceBytesPacked(const Problem& problem, bool relative_keys, int threads);

// Runs on the CPU. Arithmetic is fp32; the result does not depend on the number of threads. The
// schedule's tiles must be 64 x 64. Allocates nothing.
absl::Status FlashCpu(const Problem& problem, const FlashCall& call, const Execution& execution);

// One softmax over the keys of all calls: see flash_parts.h. The problems differ in kv_tokens alone,
// the calls not in out and log_sum_exp; each call's query order names every token of theirs once.
struct FlashPartCall {
  const Problem* problem;
  const FlashCall* call;
};
size_t FlashWorkspaceBytesOfParts(absl::Span<const Problem> parts, bool relative_keys, int threads);
absl::Status FlashCpu(absl::Span<const FlashPartCall> parts, const Execution& execution);

}  // namespace tfb

#endif  // TFB_CORE_FLASH_FLASH_H_
