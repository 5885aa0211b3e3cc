#include "core/cuda/for_each.cuh"
#include "core/retrieval/retrieval_functors.h"

namespace tfb {

TFB_FOR_EACH_IN_ROWS(CopyOfNeighbours);

}  // namespace tfb
