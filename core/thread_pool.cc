#define EIGEN_USE_THREADS
#include "core/thread_pool.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "core/denormals.h"
#include "unsupported/Eigen/CXX11/ThreadPool"

namespace tfb {
namespace {

// A thread that waits for the one function that it runs, and ends without one where none comes.
class WaitingThread {
 public:
  // Throws std::system_error where the operating system refuses a thread.
  WaitingThread() : thread_([this] { WaitAndRun(); }) {}
  ~WaitingThread() {
    Run(nullptr);
    thread_.join();
  }
  // The first call counts.
  void Run(std::function<void()> work) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (is_decided_) return;
    is_decided_ = true;
    work_ = std::move(work);
    decided_.notify_one();
  }

 private:
  void WaitAndRun() {
    std::unique_lock<std::mutex> lock(mutex_);
    decided_.wait(lock, [this] { return is_decided_; });
    const std::function<void()> work = std::move(work_);
    lock.unlock();
    if (work != nullptr) work();
  }

  std::mutex mutex_;
  std::condition_variable decided_;
  bool is_decided_ = false;
  std::function<void()> work_;
  std::thread thread_;  // the last member, so that it starts when the others are there
};

using WaitingThreads = std::vector<std::unique_ptr<WaitingThread>>;

// Returns as many threads as the operating system grants, at most `most`.
WaitingThreads StartThreads(int most) {
  WaitingThreads threads;
  threads.reserve(most);
  try {
    while (static_cast<int>(threads.size()) < most) {
      threads.push_back(std::make_unique<WaitingThread>());
    }
  } catch (const std::system_error&) {  // a limit of the user, of a control group or of memory
  }
  return threads;
}

// Eigen's pool takes its threads from this. A pool that asks the operating system itself never ends
// where it is refused one: its constructor throws, and waits for those that it has started. Nor can
// it go without one of them, because its destructor waits until all have run out of work.
struct ThreadsAtHand {
  struct Task {
    std::function<void()> f;
  };
  using EnvThread = WaitingThread;

  WaitingThread* CreateThread(std::function<void()> work) {
    WaitingThread* thread = threads->back().release();
    threads->pop_back();
    thread->Run(std::move(work));
    return thread;
  }
  Task CreateTask(std::function<void()> f) { return Task{std::move(f)}; }
  void ExecuteTask(const Task& task) { task.f(); }

  WaitingThreads* threads;  // read by the pool's constructor alone
};

// Memory that is kept free. It is a call, not a new-expression, which a compiler may leave out.
class Room {
 public:
  explicit Room(size_t bytes) : memory_(::operator new(bytes)) {}
  ~Room() { ::operator delete(memory_); }
  Room(const Room&) = delete;
  Room& operator=(const Room&) = delete;

 private:
  void* memory_;
};

// Returns at least the bytes that Eigen's pool of so many threads allocates: for each a queue, up to
// as many numbers as there are threads, and less than 512 for the rest.
size_t PoolBytes(size_t threads) {
  using Pool = Eigen::ThreadPoolTempl<ThreadsAtHand>;
  return threads * (sizeof(Pool::Queue) + threads * sizeof(unsigned) + 512) + sizeof(Pool);
}

// Eigen's pool does not check whether it got its memory, of which the stacks of threads may leave
// none: so the threads start while it is taken. Throws std::bad_alloc where there is not enough.
WaitingThreads StartThreadsBesideRoom(int most) {
  if (most == 0) return {};
  const Room room(PoolBytes(most));
  return StartThreads(most);
}

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

class ThreadPool::Threads : public Eigen::ThreadPoolTempl<ThreadsAtHand> {
 public:
  explicit Threads(WaitingThreads threads)
      : Eigen::ThreadPoolTempl<ThreadsAtHand>(static_cast<int>(threads.size()),
                                              ThreadsAtHand{&threads}) {}
};

// Where the operating system refuses threads, those that there are do the work. Which thread does a
// task is left open anyhow, so that the result is the same.
ThreadPool::ThreadPool(int threads) : threads_(std::max(threads, 1)) {
  WaitingThreads started = StartThreadsBesideRoom(threads_ - 1);
  if (!started.empty()) pool_ = std::make_unique<Threads>(std::move(started));
}

ThreadPool::~ThreadPool() = default;

void ThreadPool::ParallelFor(int64_t tasks, absl::FunctionRef<void(int64_t, int)> body) {
  const int64_t started = pool_ == nullptr ? 0 : pool_->NumThreads();
  const int helpers = static_cast<int>(std::min(started, tasks - 1));
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
