#include "core/layers/layer_rows.cuh"
#include "core/layers/log_softmax_kernels.h"

namespace tfb {
namespace {

// A warp has a row: lane l has its channels l, l + 32, ..., which no other lane reads or writes.

__global__ void __launch_bounds__(kRowThreads) LogSoftmaxRows(LogSoftmaxArguments a) {
  const int64_t row = WarpOfGrid();
  if (row >= a.rows) return;
  const int64_t x = RowOffset(a.x, row), y = RowOffset(a.y, row);
  float max = -INFINITY;
  for (int64_t c = Lane(); c < a.channels; c += kWarp) max = fmaxf(max, Load(a.x, x, c));
  max = MaxOfWarp(max);  // the maximum ignores NaN; the sum does not
  float sum = 0;
  for (int64_t c = Lane(); c < a.channels; c += kWarp) sum += expf(Load(a.x, x, c) - max);
  const float log_sum = logf(SumOfWarp(sum));
  for (int64_t c = Lane(); c < a.channels; c += kWarp) {
    Store(a.y, y, c, (Load(a.x, x, c) - max) - log_sum);
  }
}

const char* LaunchLogSoftmax(const LogSoftmaxArguments& a, void* stream) {
  return LaunchWarps("LogSoftmaxRows", &LogSoftmaxRows, a.rows, stream, a);
}

}  // namespace

TFB_KERNEL_TABLE(LogSoftmaxKernels, {&LaunchLogSoftmax});

}  // namespace tfb
