#include "core/cuda/for_each.cuh"
#include "core/layers/activation_functors.h"

namespace tfb {

TFB_FOR_EACH_IN_ROWS(ActivatedRows);
TFB_FOR_EACH_IN_ROWS(RowsTimesDerivative);

}  // namespace tfb
