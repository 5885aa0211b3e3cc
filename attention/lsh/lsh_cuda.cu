#include "attention/lsh/lsh_functors.h"
#include "core/cuda/for_each.cuh"

namespace tfb::lsh {

TFB_FOR_EACH_IN_ROWS(BucketsToSortBy);
TFB_FOR_EACH_IN_ROWS(CodesOfPlaces);

}  // namespace tfb::lsh
