#include <algorithm>
#include <iterator>
#include <map>
#include <memory>
#include <numeric>
#include <set>
#include <utility>
#include <vector>

#include "core/random.h"
#include "core/schedule/block_schedule.h"
#include "core/schedule/long_rows.h"
#include "core/schedule/pattern.h"
#include "core/schedule/residue_order.h"
#include "core/schedule/transposed_schedule.h"
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

// Tells of each key whether query i sees it.
std::vector<bool> SeenKeys(const Pattern& pattern, int64_t head, int64_t i, int64_t kv_tokens) {
  KeyList list;
  pattern.AddKeys(head, i, &list);
  std::vector<bool> seen(kv_tokens);
  for (const KeyRange& range : list.ranges()) {
    const int64_t end = std::min(range.end, kv_tokens);
    for (int64_t j = std::max<int64_t>(range.begin, 0); j < end; ++j) seen[j] = true;
  }
  return seen;
}

// Checks that the transposed schedule has each tile of the schedule once, with its mask, in runs that
// are ascending and as few as they can be, and how many chunks its queries have seen before.
void ExpectTransposes(const BlockSchedule& schedule) {
  const TransposedSchedule transposed(schedule);
  ASSERT_EQ(transposed.chunks(), (schedule.key_tiles() + kChunkKeyTiles - 1) / kChunkKeyTiles);
  for (int64_t head = 0; head < schedule.heads; ++head) {
    std::map<std::pair<int64_t, int64_t>, int32_t> expected, found;  // masks by query and key tile
    for (int64_t query = 0; query < schedule.query_tiles(); ++query) {
      for (const TileRun& run : schedule.Row(head, query)) {
        for (int64_t n = 0; n < run.tiles; ++n) expected[{query, run.first_tile + n}] = run.mask;
      }
    }
    std::map<int64_t, int32_t> chunks_before;  // by query tile
    for (int64_t chunk = 0; chunk < transposed.chunks(); ++chunk) {
      int64_t end = 0;
      const QueryRun* last = nullptr;
      for (const QueryRun& run : transposed.Chunk(head, chunk)) {
        ASSERT_GE(run.first_tile, end);
        if (last != nullptr && run.first_tile == end) {
          EXPECT_FALSE(run.SeesAlike(*last));
        }
        end = run.first_tile + run.tiles;
        last = &run;
        for (int64_t query = run.first_tile; query < end; ++query) {
          EXPECT_EQ(run.rank, chunks_before[query]++);
          for (int64_t n = 0; n < kChunkKeyTiles; ++n) {
            if (run.masks[n] != QueryRun::kNotSeen) {
              found[{query, chunk * kChunkKeyTiles + n}] = run.masks[n];
            }
          }
        }
      }
    }
    EXPECT_EQ(found, expected);
  }
}

// Checks the property that every schedule must have: it agrees with the predicate, pair by pair,
// and counts the pairs; its runs are ascending and as few as they can be, and no mask is there twice.
void ExpectMatches(const Problem& problem, const Pattern& pattern, int64_t query_tile = 64) {
  const BlockSchedule schedule = BuildSchedule(problem, pattern, query_tile);
  ExpectTransposes(schedule);
  ASSERT_EQ(schedule.query_tiles(), (problem.query_tokens + query_tile - 1) / query_tile);
  int64_t all_pairs = 0, all_visited = 0;
  for (int64_t head = 0; head < pattern.heads(); ++head) {
    int64_t pairs = 0;
    for (int64_t i = 0; i < problem.query_tokens; ++i) {
      const std::vector<bool> sees = SeenKeys(pattern, head, i, problem.kv_tokens);
      for (int64_t j = 0; j < problem.kv_tokens; ++j) {
        const bool expected = sees[j] && (!problem.causal || j <= i + problem.causal_offset());
        ASSERT_EQ(Visible(schedule, head, i, j), expected)
            << problem.ToString() << " head " << head << " query " << i << " key " << j;
        pairs += expected;
      }
    }
    EXPECT_EQ(schedule.pairs[head], pairs);
    all_pairs += pairs;
    for (int64_t i = 0; i < problem.query_tokens; ++i) {
      for (const TileRun& run : schedule.Row(head, i / query_tile)) {
        for (int64_t tile = run.first_tile; tile < run.first_tile + run.tiles; ++tile) {
          all_visited += std::min(schedule.key_tile, problem.kv_tokens - tile * schedule.key_tile);
        }
      }
    }
    for (int64_t tile = 0; tile < schedule.query_tiles(); ++tile) {
      int64_t next = 0;
      int32_t mask = -2;
      for (const TileRun& run : schedule.Row(head, tile)) {
        EXPECT_GT(run.tiles, 0);
        EXPECT_GE(run.first_tile, next + (run.mask == mask ? 1 : 0));
        next = run.first_tile + run.tiles;
        mask = run.mask;
      }
      EXPECT_LE(next, schedule.key_tiles());
    }
  }
  EXPECT_EQ(schedule.KeptPairs(pattern.heads()), all_pairs);
  EXPECT_EQ(schedule.VisitedPairs(pattern.heads()), all_visited);
  std::set<std::vector<uint64_t>> masks;
  for (size_t n = 0; n < schedule.masks.size(); n += query_tile) {
    EXPECT_TRUE(masks.emplace(&schedule.masks[n], &schedule.masks[n] + query_tile).second);
  }
}

