// Counts what a test allocates, by standing before the C library's allocator: for tests that a call
// allocates nothing. A source of its own, so that no caller sees through the replacement.
#ifndef TFB_CORE_ALLOCATIONS_H_
#define TFB_CORE_ALLOCATIONS_H_

#include <cstdint>

namespace tfb {

// Allocations by all threads since the process began: malloc and its kin, and so operator new and
// tensors. With a sanitizer, which has an allocator of its own, only those of operator new.
int64_t AllocationCount();

}  // namespace tfb

#endif  // TFB_CORE_ALLOCATIONS_H_
