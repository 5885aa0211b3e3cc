// A schedule in the form that kernels of every device walk: plain data.
#ifndef TFB_CORE_SCHEDULE_SCHEDULE_VIEW_H_
#define TFB_CORE_SCHEDULE_SCHEDULE_VIEW_H_

#include <stdint.h>

namespace tfb {

// `tiles` consecutive key tiles, all of one kind.
struct TileRun {
  static constexpr int32_t kFull = -1;
  int32_t first_tile;
  int32_t tiles;
  int32_t mask;  // kFull: every query of the tile sees every key; else the index of the mask that
                 // each of the tiles has
};

constexpr int kChunkKeyTiles = 4;  // key tiles of a chunk

// `tiles` consecutive tiles of queries that see a chunk of keys alike (core/schedule/transposed_schedule.h).
struct QueryRun {
  static constexpr int32_t kNotSeen = -2;
  int32_t first_tile;
  int32_t tiles;
  int32_t rank;  // how many chunks of smaller keys these queries see
  // Of each key tile of the chunk: kNotSeen, TileRun::kFull, or the index of a mask of the schedule.
  int32_t masks[kChunkKeyTiles];

  bool SeesAlike(const QueryRun& other) const {
    for (int n = 0; n < kChunkKeyTiles; ++n) {
      if (masks[n] != other.masks[n]) return false;
    }
    return rank == other.rank;
  }
};

// Query i sees key j when first_key <= j and low <= j - i <= high.
struct Band {
  int64_t first_key = 0;
  int64_t low = INT64_MIN / 2;  // no limit
  int64_t high = 0;
};

// The arrays of a BlockSchedule, see there; or, where row_begin is null, a band, which needs no
// tables.
struct ScheduleView {
  int64_t query_tiles;
  int64_t heads;             // patterns; head h has pattern h % heads
  const int64_t* row_begin;  // [heads * query_tiles + 1] into runs
  const TileRun* runs;
  const uint64_t* masks;  // [count][query_tile]
  const int32_t* order;   // [heads][query_tiles]; null: ascending
  Band band;
};

// The arrays of a TransposedSchedule, see there.
struct TransposedView {
  int64_t heads;
  int64_t chunks;
  const int64_t* begin;  // [heads * chunks + 1] into runs
  const QueryRun* runs;
};

}  // namespace tfb

#endif  // TFB_CORE_SCHEDULE_SCHEDULE_VIEW_H_
