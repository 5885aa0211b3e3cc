#include "core/cuda/for_each.cuh"
#include "core/cuda/sum_in_runs.cuh"
#include "core/layers/exits/exit_classifiers_functors.h"

namespace tfb::layers {

TFB_FOR_EACH(ClassifierLogits);
TFB_SUM_IN_RUNS(ClassifierWeightGradient);
TFB_SUM_IN_RUNS(ClassifierBiasGradient);
TFB_FOR_EACH_IN_ROWS(ClassifierStateGradient);

}  // namespace tfb::layers
