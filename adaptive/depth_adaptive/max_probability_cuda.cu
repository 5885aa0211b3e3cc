#include "adaptive/depth_adaptive/max_probability_cuda.h"
#include "core/layers/layer_rows.cuh"

namespace tfb::depth_adaptive {
namespace {

// A warp does a row; lane l has logits l, l + 32, ...
__global__ void __launch_bounds__(kRowThreads) DecideByMax(MaxProbabilityArguments a) {
  const int64_t row = RowOfWarp(a.list, a.rows);
  if (row < 0) return;
  const float* logits = a.logits + row * a.vocabulary;
  float largest = -INFINITY;
  for (int64_t v = Lane(); v < a.vocabulary; v += kWarp) largest = fmaxf(largest, logits[v]);
  largest = MaxOfWarp(largest);
  float sum = 0;  // becomes NaN where a logit is
  for (int64_t v = Lane(); v < a.vocabulary; v += kWarp) sum += expf(logits[v] - largest);
  sum = SumOfWarp(sum);
  if (Lane() == 0) a.leaves[row] = 1 / sum >= a.threshold ? 1 : 0;
}

const char* LaunchDecide(const MaxProbabilityArguments& a, void* stream) {
  return LaunchWarps("DecideByMax", &DecideByMax, a.rows, stream, a);
}

}  // namespace

TFB_KERNEL_TABLE(MaxProbabilityKernels, {&LaunchDecide});

}  // namespace tfb::depth_adaptive
