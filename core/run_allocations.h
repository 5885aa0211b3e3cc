// Counts what a layer's Run allocates, for tests of inputs and parameters that the conformance
// tests do not have.
#ifndef TFB_CORE_RUN_ALLOCATIONS_H_
#define TFB_CORE_RUN_ALLOCATIONS_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "core/technique.h"

namespace tfb {

// Returns the number of allocations of a Run on the CPU with two threads, after Setup with the same
// inputs; or the error of either.
absl::StatusOr<int64_t> AllocationsOfRun(Layer& layer, const Inputs& inputs);

}  // namespace tfb

#endif  // TFB_CORE_RUN_ALLOCATIONS_H_
