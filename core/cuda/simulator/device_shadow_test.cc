// Tests random launches, of blocks that run one after another, against an oracle that keeps every
// access and, for every one of these, which threads it comes before.
#include "core/cuda/simulator/device_shadow.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <random>
#include <vector>

#include "core/cuda/simulator/order.h"
#include "core/cuda/simulator/releases.h"

namespace cuda_simulator {
namespace {

constexpr size_t kBytes = 16;
constexpr int kPrograms = 400;
constexpr int kThreads = kWarp + 11;  // the last warp is not whole
constexpr int kCounters = 2;          // places for atomics, behind the bytes

// For each thread of each block, the time up to which its accesses are known.
using Knowledge = std::map<std::pair<int, int>, int>;

void Join(const Knowledge& from, Knowledge* to) {
  for (const auto& [thread, time] : from) {
    int& known = (*to)[thread];
    known = std::max(known, time);
  }
}

class Oracle {
 public:
  Oracle() { StartBlock(); }

  void StartLaunch() { *this = Oracle(); }
  void StartBlock() {
    ++block_;
    knows_.assign(kThreads, Knowledge());
    fences_.clear();
  }
  void PassBarrier() { WaitForAll(0, kThreads, ~0u); }
  void SyncWarp(int warp, unsigned lanes) {
    WaitForAll(warp * kWarp, std::min(kThreads, (warp + 1) * kWarp), lanes);
  }
  void Release(int thread, Knowledge* to) {
    knows_[thread][{block_, thread}] = now_;
    Join(knows_[thread], to);
  }
  void Acquire(int thread, const Knowledge& from) { Join(from, &knows_[thread]); }
  void Fence(int thread) {
    knows_[thread][{block_, thread}] = now_;
    fences_[thread] = knows_[thread];
  }
  // All threads of a block learn what one of them learns from the others.
  void Atomic(int thread, int counter) {
    for (Knowledge& knowledge : knows_) Join(counters_[counter], &knowledge);
    if (fences_.count(thread) == 0) return;
    Join(fences_[thread], &counters_[counter]);
    for (const auto& [other, time] : knows_[thread]) {
      if (other.first < block_) Join({{other, time}}, &counters_[counter]);
    }
  }

  struct Answer {
    bool with_write = false;
    bool with_read = false;
  };
  Answer Access(size_t at, size_t bytes, AccessKind kind, int thread) {
    Answer answer;
    for (const Past& past : accesses_) {
      if (past.byte < at || past.byte >= at + bytes) continue;
      if (past.block == block_ && past.thread == thread) continue;
      const auto known = knows_[thread].find({past.block, past.thread});
      if (known != knows_[thread].end() && past.time < known->second) continue;
      if (past.kind == AccessKind::kAtomic && kind == AccessKind::kAtomic) continue;
      const bool wrote = past.kind != AccessKind::kRead;
      answer.with_write |= wrote;
      answer.with_read |= !wrote && kind != AccessKind::kRead;
    }
    for (size_t byte = at; byte < at + bytes; ++byte) {
      accesses_.push_back({byte, kind, block_, thread, now_});
    }
    ++now_;
    return answer;
  }

 private:
  struct Past {
    size_t byte;
    AccessKind kind;
    int block, thread;
    int time;
  };

  void WaitForAll(int first, int last, unsigned lanes) {
    Knowledge joined;
    std::vector<int> members;
    for (int t = first; t < last; ++t) {
      if ((lanes >> t % kWarp & 1) != 0) members.push_back(t);
    }
    for (const int t : members) {
      knows_[t][{block_, t}] = now_;
      Join(knows_[t], &joined);
    }
    for (const int t : members) knows_[t] = joined;
  }

