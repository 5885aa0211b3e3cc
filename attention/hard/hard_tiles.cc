#include "attention/hard/hard_tiles.h"

#include <algorithm>
#include <limits>

namespace tfb::hard {
namespace {

constexpr float kNegativeInfinity = -std::numeric_limits<float>::infinity();

}  // namespace

void HardTiles::Pack(int64_t b, int64_t kv_head, int64_t tile, float* rows, int64_t stride,
                     float* panel) const {
  for (int64_t r = 0; r < kTile; ++r) {
    const int64_t j = tile * kTile + r;
    float* row = rows + r * stride;
    int64_t loaded = 0;
    if (j < problem_.kv_tokens && IsToken(b, j)) {
      loaded = problem_.head_dim;
      LoadRow(k_, k_.Offset(b, kv_head, j), k_.stride(3), loaded, row);
    }
    std::fill(row + loaded, row + stride, 0.0f);
  }
  kernels_.transpose64(rows, stride, depth_, panel);
}

void HardTiles::LoadQueries(const QueryTile& queries, float* rows, int64_t stride) const {
  for (int64_t r = 0; r < queries.rows; ++r) {
    float* row = rows + r * stride;
    LoadRow(q_, q_.Offset(queries.batch, queries.head, queries.first + r), q_.stride(3),
            problem_.head_dim, row);
    for (int64_t c = 0; c < problem_.head_dim; ++c) row[c] *= scale_;
    std::fill(row + problem_.head_dim, row + stride, 0.0f);
  }
}

void HardTiles::ScoreTile(const QueryTile& queries, const float* panel, int64_t first_key,
                          int64_t column, const ScoreScratch& scratch) const {
  kernels_.gemm(queries.rows, kTile, depth_, scratch.queries, depth_, 1, panel, kTile,
                scratch.scores + column, kScoreRow, false);
  MaskTile(queries, first_key, column, scratch);
}

// Hides the keys of the tile that begins with `first_key` from the queries that do not see them.
void HardTiles::MaskTile(const QueryTile& queries, int64_t first_key, int64_t column,
                         const ScoreScratch& scratch) const {
  if (key_mask_.empty() && first_key + kTile <= KeysEnd(queries.first)) return;
  uint64_t tokens = ~uint64_t{0};
  for (int64_t c = 0; !key_mask_.empty() && c < kTile; ++c) {
    const bool is_token =
        first_key + c < problem_.kv_tokens && IsToken(queries.batch, first_key + c);
    if (!is_token) tokens &= ~(uint64_t{1} << c);
  }
  for (int64_t r = 0; r < queries.rows; ++r) {
    const int64_t seen = std::clamp<int64_t>(KeysEnd(queries.first + r) - first_key, 0, kTile);
    scratch.visible[r] = seen == kTile ? tokens : tokens & ((uint64_t{1} << seen) - 1);
  }
  kernels_.mask({scratch.scores + column, kScoreRow, queries.rows, kTile}, scratch.visible, 0);
}

void HardTiles::HideNans(const ScoreRows& rows) {
  for (int64_t r = 0; r < rows.rows; ++r) {
    float* row = rows.scores + r * rows.stride;
    for (int64_t c = 0; c < rows.columns; ++c) {
      row[c] = row[c] == row[c] ? row[c] : kNegativeInfinity;
    }
  }
}

}  // namespace tfb::hard
