#include "core/cuda/simulator/simulator.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "core/cuda/runtime.h"
#include "core/cuda/simulator/broken_kernels.h"
#include "core/cuda/simulator/cuda_runtime.h"
#include "core/cuda/simulator/sound_kernels.h"

namespace tfb {
namespace {

using ::cuda_simulator::Configure;
using ::cuda_simulator::Counts;
using ::cuda_simulator::Finding;
using ::cuda_simulator::FindingKind;
using ::cuda_simulator::Findings;
using ::cuda_simulator::Index3;
using ::cuda_simulator::Settings;
using ::cuda_simulator::TotalCounts;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

constexpr int kValues = 64;

// 64 floats on the device: 1, 2, 3, ... or unwritten.
class Values {
 public:
  explicit Values(bool written) : runtime_(CudaRuntime::For(Device::kSimulator).value()) {
    buffer_ = runtime_->Allocate(kValues * sizeof(float)).value();
    if (!written) return;
    std::vector<float> values(kValues);
    for (int i = 0; i < kValues; ++i) values[i] = static_cast<float>(i + 1);
    Upload(values);
  }
  float* data() const { return buffer_.As<float>(); }
  void Upload(const std::vector<float>& values) {
    ASSERT_TRUE(runtime_->CopyToDevice(data(), values.data(), buffer_.bytes()).ok());
  }
  std::vector<float> Download() const {
    std::vector<float> values(kValues);
    EXPECT_TRUE(runtime_->CopyToHost(values.data(), data(), buffer_.bytes()).ok());
    return values;
  }

