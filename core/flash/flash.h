// Engine flash: exact attention over a block schedule, tile by tile, without a tokens x tokens
// matrix.
//
//   s_ij = scale (q_i + u) . k_j                                content
//        + scale (q_i + w) . r_(j-i)                            relative keys, where there are any
//        + scale ((q_i + w) . l_[a_i = b_j] + c_[a_i = b_j])    label keys, by the tokens' ids a, b
//   s_ij = relu(s_ij) multiplier_(j-i)                          where there is a ReLU multiplier
//   s_ij = s_ij + bias_(j-i)                                    where there is a distance bias
//   s_ij = s_ij + self_bias [i = j] - log N_ij                  of tokens, where the call says so
//   y_i  = sum_j m_ij exp(s_ij) v_j / sum_j m_ij exp(s_ij)      m_ij = 1, or the soft span's ramp
//
// The sums are over the keys j that the schedule, the key mask and the soft span let query i see. A
// row without any key gives y_i = 0 and a log-sum-exp of -inf. Online softmax: Milakov and
// Gimelshein, arXiv:1805.02867v2; tiling: Dao et al., arXiv:2205.14135v2, algorithm 1.
//
// What the rule adds is plain data (score_rule.h), so that the engines of all devices read the same.
#ifndef TFB_CORE_FLASH_FLASH_H_
#define TFB_CORE_FLASH_FLASH_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "core/cuda/row_list.h"
#include "core/flash/score_rule.h"
#include "core/problem.h"
#include "core/schedule/block_schedule.h"
#include "core/technique.h"
#include "core/tensor.h"

namespace tfb {

constexpr int64_t kFlashTile = 64;  // queries and keys of a schedule's tile on the CPU

// One number per head and offset j - i, from -(query_tokens - 1) to kv_tokens - 1. A row is padded
// by a tile on the right, so that a kernel may read whole tiles.
class DistanceTable {
 public:
  DistanceTable() = default;
  // Builds a table with value(head, offset) for each offset.
  DistanceTable(int64_t heads, int64_t query_tokens, int64_t kv_tokens,
                const std::function<float(int64_t head, int64_t offset)>& value);

  // Returns the floats of a row.
  static int64_t Row(int64_t query_tokens, int64_t kv_tokens) {
    return std::max<int64_t>(query_tokens + kv_tokens - 1, 0) + kFlashTile;
  }
  // Returns the entries, which are valid while the table lives unchanged.
  DistanceEntries entries() const { return {values_.data(), heads_, row_, zero_}; }

 private:
  int64_t heads_ = 1;
  int64_t row_ = 0;
  int64_t zero_ = 0;
  std::vector<float> values_;
};

// One vector per head and offset j - i in [low, high]; zero outside. They are stored in panels of
// 64 offsets, [head_dim][64]; the first panel begins at a multiple of 64.
class RelativeKeys {
 public:
  RelativeKeys() = default;
  // Offset o has row row(o) of `table` [table_heads, rows, head_dim]; head h reads table h %
  // table_heads.
  RelativeKeys(const ConstTensorView& table, int64_t low, int64_t high,
               const std::function<int64_t(int64_t offset)>& row);

  bool empty() const { return panels_.empty(); }
  int64_t heads() const { return heads_; }
  int64_t low() const { return low_; }
  int64_t high() const { return high_; }
  // Returns the panel of offsets 64 p to 64 p + 63, or null where all of them are outside [low,
  // high].
  const float* Panel(int64_t head, int64_t p) const {
    if (p < first_panel_ || p >= first_panel_ + panel_count_) return nullptr;
    return panels_.data() +
           ((head % heads_) * panel_count_ + (p - first_panel_)) * head_dim_ * kFlashTile;
  }
  // Tells whether offsets 16 n to 16 n + 15, of a panel that exists, all have the vector of the
  // offset before them, as offsets beyond a clipped distance do.
  bool Repeats(int64_t head, int64_t n) const {
    constexpr int64_t kOfPanel = kFlashTile / kBlock;
    return repeats_[(head % heads_ * panel_count_ - first_panel_) * kOfPanel + n];
  }
  static constexpr int64_t kBlock = 16;
  // Returns the address of the first channel of an offset's vector in the table that it was copied
  // from, whose other channels are channel_stride() elements apart.
  const void* ElementOf(int64_t head, int64_t offset) const {
    const int64_t element = head % heads_ * head_stride_ + rows_[offset - low_] * row_stride_;
    return static_cast<const std::byte*>(table_) + element * element_size_;
  }
  int64_t channel_stride() const { return channel_stride_; }
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
  // The table, and the row of each offset.
  const void* table_ = nullptr;
  int64_t element_size_ = 0;
  int64_t head_stride_ = 0;
  int64_t row_stride_ = 0;
  int64_t channel_stride_ = 0;
  std::vector<int64_t> rows_;
};

// Keys and values in the layout that the CPU engine computes with (see KeyValueCache), a ring of
// tiles for each head: the call's key tile t is tile (first_tile + t) % tiles.
struct PackedKeysAndValues {
  const float* keys = nullptr;    // [batch * kv_heads][tiles][PackedKeyDepth(head_dim)][64 keys]
  const float* values = nullptr;  // [batch * kv_heads][tiles][64 keys][PackedValueRow(value_dim)]
  // [batch * kv_heads][tiles], whether all values of the tile are finite.
  const uint8_t* finite = nullptr;
  int64_t tiles = 0;
  int64_t first_tile = 0;

