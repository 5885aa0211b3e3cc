// Tracks what blocks of a launch pass on to each other.
#ifndef TFB_CORE_CUDA_SIMULATOR_RELEASES_H_
#define TFB_CORE_CUDA_SIMULATOR_RELEASES_H_

#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "core/cuda/simulator/order.h"

namespace cuda_simulator {

// Blocks are ordered by one pattern alone, which orders threads of a block, too: a thread calls
// __threadfence and later changes a place of device memory atomically, and then another thread
// changes that place atomically. All accesses that came before the fence come before those of the
// other thread's block from then on (the PTX memory model's fences and release sequences). The
// order is transitive. The fence that the model asks of the other thread is not checked, since
// NVIDIA's own samples have none, nor that the block's other threads learn of it by a barrier.
class Releases {
 public:
  explicit Releases(const Order* order) : order_(*order), fences_(kMaxThreads) {}

  void StartLaunch();
  void StartBlock();
  // ---- Calls of the running thread ----
  void Fence() {
    fences_[order_.thread()] = order_.HorizonNow();
    any_fence_ = true;
  }
  void Atomic(uintptr_t address) {
    if (any_fence_ || !places_.empty()) PassOn(address);
  }

  // Tells whether an access of this launch comes before the running thread.
  bool IsBefore(Stamp then, int thread) const;
  // The same for one of unknown threads of a block: tells whether any thread of the block passed
  // anything on to the running one.
  bool KnowsBlockOf(Stamp then) const;
  bool KnowsAny() const { return !known_.empty(); }

 private:
  using Numbers = std::vector<bool>;  // indices in releases_, as bits
  void PassOn(uintptr_t address);
  static void Join(const Numbers& from, Numbers* to);
  template <class Accept>
  bool FindOf(Stamp then, const Accept& accept) const;

  const Order& order_;
  std::vector<Order::Horizon>
      fences_;              // last fence of each thread of the block, if it is the block's
  bool any_fence_ = false;  // in this block
  std::vector<Order::Horizon> releases_;           // of this launch, by time
  std::unordered_map<uintptr_t, Numbers> places_;  // what each place passes on
  Numbers known_;                                  // what comes before the block
};

}  // namespace cuda_simulator

#endif  // TFB_CORE_CUDA_SIMULATOR_RELEASES_H_
