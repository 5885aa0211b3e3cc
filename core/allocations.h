// Counts the allocations of a process by replacing the C library's entry points, for tests that
// assert that a call allocates nothing. The replacement is a source file of its own, so that the
// compiler cannot inline it into a caller.
#ifndef TFB_CORE_ALLOCATIONS_H_
#define TFB_CORE_ALLOCATIONS_H_

#include <cstdint>

namespace tfb {

// Returns the number of allocations that all threads have made since the process began: those of
// malloc and its variants, and so of operator new and of tensors. Under a sanitizer, which has an
// allocator of its own, only those of operator new are counted. Where tests run on a GPU alone
// (core/tested_devices.h) it counts nothing and returns 0: the driver's threads allocate, too, at any
// time. Calls on the CPU are left to runs elsewhere.
int64_t AllocationCount();

}  // namespace tfb

#endif  // TFB_CORE_ALLOCATIONS_H_
