// The scores of hard attention on the CPU, by tiles of 64 queries and 64 keys: what its choice and
// its gradients have in common.
//
// Keys are packed once per key-value head into panels [head_dim][64 keys], as in engine flash. The
// GEMM kernel adds the products of a score in the order of the channels.
#ifndef TFB_ATTENTION_HARD_HARD_TILES_H_
#define TFB_ATTENTION_HARD_HARD_TILES_H_

#include <algorithm>
#include <cstdint>

#include "core/cpu/kernels.h"
#include "core/flash/rows.h"
#include "core/problem.h"
#include "core/tensor.h"
#include "core/workspace.h"

namespace tfb::hard {

constexpr int64_t kTile = 64;
constexpr int64_t kChunkTiles = 8;
constexpr int64_t kScoreRow = kChunkTiles * kTile + 16;  // the 16 make rows differ in cache set

// Some queries of one head.
struct QueryTile {
  int64_t batch;
  int64_t head;
  int64_t first;
  int64_t rows;  // at most 64
};

// The scratch of one thread for the scores of a tile.
struct ScoreScratch {
  float* queries;     // [64][key_depth], times the scale
  float* scores;      // [64][kScoreRow]
  uint64_t* visible;  // [64]

  static ScoreScratch LayOut(const Problem& problem, Workspace& workspace) {
    return {workspace.Take<float>(kTile * PanelDepth(problem)),
            workspace.Take<float>(kTile * kScoreRow), workspace.Take<uint64_t>(kTile)};
  }
  static int64_t PanelDepth(const Problem& problem) { return RoundUp(problem.head_dim, 4); }
};

// How many heads' keys are packed at a time, and where.
struct PackedHeads {
  // `floats` are those of a packed key.
  PackedHeads(const Problem& problem, int64_t floats)
      : tiles((problem.kv_tokens + kTile - 1) / kTile), heads(problem.batch * problem.kv_heads) {
    constexpr int64_t kBytes = int64_t{32} << 20;
    const int64_t head_bytes =
        std::max<int64_t>(tiles * kTile * floats * static_cast<int64_t>(sizeof(float)), 1);
    at_a_time = std::clamp<int64_t>(kBytes / head_bytes, 1, std::max<int64_t>(heads, 1));
  }
  int64_t tiles;      // of a head
  int64_t heads;      // key-value heads of all batch rows
  int64_t at_a_time;  // of them
};

class HardTiles {
 public:
  // `key_mask` may be empty; `scale` multiplies the queries.
  HardTiles(const Problem& problem, const ConstTensorView& q, const ConstTensorView& k,
            const ConstTensorView& key_mask, float scale)
      : problem_(problem),
        q_(q),
        k_(k),
        key_mask_(key_mask),
        scale_(scale),
        depth_(ScoreScratch::PanelDepth(problem)),
        kernels_(BestCpuKernels()) {}

  int64_t panel_floats() const { return depth_ * kTile; }
  const CpuKernels& kernels() const { return kernels_; }

  bool IsToken(int64_t b, int64_t j) const {
    return key_mask_.empty() || *key_mask_.At<uint8_t>(b, j) != 0;
  }
  // Returns the end of the keys that query i may see.
  int64_t KeysEnd(int64_t i) const {
    if (!problem_.causal) return problem_.kv_tokens;
    return std::clamp<int64_t>(i + problem_.causal_offset() + 1, 0, problem_.kv_tokens);
  }
  QueryTile Queries(int64_t b, int64_t head, int64_t tile) const {
    const int64_t first = tile * kTile;
    return {b, head, first, std::min(kTile, problem_.query_tokens - first)};
  }

  // Loads a tile of keys to rows [64][stride], with zeros for padding and behind the channels, and
  // packs them.
  void Pack(int64_t b, int64_t kv_head, int64_t tile, float* rows, int64_t stride,
            float* panel) const;
  // Loads queries, times the scale, to rows [rows][stride].
  void LoadQueries(const QueryTile& queries, float* rows, int64_t stride) const;

  // Writes the scores of the queries in `scratch` with the 64 keys from `first_key` on to column
  // `column` of the scratch: -inf where a query does not see a key.
  void ScoreTile(const QueryTile& queries, const float* panel, int64_t first_key, int64_t column,
                 const ScoreScratch& scratch) const;

  // Calls body(first_key, columns) with the scores of each chunk of keys in the scratch.
  template <class Body>
  void ForEachChunk(const QueryTile& queries, const float* panels, const ScoreScratch& scratch,
                    const Body& body) const {
    const int64_t end = KeysEnd(queries.first + queries.rows - 1);
    for (int64_t first = 0; first < end; first += kChunkTiles * kTile) {
      const int64_t columns = std::min(kChunkTiles * kTile, RoundUp(end - first, kTile));
      for (int64_t c = 0; c < columns; c += kTile) {
        ScoreTile(queries, panels + (first + c) / kTile * panel_floats(), first + c, c, scratch);
      }
      body(first, columns);
    }
  }

  // Makes scores that are NaN -inf, which are never chosen.
  static void HideNans(const ScoreRows& rows);

 private:
  void MaskTile(const QueryTile& queries, int64_t first_key, int64_t column,
                const ScoreScratch& scratch) const;

  const Problem& problem_;
  ConstTensorView q_, k_, key_mask_;
  float scale_;
  int64_t depth_;
  const CpuKernels& kernels_;
};

}  // namespace tfb::hard

#endif  // TFB_ATTENTION_HARD_HARD_TILES_H_
