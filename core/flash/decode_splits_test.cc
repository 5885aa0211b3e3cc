#include "core/flash/decode_splits.h"

#include <algorithm>
#include <cstdint>

#include "gtest/gtest.h"

namespace tfb {
namespace {

// The simulator's 4 multiprocessors, and those of RTX 4090, A100 and H100, with 3 blocks each.
constexpr int64_t kPlaces[] = {12, 3 * 128, 3 * 108, 3 * 132};
constexpr int64_t kTiles[] = {1, 2, 3, 4, 5, 7, 16, 31, 64, 257, 2048};

double Share(const DecodeWork& work, int64_t splits) {
  return static_cast<double>(work.tasks * splits) /
         static_cast<double>(work.places * work.Waves(splits));
}

template <class Act>
void ForEachWork(const Act& act) {
  for (const int64_t places : kPlaces) {
    for (const int64_t tiles : kTiles) {
      for (int64_t tasks = 1; tasks <= 3 * places; ++tasks) act(DecodeWork{tasks, tiles, places});
    }
  }
}

TEST(DecodeSplits, MoreThanSevenEighthsOfTheDeviceWorkOnLongKeysWhateverTheNumberOfTasks) {
  for (const int64_t places : kPlaces) {
    for (int64_t tasks = 1; tasks <= 3 * places; ++tasks) {
      // A block's beginning, which counts as a tile, counts for nothing beside so many.
      const DecodeWork work = {tasks, int64_t{1} << 20, places};
      const int64_t splits = DecodeSplits(work);
      ASSERT_GT(Share(work, splits), 7.0 / 8) << tasks << " tasks on " << places;
    }
  }
}

TEST(DecodeSplits, NoNumberOfPartsIsFasterAndNoSmallerOneIsAsFast) {
  ForEachWork([](const DecodeWork& work) {
    const int64_t end =
        std::min(work.MostSplits(), std::max<int64_t>(8 * work.places / work.tasks, 8));
    int64_t best = 1;
    for (int64_t s = 2; s <= end; ++s) {
      if (work.Time(s) < work.Time(best)) best = s;
    }
    ASSERT_EQ(DecodeSplits(work), best)
        << work.tasks << " tasks of " << work.tiles << " tiles on " << work.places;
  });
}

TEST(DecodeSplits, PartsHaveTwoTilesOrAreWholeTasks) {
  ForEachWork([](const DecodeWork& work) {
    const int64_t splits = DecodeSplits(work);
    ASSERT_GE(splits, 1);
    ASSERT_TRUE(splits == 1 || work.tiles / splits >= 2) << work.tiles << " tiles, " << splits;
  });
}

TEST(DecodeSplits, AreAsWorkedOutByHand) {
  // 12 parts of 33 tasks fill 396 places, with up to 6 of 64 tiles; so do 11.
  EXPECT_EQ(DecodeSplits({33, 64, 396}), 11);
  EXPECT_EQ(DecodeWork({33, 64, 396}).Time(11), 6 + 1 + 1);
  EXPECT_EQ(DecodeSplits({396, 64, 396}), 1);
  // Whole tasks take 65, and use two thirds of the places; 4 parts fill 3 waves, and take 3 (16 + 1) + 1.
  EXPECT_EQ(DecodeSplits({265, 64, 396}), 4);
  // More tasks than places: 104 blocks of 75 tiles in 9 waves, where whole tasks are 2 of 600.
  EXPECT_EQ(DecodeSplits({13, 600, 12}), 8);
  EXPECT_EQ(DecodeWork({13, 600, 12}).Time(8), 9 * (75 + 1) + 1);
  EXPECT_EQ(DecodeSplits({1, 1, 396}), 1);
  EXPECT_EQ(DecodeSplits({0, 64, 396}), 1);
  EXPECT_EQ(DecodeSplits({7, 0, 396}), 1);
}

}  // namespace
}  // namespace tfb
