// Splits the queries of a pattern into those that see very many keys and the others, for devices on
// which one block of threads walks a row.
#ifndef TFB_CORE_SCHEDULE_LONG_ROWS_H_
#define TFB_CORE_SCHEDULE_LONG_ROWS_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "core/schedule/block_schedule.h"
#include "core/schedule/pattern.h"

namespace tfb {

// Returns the places of queries, ascending, whose rows have several times as many tiles of keys in
// some head as most rows have, and many enough to be worth a call of their own. Returns none where
// they would be more than a quarter of the queries. `schedule` is that of the pattern.
std::vector<int32_t> LongRows(const Pattern& pattern, const BlockSchedule& schedule);

// The rows `places` of a pattern, which are ascending.
std::shared_ptr<const Pattern> RowsOf(std::shared_ptr<const Pattern> pattern,
                                      std::vector<int32_t> places);
// The pattern with those rows empty.
std::shared_ptr<const Pattern> WithoutRows(std::shared_ptr<const Pattern> pattern,
                                           std::vector<int32_t> places);

}  // namespace tfb

#endif  // TFB_CORE_SCHEDULE_LONG_ROWS_H_
