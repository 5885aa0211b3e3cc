#include "core/layers/feed_forward.h"

#include <algorithm>

#include "core/layers/activation_rows.h"
#include "core/layers/matmul_gradient.h"
#include "core/layers/rows_of.h"
#include "core/status.h"

namespace tfb {
namespace {

// Returns a view like `like`, of contiguous floats, with another number of channels.
TensorView WithChannels(const ConstTensorView& like, int64_t channels, float* data) {
  Shape shape = like.shape();
  shape.back() = channels;
  return TensorView(data, DType::kF32, shape);
}

}  // namespace

size_t FeedForward::workspace_bytes(Device device, int64_t rows, const Sizes& sizes, int threads) {
  return std::max(MatMulWorkspaceBytes(device, rows, sizes.in, sizes.inner, threads),
                  MatMulWorkspaceBytes(device, rows, sizes.inner, sizes.out, threads)) +
         Workspace::Measure(
             [=](Workspace& workspace) { workspace.Take<float>(rows * sizes.inner); });
}

absl::Status FeedForward::Run(const ConstTensorView& x, const ConstTensorView& residual,
                              const TensorView& y, const Execution& execution,
                              const RowList& rows) const {
  Workspace workspace(execution.workspace);
  const TensorView inner = WithChannels(
      x, first_.out(), workspace.Take<float>(RowsOf<ConstTensorView>(x).rows() * first_.out()));
  Execution rest = execution;
  rest.workspace = workspace.Rest();
  TensorView z, u;
  if (!execution.kept.empty()) {
    Workspace memory(execution.kept);
    const Kept kept = LayOutKept(RowsOf<ConstTensorView>(x).rows(), sizes(), output_, memory);
    z = WithChannels(x, first_.out(), kept.z);
    if (kept.u != nullptr) u = WithChannels(x, second_.out(), kept.u);
  }
  TFB_RETURN_IF_ERROR(MatMul(first_, {x, {}, inner, activation_, rows, {}, z}, rest));
  return MatMul(second_, {inner, residual, y, output_, rows, {}, u}, rest);
}

// ---- The backward pass ----

FeedForward::Kept FeedForward::LayOutKept(int64_t rows, const Sizes& sizes, Activation output,
                                          Workspace& workspace) {
  return {workspace.Take<float>(rows * sizes.inner),
          output == Activation::kNone ? nullptr : workspace.Take<float>(rows * sizes.out)};
}

size_t FeedForward::kept_bytes(int64_t rows, const Sizes& sizes, Activation output) {
  return Workspace::Measure(
      [=](Workspace& workspace) { LayOutKept(rows, sizes, output, workspace); });
}

size_t FeedForward::backward_workspace_bytes(Device device, int64_t rows, const Sizes& sizes,
                                             int threads, Activation output) {
  // The buffers have the sizes of what is kept: h and then dz, and du.
  return kept_bytes(rows, sizes, output) +
         std::max({MatMulWorkspaceBytes(device, rows, sizes.out, sizes.inner, threads),
                   MatMulWorkspaceBytes(device, rows, sizes.inner, sizes.in, threads),
                   MatMulGradientWorkspaceBytes(device, rows, sizes.in, sizes.inner, threads),
                   MatMulGradientWorkspaceBytes(device, rows, sizes.inner, sizes.out, threads)});
}

absl::Status FeedForward::SetUpBackward(const ConstTensorView& w1, const ConstTensorView& w2) {
  TFB_ASSIGN_OR_RETURN(first_transposed_, PackedMatrix::CreateTransposed(first_.device(), {w1}));
  TFB_ASSIGN_OR_RETURN(second_transposed_, PackedMatrix::CreateTransposed(first_.device(), {w2}));
  return absl::OkStatus();
}

absl::Status FeedForward::Backward(const BackwardCall& call, const Execution& execution) const {
  const int64_t rows = RowsOf<ConstTensorView>(call.x).rows();
  const Device device = first_.device();
  Workspace memory(execution.kept), workspace(execution.workspace);
  const Kept kept = LayOutKept(rows, sizes(), output_, memory);
  const Kept buffers = LayOutKept(rows, sizes(), output_, workspace);
  Execution rest = execution;
  rest.workspace = workspace.Rest();

  ConstTensorView du = call.dy;
  if (kept.u != nullptr) {
    const TensorView of_sum = WithChannels(call.dy, second_.out(), buffers.u);
    TFB_RETURN_IF_ERROR(MultiplyByDerivative(device, output_,
                                             WithChannels(call.dy, second_.out(), kept.u), call.dy,
                                             of_sum, rest, call.rows));
    du = of_sum;
  }
  const TensorView z = WithChannels(call.x, first_.out(), kept.z);
  const TensorView inner = WithChannels(call.x, first_.out(), buffers.z);
  if (!call.w2.empty())
    TFB_RETURN_IF_ERROR(Activate(device, activation_, z, inner, rest, call.rows));
  TFB_RETURN_IF_ERROR(
      MatMulGradient(device, {inner, du, call.w2, call.b2, call.accumulate, call.rows}, rest));
  TFB_RETURN_IF_ERROR(
      MatMul(second_transposed_, {du, {}, inner, Activation::kNone, call.rows}, rest));
  TFB_RETURN_IF_ERROR(MultiplyByDerivative(device, activation_, z, inner, inner, rest, call.rows));
  TFB_RETURN_IF_ERROR(
      MatMulGradient(device, {call.x, inner, call.w1, call.b1, call.accumulate, call.rows}, rest));
  if (call.dx.empty()) return absl::OkStatus();
  return MatMul(first_transposed_, {inner, call.added, call.dx, Activation::kNone, call.rows},
                rest);
}

}  // namespace tfb
