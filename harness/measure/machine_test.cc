#include "harness/measure/machine.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cmath>
#include <cstdlib>
#include <fstream>
#include <numeric>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "core/cpu/kernels.h"
#include "gtest/gtest.h"
#include "harness/testing/simulated_clock.h"

namespace tfb {
namespace {

TEST(Machine, DescriptionNamesHostProcessorMemoryAndBuild) {
  const Environment machine = DescribeMachine(2, "");
  EXPECT_FALSE(machine.host().empty());
  EXPECT_FALSE(machine.os().empty());
  EXPECT_FALSE(machine.cpu_model().empty());
  EXPECT_EQ(machine.threads(), 2);
  EXPECT_GE(machine.logical_cores(), 1);
  EXPECT_GT(machine.memory_bytes(), 1u << 20);
  ASSERT_EQ(machine.simd_size(), 1);
  EXPECT_FALSE(machine.simd(0).empty());
  EXPECT_FALSE(machine.compiler().empty());
  EXPECT_NE(machine.compile_flags().find("-std=c++17"), std::string::npos)
      << machine.compile_flags();
  EXPECT_FALSE(machine.compilation_mode().empty());
  EXPECT_GT(machine.start_unix_ns(), 0);
}

TEST(Machine, GpusAreListedOrTheirAbsenceIsExplained) {
  const Environment machine = DescribeMachine(1, "");
  EXPECT_EQ(machine.gpus_size() == 0, !machine.no_gpu_reason().empty());
  if (machine.gpus_size() == 0) {
    EXPECT_EQ(machine.no_gpu_reason().rfind("no CUDA device: ", 0), 0u) << machine.no_gpu_reason();
  }
}

TEST(Machine, CommitOutsideOfAWorkspaceIsUnknown) {
  EXPECT_EQ(DescribeMachine(1, "").git_commit(), "");
  const Environment elsewhere = DescribeMachine(1, "/proc");
  EXPECT_EQ(elsewhere.git_commit(), "");
  EXPECT_FALSE(elsewhere.has_git_dirty());
}

TEST(Machine, CommitAndUncommittedChangesAreFound) {
  if (std::system("git --version > /dev/null 2>&1") != 0) GTEST_SKIP() << "git is not installed";
  const std::string folder = absl::StrCat(::testing::TempDir(), "/repository_", getpid());
  const std::vector<std::string> commands = {
      absl::StrCat("git init -q ", folder),
      absl::StrCat("git -C ", folder, " -c user.name=n -c user.email=e@example.org",
                   " commit -q --allow-empty -m first")};
  for (const std::string& command : commands) ASSERT_EQ(std::system(command.c_str()), 0) << command;
  const Environment clean = DescribeMachine(1, folder);
  EXPECT_EQ(clean.git_commit().size(), 40u);
  ASSERT_TRUE(clean.has_git_dirty());
  EXPECT_FALSE(clean.git_dirty());
  std::ofstream(folder + "/new") << "text";
  EXPECT_TRUE(DescribeMachine(1, folder).git_dirty());
}

TEST(Machine, PeaksAreMeasuredOncePerNumberOfThreads) {
  constexpr double kTick = 1.0 / 32;  // by which each pass is long enough at once
  TickingClock clock(kTick);
  Environment machine;
  MeasurePeaks({2, 1, 2}, &machine, &clock);
  ASSERT_EQ(machine.peaks_size(), 4);
  EXPECT_EQ(machine.peaks(0).name(), "f32 fma, 1 thread");
  EXPECT_EQ(machine.peaks(1).name(), "read, 1 thread");
  EXPECT_EQ(machine.peaks(2).name(), "f32 fma, 2 threads");
  EXPECT_EQ(machine.peaks(3).threads(), 2);
  // Each thread does 2^12 iterations of multiply-adds between two readings. All threads together
  // read the same bytes once, whole MiB of which there are at least 64.
  const double flops = BestCpuKernels().fma_peak(1 << 12);
  EXPECT_EQ(machine.peaks(0).value(), flops / kTick);
  EXPECT_EQ(machine.peaks(2).value(), 2 * flops / kTick);
  const double mebibytes = machine.peaks(1).value() * kTick / (1 << 20);
  EXPECT_GE(mebibytes, 64);
  EXPECT_EQ(mebibytes, std::floor(mebibytes));
  EXPECT_EQ(machine.peaks(3).value(), machine.peaks(1).value());
}

TEST(Machine, EveryWordIsRead) {
  std::vector<uint64_t> words(1000);
  std::iota(words.begin(), words.end(), 1);
  for (const int64_t count : {0, 1, 31, 32, 33, 1000}) {
    EXPECT_EQ(ReadAll(words.data(), count), static_cast<uint64_t>(count * (count + 1) / 2));
  }
}

TEST(Machine, LimitsArePlausible) {
  EXPECT_GE(UsableCores(), 1);
  EXPECT_GT(AvailableMemoryBytes(), 1 << 20);
  EXPECT_GE(LastLevelCacheBytes(), 64 << 10);
  EXPECT_GT(PeakResidentBytes(), 1 << 20);
}

TEST(Machine, WorkingDirectoryIsTheCallers) {
  setenv("BUILD_WORKING_DIRECTORY", "/where/i/stand", 1);
  EXPECT_EQ(DescribeMachine(1, "").working_directory(), "/where/i/stand");
  unsetenv("BUILD_WORKING_DIRECTORY");
  EXPECT_EQ(DescribeMachine(1, "").working_directory().front(), '/');
}

}  // namespace
}  // namespace tfb
