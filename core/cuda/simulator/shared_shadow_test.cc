// Tests random programs of a block's threads against an oracle that keeps every access and, for
// every pair of threads, how much of the one comes before the other's current access.
#include "core/cuda/simulator/shared_shadow.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

#include "core/cuda/simulator/order.h"

namespace cuda_simulator {
namespace {

using Verdict = SharedShadow::Verdict;

constexpr uintptr_t kBegin = 0x10000;
constexpr size_t kBytes = 16;
constexpr int kPrograms = 400;
constexpr int kThreads = 3 * kWarp - 5;  // the last warp is not whole

class Oracle {
 public:
  Oracle() : knows_(kThreads, std::vector<int>(kThreads, 0)) {}

  void StartBlock() { *this = Oracle(); }
  void PassBarrier() { WaitForAll(0, kThreads, ~0u); }
  void SyncWarp(int warp, unsigned lanes) {
    WaitForAll(warp * kWarp, std::min(kThreads, (warp + 1) * kWarp), lanes);
  }

  // Returns the verdict that the access must get.
  Verdict Access(size_t at, size_t bytes, AccessKind kind, int thread) {
    Verdict worst = Verdict::kFine;
    for (size_t byte = at; byte < at + bytes; ++byte) {
      worst = std::max(worst, AccessByte(byte, kind, thread));
    }
    for (size_t byte = at; byte < at + bytes; ++byte) {
      accesses_.push_back({byte, kind, thread, static_cast<int>(accesses_.size())});
    }
    now_ = static_cast<int>(accesses_.size());
    return worst;
  }

 private:
  struct Past {
    size_t byte;
    AccessKind kind;
    int thread;
    int time;
  };

  Verdict AccessByte(size_t byte, AccessKind kind, int thread) const {
    bool written = false, reads_before = false, writes_before = false;
    for (const Past& past : accesses_) {
      if (past.byte != byte) continue;
      const bool wrote = past.kind != AccessKind::kRead;
      written |= wrote;
      if (past.thread == thread || past.time < knows_[thread][past.thread]) continue;
      if (past.kind == AccessKind::kAtomic && kind == AccessKind::kAtomic) continue;
      writes_before |= wrote;
      reads_before |= !wrote && kind != AccessKind::kRead;
    }
    if (writes_before) return Verdict::kRaceWithWrite;
    if (reads_before) return Verdict::kRaceWithRead;
    return written || kind == AccessKind::kWrite ? Verdict::kFine : Verdict::kUnwritten;
  }

  // Lets the threads of [first, last) that `lanes` names, by number modulo 32, wait for each other.
  void WaitForAll(int first, int last, unsigned lanes) {
    std::vector<int> joined(kThreads, 0), members;
    for (int t = first; t < last; ++t) {
      if ((lanes >> t % kWarp & 1) != 0) members.push_back(t);
    }
    for (const int t : members) {
      knows_[t][t] = now_;
      for (int other = 0; other < kThreads; ++other) {
        joined[other] = std::max(joined[other], knows_[t][other]);
      }
    }
    for (const int t : members) knows_[t] = joined;
  }

