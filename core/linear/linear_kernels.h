// The CUDA kernels of engine linear as C++ sees them: plain data and launchers.
//
// Every pointer is to device memory. core/linear/linear.h has the formula and its evaluation.
#ifndef TFB_CORE_LINEAR_LINEAR_KERNELS_H_
#define TFB_CORE_LINEAR_LINEAR_KERNELS_H_

#include <stdint.h>

#include "core/cuda/device_view.h"
#include "core/cuda/kernel_table.h"
#include "core/linear/feature_map.h"

namespace tfb {

// Tokens of a chunk, and features of a tile.
constexpr int kLinearTile = 64;
// The most groups of keys a head.
constexpr int kLinearGroups = 128;
// The most query heads of a key-value head; with more, tokens are appended as chunks.
constexpr int kLinearAppendHeads = 8;

// The sums over the keys of one key-value head so far, in floats. Features come in tiles of 64
// (pairs: both features of 32 rows of W), each with a reference of its own, so that tiles are
// summed independently:
//
//   R_t = max rho_j of the features up to tile t, or of the tile's alone; R = max_t R_t
//
//   tile     [65][row], R_t, max_j M_j of the same features, G of the last key, 1 unused
//            row r < 64: sum_j exp(w_r . k_j - |k_j|^2 / 2 - R_t) v_j, padded with zeros to a multiple
//            of 4, and the same with 1 for v_j, at column `ones`
//            row 64: the sum of the rows above
//   values   [row]: sum_j v_j, and at `ones` the number of tokens
//
// The tiles come one after the other, then the values. A tile without keys has R_t = -inf.
struct LinearSums {
  int64_t ones;   // value_dim, rounded up to a multiple of 4
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

// The numbers of a map in fp32.
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
  const float* gate;                        // [kv_heads, head_dim + 1], for a gated map
  float* key_gates;                         // see LinearSumKernels
  unsigned long long* rows_without_weight;  // may be null: see LinearCall

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
  // Whether four channels of a row lie side by side and can be read as one aligned vector.
  bool vector_q, vector_k, vector_v, vector_out;

  LinearSums sums;
  // Keys are in groups of `group_tokens`, a multiple of 64. The first `summed_groups` groups are
  // summed into `group_sums` [batch * kv_heads][groups][sums.head].
  int64_t group_tokens;
  int64_t groups;
  int64_t summed_groups;
  float* group_sums;
  // [batch * kv_heads][sums.head], the sums over all keys. Where `continues`, merging adds to its
  // contents.
  float* total;
  bool continues;
  // Causal: group_sums of a group are the sums before it. A block whose shared memory cannot hold a
  // head's sums keeps them in `running` [batch * query_heads][groups][sums.head].
  bool has_prefixes;
  bool on_chip;
  float* running;

  int64_t max_blocks;  // blocks of a grid; they take further work in turns
};

// Each launcher enqueues on the stream and returns null, or a text that says why it could not.
struct LinearSumKernels {
  // For a gated map, runs before all others: computes key_gates [batch * kv_heads][kv tokens][2],
  // log(1 - g_j) - G_j and G_j of each key j, where G begins again at 0 every 64 keys.
  const char* (*gates)(const LinearArguments& arguments, void* stream);
  // Sums the keys of each group.
  const char* (*sum)(const LinearArguments& arguments, void* stream);
  // Merges groups in their order: each group's sums become those of all earlier groups, and `total`
  // those of all. Without groups, `total` becomes empty, unless it continues.
  const char* (*merge)(const LinearArguments& arguments, void* stream);
};
struct LinearAttendKernels {
  // Computes every query against `total`, or, where causal, group by group against the sums and the
  // keys of its chunk.
  const char* (*attend)(const LinearArguments& arguments, void* stream);
  // Returns the shared memory of a block in bytes, which decides whether it can hold a head's sums.
  int64_t (*shared_bytes)(const LinearArguments& arguments);
};
struct LinearAppendKernels {
  // Takes a few tokens, one after the other: adds each to `total`, and reads the result for its
  // queries.
  const char* (*append)(const LinearArguments& arguments, void* stream);
};

}  // namespace tfb

#endif  // TFB_CORE_LINEAR_LINEAR_KERNELS_H_
