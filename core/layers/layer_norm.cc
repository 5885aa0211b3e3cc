#include "core/layers/layer_norm.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "core/cuda/runtime.h"
#include "core/layers/layers_cuda.h"
#include "core/layers/rows_of.h"
#include "core/status.h"
#include "core/workspace.h"

namespace tfb {
namespace {

constexpr int64_t kRowsOfTask = 16;

// Adds eight sums side by side, which is one vector of doubles and hides the latency of the
// addition.
template <class Term>
double Sum(int64_t count, Term term) {
  constexpr int kLanes = 8;
  double part[kLanes] = {};
  int64_t c = 0;
  for (; c + kLanes <= count; c += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) part[lane] += term(c + lane);
  }
  for (; c < count; ++c) part[0] += term(c);
  return ((part[0] + part[4]) + (part[1] + part[5])) + ((part[2] + part[6]) + (part[3] + part[7]));
}

void NormalizeRow(const float* gamma, const float* beta, double epsilon, int64_t channels,
                  float* row) {
  const double mean =
      Sum(channels, [=](int64_t c) -> double { return row[c]; }) / static_cast<double>(channels);
  const double variance = Sum(channels,
                              [=](int64_t c) {
                                const double difference = row[c] - mean;
                                return difference * difference;
                              }) /
                          static_cast<double>(channels);
  const float scale = static_cast<float>(1 / std::sqrt(variance + epsilon));
  for (int64_t c = 0; c < channels; ++c) {
    const float centred = static_cast<float>(row[c] - mean);
    row[c] = gamma[c] * (centred * scale) + beta[c];
  }
}

}  // namespace

absl::StatusOr<LayerNorm> LayerNorm::Create(Device device, const ConstTensorView& gamma,
                                            const ConstTensorView& beta, double epsilon) {
  LayerNorm norm;
  TFB_ASSIGN_OR_RETURN(norm.gamma_, CopyFloats(device, gamma));
  TFB_ASSIGN_OR_RETURN(norm.beta_, CopyFloats(device, beta));
  norm.epsilon_ = epsilon;
  return norm;
}

size_t LayerNorm::workspace_bytes(Device device, int64_t channels, int threads) {
  if (device != Device::kCpu) return 0;
  return threads *
         Workspace::Measure([=](Workspace& workspace) { workspace.Take<float>(channels); });
}

absl::Status LayerNorm::Run(const ConstTensorView& x, const TensorView& y,
                            const Execution& execution, const RowList& rows) const {
  const bool channels_fit = x.rank >= 2 && x.dim(x.rank - 1) == gamma_.size();
  if (x.shape() != y.shape() || !channels_fit) {
    return absl::InternalError(absl::StrCat("layer norm of ", gamma_.size(), " channels of x ",
                                            ShapeString(x.shape()), " does not give y ",
                                            ShapeString(y.shape())));
  }
  if (device() != Device::kCpu) return RunCuda(x, y, execution, rows);
  if (rows.rows != nullptr)
    return absl::InternalError("layer norm of listed rows is on CUDA alone");
  return RunCpu(x, y, execution);
}

absl::Status LayerNorm::RunCpu(const ConstTensorView& x, const TensorView& y,
                               const Execution& execution) const {
  const RowsOf<ConstTensorView> x_rows(x);
  const RowsOf<TensorView> y_rows(y);
  const int64_t rows = x_rows.rows(), channels = x_rows.channels();
  const size_t thread_bytes = workspace_bytes(Device::kCpu, channels, 1);
  execution.pool->ParallelForRanges(rows, kRowsOfTask, [&](int64_t first, int64_t end, int worker) {
    Workspace workspace(execution.workspace.subspan(worker * thread_bytes, thread_bytes));
    float* row = workspace.Take<float>(channels);
    for (int64_t r = first; r < end; ++r) {
      x_rows.Load(r, 0, channels, row);
      NormalizeRow(gamma_.data(), beta_.data(), epsilon_, channels, row);
      y_rows.Store(r, 0, channels, row);
    }
  });
  return absl::OkStatus();
}

absl::Status LayerNorm::RunCuda(const ConstTensorView& x, const TensorView& y,
                                const Execution& execution, const RowList& rows) const {
  TFB_ASSIGN_OR_RETURN(CudaRuntime * runtime, CudaRuntime::For(device()));
  LayerNormArguments arguments = {};
  arguments.x = ToDeviceRows(x);
  arguments.gamma = gamma_.data();
  arguments.beta = beta_.data();
  arguments.y = ToDeviceRows(y);
  arguments.rows = RowsOf<ConstTensorView>(x).rows();
  arguments.channels = RowsOf<ConstTensorView>(x).channels();
  arguments.epsilon = epsilon_;
  arguments.list = rows;
  return ToStatus(
      KernelsOn<LayerKernels>(runtime->target()).layer_norm(arguments, execution.stream));
}

}  // namespace tfb
