#include "core/schedule/block_schedule.h"

#include <algorithm>
#include <numeric>
#include <string>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/string_view.h"

namespace tfb {
namespace {

// Builds one row of tiles after the other; keeps the scratch and the index of masks between rows.
//
// The row's queries and their keys are segments: queries that see the same range of keys. A segment
// has some tiles of keys wholly, and one at each of its ends perhaps in part. Sorted by tile, these
// say where what the row sees changes: stretches of tiles between two changes are full where all
// queries see them wholly, and have one mask where not.
class Builder {
 public:
  Builder(const Problem& problem, const Pattern& pattern, BlockSchedule* schedule)
      : problem_(problem), pattern_(pattern), schedule_(*schedule) {}

  // Appends the row's runs; returns the pairs in their tiles.
  int64_t AddRow(int64_t head, int64_t query_tile) {
    head_ = head;
    begin_ = query_tile * schedule_.query_tile;
    end_ = std::min(begin_ + schedule_.query_tile, schedule_.query_tokens);
    CollectSegments();
    CutStretches();
    MakeMasks();
    row_work_ = 0;
    for (size_t n = 0, mixed = 0; n < stretches_.size(); ++n) {
      const Stretch& stretch = stretches_[n];
      const int64_t tiles = stretch.end - stretch.tile;
      AddTiles(stretch.tile, tiles,
               stretch.full ? nullptr : &words_[mixed++ * schedule_.query_tile]);
    }
    return row_work_;
  }

 private:
  // Queries that see the keys of a range.
  struct Segment {
    int64_t first_query, last_query;
    KeyRange keys;
  };
  // From `tile` on, so many more queries see whole tiles, and so many more segments a part of one.
  struct Change {
    int64_t tile;
    int64_t queries;
    int64_t parts;
  };
  // The tiles `tile` to end - 1, which the row sees alike: all of them, or by one mask.
  struct Stretch {
    int64_t tile, end;
    bool full;
  };

  void CollectSegments() {
    segments_.clear();
    changes_.clear();
    for (int64_t i = begin_, next; i < end_; i = next) {
      keys_.Clear();
      next = std::min(pattern_.AddKeys(head_, i, &keys_), end_);
      keys_.Normalize(schedule_.kv_tokens);
      for (const KeyRange& range : keys_.ranges()) AddSegments(i, next - 1, range);
    }
  }

  // Adds the segments of queries that see a range, cut off by the causal mask: those before the mask
  // reaches the end of the range see less of it, one by one.
  void AddSegments(int64_t first_query, int64_t last_query, const KeyRange& range) {
    const int64_t offset = problem_.causal_offset();
    int64_t i = first_query;
    if (problem_.causal) {
      for (; i <= last_query && i + offset + 1 < range.end; ++i) {
        if (i + offset >= range.begin) AddSegment({i, i, {range.begin, i + offset + 1}});
      }
    }
    if (i <= last_query) AddSegment({i, last_query, range});
  }

  void AddSegment(const Segment& segment) {
    segments_.push_back(segment);
    const int64_t size = schedule_.key_tile;
    const auto [begin, end] = segment.keys;
    const int64_t first = (begin + size - 1) / size;
    const int64_t last = end == schedule_.kv_tokens ? schedule_.key_tiles() : end / size;
    if (first < last) {
      const int64_t queries = segment.last_query - segment.first_query + 1;
      changes_.push_back({first, queries, 0});
      changes_.push_back({last, -queries, 0});
    }
    const auto add_partial = [this](int64_t tile) {
      changes_.push_back({tile, 0, 1});
      changes_.push_back({tile + 1, 0, -1});
    };
    if (begin / size < first) add_partial(begin / size);
    if (last * size < end && (end - 1) / size >= first) add_partial(last);
  }

