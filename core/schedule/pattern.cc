#include "core/schedule/pattern.h"

namespace tfb {

void KeyList::Normalize(int64_t kv_tokens) {
  const auto by_begin = [](const KeyRange& a, const KeyRange& b) { return a.begin < b.begin; };
  if (!std::is_sorted(ranges_.begin(), ranges_.end(), by_begin)) {
    std::sort(ranges_.begin(), ranges_.end(), by_begin);
  }
  size_t kept = 0;
  for (const KeyRange& range : ranges_) {
    const int64_t begin = std::max<int64_t>(range.begin, 0), end = std::min(range.end, kv_tokens);
    if (begin >= end) continue;
    if (kept > 0 && begin <= ranges_[kept - 1].end) {
      ranges_[kept - 1].end = std::max(ranges_[kept - 1].end, end);
    } else {
      ranges_[kept++] = {begin, end};
    }
  }
  ranges_.resize(kept);
}

bool Pattern::Sees(int64_t head, int64_t i, int64_t j) const {
  KeyList keys;
  AddKeys(head, i, &keys);
  return std::any_of(keys.ranges().begin(), keys.ranges().end(),
                     [j](const KeyRange& range) { return range.begin <= j && j < range.end; });
}

}  // namespace tfb
