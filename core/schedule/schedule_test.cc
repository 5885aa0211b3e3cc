#include <memory>
#include <string>
#include <vector>

#include "core/random.h"
#include "core/schedule/block_schedule.h"
#include "core/schedule/pattern.h"
#include "core/schedule/pattern_check.h"
#include "core/schedule/pattern_observer.h"
#include "gtest/gtest.h"

namespace tfb {
namespace {

Problem Sizes(int64_t queries, int64_t keys, bool causal = false) {
  Problem problem = Problem::SelfAttention(1, 2, queries, 4, causal);
  problem.kv_tokens = keys;
  return problem;
}

// Tells whether the schedule lets query i see key j, reading it as an engine does.
bool Visible(const BlockSchedule& schedule, int64_t head, int64_t i, int64_t j) {
  for (const TileRun& run : schedule.Row(head, i / schedule.query_tile)) {
    const int64_t tile = j / schedule.key_tile;
    if (tile < run.first_tile || tile >= run.first_tile + run.tiles) continue;
    if (run.mask == TileRun::kFull) return true;
    return schedule.Mask(run.mask)[i % schedule.query_tile] >> (j % schedule.key_tile) & 1;
  }
  return false;
}

// Checks the property that every schedule must have: it agrees with the predicate, pair by pair,
// and counts the pairs.
void ExpectMatches(const Problem& problem, const Pattern& pattern) {
  EXPECT_EQ(CheckKeyRanges(problem, pattern), absl::OkStatus());
  const BlockSchedule schedule = BuildSchedule(problem, pattern);
  for (int64_t head = 0; head < pattern.heads(); ++head) {
    int64_t pairs = 0;
    for (int64_t i = 0; i < problem.query_tokens; ++i) {
      for (int64_t j = 0; j < problem.kv_tokens; ++j) {
        const bool expected =
            pattern.Allows(head, i, j) && (!problem.causal || j <= i + problem.causal_offset());
        ASSERT_EQ(Visible(schedule, head, i, j), expected)
            << problem.ToString() << " head " << head << " query " << i << " key " << j;
        pairs += expected;
      }
    }
    EXPECT_EQ(schedule.pairs[head], pairs);
  }
  for (int64_t tile = 0; tile < schedule.query_tiles(); ++tile) {
    int64_t next = 0;
    for (const TileRun& run : schedule.Row(0, tile)) {
      EXPECT_GE(run.first_tile, next) << "runs are ascending and disjoint";
      next = run.first_tile + run.tiles;
    }
    EXPECT_LE(next, schedule.key_tiles());
  }
}

// An arbitrary predicate, whose ranges are larger than needed: all keys.
class ScatteredPattern : public Pattern {
 public:
  int64_t heads() const override { return 2; }
  bool Allows(int64_t head, int64_t i, int64_t j) const override {
    return RandomStream(head, "scattered").Uniform(i * 100003 + j) < 0.02;
  }
  void KeyRanges(int64_t, int64_t, int64_t, std::vector<KeyRange>* ranges) const override {
    ranges->push_back({-50, 10000, false});
    ranges->push_back({10, 20, false});
  }
};

TEST(BlockSchedule, ShowsWhatTheFullPatternSaysAcrossTileEdges) {
  for (int64_t queries : {1, 63, 64, 65, 130}) {
    for (int64_t keys : {1, 63, 64, 65, 200}) {
      ExpectMatches(Sizes(queries, keys), FullPattern(keys));
      ExpectMatches(Sizes(queries, keys, /*causal=*/true), FullPattern(keys));
    }
  }
}

TEST(BlockSchedule, ShowsWhatBandsSayOfEveryWidth) {
  for (int64_t low : {-200, -64, -63, -1, 0, 3}) {
    for (int64_t high : {-3, 0, 1, 64, 300}) {
      ExpectMatches(Sizes(150, 150), BandPattern(low, high));
      ExpectMatches(Sizes(100, 170, /*causal=*/true), BandPattern(low, high));
    }
  }
}

TEST(BlockSchedule, ShowsWhatAScatteredPatternSaysPerHead) {
  ExpectMatches(Sizes(130, 190), ScatteredPattern());
  ExpectMatches(Sizes(190, 130, /*causal=*/true), ScatteredPattern());
}

TEST(BlockSchedule, EmptySequencesHaveNoRuns) {
  EXPECT_TRUE(BuildSchedule(Sizes(0, 10), FullPattern(10)).runs.empty());
  EXPECT_TRUE(BuildSchedule(Sizes(10, 0), FullPattern(0)).runs.empty());
}

TEST(BlockSchedule, CausalStoresOneMaskAndTwoRunsARow) {
  const BlockSchedule schedule =
      BuildSchedule(Sizes(6400, 6400, /*causal=*/true), FullPattern(6400));
  EXPECT_EQ(schedule.masks.size(), 64u);
  EXPECT_LE(schedule.runs.size(), 200u);
}

TEST(BlockSchedule, MemoryOfALinearPatternIsLinearInTokens) {
  const auto bytes = [](int64_t tokens) {
    return static_cast<double>(
        BuildSchedule(Sizes(tokens, tokens), BandPattern(-256, 256)).bytes());
  };
  // The masks are a constant besides.
  EXPECT_NEAR((bytes(65536) - bytes(32768)) / (bytes(32768) - bytes(16384)), 2, 0.02);
}

TEST(BlockSchedule, OrderPutsTheLongestRowsFirst) {
  const BlockSchedule schedule = BuildSchedule(Sizes(640, 640, /*causal=*/true), FullPattern(640));
  EXPECT_EQ(schedule.order.front(), 9);
  EXPECT_EQ(schedule.order.back(), 0);
}

TEST(BlockSchedule, VisitedPairsAreAtLeastTheKeptOnes) {
  const BlockSchedule schedule = BuildSchedule(Sizes(100, 100, /*causal=*/true), FullPattern(100));
  EXPECT_EQ(schedule.KeptPairs(2), 2 * 5050);
  // The visited tiles are (0,0), (1,0) and (1,1), cut to 100 tokens: 64 x 64 + 36 x 64 + 36 x 36.
  EXPECT_EQ(schedule.VisitedPairs(2), 2 * (64 * 64 + 36 * 64 + 36 * 36));
}

// A band whose ranges are wrong by `error` keys at one of their ends.
class WrongBand : public BandPattern {
 public:
  enum class End { kBegin, kEnd, kAllBegin, kAllEnd };
  WrongBand(End end, int64_t error) : BandPattern(-40, 30), end_(end), error_(error) {}
  void KeyRanges(int64_t head, int64_t query_begin, int64_t query_end,
                 std::vector<KeyRange>* ranges) const override {
    BandPattern::KeyRanges(head, query_begin, query_end, ranges);
    switch (end_) {
      case End::kBegin:
        ranges->at(0).begin += error_;
        break;
      case End::kEnd:
        ranges->at(0).end += error_;
        break;
      case End::kAllBegin:
        ranges->at(1).begin += error_;
        break;
      case End::kAllEnd:
        ranges->at(1).end += error_;
    }
  }

