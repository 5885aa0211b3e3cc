// Counts what a test allocates with operator new, by replacing it: for tests that a call allocates
// nothing. A source of its own, so that no caller sees through the replacement.
#ifndef TFB_CORE_ALLOCATIONS_H_
#define TFB_CORE_ALLOCATIONS_H_

#include <cstdint>

namespace tfb {

// Calls of operator new, by all threads, since the process began.
int64_t AllocationCount();

}  // namespace tfb

#endif  // TFB_CORE_ALLOCATIONS_H_
