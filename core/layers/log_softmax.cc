#include "core/layers/log_softmax.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "absl/strings/str_cat.h"
#include "core/cpu/kernels.h"
#include "core/cuda/runtime.h"
#include "core/layers/layers_cuda.h"
#include "core/layers/log_softmax_kernels.h"
#include "core/layers/rows_of.h"
#include "core/status.h"
#include "core/workspace.h"

namespace tfb {
namespace {

constexpr int64_t kRowsOfTask = 16;
constexpr float kNegativeInfinity = -std::numeric_limits<float>::infinity();

struct Scratch {
  float* row;           // [padded]
  float* exponentials;  // [padded]: -inf, and so 0, beyond the last channel
};

Scratch LayOut(int64_t padded, Workspace& workspace) {
  return {workspace.Take<float>(padded), workspace.Take<float>(padded)};
}

// A row's maximum, and the sum of the exponentials, relative to it.
struct RowSum {
  float max = kNegativeInfinity;
  float sum = 0;
};

// Replaces the exponentials by those of the row.
RowSum Exponentiate(int64_t channels, int64_t padded, const Scratch& scratch) {
  RowSum of_row;
  float rescale = 1;
  std::fill_n(std::copy_n(scratch.row, channels, scratch.exponentials), padded - channels,
              kNegativeInfinity);
  BestCpuKernels().softmax({scratch.exponentials, padded, 1, padded},
                           {&of_row.max, &of_row.sum, &rescale}, nullptr);
  return of_row;
}

void NormalizeRow(int64_t channels, int64_t padded, const Scratch& scratch) {
  const RowSum of_row = Exponentiate(channels, padded, scratch);
  const float log_sum = std::log(of_row.sum);
  for (int64_t c = 0; c < channels; ++c) scratch.row[c] = (scratch.row[c] - of_row.max) - log_sum;
}

void LogSoftmaxCpu(const ConstTensorView& x, const TensorView& y, const Execution& execution) {
  const RowsOf<ConstTensorView> x_rows(x);
  const RowsOf<TensorView> y_rows(y);
  const int64_t rows = x_rows.rows(), channels = x_rows.channels();
  const int64_t padded = RoundUp(channels, kColumnQuantum);
  const size_t thread_bytes = LogSoftmaxWorkspaceBytes(Device::kCpu, channels, 1);
  execution.pool->ParallelForRanges(rows, kRowsOfTask, [&](int64_t first, int64_t end, int worker) {
    Workspace workspace(execution.workspace.subspan(worker * thread_bytes, thread_bytes));
    const Scratch scratch = LayOut(padded, workspace);
    for (int64_t r = first; r < end; ++r) {
      x_rows.Load(r, 0, channels, scratch.row);
      NormalizeRow(channels, padded, scratch);
      y_rows.Store(r, 0, channels, scratch.row);
    }
  });
}

void LogSoftmaxBackwardCpu(const ConstTensorView& x, const ConstTensorView& dy,
                           const TensorView& dx, const Execution& execution) {
  const RowsOf<ConstTensorView> x_rows(x), dy_rows(dy);
  const RowsOf<TensorView> dx_rows(dx);
  const int64_t rows = x_rows.rows(), channels = x_rows.channels();
  const int64_t padded = RoundUp(channels, kColumnQuantum);
  const size_t thread_bytes = LogSoftmaxWorkspaceBytes(Device::kCpu, channels, 1);
  execution.pool->ParallelForRanges(rows, kRowsOfTask, [&](int64_t first, int64_t end, int worker) {
    Workspace workspace(execution.workspace.subspan(worker * thread_bytes, thread_bytes));
    const Scratch scratch = LayOut(padded, workspace);
    for (int64_t r = first; r < end; ++r) {
      x_rows.Load(r, 0, channels, scratch.row);
      const float sum = Exponentiate(channels, padded, scratch).sum;
      dy_rows.Load(r, 0, channels, scratch.row);
      double total = 0;
      for (int64_t c = 0; c < channels; ++c) total += scratch.row[c];
      const float factor = static_cast<float>(total / sum);
      for (int64_t c = 0; c < channels; ++c) scratch.row[c] -= scratch.exponentials[c] * factor;
      dx_rows.Store(r, 0, channels, scratch.row);
    }
  });
}

absl::Status LogSoftmaxCuda(Device device, const ConstTensorView& x, const TensorView& y,
                            const Execution& execution) {
  TFB_ASSIGN_OR_RETURN(CudaRuntime * runtime, CudaRuntime::For(device));
  LogSoftmaxArguments arguments = {};
  arguments.x = ToDeviceRows(x);
  arguments.y = ToDeviceRows(y);
  arguments.rows = RowsOf<TensorView>(y).rows();
  arguments.channels = RowsOf<TensorView>(y).channels();
  return ToStatus(
      KernelsOn<LogSoftmaxKernels>(runtime->target()).log_softmax(arguments, execution.stream));
}

absl::Status LogSoftmaxBackwardCuda(Device device, const ConstTensorView& x,
                                    const ConstTensorView& dy, const TensorView& dx,
                                    const Execution& execution) {
  TFB_ASSIGN_OR_RETURN(CudaRuntime * runtime, CudaRuntime::For(device));
  LogSoftmaxGradientArguments arguments = {};
  arguments.x = ToDeviceRows(x);
  arguments.dy = ToDeviceRows(dy);
  arguments.dx = ToDeviceRows(dx);
  arguments.rows = RowsOf<TensorView>(dx).rows();
  arguments.channels = RowsOf<TensorView>(dx).channels();
  return ToStatus(
      KernelsOn<LogSoftmaxKernels>(runtime->target()).differentiate(arguments, execution.stream));
}

}  // namespace

size_t LogSoftmaxWorkspaceBytes(Device device, int64_t channels, int threads) {
  if (device != Device::kCpu) return 0;
  return threads * Workspace::Measure([=](Workspace& workspace) {
           LayOut(RoundUp(channels, kColumnQuantum), workspace);
         });
}

absl::Status LogSoftmax(Device device, const ConstTensorView& x, const TensorView& y,
                        const Execution& execution) {
  if (x.shape() != y.shape() || x.rank < 2 || x.rank > 3) {
    return absl::InternalError(absl::StrCat("log softmax of x ", ShapeString(x.shape()),
                                            " does not give y ", ShapeString(y.shape())));
  }
  if (device != Device::kCpu) return LogSoftmaxCuda(device, x, y, execution);
  LogSoftmaxCpu(x, y, execution);
  return absl::OkStatus();
}

absl::Status LogSoftmaxBackward(Device device, const ConstTensorView& x, const ConstTensorView& dy,
                                const TensorView& dx, const Execution& execution) {
  if (x.shape() != dx.shape() || dy.shape() != dx.shape() || x.rank < 2 || x.rank > 3) {
    return absl::InternalError(absl::StrCat("log softmax of x ", ShapeString(x.shape()), " and dy ",
                                            ShapeString(dy.shape()), " do not give dx ",
                                            ShapeString(dx.shape())));
  }
  if (device != Device::kCpu) return LogSoftmaxBackwardCuda(device, x, dy, dx, execution);
  LogSoftmaxBackwardCpu(x, dy, dx, execution);
  return absl::OkStatus();
}

}  // namespace tfb
