// The pairs of queries and keys that a pattern shows, for loops over all of them.
#ifndef TFB_CORE_SCHEDULE_PATTERN_TESTING_H_
#define TFB_CORE_SCHEDULE_PATTERN_TESTING_H_

#include <cstdint>
#include <vector>

#include "core/schedule/pattern.h"

namespace tfb {

// Asks the pattern once a row, where Pattern::Sees asks once a pair.
class ShownPairs {
 public:
  ShownPairs(const Pattern& pattern, int64_t queries, int64_t keys)
      : heads_(pattern.heads()),
        queries_(queries),
        keys_(keys),
        shown_(heads_ * queries * keys, false) {
    for (int64_t row = 0; row < heads_ * queries; ++row) {
      KeyList list;
      pattern.AddKeys(row / queries, row % queries, &list);
      list.Normalize(keys);
      for (const KeyRange& range : list.ranges()) {
        for (int64_t j = range.begin; j < range.end; ++j) shown_[row * keys + j] = true;
      }
    }
  }
  // `head` is one of the problem's.
  bool operator()(int64_t head, int64_t i, int64_t j) const {
    return shown_[((heads_ == 1 ? 0 : head) * queries_ + i) * keys_ + j];
  }

 private:
  int64_t heads_, queries_, keys_;
  std::vector<bool> shown_;  // [heads][queries][keys]
};

}  // namespace tfb

#endif  // TFB_CORE_SCHEDULE_PATTERN_TESTING_H_
