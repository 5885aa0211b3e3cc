#include "core/cuda/for_each.cuh"
#include "core/cuda/warp.cuh"
#include "harness/testing/tiny_functors.h"
#include "harness/testing/tiny_kernels.h"

namespace tfb {
namespace {

// A warp does a row.
__global__ void SumInAnyOrder(const TinySumsInAnyOrder sums) {
  const int64_t row = blockIdx.x;
  float own = 0;
  for (int64_t j = Lane(); j < sums.keys; j += kWarp) {
    const float weight = sums.weights[row * sums.keys + j];
    if (!(weight < 0)) own += weight;
  }
  __shared__ float sum;
  if (Lane() == 0) sum = 0;
  __syncwarp();
  atomicAdd(&sum, own);
  __syncwarp();
  if (Lane() != 0) return;
  if (sums.kept != nullptr && sum > 0) sums.kept[row] += logf(sum * sums.factors[row]);
  sums.factors[row] = sum > 0 ? 1 / sum : 0;
}

const char* LaunchSumInAnyOrder(const TinySumsInAnyOrder& sums, void* stream) {
  return Launch("SumInAnyOrder", &SumInAnyOrder, {sums.rows, kWarp}, stream, sums);
}

__global__ void VisitHeads() {}

const char* LaunchVisitHeads(int64_t batch, int64_t heads, void* stream) {
  const dim3 grid(1, static_cast<unsigned>(batch), static_cast<unsigned>(heads));
  return Launch("VisitHeads", &VisitHeads, {grid, dim3(kWarp)}, stream);
}

}  // namespace

TFB_KERNEL_TABLE(TinyKernels, {&LaunchSumInAnyOrder, &LaunchVisitHeads});

TFB_FOR_EACH_IN_ROWS(TinyScores);
TFB_FOR_EACH_IN_ROWS(TinySums);
TFB_FOR_EACH_IN_ROWS(TinyMeans);
TFB_FOR_EACH_IN_ROWS(TinyCopy);
TFB_FOR_EACH_IN_ROWS(TinyWeightGradients);
TFB_FOR_EACH_IN_ROWS(TinyScoreGradients);
TFB_FOR_EACH_IN_ROWS(TinyQueryGradients);
TFB_FOR_EACH_IN_ROWS(TinyKeyGradients);
TFB_FOR_EACH_IN_ROWS(TinyGainGradients);
TFB_FOR_EACH_IN_ROWS(TinyMisplacedWrites);

}  // namespace tfb
