// Activations and the product of gradients with their derivatives, a thread for a channel.
//
//   shared memory  none
//   registers      28 to 32 of RowsTimesDerivative, 30 to 32 of ActivatedRows, on sm_80, sm_89 and sm_90a, without spills
//   rate           Memory limits it: in f32 the derivative reads two numbers and writes one, 12 B, so that an H100 (3.35
//                  TB/s) is expected to do 280 G a second, 6 TFLOP/s with the some 20 FLOPs of a gelu; it is not
//                  measured. The division that finds a thread's row takes more instructions than a ReLU.
#include "core/cuda/for_each.cuh"
#include "core/layers/activation_functors.h"
#include "core/layers/listed_rows_functor.h"

namespace tfb {

TFB_FOR_EACH_IN_ROWS(ActivatedRows);
TFB_FOR_EACH_IN_ROWS(RowsTimesDerivative);
TFB_FOR_EACH_IN_ROWS(ListedRows<ActivatedRows>);
TFB_FOR_EACH_IN_ROWS(ListedRows<RowsTimesDerivative>);

}  // namespace tfb
