#include "tools/cuda/kernel_resources.h"

#include <cstdio>
#include <fstream>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tfb {
namespace {

using ::testing::Contains;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

std::vector<KernelResources> ReadFile(const std::string& path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  EXPECT_TRUE(file) << path;
  return ReadKernelResources(text.str()).value();
}

TEST(KernelResources, NoKernelOfThisBuildSpillsOrNeedsMoreRegistersThanAGpuHas) {
  const std::vector<KernelResources> kernels = ReadFile("harness/kernel_resources.txt");
  std::fputs(KernelResourcesTable(kernels).c_str(), stdout);
  for (const KernelResources& kernel : kernels) EXPECT_THAT(Findings(kernel), IsEmpty());
  // With fewer the list of libraries is wrong.
  std::set<std::string> names;
  for (const KernelResources& kernel : kernels) names.insert(kernel.kernel);
  EXPECT_GT(names.size(), 100);
}

// Returns the findings for the kernel whose name ends so, on every architecture.
std::vector<std::string> FindingsOf(const std::string& name,
                                    const std::vector<KernelResources>& kernels) {
  std::vector<std::string> findings;
  size_t found = 0;
  for (const KernelResources& kernel : kernels) {
    if (kernel.kernel != name) continue;
    ++found;
    for (const std::string& finding : Findings(kernel)) findings.push_back(finding);
  }
  EXPECT_GT(found, 0) << name;
  return findings;
}

TEST(KernelResources, FaultyKernelsAreFoundAndTheSoundOneBetweenThemIsNot) {
  const std::vector<KernelResources> kernels = ReadFile("tools/cuda/faulty_kernel_resources.txt");
  const std::vector<std::string> spill = FindingsOf("faulty_kernels: Spill", kernels);
  const std::vector<std::string> take = FindingsOf("faulty_kernels: TakeRegisters", kernels);
  EXPECT_THAT(spill, Contains(HasSubstr("spills registers")));
  EXPECT_THAT(take, Contains(HasSubstr("allow blocks of 1024 threads")));
  EXPECT_THAT(
      FindingsOf("faulty_kernels: TakeShared", kernels),
      Each(HasSubstr("has up to 101380 bytes of shared memory a block; sm_89 allows 101376")));
  EXPECT_THAT(FindingsOf("faulty_kernels: Keep", kernels), IsEmpty());
}

TEST(KernelResources, LaunchBoundsAndStaticSharedMemoryAreRead) {
  for (const KernelResources& kernel : ReadFile("tools/cuda/faulty_kernel_resources.txt")) {
    if (kernel.kernel != "faulty_kernels: Keep") continue;
    EXPECT_EQ(kernel.block_threads, 256);
    EXPECT_EQ(kernel.blocks, 2);
    EXPECT_EQ(kernel.static_shared_bytes, 1024);
    EXPECT_GT(kernel.registers, 0);
  }
}

constexpr char kText[] = R"(ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_ZN3tfb4BothILi64EEEvPf' for 'sm_80'
ptxas info    : Function properties for _ZN3tfb4BothILi64EEEvPf
    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
ptxas info    : Function properties for _ZN3tfb6CalledEPf
    16 bytes stack frame, 0 bytes spill stores, 20 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 49153 bytes smem, 360 bytes cmem[0]
ptxas info    : Compiling entry function '_ZN3tfb4BothILi64EEEvPf' for 'sm_90a'
ptxas info    : Function properties for _ZN3tfb4BothILi64EEEvPf
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 64 registers, used 1 barriers
.target sm_80
.visible .entry _ZN3tfb4BothILi64EEEvPf(
.maxntid 32, 4, 2
.minnctapersm 2
	// dynamic shared 16
	// dynamic shared 8192
	// dynamic shared 4096
.func _ZN3tfb6CalledEPf(
	// dynamic shared 16384
.target sm_90a, debug
.entry _ZN3tfb4BothILi64EEEvPf(
)";

TEST(KernelResources, EveryArchitectureHasItsOwnNumbers) {
  const std::vector<KernelResources> kernels = ReadKernelResources(kText).value();
  ASSERT_EQ(kernels.size(), 2);
  EXPECT_EQ(kernels[0].kernel, "Both<64>");
  EXPECT_EQ(kernels[0].architecture, "sm_80");
  EXPECT_EQ(kernels[0].registers, 168);
  EXPECT_EQ(kernels[0].spill_store_bytes, 4);
  EXPECT_EQ(kernels[0].spill_load_bytes, 32) << "those of a function that it calls count";
  EXPECT_EQ(kernels[0].stack_bytes, 24);
  EXPECT_EQ(kernels[0].static_shared_bytes, 49153);
  EXPECT_EQ(kernels[0].dynamic_shared_bytes, 8192) << "the largest of the kernel's own";
  EXPECT_EQ(kernels[0].block_threads, 256);
  EXPECT_EQ(kernels[0].blocks, 2);
  EXPECT_EQ(kernels[1].architecture, "sm_90a");
  EXPECT_EQ(kernels[1].block_threads, 1024) << "no launch bounds";
  EXPECT_EQ(kernels[1].blocks, 1);
  EXPECT_EQ(kernels[1].dynamic_shared_bytes, 0);
  EXPECT_THAT(Findings(kernels[1]), IsEmpty());
}

TEST(KernelResources, EachFaultIsASentence) {
  const std::vector<KernelResources> kernels = ReadKernelResources(kText).value();
  EXPECT_THAT(Findings(kernels[0]),
              ElementsAre("Both<64> for sm_80 spills registers: 4 bytes of stores, 32 of loads; "
                          "accepted are 0 bytes",
                          "Both<64> for sm_80: its launch bounds allow blocks of 256 threads, 2 at "
                          "a time; 168 registers a thread leave room for 1",
                          "Both<64> for sm_80 has 49153 bytes of static shared memory; at most are "
                          "49152"));
}

TEST(KernelResources, ABuildFileAcceptsSpillsUpToItsNumberOfBytes) {
  for (const auto& [line, findings] :
       {std::pair("known spill: Both<64>: 36 a call saves values\n", 2),
        std::pair("known spill: Both<64>: 35 a call saves values\n", 3)}) {
    const auto kernels = ReadKernelResources(absl::StrCat(line, kText)).value();
    EXPECT_EQ(Findings(kernels[0]).size(), findings) << line;
  }
  EXPECT_EQ(ReadKernelResources(absl::StrCat("known spill: Neither: 36 reasons\n", kText))
                .status()
                .message(),
            "a BUILD file accepts 36 spilt bytes of a kernel that is not there: Neither");
  EXPECT_EQ(ReadKernelResources(absl::StrCat(kText, "known spill: Both<64>: reasons\n"))
                .status()
                .message(),
            "a BUILD file accepts 0 spilt bytes of a kernel that is not there: Both<64>: reasons");
}

TEST(KernelResources, ABuildFileAcceptsSharedMemoryUpToItsNumberOfBytes) {
  // 49153 static bytes and this are one more than an sm_80 has, which has more than an sm_89.
  const std::string large = absl::StrCat(kText, ".target sm_80\n.entry _ZN3tfb4BothILi64EEEvPf(\n",
                                         "// dynamic shared ", (163 << 10) + 1 - 49153, "\n");
  for (const auto& [line, finding] :
       {std::pair("", "166913 bytes of shared memory a block; sm_80 allows 166912, accepted are 0"),
        std::pair("known shared: Both<64>: 166912 of sums\n", "accepted are 166912")}) {
    const auto kernels = ReadKernelResources(absl::StrCat(line, large)).value();
    EXPECT_THAT(Findings(kernels[0]), Contains(HasSubstr(finding)));
  }
  const auto kernels =
      ReadKernelResources(absl::StrCat("known shared: Both<64>: 166913 of sums\n", large)).value();
  EXPECT_THAT(Findings(kernels[0]), Each(Not(HasSubstr("allows"))));
  EXPECT_EQ(
      ReadKernelResources(absl::StrCat("known shared: Neither: 36 reasons\n", kText))
          .status()
          .message(),
      "a BUILD file accepts 36 bytes of shared memory of a kernel that is not there: Neither");
}

TEST(KernelResources, AMultiprocessorHasRoomForBlocksAndAKibibyteMoreOfEach) {
  EXPECT_EQ(kGpuShared[0].Blocks(40 << 10), 4) << "164 KiB of an sm_80";
  EXPECT_EQ(kGpuShared[0].Blocks((40 << 10) + 1), 3);
  EXPECT_EQ(kGpuShared[1].Blocks(99 << 10), 1);
  EXPECT_EQ(kGpuShared[1].Blocks((99 << 10) + 1), 0);
  EXPECT_EQ(kGpuShared[2].Blocks(75 << 10), 3) << "228 KiB of an sm_90";
}

TEST(KernelResources, AKernelOfWhichSomethingIsMissingIsAnError) {
  const std::string text = kText;
  const std::string without_ptx = text.substr(0, text.find(".target sm_90a"));
  EXPECT_THAT(std::string(ReadKernelResources(without_ptx).status().message()),
              HasSubstr("for sm_90a: no PTX"));
  std::string without_registers = text;
  without_registers.erase(text.find("ptxas info    : Used 64"), 51);
  EXPECT_THAT(std::string(ReadKernelResources(without_registers).status().message()),
              HasSubstr("for sm_90a: ptxas does not tell all of it"));
}

// CUDA's occupancy calculator gives these.
TEST(KernelResources, WarpsTakeRegistersInUnitsFromQuartersOfTheRegisterFile) {
  EXPECT_EQ(BlocksByRegisters(64, 1024), 1);
  EXPECT_EQ(BlocksByRegisters(65, 1024), 0);
  EXPECT_EQ(BlocksByRegisters(32, 1024), 2);
  EXPECT_EQ(BlocksByRegisters(255, 256), 1);
  EXPECT_EQ(BlocksByRegisters(255, 128), 2);
  EXPECT_EQ(BlocksByRegisters(168, 128), 3);
  EXPECT_EQ(BlocksByRegisters(168, 33), 6) << "two warps";
}

}  // namespace
}  // namespace tfb
