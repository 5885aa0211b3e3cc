// Counts how often a warp's accesses of shared memory meet in one bank.
#ifndef TFB_CORE_CUDA_SIMULATOR_BANKS_H_
#define TFB_CORE_CUDA_SIMULATOR_BANKS_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "core/cuda/simulator/order.h"
#include "core/cuda/simulator/simulator.h"

namespace cuda_simulator {

// The cost of a warp's access.
struct Wavefronts {
  int all;    // passes over the banks
  int least;  // those of the same access without conflicts
};

// Returns the wavefronts of an access of `bytes` bytes, at most 16, by the lanes of a warp. There are
// 32 banks of 4 bytes. All lanes of an access of 4 bytes or less go together, the halves of a warp
// of 8, the quarters of 16. Such a group takes as many wavefronts as it has words in one bank, where
// lanes at the same word count once.
Wavefronts WavefrontsOf(const uintptr_t addresses[kWarp], unsigned lanes, size_t bytes);

// The accesses of a block's threads since they last met, and the counts of all launches.
//
// A thread runs alone until it meets others, so the lanes of an access come one after another. Those
// belong together that are of the same code address and of the same number at that address, counted
// by each lane since its last meeting.
//
// g++ may read a vector (float4) in parts, for each of which there is an access here. Parts are put
// together where accesses of different code addresses follow each other, in every lane that makes
// them, at neighbouring addresses that together are one aligned vector.
class Banks {
 public:
  // Prepares for a launch. Where `counts` is false, nothing else may be called before the next.
  void StartLaunch(bool counts, const char* kernel);
  bool counts() const { return counts_; }

  void Note(int thread, AccessKind kind, uintptr_t address, size_t bytes, const void* site);
  // Counts and forgets the accesses of these lanes of the warp, which meet.
  void Meet(int warp, unsigned lanes);
  void ForgetAccesses();

  // Returns the counts so far, the worst line first, and begins anew.
  std::vector<BankUse> Take();

 private:
  struct Access {
    const void* site;
    uintptr_t address;
    size_t bytes;
  };
  using Accesses = std::vector<Access>;  // of one thread, in their order
  // An access of several lanes.
  struct Group {
    const void* site;
    size_t bytes;
    unsigned lanes = 0;
    uintptr_t addresses[kWarp];
    size_t places[kWarp];  // in the lanes' sequences
  };
  struct Count {
    int64_t accesses = 0;
    int64_t wavefronts = 0;
    int64_t extra = 0;
  };
  class Matching;

  using CountsOfKernel = std::map<std::pair<const void*, bool>, Count>;  // by site and is_store

  bool counts_ = false;
  Accesses loads_[kMaxThreads];
  Accesses stores_[kMaxThreads];
  std::map<std::string, CountsOfKernel> counted_;
  CountsOfKernel* counted_here_ = nullptr;  // those of the running kernel
};

}  // namespace cuda_simulator

#endif  // TFB_CORE_CUDA_SIMULATOR_BANKS_H_