  std::vector<Past> accesses_;
  // [thread][other]: the accesses of `other` before that time.
  std::vector<std::vector<int>> knows_;
  int now_ = 0;
};

bool IsRace(Verdict verdict) { return verdict >= Verdict::kRaceWithRead; }

struct Tally {
  int races = 0;        // accesses that race, in programs that had no race before
  int races_found = 0;  // of these
  int syncs_of_parts = 0;
};

// Runs a program of random accesses and syncs, which now and then sync a part of a warp if
// `with_parts`. The shadow never reports an error that the oracle does not.
void RunProgram(uint64_t seed, bool with_parts, Tally* tally) {
  std::mt19937_64 random(seed);
  const auto below = [&](uint64_t limit) { return static_cast<int>(random() % limit); };
  Order order;
  SharedShadow shadow(kBegin, kBytes, &order);
  Oracle oracle;
  shadow.StartLaunch(kBytes);
  order.StartBlock();
  oracle.StartBlock();
  const int active = 2 + below(kThreads - 1);  // few threads cause fewer races
  const int syncs_per_access = 1 + below(6);   // of 8 steps
  const bool narrow = below(2) == 0;           // bytes, too
  bool raced = false;
  for (int step = 0; step < 120; ++step) {
    if (below(8) < syncs_per_access) {
      const int what = below(8);
      const int warp = below((kThreads + kWarp - 1) / kWarp);
      const unsigned live = warp == 2 ? (1u << (kThreads - 2 * kWarp)) - 1 : ~0u;
      if (what < 2) {
        order.PassBarrier();
        oracle.PassBarrier();
      } else if (what == 2 && below(4) == 0) {
        order.StartBlock();
        oracle.StartBlock();
        raced = false;
      } else {
        unsigned lanes = live;
        if (with_parts && below(2) == 0) lanes &= static_cast<unsigned>(random());
        tally->syncs_of_parts += lanes != live;
        order.SyncWarp(warp, lanes, live);
        oracle.SyncWarp(warp, lanes);
      }
      continue;
    }
    const int thread = below(active);
    const size_t bytes = narrow ? size_t{1} << below(4) : 4;
    const size_t at = below(kBytes / bytes) * bytes;
    const AccessKind kind = static_cast<AccessKind>(below(3));
    order.Resume(thread);
    const Verdict expected = oracle.Access(at, bytes, kind, thread);
    int other = SharedShadow::kSeveral;
    const Verdict verdict = shadow.Access(kBegin + at, bytes, kind, &other);
    if (!IsRace(expected)) {
      ASSERT_EQ(verdict, expected) << "seed " << seed << ", step " << step;
    }
    if (IsRace(expected) && !raced) {
      raced = true;
      ++tally->races;
      tally->races_found += IsRace(verdict);
    }
  }
}

TEST(SharedShadow, FindsExactlyTheFirstRaceWhereWholeWarpsSync) {
  Tally tally;
  for (uint64_t seed = 0; seed < kPrograms; ++seed) {
    RunProgram(seed, /*with_parts=*/false, &tally);
    if (HasFatalFailure()) return;
  }
  EXPECT_GT(tally.races, kPrograms);
  EXPECT_EQ(tally.races_found, tally.races);
}

TEST(SharedShadow, InventsNoRaceWherePartsOfWarpsSyncAndMissesFew) {
  Tally tally;
  for (uint64_t seed = 0; seed < kPrograms; ++seed) {
    RunProgram(seed, /*with_parts=*/true, &tally);
    if (HasFatalFailure()) return;
  }
  EXPECT_GT(tally.syncs_of_parts, kPrograms);
  EXPECT_GT(tally.races, kPrograms);
  EXPECT_GT(tally.races_found, 0.99 * tally.races) << tally.races_found << " of " << tally.races;
}

// The quick check, which the hooks call first, agrees with Access and has the same effect.
TEST(SharedShadow, TheQuickWayAgreesWithTheOther) {
  Order order;
  SharedShadow quick(kBegin, kBytes, &order), slow(kBegin, kBytes, &order);
  std::mt19937_64 random(7);
  const auto below = [&](uint64_t limit) { return static_cast<int>(random() % limit); };
  order.StartBlock();
  int64_t taken = 0;
  for (int step = 0; step < 50000; ++step) {
    const int what = below(8);
    if (what == 0) order.PassBarrier();
    if (what == 1) order.SyncWarp(0, ~0u, ~0u);
    if (what == 2 && below(20) == 0) order.StartBlock();
    order.Resume(below(40));
    const bool two_bytes = below(2) == 0, writes = below(3) == 0;
    const uintptr_t address = kBegin + (two_bytes ? 8 + below(4) * 2 : below(2) * 4);
    const size_t bytes = two_bytes ? 2 : 4;
    const AccessKind kind = writes ? AccessKind::kWrite : AccessKind::kRead;
    const bool done = two_bytes ? writes ? quick.AccessQuickly<AccessKind::kWrite, 2>(address)
                                         : quick.AccessQuickly<AccessKind::kRead, 2>(address)
                      : writes ? quick.AccessQuickly<AccessKind::kWrite, 4>(address)
                                : quick.AccessQuickly<AccessKind::kRead, 4>(address);
    taken += done;
    int other = 0, other_of_slow = 0;
    const Verdict verdict = done ? Verdict::kFine : quick.Access(address, bytes, kind, &other);
    ASSERT_EQ(verdict, slow.Access(address, bytes, kind, &other_of_slow)) << step;
    ASSERT_EQ(other, other_of_slow) << step;
  }
  EXPECT_GT(taken, 5000);
}

TEST(SharedShadow, StampsMayBeReset) {
  Order order;
  SharedShadow shadow(kBegin, kBytes, &order);
  int other = 0;
  order.StartBlock();
  order.Resume(3);
  for (int i = 0; i < 100; ++i) order.PassBarrier();
  EXPECT_EQ(shadow.Access(kBegin, 4, AccessKind::kWrite, &other), Verdict::kFine);
  order.Reset();
  shadow.Reset();
  order.StartBlock();
  order.Resume(4);
  EXPECT_EQ(shadow.Access(kBegin, 4, AccessKind::kRead, &other), Verdict::kUnwritten);
}

}  // namespace
}  // namespace cuda_simulator
