#include "core/cuda/simulator/hooks.h"

#include <cstring>

// The calls that g++ and clang put before accesses, under the names that the build gives them.
extern "C" {

#define TFB_NOTE(kind, address, bytes, aligned)                                   \
  cuda_simulator::Note(cuda_simulator::AccessKind::kind, address, bytes, aligned, \
                       __builtin_return_address(0))
// What the compiler knows to be unaligned, nvcc splits: no mistake.
#define TFB_ACCESS_HOOKS(bytes)                                                               \
  void cuda_simulator_read##bytes(void* address) { TFB_NOTE(kRead, address, bytes, true); }   \
  void cuda_simulator_write##bytes(void* address) { TFB_NOTE(kWrite, address, bytes, true); } \
  void cuda_simulator_unaligned_read##bytes(void* address) {                                  \
    TFB_NOTE(kRead, address, bytes, false);                                                   \
  }                                                                                           \
  void cuda_simulator_unaligned_write##bytes(void* address) {                                 \
    TFB_NOTE(kWrite, address, bytes, false);                                                  \
  }
TFB_ACCESS_HOOKS(1)
TFB_ACCESS_HOOKS(2)
TFB_ACCESS_HOOKS(4)
TFB_ACCESS_HOOKS(8)
TFB_ACCESS_HOOKS(16)
#undef TFB_ACCESS_HOOKS

void cuda_simulator_read_range(void* address, unsigned long bytes) {
  if (bytes > 0) TFB_NOTE(kRead, address, bytes, false);
}
void cuda_simulator_write_range(void* address, unsigned long bytes) {
  if (bytes > 0) TFB_NOTE(kWrite, address, bytes, false);
}

// The C library's, which loops and copies of structs become.
void* cuda_simulator_memcpy(void* to, const void* from, size_t bytes) {
  if (bytes > 0) TFB_NOTE(kRead, from, bytes, false);
  if (bytes > 0) TFB_NOTE(kWrite, to, bytes, false);
  return std::memcpy(to, from, bytes);
}
void* cuda_simulator_memmove(void* to, const void* from, size_t bytes) {
  if (bytes > 0) TFB_NOTE(kRead, from, bytes, false);
  if (bytes > 0) TFB_NOTE(kWrite, to, bytes, false);
  return std::memmove(to, from, bytes);
}
void* cuda_simulator_memset(void* to, int value, size_t bytes) {
  if (bytes > 0) TFB_NOTE(kWrite, to, bytes, false);
  return std::memset(to, value, bytes);
}

void cuda_simulator_init() {}
void cuda_simulator_func_entry(void*) {}
void cuda_simulator_func_exit() {}
void cuda_simulator_vptr_read(void**) {}
void cuda_simulator_vptr_update(void**, void*) {}

}  // extern "C"
