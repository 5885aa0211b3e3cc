#include "core/schedule/band_schedule.h"

#include <vector>

#include "core/allocations.h"
#include "gtest/gtest.h"

namespace tfb {
namespace {

// The band as a general pattern.
class Predicate : public Pattern {
 public:
  explicit Predicate(const Band& band) : band_(band) {}
  int64_t AddKeys(int64_t, int64_t i, KeyList* keys) const override {
    constexpr int64_t kMost = 1024;  // keys of a case at most
    for (int64_t j = band_.first_key; j < kMost; ++j) {
      if (j - i >= band_.low && j - i <= band_.high) keys->Add(j, j + 1);
    }
    return i + 1;
  }

 private:
  Band band_;
};

struct Case {
  int64_t queries, keys;
  Band band;
};
std::vector<Case> Cases() {
  constexpr int64_t kNone = Band().low;
  std::vector<Case> cases;
  for (const auto& [queries, keys] : std::vector<std::pair<int64_t, int64_t>>{{1, 1},
                                                                              {1, 64},
                                                                              {1, 333},
                                                                              {7, 65},
                                                                              {63, 63},
                                                                              {64, 64},
                                                                              {65, 200},
                                                                              {128, 128},
                                                                              {130, 515}}) {
    const int64_t offset = keys - queries;
    for (int64_t first_key : {0, 1, 63, 64, 100}) {
      for (int64_t low : {kNone, offset, offset - 1, offset - 63, offset - 64, offset - 150}) {
        for (int64_t high : {offset, offset - 1, keys})
          cases.push_back({queries, keys, {first_key, low, high}});
      }
    }
  }
  return cases;
}

TEST(BandSchedule, EqualsTheScheduleOfThePredicateForShapesThatStraddleTiles) {
  BandSchedule band_schedule(130);
  for (const Case& c : Cases()) {
    Problem problem = Problem::SelfAttention(1, 1, c.queries, 64);
    problem.kv_tokens = c.keys;
    const BlockSchedule expected = BuildSchedule(problem, Predicate(c.band));
    const BlockSchedule& schedule = band_schedule.Build(c.queries, c.keys, c.band);
    SCOPED_TRACE(testing::Message()
                 << c.queries << " queries, " << c.keys << " keys, from " << c.band.first_key
                 << ", " << c.band.low << " to " << c.band.high);
    ASSERT_EQ(schedule.query_tokens, c.queries);
    ASSERT_EQ(schedule.kv_tokens, c.keys);
    ASSERT_EQ(schedule.heads, 1);
    ASSERT_EQ(schedule.pairs, expected.pairs);
    ASSERT_EQ(schedule.row_begin, expected.row_begin);
    ASSERT_EQ(schedule.order, expected.order);
    ASSERT_EQ(schedule.masks, expected.masks);
    ASSERT_EQ(schedule.runs.size(), expected.runs.size());
    for (size_t n = 0; n < schedule.runs.size(); ++n) {
      ASSERT_EQ(schedule.runs[n].first_tile, expected.runs[n].first_tile);
      ASSERT_EQ(schedule.runs[n].tiles, expected.runs[n].tiles);
      ASSERT_EQ(schedule.runs[n].mask, expected.runs[n].mask);
    }
  }
}

TEST(BandSchedule, RebuildingAllocatesNothing) {
  const std::vector<Case> cases = Cases();
  BandSchedule band_schedule(130);
  const int64_t before = AllocationCount();
  for (const Case& c : cases) band_schedule.Build(c.queries, c.keys, c.band);
  EXPECT_EQ(AllocationCount(), before);
}

}  // namespace
}  // namespace tfb
