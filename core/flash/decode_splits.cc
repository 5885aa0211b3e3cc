#include "core/flash/decode_splits.h"

#include <algorithm>

namespace tfb {
namespace {

constexpr int64_t kTilesPerPart = 2;
constexpr int64_t kTilesOfStart = 1;  // times of a tile that a block's beginning and end take
constexpr int64_t kTilesOfMerge = 1;
constexpr int64_t kCandidates = 8;

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace

int64_t DecodeWork::Time(int64_t splits) const {
  return Waves(splits) * (CeilDiv(tiles, splits) + kTilesOfStart) +
         (splits > 1 ? kTilesOfMerge : 0);
}

int64_t DecodeWork::MostSplits() const { return std::max<int64_t>(tiles / kTilesPerPart, 1); }

int64_t DecodeSplits(const DecodeWork& work) {
  if (work.tasks == 0 || work.tiles == 0) return 1;
  int64_t best = 1;
  for (int64_t n = 1; n <= kCandidates; ++n) {
    // The most parts that n waves have room for, or n.
    const int64_t filling = std::min(std::max(n * work.places / work.tasks, n), work.MostSplits());
    // Fewer parts may be as short.
    const int64_t splits = CeilDiv(work.tiles, CeilDiv(work.tiles, filling));
    if (work.Time(splits) < work.Time(best)) best = splits;
    if (filling == work.MostSplits()) break;
  }
  return best;
}

}  // namespace tfb
