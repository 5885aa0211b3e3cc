// The schedule of a band, rebuilt for other sizes without allocating: for layers that read a
// stream, whose number of queries and keys changes from one segment to the next.
#ifndef TFB_CORE_SCHEDULE_BAND_SCHEDULE_H_
#define TFB_CORE_SCHEDULE_BAND_SCHEDULE_H_

#include <cstdint>

#include "core/schedule/block_schedule.h"

namespace tfb {

class BandSchedule {
 public:
  BandSchedule() = default;
  // Reserves room for up to so many queries.
  explicit BandSchedule(int64_t max_query_tokens);

  // Builds the schedule that BuildSchedule gives for the band, up to the order of equally long
  // rows. It is valid until the next call. Build allocates nothing. Its work is proportional to the
  // tiles that the band touches.
  const BlockSchedule& Build(int64_t query_tokens, int64_t kv_tokens, const Band& band);

 private:
  struct Row {
    int64_t begin;  // queries
    int64_t end;
  };
  int64_t AddTile(const Row& row, int64_t tile, const Band& band);
  int32_t MaskIndex();

  BlockSchedule schedule_;
  std::vector<int64_t> work_;    // [query_tiles] pairs in the row's tiles
  std::vector<uint64_t> words_;  // [query_tile] the mask being made
};

}  // namespace tfb

#endif  // TFB_CORE_SCHEDULE_BAND_SCHEDULE_H_
