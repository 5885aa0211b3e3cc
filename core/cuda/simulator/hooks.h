// Declares the hooks that report raw accesses of unmodified kernels to the simulator. Sources with
// kernels are compiled with -fsanitize=thread, which puts a call before every load and store; the
// simulator's build renames those calls (__tsan_read4 to cuda_simulator_read4, see hooks.cc), so
// that they reach it and never the sanitizer's own library, which may be linked into the same
// program for other code. -fsanitize=alignment reports misaligned addresses in the same way.
#ifndef TFB_CORE_CUDA_SIMULATOR_HOOKS_H_
#define TFB_CORE_CUDA_SIMULATOR_HOOKS_H_

#include <cstddef>

#include "core/cuda/simulator/machine.h"

namespace cuda_simulator {

// Checks an access of the running thread. `site` is the code address in the kernel: a return
// address. Accesses by code outside kernels in the same sources, and to local variables, are not
// checked.
inline void Note(AccessKind kind, const void* address, size_t bytes, const void* site) {
  Machine* machine = running_machine;
  const uintptr_t place = reinterpret_cast<uintptr_t>(address);
  if (machine == nullptr || machine->block.stacks().Contains(place)) return;
  machine->checker.Check({place, bytes, kind, site});
}

// Reports that the running thread uses an address without the alignment that its type needs.
void NoteMisaligned(const void* address, const char* type, size_t alignment, const void* site);

// Calls NoteMisaligned where the address is misaligned.
inline void CheckAlignment(const void* address, const char* type, size_t alignment,
                           const void* site) {
  if (reinterpret_cast<uintptr_t>(address) % alignment != 0) {
    NoteMisaligned(address, type, alignment, site);
  }
}

}  // namespace cuda_simulator

#endif  // TFB_CORE_CUDA_SIMULATOR_HOOKS_H_
