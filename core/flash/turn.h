// Tasks of ThreadPool::ParallelFor that add to common sums in their own order, so that the sums
// have the same bits for any number of threads.
#ifndef TFB_CORE_FLASH_TURN_H_
#define TFB_CORE_FLASH_TURN_H_

#include <atomic>
#include <cstdint>
#include <thread>

namespace tfb {

// The number of tasks that have added to a sum. The tasks that do are numbered from 0 in the order
// in which the pool takes them; the memory of turns is a workspace's, so that they begin with a
// construction.
using Turn = std::atomic<int32_t>;
static_assert(sizeof(Turn) == 4 && Turn::is_always_lock_free);

// Waits until it is this task's turn to add. The tasks before it have begun, since tasks are taken
// in order, and wait for none behind them.
inline void Await(const Turn& turn, int64_t value) {
  while (turn.load(std::memory_order_acquire) != value) std::this_thread::yield();
}
inline void Pass(Turn& turn, int64_t value) {
  turn.store(static_cast<int32_t>(value + 1), std::memory_order_release);
}

}  // namespace tfb

#endif  // TFB_CORE_FLASH_TURN_H_
