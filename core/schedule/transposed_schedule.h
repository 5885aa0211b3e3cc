// A block schedule read by keys: for each head and chunk of keys, the tiles of queries that see any
// of them. Backward passes walk it, where a task owns keys.
#ifndef TFB_CORE_SCHEDULE_TRANSPOSED_SCHEDULE_H_
#define TFB_CORE_SCHEDULE_TRANSPOSED_SCHEDULE_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "core/schedule/block_schedule.h"
#include "core/schedule/schedule_view.h"

namespace tfb {

// Runs are ascending and disjoint in a chunk. They are as few as the pattern allows: one run holds
// all queries of dense attention, so that the memory is that of the schedule.
class TransposedSchedule {
 public:
  TransposedSchedule() = default;
  explicit TransposedSchedule(const BlockSchedule& schedule);

  int64_t heads() const { return heads_; }
  int64_t chunks() const { return chunks_; }
  const std::vector<int64_t>& begin() const { return begin_; }
  const std::vector<QueryRun>& runs() const { return runs_; }
  absl::Span<const QueryRun> Chunk(int64_t head, int64_t chunk) const {
    const int64_t n = head % heads_ * chunks_ + chunk;
    return absl::MakeConstSpan(runs_).subspan(begin_[n], begin_[n + 1] - begin_[n]);
  }
  size_t bytes() const { return begin_.size() * sizeof(int64_t) + runs_.size() * sizeof(QueryRun); }

 private:
  int64_t heads_ = 1;
  int64_t chunks_ = 0;
  std::vector<int64_t> begin_ = {0};  // [heads * chunks + 1] into runs_
  std::vector<QueryRun> runs_;
};

}  // namespace tfb

#endif  // TFB_CORE_SCHEDULE_TRANSPOSED_SCHEDULE_H_
