// The logarithm of the softmax of rows, and its gradient dx = dy - exp(y) sum dy.
//
//   shared memory  none
//   registers      64 of the gradient and 40 of log-softmax (32 of sm_90a) on sm_80, sm_89 and sm_90a, without spills
//   rate           Memory limits it: the gradient reads x and dy and writes dx, 12 B of f32 a number, and reads x twice
//                  more and dy once more from L1 or L2, for some 11 FLOPs. An H100 (3.35 TB/s) is expected to do 280 G
//                  numbers a second with that, 3 TFLOP/s, where rows are at least as many as the 4,224 warps that its
//                  multiprocessors hold; it is not measured.
#include "core/layers/layer_rows.cuh"
#include "core/layers/log_softmax_kernels.h"

namespace tfb {
namespace {

// A warp has a row: lane l has its channels l, l + 32, ..., which no other lane reads or writes.

// Returns a row's maximum and the sum of its exponentials relative to it, to all lanes.
struct RowSum {
  float max;
  float sum;
};
__device__ RowSum SumOfRow(const DeviceRows& x, int64_t offset, int64_t channels) {
  float max = -INFINITY;
  for (int64_t c = Lane(); c < channels; c += kWarp) max = fmaxf(max, Load(x, offset, c));
  max = MaxOfWarp(max);  // the maximum ignores NaN; the sum does not
  float sum = 0;
  for (int64_t c = Lane(); c < channels; c += kWarp) sum += expf(Load(x, offset, c) - max);
  return {max, SumOfWarp(sum)};
}

__global__ void __launch_bounds__(kRowThreads) LogSoftmaxRows(LogSoftmaxArguments a) {
  const int64_t row = WarpOfGrid();
  if (row >= a.rows) return;
  const int64_t x = RowOffset(a.x, row), y = RowOffset(a.y, row);
  const RowSum of_row = SumOfRow(a.x, x, a.channels);
  const float log_sum = logf(of_row.sum);
  for (int64_t c = Lane(); c < a.channels; c += kWarp) {
    Store(a.y, y, c, (Load(a.x, x, c) - of_row.max) - log_sum);
  }
}

const char* LaunchLogSoftmax(const LogSoftmaxArguments& a, void* stream) {
  return LaunchWarps("LogSoftmaxRows", &LogSoftmaxRows, a.rows, stream, a);
}

__global__ void __launch_bounds__(kRowThreads)
    DifferentiateLogSoftmax(LogSoftmaxGradientArguments a) {
  const int64_t row = WarpOfGrid();
  if (row >= a.rows) return;
  const RowIndices at = IndicesOf(a.x, row);
  const int64_t x = RowOffset(a.x, at), dy = RowOffset(a.dy, at), dx = RowOffset(a.dx, at);
  const RowSum of_row = SumOfRow(a.x, x, a.channels);
  double total = 0;
  for (int64_t c = Lane(); c < a.channels; c += kWarp) total += Load(a.dy, dy, c);
  const float factor = static_cast<float>(SumOfWarp(total)) / of_row.sum;
  for (int64_t c = Lane(); c < a.channels; c += kWarp) {
    const float exponential = expf(Load(a.x, x, c) - of_row.max);
    Store(a.dx, dx, c, Load(a.dy, dy, c) - exponential * factor);
  }
}

const char* LaunchGradient(const LogSoftmaxGradientArguments& a, void* stream) {
  return LaunchWarps("DifferentiateLogSoftmax", &DifferentiateLogSoftmax, a.rows, stream, a);
}

}  // namespace

TFB_KERNEL_TABLE(LogSoftmaxKernels, {&LaunchLogSoftmax, &LaunchGradient});

}  // namespace tfb
