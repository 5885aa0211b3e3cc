#include "harness/conformance/allocations.h"

#include <atomic>
#include <cerrno>
#include <cstddef>

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__) || !defined(__GLIBC__)
#define TFB_COUNTS_ALLOCATIONS 0
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer) || \
    __has_feature(memory_sanitizer)
#define TFB_COUNTS_ALLOCATIONS 0
#endif
#endif
#ifndef TFB_COUNTS_ALLOCATIONS
#define TFB_COUNTS_ALLOCATIONS 1
#endif

namespace {

std::atomic<int64_t> allocations{0};

}  // namespace

#if TFB_COUNTS_ALLOCATIONS

// glibc's own names for what is replaced here. Memory so obtained is freed by its free.
extern "C" {

void* __libc_malloc(size_t size);
void* __libc_calloc(size_t count, size_t size);
void* __libc_realloc(void* memory, size_t size);
void* __libc_memalign(size_t alignment, size_t size);

void* malloc(size_t size) {
  allocations.fetch_add(1, std::memory_order_relaxed);
  return __libc_malloc(size);
}

void* calloc(size_t count, size_t size) {
  allocations.fetch_add(1, std::memory_order_relaxed);
  return __libc_calloc(count, size);
}

void* realloc(void* memory, size_t size) {
  allocations.fetch_add(1, std::memory_order_relaxed);
  return __libc_realloc(memory, size);
}

void* memalign(size_t alignment, size_t size) {
  allocations.fetch_add(1, std::memory_order_relaxed);
  return __libc_memalign(alignment, size);
}

void* aligned_alloc(size_t alignment, size_t size) { return memalign(alignment, size); }

int posix_memalign(void** memory, size_t alignment, size_t size) {
  *memory = memalign(alignment, size);
  return *memory == nullptr ? ENOMEM : 0;
}

}  // extern "C"

#endif

namespace tfb::conformance {

bool CountsAllocations() { return TFB_COUNTS_ALLOCATIONS != 0; }

int64_t Allocations() { return allocations.load(std::memory_order_relaxed); }

}  // namespace tfb::conformance
