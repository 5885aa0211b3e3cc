// The gates of transformer layers and their gradients, a thread for a channel.
//
//   shared memory  none
//   registers      31 to 36 of GateGradient, 30 to 34 of ResetGradient, 32 to 36 of GatePass, on sm_80, sm_89 and sm_90a,
//                  without spills
//   rate           Memory limits it: GateGradient of a gru reads four numbers and writes three, 28 B of f32 for some 25
//                  FLOPs, so that an H100 (3.35 TB/s) is expected to do 120 G channels a second, 3 TFLOP/s; it is not
//                  measured.
#include "core/cuda/for_each.cuh"
#include "core/layers/gate_functors.h"

namespace tfb {

TFB_FOR_EACH_IN_ROWS(GatePass);
TFB_FOR_EACH_IN_ROWS(GateGradient);
TFB_FOR_EACH_IN_ROWS(ResetGradient);

}  // namespace tfb
