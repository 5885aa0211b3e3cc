// Layer norm (layer_norm.h): a warp has a row, and lane l its channels l, l + 32, ..., which no other
// lane writes. The gradients take three steps, as dx may lie where dy does: the rows' statistics; the
// sums over groups of rows, for which a thread has a channel of a group (SumsOfNorm); and dx.
//
//   shared memory  none
//   registers      48 of MeasureRows, 40 of SumsOfNorm and 80 of DifferentiateRows (64 of sm_89) on sm_80, sm_89 and
//                  sm_90a, without spills
//   rate           Memory limits it: rows that stay in L1 are read three times in f32, x and dy, and dx is written, 28 B
//                  for the some 22 FLOPs of a number. An H100 (3.35 TB/s) is expected to do 120 G numbers a second with
//                  that, 2.6 TFLOP/s; it is not measured. The nine operations in fp64 are within what it, and an sm_89
//                  with a 64th of its fp32 rate, do meanwhile.
#include "core/cuda/for_each.cuh"
#include "core/layers/layer_norm_kernels.h"
#include "core/layers/layer_rows.cuh"

namespace tfb {
namespace {

// Returns the statistics of a row of x, to all lanes.
template <class Arguments>
__device__ RowStatistics StatisticsOfRow(const Arguments& a, int64_t offset) {
  double sum = 0;
  for (int64_t c = Lane(); c < a.channels; c += kWarp) sum += Load(a.x, offset, c);
  const double mean = SumOfWarp(sum) * a.share;
  double squares = 0;
  for (int64_t c = Lane(); c < a.channels; c += kWarp) {
    const double difference = Load(a.x, offset, c) - mean;
    squares += difference * difference;
  }
  const double variance = SumOfWarp(squares) * a.share;
  return {mean, static_cast<float>(1 / sqrt(variance + a.epsilon))};
}

__device__ float Normalized(const RowStatistics& of_row, float x) {
  return static_cast<float>(x - of_row.mean) * static_cast<float>(of_row.scale);
}

__global__ void __launch_bounds__(kRowThreads) NormalizeRows(LayerNormArguments a) {
  const int64_t row = RowOfWarp(a.list, a.rows);
  if (row < 0) return;
  const int64_t x_offset = RowOffset(a.x, row), y_offset = RowOffset(a.y, row);
  const RowStatistics of_row = StatisticsOfRow(a, x_offset);
  for (int64_t c = Lane(); c < a.channels; c += kWarp) {
    Store(a.y, y_offset, c, a.gamma[c] * Normalized(of_row, Load(a.x, x_offset, c)) + a.beta[c]);
  }
}

const char* LaunchNormalize(const LayerNormArguments& a, void* stream) {
  return LaunchWarps("NormalizeRows", &NormalizeRows, a.rows, stream, a);
}

__global__ void __launch_bounds__(kRowThreads) MeasureRows(LayerNormGradientArguments a) {
  const int64_t row = RowOfWarp(a.list, a.rows);
  if (row < 0) return;
  const int64_t dy_offset = RowOffset(a.dy, row);
  bool any = false;
  for (int64_t c = Lane(); c < a.channels; c += kWarp) any = any || Load(a.dy, dy_offset, c) != 0;
  RowStatistics of_row = {0, -1};
  if (__any_sync(kAllLanes, any)) of_row = StatisticsOfRow(a, RowOffset(a.x, row));
  if (Lane() == 0) a.statistics[row] = of_row;
}

const char* LaunchMeasure(const LayerNormGradientArguments& a, void* stream) {
  return LaunchWarps("MeasureRows", &MeasureRows, a.rows, stream, a);
}

__global__ void __launch_bounds__(kRowThreads) DifferentiateRows(LayerNormGradientArguments a) {
  const int64_t row = RowOfWarp(a.list, a.rows);
  if (row < 0) return;
  const RowIndices at = IndicesOf(a.x, row);
  const int64_t x_offset = RowOffset(a.x, at), dy_offset = RowOffset(a.dy, at);
  const int64_t dx_offset = RowOffset(a.dx, at), added_offset = RowOffset(a.added, at);
  const RowStatistics of_row = a.statistics[row];
  const bool is_zero = of_row.scale < 0;
  double sum = 0, product = 0;
#pragma unroll 2
  for (int64_t c = Lane(); c < a.channels && !is_zero; c += kWarp) {
    const float g = a.gamma[c] * Load(a.dy, dy_offset, c);
    sum += g;
    product += double{g} * Normalized(of_row, Load(a.x, x_offset, c));
  }
  const float of_gradient = static_cast<float>(SumOfWarp(sum) * a.share);
  const float of_product = static_cast<float>(SumOfWarp(product) * a.share);
#pragma unroll 2
  for (int64_t c = Lane(); c < a.channels; c += kWarp) {
    float dx = 0;
    if (!is_zero) {
      const float g = a.gamma[c] * Load(a.dy, dy_offset, c);
      const float h = Normalized(of_row, Load(a.x, x_offset, c));
      dx = static_cast<float>(of_row.scale) * (g - of_gradient - h * of_product);
    }
    if (a.added.data != nullptr) dx += Load(a.added, added_offset, c);
    Store(a.dx, dx_offset, c, dx);
  }
}

const char* LaunchDifferentiate(const LayerNormGradientArguments& a, void* stream) {
  return LaunchWarps("DifferentiateRows", &DifferentiateRows, a.rows, stream, a);
}

}  // namespace

TFB_KERNEL_TABLE(LayerNormKernels, {&LaunchNormalize, &LaunchMeasure, &LaunchDifferentiate});
TFB_FOR_EACH_IN_ROWS(SumsOfNorm);

}  // namespace tfb
