// Simulates CUDA kernels on the host. This header is for programs that launch kernels,
// cuda_runtime.h for kernels; see README.md.
//
// Launches, and changes of device memory, exclude one another, so host threads may make them
// concurrently. The functions below are for one host thread at a time.
#ifndef TFB_CORE_CUDA_SIMULATOR_SIMULATOR_H_
#define TFB_CORE_CUDA_SIMULATOR_SIMULATOR_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace cuda_simulator {

enum class FindingKind {
  // The access is neither in a registered buffer nor in the block's shared memory.
  kOutOfBounds,
  kMisaligned,     // the address is not a multiple of the access's size
  kUnwrittenRead,  // a read of shared or device memory that nothing has written
  // In shared memory: two threads access it, at least one writes, without a barrier between.
  kRace,
  kDivergentBarrier,  // not all threads of a block, or lanes of a mask, reach it
  kLaneOutsideMask,   // a shuffle by or from a lane that is not in its mask, or has finished
  kBadLaunch,         // a grid, block or shared memory beyond the limits of a GPU
  kStackOverflow,     // a thread used more than Settings::stack_bytes
  kBadInstruction,    // inline PTX that the simulator does not know, or of other operands
  kBadBarrier,        // a barrier of other threads or arrivals than it is for, or not set up
  kMissingFence,      // memory or registers that asynchronous work uses need a fence before
  kUnfinishedWork,    // a product or bulk copy for which nothing waits
};
const char* Name(FindingKind kind);  // Returns "out of bounds", "race", ...

struct Index3 {
  unsigned x = 0, y = 0, z = 0;
};

// A finding. In a launch, each place of a kernel's code gives one finding of each kind: that of the
// first thread.
struct Finding {
  FindingKind kind;
  std::string kernel;
  Index3 block;
  Index3 thread;
  int64_t times = 1;
  // "reduce.cu:17", "kernel.cuh:112 from flash.cu:88"; empty if it is not known.
  std::string source;
  std::string message;  // "Reduce, block (0, 0, 0), thread (3, 0, 0), reduce.cu:17: reads 4 ..."
};

// A GPU for which kernels are compiled: those of its limits that a launch can exceed, and how it
// adds.
struct Gpu {
  const char* name;  // "sm_90"
  int compute_capability_major;
  int compute_capability_minor;
  // Static and dynamic shared memory of a block, of which more than 48 KiB need
  // cudaFuncAttributeMaxDynamicSharedMemorySize.
  size_t max_shared_bytes_per_block;
  // The sums of mma.m16n8k16 on 16-bit numbers: the products of a step, and the bits after the
  // binary point that a step keeps (MMA-Sim, as MmaSums has it).
  int mma_step_products;
  int mma_fraction_bits;
};
// CUDA C++ programming guide, "Technical Specifications per Compute Capability".
constexpr Gpu kGpus[] = {
    {"sm_80", 8, 0, 163 << 10, 8, 24},   // A100
    {"sm_89", 8, 9, 99 << 10, 8, 24},    // L40, RTX 4090
    {"sm_90", 9, 0, 227 << 10, 16, 25},  // H100, H200
};
// Returns the GPU of that name; null where there is none.
const Gpu* FindGpu(const std::string& name);
// Returns the GPU that $CUDA_SIMULATOR_GPU names, otherwise sm_90. Ends the program where it names
// an unknown one.
Gpu GpuOfEnvironment();

// Returns $CUDA_SIMULATOR_SEED where that is a number, otherwise 1.
uint64_t SeedOfEnvironment();

// How mma adds 16 products and an accumulator.
enum class MmaSums {
  kRounded,  // in float64, rounded once
  // As the tensor cores of the GPU do, in one step or two. A step aligns its exact products, and the
  // accumulator, to the largest exponent among them, where a product's exponent is the sum of its
  // factors'; cuts off the bits below Gpu::mma_fraction_bits; adds what is left exactly; and cuts
  // the sum to a float. All cuts are towards zero. (Fasi, Higham, Mikaitis, Pranesh: Numerical
  // behavior of NVIDIA tensor cores, 2021; Xie, Wang, Yang, Yang: MMA-Sim, arXiv 2511.10909v1.)
  kTruncated,
};
// Returns kRounded or kTruncated as $CUDA_SIMULATOR_MMA is "rounded" or "truncated", otherwise
// kRounded. Ends the program where it is another text.
MmaSums MmaSumsOfEnvironment();