  int block_ = -1;
  int now_ = 1;
  std::vector<Past> accesses_;
  std::vector<Knowledge> knows_;  // of each thread of the block
  std::map<int, Knowledge> fences_;
  std::map<int, Knowledge> counters_;
};

struct Tally {
  int races = 0;        // accesses that race, in launches that had no race before
  int races_found = 0;  // of these
  int passed_on = 0;
};

struct Options {
  bool with_parts = false;   // syncs of a part of a warp
  bool with_fences = false;  // fences, and counters
  bool with_atomics = true;
  bool with_places = false;  // through which threads of a block pass on what they know
};

// Runs a random launch. The shadow never reports a race that the oracle does not.
void RunProgram(uint64_t seed, const Options& options, Tally* tally) {
  std::mt19937_64 random(seed);
  const auto below = [&](uint64_t limit) { return static_cast<int>(random() % limit); };
  Order order;
  Releases releases(&order);
  DeviceShadow shadow;
  Oracle oracle;
  struct Place {
    Order::Knowledge known;
    Knowledge expected;
  } places[2];
  const auto start_block = [&] {
    order.StartBlock();
    releases.StartBlock();
    if (options.with_places) order.TrackAll(kThreads);
    for (Place& place : places) place = {};
  };
  order.StartLaunch();
  releases.StartLaunch();
  start_block();
  const int active = 2 + below(kThreads - 1);  // few threads cause fewer races
  const int syncs_per_access = 1 + below(6);   // of 8 steps
  const bool narrow = below(2) == 0;           // bytes, too
  const int reads_per_write = below(4);
  bool raced = false;
  for (int step = 0; step < 160; ++step) {
    const int thread = below(active);
    if (below(8) < syncs_per_access) {
      const int what = below(8);
      const int warp = below((kThreads + kWarp - 1) / kWarp);
      const unsigned live = warp == kThreads / kWarp ? (1u << kThreads % kWarp) - 1 : ~0u;
      if (what < 2) {
        order.PassBarrier();
        oracle.PassBarrier();
      } else if (what == 2 && below(4) == 0) {
        start_block();
        oracle.StartBlock();
      } else if (what == 3 && below(8) == 0) {
        order.StartLaunch();
        releases.StartLaunch();
        start_block();
        oracle.StartLaunch();
        raced = false;
      } else if (what == 4 && options.with_fences) {
        order.Resume(thread);
        releases.Fence();
        order.Fence();
        oracle.Fence(thread);
      } else if (what == 5 && options.with_fences) {
        const int counter = below(kCounters);
        order.Resume(thread);
        releases.Atomic(static_cast<uintptr_t>(counter));
        oracle.Atomic(thread, counter);
        ++tally->passed_on;
      } else if (what >= 6 && options.with_places) {
        Place& place = places[below(2)];
        order.Resume(thread);
        if (what == 6) {
          order.Release(thread, &place.known);
          oracle.Release(thread, &place.expected);
        } else {
          order.Acquire(thread, place.known);
          oracle.Acquire(thread, place.expected);
        }
      } else {
        unsigned lanes = live;
        if (options.with_parts && below(2) == 0) lanes &= static_cast<unsigned>(random());
        order.SyncWarp(warp, lanes, live);
        oracle.SyncWarp(warp, lanes);
      }
      continue;
    }
    const size_t bytes = narrow ? size_t{1} << below(4) : 4;
    const size_t at = below(kBytes / bytes) * bytes;
    const AccessKind kind = below(1 + reads_per_write) > 0          ? AccessKind::kRead
                            : options.with_atomics && below(3) == 0 ? AccessKind::kAtomic
                                                                    : AccessKind::kWrite;
    order.Resume(thread);
    const Oracle::Answer expected = oracle.Access(at, bytes, kind, thread);
    const DeviceShadow::Conflict found = shadow.Access(order, releases, at, bytes, kBytes, kind);
    const bool races = expected.with_write || expected.with_read;
    if (!races) {
      ASSERT_FALSE(found.found) << "seed " << seed << ", step " << step;
    }
    if (races && !raced) {
      raced = true;
      ++tally->races;
      tally->races_found += found.found;
    }
  }
}

Tally RunPrograms(const Options& options) {
  Tally tally;
  for (uint64_t seed = 0; seed < kPrograms; ++seed) {
    RunProgram(seed, options, &tally);
    if (testing::Test::HasFatalFailure()) break;
  }
  EXPECT_GT(tally.races, kPrograms / 2);
  return tally;
}

TEST(DeviceShadow, FindsExactlyTheFirstRaceWhereWholeWarpsSync) {
  const Tally tally = RunPrograms({});
  EXPECT_EQ(tally.races_found, tally.races);
}

TEST(DeviceShadow, InventsNoRaceWherePartsOfWarpsSyncAndMissesFew) {
  Options options;
  options.with_parts = true;
  const Tally tally = RunPrograms(options);
  EXPECT_GT(tally.races_found, 0.98 * tally.races) << tally.races_found << " of " << tally.races;
}

TEST(DeviceShadow, InventsNoRaceWhereBlocksPassOnWhatTheyDidAndMissesFew) {
  Options options;
  options.with_fences = true;
  for (const bool with_parts : {false, true}) {
    options.with_parts = with_parts;
    const Tally tally = RunPrograms(options);
    EXPECT_GT(tally.passed_on, kPrograms);
    EXPECT_GT(tally.races_found, 0.95 * tally.races) << tally.races_found << " of " << tally.races;
  }
}

TEST(DeviceShadow, InventsNoRaceWhereThreadsOfABlockPassOnWhatTheyKnowAndMissesFew) {
  Options options;
  options.with_places = true;
  for (const bool with_parts_and_fences : {false, true}) {
    options.with_parts = options.with_fences = with_parts_and_fences;
    const Tally tally = RunPrograms(options);
    EXPECT_GT(tally.races_found, 0.95 * tally.races) << tally.races_found << " of " << tally.races;
  }
}

// The quick check, which the hooks call first, agrees with Access and has the same effect.
TEST(DeviceShadow, TheQuickWayAgreesWithTheOther) {
  Order order;
  Releases releases(&order);
  DeviceShadow quick, slow;
  std::mt19937_64 random(7);
  const auto below = [&](uint64_t limit) { return static_cast<int>(random() % limit); };
  order.StartLaunch();
  order.StartBlock();
  int64_t taken = 0;
  for (int step = 0; step < 50000; ++step) {
    const int what = below(8);
    if (what == 0) order.PassBarrier();
    if (what == 1) order.SyncWarp(0, ~0u, ~0u);
    if (what == 2 && below(20) == 0) order.StartBlock();
    if (what == 3 && below(40) == 0) {
      order.StartLaunch();
      order.StartBlock();
    }
    order.Resume(below(40));
    const bool two_bytes = below(2) == 0, writes = below(3) == 0;
    const size_t at = two_bytes ? 8 + below(4) * 2 : below(4) * 4;
    const size_t bytes = two_bytes ? 2 : 4;
    const AccessKind kind = writes ? AccessKind::kWrite : AccessKind::kRead;
    const bool done = two_bytes ? writes ? quick.AccessQuickly<AccessKind::kWrite, 2>(order, at)
                                         : quick.AccessQuickly<AccessKind::kRead, 2>(order, at)
                      : writes ? quick.AccessQuickly<AccessKind::kWrite, 4>(order, at)
                                : quick.AccessQuickly<AccessKind::kRead, 4>(order, at);
    taken += done;
    DeviceShadow::Conflict conflict;
    if (!done) conflict = quick.Access(order, releases, at, bytes, kBytes, kind);
    const DeviceShadow::Conflict other = slow.Access(order, releases, at, bytes, kBytes, kind);
    ASSERT_EQ(conflict.found, other.found) << step;
    ASSERT_EQ(conflict.with_write, other.with_write) << step;
    ASSERT_EQ(conflict.thread, other.thread) << step;
    ASSERT_EQ(conflict.when, other.when) << step;
  }
  EXPECT_GT(taken, 5000);
}

TEST(DeviceShadow, ForgetsLaunchesAndStamps) {
  Order order;
  Releases releases(&order);
  DeviceShadow shadow;
  const auto write = [&](int thread) {
    order.Resume(thread);
    return shadow.Access(order, releases, 0, 4, kBytes, AccessKind::kWrite).found;
  };
  order.StartLaunch();
  order.StartBlock();
  EXPECT_FALSE(write(3));
  EXPECT_TRUE(write(4));
  order.StartBlock();
  EXPECT_TRUE(write(4));
  order.StartLaunch();
  order.StartBlock();
  EXPECT_FALSE(write(5));
  order.Reset();
  shadow.Reset();
  order.StartLaunch();
  order.StartBlock();
  EXPECT_FALSE(write(6));
}

}  // namespace
}  // namespace cuda_simulator
