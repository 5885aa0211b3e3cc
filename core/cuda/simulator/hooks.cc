#include "core/cuda/simulator/hooks.h"

#include <cstring>

namespace cuda_simulator {
namespace {

// It is not inlined, so that the path of shared memory needs no more registers than a caller leaves.
template <AccessKind kKind, size_t kBytes>
__attribute__((noinline)) void NoteElsewhere(uintptr_t address, const void* site) {
  Checker& checker = running_machine->checker;
  if (checker.CheckDeviceQuickly<kKind, kBytes>(address)) return;
  checker.Check({address, kBytes, kKind, site});
}

template <AccessKind kKind, size_t kBytes>
inline void NoteQuickly(void* address, const void* site) {
  Machine* machine = running_machine;
  const uintptr_t place = reinterpret_cast<uintptr_t>(address);
  if (machine == nullptr || machine->block.stacks().Contains(place)) return;
  if (machine->checker.CheckSharedQuickly<kKind, kBytes>(place)) return;
  NoteElsewhere<kKind, kBytes>(place, site);
}

}  // namespace
}  // namespace cuda_simulator

using cuda_simulator::AccessKind;
using cuda_simulator::Note;
using cuda_simulator::NoteQuickly;

// g++ and clang put these calls before accesses, under the names that the build gives them.
extern "C" {

#define TFB_SITE __builtin_return_address(0)
#define TFB_ACCESS_HOOKS(bytes)                                \
  void cuda_simulator_read##bytes(void* address) {             \
    NoteQuickly<AccessKind::kRead, bytes>(address, TFB_SITE);  \
  }                                                            \
  void cuda_simulator_write##bytes(void* address) {            \
    NoteQuickly<AccessKind::kWrite, bytes>(address, TFB_SITE); \
  }                                                            \
  void cuda_simulator_unaligned_read##bytes(void* address) {   \
    Note(AccessKind::kRead, address, bytes, TFB_SITE);         \
  }                                                            \
  void cuda_simulator_unaligned_write##bytes(void* address) {  \
    Note(AccessKind::kWrite, address, bytes, TFB_SITE);        \
  }
TFB_ACCESS_HOOKS(1)
TFB_ACCESS_HOOKS(2)
TFB_ACCESS_HOOKS(4)
TFB_ACCESS_HOOKS(8)
TFB_ACCESS_HOOKS(16)
#undef TFB_ACCESS_HOOKS

void cuda_simulator_read_range(void* address, size_t bytes) {
  if (bytes > 0) Note(AccessKind::kRead, address, bytes, TFB_SITE);
}
void cuda_simulator_write_range(void* address, size_t bytes) {
  if (bytes > 0) Note(AccessKind::kWrite, address, bytes, TFB_SITE);
}

// Replaces the C library's function, which loops and copies of structs become.
void* cuda_simulator_memcpy(void* to, const void* from, size_t bytes) {
  if (bytes > 0) Note(AccessKind::kRead, from, bytes, TFB_SITE);
  if (bytes > 0) Note(AccessKind::kWrite, to, bytes, TFB_SITE);
  return std::memcpy(to, from, bytes);
}
void* cuda_simulator_memmove(void* to, const void* from, size_t bytes) {
  if (bytes > 0) Note(AccessKind::kRead, from, bytes, TFB_SITE);
  if (bytes > 0) Note(AccessKind::kWrite, to, bytes, TFB_SITE);
  return std::memmove(to, from, bytes);
}
void* cuda_simulator_memset(void* to, int value, size_t bytes) {
  if (bytes > 0) Note(AccessKind::kWrite, to, bytes, TFB_SITE);
  return std::memset(to, value, bytes);
}

// -fsanitize=alignment calls it where a pointer is used that is not aligned for its type, with the
// compiler's description. The hooks above may see loads and stores of structs in parts, so the
// alignment of a float4 is known only here.
struct TypeMismatch {
  const char* file;
  unsigned line, column;
  const struct {
    unsigned short kind, info;
    char name[1];  // first character of the name: "'float4'"
  } * type;
  unsigned char log_alignment;
  unsigned char use;  // 0: a load, 1: a store, others: a reference or a member
};
void cuda_simulator_misaligned(TypeMismatch* mismatch, void* address) {
  cuda_simulator::NoteMisaligned(address, mismatch->type->name,
                                 size_t{1} << mismatch->log_alignment, __builtin_return_address(0));
}

void cuda_simulator_init() {}
void cuda_simulator_func_entry(void*) {}
void cuda_simulator_func_exit() {}
void cuda_simulator_vptr_read(void**) {}
void cuda_simulator_vptr_update(void**, void*) {}

}  // extern "C"
