#include "core/schedule/pattern_check.h"

#include <algorithm>
#include <cstdint>
#include <vector>

#include "absl/strings/str_cat.h"

namespace tfb {
namespace {

constexpr int64_t kLengths[] = {1, 2, 3, 7, 32, 63, 64, 65, 128};

// The pairs of one head as the predicate and the causal mask say.
class Pairs {
 public:
  Pairs(const Problem& problem, const Pattern& pattern, int64_t head)
      : keys_(problem.kv_tokens), seen_((problem.query_tokens + 1) * keys_) {
    for (int64_t i = 0; i < problem.query_tokens; ++i) {
      for (int64_t j = 0; j < keys_; ++j) {
        const bool hidden = problem.causal && j > i + problem.causal_offset();
        seen_[(i + 1) * keys_ + j] = seen_[i * keys_ + j] + (!hidden && pattern.Allows(head, i, j));
      }
    }
  }
  // Returns how many of the queries [begin, end) see the key.
  int64_t Seeing(int64_t begin, int64_t end, int64_t key) const {
    return seen_[end * keys_ + key] - seen_[begin * keys_ + key];
  }

 private:
  int64_t keys_;
  std::vector<int32_t> seen_;  // [query][key]: how many queries before this one see the key
};

// Returns whether each key is in a range, or in one whose keys all queries see.
std::vector<bool> Held(const std::vector<KeyRange>& ranges, int64_t keys, bool by_all) {
  std::vector<bool> held(keys, false);
  for (const KeyRange& range : ranges) {
    if (by_all && !range.all) continue;
    const int64_t end = std::min(range.end, keys);
    for (int64_t j = std::max<int64_t>(range.begin, 0); j < end; ++j) held[j] = true;
  }
  return held;
}

}  // namespace

absl::Status CheckKeyRanges(const Problem& problem, const Pattern& pattern) {
  const int64_t queries = problem.query_tokens, keys = problem.kv_tokens;
  std::vector<KeyRange> ranges;
  for (int64_t head = 0; head < pattern.heads(); ++head) {
    const Pairs pairs(problem, pattern, head);
    const auto error = [&](int64_t begin, int64_t end, int64_t key, const char* what) {
      return absl::InvalidArgumentError(absl::StrCat("head ", head, ", queries ", begin, " to ",
                                                     end - 1, ", key ", key, " of ", keys, ": ",
                                                     what));
    };
    for (int64_t begin = 0; begin < queries; ++begin) {
      for (const int64_t length : kLengths) {
        const int64_t end = begin + length;
        if (end > queries) break;
        ranges.clear();
        pattern.KeyRanges(head, begin, end, &ranges);
        const std::vector<bool> held = Held(ranges, keys, /*by_all=*/false);
        const std::vector<bool> by_all = Held(ranges, keys, /*by_all=*/true);
        for (int64_t j = 0; j < keys; ++j) {
          const int64_t seeing = pairs.Seeing(begin, end, j);
          if (seeing > 0 && !held[j])
            return error(begin, end, j, "a query sees it; no range has it");
          const bool all_may = !problem.causal || j <= begin + problem.causal_offset();
          if (by_all[j] && all_may && seeing < length) {
            return error(begin, end, j, "an `all` range has it; not every query sees it");
          }
        }
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace tfb
