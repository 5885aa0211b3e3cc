#include "core/schedule/band_schedule.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace tfb {
namespace {

// The most tiles of a row that are neither full nor empty: either edge of the band moves by less
// than a tile within the row, so that it cuts two at most, and first_key cuts one.
constexpr int64_t kPartialTiles = 5;

}  // namespace

BandSchedule::BandSchedule(int64_t max_query_tokens) {
  const int64_t rows = (max_query_tokens + schedule_.query_tile - 1) / schedule_.query_tile;
  schedule_.row_begin.reserve(rows + 1);
  schedule_.runs.reserve(rows * (2 * kPartialTiles + 1));  // full runs lie between partial ones
  schedule_.masks.reserve(rows * kPartialTiles * schedule_.query_tile);
  schedule_.order.reserve(rows);
  schedule_.pairs.assign(1, 0);
  work_.reserve(rows);
  words_.resize(schedule_.query_tile);
}

const BlockSchedule& BandSchedule::Build(int64_t query_tokens, int64_t kv_tokens,
                                         const Band& band) {
  schedule_.query_tokens = query_tokens;
  schedule_.kv_tokens = kv_tokens;
  schedule_.row_begin.assign(1, 0);
  schedule_.runs.clear();
  schedule_.masks.clear();
  schedule_.pairs[0] = 0;
  work_.clear();
  const int64_t tile = schedule_.key_tile;
  for (int64_t begin = 0; begin < query_tokens; begin += schedule_.query_tile) {
    const Row row{begin, std::min(begin + schedule_.query_tile, query_tokens)};
    const int64_t first = std::max({int64_t{0}, band.first_key, row.begin + band.low});
    const int64_t end = std::min(kv_tokens, row.end + band.high);
    int64_t work = 0;
    for (int64_t t = first / tile; t * tile < end; ++t) work += AddTile(row, t, band);
    work_.push_back(work);
    schedule_.row_begin.push_back(static_cast<int64_t>(schedule_.runs.size()));
  }
  schedule_.order.resize(work_.size());
  std::iota(schedule_.order.begin(), schedule_.order.end(), 0);
  std::sort(schedule_.order.begin(), schedule_.order.end(), [this](int32_t a, int32_t b) {
    return std::make_pair(work_[b], a) < std::make_pair(work_[a], b);
  });
  return schedule_;
}

// Appends the tile to the row's runs unless no query sees a key of it; returns the pairs in it.
int64_t BandSchedule::AddTile(const Row& row, int64_t tile, const Band& band) {
  const int64_t key_begin = tile * schedule_.key_tile;
  const int64_t keys = std::min(schedule_.key_tile, schedule_.kv_tokens - key_begin);
  const int64_t pairs_if_full = (row.end - row.begin) * keys;
  int32_t mask = TileRun::kFull;
  int64_t pairs = pairs_if_full;
  const bool full = key_begin >= std::max(band.first_key, row.end - 1 + band.low) &&
                    key_begin + keys - 1 <= row.begin + band.high;
  if (!full) {
    pairs = 0;
    std::fill(words_.begin(), words_.end(), 0);
    for (int64_t i = row.begin; i < row.end; ++i) {
      const int64_t first =
          std::max({int64_t{0}, band.first_key - key_begin, i + band.low - key_begin});
      const int64_t end = std::min(keys, i + band.high + 1 - key_begin);
      if (first >= end) continue;
      const uint64_t below_end = end == kMaskBits ? ~uint64_t{0} : (uint64_t{1} << end) - 1;
      words_[i - row.begin] = below_end & (~uint64_t{0} << first);
      pairs += end - first;
    }
    if (pairs == 0) return 0;
    mask = MaskIndex();
  }
  schedule_.pairs[0] += pairs;
  std::vector<TileRun>& runs = schedule_.runs;
  const bool row_has_runs = static_cast<int64_t>(runs.size()) > schedule_.row_begin.back();
  if (row_has_runs && runs.back().mask == mask &&
      runs.back().first_tile + runs.back().tiles == tile) {
    ++runs.back().tiles;
  } else {
    runs.push_back({static_cast<int32_t>(tile), 1, mask});
  }
  return pairs_if_full;
}

// Equal masks are few (a band repeats along its diagonal), so that comparing with each is quick.
int32_t BandSchedule::MaskIndex() {
  const int64_t size = schedule_.query_tile;
  const int64_t count = static_cast<int64_t>(schedule_.masks.size()) / size;
  for (int64_t n = 0; n < count; ++n) {
    if (std::equal(words_.begin(), words_.end(), schedule_.masks.begin() + n * size)) {
      return static_cast<int32_t>(n);
    }
  }
  schedule_.masks.insert(schedule_.masks.end(), words_.begin(), words_.end());
  return static_cast<int32_t>(count);
}

}  // namespace tfb
