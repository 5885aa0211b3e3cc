#include "adaptive/depth_adaptive/depth_adaptive_cuda.h"
#include "core/layers/layer_rows.cuh"

namespace tfb::depth_adaptive {
namespace {

__device__ float WarpSum(float x) {
  for (int step = kWarp / 2; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}

// A warp does a mean; lane l has its channels l, l + 32, ...
__global__ void __launch_bounds__(kRowThreads) Classify(ClassifyArguments a) {
  const int64_t segment = WarpOfGrid();
  if (segment >= a.segments) return;
  const float* rows = a.rows + segment * a.count * a.channels;
  float scores[kMaxExits] = {};
  for (int64_t c = Lane(); c < a.channels; c += kWarp) {
    float sum = 0;
    for (int64_t r = 0; r < a.count; ++r) sum += rows[r * a.channels + c];
    const float mean = sum / static_cast<float>(a.count);
    for (int64_t n = 0; n < a.classes; ++n) scores[n] += a.weights[n * a.channels + c] * mean;
  }
  int best = 0;
  float largest = 0;
  for (int n = 0; n < a.classes; ++n) {
    const float score = WarpSum(scores[n]) + a.bias[n];
    if (n == 0 || score > largest) {
      best = n;
      largest = score;
    }
  }
  if (Lane() == 0) a.exits[segment] = best + 1;
}

// A warp does a row.
__global__ void __launch_bounds__(kRowThreads) Obey(ObeyArguments a) {
  const int64_t row = RowOfWarp(a.list, a.row_count);
  if (row < 0) return;
  bool leaves;
  if (a.weights == nullptr) {
    leaves = a.exits[row / a.count] <= a.layer;
  } else {
    float dot = 0;
    for (int64_t c = Lane(); c < a.channels; c += kWarp) {
      dot += a.weights[c] * a.rows[row * a.channels + c];
    }
    leaves = WarpSum(dot) + *a.bias > 0;
  }
  if (Lane() == 0) a.leaves[row] = leaves ? 1 : 0;
}

const char* LaunchClassify(const ClassifyArguments& a, void* stream) {
  return LaunchWarps("Classify", &Classify, a.segments, stream, a);
}
const char* LaunchObey(const ObeyArguments& a, void* stream) {
  return LaunchWarps("Obey", &Obey, a.row_count, stream, a);
}

}  // namespace

TFB_KERNEL_TABLE(DepthAdaptiveKernels, {&LaunchClassify, &LaunchObey});

}  // namespace tfb::depth_adaptive
