#define EIGEN_USE_THREADS
#include "core/thread_pool.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>

#include "core/denormals.h"
#include "unsupported/Eigen/CXX11/ThreadPool"

namespace tfb {
namespace {

// A Job lives on the caller's stack for the length of one ParallelFor. A closure over its address
// and an index fits the pool's task object, so that scheduling allocates nothing.
struct Job {
  Job(int64_t tasks, int helpers, absl::FunctionRef<void(int64_t, int)> body)
      : tasks(tasks), body(body), helpers_left(helpers) {}
  // Stops before the next task where `interrupted` returns true, which then holds for all workers.
  template <class Interrupted>
  void Work(int worker, const Interrupted& interrupted) {
    const ScopedFloatingPointControl as_the_caller(control);
    for (int64_t task; (task = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) {
      body(task, worker);
      if (interrupted()) {
        given_up = true;
        next.store(tasks, std::memory_order_relaxed);
      }
    }
  }
  void HelperDone() {
    const std::lock_guard<std::mutex> lock(mutex);
    if (--helpers_left == 0) all_done.notify_one();
  }
  void WaitForHelpers() {
    std::unique_lock<std::mutex> lock(mutex);
    all_done.wait(lock, [this] { return helpers_left == 0; });
  }

  const int64_t tasks;
  const absl::FunctionRef<void(int64_t, int)> body;
  const FloatingPointControl control = FloatingPointControl::Current();
  std::atomic<int64_t> next{0};
  // Std's mutex, which thread sanitizer sees even where Abseil is a prebuilt archive.
  std::mutex mutex;
  std::condition_variable all_done;
  int helpers_left;
  bool given_up = false;  // set and read on the calling thread alone
};

constexpr bool Never() { return false; }

}  // namespace

ThreadPool::ThreadPool(int threads) : threads_(std::max(threads, 1)) {
  if (threads_ > 1) pool_ = std::make_unique<Eigen::ThreadPool>(threads_ - 1);
}

ThreadPool::~ThreadPool() = default;

void ThreadPool::ParallelFor(int64_t tasks, absl::FunctionRef<void(int64_t, int)> body) {
  const int helpers = static_cast<int>(std::min<int64_t>(threads_, tasks)) - 1;
  if (helpers <= 0 && !interrupted_) {
    for (int64_t task = 0; task < tasks; ++task) body(task, 0);
    return;
  }
  Job job(tasks, std::max(helpers, 0), body);
  for (int worker = 1; worker <= helpers; ++worker) {
    pool_->Schedule([&job, worker] {
      job.Work(worker, Never);
      job.HelperDone();
    });
  }
  if (interrupted_) {
    job.Work(0, [this] { return AskWhetherInterrupted(); });
  } else {
    job.Work(0, Never);
  }
  job.WaitForHelpers();
  if (job.given_up) throw Interrupted();
}

bool ThreadPool::AskWhetherInterrupted() {
  constexpr std::chrono::milliseconds kInterval(100);
  const std::chrono::steady_clock::time_point now = std::chrono::steady_clock::now();
  if (now - asked_ < kInterval) return false;
  asked_ = now;
  return interrupted_();
}

}  // namespace tfb
