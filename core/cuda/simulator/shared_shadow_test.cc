// Tests random programs of a block's threads and agents against an oracle that keeps every access
// and, for every thread, how much of each other comes before its current access.
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
constexpr int kAgentNumbers[] = {kMaxThreads + 1, kMaxThreads + kProductAgents + 3};
constexpr int kActors = kThreads + 2;  // threads and agents, which follow them

class Oracle {
 public:
  using Knowledge = std::vector<int>;  // of each actor, the accesses before that time
  Oracle() : knows_(kThreads, Knowledge(kActors, 0)), fences_(kThreads) {}

  void StartBlock() { *this = Oracle(); }
  void PassBarrier() { WaitForAll(0, kThreads, ~0u); }
  void SyncWarp(int warp, unsigned lanes) {
    WaitForAll(warp * kWarp, std::min(kThreads, (warp + 1) * kWarp), lanes);
  }
  void Release(int thread, Knowledge* to) {
    knows_[thread][thread] = now_;
    Join(knows_[thread], to);
  }
  void Acquire(int thread, const Knowledge& from) { Join(from, &knows_[thread]); }
  void FenceProxy(int thread) {
    fences_[thread].push_back(now_);
    accesses_.push_back({kBytes, AccessKind::kRead, thread, now_});  // for the time that it takes
    ++now_;
  }
  int now() const { return now_; }

  // Returns the verdict that the access by `actor` must get, a thread or an agent that the thread set
  // to work.
  Verdict Access(size_t at, size_t bytes, AccessKind kind, int thread, int actor) {
    Verdict worst = Verdict::kFine;
    for (size_t byte = at; byte < at + bytes; ++byte) {
      worst = std::max(worst, AccessByte(byte, kind, thread));
    }
    for (size_t byte = at; byte < at + bytes; ++byte) {
      accesses_.push_back({byte, kind, actor, static_cast<int>(accesses_.size())});
    }
    now_ = static_cast<int>(accesses_.size());
    return worst;
  }

 private:
  struct Past {
    size_t byte;
    AccessKind kind;
    int actor;
    int time;
  };
  static bool Reads(AccessKind kind) {
    return kind == AccessKind::kRead || kind == AccessKind::kProductRead;
  }

  Verdict AccessByte(size_t byte, AccessKind kind, int thread) const {
    bool reads_before = false, writes_before = false;
    const Past* last_write = nullptr;
    for (const Past& past : accesses_) {
      if (past.byte != byte) continue;
      if (!Reads(past.kind)) last_write = &past;
      if (past.actor == thread || past.time < knows_[thread][past.actor]) continue;
      if (past.kind == AccessKind::kAtomic && kind == AccessKind::kAtomic) continue;
      writes_before |= !Reads(past.kind);
      reads_before |= Reads(past.kind) && !Reads(kind);
    }
    if (writes_before) return Verdict::kRaceWithWrite;
    if (reads_before) return Verdict::kRaceWithRead;
    if (last_write == nullptr) {
      const bool writes = kind == AccessKind::kWrite || kind == AccessKind::kBulkWrite;
      return writes ? Verdict::kFine : Verdict::kUnwritten;
    }
    const bool by_agent = kind == AccessKind::kProductRead || kind == AccessKind::kBulkWrite;
    if (!by_agent || last_write->actor >= kThreads) return Verdict::kFine;
    for (const int fence : fences_[last_write->actor]) {
      const bool follows = fence > last_write->time;
      if (follows && (last_write->actor == thread || fence < knows_[thread][last_write->actor])) {
        return Verdict::kFine;
      }
    }
    return Verdict::kUnfenced;
  }

  static void Join(const Knowledge& from, Knowledge* to) {
    for (int actor = 0; actor < kActors; ++actor)
      (*to)[actor] = std::max((*to)[actor], from[actor]);
  }

  // Lets the threads of [first, last) that `lanes` names, by number modulo 32, wait for each other.
  void WaitForAll(int first, int last, unsigned lanes) {
    Knowledge joined(kActors, 0);
    std::vector<int> members;
    for (int t = first; t < last; ++t) {
      if ((lanes >> t % kWarp & 1) != 0) members.push_back(t);
    }
    for (const int t : members) {
      knows_[t][t] = now_;
      Join(knows_[t], &joined);
    }
    for (const int t : members) knows_[t] = joined;
  }

  std::vector<Past> accesses_;
  std::vector<Knowledge> knows_;
  std::vector<std::vector<int>> fences_;  // of each thread, the times before its fences
  int now_ = 0;
};

bool IsRace(Verdict verdict) { return verdict >= Verdict::kRaceWithRead; }

