#include "core/cuda/simulator/hooks.h"

// The calls that g++ and clang put before accesses, under the names that the build gives them.
extern "C" {

#define TFB_SITE __builtin_return_address(0)
// The unaligned ones are of accesses that the compiler knows to be so, and nvcc splits.
#define TFB_ACCESS_HOOKS(bytes)                                           \
  void cuda_simulator_read##bytes(void* address) {                        \
    cuda_simulator::OnRead(address, bytes, /*aligned=*/true, TFB_SITE);   \
  }                                                                       \
  void cuda_simulator_write##bytes(void* address) {                       \
    cuda_simulator::OnWrite(address, bytes, /*aligned=*/true, TFB_SITE);  \
  }                                                                       \
  void cuda_simulator_unaligned_read##bytes(void* address) {              \
    cuda_simulator::OnRead(address, bytes, /*aligned=*/false, TFB_SITE);  \
  }                                                                       \
  void cuda_simulator_unaligned_write##bytes(void* address) {             \
    cuda_simulator::OnWrite(address, bytes, /*aligned=*/false, TFB_SITE); \
  }
TFB_ACCESS_HOOKS(1)
TFB_ACCESS_HOOKS(2)
TFB_ACCESS_HOOKS(4)
TFB_ACCESS_HOOKS(8)
TFB_ACCESS_HOOKS(16)
#undef TFB_ACCESS_HOOKS

void cuda_simulator_read_range(void* address, unsigned long bytes) {
  cuda_simulator::OnRead(address, bytes, /*aligned=*/false, TFB_SITE);
}
void cuda_simulator_write_range(void* address, unsigned long bytes) {
  cuda_simulator::OnWrite(address, bytes, /*aligned=*/false, TFB_SITE);
}
void cuda_simulator_init() {}
void cuda_simulator_func_entry(void*) {}
void cuda_simulator_func_exit() {}
void cuda_simulator_vptr_read(void**) {}
void cuda_simulator_vptr_update(void**, void*) {}

}  // extern "C"
