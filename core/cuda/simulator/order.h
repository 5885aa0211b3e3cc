// Which earlier accesses of a block's threads come before what one of them does now.
#ifndef TFB_CORE_CUDA_SIMULATOR_ORDER_H_
#define TFB_CORE_CUDA_SIMULATOR_ORDER_H_

#include <algorithm>
#include <cstdint>
#include <vector>

namespace cuda_simulator {

constexpr int kWarp = 32;
constexpr int kMaxThreads = 1024;  // of a block

// A time: between two barriers that it takes part in, a thread's accesses have the same one. 0 is
// before everything.
using Stamp = uint32_t;

// Only barriers order: those of the block, and __syncwarp among the lanes of its mask. (Shuffles
// and votes do not, says the CUDA programming guide.) Where only whole warps sync, one time for a
// warp is enough; for syncs of a part, each lane knows until when it is after each other lane.
class Order {
 public:
  Order() : own_(kMaxThreads), seen_(kMaxThreads * kWarp) {}

  void StartBlock() { block_start_ = barrier_ = ++last_; }
  void PassBarrier() { barrier_ = ++last_; }
  // All `lanes` of the warp meet; `live_lanes` are those that have not finished.
  void SyncWarp(int warp, unsigned lanes, unsigned live_lanes);
  // `thread` runs from now on.
  void Resume(int thread) {
    thread_ = thread;
    now_ = TimeOf(thread);
  }

  // What has a lower stamp was in an earlier block.
  Stamp block_start() const { return block_start_; }
  // What has a lower stamp is before everything now.
  Stamp barrier() const { return barrier_; }

  // ---- Of the running thread ----
  int thread() const { return thread_; }
  int warp() const { return thread_ / kWarp; }
  Stamp now() const { return now_; }
  // What has a lower stamp and is of this warp is before everything that the warp does now.
  Stamp warp_barrier() const { return std::max(barrier_, warp_[warp()]); }
  // Whether what `other` did at `then`, in this block, is before what the thread does now.
  bool IsBefore(Stamp then, int other) const {
    if (then < barrier_ || other == thread_) return true;
    if (other / kWarp != warp()) return false;
    return then < warp_[warp()] || then <= seen_[thread_ * kWarp + other % kWarp];
  }

  // Stamps are 32 bits: whether they may run out in the next launch. Then everything that has one
  // must be forgotten.
  bool NeedsReset() const { return last_ > Stamp{1} << 31; }
  void Reset() { *this = Order(); }

 private:
  Stamp TimeOf(int thread) const {
    return std::max(std::max(barrier_, warp_[thread / kWarp]), own_[thread]);
  }

  int thread_ = 0;
  Stamp now_ = 0;
  Stamp barrier_ = 0;
  Stamp block_start_ = 0;
  Stamp last_ = 0;
  Stamp warp_[kMaxThreads / kWarp] = {};
  std::vector<Stamp> own_;   // by thread: its last sync of a part of the warp
  std::vector<Stamp> seen_;  // by thread and lane: what the lane did until then is before it
};

}  // namespace cuda_simulator

#endif  // TFB_CORE_CUDA_SIMULATOR_ORDER_H_
