#include "harness/measure/instruction_counter.h"

#include <fcntl.h>
#include <linux/perf_event.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstdint>
#include <thread>

#include "absl/strings/match.h"
#include "gtest/gtest.h"

namespace tfb {
namespace {

// Writes to so many pages that the process has not touched before. Each is a fault.
void TouchPages(size_t pages) {
  const size_t page_bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t bytes = pages * page_bytes;
  void* const memory =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  madvise(memory, bytes, MADV_NOHUGEPAGE);  // where the kernel has huge pages at all
  for (size_t i = 0; i < pages; ++i) static_cast<volatile char*>(memory)[i * page_bytes] = 1;
  munmap(memory, bytes);
}

// Returns the faults of all threads of this process so far.
int64_t Faults() {
  rusage usage;
  getrusage(RUSAGE_SELF, &usage);
  return usage.ru_minflt + usage.ru_majflt;
}

void ExpectCounterOrReason(const absl::Status& status) {
  if (status.ok()) return;
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_TRUE(absl::StrContains(status.message(), "the kernel counts no instructions: ")) << status;
}

TEST(InstructionCounter, AnEventThatNoKernelHasIsUnavailableWithTheReason) {
  const auto counter = InstructionCounter::Open(/*type=*/0x7fffffff, /*config=*/~uint64_t{0});
  ASSERT_FALSE(counter.ok());
  ExpectCounterOrReason(counter.status());
}

TEST(InstructionCounter, ReadsTheCountsOfItsFileAndClosesIt) {
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  const int64_t counts[] = {7, int64_t{1} << 40};
  ASSERT_EQ(write(ends[1], counts, sizeof(counts)), static_cast<ssize_t>(sizeof(counts)));
  close(ends[1]);
  auto counter = InstructionCounter::OfFile(ends[0]);
  for (const int64_t count : counts) EXPECT_EQ(counter->Read(), count);
  EXPECT_EQ(counter->Read(), 0) << "the file has no more";
  counter.reset();
  EXPECT_EQ(fcntl(ends[0], F_GETFD), -1);
}

// Faults are an event as well, which kernels of virtual machines count, too, and of which there are
// as many on a slow machine as on a fast one.
TEST(InstructionCounter, CountsWhatThisThreadAndThoseItStartsDo) {
  const auto counter = InstructionCounter::Open(PERF_TYPE_SOFTWARE, PERF_COUNT_SW_PAGE_FAULTS);
  ExpectCounterOrReason(counter.status());
  if (!counter.ok()) GTEST_SKIP() << counter.status();  // perf_event_paranoid above 2
  const auto count = [&](int64_t pages, bool in_another_thread) {
    const int64_t faults = Faults(), begin = (*counter)->Read();
    if (in_another_thread) {
      std::thread([pages] { TouchPages(pages); }).join();
    } else {
      TouchPages(pages);
    }
    const int64_t counted = (*counter)->Read() - begin;
    EXPECT_GE(counted, pages);
    EXPECT_LT(counted, Faults() - faults + 1000);  // those tried again count here alone
  };
  count(1000, /*in_another_thread=*/false);
  count(3000, /*in_another_thread=*/true);
}

TEST(InstructionCounter, IsThereOrSaysWhyNot) {
  const auto counter = InstructionCounter::Open();
  ExpectCounterOrReason(counter.status());
  if (!counter.ok()) GTEST_SKIP() << counter.status();
  const int64_t before = (*counter)->Read();
  volatile int sum = 0;
  for (int i = 0; i < 1'000'000; ++i) sum = sum + i;
  const int64_t counted = (*counter)->Read() - before;
  EXPECT_GT(counted, 1'000'000);
  EXPECT_LT(counted, 100'000'000);
}

}  // namespace
}  // namespace tfb
