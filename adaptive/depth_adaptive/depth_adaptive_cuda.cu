#include "adaptive/depth_adaptive/depth_adaptive_cuda.h"
#include "core/cuda/for_each.cuh"
#include "core/layers/layer_rows.cuh"

namespace tfb::depth_adaptive {
namespace {

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
    const float score = SumOfWarp(scores[n]) + a.bias[n];
    if (Lane() == n) a.scores[segment * a.classes + n] = score;
    if (n == 0 || score > largest) {
      best = n;
      largest = score;
    }
  }
  if (Lane() == 0) a.exits[segment] = best + 1;
}

__device__ float Dot(const float* x, const float* y, int64_t channels) {
  float dot = 0;
  for (int64_t c = Lane(); c < channels; c += kWarp) dot += x[c] * y[c];
  return SumOfWarp(dot);
}
// A warp does a row.
__global__ void __launch_bounds__(kRowThreads) Obey(ObeyArguments a) {
  const int64_t row = RowOfWarp(a.list, a.row_count);
  if (row < 0) return;
  bool leaves;
  if (a.weights == nullptr) {
    leaves = a.exits[row / a.count] <= a.layer;
  } else {
    leaves = Dot(a.weights, a.rows + row * a.channels, a.channels) + *a.bias > 0;
  }
  if (Lane() == 0) a.leaves[row] = leaves ? 1 : 0;
}

// A warp does a row.
__global__ void __launch_bounds__(kRowThreads) Geometric(GeometricArguments a) {
  const int64_t row = WarpOfGrid();
  if (row >= a.row_count) return;
  const float z = Dot(a.weights, a.rows + row * a.channels, a.channels) + *a.bias;
  if (Lane() != 0) return;
  float* q = a.q.Row(row);
  float* last = q + (a.classes - 1) * a.q.class_stride;
  const float rest = a.layer == 1 ? 1 : *last;
  q[(a.layer - 1) * a.q.class_stride] = rest / (1 + expf(-z));
  *last = rest / (1 + expf(z));
}

const char* LaunchClassify(const ClassifyArguments& a, void* stream) {
  return LaunchWarps("Classify", &Classify, a.segments, stream, a);
}
const char* LaunchObey(const ObeyArguments& a, void* stream) {
  return LaunchWarps("Obey", &Obey, a.row_count, stream, a);
}
const char* LaunchGeometric(const GeometricArguments& a, void* stream) {
  return LaunchWarps("Geometric", &Geometric, a.row_count, stream, a);
}

}  // namespace

TFB_KERNEL_TABLE(DepthAdaptiveKernels, {&LaunchClassify, &LaunchObey, &LaunchGeometric});
TFB_FOR_EACH(ExitSoftmax);
TFB_FOR_EACH_IN_ROWS(MeansOfSegments);
TFB_FOR_EACH(GeometricGradient);
TFB_FOR_EACH(SoftmaxGradient);

}  // namespace tfb::depth_adaptive