// Arbitrary keys, in an order of its own: some twice, and some beyond the ends of the sequence.
class ScatteredPattern : public Pattern {
 public:
  explicit ScatteredPattern(double share) : share_(share) {}
  int64_t heads() const override { return 2; }
  int64_t AddKeys(int64_t head, int64_t i, KeyList* keys) const override {
    const RandomStream stream(head, "scattered");
    for (int64_t j = 400; j >= -50; --j) {
      if (stream.Uniform(i * 100003 + j + 50) < share_) keys->Add(j, j + 1 + i % 3);
    }
    return i + 1;
  }

 private:
  double share_;
};

// Runs of queries of any length that see the same ranges of any length, in as many heads.
class PiecewisePattern : public Pattern {
 public:
  int64_t heads() const override { return 2; }
  int64_t AddKeys(int64_t head, int64_t i, KeyList* keys) const override {
    constexpr int64_t kEnds[] = {0, 1, 40, 64, 65, 128, 190, 320, 1000};
    const int64_t* end = std::upper_bound(std::begin(kEnds), std::end(kEnds), i);
    const RandomStream stream(head, "piecewise");
    for (int64_t n = 0; n < *end % 4; ++n) {
      const int64_t begin = static_cast<int64_t>(600 * stream.Uniform(*end * 10 + n)) - 100;
      keys->Add(begin, begin + static_cast<int64_t>(300 * stream.Uniform(*end * 10 + n + 5)));
    }
    return *end;
  }
};

