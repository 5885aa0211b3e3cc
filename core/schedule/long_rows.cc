#include "core/schedule/long_rows.h"

#include <algorithm>
#include <utility>

namespace tfb {
namespace {

// A row is long with so many times the tiles of a row in the middle, and at least so many tiles: 16
// tiles are 1,024 keys.
constexpr int64_t kTimesTheMiddle = 4;
constexpr int64_t kLeastTiles = 16;

int64_t TilesOf(const BlockSchedule& schedule, int64_t head, int64_t tile) {
  int64_t tiles = 0;
  for (const TileRun& run : schedule.Row(head, tile)) tiles += run.tiles;
  return tiles;
}

int64_t KeysOf(const Pattern& pattern, int64_t head, int64_t query, int64_t kv_tokens) {
  KeyList list;
  pattern.AddKeys(head, query, &list);
  list.Normalize(kv_tokens);
  int64_t keys = 0;
  for (const KeyRange& range : list.ranges()) keys += range.end - range.begin;
  return keys;
}

class SomeRows : public Pattern {
 public:
  SomeRows(std::shared_ptr<const Pattern> pattern, std::vector<int32_t> places)
      : pattern_(std::move(pattern)), places_(std::move(places)) {}

  int64_t heads() const override { return pattern_->heads(); }
  int64_t AddKeys(int64_t head, int64_t i, KeyList* keys) const override {
    const int64_t end = pattern_->AddKeys(head, places_[i], keys);
    return std::lower_bound(places_.begin() + i, places_.end(), end) - places_.begin();
  }

 private:
  std::shared_ptr<const Pattern> pattern_;
  std::vector<int32_t> places_;
};

class OtherRows : public Pattern {
 public:
  OtherRows(std::shared_ptr<const Pattern> pattern, std::vector<int32_t> places)
      : pattern_(std::move(pattern)), places_(std::move(places)) {}

  int64_t heads() const override { return pattern_->heads(); }
  int64_t AddKeys(int64_t head, int64_t i, KeyList* keys) const override {
    const auto left_out = std::lower_bound(places_.begin(), places_.end(), i);
    if (left_out != places_.end() && *left_out == i) return i + 1;
    const int64_t end = pattern_->AddKeys(head, i, keys);
    return left_out == places_.end() ? end : std::min<int64_t>(end, *left_out);
  }

 private:
  std::shared_ptr<const Pattern> pattern_;
  std::vector<int32_t> places_;
};

}  // namespace

std::vector<int32_t> LongRows(const Pattern& pattern, const BlockSchedule& schedule) {
  const int64_t tiles = schedule.query_tiles();
  std::vector<bool> is_long(schedule.query_tokens, false);
  for (int64_t h = 0; h < schedule.heads; ++h) {
    std::vector<int64_t> lengths;
    for (int64_t t = 0; t < tiles; ++t) lengths.push_back(TilesOf(schedule, h, t));
    std::vector<int64_t> sorted = lengths;
    std::nth_element(sorted.begin(), sorted.begin() + tiles / 2, sorted.end());
    const int64_t least =
        std::max(kLeastTiles, kTimesTheMiddle * (tiles > 0 ? sorted[tiles / 2] : 0));
    for (int64_t t = 0; t < tiles; ++t) {
      if (lengths[t] < least) continue;
      const int64_t end = std::min(schedule.query_tokens, (t + 1) * schedule.query_tile);
      for (int64_t i = t * schedule.query_tile; i < end; ++i) {
        const int64_t keys = KeysOf(pattern, h, i, schedule.kv_tokens);
        if (keys >= least * schedule.key_tile / 2) is_long[i] = true;
      }
    }
  }
  std::vector<int32_t> places;
  for (int64_t i = 0; i < schedule.query_tokens; ++i) {
    if (is_long[i]) places.push_back(static_cast<int32_t>(i));
  }
  if (static_cast<int64_t>(places.size()) * 4 > schedule.query_tokens) places.clear();
  return places;
}

std::shared_ptr<const Pattern> RowsOf(std::shared_ptr<const Pattern> pattern,
                                      std::vector<int32_t> places) {
  return std::make_shared<SomeRows>(std::move(pattern), std::move(places));
}

std::shared_ptr<const Pattern> WithoutRows(std::shared_ptr<const Pattern> pattern,
                                           std::vector<int32_t> places) {
  return std::make_shared<OtherRows>(std::move(pattern), std::move(places));
}

}  // namespace tfb
