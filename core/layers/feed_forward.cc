#include "core/layers/feed_forward.h"

#include "core/workspace.h"

namespace tfb {

size_t FeedForward::workspace_bytes(int64_t rows, int64_t inner, int threads) {
  return MatMulWorkspaceBytes(threads) +
         Workspace::Measure([=](Workspace& workspace) { workspace.Take<float>(rows * inner); });
}

absl::Status FeedForward::Run(const ConstTensorView& x, const ConstTensorView& residual,
                              const TensorView& y, const Execution& execution) const {
  Shape shape = x.shape();
  shape.back() = first_.out();
  Workspace workspace(execution.workspace);
  const TensorView inner(workspace.Take<float>(NumElements(shape)), DType::kF32, shape);
  Execution rest = execution;
  rest.workspace = workspace.Rest();
  TFB_RETURN_IF_ERROR(MatMul(first_, {x, {}, inner, activation_}, rest));
  return MatMul(second_, {inner, residual, y}, rest);
}

}  // namespace tfb
