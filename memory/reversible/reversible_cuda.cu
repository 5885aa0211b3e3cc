#include "core/cuda/for_each.cuh"
#include "memory/reversible/reversible_functors.h"

namespace tfb::reversible {

TFB_FOR_EACH_IN_ROWS(CombinationOfRows);

}  // namespace tfb::reversible
