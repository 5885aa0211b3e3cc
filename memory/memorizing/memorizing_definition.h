// The definition of memorizing.h in float64. Plain loops in the order of the formulas.
#ifndef TFB_MEMORY_MEMORIZING_MEMORIZING_DEFINITION_H_
#define TFB_MEMORY_MEMORIZING_MEMORIZING_DEFINITION_H_

#include "core/layers/stack/stack_sizes.h"
#include "core/problem.h"
#include "core/tensor.h"
#include "memory/memorizing/memorizing.h"

namespace tfb::memorizing {

// Returns out, context, memories, and, where there is a store, retrieved, store_keys and
// store_values. The parameters have been checked. Reads x and what is given of the inputs, and
// `computed` and `pool` of the request.
NamedTensors DefineMemorizing(const Problem& problem, const MemorizingOptions& options,
                              const layers::StackSizes& sizes, const NamedTensors& parameters,
                              const Inputs& inputs, const DefinitionRequest& request);

}  // namespace tfb::memorizing

#endif  // TFB_MEMORY_MEMORIZING_MEMORIZING_DEFINITION_H_
