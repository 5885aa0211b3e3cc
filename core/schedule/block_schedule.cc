#include "core/schedule/block_schedule.h"

#include <algorithm>
#include <numeric>
#include <string>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/string_view.h"
#include "core/schedule/pattern_observer.h"

namespace tfb {
namespace {

thread_local const PatternObserver::Observe* observe_pattern = nullptr;

// Builds one row after the other; keeps the scratch and the index of masks between rows.
class Builder {
 public:
  Builder(const Problem& problem, const Pattern& pattern, BlockSchedule* schedule)
      : problem_(problem), pattern_(pattern), schedule_(*schedule) {}

  // Appends the row's runs; returns the pairs in their tiles.
  int64_t AddRow(int64_t head, int64_t query_tile) {
    const int64_t begin = query_tile * schedule_.query_tile;
    const int64_t end = std::min(begin + schedule_.query_tile, schedule_.query_tokens);
    CollectTiles(head, begin, end);
    row_work_ = 0;
    for (const Candidate& candidate : candidates_) {
      AddTile(head, begin, end, candidate.tile, candidate.full);
    }
    return row_work_;
  }

 private:
  struct Candidate {
    int64_t tile;
    bool full;
  };

  int64_t CausalEnd(int64_t query) const {  // one past the last key that the query may see
    return problem_.causal ? std::min(query + problem_.causal_offset() + 1, schedule_.kv_tokens)
                           : schedule_.kv_tokens;
  }

  // Collects the tiles that any range touches, ascending, each once; a tile is full where one `all`
  // range covers it.
  void CollectTiles(int64_t head, int64_t begin, int64_t end) {
    ranges_.clear();
    pattern_.KeyRanges(head, begin, end, &ranges_);
    candidates_.clear();
    const int64_t tile = schedule_.key_tile;
    for (const KeyRange& range : ranges_) {
      const int64_t first = std::max<int64_t>(range.begin, 0);
      const int64_t last = std::min(range.end, CausalEnd(end - 1));
      const int64_t all_end = range.all ? std::min(range.end, CausalEnd(begin)) : first;
      for (int64_t t = first / tile; t * tile < last && first < last; ++t) {
        const bool full =
            t * tile >= first && std::min((t + 1) * tile, schedule_.kv_tokens) <= all_end;
        candidates_.push_back({t, full});
      }
    }
    std::sort(candidates_.begin(), candidates_.end(), [](const Candidate& a, const Candidate& b) {
      return a.tile != b.tile ? a.tile < b.tile : a.full > b.full;
    });
    const auto same = [](const Candidate& a, const Candidate& b) { return a.tile == b.tile; };
    candidates_.erase(std::unique(candidates_.begin(), candidates_.end(), same), candidates_.end());
  }

  void AddTile(int64_t head, int64_t begin, int64_t end, int64_t tile, bool full) {
    const int64_t key_begin = tile * schedule_.key_tile;
    const int64_t keys = std::min(schedule_.key_tile, schedule_.kv_tokens - key_begin);
    const int64_t pairs_if_full = (end - begin) * keys;
    int32_t mask = TileRun::kFull;
    int64_t pairs = pairs_if_full;
    if (!full) {
      pairs = 0;
      words_.assign(schedule_.query_tile, 0);
      for (int64_t i = begin; i < end; ++i) {
        const int64_t causal_keys = std::clamp<int64_t>(CausalEnd(i) - key_begin, 0, keys);
        uint64_t word = 0;
        for (int64_t c = 0; c < causal_keys; ++c) {
          word |= uint64_t{pattern_.Allows(head, i, key_begin + c)} << c;
        }
        words_[i - begin] = word;
        pairs += __builtin_popcountll(word);
      }
      if (pairs == 0) return;
      if (pairs < pairs_if_full) mask = MaskIndex();
    }
    schedule_.pairs[head] += pairs;
    row_work_ += pairs_if_full;
    std::vector<TileRun>& runs = schedule_.runs;
    const bool row_has_runs = static_cast<int64_t>(runs.size()) > schedule_.row_begin.back();
    if (row_has_runs && runs.back().mask == mask &&
        runs.back().first_tile + runs.back().tiles == tile) {
      ++runs.back().tiles;
    } else {
      runs.push_back({static_cast<int32_t>(tile), 1, mask});
    }
  }

  int32_t MaskIndex() {
    const std::string key(reinterpret_cast<const char*>(words_.data()),
                          words_.size() * sizeof(uint64_t));
    const int32_t next = static_cast<int32_t>(mask_index_.size());
    const auto [entry, inserted] = mask_index_.emplace(key, next);
    if (inserted) schedule_.masks.insert(schedule_.masks.end(), words_.begin(), words_.end());
    return entry->second;
  }

  const Problem& problem_;
  const Pattern& pattern_;
  BlockSchedule& schedule_;
  std::vector<KeyRange> ranges_;
  std::vector<Candidate> candidates_;
  std::vector<uint64_t> words_;
  absl::flat_hash_map<std::string, int32_t> mask_index_;
  int64_t row_work_ = 0;
};

}  // namespace

PatternObserver::PatternObserver(Observe observe) : observe_(std::move(observe)) {
  observe_pattern = &observe_;
}

PatternObserver::~PatternObserver() { observe_pattern = nullptr; }

double BlockSchedule::KeptPairs(int64_t query_heads) const {
  double total = 0;
  for (int64_t h = 0; h < query_heads; ++h) total += static_cast<double>(pairs[h % heads]);
  return total;
}

double BlockSchedule::VisitedPairs(int64_t query_heads) const {
  double total = 0;
  for (int64_t h = 0; h < query_heads; ++h) {
    for (int64_t tile = 0; tile < query_tiles(); ++tile) {
      const int64_t rows = std::min(query_tile, query_tokens - tile * query_tile);
      for (const TileRun& run : Row(h, tile)) {
        const int64_t keys = std::min(run.tiles * key_tile, kv_tokens - run.first_tile * key_tile);
        total += static_cast<double>(rows * keys);
      }
    }
  }
  return total;
}

size_t BlockSchedule::bytes() const {
  return row_begin.size() * sizeof(int64_t) + runs.size() * sizeof(TileRun) +
         masks.size() * sizeof(uint64_t) + order.size() * sizeof(int32_t) +
         pairs.size() * sizeof(int64_t);
}

BlockSchedule BuildSchedule(const Problem& problem, const Pattern& pattern, int64_t query_tile) {
  if (observe_pattern != nullptr) (*observe_pattern)(problem, pattern);
  BlockSchedule schedule;
  schedule.query_tokens = problem.query_tokens;
  schedule.kv_tokens = problem.kv_tokens;
  schedule.query_tile = query_tile;
  schedule.heads = pattern.heads();
  schedule.pairs.assign(schedule.heads, 0);
  schedule.row_begin = {0};
  Builder builder(problem, pattern, &schedule);
  std::vector<int64_t> work(schedule.query_tiles());
  for (int64_t head = 0; head < schedule.heads; ++head) {
    for (int64_t tile = 0; tile < schedule.query_tiles(); ++tile) {
      work[tile] = builder.AddRow(head, tile);
      schedule.row_begin.push_back(static_cast<int64_t>(schedule.runs.size()));
    }
    std::vector<int32_t> order(work.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(),
                     [&](int32_t a, int32_t b) { return work[a] > work[b]; });
    schedule.order.insert(schedule.order.end(), order.begin(), order.end());
  }
  return schedule;
}

}  // namespace tfb
