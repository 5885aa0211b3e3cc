// A pattern as data that a kernel can walk: for each head and tile of queries, the runs of key
// tiles to visit.
#ifndef TFB_CORE_SCHEDULE_BLOCK_SCHEDULE_H_
#define TFB_CORE_SCHEDULE_BLOCK_SCHEDULE_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "core/problem.h"
#include "core/schedule/pattern.h"
#include "core/schedule/schedule_view.h"

namespace tfb {

constexpr int64_t kMaskBits = 64;

// The schedule's tiles have `query_tile` queries and `key_tile` keys; the last of each may be
// short. A full run may end in a short tile: no query sees its missing keys. Equal masks are stored
// once.
struct BlockSchedule {
  int64_t query_tokens = 0;
  int64_t kv_tokens = 0;
  int64_t query_tile = 64;
  int64_t key_tile = kMaskBits;
  int64_t heads = 1;  // patterns; head h of the problem has pattern h % heads

  std::vector<int64_t> row_begin;  // [heads * query_tiles + 1] into runs
  std::vector<TileRun> runs;       // ascending and disjoint in a row
  std::vector<uint64_t>
      masks;  // [count][query_tile]: bit c of word r says that query r of the tile sees key c
  std::vector<int32_t> order;  // [heads][query_tiles] the head's query tiles by descending work,
                               // for balanced threads
  std::vector<int64_t> pairs;  // [heads] query-key pairs allowed: the kept work

  int64_t query_tiles() const { return (query_tokens + query_tile - 1) / query_tile; }
  int64_t key_tiles() const { return (kv_tokens + key_tile - 1) / key_tile; }
  absl::Span<const TileRun> Row(int64_t head, int64_t tile) const {
    const int64_t row = head % heads * query_tiles() + tile;
    return absl::MakeConstSpan(runs).subspan(row_begin[row], row_begin[row + 1] - row_begin[row]);
  }
  const uint64_t* Mask(int32_t index) const { return masks.data() + index * query_tile; }

  // Returns the pairs kept over all `query_heads` heads of the problem.
  double KeptPairs(int64_t query_heads) const;
  // Returns the pairs in the visited tiles, over all heads, which an engine computes. It is at
  // least KeptPairs.
  double VisitedPairs(int64_t query_heads) const;
  size_t bytes() const;
};

// Builds the schedule of `pattern` for the problem, with the problem's causal mask added. Work and
// memory are proportional to the number of ranges of keys that the queries have, and to the tiles
// that have ends of such ranges, not to the lengths of ranges.
BlockSchedule BuildSchedule(const Problem& problem, const Pattern& pattern,
                            int64_t query_tile = 64);

}  // namespace tfb

#endif  // TFB_CORE_SCHEDULE_BLOCK_SCHEDULE_H_
