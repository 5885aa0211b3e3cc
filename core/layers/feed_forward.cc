#include "core/layers/feed_forward.h"

#include <algorithm>

#include "core/workspace.h"

namespace tfb {

size_t FeedForward::workspace_bytes(Device device, int64_t rows, const Sizes& sizes, int threads) {
  return std::max(MatMulWorkspaceBytes(device, rows, sizes.in, sizes.inner, threads),
                  MatMulWorkspaceBytes(device, rows, sizes.inner, sizes.out, threads)) +
         Workspace::Measure(
             [=](Workspace& workspace) { workspace.Take<float>(rows * sizes.inner); });
}

absl::Status FeedForward::Run(const ConstTensorView& x, const ConstTensorView& residual,
                              const TensorView& y, const Execution& execution,
                              const RowList& rows) const {
  Shape shape = x.shape();
  shape.back() = first_.out();
  Workspace workspace(execution.workspace);
  const TensorView inner(workspace.Take<float>(NumElements(shape)), DType::kF32, shape);
  Execution rest = execution;
  rest.workspace = workspace.Rest();
  TFB_RETURN_IF_ERROR(MatMul(first_, {x, {}, inner, activation_, rows}, rest));
  return MatMul(second_, {inner, residual, y, output_, rows}, rest);
}

}  // namespace tfb
