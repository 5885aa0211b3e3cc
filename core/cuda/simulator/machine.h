// Defines the simulated GPU: the state that the parts of the simulator share.
#ifndef TFB_CORE_CUDA_SIMULATOR_MACHINE_H_
#define TFB_CORE_CUDA_SIMULATOR_MACHINE_H_

#include <map>
#include <mutex>
#include <string>

#include "core/cuda/simulator/banks.h"
#include "core/cuda/simulator/block.h"
#include "core/cuda/simulator/checker.h"
#include "core/cuda/simulator/findings.h"
#include "core/cuda/simulator/phase_barriers.h"
#include "core/cuda/simulator/products.h"
#include "core/cuda/simulator/simulator.h"

namespace cuda_simulator {

struct Machine {
  Machine() : checker(this), block(this), phase_barriers(this), products(this) {}

  // Adds a finding of the running thread; what() returns the text that says what the thread does.
  template <class What>
  void Report(FindingKind kind, const void* site, What what) {
    ReportOf(block.running(), kind, site, what);
  }
  template <class What>
  void ReportOf(int thread, FindingKind kind, const void* site, What what) {
    if (!findings.Wants(kind, site)) return;
    findings.Add(kind, block.index(), block.index_of(thread), site, what());
  }

  std::mutex mutex;  // held by launches, and by changes of device memory
  Settings settings;
  Counts counts;  // without accesses, which the checker counts
  FindingLog findings;
  Checker checker;
  Block block;
  PhaseBarriers phase_barriers;
  Products products;
  Banks banks;
  // The most dynamic shared memory of kernels that cudaFuncSetAttribute was called for.
  std::map<const void*, size_t> max_dynamic_shared;
  std::string failure;  // a kernel's error where errors are deferred: every later call returns it
};

Machine& TheMachine();

// TheMachine() on the host thread that runs a kernel; null otherwise. Each load and store reads it,
// and calls a function for that with another model, in code that may become part of a library.
extern __thread Machine* running_machine __attribute__((tls_model("initial-exec")));

}  // namespace cuda_simulator

#endif  // TFB_CORE_CUDA_SIMULATOR_MACHINE_H_
