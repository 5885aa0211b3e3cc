#include "core/cuda/sum_in_runs.cuh"
#include "core/cuda/sum_in_runs_test_terms.h"

namespace tfb::sum_in_runs_test {

TFB_SUM_IN_RUNS(SumAndPlaces);
TFB_SUM_IN_RUNS(AddSums);

}  // namespace tfb::sum_in_runs_test
