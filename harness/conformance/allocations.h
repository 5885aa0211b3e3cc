// Counts the process's heap allocations, of every thread and by every route, by standing before the
// C library's functions. Linking this library installs it.
#ifndef TFB_HARNESS_CONFORMANCE_ALLOCATIONS_H_
#define TFB_HARNESS_CONFORMANCE_ALLOCATIONS_H_

#include <cstdint>

namespace tfb::conformance {

// Whether allocations are counted. Not with sanitizers, which bring an allocator of their own.
bool CountsAllocations();

// Since the program began: malloc, calloc, realloc, aligned allocations, and so operator new.
int64_t Allocations();

}  // namespace tfb::conformance

#endif  // TFB_HARNESS_CONFORMANCE_ALLOCATIONS_H_
