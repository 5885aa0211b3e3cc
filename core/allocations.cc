#include "core/allocations.h"

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <new>

#include "core/sanitizers.h"
#include "core/tested_devices.h"

namespace {

std::atomic<int64_t> count{0};

void CountOne() { count.fetch_add(1, std::memory_order_relaxed); }

}  // namespace

#if defined(__GLIBC__) && !TFB_ADDRESS_SANITIZER && !TFB_THREAD_SANITIZER

// These functions have glibc's own names, so that they replace its allocator's entry points.
// glibc's free accepts what they return.
extern "C" {

void* __libc_malloc(size_t size);
void* __libc_calloc(size_t count, size_t size);
void* __libc_realloc(void* memory, size_t size);
void* __libc_memalign(size_t alignment, size_t size);

void* malloc(size_t size) {
  CountOne();
  return __libc_malloc(size);
}
void* calloc(size_t elements, size_t size) {
  CountOne();
  return __libc_calloc(elements, size);
}
void* realloc(void* memory, size_t size) {
  CountOne();
  return __libc_realloc(memory, size);
}
void* memalign(size_t alignment, size_t size) {
  CountOne();
  return __libc_memalign(alignment, size);
}
void* aligned_alloc(size_t alignment, size_t size) { return memalign(alignment, size); }
int posix_memalign(void** memory, size_t alignment, size_t size) {
  *memory = memalign(alignment, size);
  return *memory == nullptr ? ENOMEM : 0;
}

}  // extern "C"

#else

// The forms of operator new that libstdc++'s other forms call, or that call the other forms.
void* operator new(size_t size, const std::nothrow_t&) noexcept {
  CountOne();
  return std::malloc(size == 0 ? 1 : size);
}
void* operator new(size_t size) {
  if (void* memory = operator new(size, std::nothrow)) return memory;
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }

#endif

namespace tfb {

int64_t AllocationCount() {
  static const bool counts = KernelDevice() != Device::kCuda;
  return counts ? count.load(std::memory_order_relaxed) : 0;
}

}  // namespace tfb
