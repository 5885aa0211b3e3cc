#include "core/cuda/for_each.cuh"
#include "core/flash/gradient_functors.h"

namespace tfb {

TFB_FOR_EACH_IN_ROWS(WriteSums);
TFB_FOR_EACH_IN_ROWS(AddMappedSums);
TFB_FOR_EACH_IN_ROWS(AddPartialSums);

}  // namespace tfb
