#include "core/layers/attention/relative_positions.h"

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <utility>

#include "Eigen/Core"
#include "core/cpu/kernels.h"
#include "core/cuda/for_each.h"
#include "core/flash/rows.h"
#include "core/layers/attention/position_products.h"
#include "core/layers/copy_tensor.h"
#include "core/layers/matmul.h"
#include "core/layers/sinusoid.h"
#include "core/status.h"
#include "core/technique.h"

namespace tfb::layers {
namespace {

// Multiplies `sinusoids` by W_r in float64, rounded to a 16-bit dtype once. The rounding of a number must not
// depend on the order of a sum: neighbouring numbers of 16 bits differ too much.
absl::StatusOr<Tensor> ProjectAndRound(const ConstTensorView& sinusoids, const ConstTensorView& w_r,
                                       DType dtype) {
  using Matrix = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  const auto matrix = [](const ConstTensorView& view) {
    Matrix copy(view.dim(0), view.dim(1));
    CopyElements(view, TensorView(copy.data(), DType::kF64, view.shape()));
    return copy;
  };
  const Matrix product = matrix(sinusoids) * matrix(w_r);
  const Shape shape = {product.rows(), product.cols()};
  TFB_ASSIGN_OR_RETURN(Tensor rounded, Tensor::Allocate(dtype, shape));
  CopyElements(ConstTensorView(product.data(), DType::kF64, shape), rounded.view());
  return rounded;
}

}  // namespace

int64_t DistanceRange::Clamped(int64_t distance) const {
  return clamp == 0 ? distance : std::clamp(distance, -clamp, clamp);
}

Tensor SinusoidsOf(const DistanceRange& range, int64_t channels) {
  const int64_t first = range.Clamped(range.first), last = range.Clamped(range.last);
  Tensor table(DType::kF32, {range.rows(), channels});
  if (range.rows() == 0) return table;
  const Tensor magnitudes =
      RelativeSinusoids(std::max(std::abs(first), std::abs(last)) + 1, channels);
  const int64_t sines = (channels + 1) / 2;
  for (int64_t d = first; d <= last; ++d) {
    const float* from = magnitudes.view().At<float>(std::abs(d));
    float* to = table.view().MutableAt<float>(d - first);
    for (int64_t c = 0; c < channels; ++c) to[c] = d < 0 && c < sines ? -from[c] : from[c];
  }
  return table;
}

absl::StatusOr<Tensor> ProjectSinusoids(const ConstTensorView& sinusoids,
                                        const ConstTensorView& w_r, ThreadPool* pool) {
  TFB_ASSIGN_OR_RETURN(const PackedMatrix matrix, PackedMatrix::Create(Device::kCpu, w_r));
  TFB_ASSIGN_OR_RETURN(Tensor projected,
                       Tensor::Allocate(DType::kF32, Shape{sinusoids.dim(0), matrix.out()}));
  const size_t bytes = MatMulWorkspaceBytes(Device::kCpu, sinusoids.dim(0), matrix.in(),
                                            matrix.out(), pool->threads());
  Tensor scratch(DType::kU8, {static_cast<int64_t>(bytes)});
  Execution execution;
  execution.pool = pool;
  execution.workspace = absl::MakeSpan(static_cast<std::byte*>(scratch.raw()), bytes);
  TFB_RETURN_IF_ERROR(MatMul(matrix, {sinusoids, {}, projected.view()}, execution));
  return projected;
}

absl::StatusOr<RelativePositions> RelativePositions::Create(const Parameters& parameters,
                                                            const DistanceRange& range,
                                                            const ConstTensorView& sinusoids,
                                                            int64_t here, DType dtype,
                                                            ThreadPool* pool) {
  if (range.rows() == 0) return FromTable({}, parameters.u, parameters.v, range, here);
  TFB_ASSIGN_OR_RETURN(const Tensor projected,
                       dtype == DType::kF32 ? ProjectSinusoids(sinusoids, parameters.w_r, pool)
                                            : ProjectAndRound(sinusoids, parameters.w_r, dtype));
  return FromTable(projected.view(), parameters.u, parameters.v, range, here);
}

RelativePositions RelativePositions::FromTable(const ConstTensorView& table,
                                               const ConstTensorView& u, const ConstTensorView& v,
                                               const DistanceRange& range, int64_t here) {
  RelativePositions positions;
  positions.u_ = u.At<float>(0);
  positions.v_ = v.At<float>(0);
  if (range.rows() == 0) return positions;
  const ConstTensorView by_head = Transpose(SplitAxis(table, 1, u.dim(0)), 0, 1);
  positions.distances_ =
      std::make_unique<RelativeKeys>(by_head, here - range.last, here - range.first,
                                     [&](int64_t offset) { return range.Row(here - offset); });
  return positions;
}

void RelativePositions::AddTo(ScoreRule* rule) const {
  rule->content_bias = u_;
  rule->position_bias = v_;
  rule->relative_keys = distances_.get();
}

void RelativePositionGradients::LayOut(const Problem& problem, const DistanceRange& range,
                                       int64_t channels, Workspace* workspace) {
  range_ = range;
  heads_ = problem.query_heads;
  head_dim_ = problem.head_dim;
  channels_ = channels;
  keys_.LayOut(problem, nullptr, workspace);
  u_ = workspace->Take<float>(heads_ * head_dim_);
  v_ = workspace->Take<float>(heads_ * head_dim_);
  const int64_t row = RoundUp(heads_ * head_dim_, kColumnQuantum);
  by_distance_ = workspace->Take<float>(range.rows() * row);
  product_ = workspace->Take<float>(channels * row);
}

void RelativePositionGradients::Bind(ScoreGradients* gradients) const {
  gradients->content_bias = u_;
  gradients->position_bias = v_;
  gradients->relative_keys = keys_.data();
}

void RelativePositionGradients::AddTo(const RelativePositions::Parameters& parameters,
                                      const RelativePositions& positions,
                                      const ConstTensorView& sinusoids, int64_t here,
                                      const ParameterGradients& gradients, ThreadPool* pool) const {
  const int64_t width = heads_ * head_dim_;
  const auto add = [=](const float* from, double* to) {
    for (int64_t n = 0; to != nullptr && n < width; ++n) to[n] += from[n];
  };
  add(u_, gradients.Of(parameters.u.data));
  add(v_, gradients.Of(parameters.v.data));
  const RelativeKeys* keys = positions.distances();
  double* of_matrix = gradients.Of(parameters.w_r.data);
  if (keys == nullptr || of_matrix == nullptr) return;
  SumByDistance(*keys, here, pool);
  Multiply(sinusoids, pool, [&](int64_t c, const float* row) { add(row, of_matrix + c * width); });
}

void RelativePositionGradients::AddTo(const RelativePositions& positions,
                                      const ConstTensorView& sinusoids, int64_t here,
                                      const Destinations& gradients, ThreadPool* pool) const {
  const auto add_row = [](const float* from, int64_t count, float* to, int64_t stride) {
    for (int64_t n = 0; n < count; ++n) to[n * stride] += from[n];
  };
  // Adds a row of all heads to a part [heads, head_dim] of a gradient.
  const auto add = [&](const float* from, const TensorView& to, int axis, int64_t offset) {
    for (int64_t h = 0; h < heads_; ++h) {
      add_row(from + h * head_dim_, head_dim_, to.MutableAt<float>() + offset + h * to.stride(axis),
              to.stride(axis + 1));
    }
  };
  if (!gradients.u.empty()) add(u_, gradients.u, 0, 0);
  if (!gradients.v.empty()) add(v_, gradients.v, 0, 0);
  const RelativeKeys* keys = positions.distances();
  if (keys == nullptr || (gradients.w_r.empty() && gradients.table.empty())) return;
  SumByDistance(*keys, here, pool);
  const int64_t width = heads_ * head_dim_, row = RoundUp(width, kColumnQuantum);
  for (int64_t d = 0; !gradients.table.empty() && d < range_.rows(); ++d) {
    add(by_distance_ + d * row, gradients.table, 1, gradients.table.Offset(d));
  }
  if (gradients.w_r.empty()) return;
  Multiply(sinusoids, pool, [&](int64_t c, const float* of_channel) {
    add_row(of_channel, width, gradients.w_r.MutableAt<float>(c), gradients.w_r.stride(1));
  });
}

void RelativePositionGradients::SumByDistance(const RelativeKeys& keys, int64_t here,
                                              ThreadPool* pool) const {
  const int64_t row = RoundUp(heads_ * head_dim_, kColumnQuantum);
  pool->ParallelFor(heads_, [&](int64_t h, int) {
    for (int64_t offset = keys.low(); offset <= keys.high(); ++offset) {
      const float* from = keys_.Of(keys, h, offset);
      float* to = by_distance_ + range_.Row(here - offset) * row + h * head_dim_;
      for (int64_t c = 0; c < head_dim_; ++c) to[c] += from[c];
    }
  });
}

void RelativePositionGradients::Multiply(
    const ConstTensorView& sinusoids, ThreadPool* pool,
    absl::FunctionRef<void(int64_t c, const float* row)> visit) const {
  constexpr int64_t kColumns = 64, kDistances = 64;  // of T, copied to where they stay in L1
  constexpr int64_t kChannels = 96;                  // of a task, which reads its columns of T once
  const int64_t row = RoundUp(heads_ * head_dim_, kColumnQuantum);
  const int64_t panels = (row + kColumns - 1) / kColumns;
  const int64_t blocks = (channels_ + kChannels - 1) / kChannels;
  const CpuKernels& kernels = BestCpuKernels();
  pool->ParallelFor(blocks * panels, [&](int64_t task, int) {
    const int64_t begin = task % blocks * kChannels, first = task / blocks * kColumns;
    const int64_t channels = std::min(kChannels, channels_ - begin);
    const int64_t columns = std::min(kColumns, row - first);
    float* product = product_ + begin * row + first;
    alignas(64) float block[kDistances * kColumns];
    for (int64_t d = 0; d < range_.rows(); d += kDistances) {
      const int64_t distances = std::min(kDistances, range_.rows() - d);
      for (int64_t n = 0; n < distances; ++n) {
        std::copy_n(by_distance_ + (d + n) * row + first, columns, block + n * kColumns);
      }
      kernels.gemm(channels, columns, distances, sinusoids.At<float>(d, begin), 1,
                   sinusoids.stride(0), block, kColumns, product, row, /*accumulate=*/d > 0);
    }
  });
  for (int64_t c = 0; c < channels_; ++c) visit(c, product_ + c * row);
}

DevicePositionGradients::Sums::Sums(const Problem& problem, const DistanceRange& range,
                                    Workspace* workspace) {
  const int64_t width = problem.query_heads * problem.head_dim;
  keys_.LayOut(problem, nullptr, workspace);
  u_ = workspace->Take<float>(width);
  v_ = workspace->Take<float>(width);
  by_distance_ = workspace->Take<double>(range.rows() * width);
}

void DevicePositionGradients::Sums::Bind(ScoreGradients* gradients) const {
  gradients->content_bias = u_;
  gradients->position_bias = v_;
  gradients->relative_keys = keys_.data();
}

absl::Status DevicePositionGradients::SetUp(Device device, const Problem& problem,
                                            const DistanceRange& range,
                                            const RelativePositions& positions,
                                            const ConstTensorView& sinusoids, int64_t here) {
  device_ = device;
  rows_ = range.rows();
  heads_ = problem.query_heads;
  head_dim_ = problem.head_dim;
  const RelativeKeys* keys = positions.distances();
  has_distances_ = keys != nullptr;
  if (!has_distances_) return absl::OkStatus();
  RelativeKeySums sums;  // for its places
  Workspace measured;
  sums.LayOut(problem, nullptr, &measured);
  std::vector<GradientMap::Slope> slopes;
  for (int64_t h = 0; h < heads_; ++h) {
    for (int64_t offset = keys->low(); offset <= keys->high(); ++offset) {
      slopes.push_back(
          {range.Row(here - offset) * width() + h * head_dim_, sums.PlaceOf(*keys, h, offset), 1});
    }
  }
  TFB_ASSIGN_OR_RETURN(key_map_, GradientMap::Create(device, std::move(slopes), head_dim_));
  if (sinusoids.empty()) return absl::OkStatus();
  channels_ = sinusoids.dim(1);
  TFB_ASSIGN_OR_RETURN(sinusoids_, CopyFloats(device, sinusoids));
  return absl::OkStatus();
}

absl::Status DevicePositionGradients::SetUp(Device device, const Problem& problem,
                                            const DistanceRange& range,
                                            const RelativePositions::Parameters& parameters,
                                            const RelativePositions& positions,
                                            const ConstTensorView& sinusoids, int64_t here,
                                            const ParameterGradients& gradients) {
  TFB_RETURN_IF_ERROR(SetUp(device, problem, range, positions, sinusoids, here));
  const auto map_of = [&](const ConstTensorView& vector) -> absl::StatusOr<GradientMap> {
    const int64_t place = gradients.PlaceOf(vector.data);
    if (place < 0) return GradientMap();
    return GradientMap::Create(device, {{place, 0, 1}}, width());
  };
  TFB_ASSIGN_OR_RETURN(u_map_, map_of(parameters.u));
  TFB_ASSIGN_OR_RETURN(v_map_, map_of(parameters.v));
  w_r_ = gradients.PlaceOf(parameters.w_r.data);
  return absl::OkStatus();
}

absl::Status DevicePositionGradients::AddTo(const Sums& sums, const ParameterGradients& gradients,
                                            const Execution& execution) const {
  TFB_RETURN_IF_ERROR(u_map_.Add(sums.u_, gradients.sums(), execution));
  TFB_RETURN_IF_ERROR(v_map_.Add(sums.v_, gradients.sums(), execution));
  if (w_r_ < 0 || !has_distances_) return absl::OkStatus();
  TFB_RETURN_IF_ERROR(key_map_.Add(sums.keys_.data(), sums.by_distance_, execution));
  PositionProducts products = ProductsOf(sums);
  products.gradient = gradients.sums() + w_r_;
  return ForEachInRows(device_, channels_, width(), products, execution);
}

absl::Status DevicePositionGradients::AddTo(
    const Sums& sums, const RelativePositionGradients::Destinations& gradients,
    const Execution& execution) const {
  const auto add = [&](const float* from, const TensorView& to) {
    const ConstTensorView vectors(from, DType::kF32, {heads_, head_dim_});
    return to.empty() ? absl::OkStatus() : AddTensor(device_, vectors, to, execution);
  };
  TFB_RETURN_IF_ERROR(add(sums.u_, gradients.u));
  TFB_RETURN_IF_ERROR(add(sums.v_, gradients.v));
  if (!has_distances_) return absl::OkStatus();
  TFB_RETURN_IF_ERROR(key_map_.Add(sums.keys_.data(), sums.by_distance_, execution));
  if (!gradients.table.empty()) {  // a row of T is the table's [heads, head_dim]
    const AddDoubleRows rows = {sums.by_distance_, head_dim_, TensorRows(gradients.table).view()};
    TFB_RETURN_IF_ERROR(ForEachInRows(device_, rows_ * heads_, head_dim_, rows, execution));
  }
  if (gradients.w_r.empty()) return absl::OkStatus();
  PositionProducts products = ProductsOf(sums);
  products.to = TensorRows(gradients.w_r).view();
  return ForEachInRows(device_, channels_, width(), products, execution);
}

}  // namespace tfb::layers
