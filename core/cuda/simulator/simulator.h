// A simulator of CUDA kernels on the host: what the program that launches them sees. See README.md;
// what kernels see is cuda_runtime.h.
//
// Launches, and changes of device memory, wait for one another: host threads may make them at the
// same time. What is below is for one host thread at a time.
#ifndef TFB_CORE_CUDA_SIMULATOR_SIMULATOR_H_
#define TFB_CORE_CUDA_SIMULATOR_SIMULATOR_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace cuda_simulator {

enum class FindingKind {
  kOutOfBounds,       // neither in a registered buffer nor in the block's shared memory
  kMisaligned,        // not at a multiple of the access's size
  kUnwrittenRead,     // of shared or device memory that nothing has written
  kRace,              // in shared memory: two threads, at least one writes, no barrier between
  kDivergentBarrier,  // not all threads of a block, or lanes of a mask, reach it
  kLaneOutsideMask,   // a shuffle by or from a lane that its mask does not name, or that is gone
  kBadLaunch,         // a grid, block or shared memory beyond the limits of a GPU
  kStackOverflow,     // of a thread, beyond Settings::stack_bytes
};
const char* Name(FindingKind kind);  // "out of bounds", "race", ...

struct Index3 {
  unsigned x = 0, y = 0, z = 0;
};

// A place of a kernel's code gives one finding of each kind in a launch: that of the first thread.
struct Finding {
  FindingKind kind;
  std::string kernel;
  Index3 block;
  Index3 thread;
  int64_t times = 1;
  std::string source;   // "reduce.cu:17", "kernel.cuh:112 from flash.cu:88"; empty if not known
  std::string message;  // "Reduce, block (0, 0, 0), thread (3, 0, 0), reduce.cu:17: reads 4 ..."
};

// $CUDA_SIMULATOR_SEED where that is a number, otherwise 1.
uint64_t SeedOfEnvironment();

struct Settings {
  // Seeds the order in which blocks, and threads between two barriers, run. An order depends
  // on this and on its shape alone.
  uint64_t seed = SeedOfEnvironment();
  // A launch stops at the end of a block that brings it to so many; at once where going on would
  // touch memory that is not the kernel's.
  int max_findings = 8;
  size_t stack_bytes = 64 << 10;                  // of one CUDA thread
  size_t max_shared_bytes_per_block = 227 << 10;  // dynamic; Hopper's
  unsigned max_grid_yz = 65535;  // blocks; fewer show on a small grid who would go beyond
  // As a GPU has it: a kernel that goes wrong is not told by its launch but by the next call that
  // waits, and by every other call from then on, until the simulator is configured anew.
  bool errors_are_deferred = false;
  // Called before (true) and after (false) every launch, for what counts or times a program's own
  // doings.
  void (*on_launch)(bool begins) = nullptr;
  // Returns the seconds that an event records. Where it is empty events record those of the
  // steady clock.
  std::function<double()> event_seconds;
};
// Sets or returns what holds for all launches from here on.
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
  int64_t accesses = 0;          // to shared and device memory, each checked
  int64_t findings = 0;
};
Counts TotalCounts();
// "12 launches, 48 blocks, 6144 threads, 96 barriers, 384 warp collectives, 98304 accesses checked,
// 0 findings"
std::string Describe(const Counts& counts);

// Memory that kernels may access, besides what cudaMalloc gives. `written` says whether its
// contents count as written.
void RegisterBuffer(const void* begin, size_t bytes, bool written);
void UnregisterBuffer(const void* begin);

}  // namespace cuda_simulator

#endif  // TFB_CORE_CUDA_SIMULATOR_SIMULATOR_H_
