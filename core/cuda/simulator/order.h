// Tracks the happens-before order of accesses in a launch.
#ifndef TFB_CORE_CUDA_SIMULATOR_ORDER_H_
#define TFB_CORE_CUDA_SIMULATOR_ORDER_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace cuda_simulator {

constexpr int kWarp = 32;
constexpr int kMaxThreads = 1024;  // of a block

// The kind of an access. An asynchronous copy writes its destination at any time between its begin
// and its end. The last two are of agents, see Order, and go by the async proxy: products of warp
// groups read, bulk copies write.
enum class AccessKind : uint8_t {
  kRead,
  kWrite,
  kAtomic,
  kCopyBegin,
  kCopyEnd,
  kProductRead,
  kBulkWrite
};

// A logical time. A thread's accesses between two of its barriers have the same stamp. 0 comes
// before all others.
using Stamp = uint32_t;

// Agents access memory beside the threads, while they go on: the products of a warp group, and the
// copies that complete on one barrier in shared memory. Among threads, an agent's number follows
// the threads'.
constexpr int kProductAgents = 8;  // warp groups of a block
constexpr int kCopyAgents = 56;    // barriers with more share them
constexpr int kAgents = kProductAgents + kCopyAgents;

// Only barriers order accesses: those of the block, and __syncwarp among the lanes of its mask. (By
// the CUDA programming guide, shuffles and votes do not.) Where only whole warps sync, one stamp
// per warp is enough. For syncs of a part of the warp, each lane has a stamp for each other lane:
// the other's accesses up to this stamp come before the lane's.
//
// From TrackAll on, until the next launch, each thread has a stamp for every other thread and for
// every agent. It serves the syncs that are not of the whole block nor within a warp: a thread
// releases what it knows, and another acquires that. A barrier of the block does not wait for
// agents.
class Order {
 public:
  Order() : own_(kMaxThreads), fence_(kMaxThreads), seen_(kMaxThreads * kWarp) {}

  void StartLaunch() {
    launch_start_ = ++last_;
    has_fences_ = false;
    tracks_all_ = false;
    block_starts_.clear();
  }
  void StartBlock() {
    block_start_ = barrier_ = ++last_;
    block_starts_.push_back(block_start_);
    for (std::vector<Stamp>& fences : proxy_fences_) fences.clear();
  }
  void PassBarrier() {
    barrier_ = ++last_;
    if (tracks_all_) ShareAgents();
  }
  // Synchronizes the `lanes` of the warp; `live_lanes` are those that have not finished.
  void SyncWarp(int warp, unsigned lanes, unsigned live_lanes);
  // Makes `thread` the running one.
  void Resume(int thread) {
    thread_ = thread;
    now_ = TimeOf(thread);
  }
  // Prepares for the functions below, in a block of that many threads.
  void TrackAll(int threads);
  bool tracks_all() const { return tracks_all_; }
  // The accesses before some point: a stamp for each agent and thread.
  using Knowledge = std::vector<Stamp>;
  // Adds to `to` the thread's accesses, and all that comes before them.
  void Release(int thread, Knowledge* to);
  // Puts all of `from` before what the thread does from now on.
  void Acquire(int thread, const Knowledge& from);
  // Returns a stamp for an agent's next accesses.
  Stamp Next() { return ++last_; }
  // Puts an agent's accesses up to a stamp before what the running thread does from now on.
  void EndOf(int agent, Stamp last);
  // Adds an agent's accesses to what comes before some point.
  static void AddAgent(int agent, Stamp last, Knowledge* to) {
    if (static_cast<int>(to->size()) <= agent) to->resize(kAgents);
    (*to)[agent] = std::max((*to)[agent], last);
  }
  // Tells whether any thread of the block knows of the agent's accesses up to a stamp.
  bool IsKnown(int agent, Stamp last) const;
  // Makes the running thread's ordinary accesses visible to agents.
  void FenceProxy();
  // Tells whether `writer` has called FenceProxy after an access at `then`, and before the running
  // thread's current access.
  bool IsFenced(Stamp then, int writer) const;
  // Returns the stamp of the running thread's last Acquire in this launch.
  Stamp acquired() const { return tracks_all_ ? acquired_[thread_] : 0; }

  // Orders nothing, but gives later accesses of the running thread to device memory another stamp.
  void Fence() {
    has_fences_ = true;
    fence_[thread_] = ++last_;
  }

