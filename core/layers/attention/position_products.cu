#include "core/cuda/for_each.cuh"
#include "core/layers/attention/position_products.h"

namespace tfb::layers {

TFB_FOR_EACH_IN_ROWS(PositionProducts);
TFB_FOR_EACH_IN_ROWS(AddDoubleRows);
TFB_FOR_EACH(SumsOfHeads);

}  // namespace tfb::layers
