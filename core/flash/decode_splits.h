// Into how many parts the keys of decoding are cut, so that all of a device works on few queries.
//
// A device runs `places` blocks at a time, one for each part of each of `tasks` tasks of `tiles` key
// tiles. Parts of equal length finish together, in waves, so that with s parts a task
//
//   waves(s) = ceil(tasks s / places)
//   time(s)  = waves(s) (ceil(tiles / s) + 1) + [s > 1]        in times of a tile
//
// where a block's beginning and end count as a tile, and so does merging parts. The share of the
// places that work is tasks s / (places waves(s)).
#ifndef TFB_CORE_FLASH_DECODE_SPLITS_H_
#define TFB_CORE_FLASH_DECODE_SPLITS_H_

#include <cstdint>

namespace tfb {

struct DecodeWork {
  int64_t tasks;   // 0 or more
  int64_t tiles;   // of keys of a task, 0 or more
  int64_t places;  // at least 1

  int64_t Waves(int64_t splits) const { return (tasks * splits + places - 1) / places; }
  int64_t Time(int64_t splits) const;
  // Returns the most parts: each has two tiles at least.
  int64_t MostSplits() const;
};

// Returns the number of parts of the least time, the fewest of equal ones, among 1 to
// 8 max(places / tasks, 1).
//
// The share of the places that work is above 7/8 where tiles are many. With tasks <= places,
// floor(8 places / tasks) parts are more than 8 places - tasks >= 7 places blocks in 8 waves. With
// more tasks, 8 parts are 8 tasks blocks in fewer than 8 tasks / places + 1 waves, of which more
// than 8/9 is filled.
int64_t DecodeSplits(const DecodeWork& work);

}  // namespace tfb

#endif  // TFB_CORE_FLASH_DECODE_SPLITS_H_
