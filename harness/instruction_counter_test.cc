#include "harness/instruction_counter.h"

#include <linux/perf_event.h>
#include <time.h>

#include <string>
#include <thread>

#include "absl/strings/match.h"
#include "gtest/gtest.h"

namespace tfb {
namespace {

double ThreadMilliseconds() {
  timespec time = {};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return 1e3 * static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_nsec);
}

// Spins for that much of this thread's own processor time.
void SpinFor(double milliseconds) {
  for (const double end = ThreadMilliseconds() + milliseconds; ThreadMilliseconds() < end;) {
  }
}

// The time of threads is an event as well, which kernels of virtual machines also count.
TEST(InstructionCounter, CountsWhatThisThreadAndThoseItStartsDo) {
  const auto counter = InstructionCounter::Open(PERF_TYPE_SOFTWARE, PERF_COUNT_SW_TASK_CLOCK);
  if (!counter.ok()) {  // perf_event_paranoid above 2
    EXPECT_EQ(counter.status().code(), absl::StatusCode::kUnavailable);
    EXPECT_TRUE(absl::StrContains(counter.status().message(), "the kernel counts no instructions"));
    return;
  }
  const int64_t begin = (*counter)->Read();
  SpinFor(20);
  const int64_t middle = (*counter)->Read();
  EXPECT_GT(middle - begin, 15'000'000);  // ns
  std::thread other([] { SpinFor(40); });
  other.join();
  EXPECT_GT((*counter)->Read() - middle, 35'000'000);
}

TEST(InstructionCounter, IsThereOrSaysWhyNot) {
  const auto counter = InstructionCounter::Open();
  if (!counter.ok()) {
    EXPECT_EQ(counter.status().code(), absl::StatusCode::kUnavailable);
    return;
  }
  const int64_t before = (*counter)->Read();
  volatile int sum = 0;
  for (int i = 0; i < 1'000'000; ++i) sum = sum + i;
  const int64_t counted = (*counter)->Read() - before;
  EXPECT_GT(counted, 1'000'000);
  EXPECT_LT(counted, 100'000'000);
}

}  // namespace
}  // namespace tfb
