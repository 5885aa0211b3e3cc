// The contract of Pattern::KeyRanges, checked pair by pair against Pattern::Allows.
#ifndef TFB_CORE_SCHEDULE_PATTERN_CHECK_H_
#define TFB_CORE_SCHEDULE_PATTERN_CHECK_H_

#include "absl/status/status.h"
#include "core/problem.h"
#include "core/schedule/pattern.h"

namespace tfb {

// Returns OK where, for every head and for queries [begin, end) with any begin and lengths from 1
// to two tiles, the ranges hold every key that one of the queries sees, and every key of an `all`
// range is seen by each of the queries. Where the problem is causal, pairs that its mask hides do
// not count. Otherwise returns InvalidArgument, with the queries and the key. The work is
// proportional to heads x query_tokens x kv_tokens.
absl::Status CheckKeyRanges(const Problem& problem, const Pattern& pattern);

}  // namespace tfb

#endif  // TFB_CORE_SCHEDULE_PATTERN_CHECK_H_
