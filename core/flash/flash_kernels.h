// The CUDA kernels of engine flash as C++ sees them: plain data and launchers.
//
// Every pointer is to device memory. core/flash/flash.h has the formula, score_rule.h explains the
// parts of a score rule.
#ifndef TFB_CORE_FLASH_FLASH_KERNELS_H_
#define TFB_CORE_FLASH_FLASH_KERNELS_H_

#include <stdint.h>

#include "core/cuda/device_view.h"
#include "core/cuda/kernel_table.h"
#include "core/cuda/row_list.h"
#include "core/flash/score_rule.h"
#include "core/schedule/schedule_view.h"

namespace tfb {

// Queries of a schedule's tile, for f32 kernels and for those on tensor cores. A tile has 64 keys
// in both.
constexpr int kFlashQueriesF32 = 64;
constexpr int kFlashQueries16 = 128;
// The most rows (query heads of a key-value head times queries) that the decoding kernels take, and
// those on tensor cores, by the larger of head_dim and value_dim.
constexpr int kFlashDecodeRows = 8;
constexpr int FlashDecodeMmaRows(int64_t widest) { return widest > 128 ? 8 : 16; }
// Returns the blocks of a decoding kernel that a multiprocessor runs at a time.
constexpr int FlashDecodeBlocks(int64_t rows) { return rows == 1 ? 5 : 3; }
constexpr int FlashDecodeMmaBlocks(int64_t rows, int64_t widest) {
  return widest > 128 || (widest > 64 && rows > 8) ? 2 : 3;
}

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
  DeviceView out_rest;      // what rounding took from out, of its shape and 16 bits, or null
  const uint8_t* key_mask;  // [batch, kv tokens], or null
  int64_t key_mask_strides[2];
  DeviceIds query_ids;
  DeviceIds key_ids;
  float* log_sum_exp;  // [batch, query_heads, query tokens], or null
  int64_t log_sum_exp_strides[3];
  float* log_sum_exp_rest;  // of the same strides, or null
  TokenOrder query_order;   // order of q, query_ids, out, log_sum_exp and their rests
  bool out_by_row;          // out, log_sum_exp and their rests have the rows of the call instead
  TokenOrder key_order;     // order of k, v, key_mask, key_ids
  RowList asked;            // rows of the call that are computed
  bool packs_asked;         // tiles are filled from the list
  // Where ring_tiles > 0, k and v are rings of that many tiles of 64 tokens, and key tile t is tile
  // (t + first_tile) % ring_tiles. Both t and first_tile are below ring_tiles.
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
  ScoreRule rule;
  float scale;

  // The tiles of a row of the schedule are cut into `splits` parts of equal number, each of which a
  // block does. Where `partial` is not null, split n writes to entry first_split + n of it.
  int splits;
  float* partial;  // [splits][batch][query_heads][query_tokens][value_dim + 2]: output times sum,
                   // running maximum, sum
  int first_split;
  bool partial_by_token;   // rows of `partial` are tokens of `out`, not rows of the call
  int64_t max_blocks;      // blocks of a grid; they take further work in turns
  int multiprocessors;     // of the device
  int compute_capability;  // 10 major + minor, of the device
  // Decoding: queries of the schedule's tiles, whose masks have that many rows.
  int decode_queries;
};

// Each launcher enqueues on the stream and returns null, or a text that says why it could not.
struct FlashF32Kernels {
  const char* (*forward)(const FlashArguments& arguments, void* stream);
  // Merges the parts, in their order, for any dtype of `out`.
  const char* (*combine)(const FlashArguments& arguments, void* stream);
};
// Decoding kernels. They take so many rows, no rule but a bias, one pattern for all heads or no grouped
// heads, and k and v of one dtype, which is of 16 bits for those on tensor cores.
struct FlashDecodeKernels {
  const char* (*forward)(const FlashArguments& arguments, void* stream);
};
struct FlashDecodeMmaKernels {
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