  // Accesses with a lower stamp were in an earlier launch.
  Stamp launch_start() const { return launch_start_; }
  // Accesses with a lower stamp were in an earlier block.
  Stamp block_start() const { return block_start_; }
  // Accesses with a lower stamp come before everything now.
  Stamp barrier() const { return barrier_; }

  // ---- The running thread ----
  int thread() const { return thread_; }
  int warp() const { return thread_ / kWarp; }
  Stamp now() const { return now_; }
  // The stamp of accesses to device memory.
  Stamp now_on_device() const { return has_fences_ ? std::max(now_, fence_[thread_]) : now_; }
  // Accesses of this warp with a lower stamp come before everything that the warp does now.
  Stamp warp_barrier() const { return std::max(barrier_, warp_[warp()]); }
  // Tells whether the access of `other` at `then`, in this block, comes before the thread's current
  // one.
  bool IsBefore(Stamp then, int other) const {
    if (tracks_all_ && (other >= kMaxThreads || other / kWarp != warp())) {
      return (other < kMaxThreads && then < barrier_) || then <= seen_[At(thread_, other)];
    }
    if (then < barrier_ || other == thread_) return true;
    if (other / kWarp != warp()) return false;
    return then < warp_[warp()] || then <= seen_[At(thread_, other)];
  }

  // The accesses of a block that come before one of its threads at some time.
  struct Horizon {
    Stamp block_start = 0;
    Stamp barrier = 0;
    Stamp warp_barrier = 0;
    Stamp own = 0;  // accesses of the thread itself up to this one
    int thread = 0;
    int first = 0;            // the thread of seen[0]
    std::vector<Stamp> seen;  // accesses of the lanes of the warp, or of all threads, up to these
    bool Covers(Stamp then, int other) const {
      if (then < barrier || (other == thread && then <= own)) return true;
      if (other / kWarp == thread / kWarp && then < warp_barrier) return true;
      const size_t place = static_cast<size_t>(other - first);  // too large for an earlier one
      return place < seen.size() && then <= seen[place];
    }
  };
  // Returns what comes before the running thread now.
  Horizon HorizonNow() const;
  // Returns the number of the block to which a stamp of this launch belongs, in the order in which
  // blocks ran.
  size_t BlockAt(Stamp then) const {
    return std::upper_bound(block_starts_.begin(), block_starts_.end(), then) -
           block_starts_.begin() - 1;
  }
  Stamp start_of_block(size_t block) const { return block_starts_[block]; }

  // Tells whether stamps may overflow 32 bits in the next launch. All stamps must then be reset.
  bool NeedsReset() const { return last_ > Stamp{1} << 31; }
  void Reset() { *this = Order(); }

 private:
  Stamp TimeOf(int thread) const {
    return std::max(std::max(barrier_, warp_[thread / kWarp]), own_[thread]);
  }
  // Returns the place in seen_ of what comes before `thread` of the accesses of `other`, another
  // lane of the warp, or any thread or agent.
  size_t At(int thread, int other) const {
    if (!tracks_all_) return static_cast<size_t>(thread) * kWarp + other % kWarp;
    return static_cast<size_t>(thread) * width_ + Column(other);
  }
  static size_t Column(int other) {
    return static_cast<size_t>(other < kMaxThreads ? kAgents + other : other - kMaxThreads);
  }
  void ShareAgents();
  void ShareInWarp(int first, unsigned lanes);

  int thread_ = 0;
  Stamp now_ = 0;
  Stamp barrier_ = 0;
  Stamp launch_start_ = 0;
  Stamp block_start_ = 0;
  std::vector<Stamp> block_starts_;  // of the blocks of this launch that have begun
  Stamp last_ = 0;
  Stamp warp_[kMaxThreads / kWarp] = {};
  std::vector<Stamp> own_;    // for each thread, its last sync of a part of the warp
  std::vector<Stamp> fence_;  // for each thread, its last fence
  bool has_fences_ = false;   // in this launch
  // For each thread and lane, the stamp up to which the lane's accesses come before it; where all
  // are tracked, for each thread and each agent and thread, in rows of width_.
  std::vector<Stamp> seen_;
  bool tracks_all_ = false;
  int threads_ = 0;  // of a block, where all are tracked
  size_t width_ = 0;
  bool knows_more_[kMaxThreads / kWarp] = {};  // whether lanes of a warp acquired since it synced
  std::vector<Stamp> acquired_;                // for each thread
  std::vector<std::vector<Stamp>> proxy_fences_;  // for each thread, the stamps before its fences
};

}  // namespace cuda_simulator

#endif  // TFB_CORE_CUDA_SIMULATOR_ORDER_H_
