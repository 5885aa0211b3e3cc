// The registers and memory that nvcc gives each kernel, and whether a GPU can run it as its source
// asks.
#ifndef TFB_TOOLS_CUDA_KERNEL_RESOURCES_H_
#define TFB_TOOLS_CUDA_KERNEL_RESOURCES_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace tfb {

// A kernel, compiled for one architecture.
struct KernelResources {
  std::string kernel;             // its source and name, such as "flash_decode: FlashDecode<64>"
  std::string architecture;       // such as "sm_80"
  int64_t registers = 0;          // a thread
  int64_t spill_store_bytes = 0;  // a thread; registers that ptxas keeps in local memory
  int64_t spill_load_bytes = 0;
  int64_t stack_bytes = 0;          // a thread, spills and arrays in local memory
  int64_t static_shared_bytes = 0;  // a block
  // What a launch gives a block at most (DynamicShared of core/cuda/kernel.cuh); 0 for none, and
  // where the problem's sizes decide.
  int64_t dynamic_shared_bytes = 0;
  // The source's __launch_bounds__: the threads of the largest block, and the blocks that a
  // multiprocessor is to run at a time. A kernel without bounds may be launched with 1024 threads.
  int64_t block_threads = 1024;
  int64_t blocks = 1;
  // What the kernel's BUILD file accepts of spill_store_bytes + spill_load_bytes, and of shared
  // memory a block beyond what all GPUs have, with the reasons.
  int64_t accepted_spill_bytes = 0;
  int64_t accepted_shared_bytes = 0;

  int64_t shared_bytes() const { return static_shared_bytes + dynamic_shared_bytes; }
};

// Reads the files that tools/cuda/compile_kernels writes, one after the other: the lines of
// `ptxas -v` for each kernel and architecture, and from the PTX .target, .entry, .maxntid,
// .minnctapersm and the notes of dynamic shared memory; and the lines that cuda_library writes of
// accepted spills and shared memory. Sorted by kernel and architecture. InvalidArgument names a
// kernel of which something is missing, or such a line for a kernel that does not exist.
absl::StatusOr<std::vector<KernelResources>> ReadKernelResources(absl::string_view text);

// Returns how many blocks of `block_threads` threads a multiprocessor has registers for. Compute
// capabilities 8.0 to 12.0 (CUDA C++ Programming Guide 13.0, "Technical Specifications per Compute
// Capability") have 65,536 registers, a quarter for each of 4 partitions; a warp gets a multiple of
// 256 from its partition.
int64_t BlocksByRegisters(int64_t registers, int64_t block_threads);

// The shared memory of GPUs, in bytes (same table of the guide): of a block, with an opt-in, and of
// a multiprocessor, from which each block takes 1 KiB more than it asks for.
struct GpuShared {
  const char* architecture;  // those of compute capability 8.6 and 12.0 have what sm_89 has
  int64_t of_block;
  int64_t of_multiprocessor;

  int64_t Blocks(int64_t bytes) const {
    return bytes > of_block ? 0 : of_multiprocessor / (bytes + 1024);
  }
};
constexpr GpuShared kGpuShared[] = {{"sm_80", 163 << 10, 164 << 10},
                                    {"sm_89", 99 << 10, 100 << 10},
                                    {"sm_90", 227 << 10, 228 << 10}};

// Returns what is wrong with the kernel, one sentence each: more spills than are accepted, fewer
// blocks at a time than its launch bounds ask for, more than 48 KiB of static shared memory, and
// more shared memory a block than one of the GPUs has, unless that is accepted.
std::vector<std::string> Findings(const KernelResources& kernel);

// Returns a table with one line a kernel and architecture.
std::string KernelResourcesTable(const std::vector<KernelResources>& kernels);

}  // namespace tfb

#endif  // TFB_TOOLS_CUDA_KERNEL_RESOURCES_H_
