#include "core/thread_pool.h"

#include <pthread.h>
#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <mutex>
#include <new>
#include <set>
#include <system_error>
#include <thread>
#include <vector>

#include "core/sanitizers.h"
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

constexpr size_t kMegabyte = size_t{1} << 20;

// Leaves this process so many bytes of address space, and gives its further threads such stacks.
void LeaveRoom(size_t bytes, size_t stack) {
  pthread_attr_t attributes;
  ASSERT_EQ(pthread_attr_init(&attributes), 0);
  ASSERT_EQ(pthread_attr_setstacksize(&attributes, stack), 0);
  ASSERT_EQ(pthread_setattr_default_np(&attributes), 0);
  std::FILE* const statm = std::fopen("/proc/self/statm", "r");
  ASSERT_NE(statm, nullptr);
  size_t pages = 0;
  ASSERT_EQ(std::fscanf(statm, "%zu", &pages), 1);
  std::fclose(statm);
  rlimit limit;
  ASSERT_EQ(getrlimit(RLIMIT_AS, &limit), 0);
  limit.rlim_cur = pages * sysconf(_SC_PAGESIZE) + bytes;
  ASSERT_EQ(setrlimit(RLIMIT_AS, &limit), 0);
}

// Runs tasks on a pool that asks for more threads than there is room for, and ends the process: with
// 0 where all is as it should be.
void RunWithRoomForThreads(int room) {
  alarm(60);  // a pool that hangs ends by this signal
  // The stacks are so large that none of an ended thread, which the C library keeps, serves. Half of
  // one is for what the threads allocate.
  constexpr size_t kStack = 256 * kMegabyte;
  LeaveRoom(room * kStack + kStack / 2, kStack);
  {
    ThreadPool pool(9);
    EXPECT_THROW(std::thread([] {}).join(), std::system_error) << "there is room for all threads";
    EXPECT_EQ(pool.threads(), 9);
    for (const bool asks : {false, true}) {
      if (asks) pool.SetInterrupt([] { return false; });
      std::vector<std::atomic<int>> runs(1000);
      std::mutex mutex;
      std::set<std::thread::id> threads;
      pool.ParallelFor(1000, [&](int64_t task, int worker) {
        EXPECT_LT(worker, 9);
        ++runs[task];
        std::this_thread::sleep_for(std::chrono::microseconds(20));
        const std::lock_guard<std::mutex> lock(mutex);
        threads.insert(std::this_thread::get_id());
      });
      for (const std::atomic<int>& count : runs) EXPECT_EQ(count.load(), 1);
      EXPECT_LE(threads.size(), room + 1u);
    }
  }
  _exit(testing::Test::HasFailure() ? 1 : 0);
}

// The same where the stacks of 3000 threads, which do not fit, would leave no memory for the pool: its
// queues of 40 KiB are more than the C library may have reserved for a thread, 64 MiB.
void RunWhereStacksTakeAllMemory() {
  alarm(60);
  LeaveRoom(300 * kMegabyte, kMegabyte / 16);
  {
    ThreadPool pool(3000);
    std::vector<std::atomic<int>> runs(5000);
    pool.ParallelFor(5000, [&](int64_t task, int) { ++runs[task]; });
    for (const std::atomic<int>& count : runs) EXPECT_EQ(count.load(), 1);
  }
  _exit(testing::Test::HasFailure() ? 1 : 0);
}

TEST(ThreadPool, HasMemoryWhereThreadsTakeAllThatTheyGet) {
  if (kIsSanitized) GTEST_SKIP() << "a sanitizer's memory is beyond every limit of address space";
  EXPECT_EXIT(RunWhereStacksTakeAllMemory(), testing::ExitedWithCode(0), "");
}

TEST(ThreadPool, RefusesToBeWhereThereIsNoMemory) {
  if (kIsSanitized) GTEST_SKIP() << "a sanitizer's memory is beyond every limit of address space";
  const auto refuses = [] {
    alarm(60);
    LeaveRoom(8 * kMegabyte, kMegabyte);
    EXPECT_THROW(ThreadPool pool(3000), std::bad_alloc);
    _exit(testing::Test::HasFailure() ? 1 : 0);
  };
  EXPECT_EXIT(refuses(), testing::ExitedWithCode(0), "");
}

TEST(ThreadPool, WorksWithTheThreadsThatTheOperatingSystemGrants) {
  if (kIsSanitized) GTEST_SKIP() << "a sanitizer's memory is beyond every limit of address space";
  for (int room : {0, 1, 3}) {
    EXPECT_EXIT(RunWithRoomForThreads(room), testing::ExitedWithCode(0), "") << room;
  }
}

}  // namespace
}  // namespace tfb
