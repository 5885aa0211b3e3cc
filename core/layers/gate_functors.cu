#include "core/cuda/for_each.cuh"
#include "core/layers/gate_functors.h"

namespace tfb {

TFB_FOR_EACH_IN_ROWS(GatePass);
TFB_FOR_EACH_IN_ROWS(GateGradient);
TFB_FOR_EACH_IN_ROWS(ResetGradient);

}  // namespace tfb