 private:
  CudaRuntime* runtime_;
  DeviceBuffer buffer_;
};

void ConfigureSeed(uint64_t seed) {
  Settings settings;
  settings.seed = seed;
  Configure(settings);
}

// ---- Kernels that are wrong ----

const char* RunBroken(const char* kernel, int number = 0, bool written = true) {
  const Values values(written);
  return KernelsOn<BrokenKernels>(CudaTarget::kSimulator).run(kernel, values.data(), number);
}

std::vector<Finding> FindingsOf(FindingKind kind) {
  std::vector<Finding> found;
  for (const Finding& finding : Findings()) {
    if (finding.kind == kind) found.push_back(finding);
  }
  return found;
}

// Runs a kernel; expects a finding of this kind, and none of another unless `others`. Returns the
// first.
Finding Find(const char* kernel, FindingKind kind, int number = 0, bool written = true,
             bool others = false) {
  SCOPED_TRACE(kernel);
  const char* error = RunBroken(kernel, number, written);
  EXPECT_NE(error, nullptr);
  const std::vector<Finding> found = FindingsOf(kind);
  EXPECT_TRUE(others || found.size() == Findings().size()) << error;
  if (found.empty()) {
    ADD_FAILURE() << "no finding \"" << Name(kind) << "\", but: " << (error ? error : "nothing");
    return {};
  }
  EXPECT_EQ(found[0].kernel, kernel);
  EXPECT_THAT(found[0].message, HasSubstr(kernel));
  return found[0];
}

void ExpectAt(const Finding& finding, const Index3& block, const Index3& thread) {
  const auto list = [](const Index3& index) {
    return std::vector<unsigned>{index.x, index.y, index.z};
  };
  EXPECT_EQ(list(finding.block), list(block)) << finding.message;
  EXPECT_EQ(list(finding.thread), list(thread)) << finding.message;
  const std::string where = "block (" + std::to_string(block.x) + ", " + std::to_string(block.y) +
                            ", " + std::to_string(block.z) + "), thread (" +
                            std::to_string(thread.x) + ", " + std::to_string(thread.y) + ", " +
                            std::to_string(thread.z) + ")";
  EXPECT_THAT(finding.message, HasSubstr(where));
}

TEST(OutOfBounds, DeviceAccessesNameBlockThreadAndBuffer) {
  const Index3 block{1, 2, 0}, thread{5, 1, 0};
  Finding finding = Find("ReadAt", FindingKind::kOutOfBounds, kValues);
  ExpectAt(finding, block, thread);
  EXPECT_THAT(finding.message, HasSubstr("reads 4 bytes at an address that is no device memory: 0 "
                                         "bytes behind a buffer of 256 bytes"));
  finding = Find("ReadAt", FindingKind::kOutOfBounds, -1);
  ExpectAt(finding, block, thread);
  EXPECT_THAT(finding.message, HasSubstr("4 bytes before a buffer of 256 bytes"));
  finding = Find("WriteAt", FindingKind::kOutOfBounds, kValues + 1);
  ExpectAt(finding, block, thread);
  EXPECT_THAT(finding.message, HasSubstr("writes 4 bytes"));
  finding = Find("ChangeAt", FindingKind::kOutOfBounds, kValues);
  ExpectAt(finding, block, thread);
  EXPECT_THAT(finding.message, HasSubstr("changes 4 bytes atomically"));
}

TEST(OutOfBounds, AccessesThatBeginWithinTheBufferAreFound) {
  EXPECT_THAT(Find("CopyOverEnd", FindingKind::kOutOfBounds).message,
              HasSubstr("writes 160 bytes at byte 128 of a buffer of 256 bytes"));
  const std::vector<float> registered(63);
  cuda_simulator::RegisterBuffer(registered.data(), 63 * sizeof(float), /*written=*/true);
  float* data = const_cast<float*>(registered.data());
  const auto& kernels = KernelsOn<BrokenKernels>(CudaTarget::kSimulator);
  EXPECT_EQ(kernels.run("ReadAt", data, 62), nullptr);
  EXPECT_NE(kernels.run("ReadVectorAt", data, 60), nullptr);
  EXPECT_THAT(Findings()[0].message,
              HasSubstr("reads 16 bytes at byte 240 of a buffer of 252 bytes"));
  cuda_simulator::UnregisterBuffer(data);
  EXPECT_NE(kernels.run("ReadAt", data, 62), nullptr);
}

TEST(OutOfBounds, NullPointersAndMemoryOfTheHostAreFound) {
  const auto& kernels = KernelsOn<BrokenKernels>(CudaTarget::kSimulator);
  EXPECT_THAT(kernels.run("ReadAt", nullptr, 0), HasSubstr("a null pointer"));
  EXPECT_THAT(kernels.run("WriteAt", nullptr, 1), HasSubstr("an offset from a null pointer"));
  std::vector<float> host(kValues);
  EXPECT_NE(kernels.run("ReadAt", host.data(), 0), nullptr);
  EXPECT_EQ(Findings()[0].kind, FindingKind::kOutOfBounds);
  static const float constants[kValues] = {1};
  EXPECT_NE(kernels.run("WriteAt", const_cast<float*>(constants), 0), nullptr);
}

TEST(OutOfBounds, SharedMemoryHasItsEnd) {
  const Finding finding = Find("OverrunDynamicShared", FindingKind::kOutOfBounds);
  ExpectAt(finding, {0, 0, 0}, {16, 0, 0});
  EXPECT_THAT(finding.message,
              HasSubstr("writes 4 bytes at byte 64 of dynamic shared memory, which has 64"));
}

TEST(OutOfBounds, WhatMustBeSharedMemoryIs) {
  EXPECT_THAT(Find("LoadMatrixFromDevice", FindingKind::kOutOfBounds).message,
              HasSubstr("takes as shared memory what is not, at byte "));
  EXPECT_THAT(Find("CopyAsynchronouslyToDevice", FindingKind::kOutOfBounds).message,
              HasSubstr("no shared memory"));
}

TEST(Misaligned, AccessesAreFound) {
  Finding finding = Find("ReadMisaligned", FindingKind::kMisaligned);
  ExpectAt(finding, {0, 0, 0}, {0, 0, 0});
  EXPECT_THAT(
      finding.message,
      HasSubstr(
          "needs 8-byte alignment of 'const struct float2' at byte 4 of a buffer of 256 bytes"));
  finding = Find("WriteSharedMisaligned", FindingKind::kMisaligned);
  EXPECT_THAT(
      finding.message,
      HasSubstr("needs 16-byte alignment of 'struct float4' at byte 8 of dynamic shared memory"));
  Find("CopyMisaligned", FindingKind::kMisaligned);
}

TEST(UnwrittenRead, OfDeviceMemoryIsFound) {
  const Finding finding = Find("SumInto", FindingKind::kUnwrittenRead, 0, /*written=*/false);
  EXPECT_THAT(finding.message,
              HasSubstr("at byte 0 of a buffer of 256 bytes, which nothing wrote"));
  EXPECT_EQ(RunBroken("SumInto"), nullptr);
}

TEST(UnwrittenRead, OfSharedMemoryIsFound) {
  Finding finding = Find("ReadStaticShared", FindingKind::kUnwrittenRead);
  ExpectAt(finding, {0, 0, 0}, {7, 0, 0});
  EXPECT_THAT(
      finding.message,
      HasSubstr(
          "reads 4 bytes at byte 28 of the shared variable row (32 bytes), which nothing wrote"));
  Find("ReadDynamicShared", FindingKind::kUnwrittenRead);
  for (const uint64_t seed : {1, 2, 3, 4}) {  // for every choice of the first block
    ConfigureSeed(seed);
    finding = Find("KeepSharedFromBlockToBlock", FindingKind::kUnwrittenRead);
    ExpectAt(finding, {1, 0, 0}, {0, 0, 0});
  }
  Configure({});
}

TEST(UnwrittenRead, BeforeAnAsynchronousCopyEndsIsFound) {
  const Finding finding = Find("ReadBeforeCopyEnds", FindingKind::kUnwrittenRead);
  EXPECT_THAT(finding.message, HasSubstr("to which an asynchronous copy is under way"));
  EXPECT_THAT(Findings(), SizeIs(1));  // the first copy had ended
}

TEST(Race, AForgottenBarrierIsFound) {
  const Values values(true), sum(false);
  const BrokenKernels& kernels = KernelsOn<BrokenKernels>(CudaTarget::kSimulator);
  ASSERT_EQ(kernels.reduce(values.data(), sum.data(), true), nullptr);
  EXPECT_EQ(sum.Download()[0], 64 * 65 / 2);
  for (uint64_t seed = 1; seed <= 16; ++seed) {
    ConfigureSeed(seed);
    ASSERT_NE(kernels.reduce(values.data(), sum.data(), false), nullptr);
    EXPECT_THAT(FindingsOf(FindingKind::kRace), Not(IsEmpty())) << seed;
  }
  Configure({});
}

TEST(Race, WritesAfterReadsAndAfterWritesAreFoundWhateverTheOrder) {
  for (uint64_t seed = 1; seed <= 16; ++seed) {
    ConfigureSeed(seed);
    Find("WriteAfterRead", FindingKind::kRace);
    const Finding finding = Find("WriteSamePlace", FindingKind::kRace);
    const bool first = finding.thread.x == 7;
    EXPECT_THAT(finding.message,
                HasSubstr(first ? "which thread (40, 0, 0) wrote with no barrier between"
                                : "which thread (7, 0, 0) wrote with no barrier between"));
  }
  Configure({});
}

TEST(Race, LanesOfAWarpThatDoNotSyncAreFound) {
  Find("ExchangeInWarp", FindingKind::kRace, 0, true, /*others=*/true);
  for (uint64_t seed = 1; seed <= 16; ++seed) {
    ConfigureSeed(seed);
    // Lanes 28 to 31 sync with no other lane; the others are ordered.
    Find("ExchangeInPartOfWarp", FindingKind::kRace, 0x0fffffff, true, /*others=*/true);
    for (const Finding& finding : Findings()) EXPECT_GE(finding.thread.x, 28u) << finding.message;
    EXPECT_EQ(RunBroken("ExchangeInPartOfWarp", -1), nullptr);
  }
  Configure({});
}

TEST(Race, PlainReadsBesideAtomicsAreFound) { Find("ReadAtomicCounter", FindingKind::kRace); }

TEST(Race, MisusedAsynchronousCopiesAreFound) {
  Find("ReadWhatOtherCopied", FindingKind::kRace, 0, true, /*others=*/true);
  Find("OverwriteStage", FindingKind::kRace);
  EXPECT_THAT(Find("WriteWhereCopyGoes", FindingKind::kRace).message,
              HasSubstr("to which an asynchronous copy is under way"));
}

TEST(Race, OverlappingBytesAreFound) { Find("WriteBytes", FindingKind::kRace); }

TEST(RaceInDeviceMemory, BlocksThatWriteOrReadWhatAnotherWritesAreFoundWhateverTheOrder) {
  for (uint64_t seed = 1; seed <= 16; ++seed) {
    ConfigureSeed(seed);
    Finding finding = Find("ReadWhatOtherBlockWrote", FindingKind::kRace);
    const bool reads = finding.block.x == 1;  // or the other block ran last, and writes
    const std::string other = "of block (" + std::to_string(reads ? 0 : 1) + ", 0, 0)";
    EXPECT_THAT(finding.message,
                AllOf(HasSubstr(reads ? "reads 4 bytes" : "writes 4 bytes"), HasSubstr(other),
                      HasSubstr(reads ? "wrote in the same launch" : "read in the same launch")));
    EXPECT_THAT(finding.message, HasSubstr("which thread (" + std::to_string(finding.thread.x) +
                                           ", 0, 0) " + other));
    Find("ShiftFromBlockToBlock", FindingKind::kRace);
    Find("LastWriterWins", FindingKind::kRace);
    Find("ReadBesideAtomicsOfBlocks", FindingKind::kRace);
    finding = Find("WriteBytesOfOtherBlock", FindingKind::kRace);
    EXPECT_THAT(finding.message, HasSubstr("writes 1 bytes"));
  }
  Configure({});
}

TEST(RaceInDeviceMemory, ThreadsOfABlockWithNoBarrierBetweenAreFoundWhateverTheOrder) {
  for (uint64_t seed = 1; seed <= 16; ++seed) {
    ConfigureSeed(seed);
    EXPECT_THAT(Find("ExchangeInDeviceMemory", FindingKind::kRace).message,
                HasSubstr("with no barrier between"));
    const Finding finding = Find("WriteWhatOthersReadFromDevice", FindingKind::kRace);
    EXPECT_THAT(finding.message,
                AllOf(HasSubstr("at byte 0 of a buffer of 256 bytes, which thread "),
                      HasSubstr("with no barrier between")));
  }
  Configure({});
}

TEST(RaceInDeviceMemory, ALastBlockWithoutItsFenceOrAtomicIsFound) {
  for (uint64_t seed = 1; seed <= 8; ++seed) {
    ConfigureSeed(seed);
    for (const int wrong : {0, 1, 2}) {
      Values values(false);
      values.Upload(std::vector<float>(kValues));
      ASSERT_NE(KernelsOn<BrokenKernels>(CudaTarget::kSimulator)
                    .run("LastBlockSumsTooEarly", values.data(), wrong),
                nullptr);
      EXPECT_THAT(FindingsOf(FindingKind::kRace), SizeIs(Findings().size()));
      if (wrong == 2) continue;  // the counter races, too
      ASSERT_THAT(Findings(), SizeIs(1));
      ExpectAt(Findings()[0], Findings()[0].block, {1, 0, 0});
      EXPECT_THAT(Findings()[0].message,
                  AllOf(HasSubstr("reads 4 bytes"), HasSubstr("which thread (0, 0, 0) of block ")));
    }
  }
  Configure({});
}

TEST(DivergentBarrier, AThreadThatHasReturnedIsNamed) {
  const Finding finding = Find("ReturnBeforeBarrier", FindingKind::kDivergentBarrier);
  EXPECT_THAT(finding.message, AllOf(HasSubstr("waits at __syncthreads, which 63 of 64 threads "),
                                     HasSubstr("thread (33, 0, 0) has finished")));
}

TEST(DivergentBarrier, MeetingsThatCannotBeCompleteAreNamed) {
  EXPECT_THAT(Find("BarrierInBranch", FindingKind::kDivergentBarrier).message,
              AllOf(HasSubstr("waits at __syncwarp (mask ffffffff) for thread "),
                    HasSubstr("which waits at __syncthreads")));
  EXPECT_THAT(Find("DifferentMasks", FindingKind::kDivergentBarrier).message,
              AllOf(HasSubstr("(mask 000000ff)"), HasSubstr("(mask 0000000f)")));
}

// Returns "broken_kernels.cu:12" and "broken_kernels.cu:15" of a text with two such places.
std::vector<std::string> PlacesIn(const std::string& text) {
  std::vector<std::string> places;
  const std::string file = "broken_kernels.cu:";
  for (size_t at = text.find(file); at != std::string::npos; at = text.find(file, at + 1)) {
    const size_t end = text.find_first_not_of("0123456789", at + file.size());
    places.push_back(text.substr(at, end - at));
  }
  return places;
}

TEST(DivergentBarrier, BothBarriersAtWhichThreadsWaitAreNamed) {
  for (uint64_t seed = 1; seed <= 8; ++seed) {
    ConfigureSeed(seed);
    const Finding finding = Find("BarriersOfTwoBranches", FindingKind::kDivergentBarrier);
    ExpectAt(finding, {0, 0, 0}, {16, 0, 0});
    const size_t what = finding.message.find("waits at the __syncthreads of ");
    ASSERT_NE(what, std::string::npos) << finding.message;
    EXPECT_THAT(finding.message, HasSubstr("while thread (0, 0, 0) waits at that of "));
    const std::vector<std::string> places = PlacesIn(finding.message.substr(what));
    ASSERT_THAT(places, SizeIs(2)) << finding.message;
    const auto line = [](const std::string& place) {
      return std::stoi(place.substr(place.find(':') + 1));
    };
    EXPECT_EQ(line(places[0]) - line(places[1]), 3) << finding.message;
    EXPECT_THAT(Findings(), SizeIs(1));
  }
  Configure({});
}

TEST(DivergentBarrier, TwoInlinedCallsOfAFunctionWithABarrierAreTwoBarriers) {
  if (std::system("addr2line --version > /dev/null 2>&1") != 0) {
    GTEST_SKIP() << "no addr2line: binutils is not installed";
  }
  const Finding finding = Find("BarrierOfTwoCalls", FindingKind::kDivergentBarrier);
  ExpectAt(finding, {0, 0, 0}, {1, 0, 0});
  const std::vector<std::string> places =
      PlacesIn(finding.message.substr(finding.message.find("waits at the __syncthreads of ")));
  ASSERT_THAT(places, SizeIs(4)) << finding.message;  // the barrier and its call, twice
  EXPECT_EQ(places[0], places[2]);
  EXPECT_NE(places[1], places[3]);
}

TEST(DivergentBarrier, MatrixInstructionsNeedAWholeWarp) {
  EXPECT_THAT(
      Find("MultiplyInHalfWarp", FindingKind::kDivergentBarrier).message,
      HasSubstr("waits at mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 (mask ffffffff) for "
                "lane 16, which the block has"));
  EXPECT_THAT(Find("MultiplyAfterReturn", FindingKind::kDivergentBarrier).message,
              HasSubstr("for thread (9, 0, 0), which has finished"));
}

TEST(LaneOutsideMask, ShufflesFromAndByOutsidersAreFound) {
  Finding finding = Find("ShuffleFromOutside", FindingKind::kLaneOutsideMask);
  ExpectAt(finding, {0, 0, 0}, {15, 0, 0});
  EXPECT_THAT(finding.message, HasSubstr("shuffles from lane 16, which its mask does not name"));
  finding = Find("ShuffleByOutsider", FindingKind::kLaneOutsideMask);
  ExpectAt(finding, {0, 0, 0}, {16, 0, 0});
  EXPECT_THAT(finding.message, HasSubstr("which does not name its own lane 16"));
  finding = Find("ShuffleFromFinished", FindingKind::kLaneOutsideMask);
  ExpectAt(finding, {0, 0, 0}, {30, 0, 0});
  EXPECT_THAT(finding.message, HasSubstr("shuffles from lane 31, which has finished"));
}

TEST(BadLaunch, LimitsAreThoseOfAGpu) {
  EXPECT_THAT(Find("TooManyThreads", FindingKind::kBadLaunch).message,
              HasSubstr("blockDim.x is 1025; allowed is 1 to 1024"));
  EXPECT_THAT(
      Find("TooMuchShared", FindingKind::kBadLaunch).message,
      HasSubstr("shared memory is 232449 bytes a block, of which 232449 are dynamic; sm_90 allows "
                "232448"));
  const auto launch = [](const dim3& grid, const dim3& block) {
    return cuda_simulator::LaunchBody(
        "Nothing", {grid, block, 0}, [](void*) {}, nullptr, 0);
  };
  EXPECT_EQ(launch(dim3(3, 2, 2), dim3(8, 8, 16)), cudaSuccess);
  EXPECT_EQ(launch(dim3(1, 65536), dim3(1)), cudaErrorInvalidConfiguration);
  EXPECT_EQ(launch(dim3(1, 1, 65536), dim3(1)), cudaErrorInvalidConfiguration);
  EXPECT_EQ(launch(dim3(1), dim3(32, 33)), cudaErrorInvalidConfiguration);
  EXPECT_EQ(launch(dim3(1), dim3(1, 1, 65)), cudaErrorInvalidConfiguration);
  EXPECT_EQ(launch(dim3(0), dim3(1)), cudaErrorInvalidConfiguration);
}

void ConfigureGpu(const char* name) {
  Settings settings;
  settings.gpu = *cuda_simulator::FindGpu(name);
  Configure(settings);
}

TEST(BadLaunch, ABlockHasTheSharedMemoryOfTheGpu) {
  const std::pair<const char*, int> limits[] = {
      {"sm_80", 163 << 10}, {"sm_89", 99 << 10}, {"sm_90", 227 << 10}};
  for (const auto& [gpu, limit] : limits) {
    ConfigureGpu(gpu);
    EXPECT_EQ(
        CudaRuntime::For(Device::kSimulator).value()->properties().shared_memory_bytes_per_block,
        limit);
    // The kernel has 256 bytes of static memory, too.
    EXPECT_EQ(RunBroken("StaticAndDynamicShared", limit - 256), nullptr) << gpu;
    EXPECT_THAT(Find("StaticAndDynamicShared", FindingKind::kBadLaunch, limit - 255).message,
                HasSubstr("shared memory is " + std::to_string(limit + 1) +
                          " bytes a block, of which " + std::to_string(limit - 255) +
                          " are dynamic; " + gpu + " allows " + std::to_string(limit)));
    // Launch opts in for more than 48 KiB of dynamic memory, and so leaves out the static.
    EXPECT_EQ(RunBroken("StaticAndDynamicShared", (48 << 10) - 256), nullptr);
  }
  Configure({});
  EXPECT_EQ(cuda_simulator::FindGpu("sm_70"), nullptr);
}

TEST(BadLaunch, AKernelHasNoMoreDynamicMemoryThanItSays) {
  EXPECT_EQ(RunBroken("MoreThanItSays", 256), nullptr);
  EXPECT_THAT(Find("MoreThanItSays", FindingKind::kBadLaunch, 257).message,
              HasSubstr("257 bytes of dynamic shared memory, of which the kernel says that it has "
                        "at most 256"));
}

TEST(BadLaunch, MoreThan48KiBOfSharedMemoryNeedAnOptIn) {
  using Kernel = void (*)(int);
  const Kernel nothing = [](int) {};
  const auto launch = [&](size_t bytes) {
    return cuda_simulator::LaunchKernel("Nothing", nothing, {dim3(1), dim3(1), bytes}, 0);
  };
  EXPECT_EQ(launch(48 << 10), cudaSuccess);
  EXPECT_EQ(launch((48 << 10) + 1), cudaErrorInvalidConfiguration);
  EXPECT_THAT(Findings()[0].message,
              HasSubstr("sm_90 allows 49152 without cudaFuncAttributeMaxDynamicSharedMemorySize"));
  EXPECT_EQ(cuda_simulator::cudaFuncSetAttribute(
                nothing, cuda_simulator::cudaFuncAttributeMaxDynamicSharedMemorySize, 64 << 10),
            cudaSuccess);
  EXPECT_EQ(launch(64 << 10), cudaSuccess);
  EXPECT_EQ(launch((64 << 10) + 1), cudaErrorInvalidConfiguration);
}

TEST(BadLaunch, TheEnvironmentChoosesTheGpu) {
  const char* before = std::getenv("CUDA_SIMULATOR_GPU");
  const std::string kept = before == nullptr ? "" : before;
  unsetenv("CUDA_SIMULATOR_GPU");
  EXPECT_STREQ(Settings().gpu.name, "sm_90");
  setenv("CUDA_SIMULATOR_GPU", "sm_89", 1);
  EXPECT_EQ(Settings().gpu.max_shared_bytes_per_block, 99u << 10);
  setenv("CUDA_SIMULATOR_GPU", "sm_75", 1);
  EXPECT_EXIT(Settings(), testing::ExitedWithCode(EXIT_FAILURE),
              "CUDA_SIMULATOR_GPU: unknown GPU \"sm_75\"; known are sm_80, sm_89, sm_90");
  unsetenv("CUDA_SIMULATOR_GPU");
  if (before != nullptr) setenv("CUDA_SIMULATOR_GPU", kept.c_str(), 1);
}

TEST(StackOverflow, IsFoundInItsThread) {
  EXPECT_EQ(RunBroken("Recurse", 100), nullptr);
  const Finding finding = Find("Recurse", FindingKind::kStackOverflow, 1000000);
  ExpectAt(finding, {0, 0, 0}, {2, 0, 0});
  EXPECT_THAT(finding.message, HasSubstr("needs more stack than 65536 bytes"));
  Find("BigArray", FindingKind::kStackOverflow);
  Settings roomy;
  roomy.stack_bytes = 1 << 20;
  Configure(roomy);
  EXPECT_EQ(RunBroken("BigArray"), nullptr);
  EXPECT_EQ(RunBroken("Recurse", 1000), nullptr);
  Configure({});
}

// ---- Barriers by number and in shared memory, bulk copies, products ----

// Runs a kernel in several orders; there must be findings of this kind, one of them with `text`, and
// none of another unless `others`.
void FindInAnyOrder(const char* kernel, FindingKind kind, int number, const char* text,
                    bool others = false) {
  for (uint64_t seed = 1; seed <= 6; ++seed) {
    SCOPED_TRACE(testing::Message() << "number " << number << ", seed " << seed);
    ConfigureSeed(seed);
    Find(kernel, kind, number, /*written=*/true, others);
    EXPECT_THAT(FindingsOf(kind),
                testing::Contains(testing::Field(&Finding::message, HasSubstr(text))));
  }
  Configure({});
}
void ExpectNothing(const char* kernel, int number) {
  for (uint64_t seed = 1; seed <= 6; ++seed) {
    ConfigureSeed(seed);
    const char* error = RunBroken(kernel, number);
    EXPECT_EQ(error, nullptr) << error;
  }
  Configure({});
}

TEST(NumberedBarrier, OrdersTheThreadsThatWaitAndNoOthers) {
  ExpectNothing("SyncTwoOfThreeWarps", 0);
  ExpectNothing("ArriveAndRead", 0);
  ExpectNothing("OtherCounts", 64);
  // Where the readers run first, they also read what nothing wrote.
  FindInAnyOrder("SyncTwoOfThreeWarps", FindingKind::kRace, 1, "with no barrier between", true);
  FindInAnyOrder("ArriveAndRead", FindingKind::kRace, 1, "with no barrier between", true);
}

TEST(NumberedBarrier, HasOneCountAndItsThreads) {
  FindInAnyOrder("OtherCounts", FindingKind::kBadBarrier, 32, "arrives at barrier 3 for ");
  FindInAnyOrder("OtherCounts", FindingKind::kBadBarrier, 48,
                 "arrives at barrier 3 for 48 threads of 64; a barrier is for a multiple of 32");
  FindInAnyOrder("OtherCounts", FindingKind::kBadBarrier, 96,
                 "arrives at barrier 3 for 96 threads");
  FindInAnyOrder("BarrierWithoutOthers", FindingKind::kBadBarrier, 16, "barriers are 0 to 15");
  FindInAnyOrder("MixedBarriers", FindingKind::kBadBarrier, 0,
                 "at which only some threads give a predicate");
  FindInAnyOrder("BarrierWithoutOthers", FindingKind::kDivergentBarrier, 7,
                 "waits at barrier 7 for 64 threads, of which 32 have come");
}

TEST(PhaseBarrier, MisuseIsFound) {
  const std::pair<int, const char*> misuses[] = {
      {0,
       "an arrival of the mbarrier at byte 0 of the shared variable barriers (16 bytes), which no "
       "thread has set up"},
      {1, "over which something was stored"},
      {2, ", which is one already"},
      {3, " for 0 arrivals"},
      {6, ", where all 1 arrivals of the phase have come"},
      {5, "makes 1048576 bytes missing in a phase, of which the most are 1048575"}};
  for (const auto& [number, text] : misuses) {
    FindInAnyOrder("MisusedBarrier", FindingKind::kBadBarrier, number, text);
  }
  FindInAnyOrder("MisusedBarrier", FindingKind::kMisaligned, 4, "8-byte alignment of an mbarrier");
  FindInAnyOrder("PollForever", FindingKind::kDivergentBarrier, 0,
                 "in which 1 of 2 arrivals and 0 bytes are missing");
}

TEST(BulkCopy, ReadsWhatTheTensorHas) {
  EXPECT_EQ(RunBroken("CopyRow"), nullptr);
  EXPECT_THAT(Find("CopyRow", FindingKind::kUnwrittenRead, 0, /*written=*/false).message,
              HasSubstr("reads 128 bytes at byte 0 of a buffer of 256 bytes, which nothing wrote"));
  EXPECT_THAT(Find("CopyRow", FindingKind::kBadInstruction, 1).message,
              HasSubstr("of a tensor map that no cuTensorMapEncodeTiled wrote"));
  EXPECT_THAT(Find("CopyRow", FindingKind::kOutOfBounds, 2).message,
              HasSubstr("reads 128 bytes at an address that is no device memory: 0 bytes behind"));
  EXPECT_THAT(Find("CopyRow", FindingKind::kBadInstruction, 3).message,
              HasSubstr("from number 4 of rows on, which is not at a multiple of 16 bytes"));
  ConfigureGpu("sm_89");
  EXPECT_THAT(Find("CopyRow", FindingKind::kBadInstruction).message,
              HasSubstr("executes mbarrier.init.shared::cta.b64, which sm_89 has not"));
  Configure({});
}

TEST(Product, TakesDescriptorsOfOneLayout) {
  EXPECT_THAT(Find("MultiplyOtherLayout", FindingKind::kBadInstruction, 63).message,
              HasSubstr("whose layout the simulator does not know"));
  Find("MultiplyOtherLayout", FindingKind::kBadInstruction, 49);
  EXPECT_THAT(Find("MultiplyOtherLayout", FindingKind::kMisaligned, 4).message,
              HasSubstr("does not begin in the first of 8 rows"));
  EXPECT_THAT(Find("MultiplyOtherLayout", FindingKind::kOutOfBounds, 13).message,
              HasSubstr("which is not all in the block's shared memory"));
  EXPECT_THAT(Find("MultiplyOtherLayout", FindingKind::kUnwrittenRead, 6).message,
              HasSubstr("multiplies by 16 bytes at byte "));
  EXPECT_THAT(Find("MultiplyInHalfAGroup", FindingKind::kBadInstruction).message,
              HasSubstr(", whose group of four the block has not"));
}

TEST(Pipeline, IsSilentWhereNothingIsWrong) {
  for (uint64_t seed = 1; seed <= 12; ++seed) {
    ConfigureSeed(seed);
    const Values values(true);
    const char* error = KernelsOn<BrokenKernels>(CudaTarget::kSimulator)
                            .run("Pipeline", values.data(), static_cast<int>(PipelineBug::kNone));
    ASSERT_EQ(error, nullptr) << error;
    EXPECT_EQ(values.Download()[32], 4 * 32 * 33 * 65 / 6);  // four times 1 + 4 + 9 + ... + 32^2
    EXPECT_EQ(values.Download()[33], 0);
  }
  Configure({});
}

TEST(Pipeline, EachBugIsFoundWhateverTheOrder) {
  using Bug = PipelineBug;
  using Kind = FindingKind;
  const struct {
    Bug bug;
    Kind kind;
    const char* text;
  } bugs[] = {
      {Bug::kBarriersUnfenced, Kind::kMissingFence,
       "which thread (0, 0, 0) set up with no fence.mbarrier_init or fence.proxy.async"},
      {Bug::kOneGroupReleases, Kind::kRace,
       ", which a product of warps 4 to 7 reads that the thread"},
      {Bug::kTooFewArrivals, Kind::kDivergentBarrier, "in which 1 of 9 arrivals and 0 bytes are"},
      {Bug::kExpectsTooLittle, Kind::kDivergentBarrier,
       "0 of 1 arrivals and -128 bytes are missing"},
      {Bug::kExpectsTooMuch, Kind::kDivergentBarrier, "0 of 1 arrivals and 128 bytes are missing"},
      {Bug::kCopiesTooEarly, Kind::kRace, "copies 128 bytes asynchronously at byte "},
      {Bug::kReadsTooEarly, Kind::kRace, "to which a bulk copy is under way"},
      {Bug::kReleasesTooEarly, Kind::kRace, ", which a product of warps "},
      {Bug::kStoresWithoutFence, Kind::kMissingFence,
       "with no fence.proxy.async of its own between"},
      {Bug::kStoresDuringProduct, Kind::kRace, ", which a product of warps "},
      {Bug::kNoProductFence, Kind::kMissingFence, "with no wgmma.fence before it"},
      {Bug::kChangesSums, Kind::kRace, "waits for a product whose sums have changed meanwhile"},
      {Bug::kChangesSumsUnfenced, Kind::kMissingFence,
       "with sums that have changed since the last wgmma.fence"},
      {Bug::kNoCommit, Kind::kUnfinishedWork,
       "starts a product that no wgmma.commit_group follows"},
      {Bug::kNoWaitForProduct, Kind::kUnfinishedWork,
       "for which it does not wait before it finishes"},
      {Bug::kWarpMissing, Kind::kDivergentBarrier, "waits for a product that warp 6 has not begun"},
      {Bug::kOtherProduct, Kind::kBadInstruction, "warp of its group issued another product"},
      {Bug::kCopyUnawaited, Kind::kUnfinishedWork,
       "starts a bulk copy for which no thread has waited"},
      {Bug::kMisalignedStage, Kind::kMisaligned, "1024-byte alignment of cp.async.bulk.tensor"},
  };
  for (const auto& [bug, kind, text] : bugs) {
    FindInAnyOrder("Pipeline", kind, static_cast<int>(bug), text, /*others=*/true);
  }
  // A barrier may be used before it is set up, or after.
  for (uint64_t seed = 1; seed <= 6; ++seed) {
    ConfigureSeed(seed);
    const char* error = RunBroken("Pipeline", static_cast<int>(Bug::kBarriersUnsynced));
    ASSERT_NE(error, nullptr);
    EXPECT_THAT(error, testing::AnyOf(HasSubstr("which no thread has set up"),
                                      HasSubstr("set up with no barrier between")));
  }
  Configure({});
}

// ---- The text of findings, and calls after them ----

TEST(Findings, NameTheLineOfTheSource) {
  if (std::system("addr2line --version > /dev/null 2>&1") != 0) {
    GTEST_SKIP() << "no addr2line: binutils is not installed";
  }
  const auto line = [](const char* kernel, FindingKind kind, int number = 0) {
    return Find(kernel, kind, number, true, /*others=*/true).source;
  };
  const std::string file = "broken_kernels.cu:";
  const std::string read = line("ReadAt", FindingKind::kOutOfBounds, kValues);
  const std::string write = line("WriteAt", FindingKind::kOutOfBounds, kValues);
  EXPECT_EQ(read.rfind(file, 0), 0u) << read;
  EXPECT_EQ(std::stoi(write.substr(file.size())) - std::stoi(read.substr(file.size())), 4);
  EXPECT_THAT(Findings()[0].message, HasSubstr("thread (5, 1, 0), " + write + ": writes"));
  for (const std::string& source : {line("ChangeAt", FindingKind::kOutOfBounds, kValues),
                                    line("ReturnBeforeBarrier", FindingKind::kDivergentBarrier),
                                    line("ShuffleFromOutside", FindingKind::kLaneOutsideMask),
                                    line("MultiplyInHalfWarp", FindingKind::kDivergentBarrier),
                                    line("LoadMatrixFromDevice", FindingKind::kOutOfBounds),
                                    line("ReadBeforeCopyEnds", FindingKind::kUnwrittenRead),
                                    line("BigArray", FindingKind::kStackOverflow)}) {
    EXPECT_EQ(source.rfind(file, 0), 0u) << source;
  }
}

TEST(Findings, OfOnePlaceAreCountedAndOfManyAreBounded) {
  RunBroken("ExchangeInWarp");
  EXPECT_THAT(FindingsOf(FindingKind::kRace), SizeIs(testing::Le(2)));  // a read and a write
  int64_t times = 0;
  for (const Finding& finding : Findings()) times += finding.times;
  EXPECT_GE(times, 32);
  Settings settings;
  settings.max_findings = 1;
  Configure(settings);
  RunBroken("ExchangeInWarp");
  EXPECT_THAT(Findings(), SizeIs(1));
  Configure({});
}

TEST(Findings, TheNextLaunchIsAsIfThereHadBeenNone) {
  const Values values(true), sum(false);
  const BrokenKernels& kernels = KernelsOn<BrokenKernels>(CudaTarget::kSimulator);
  for (const char* kernel :
       {"ReadAt", "ReturnBeforeBarrier", "BarrierInBranch", "DifferentMasks", "MultiplyInHalfWarp",
        "ShuffleByOutsider", "TooManyThreads", "BigArray", "WriteAfterRead", "OverwriteStage",
        "BarrierWithoutOthers", "MultiplyInHalfAGroup", "Pipeline"}) {
    ASSERT_NE(RunBroken(kernel, kernel == std::string("Pipeline") ? 17 : kValues), nullptr)
        << kernel;
    const Values sum(false);
    ASSERT_EQ(kernels.reduce(values.data(), sum.data(), true), nullptr) << "after " << kernel;
    EXPECT_EQ(sum.Download()[0], 64 * 65 / 2);
    EXPECT_THAT(Findings(), IsEmpty());
  }
}

TEST(Findings, AreTheSameForTheSameSeed) {
  const auto messages = [](uint64_t seed) {
    ConfigureSeed(seed);
    std::vector<std::string> messages;
    for (const char* kernel : {"WriteAfterRead", "ExchangeInWarp", "ReadAtomicCounter"}) {
      RunBroken(kernel);
      for (const Finding& finding : Findings()) messages.push_back(finding.message);
    }
    Configure({});
    return messages;
  };
  EXPECT_EQ(messages(5), messages(5));
  EXPECT_NE(messages(5), messages(6));
}

// ---- Order ----

TEST(Order, AResultThatDependsOnItShows) {
  std::set<float> results;
  const Values values(true);
  for (uint64_t seed = 1; seed <= 32; ++seed) {
    ConfigureSeed(seed);
    const auto& kernels = KernelsOn<BrokenKernels>(CudaTarget::kSimulator);
    ASSERT_THAT(kernels.run("LastWriterWins", values.data(), 0), HasSubstr(" wrote "));
    results.insert(values.Download()[0]);
  }
  Configure({});
  EXPECT_GT(results.size(), 24u);  // of 1024 possible results
}

TEST(Order, TheEnvironmentChoosesTheSeed) {
  const char* before = std::getenv("CUDA_SIMULATOR_SEED");
  const std::string kept = before == nullptr ? "" : before;
  setenv("CUDA_SIMULATOR_SEED", "77", 1);
  EXPECT_EQ(Settings().seed, 77u);
  setenv("CUDA_SIMULATOR_SEED", "7x", 1);
  EXPECT_EQ(Settings().seed, 1u);
  unsetenv("CUDA_SIMULATOR_SEED");
  EXPECT_EQ(Settings().seed, 1u);
  if (before != nullptr) setenv("CUDA_SIMULATOR_SEED", kept.c_str(), 1);
}

// ---- Kernels that are right ----

// Runs a kernel on 1, 2, 3, ... in several orders: there must be no finding, and output[i] must be
// expected(i).
void ExpectSound(const char* kernel, int outputs, const std::function<float(int)>& expected) {
  SCOPED_TRACE(kernel);
  const Values input(true);
  for (uint64_t seed = 1; seed <= 12; ++seed) {
    ConfigureSeed(seed);
    const Values output(false);
    const char* error =
        KernelsOn<SoundKernels>(CudaTarget::kSimulator).run(kernel, input.data(), output.data());
    ASSERT_EQ(error, nullptr) << error;
    const std::vector<float> result = output.Download();
    for (int i = 0; i < outputs; ++i) ASSERT_EQ(result[i], expected(i)) << "at " << i;
  }
  Configure({});
}

float In(int i) { return static_cast<float>(i + 1); }

// Returns the float in the second to fifth byte of 1, 2.
float UnalignedIn() {
  const float input[2] = {1, 2};
  float unaligned;
  std::memcpy(&unaligned, reinterpret_cast<const char*>(input) + 1, sizeof(unaligned));
  return unaligned;
}

TEST(Sound, WarpsThatSyncWholeAndInPart) {
  ExpectSound("ExchangeInWarp", 64, [](int i) { return In(i ^ 3); });
  const auto sum = [](int i) { return In(i) + In(i ^ 3) + In(i ^ 5); };
  ExpectSound("ExchangeInPartsOfWarp", 64, [&](int i) { return sum(i ^ 16); });
  ExpectSound("HandOn", 1, [](int) { return 2.0f; });
}

TEST(Sound, ShufflesOfEveryKindWidthAndMask) {
  ExpectSound("Shuffles", 64, [](int i) {
    const auto up = [&](int delta, int width) { return In(i % width < delta ? i : i - delta); };
    const auto down = [&](int delta, int width) {
      return In(i % width + delta >= width ? i : i + delta);
    };
    float sum = In(i ^ 5) + 2 * up(3, 32) + 3 * down(7, 32) + 4 * In(i / 32 * 32 + 9);
    sum += 5 * In(i ^ 1) + 6 * up(2, 8) + 7 * down(2, 16) + 8 * In(i / 4 * 4 + 3);
    if (i % 32 < 12) sum += 9 * down(1, 4);
    return sum + 10 * In(i ^ 31);
  });
}

TEST(Sound, VotesOfWholeAndPartialMasks) {
  ExpectSound("Votes", 64, [](int i) { return i % 32 >= 16 ? 11.0f : 3.0f; });
}

TEST(Sound, LanesAndWarpsThatReturnOrAreNotThere) {
  ExpectSound("LanesReturnEarly", 24, [](int i) { return In(i ^ 1); });
  ExpectSound("OneReturnsTwoWait", 31, [](int i) { return In(i < 16 ? 15 - i : 46 - i); });
  ExpectSound("WarpsReturnEarly", 32, [](int i) { return In(i + 32); });
  ExpectSound("HalfWarpAtTheEnd", 48, [](int i) { return In(i ^ 7) + In((47 - i) ^ 8); });
}

TEST(Sound, SharedMemory) {
  ExpectSound("StaticAndDynamicShared", 64, [](int i) { return In(63 - i) - 2 * In(i); });
  ExpectSound("ReadByAllThenWrite", 64, [](int) { return 10.0f; });
  ExpectSound("BarrierBetweenBranches", 64,
              [](int i) { return i < 10 ? In(i) + In(63 - i) : 0.0f; });
  ExpectSound("NeighbouringBytes", 64,
              [](int i) { return In(i ^ 1) + 3 * In(i ^ 2) + 3 * In(i / 4 * 4); });
}

TEST(Sound, Atomics) {
  ExpectSound("Atomics", 64, [](int i) { return 64 + 1 + 64 + 2080.0f + (i < 32 ? 64.0f : 0.0f); });
}

// The same with outputs that are 0 before.
void ExpectSoundOnZeros(const char* kernel, int outputs, const std::function<float(int)>& expected,
                        int first = 0) {
  const Values input(true);
  for (uint64_t seed = 1; seed <= 12; ++seed) {
    ConfigureSeed(seed);
    Values output(false);
    output.Upload(std::vector<float>(kValues));
    const char* error =
        KernelsOn<SoundKernels>(CudaTarget::kSimulator).run(kernel, input.data(), output.data());
    ASSERT_EQ(error, nullptr) << error;
    const std::vector<float> result = output.Download();
    for (int i = first; i < first + outputs; ++i) ASSERT_EQ(result[i], expected(i)) << "at " << i;
  }
  Configure({});
}

TEST(Sound, TheLastBlockMaySumUp) {
  ExpectSoundOnZeros("LastBlockSums", 1, [](int) { return 36.0f; });
  ExpectSoundOnZeros(
      "LastBlockSumsInTwoSteps", 4,
      [](int i) { return i == 3   ? 528.0f
                         : i == 4 ? 136.0f
                         : i == 5 ? 392.0f
                                  : 33.0f; }, 3);
}

TEST(Sound, DeviceMemory) {
  ExpectSound("ExchangeInDeviceMemory", 64, [](int i) { return In(i ^ 14); });
  ExpectSound("WriteNeighbouringBytes", 64, In);
  ExpectSoundOnZeros("AddAtomicallyFromAllBlocks", 1, [](int) { return 144.0f; });
}

TEST(Sound, AsynchronousCopies) {
  ExpectSound("DoubleBuffered", 64, [](int i) {
    return In(i % 16) + In(i % 16 + 16) + In(i % 16 + 32) + In(i % 16 + 48);
  });
  ExpectSound("CopyWithZeros", 17, [](int i) {
    float sum = 0;
    for (int n = 0; i < 16 && n < 4 - i % 4; ++n) sum += static_cast<float>(1 << n) * In(i * 4 + n);
    return sum;
  });
}

TEST(Sound, GridsOfThreeDimensionsStructsAndTheStack) {
  ExpectSound("ThreeDimensions", 64, [](int i) { return 2 * In(i); });
  ExpectSound("Structs", 64, [](int i) {
    const float constants[4] = {3, 1, 4, 1};
    if (i == 24) return UnalignedIn();
    return i >= 48 ? constants[i % 4] : i < 24 ? In(i) : 0.0f;
  });
  ExpectSound("ArraysOnTheStack", 64, [](int i) {
    int source = 0;
    while ((source * 7 + 1) % 64 != i) ++source;
    return In(source);
  });
}

// The test compares with plain loops in float64, with factors that both types represent exactly.
TEST(Sound, MatrixInstructionsGiveTheProduct) {
  CudaRuntime* runtime = CudaRuntime::For(Device::kSimulator).value();
  std::vector<float> a(256), a_transposed(256), b(128), c(128);
  for (int i = 0; i < 256; ++i) a[i] = static_cast<float>(i * 37 % 101 - 50) / 8;
  for (int i = 0; i < 128; ++i) b[i] = static_cast<float>(i * 53 % 97 - 48) / 16;
  for (int i = 0; i < 256; ++i) a_transposed[i] = a[i % 16 * 16 + i / 16];
  const DeviceBuffer device_b = runtime->Upload(b.data(), 128 * sizeof(float)).value();
  for (const bool transposed : {false, true}) {
    const std::vector<float>& source = transposed ? a_transposed : a;
    const DeviceBuffer device_a = runtime->Upload(source.data(), 256 * sizeof(float)).value();
    for (const bool is_bf16 : {false, true}) {
      const DeviceBuffer device_c = runtime->Allocate(128 * sizeof(float)).value();
      ASSERT_EQ(KernelsOn<SoundKernels>(CudaTarget::kSimulator)
                    .multiply(device_a.As<float>(), device_b.As<float>(), device_c.As<float>(),
                              is_bf16, transposed),
                nullptr);
      ASSERT_TRUE(runtime->CopyToHost(c.data(), device_c.data(), 128 * sizeof(float)).ok());
      for (int i = 0; i < 128; ++i) {
        double sum = 0;
        for (int k = 0; k < 16; ++k)
          sum += static_cast<double>(a[i / 8 * 16 + k]) * b[k * 8 + i % 8];
        ASSERT_EQ(c[i], static_cast<float>(sum)) << i << (is_bf16 ? " bf16" : " f16") << transposed;
      }
    }
  }
}

// ---- Bank conflicts ----

using ::cuda_simulator::BankUse;
using ::cuda_simulator::TakeBankUses;

// Returns the uses of shared memory by a launch, with conflicts or all.
std::vector<BankUse> UsesOf(const std::function<const char*()>& launch, bool all = false) {
  Settings settings;
  settings.counts_bank_conflicts = true;
  Configure(settings);
  TakeBankUses();
  const char* error = launch();
  EXPECT_EQ(error, nullptr) << error;
  std::vector<BankUse> uses = TakeBankUses();
  Configure({});
  if (!all) {
    uses.erase(
        std::remove_if(uses.begin(), uses.end(), [](const BankUse& use) { return use.extra == 0; }),
        uses.end());
  }
  return uses;
}
std::vector<BankUse> ConflictsOf(const char* kernel) {
  return UsesOf([&] { return RunBroken(kernel); });
}

TEST(BankConflicts, ARowOf32WordsPutsAColumnInOneBank) {
  const std::vector<BankUse> uses = ConflictsOf("ReadColumns");
  ASSERT_THAT(uses, SizeIs(1));
  EXPECT_EQ(uses[0].kernel, "ReadColumns");
  EXPECT_FALSE(uses[0].is_store);
  EXPECT_EQ(uses[0].accesses, 32);
  EXPECT_EQ(uses[0].wavefronts, 32 * 32);
  EXPECT_EQ(uses[0].extra, 31 * 32);
  const std::string text = Describe(uses);
  EXPECT_THAT(text, HasSubstr("ReadColumns: 32 accesses of shared memory by warps, 1024 "
                              "wavefronts, of which bank conflicts add 992\n"));
  EXPECT_THAT(text, HasSubstr(", loads: 32, 1024, 992\n"));
  if (!uses[0].source.empty()) {  // addr2line is installed
    EXPECT_EQ(uses[0].source.rfind("broken_kernels.cu:", 0), 0u) << uses[0].source;
  }
}

TEST(BankConflicts, ARowOf33WordsPutsItInDifferentOnes) {
  EXPECT_THAT(ConflictsOf("ReadPaddedColumns"), IsEmpty());
  const std::vector<BankUse> uses =
      UsesOf([] { return RunBroken("ReadPaddedColumns"); }, /*all=*/true);
  int64_t accesses = 0;
  for (const BankUse& use : uses) {
    accesses += use.accesses;
    EXPECT_EQ(use.wavefronts, use.accesses);
  }
  EXPECT_EQ(accesses, 32 + 32);
}

TEST(BankConflicts, WhatABarrierSeparatesHasNone) {
  for (const char* kernel : {"ReadInRounds", "ReadInRoundsOfTheWarp"}) {
    EXPECT_THAT(UsesOf([&] { return RunBroken(kernel, 2); }), IsEmpty()) << kernel;
  }
}

TEST(BankConflicts, AVectorIsOneAccessOfAQuarterWarp) {
  EXPECT_THAT(ConflictsOf("ReadVectors"), IsEmpty());
  std::vector<BankUse> uses = ConflictsOf("ReadEverySecondVector");
  ASSERT_THAT(uses, SizeIs(1));
  EXPECT_EQ(uses[0].accesses, 1);
  EXPECT_EQ(uses[0].wavefronts, 8);
  EXPECT_EQ(uses[0].extra, 4);
  uses = ConflictsOf("ReadEveryEighthVector");
  ASSERT_THAT(uses, SizeIs(1));
  EXPECT_EQ(uses[0].wavefronts, 32);
  EXPECT_EQ(uses[0].extra, 28);
}

// Rows of 16 numbers of 16 bits are 8 words: rows n and n + 4 of a matrix of ldmatrix are in the
// same banks.
TEST(BankConflicts, LdmatrixReadsAMatrixAtATime) {
  CudaRuntime* runtime = CudaRuntime::For(Device::kSimulator).value();
  const std::vector<float> zeros(256);
  const DeviceBuffer a = runtime->Upload(zeros.data(), 256 * sizeof(float)).value();
  const DeviceBuffer c = runtime->Allocate(128 * sizeof(float)).value();
  for (const bool transposed : {false, true}) {
    const std::vector<BankUse> uses = UsesOf([&] {
      return KernelsOn<SoundKernels>(CudaTarget::kSimulator)
          .multiply(a.As<float>(), a.As<float>(), c.As<float>(), true, transposed);
    });
    ASSERT_THAT(uses, SizeIs(1));
    EXPECT_FALSE(uses[0].is_store);
    EXPECT_EQ(uses[0].accesses, 1);
    EXPECT_EQ(uses[0].wavefronts, 8);
    EXPECT_EQ(uses[0].extra, 4);
  }
}

TEST(BankConflicts, AreNotCountedUnlessTheSettingsAsk) {
  Settings settings;
  settings.counts_bank_conflicts = false;
  Configure(settings);
  TakeBankUses();
  EXPECT_EQ(RunBroken("ReadColumns"), nullptr);
  Configure({});
  EXPECT_THAT(TakeBankUses(), IsEmpty());
}

TEST(BankConflicts, CountingFindsWhatIsFoundWithout) {
  const auto messages = [](bool counts) {
    Settings settings;
    settings.counts_bank_conflicts = counts;
    Configure(settings);
    std::vector<std::string> messages;
    for (const char* kernel :
         {"ReadStaticShared", "ReadDynamicShared", "WriteAfterRead", "WriteSamePlace",
          "ExchangeInPartOfWarp", "ReadAtomicCounter", "OverwriteStage", "OverrunDynamicShared"}) {
      RunBroken(kernel);
      for (const Finding& finding : Findings()) messages.push_back(finding.message);
    }
    Configure({});
    return messages;
  };
  EXPECT_EQ(messages(true), messages(false));
  TakeBankUses();
}

// ---- Counts, threads of the host ----

TEST(Counts, AreWhatTheKernelDoes) {
  const Values values(true), sum(false);
  const Counts before = TotalCounts();
  ASSERT_EQ(
      KernelsOn<BrokenKernels>(CudaTarget::kSimulator).reduce(values.data(), sum.data(), true),
      nullptr);
  const Counts after = TotalCounts();
  EXPECT_EQ(after.launches - before.launches, 1);
  EXPECT_EQ(after.blocks - before.blocks, 1);
  EXPECT_EQ(after.threads - before.threads, 64);
  EXPECT_EQ(after.barriers - before.barriers, 6);
  EXPECT_EQ(after.warp_collectives - before.warp_collectives, 0);
  // The sum is 64 loads and stores; 63 additions of two reads and a write; and the last read and
  // write.
  EXPECT_EQ(after.accesses - before.accesses, 2 * 64 + 3 * 63 + 2);
  EXPECT_EQ(after.findings - before.findings, 0);
  EXPECT_EQ(Describe(Counts{1, 2, 3, 4, 5, 6, 7}),
            "1 launches, 2 blocks, 3 threads, 4 barriers, 5 warp collectives, 6 accesses checked, "
            "7 findings");
}

TEST(HostThreads, MayLaunchAtTheSameTime) {
  std::vector<std::thread> threads;
  for (int n = 0; n < 4; ++n) {
    threads.emplace_back([] {
      for (int launch = 0; launch < 20; ++launch) {
        const Values values(true), sum(false);
        EXPECT_EQ(KernelsOn<BrokenKernels>(CudaTarget::kSimulator)
                      .reduce(values.data(), sum.data(), true),
                  nullptr);
        EXPECT_EQ(sum.Download()[0], 64 * 65 / 2);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace tfb
