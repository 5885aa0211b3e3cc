#include "core/cuda/for_each.cuh"
#include "core/layers/sum_of_rows_functor.h"

namespace tfb {

TFB_FOR_EACH_IN_ROWS(SumOfRows);

}  // namespace tfb
