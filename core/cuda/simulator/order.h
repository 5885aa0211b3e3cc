// Tracks the happens-before order of accesses in a launch.
#ifndef TFB_CORE_CUDA_SIMULATOR_ORDER_H_
#define TFB_CORE_CUDA_SIMULATOR_ORDER_H_

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace cuda_simulator {

constexpr int kWarp = 32;
constexpr int kMaxThreads = 1024;  // of a block

// The kind of an access. An asynchronous copy writes its destination at any time between its begin
// and its end.
enum class AccessKind : uint8_t { kRead, kWrite, kAtomic, kCopyBegin, kCopyEnd };

// A logical time. A thread's accesses between two of its barriers have the same stamp. 0 comes
// before all others.
using Stamp = uint32_t;

// Only barriers order accesses: those of the block, and __syncwarp among the lanes of its mask. (By
// the CUDA programming guide, shuffles and votes do not.) Where only whole warps sync, one stamp
// per warp is enough. For syncs of a part of the warp, each lane has a stamp for each other lane:
// the other's accesses up to this stamp come before the lane's.
class Order {
 public:
  Order() : own_(kMaxThreads), fence_(kMaxThreads), seen_(kMaxThreads * kWarp) {}

  void StartLaunch() {
    launch_start_ = ++last_;
    has_fences_ = false;
    block_starts_.clear();
  }
  void StartBlock() {
    block_start_ = barrier_ = ++last_;
    block_starts_.push_back(block_start_);
  }
  void PassBarrier() { barrier_ = ++last_; }
  // Synchronizes the `lanes` of the warp; `live_lanes` are those that have not finished.
  void SyncWarp(int warp, unsigned lanes, unsigned live_lanes);
  // Makes `thread` the running one.
  void Resume(int thread) {
    thread_ = thread;
    now_ = TimeOf(thread);
  }
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
    if (then < barrier_ || other == thread_) return true;
    if (other / kWarp != warp()) return false;
    return then < warp_[warp()] || then <= seen_[thread_ * kWarp + other % kWarp];
  }

  // The accesses of a block that come before one of its threads at some time.
  struct Horizon {
    Stamp block_start = 0;
    Stamp barrier = 0;
    Stamp warp_barrier = 0;
    Stamp own = 0;  // accesses of the thread itself up to this one
    int thread = 0;
    std::array<Stamp, kWarp> seen = {};  // accesses of the lanes of the warp up to these
    bool Covers(Stamp then, int other) const {
      if (then < barrier || (other == thread && then <= own)) return true;
      if (other / kWarp != thread / kWarp) return false;
      return then < warp_barrier || then <= seen[other % kWarp];
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
  // For each thread and lane, the stamp up to which the lane's accesses come before it.
  std::vector<Stamp> seen_;
};

}  // namespace cuda_simulator

#endif  // TFB_CORE_CUDA_SIMULATOR_ORDER_H_
