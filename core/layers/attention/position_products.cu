#include "core/cuda/for_each.cuh"
#include "core/cuda/sum_in_runs.cuh"
#include "core/layers/attention/position_products.h"

namespace tfb::layers {

TFB_FOR_EACH_IN_ROWS(PositionProducts);
TFB_FOR_EACH_IN_ROWS(AddDoubleRows);
TFB_SUM_IN_RUNS(SumsOfHeads);

}  // namespace tfb::layers