// Returns whether $CUDA_SIMULATOR_BANK_CONFLICTS is set. Where it is, the program prints the counts
// at its end.
bool BankConflictsOfEnvironment();

struct Settings {
  // Seeds the order in which blocks, and threads between two barriers, run. An order depends only
  // on the seed and the shape of the launch.
  uint64_t seed = SeedOfEnvironment();
  // The number of findings after which a launch stops, at the end of the block. It stops at once
  // where continuing would access memory that is not the kernel's.
  int max_findings = 8;
  size_t stack_bytes = 64 << 10;  // stack of one CUDA thread
  Gpu gpu = GpuOfEnvironment();
  MmaSums mma_sums = MmaSumsOfEnvironment();
  // Whether the bank conflicts of shared memory are counted, for TakeBankUses. It makes launches
  // several times as slow.
  bool counts_bank_conflicts = BankConflictsOfEnvironment();
  // Limit on blocks; tests lower it to find kernels that would exceed it.
  unsigned max_grid_yz = 65535;
  // Whether errors are reported as on a GPU: not by the launch of the failing kernel but by the
  // next call that waits, and by all later calls until the next Configure.
  bool errors_are_deferred = false;
  // Whether the work of a stream is done as late as CUDA permits, instead of by the call that enqueues it:
  // when something waits for that stream, copies from or to the host on it, or frees memory. Streams that
  // wait for the default stream count as that one. So what relies on another stream's work without
  // waiting for it goes without.
  bool streams_are_late = false;
  // Called before (true) and after (false) every launch, for code that counts or times the host
  // program.
  void (*on_launch)(bool begins) = nullptr;
  // Returns the seconds that an event records; those of the steady clock where it is empty.
  std::function<double()> event_seconds;
};
// Set or return the settings of all following launches.
void Configure(const Settings& settings);
Settings CurrentSettings();

// Returns the findings of the last launch.
const std::vector<Finding>& Findings();

// Sums over all launches so far.
struct Counts {
  int64_t launches = 0;
  int64_t blocks = 0;
  int64_t threads = 0;
  int64_t barriers = 0;          // of blocks
  int64_t warp_collectives = 0;  // shuffles, votes, matrix products, __syncwarp
  int64_t accesses = 0;          // accesses to shared and device memory, each checked
  int64_t findings = 0;
};
Counts TotalCounts();
// Returns "12 launches, 48 blocks, 6144 threads, 96 barriers, 384 warp collectives, 98304 accesses
// checked, 0 findings".
std::string Describe(const Counts& counts);

// The loads, or the stores, of shared memory of one source line of a kernel, over its launches.
struct BankUse {
  std::string kernel;
  std::string source;  // as a finding's
  bool is_store = false;
  int64_t accesses = 0;    // of warps
  int64_t wavefronts = 0;  // passes over the banks
  int64_t extra = 0;       // wavefronts that conflicts add
};
// Returns the uses since the last call while Settings::counts_bank_conflicts was set, the worst
// first.
std::vector<BankUse> TakeBankUses();
// Returns a line for each kernel, "Transpose: 64 accesses of shared memory by warps, 1056
// wavefronts, of which bank conflicts add 992", followed by one for each source line with conflicts.
std::string Describe(const std::vector<BankUse>& uses);

// Registers memory that kernels may access besides cudaMalloc's. `written` says whether its
// contents count as written.
void RegisterBuffer(const void* begin, size_t bytes, bool written);
void UnregisterBuffer(const void* begin);

}  // namespace cuda_simulator

#endif  // TFB_CORE_CUDA_SIMULATOR_SIMULATOR_H_
