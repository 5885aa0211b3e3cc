#include "core/cuda/for_each.cuh"
#include "core/layers/tensor_rows.h"

namespace tfb {

TFB_FOR_EACH_IN_ROWS(CopyToRows);
TFB_FOR_EACH_IN_ROWS(AddToRows);

}  // namespace tfb
