#include "core/thread_pool.h"

#include <atomic>
#include <thread>
#include <vector>

#include "gtest/gtest.h"

namespace tfb {
namespace {

TEST(ThreadPool, EveryTaskRunsOnceAndNoWorkerRunsTwoAtATime) {
  for (int threads : {1, 2, 5}) {
    ThreadPool pool(threads);
    for (int64_t tasks : {0, 1, 3, 1000}) {
      std::vector<std::atomic<int>> runs(tasks), busy(threads);
      std::atomic<bool> overlap{false};
      pool.ParallelFor(tasks, [&](int64_t task, int worker) {
        if (busy[worker].fetch_add(1) != 0) overlap = true;
        runs[task].fetch_add(1);
        busy[worker].fetch_sub(1);
      });
      for (const std::atomic<int>& count : runs) EXPECT_EQ(count.load(), 1);
      EXPECT_FALSE(overlap);
    }
  }
}

TEST(ThreadPool, ManyShortCallsFinish) {
  ThreadPool pool(3);
  std::atomic<int64_t> sum{0};
  for (int call = 0; call < 5000; ++call) {
    pool.ParallelFor(4, [&](int64_t task, int) { sum += task; });
  }
  EXPECT_EQ(sum, 5000 * 6);
}

TEST(ThreadPool, AnInterruptedCallThrowsWhenItsTasksAreDoneAndTheNextOneRuns) {
  for (int threads : {1, 3}) {
    ThreadPool pool(threads);
    const std::thread::id caller = std::this_thread::get_id();
    bool given_up = true;
    int asked = 0;
    pool.SetInterrupt([&] {
      EXPECT_EQ(std::this_thread::get_id(), caller);
      ++asked;
      return given_up;
    });
    constexpr int64_t kTasks = int64_t{1} << 40;  // hours of work
    std::atomic<int> running{0};
    EXPECT_THROW(pool.ParallelFor(kTasks,
                                  [&](int64_t, int) {
                                    ++running;
                                    --running;
                                  }),
                 ThreadPool::Interrupted);
    EXPECT_EQ(running, 0);
    EXPECT_EQ(asked, 1);
    given_up = false;
    std::atomic<int> runs{0};
    pool.ParallelFor(10, [&](int64_t, int) { ++runs; });
    EXPECT_EQ(runs, 10);
  }
}

}  // namespace
}  // namespace tfb
