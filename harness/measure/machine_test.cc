#include "harness/measure/machine.h"

#include <dlfcn.h>
#include <sched.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <numeric>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "core/cpu/kernels.h"
#include "core/runfiles.h"
#include "gtest/gtest.h"
#include "harness/measure/affinity.h"
#include "harness/measure/host_files.h"
#include "harness/testing/simulated_clock.h"

namespace tfb {
namespace {

std::string Contents(const std::string& path) {
  std::stringstream text;
  text << std::ifstream(path, std::ios::binary).rdbuf();
  return text.str();
}

TEST(Machine, DescriptionNamesHostProcessorMemoryAndBuild) {
  const Environment machine = DescribeMachine(2, "");
  const HostFiles files;
  char host[256] = "";
  ASSERT_EQ(gethostname(host, sizeof(host) - 1), 0);
  EXPECT_EQ(machine.host(), host);
  EXPECT_EQ(machine.host(), HostName());
  // "Debian GNU/Linux 12 (bookworm), Linux 6.1.0 x86_64"
  const std::string release = Contents("/proc/sys/kernel/osrelease");
  EXPECT_EQ(machine.os().rfind(files.Distribution() + ", Linux ", 0), 0u) << machine.os();
  EXPECT_TRUE(absl::StrContains(machine.os(), release.substr(0, release.find('\n'))))
      << machine.os();
  EXPECT_EQ(machine.cpu_model(), files.CpuModel());
  EXPECT_EQ(machine.threads(), 2);
  EXPECT_EQ(machine.logical_cores(), UsableCores());
  EXPECT_LE(machine.physical_cores(), sysconf(_SC_NPROCESSORS_CONF));
  EXPECT_EQ(static_cast<size_t>(machine.caches_size()), files.Caches().size());
  EXPECT_EQ(static_cast<int64_t>(machine.memory_bytes()), files.MemoryBytes());
  const std::map<std::string, std::string> simd_names = {{"avx512", "AVX-512"}, {"avx2", "AVX2"}};
  const std::string kernels(BestCpuKernels().name);
  ASSERT_EQ(machine.simd_size(), 1);
  EXPECT_EQ(machine.simd(0), simd_names.count(kernels) > 0 ? simd_names.at(kernels) : kernels);
  EXPECT_FALSE(machine.compiler().empty());
  EXPECT_NE(machine.compile_flags().find("-std=c++17"), std::string::npos)
      << machine.compile_flags();
  EXPECT_FALSE(machine.compilation_mode().empty());
  EXPECT_GT(machine.start_unix_ns(), 0);
}

// Two builds that differ anywhere differ in the checksum, which is that of zlib's crc32c:
// Castagnoli's polynomial, reflected, from all ones, and inverted.
TEST(Machine, TheProgramsChecksumIsThatOfItsFile) {
  uint32_t crc = ~0u;
  for (const char byte : Contents("/proc/self/exe")) {
    crc ^= static_cast<uint8_t>(byte);
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? 0x82f63b78u : 0u);
  }
  EXPECT_EQ(DescribeMachine(1, "").program_checksum(), ~crc);
}

TEST(Machine, CoresAreThoseThatTheProcessMayUse) {
  cpu_set_t all, one;
  ASSERT_EQ(sched_getaffinity(0, sizeof(all), &all), 0);
  EXPECT_EQ(UsableCores(), HostFiles().UsableCores(CPU_COUNT(&all)));
  int core = 0;
  while (!CPU_ISSET(core, &all)) ++core;
  CPU_ZERO(&one);
  CPU_SET(core, &one);
  ASSERT_EQ(sched_setaffinity(0, sizeof(one), &one), 0);
  const Environment machine = DescribeMachine(1, "");
  EXPECT_EQ(machine.logical_cores(), 1);
  EXPECT_EQ(machine.physical_cores(), HostFiles().PhysicalCores({core}));
  ASSERT_EQ(sched_setaffinity(0, sizeof(all), &all), 0);
}

TEST(Machine, PinnedThreadsRunOnTheFirstProcessorsUntilTheyAreReleased) {
  const std::vector<int> all = AllowedCpus();
  ASSERT_FALSE(all.empty());
  EXPECT_EQ(FirstCpus(1), std::vector<int>{all[0]});
  EXPECT_EQ(FirstCpus(1 << 20), all);
  EXPECT_TRUE(FirstCpus(0).empty());
  std::atomic<int> step{0};
  std::vector<int> others, others_later;
  std::thread other([&] {
    while (step != 1) std::this_thread::yield();
    others = AllowedCpus();
    step = 2;
    while (step != 3) std::this_thread::yield();
    others_later = AllowedCpus();
  });
  {
    const PinnedThreads pinned({all.back()});
    EXPECT_EQ(AllowedCpus(), std::vector<int>{all.back()});
    step = 1;
    while (step != 2) std::this_thread::yield();
    EXPECT_EQ(FirstCpus(1 << 20), all);
  }
  step = 3;
  other.join();
  EXPECT_EQ(others, std::vector<int>{all.back()});
  EXPECT_EQ(others_later, all);
  EXPECT_EQ(AllowedCpus(), all);
  {
    const PinnedThreads nothing({});
    EXPECT_EQ(AllowedCpus(), all);
  }
}

TEST(Machine, PinningThreadsLeavesNoFileOpen) {
  const auto open_files = [] {
    return std::distance(std::filesystem::directory_iterator("/proc/self/fd"), {});
  };
  const auto before = open_files();
  const PinnedThreads pinned(AllowedCpus());
  EXPECT_EQ(open_files(), before);
}

TEST(Machine, EveryGpuIsDescribedAndWhatTheDriverDoesNotTellIsAbsent) {
  // Libraries that are open already are those that a name stands for.
  for (const std::string library : {"libfake_cublas.so", "libfake_cudnn.so"}) {
    const std::string path = RunfilePath("harness/testing/" + library).value();
    ASSERT_NE(dlopen(path.c_str(), RTLD_NOW), nullptr) << dlerror();
  }
  CudaMachine machine;
  machine.driver_version = 13020;
  machine.runtime_version = 12040;
  CudaDevice known;
  known.name = "Fast";
  known.pci_bus_id = "none";
  known.compute_capability_major = 9;
  known.compute_capability_minor = 1;
  known.memory_bytes = 80000;
  known.l2_cache_bytes = 50;
  known.multiprocessors = 132;
  known.clock_khz = 1755500;
  known.memory_clock_khz = 1;
  CudaDevice unknown;
  unknown.name = "Slow";
  machine.devices = {known, unknown};
  Environment environment;
  DescribeGpus(machine, &environment);
  const std::string libraries =
      "driver: \"13.2\" toolkit: \"12.4\" runtime_libraries: \"cuBLAS 13.1.2, cuDNN 9.12.5\" ";
  EXPECT_EQ(environment.ShortDebugString(),
            "gpus { name: \"Fast\" compute_capability: \"9.1\" clock_mhz: 1755.5 "
            "memory_clock_mhz: 0.001 memory_bytes: 80000 multiprocessors: 132 " +
                libraries +
                "l2_cache_bytes: 50 } gpus { index: 1 name: \"Slow\" compute_capability: \"0.0\" "
                "memory_bytes: 0 " +
                libraries + "}");
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
  const std::string folder = absl::StrCat(::testing::TempDir(), "/it's a repository ", getpid());
  const std::vector<std::string> commands = {
      absl::StrCat("git init -q \"", folder, "\""),
      absl::StrCat("git -C \"", folder, "\" -c user.name=n -c user.email=e@example.org",
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
  // read four times the last cache, whole MiB of it, or 64 to 256 MiB.
  const double flops = BestCpuKernels().fma_peak(1 << 12);
  EXPECT_EQ(machine.peaks(0).value(), flops / kTick);
  EXPECT_EQ(machine.peaks(2).value(), 2 * flops / kTick);
  const int64_t bytes = std::clamp<int64_t>(4 * LastLevelCacheBytes(), 64 << 20, 256 << 20);
  EXPECT_EQ(machine.peaks(1).value(), static_cast<double>(bytes >> 20 << 20) / kTick);
  EXPECT_EQ(machine.peaks(3).value(), machine.peaks(1).value());
  machine.clear_peaks();
  MeasurePeaks({3}, &machine, &clock);
  machine.mutable_peaks(0)->clear_value();
  machine.mutable_peaks(1)->clear_value();
  EXPECT_EQ(machine.ShortDebugString(),
            "peaks { name: \"f32 fma, 3 threads\" unit: \"FLOP/s\" threads: 3 kind: KIND_COMPUTE "
            "device: DEVICE_TYPE_CPU dtype: ELEMENT_TYPE_F32 } peaks { name: \"read, 3 threads\" "
            "unit: \"B/s\" threads: 3 kind: KIND_READ_BANDWIDTH device: DEVICE_TYPE_CPU }");
}

// A pass reads the clock at its begin, before the work, after it and at its end; a trial of how many
// iterations last 2 ms, before and after. Each pass is faster than all before it, so that the peak
// tells how many there were.
TEST(Machine, APeakIsTheBestOfFivePassesOrOfThoseOfTheMeasuringTime) {
  // 16 passes of two ticks of 1 / 256 s and the work's, which is half of one or less, take over
  // 0.15 s; 15 do not.
  for (const auto& [tick, passes] : {std::pair(1.0, 5), std::pair(1.0 / 256, 16)}) {
    // The first trial lasts less than 2 ms, the second exactly as long: twice the iterations do.
    constexpr int kTrialReadings = 4;
    const auto faster = [tick = tick](int pass) { return tick * (0.5 - pass / 256.0); };
    CountingClock clock([&, tick = tick, passes = passes](int reading) {
      if (reading == 1) return 0.0019;
      if (reading < kTrialReadings) return 0.002001;
      const int of_pass = (reading - kTrialReadings) % 4, pass = (reading - kTrialReadings) / 4;
      return of_pass == 2 ? faster(pass < passes ? pass : pass - passes) : tick;
    });
    Environment machine;
    MeasurePeaks({1}, &machine, &clock);
    const double flops = BestCpuKernels().fma_peak(1 << 13);
    const double bytes = static_cast<double>(
        std::clamp<int64_t>(4 * LastLevelCacheBytes(), 64 << 20, 256 << 20) >> 20 << 20);
    const double best = faster(passes - 1);
    EXPECT_NEAR(machine.peaks(0).value(), flops / best, 1e-6 * flops / best) << passes;
    EXPECT_NEAR(machine.peaks(1).value(), bytes / best, 1e-6 * bytes / best) << passes;
  }
}

TEST(Machine, EveryWordIsRead) {
  std::vector<uint64_t> words(1000);
  std::iota(words.begin(), words.end(), 1);
  for (const int64_t count : {0, 1, 31, 32, 33, 1000}) {
    EXPECT_EQ(ReadAll(words.data(), count), static_cast<uint64_t>(count * (count + 1) / 2));
  }
}

TEST(Machine, ThePeakOfResidentMemoryIsTheKernels) {
  constexpr int64_t kBytes = 96 << 20;
  const auto memory = std::make_unique<char[]>(kBytes);
  std::memset(memory.get(), 1, kBytes);
  const std::string status = Contents("/proc/self/status");
  const double kernels = 1024 * std::atof(status.c_str() + status.find("VmHWM:") + 6);
  EXPECT_GE(PeakResidentBytes(), kBytes);
  // The kernel adds up its counters of single threads now and then.
  EXPECT_NEAR(static_cast<double>(PeakResidentBytes()), kernels, 0.1 * kernels);
}

TEST(Machine, LimitsAreThoseOfTheHostsFiles) {
  EXPECT_EQ(LastLevelCacheBytes(), HostFiles().LastLevelCacheBytes());
  EXPECT_GT(DefaultMemoryLimit(), 1 << 20);
}

TEST(Machine, TheWorkspaceIsThatOfBazelRun) {
  setenv("BUILD_WORKSPACE_DIRECTORY", "/where/the/code/is", 1);
  EXPECT_EQ(WorkspaceFolder(), "/where/the/code/is");
  unsetenv("BUILD_WORKSPACE_DIRECTORY");
  EXPECT_EQ(WorkspaceFolder(), "");
}

TEST(Machine, WorkingDirectoryIsTheCallers) {
  setenv("BUILD_WORKING_DIRECTORY", "/where/i/stand", 1);
  EXPECT_EQ(DescribeMachine(1, "").working_directory(), "/where/i/stand");
  unsetenv("BUILD_WORKING_DIRECTORY");
  EXPECT_EQ(DescribeMachine(1, "").working_directory().front(), '/');
}

}  // namespace
}  // namespace tfb
