// The CUDA kernels of engine flash as C++ sees them: plain data and launchers.
//
// Every pointer is to device memory. core/flash/flash.h has the formula and explains the parts of a
// score rule.
#ifndef TFB_CORE_FLASH_FLASH_KERNELS_H_
#define TFB_CORE_FLASH_FLASH_KERNELS_H_

#include <stdint.h>

#include "core/cuda/device_view.h"
#include "core/cuda/kernel_table.h"
#include "core/cuda/row_list.h"
#include "core/schedule/schedule_view.h"

namespace tfb {

// Queries of a schedule's tile, for f32 kernels and for those on tensor cores. A tile has 64 keys
// in both.
constexpr int kFlashQueriesF32 = 64;
constexpr int kFlashQueries16 = 128;
// The most rows (query heads of a key-value head times queries) that the decoding kernel takes.
constexpr int kFlashDecodeRows = 8;

// A number per head and offset e = j - i - query_position: values[h % heads * row + e + zero].
struct DeviceDistanceTable {
  const float* values;  // null: none
  int64_t heads;
  int64_t row;
  int64_t zero;
};

// A vector per head and offset: row e - low of head h % heads, zero outside [low, high]. Rows have
// the problem's dtype, are aligned to 16 bytes and are padded with zeros to `row` elements, a
// multiple of 8; in 16-bit dtypes a multiple of 32, with channel c at RelativeKeyPlace16(c).
struct DeviceRelativeKeys {
  const void* rows;  // [heads][high - low + 1][row]; null: none
  int64_t heads;
  int64_t low;
  int64_t high;
  int64_t row;
};

// Returns the place of channel c. Among every 32 channels, the 8 that a lane needs for two steps of
// mma.m16n8k16 follow each other, so that it reads them at once: 0 1 8 9 16 17 24 25, 2 3 10 11 18
// 19 26 27, ...
constexpr int64_t RelativeKeyPlace16(int64_t c) {
  const int64_t pair = c % 32 / 8, lane = c % 8 / 2;
  return c / 32 * 32 + lane * 8 + pair * 2 + c % 2;
}

// LabelKeys in device memory.
struct DeviceLabelKeys {
  const float* keys;  // null: none
  int64_t heads;
  const float* biases;  // null: none
};

// PairMask in device memory.
struct DevicePairMask {
  const uint8_t* data;  // null: none
  int64_t batch_stride;
  int64_t query_stride;
  int64_t key_stride;
  int64_t low;
  int64_t high;
};

// The members of TokenRule.
constexpr int kFlashTokenSlots = 64;  // at most
struct DeviceTokenRule {
  bool hides;
  bool adjusts;
  bool acts;  // either
  bool causal;
  bool counts;
  int own;
  int slots;
  float self_bias;
  const int32_t* query_codes;
  const int32_t* key_codes;
  int64_t slot_stride;
  int64_t batch_stride;
  int64_t head_stride;
  DevicePairMask mask;
};

struct DeviceScoreRule {
  const float* content_bias;   // u [query_heads, head_dim], or null
  const float* position_bias;  // w [query_heads, head_dim], or null
  DeviceRelativeKeys relative_keys;
  DeviceLabelKeys label_keys;
  DeviceDistanceTable relu_multiplier;
  DeviceDistanceTable bias;
  // The fields of SoftSpan.
  const float* span;
  int64_t span_batch_stride;
  int64_t span_head_stride;
  int64_t span_query_stride;
  float ramp;
  int64_t query_position;
  DeviceTokenRule tokens;

  // Tells whether scores are only scaled products: one kernel handles these, another all other
  // rules.
  __attribute__((always_inline)) bool is_plain() const {
    return relative_keys.rows == nullptr && label_keys.keys == nullptr &&
           relu_multiplier.values == nullptr && bias.values == nullptr && span == nullptr &&
           !tokens.acts;
  }
  // Tells whether scores have relative keys and nothing else besides scaled products.
  __attribute__((always_inline)) bool is_plain_but_for_relative_keys() const {
    DeviceScoreRule rule = *this;
    rule.relative_keys.rows = nullptr;
    return rule.is_plain();
  }
};

// TokenOrder in device memory.
struct DeviceTokenOrder {
  const int32_t* tokens;  // null: row n is token n
  int64_t batch_stride;
  int64_t head_stride;
  int64_t group;
};

// Ids of tokens, for label keys.
struct DeviceIds {
  const int32_t* ids;  // [batch, tokens]
  int64_t batch_stride;
  int64_t stride;
};

struct FlashArguments {
  DeviceView q;             // [batch, query_heads, query tokens, head_dim]
  DeviceView k;             // [batch, kv_heads, kv tokens, head_dim]
  DeviceView v;             // [batch, kv_heads, kv tokens, value_dim]
  DeviceView out;           // [batch, query_heads, query tokens, value_dim]
  const uint8_t* key_mask;  // [batch, kv tokens], or null
  int64_t key_mask_strides[2];
  DeviceIds query_ids;
  DeviceIds key_ids;
  float* log_sum_exp;  // [batch, query_heads, query tokens], or null
  int64_t log_sum_exp_strides[3];
  DeviceTokenOrder query_order;  // order of q, query_ids, out, log_sum_exp
  bool out_by_row;               // out and log_sum_exp have the rows of the call instead
  DeviceTokenOrder key_order;    // order of k, v, key_mask, key_ids
  RowList asked;                 // rows of the call that are computed
  bool packs_asked;              // tiles are filled from the list
  // Where ring_tiles > 0, k and v are rings of that many tiles of 64 tokens, and key tile t is tile
  // (t + first_tile) % ring_tiles.
  int64_t ring_tiles;
  int64_t first_tile;

  int64_t batch;
  int64_t query_heads;
  int64_t kv_heads;
  int64_t query_tokens;
  int64_t kv_tokens;
  int head_dim;
  int value_dim;
  int64_t causal_offset;  // kv_tokens - query_tokens, for the soft span

  ScheduleView schedule;
  DeviceScoreRule rule;
  float scale;

  // The tiles of a row of the schedule are cut into `splits` parts of equal number, each of which a
  // block does. Where `partial` is not null, part n writes to slot first_slot + n of it.
  int splits;
  float* partial;  // [slots][batch][query_heads][query_tokens][value_dim + 2]: output times sum,
                   // running maximum, sum
  int first_slot;
  bool slots_by_token;  // a slot's rows are tokens of `out`, not rows of the call
  int64_t max_blocks;   // blocks of a grid; they take further work in turns
  // Decoding: queries of the schedule's tiles, whose masks have that many rows.
  int decode_queries;
};

// Each launcher enqueues on the stream and returns null, or a text that says why it could not.
struct FlashF32Kernels {
  const char* (*forward)(const FlashArguments& arguments, void* stream);
  // Merges the parts, in their order, for any dtype of `out`.
  const char* (*combine)(const FlashArguments& arguments, void* stream);
};
// Decoding kernels. They take up to kFlashDecodeRows rows, no rule but a bias, one pattern for all
// heads or no grouped heads, and k and v of one dtype.
struct FlashDecodeKernels {
  const char* (*forward)(const FlashArguments& arguments, void* stream);
};
struct FlashBf16Kernels {
  const char* (*forward)(const FlashArguments& arguments, void* stream);
};
struct FlashF16Kernels {
  const char* (*forward)(const FlashArguments& arguments, void* stream);
};

}  // namespace tfb

#endif  // TFB_CORE_FLASH_FLASH_KERNELS_H_
