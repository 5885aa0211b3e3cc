// The one pool of threads that every engine uses.
#ifndef TFB_CORE_THREAD_POOL_H_
#define TFB_CORE_THREAD_POOL_H_

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>

#include "absl/functional/function_ref.h"

namespace tfb {

// Eigen's pool with one operation. The calling thread works too, so a pool of 1 starts no thread.
class ThreadPool {
 public:
  explicit ThreadPool(int threads);  // at least 1
  ~ThreadPool();

  int threads() const { return threads_; }

  // Calls body(task, worker) once for each task in [0, tasks) and returns when all are done. Tasks
  // are taken in order, so put the longest first; worker is in [0, threads()) and no two running
  // calls have the same one. On every thread the body runs under the caller's floating-point state
  // (core/denormals.h). Allocates nothing. Calls must not be nested.
  void ParallelFor(int64_t tasks, absl::FunctionRef<void(int64_t task, int worker)> body);

  // What ParallelFor throws where a call is given up.
  struct Interrupted {};
  // Lets ParallelFor ask `interrupted`, on the calling thread between tasks and at most every 100 ms.
  // Where it returns true, tasks that have not begun are left out, and ParallelFor throws Interrupted
  // when the others are done. An empty function, which is the default, asks nobody.
  void SetInterrupt(std::function<bool()> interrupted) { interrupted_ = std::move(interrupted); }

  // Calls body(begin, end, worker) in the same way for ranges of `size` numbers that cover [0,
  // count); the last one may be shorter. Each is a task.
  template <class Body>
  void ParallelForRanges(int64_t count, int64_t size, const Body& body) {
    ParallelFor((count + size - 1) / size, [&](int64_t task, int worker) {
      body(task * size, std::min((task + 1) * size, count), worker);
    });
  }

 private:
  // Tells whether the call is to be given up.
  bool AskWhetherInterrupted();

  class Threads;  // Eigen's pool, with threads that have been started

  int threads_;
  std::function<bool()> interrupted_;
  std::chrono::steady_clock::time_point asked_;  // when it was asked last
  std::unique_ptr<Threads> pool_;                // null for one thread
};

}  // namespace tfb

#endif  // TFB_CORE_THREAD_POOL_H_