struct Tally {
  int races = 0;        // accesses that race, in programs that had no race before
  int races_found = 0;  // of these
  int unfenced = 0;     // accesses
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
    const Verdict expected = oracle.Access(at, bytes, kind, thread, thread);
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

// Runs a program of threads that also pass on what they know through two places, and of agents that
// they set to work. Two actors' atomic accesses, after which a third may miss a race, are left out
// unless `with_atomics`.
void RunProgramWithAgents(uint64_t seed, bool with_atomics, Tally* tally) {
  std::mt19937_64 random(seed);
  const auto below = [&](uint64_t limit) { return static_cast<int>(random() % limit); };
  Order order;
  SharedShadow shadow(kBegin, kBytes, &order);
  Oracle oracle;
  struct Place {
    Order::Knowledge known;
    Oracle::Knowledge expected = Oracle::Knowledge(kActors, 0);
  } places[2];
  struct Work {
    Stamp stamp;
    int time;
  };
  std::vector<Work> works[2];  // of the agents
  shadow.StartLaunch(kBytes, /*admits_quick_accesses=*/false);
  const auto start_block = [&] {
    order.StartBlock();
    oracle.StartBlock();
    for (Place& place : places) place = {};
    for (std::vector<Work>& work : works) work.clear();
  };
  start_block();
  order.TrackAll(kThreads);
  const int active = 2 + below(kThreads - 1);
  const int syncs_per_access = 2 + below(5);  // of 8 steps
  const bool narrow = below(2) == 0;
  bool raced = false;
  for (int step = 0; step < 160; ++step) {
    const int thread = below(active), a = below(2);
    order.Resume(thread);
    if (below(8) < syncs_per_access) {
      Place& place = places[below(2)];
      const int warp = thread / kWarp, what = below(12);
      const unsigned live = warp == 2 ? (1u << (kThreads - 2 * kWarp)) - 1 : ~0u;
      if (what < 3) {
        order.Release(thread, &place.known);
        oracle.Release(thread, &place.expected);
      } else if (what < 6) {
        order.Acquire(thread, place.known);
        oracle.Acquire(thread, place.expected);
      } else if (what == 6) {
        order.FenceProxy();
        oracle.FenceProxy(thread);
      } else if (what == 7 && below(3) == 0) {
        order.PassBarrier();
        oracle.PassBarrier();
      } else if (what == 8 && below(8) == 0) {
        start_block();
        raced = false;
      } else if (what < 10 && !works[a].empty()) {
        // The thread, or the place, learns of some of what the agent did.
        const Work& work = works[a][below(works[a].size())];
        Oracle::Knowledge known(kActors, 0);
        known[kThreads + a] = work.time;
        if (below(2) == 0) {
          order.EndOf(kAgentNumbers[a] - kMaxThreads, work.stamp);
          oracle.Acquire(thread, known);
        } else {
          Order::AddAgent(kAgentNumbers[a] - kMaxThreads, work.stamp, &place.known);
          for (int n = 0; n < kActors; ++n) {
            place.expected[n] = std::max(place.expected[n], known[n]);
          }
        }
      } else {
        const unsigned lanes = below(2) == 0 ? live & static_cast<unsigned>(random()) : live;
        tally->syncs_of_parts += lanes != live;
        order.SyncWarp(warp, lanes, live);
        oracle.SyncWarp(warp, lanes);
      }
      continue;
    }
    const size_t bytes = narrow ? size_t{1} << below(4) : 4;
    const size_t at = below(kBytes / bytes) * bytes;
    const AccessKind kinds[] = {AccessKind::kRead, AccessKind::kWrite, AccessKind::kProductRead,
                                AccessKind::kBulkWrite, AccessKind::kAtomic};
    const AccessKind kind = kinds[below(with_atomics ? 5 : 4)];
    const bool by_agent = kind == AccessKind::kProductRead || kind == AccessKind::kBulkWrite;
    const SharedShadow::Agent agent{kAgentNumbers[a], by_agent ? order.Next() : 0};
    const Verdict expected =
        oracle.Access(at, bytes, kind, thread, by_agent ? kThreads + a : thread);
    if (by_agent) works[a].push_back({agent.when, oracle.now()});
    int other = SharedShadow::kSeveral;
    const Verdict verdict =
        shadow.Access(kBegin + at, bytes, kind, &other, by_agent ? &agent : nullptr);
    if (!IsRace(expected) && !(with_atomics && expected == Verdict::kUnfenced)) {
      ASSERT_EQ(verdict, expected) << "seed " << seed << ", step " << step;
    }
    if (IsRace(expected) && !raced) {
      raced = true;
      ++tally->races;
      tally->races_found += IsRace(verdict);
    }
    tally->unfenced += expected == Verdict::kUnfenced;
  }
}

TEST(SharedShadow, FindsExactlyTheFirstRaceOfThreadsAndAgentsThatPassOnWhatTheyKnow) {
  Tally tally;
  for (uint64_t seed = 0; seed < kPrograms; ++seed) {
    RunProgramWithAgents(seed, /*with_atomics=*/false, &tally);
    if (HasFatalFailure()) return;
  }
  EXPECT_GT(tally.syncs_of_parts, kPrograms);
  EXPECT_GT(tally.races, kPrograms);
  EXPECT_GT(tally.unfenced, kPrograms);
  EXPECT_EQ(tally.races_found, tally.races);
}

TEST(SharedShadow, InventsNoRaceOfAtomicsWithAgents) {
  Tally tally;
  for (uint64_t seed = 0; seed < kPrograms; ++seed) {
    RunProgramWithAgents(seed, /*with_atomics=*/true, &tally);
    if (HasFatalFailure()) return;
  }
  EXPECT_GT(tally.races, kPrograms);
  EXPECT_GT(tally.races_found, 0.9 * tally.races) << tally.races_found << " of " << tally.races;
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
