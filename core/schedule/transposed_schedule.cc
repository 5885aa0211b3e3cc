#include "core/schedule/transposed_schedule.h"

#include <algorithm>

namespace tfb {
namespace {

// Appends a tile of queries to the runs of a chunk.
void AddTile(const QueryRun& tile, std::vector<QueryRun>* runs) {
  if (!runs->empty()) {
    QueryRun& last = runs->back();
    if (last.first_tile + last.tiles == tile.first_tile && last.SeesAlike(tile)) {
      ++last.tiles;
      return;
    }
  }
  runs->push_back(tile);
}

}  // namespace

TransposedSchedule::TransposedSchedule(const BlockSchedule& schedule)
    : heads_(schedule.heads),
      chunks_((schedule.key_tiles() + kChunkKeyTiles - 1) / kChunkKeyTiles) {
  for (int64_t head = 0; head < heads_; ++head) {
    std::vector<std::vector<QueryRun>> of_chunk(chunks_);
    for (int64_t query_tile = 0; query_tile < schedule.query_tiles(); ++query_tile) {
      QueryRun current;
      int64_t chunk = -1;
      int32_t rank = 0;
      const auto finish = [&] {
        if (chunk < 0) return;
        AddTile(current, &of_chunk[chunk]);
        ++rank;
      };
      for (const TileRun& run : schedule.Row(head, query_tile)) {
        for (int64_t tile = run.first_tile; tile < run.first_tile + run.tiles; ++tile) {
          if (tile / kChunkKeyTiles != chunk) {
            finish();
            chunk = tile / kChunkKeyTiles;
            current = {static_cast<int32_t>(query_tile), 1, rank, {}};
            std::fill_n(current.masks, kChunkKeyTiles, QueryRun::kNotSeen);
          }
          current.masks[tile % kChunkKeyTiles] = run.mask;
        }
      }
      finish();
    }
    for (const std::vector<QueryRun>& runs : of_chunk) {
      runs_.insert(runs_.end(), runs.begin(), runs.end());
      begin_.push_back(static_cast<int64_t>(runs_.size()));
    }
  }
}

}  // namespace tfb