 private:
  End end_;
  int64_t error_;
};

TEST(CheckKeyRanges, NoticesARangeOneKeyTooShortAndAnAllRangeOneKeyTooLong) {
  using End = WrongBand::End;
  for (const bool causal : {false, true}) {
    const auto ok = [&](End end, int64_t error) {
      return CheckKeyRanges(Sizes(277, 277, causal), WrongBand(end, error)).ok();
    };
    EXPECT_FALSE(ok(End::kBegin, 1));
    EXPECT_TRUE(ok(End::kBegin, -1));
    EXPECT_EQ(ok(End::kEnd, -1), causal) << "the causal mask hides that end";
    EXPECT_TRUE(ok(End::kEnd, 1));
    EXPECT_FALSE(ok(End::kAllBegin, -1));
    EXPECT_TRUE(ok(End::kAllBegin, 1));
    EXPECT_EQ(ok(End::kAllEnd, 1), causal);
    EXPECT_TRUE(ok(End::kAllEnd, -1));
  }
}

TEST(PatternObserver, SeesThePatternsOfItsLifeOnly) {
  int64_t seen = 0;
  BuildSchedule(Sizes(3, 5), FullPattern(5));
  {
    const PatternObserver observer(
        [&seen](const Problem& problem, const Pattern&) { seen += problem.kv_tokens; });
    BuildSchedule(Sizes(3, 5), FullPattern(5));
  }
  BuildSchedule(Sizes(3, 5), FullPattern(5));
  EXPECT_EQ(seen, 5);
}

}  // namespace
}  // namespace tfb