TEST(BlockSchedule, ShowsWhatTheFullPatternSaysAcrossTileEdges) {
  for (int64_t queries : {1, 63, 64, 65, 130}) {
    for (int64_t keys : {1, 63, 64, 65, 200}) {
      ExpectMatches(Sizes(queries, keys), FullPattern());
      ExpectMatches(Sizes(queries, keys, /*causal=*/true), FullPattern());
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
  for (const double share : {0.001, 0.02, 0.5, 1.0}) {
    ExpectMatches(Sizes(130, 190), ScatteredPattern(share));
    ExpectMatches(Sizes(190, 130, /*causal=*/true), ScatteredPattern(share));
  }
}

TEST(BlockSchedule, ShowsWhatPiecesSayWhereTheyMeetTilesAndTheCausalMask) {
  for (const bool causal : {false, true}) {
    for (const int64_t keys : {63, 256, 330, 577}) {
      for (const int64_t query_tile : {16, 64, 100}) {
        ExpectMatches(Sizes(330, keys, causal), PiecewisePattern(), query_tile);
      }
    }
  }
}

TEST(BlockSchedule, OneRowThatSeesAllAmongOthersHasOneMaskOfMostTiles) {
  const FunctionPattern pattern([](int64_t, int64_t i, KeyList* keys) {
    keys->Add(i, i + 1);
    if (i == 5) keys->AddAll();
    return i + 1;
  });
  ExpectMatches(Sizes(70, 1000), pattern);
  const BlockSchedule schedule = BuildSchedule(Sizes(70, 6401), pattern);
  // The tile of the own keys, the 99 others, and the one key of the last.
  EXPECT_EQ(schedule.Row(0, 0).size(), 3u);
}

TEST(BlockSchedule, NeighboursWithOneMaskAreOneRun) {
  const FunctionPattern pattern([](int64_t, int64_t i, KeyList* keys) {
    for (const int64_t tile : {0, 1, 2, 4, 5}) keys->Add(64 * tile, 64 * tile + 32);
    return i + 1;
  });
  ExpectMatches(Sizes(130, 400), pattern);
  const BlockSchedule schedule = BuildSchedule(Sizes(128, 400), pattern);
  ASSERT_EQ(schedule.runs.size(), 4u);  // tiles 0 to 2, and 4 and 5, for each tile of queries
  EXPECT_EQ(schedule.Row(0, 1)[0].tiles, 3);
  EXPECT_EQ(schedule.Row(0, 1)[1].tiles, 2);
}

TEST(BlockSchedule, HeadsBeyondThePatternsBeginAgainWithTheFirst) {
  const Problem problem = Sizes(130, 190);
  const BlockSchedule schedule = BuildSchedule(problem, PiecewisePattern());
  EXPECT_NE(schedule.pairs[0], schedule.pairs[1]);
  EXPECT_EQ(schedule.KeptPairs(5), 3 * schedule.pairs[0] + 2 * schedule.pairs[1]);
  EXPECT_EQ(schedule.VisitedPairs(3) - schedule.VisitedPairs(2), schedule.VisitedPairs(1));
}

TEST(BlockSchedule, EmptySequencesHaveNoRuns) {
  EXPECT_TRUE(BuildSchedule(Sizes(0, 10), FullPattern()).runs.empty());
  EXPECT_TRUE(BuildSchedule(Sizes(10, 0), FullPattern()).runs.empty());
}

TEST(BlockSchedule, CausalStoresOneMaskAndTwoRunsARow) {
  const BlockSchedule schedule = BuildSchedule(Sizes(6400, 6400, /*causal=*/true), FullPattern());
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
  const BlockSchedule schedule = BuildSchedule(Sizes(640, 640, /*causal=*/true), FullPattern());
  EXPECT_EQ(schedule.order.front(), 9);
  EXPECT_EQ(schedule.order.back(), 0);
}

TEST(BlockSchedule, VisitedPairsAreAtLeastTheKeptOnes) {
  const BlockSchedule schedule = BuildSchedule(Sizes(100, 100, /*causal=*/true), FullPattern());
  EXPECT_EQ(schedule.KeptPairs(2), 2 * 5050);
  // The visited tiles are (0,0), (1,0) and (1,1), cut to 100 tokens: 64 x 64 + 36 x 64 + 36 x 36.
  EXPECT_EQ(schedule.VisitedPairs(2), 2 * (64 * 64 + 36 * 64 + 36 * 36));
}

TEST(LongRows, AreThoseWithManyTimesTheKeysOfMostAndArePartedFromThem) {
  constexpr int64_t kTokens = 2000;
  const auto pattern = std::make_shared<FunctionPattern>([](int64_t, int64_t i, KeyList* keys) {
    if (i == 70 || i == 71 || i == 1999) {
      keys->AddAll();
    } else {
      keys->Add(i - 10, i + 11);
    }
    return i + 1;
  });
  const Problem problem = Sizes(kTokens, kTokens);
  const std::vector<int32_t> places = LongRows(*pattern, BuildSchedule(problem, *pattern));
  EXPECT_EQ(places, (std::vector<int32_t>{70, 71, 1999}));
  const auto rows = RowsOf(pattern, places), others = WithoutRows(pattern, places);
  Problem few = problem;
  few.query_tokens = 3;
  EXPECT_EQ(BuildSchedule(few, *rows).pairs[0], 3 * kTokens);
  EXPECT_EQ(BuildSchedule(few, *rows).pairs[0] + BuildSchedule(problem, *others).pairs[0],
            BuildSchedule(problem, *pattern).pairs[0]);
  ExpectMatches(few, *rows);
  EXPECT_FALSE(others->Sees(0, 70, 70));
  EXPECT_TRUE(others->Sees(0, 69, 70));
  EXPECT_TRUE(others->Sees(0, 72, 70));
}

// The long rows where `keys` has how many keys a query sees, and each other query sees `others`.
std::vector<int32_t> LongRowsAmong(const Problem& problem, const std::map<int64_t, int64_t>& keys,
                                   int64_t others = 1) {
  const FunctionPattern pattern([&](int64_t, int64_t i, KeyList* list) {
    const auto found = keys.find(i);
    list->Add(0, found == keys.end() ? others : found->second);
    return i + 1;
  });
  return LongRows(pattern, BuildSchedule(problem, pattern));
}

TEST(LongRows, HaveSixteenTilesOrFourTimesThoseOfTheMiddle) {
  const Problem problem = Sizes(640, 2000);
  using Places = std::vector<int32_t>;
  // Tiles have 64 keys: 960 keys are 15 tiles, 961 keys are 16.
  EXPECT_EQ(LongRowsAmong(problem, {{100, 960}}), Places());
  EXPECT_EQ(LongRowsAmong(problem, {{100, 961}}), Places({100}));
  EXPECT_EQ(LongRowsAmong(problem, {{100, 1216}}, 320), Places());  // 19 tiles and 5
  EXPECT_EQ(LongRowsAmong(problem, {{100, 1217}}, 320), Places({100}));
}

TEST(LongRows, HaveHalfTheKeysOfThoseTilesAndLieInARowOfSoManyTiles) {
  const Problem problem = Sizes(640, 2000);
  using Places = std::vector<int32_t>;
  EXPECT_EQ(LongRowsAmong(problem, {{70, 2000}, {71, 512}, {72, 511}}), Places({70, 71}));
  EXPECT_EQ(LongRowsAmong(problem, {{5, 640}, {70, 2000}, {300, 640}}), Places({70}));
}

TEST(LongRows, AreAQuarterOfAllAtMost) {
  std::map<int64_t, int64_t> keys;
  for (int64_t i = 0; i < 160; ++i) keys[i] = 2000;
  EXPECT_EQ(LongRowsAmong(Sizes(640, 2000), keys).size(), 160u);
  keys[160] = 2000;
  EXPECT_EQ(LongRowsAmong(Sizes(640, 2000), keys).size(), 0u);
}

TEST(LongRows, AreNoneWhereRowsAreAlikeOrShort) {
  const auto rows = [](int64_t tokens, const Pattern& pattern) {
    return LongRows(pattern, BuildSchedule(Sizes(tokens, tokens), pattern)).size();
  };
  EXPECT_EQ(rows(2000, FullPattern()), 0u);
  EXPECT_EQ(rows(2000, BandPattern(-300, 5)), 0u);
  const FunctionPattern one_long([](int64_t, int64_t i, KeyList* keys) {
    i == 3 ? keys->AddAll() : keys->Add(i, i + 1);
    return i + 1;
  });
  EXPECT_EQ(rows(500, one_long), 0u) << "eight tiles are no work for blocks of their own";
  EXPECT_EQ(rows(1100, one_long), 1u);
}

TEST(Pattern, ABandIsWhatItsTwoEndsSayAndAListHasItsKeysOnce) {
  for (const int64_t low : {-3, 0, 2}) {
    for (const int64_t high : {-1, 0, 4}) {
      for (int64_t i = 0; i < 8; ++i) {
        for (int64_t j = 0; j < 8; ++j) {
          EXPECT_EQ(BandPattern(low, high).Sees(0, i, j), low <= j - i && j - i <= high);
        }
      }
    }
  }
  KeyList keys;
  for (const auto& [begin, end] : std::vector<std::pair<int64_t, int64_t>>{
           {7, 9}, {-5, 2}, {2, 3}, {4, 4}, {8, 8}, {0, 1}, {5, 6}, {20, 30}, {9, 21}}) {
    keys.Add(begin, end);
  }
  keys.Normalize(22);
  std::vector<std::pair<int64_t, int64_t>> ranges;
  for (const KeyRange& range : keys.ranges()) ranges.emplace_back(range.begin, range.end);
  EXPECT_EQ(ranges, (std::vector<std::pair<int64_t, int64_t>>{{0, 3}, {5, 6}, {7, 22}}));
}

TEST(ResidueOrder, TokensAreSortedByTheirResidueAndThenByPlace) {
  for (const int64_t tokens : {0, 1, 2, 7, 12}) {
    for (const int64_t stride : {1, 2, 3, 7, 12, 13}) {
      const ResidueOrder order(tokens, stride);
      std::vector<int32_t> expected(tokens);
      std::iota(expected.begin(), expected.end(), 0);
      std::stable_sort(expected.begin(), expected.end(),
                       [&](int32_t a, int32_t b) { return a % stride < b % stride; });
      EXPECT_EQ(order.tokens(), expected);
      for (int64_t place = 0; place < tokens; ++place) {
        EXPECT_EQ(order.Token(place), expected[place]);
        EXPECT_EQ(order.Place(expected[place]), place);
        const auto same = [&](int32_t token) { return token % stride == expected[place] % stride; };
        const auto first = std::find_if(expected.begin(), expected.end(), same);
        const auto [begin, end] = order.Residue(place);
        EXPECT_EQ(begin, first - expected.begin());
        EXPECT_EQ(end - begin, std::count_if(expected.begin(), expected.end(), same));
      }
    }
  }
}

TEST(TransposedSchedule, OfDenseAttentionHasARunForEachChunk) {
  const TransposedSchedule full(BuildSchedule(Sizes(6400, 6400), FullPattern()));
  ASSERT_EQ(full.chunks(), 25);
  for (int64_t chunk = 0; chunk < 25; ++chunk) EXPECT_EQ(full.Chunk(0, chunk).size(), 1u);
  const TransposedSchedule causal(BuildSchedule(Sizes(6400, 6400, true), FullPattern()));
  for (int64_t chunk = 0; chunk < 24; ++chunk) {  // four on the diagonal, one below
    EXPECT_EQ(causal.Chunk(0, chunk).size(), 5u);
  }
}

}  // namespace
}  // namespace tfb
