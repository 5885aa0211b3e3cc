// How the simulator sees raw accesses of unmodified kernels. Sources with kernels are compiled with
// -fsanitize=thread, which puts a call before every load and store; the simulator's build renames
// those calls (__tsan_read4 to cuda_simulator_read4, see hooks.cc), so that they reach it and never
// the sanitizer's own library, which may be linked into the same program for other code.
#ifndef TFB_CORE_CUDA_SIMULATOR_HOOKS_H_
#define TFB_CORE_CUDA_SIMULATOR_HOOKS_H_

#include <cstddef>

#include "core/cuda/simulator/machine.h"

namespace cuda_simulator {

// Checks an access of the running thread. `site` is where in the kernel it happens: a return
// address. Code outside kernels, in the same sources, may do what it likes.
inline void Note(AccessKind kind, const void* address, size_t bytes, bool aligned,
                 const void* site) {
  Machine* machine = running_machine;
  if (machine == nullptr) return;
  machine->checker.Check({reinterpret_cast<uintptr_t>(address), bytes, kind, aligned, site});
}

}  // namespace cuda_simulator

#endif  // TFB_CORE_CUDA_SIMULATOR_HOOKS_H_
