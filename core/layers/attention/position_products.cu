#include "core/cuda/for_each.cuh"
#include "core/layers/attention/position_products.h"

namespace tfb::layers {

TFB_FOR_EACH_IN_ROWS(PositionProducts);

}  // namespace tfb::layers
