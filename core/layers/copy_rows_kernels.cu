#include "core/cuda/for_each.cuh"
#include "core/layers/copy_rows_functor.h"

namespace tfb {

TFB_FOR_EACH_IN_ROWS(CopyOfRows);

}  // namespace tfb