  bool empty() const { return keys == nullptr; }
};
constexpr int64_t PackedKeyDepth(int64_t head_dim) { return (head_dim + 3) / 4 * 4; }
constexpr int64_t PackedValueRow(int64_t value_dim) { return (value_dim + 15) / 16 * 16; }

// On CUDA, k and v are rings of tiles of 64 tokens: key tile t of the call is tile (first_tile + t)
// % tiles of the ring.
struct KeyRing {
  int64_t tiles = 0;  // 0: none
  int64_t first_tile = 0;
};

// q, k, v and out may each be f32, bf16 or f16, with any strides. The problem's tokens are the
// schedule's rows; where there is a token order, the tensors may have more.
struct FlashCall {
  ConstTensorView q;          // [batch, query_heads, query_tokens, head_dim]
  ConstTensorView k;          // [batch, kv_heads, kv_tokens, head_dim]
  ConstTensorView v;          // [batch, kv_heads, kv_tokens, value_dim]
  ConstTensorView key_mask;   // u8 [batch, kv_tokens], or empty
  ConstTensorView query_ids;  // i32 [batch, query_tokens], where the rule has label keys
  ConstTensorView key_ids;    // i32 [batch, kv_tokens], where the rule has label keys
  TensorView out;             // [batch, query_heads, query_tokens, value_dim]
  // The error of rounding out to 16 bits, in the same 16 bits, of its shape and of any strides, or
  // empty. The backward pass forms p_ij (g_i . v_j - g_i . y_i), which is a small difference of
  // large products where p_ij is nearly 1: y_i must be known better than to 2^-9 or 2^-12 for it.
  TensorView out_rest;
  TensorView log_sum_exp;  // f32 [batch, query_heads, query_tokens], or empty
  // The error of rounding log_sum_exp to f32, of its shape and strides, or empty. A score of
  // -1e5, as by LSH attention's self bias, leaves a log-sum-exp that is known to 0.004, and weights
  // exp(score - log_sum_exp) to 0.4%.
  TensorView log_sum_exp_rest;
  TokenOrder query_order;      // order of q, query_ids, out, log_sum_exp and their rests
  bool out_by_row = false;     // rows of these but q and query_ids are the schedule's, not tokens
  TokenOrder key_order;        // order of k, v, key_mask and key_ids
  PackedKeysAndValues packed;  // replaces k, v and key_order, where it is not empty
  KeyRing ring;                // CUDA alone
  const BlockSchedule* schedule = nullptr;
  const Band* band = nullptr;  // replaces the schedule; on CUDA only
  // The rows of the schedule to compute, on CUDA only and with a band; other rows are neither read
  // nor written. Where the rule is empty, or has only relative keys and q is f32, a tile takes the
  // next queries of the list, wherever they are, so that the work is proportional to the list's
  // length. In the other cases tiles are those of the schedule, and a tile none of whose queries is
  // listed is skipped. The backward pass does the same in problems of f32, with numbers of rows of
  // which is_listed are the marks that count; it has tiles of the schedule for sums by offset.
  RowList asked;
  ScoreRule rule;
  double scale = 0;  // 0: 1 / sqrt(head_dim)
};

// Returns what multiplies the products q_i . k_j: `scale`, or 1 / sqrt(head_dim) where it is 0.
double ProductScale(const Problem& problem, double scale);

// Returns OK where the call brings the ids that its rule's label keys need.
absl::Status CheckIds(const FlashCall& call);

// Returns OK where the engines support the rule's slots.
absl::Status CheckTokenRule(const TokenRule& rule);

// Returns the scratch of one call in bytes: packed keys and values of as many heads as fit 4 MiB
// (at least one head) and, for each thread, the scores of 64 queries against 512 keys; twice those
// scores where the rule has relative keys.
size_t FlashWorkspaceBytes(const Problem& problem, bool relative_keys, int threads);
// Returns the scratch of calls with packed keys and values: that of the threads alone, whatever the
// number of tokens.
size_t FlashWorkspaceBytesPacked(const Problem& problem, bool relative_keys, int threads);

// Runs the call on the CPU. Arithmetic is fp32; the result does not depend on the number of
// threads. The schedule's tiles must be 64 x 64. It allocates nothing.
absl::Status FlashCpu(const Problem& problem, const FlashCall& call, const Execution& execution);

// A call that is part of one softmax over the keys of several calls: see flash_parts.h. The
// problems may differ in kv_tokens only; the calls share out and log_sum_exp, and each call's query
// order names every token of these once.
struct FlashPartCall {
  const Problem* problem;
  const FlashCall* call;
};
size_t FlashWorkspaceBytesOfParts(absl::Span<const Problem> parts, bool relative_keys, int threads);
absl::Status FlashCpu(absl::Span<const FlashPartCall> parts, const Execution& execution);

}  // namespace tfb

#endif  // TFB_CORE_FLASH_FLASH_H_
