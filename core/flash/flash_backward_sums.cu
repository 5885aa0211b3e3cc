#include "core/cuda/for_each.cuh"
#include "core/flash/flash_backward_sums.h"

namespace tfb {

TFB_FOR_EACH(AddSumOfTiles);
TFB_FOR_EACH(AddLabelSums);
TFB_FOR_EACH(AddTableSums);
TFB_FOR_EACH(AddRelativeKeySums);
TFB_FOR_EACH(AddPositionBiasSums);
TFB_FOR_EACH(AddByToken);

}  // namespace tfb
