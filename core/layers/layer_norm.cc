#include "core/layers/layer_norm.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/cuda/for_each.h"
#include "core/cuda/runtime.h"
#include "core/layers/copy_tensor.h"
#include "core/layers/layer_norm_kernels.h"
#include "core/layers/layers_cuda.h"
#include "core/layers/matmul_gradient_kernels.h"
#include "core/layers/rows_of.h"
#include "core/status.h"
#include "core/workspace.h"

namespace tfb {
namespace {

constexpr int64_t kRowsOfTask = 16;

absl::Status ListedOnCpu() {
  return absl::InternalError("layer norm of listed rows is on CUDA alone");
}

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

// The statistics of a row.
struct Statistics {
  double mean;
  float scale;  // 1 / sqrt(variance + epsilon)
};

Statistics StatisticsOf(double epsilon, int64_t channels, const float* row) {
  const double mean =
      Sum(channels, [=](int64_t c) -> double { return row[c]; }) / static_cast<double>(channels);
  const double variance = Sum(channels,
                              [=](int64_t c) {
                                const double difference = row[c] - mean;
                                return difference * difference;
                              }) /
                          static_cast<double>(channels);
  return {mean, static_cast<float>(1 / std::sqrt(variance + epsilon))};
}

void NormalizeRow(const float* gamma, const float* beta, double epsilon, int64_t channels,
                  float* row) {
  const Statistics of_row = StatisticsOf(epsilon, channels, row);
  for (int64_t c = 0; c < channels; ++c) {
    const float centred = static_cast<float>(row[c] - of_row.mean);
    row[c] = gamma[c] * (centred * of_row.scale) + beta[c];
  }
}

// ---- The backward pass ----

// Groups of consecutive rows: there are at most 64, so that adding up their sums costs little.
struct RowGroups {
  explicit RowGroups(int64_t rows)
      : size(std::max<int64_t>((rows + 63) / 64, kRowsOfTask)), count((rows + size - 1) / size) {}
  // Returns the largest number of groups that up to `rows` rows have.
  static int64_t MostOf(int64_t rows) {
    return std::min<int64_t>((rows + kRowsOfTask - 1) / kRowsOfTask, 64);
  }
  int64_t size;
  int64_t count;
};

struct RowScratch {
  float* x;         // [channels]: x, then the normalised row
  float* gradient;  // [channels]: dy, then dx
};

RowScratch LayOutRow(int64_t channels, Workspace& workspace) {
  return {workspace.Take<float>(channels), workspace.Take<float>(channels)};
}

// On CUDA.
struct DeviceScratch {
  RowStatistics* statistics;  // [rows]
  float* sums;                // [groups][2][channels]
};

DeviceScratch LayOutOnDevice(int64_t rows, int64_t channels, Workspace& workspace) {
  return {workspace.Take<RowStatistics>(rows),
          workspace.Take<float>(RowGroups::MostOf(rows) * 2 * channels)};
}

// Adds a row's part of dgamma and dbeta to sums[channels] and to what follows it, and turns dy into
// dx.
void DifferentiateRow(const float* gamma, double epsilon, int64_t channels,
                      const RowScratch& scratch, float* sums) {
  float *x = scratch.x, *gradient = scratch.gradient;
  const Statistics of_row = StatisticsOf(epsilon, channels, x);
  for (int64_t c = 0; c < channels; ++c) {
    x[c] = static_cast<float>(x[c] - of_row.mean) * of_row.scale;
    sums[c] += gradient[c] * x[c];
    sums[channels + c] += gradient[c];
    gradient[c] *= gamma[c];
  }
  const auto mean = [=](auto term) {
    return static_cast<float>(Sum(channels, term) / static_cast<double>(channels));
  };
  const float of_gradient = mean([=](int64_t c) -> double { return gradient[c]; });
  const float of_product = mean([=](int64_t c) { return double{gradient[c]} * x[c]; });
  for (int64_t c = 0; c < channels; ++c) {
    gradient[c] = of_row.scale * (gradient[c] - of_gradient - x[c] * of_product);
  }
}

// Writes the sum over groups of elements `first` to `first` + count - 1 of [groups][stride], or
// adds it to what the gradient holds.
void AddGroups(const float* sums, int64_t groups, int64_t stride, int64_t first, int64_t count,
               bool accumulate, const TensorView& gradient) {
  constexpr int64_t kPiece = 64;
  const int64_t gap = gradient.stride(0);
  for (int64_t c = first; c < first + count; c += kPiece) {
    const int64_t n = std::min(kPiece, first + count - c);
    float sum[kPiece] = {};
    if (accumulate) LoadRow(gradient, c * gap, gap, n, sum);
    for (int64_t group = 0; group < groups; ++group) {
      for (int64_t i = 0; i < n; ++i) sum[i] += sums[group * stride + c + i];
    }
    StoreRow(sum, n, gradient, c * gap, gap);
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
  if (rows.rows != nullptr) return ListedOnCpu();
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

size_t LayerNorm::backward_workspace_bytes(Device device, int64_t rows, int64_t channels,
                                           int threads) {
  if (device != Device::kCpu) {
    return Workspace::Measure(
        [=](Workspace& workspace) { LayOutOnDevice(rows, channels, workspace); });
  }
  const size_t of_rows =
      Workspace::Measure([=](Workspace& workspace) { LayOutRow(channels, workspace); });
  return threads * of_rows + Workspace::Measure([=](Workspace& workspace) {
           workspace.Take<float>(RowGroups::MostOf(rows) * 2 * channels);
         });
}

absl::Status LayerNorm::Backward(const BackwardCall& call, const Execution& execution) const {
  const Shape shape = call.x.shape(), of_parameters = {gamma_.size()};
  const auto fits = [](const ConstTensorView& view, const Shape& like) {
    return view.empty() || view.shape() == like;
  };
  if (call.x.rank < 2 || shape.back() != gamma_.size() || call.dy.shape() != shape ||
      !fits(call.added, shape) || !fits(call.dx, shape) || !fits(call.gamma, of_parameters) ||
      !fits(call.beta, of_parameters)) {
    return absl::InternalError(absl::StrCat("the gradients of a layer norm of ", gamma_.size(),
                                            " channels do not fit x ", ShapeString(shape),
                                            " and dy ", ShapeString(call.dy.shape())));
  }
  if (device() != Device::kCpu) return BackwardCuda(call, execution);
  if (call.rows.rows != nullptr) return ListedOnCpu();
  BackwardCpu(call, execution);
  return absl::OkStatus();
}

void LayerNorm::BackwardCpu(const BackwardCall& call, const Execution& execution) const {
  const RowsOf<ConstTensorView> x_rows(call.x), dy_rows(call.dy);
  const int64_t rows = x_rows.rows(), channels = gamma_.size();
  const RowGroups groups(rows);
  const size_t thread_bytes =
      Workspace::Measure([=](Workspace& workspace) { LayOutRow(channels, workspace); });
  Workspace rest(execution.workspace.subspan(execution.pool->threads() * thread_bytes));
  float* const sums = rest.Take<float>(groups.count * 2 * channels);
  execution.pool->ParallelFor(groups.count, [&](int64_t group, int worker) {
    Workspace workspace(execution.workspace.subspan(worker * thread_bytes, thread_bytes));
    const RowScratch scratch = LayOutRow(channels, workspace);
    float* const of_group = sums + group * 2 * channels;
    std::fill_n(of_group, 2 * channels, 0.0f);
    for (int64_t r = group * groups.size; r < std::min(rows, (group + 1) * groups.size); ++r) {
      x_rows.Load(r, 0, channels, scratch.x);
      dy_rows.Load(r, 0, channels, scratch.gradient);
      const bool is_zero = std::all_of(scratch.gradient, scratch.gradient + channels,
                                       [](float value) { return value == 0; });
      if (!is_zero) DifferentiateRow(gamma_.data(), epsilon_, channels, scratch, of_group);
      if (call.dx.empty()) continue;
      if (!call.added.empty()) {
        RowsOf<ConstTensorView>(call.added).Load(r, 0, channels, scratch.x);
        for (int64_t c = 0; c < channels; ++c) scratch.gradient[c] += scratch.x[c];
      }
      RowsOf<TensorView>(call.dx).Store(r, 0, channels, scratch.gradient);
    }
  });
  constexpr int64_t kChannelsOfTask = 256;
  execution.pool->ParallelForRanges(
      channels, kChannelsOfTask, [&](int64_t begin, int64_t end, int) {
        const auto add = [&](const float* of, const TensorView& gradient) {
          if (gradient.empty()) return;
          AddGroups(of, groups.count, 2 * channels, begin, end - begin, call.accumulate, gradient);
        };
        add(sums, call.gamma);
        add(sums + channels, call.beta);
      });
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
  arguments.share = 1 / static_cast<double>(arguments.channels);
  arguments.epsilon = epsilon_;
  arguments.list = rows;
  return ToStatus(
      KernelsOn<LayerNormKernels>(runtime->target()).normalize(arguments, execution.stream));
}

absl::Status LayerNorm::BackwardCuda(const BackwardCall& call, const Execution& execution) const {
  TFB_ASSIGN_OR_RETURN(CudaRuntime * runtime, CudaRuntime::For(device()));
  const auto& kernels = KernelsOn<LayerNormKernels>(runtime->target());
  LayerNormGradientArguments a = {};
  a.x = ToDeviceRows(call.x);
  a.dy = ToDeviceRows(call.dy);
  a.added = ToDeviceRows(call.added);
  a.dx = ToDeviceRows(call.dx);
  a.gamma = gamma_.data();
  a.rows = RowsOf<ConstTensorView>(call.x).rows();
  a.channels = gamma_.size();
  a.share = 1 / static_cast<double>(a.channels);
  a.epsilon = epsilon_;
  a.list = call.rows;
  Workspace workspace(execution.workspace);
  const DeviceScratch scratch = LayOutOnDevice(a.rows, a.channels, workspace);
  a.statistics = scratch.statistics;
  TFB_RETURN_IF_ERROR(ToStatus(kernels.measure(a, execution.stream)));
  if (!call.gamma.empty() || !call.beta.empty()) {
    const RowGroups groups(a.rows);
    const SumsOfNorm sums = {TensorRows(call.x).view(),
                             TensorRows(call.dy).view(),
                             a.statistics,
                             scratch.sums,
                             a.rows,
                             groups.size,
                             a.channels,
                             call.rows.is_listed};
    TFB_RETURN_IF_ERROR(ForEachInRows(device(), groups.count, a.channels, sums, execution));
    // dgamma is the one row of a matrix, and dbeta a bias.
    DeviceView gamma = ToDeviceView(call.gamma);
    std::swap(gamma.strides[0], gamma.strides[1]);
    const SumOfChunks sum = {scratch.sums,    groups.count,   1,
                             a.channels,      gamma,          ToDeviceView(call.beta),
                             call.accumulate, /*bias_sign=*/1};
    TFB_RETURN_IF_ERROR(ForEachInRows(device(), 2, a.channels, sum, execution));
  }
  return call.dx.empty() ? absl::OkStatus() : ToStatus(kernels.differentiate(a, execution.stream));
}

}  // namespace tfb
