#include "core/cuda/for_each.cuh"
#include "core/cuda/for_each_test_functors.h"

namespace tfb::for_each_test {

TFB_FOR_EACH(CountElements);
TFB_FOR_EACH_IN_ROWS(CountColumns);
TFB_FOR_EACH_IN_ROWS(DoubleRows);

}  // namespace tfb::for_each_test