  void CutStretches() {
    std::sort(changes_.begin(), changes_.end(),
              [](const Change& a, const Change& b) { return a.tile < b.tile; });
    stretches_.clear();
    const bool last_is_short = schedule_.kv_tokens % schedule_.key_tile != 0;
    int64_t queries = 0, parts = 0;
    for (size_t n = 0; n < changes_.size();) {
      const int64_t tile = changes_[n].tile;
      for (; n < changes_.size() && changes_[n].tile == tile; ++n) {
        queries += changes_[n].queries;
        parts += changes_[n].parts;
      }
      if (queries == 0 && parts == 0) continue;
      const int64_t end = changes_[n].tile;
      const bool full = queries == end_ - begin_;
      const bool cut = !full && last_is_short && end == schedule_.key_tiles() && end > tile + 1;
      stretches_.push_back({tile, cut ? end - 1 : end, full});
      if (cut) stretches_.push_back({end - 1, end, false});  // its mask has fewer keys
    }
  }

  // Makes the masks of the stretches that are not full, one after the other. A stretch of several
  // tiles has no end of a segment inside.
  void MakeMasks() {
    mixed_.clear();
    for (const Stretch& stretch : stretches_) {
      if (!stretch.full) mixed_.push_back(stretch.tile);
    }
    words_.assign(mixed_.size() * schedule_.query_tile, 0);
    for (const Segment& segment : segments_) {
      const auto [begin, end] = segment.keys;
      const auto first = std::lower_bound(mixed_.begin(), mixed_.end(), begin / schedule_.key_tile);
      for (auto tile = first; tile != mixed_.end() && *tile * schedule_.key_tile < end; ++tile) {
        const int64_t first_key = *tile * schedule_.key_tile;
        const int64_t from = std::max(begin - first_key, int64_t{0});
        const int64_t to = std::min(end - first_key, schedule_.key_tile);
        const uint64_t seen = (~uint64_t{0} >> (kMaskBits - (to - from))) << from;
        uint64_t* words = &words_[(tile - mixed_.begin()) * schedule_.query_tile];
        for (int64_t i = segment.first_query; i <= segment.last_query; ++i) {
          words[i - begin_] |= seen;
        }
      }
    }
  }

  // Appends tiles that are full, where there are no words, or have the mask of these words.
  void AddTiles(int64_t tile, int64_t tiles, const uint64_t* words) {
    const int64_t first_key = tile * schedule_.key_tile;
    const int64_t keys = std::min(tiles * schedule_.key_tile, schedule_.kv_tokens - first_key);
    const int64_t work = (end_ - begin_) * keys;
    int64_t pairs = 0;
    for (int64_t r = 0; words != nullptr && r < end_ - begin_; ++r) {
      pairs += tiles * __builtin_popcountll(words[r]);
    }
    const int32_t mask = words == nullptr ? TileRun::kFull : MaskIndex(words);
    schedule_.pairs[head_] += words == nullptr ? work : pairs;
    row_work_ += work;
    std::vector<TileRun>& runs = schedule_.runs;
    const bool row_has_runs = static_cast<int64_t>(runs.size()) > schedule_.row_begin.back();
    if (row_has_runs && runs.back().mask == mask &&
        runs.back().first_tile + runs.back().tiles == tile) {
      runs.back().tiles += static_cast<int32_t>(tiles);
    } else {
      runs.push_back({static_cast<int32_t>(tile), static_cast<int32_t>(tiles), mask});
    }
  }

  int32_t MaskIndex(const uint64_t* words) {
    const std::string key(reinterpret_cast<const char*>(words),
                          schedule_.query_tile * sizeof(uint64_t));
    const int32_t next = static_cast<int32_t>(mask_index_.size());
    const auto [entry, inserted] = mask_index_.emplace(key, next);
    if (inserted) {
      schedule_.masks.insert(schedule_.masks.end(), words, words + schedule_.query_tile);
    }
    return entry->second;
  }

  const Problem& problem_;
  const Pattern& pattern_;
  BlockSchedule& schedule_;
  int64_t head_ = 0, begin_ = 0, end_ = 0;  // the row's: queries begin to end - 1
  KeyList keys_;
  std::vector<Segment> segments_;
  std::vector<Change> changes_;
  std::vector<Stretch> stretches_;
  std::vector<int64_t> mixed_;   // the first tiles of stretches that are not full
  std::vector<uint64_t> words_;  // [mixed][query_tile] their masks
  absl::flat_hash_map<std::string, int32_t> mask_index_;
  int64_t row_work_ = 0;
};

}  // namespace

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
