// The CUDA kernels of engine linear as C++ sees them: plain data and launchers.
//
// Every pointer is to device memory. The formula and its evaluation: core/linear/linear.h.
#ifndef TFB_CORE_LINEAR_LINEAR_KERNELS_H_
#define TFB_CORE_LINEAR_LINEAR_KERNELS_H_

#include <stdint.h>

#include "core/cuda/device_view.h"
#include "core/cuda/kernel_table.h"
#include "core/linear/feature_map.h"

namespace tfb {

// Tokens of a chunk, and features of a tile.
constexpr int kLinearTile = 64;
// At most so many groups of keys a head.
constexpr int kLinearGroups = 128;
// Query heads of a key-value head; with more, tokens are appended as chunks.
constexpr int kLinearAppendHeads = 8;

// The sums over the keys of one key-value head so far, in floats. Features come in tiles of 64 (of
// pairs both of 32 rows of W), each with a reference of its own, so that tiles are summed
// independently:
//
//   R_t = max rho_j of the features up to tile t, or of the tile's alone; R = max_t R_t
//
//   tile     [65][row], R_t, max_j M_j of the same features, G of the last key, 1 unused
//            row r < 64: sum_j exp(w_r . k_j - |k_j|^2 / 2 - R_t) v_j, padded with zeros to a multiple
//            of 4, and the same with 1 for v_j, at column `ones`
//            row 64: the sum of the rows above
//   values   [row]: sum_j v_j, and at `ones` the number of tokens
//
// for the tiles one after the other, then the values. A tile without keys has R_t = -inf.
struct LinearSums {
  int64_t ones;   // value_dim, rounded up to 4
  int64_t row;    // ones + 4
  int64_t tile;   // floats of a tile
  int64_t tiles;  // of a head
  int64_t head;   // floats of a head
};

constexpr LinearSums LinearSumsOf(const FeatureMap& map, int64_t value_dim) {
  const int64_t projections = IsPair(map.feature) ? kLinearTile / 2 : kLinearTile;
  LinearSums sums = {};
  sums.ones = (value_dim + 3) / 4 * 4;
  sums.row = sums.ones + 4;
  sums.tile = (kLinearTile + 1) * sums.row + 4;
  sums.tiles = (map.projections + projections - 1) / projections;
  sums.head = sums.tiles * sums.tile + sums.row;
  return sums;
}

// Numbers of a map, as fp32 needs them.
struct LinearConstants {
  float epsilon;
  float log_epsilon;
  float features;
  float denominator_epsilon;  // d / c
  float denominator_floor;    // relative to c^2
  double log_scale;           // 2 log c
};

struct LinearArguments {
  DeviceView q;             // [batch, query_heads, query tokens, head_dim]
  DeviceView k;             // [batch, kv_heads, kv tokens, head_dim]
  DeviceView v;             // [batch, kv_heads, kv tokens, value_dim]
  DeviceView out;           // [batch, query_heads, query tokens, value_dim]
  const uint8_t* key_mask;  // [batch, kv tokens], or null
  int64_t key_mask_strides[2];
  float* log_sum_exp;  // [batch, query_heads, query tokens], or null
  int64_t log_sum_exp_strides[3];
  const float* w;                           // [kv_heads or 1, projections, head_dim]
  const float* gate;                        // of a gated map [kv_heads, head_dim + 1]
  float* key_gates;                         // see LinearSumKernels
  unsigned long long* rows_without_weight;  // or null: see LinearCall

  FeatureMap map;
  LinearConstants constants;
  int64_t batch;
  int64_t query_heads;
  int64_t kv_heads;
  int64_t query_tokens;
  int64_t kv_tokens;
  int head_dim;
  int value_dim;
  bool causal;
  // Four channels of a row at a time: they lie side by side, aligned.
  bool vector_q, vector_k, vector_v, vector_out;

  LinearSums sums;
  // Keys in groups of `group_tokens`, a multiple of 64. Those of the first `summed_groups` are summed
  // into `group_sums` [batch * kv_heads][groups][sums.head].
  int64_t group_tokens;
  int64_t groups;
  int64_t summed_groups;
  float* group_sums;
  // [batch * kv_heads][sums.head]: of all keys. `continues`: merging adds to what it holds.
  float* total;
  bool continues;
  // Causal: the sums before each group are in its group_sums. A block that has not the shared memory
  // to hold a head's sums keeps them in `running` [batch * query_heads][groups][sums.head].
  bool has_prefixes;
  bool on_chip;
  float* running;

  int64_t max_blocks;  // of a grid; blocks take further work in turns
};

// Each enqueues on the stream and returns null, or why not.
struct LinearSumKernels {
  // Of a gated map, before all others: key_gates [batch * kv_heads][kv tokens][2], log(1 - g_j) - G_j and
  // G_j of each key j, where G begins anew every 64 keys.
  const char* (*gates)(const LinearArguments& arguments, void* stream);
  // The sums of the keys of each group.
  const char* (*sum)(const LinearArguments& arguments, void* stream);
  // Merges groups in their order: each group's sums become those of what precedes it, and `total`
  // those of all. Without groups an empty total, unless it continues.
  const char* (*merge)(const LinearArguments& arguments, void* stream);
};
struct LinearAttendKernels {
  // Every query against `total`, or, where causal, group by group against the sums and the keys of
  // its chunk.
  const char* (*attend)(const LinearArguments& arguments, void* stream);
  // Shared memory of a block in bytes: whether a head's sums can be on chip.
  int64_t (*shared_bytes)(const LinearArguments& arguments);
};
struct LinearAppendKernels {
  // A few tokens, one after the other: adds each to `total`, and reads it for its queries.
  const char* (*append)(const LinearArguments& arguments, void* stream);
};

}  // namespace tfb

#endif  // TFB_CORE_LINEAR_LINEAR_KERNELS_H_
