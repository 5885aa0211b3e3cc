#include "memory/compressive/compression.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "core/layers/copy_rows.h"
#include "core/layers/stack/stack_sizes.h"
#include "core/status.h"
#include "core/workspace.h"
#include "memory/compressive/row_operations.h"

namespace tfb::compressive {
namespace {

using Function = CompressiveOptions::Function;

// Returns a view of contiguous f32 rows as rows of `channels`.
TensorView Rerow(const TensorView& rows, int64_t count, int64_t channels) {
  return TensorView(rows.mutable_data(), rows.dtype, {rows.dim(0), count, channels});
}

}  // namespace

absl::StatusOr<PackedMatrix> PackDecoder(Device device, const ConstTensorView& w) {
  const int64_t rate = w.dim(0), width = w.dim(1);
  std::vector<ConstTensorView> matrices;
  for (int64_t i = 0; i < rate; ++i) {
    matrices.push_back(
        Transpose(ConstTensorView(w.At<float>(i), DType::kF32, {width, width}), 0, 1));
  }
  return PackedMatrix::Create(device, matrices);
}

absl::StatusOr<Compression> Compression::Create(Device device, const CompressiveOptions& options,
                                                const NamedTensors& parameters, int64_t n) {
  Compression compression;
  compression.device_ = device;
  compression.options_ = options;
  if (!options.convolves()) return compression;
  const std::string layer = layers::LayerPrefix(n);
  const Tensor& w = parameters.at(layer + ConvolutionPrefix(options) + "w");
  const int64_t rate = w.dim(0), width = w.dim(1);
  const ConstTensorView matrix(w.raw(), DType::kF32, {rate * width, width});
  TFB_ASSIGN_OR_RETURN(
      compression.convolution_,
      PackedMatrix::Create(device, matrix,
                           parameters.at(layer + ConvolutionPrefix(options) + "b").view()));
  TFB_ASSIGN_OR_RETURN(compression.decoder_, PackDecoder(device, w.view()));
  return compression;
}

size_t Compression::workspace_bytes(Device device, const CompressiveOptions& options, int64_t batch,
                                    int64_t blocks, int64_t width, int threads) {
  if (!options.convolves()) return 0;
  const int64_t panel = options.compression * width;
  return Workspace::Measure(
             [&](Workspace& workspace) { workspace.Take<float>(batch * blocks * panel); }) +
         std::max(MatMulWorkspaceBytes(device, batch * blocks, panel, width, threads),
                  MatMulWorkspaceBytes(device, batch * blocks, width, panel, threads));
}

absl::Status Compression::Compress(const TensorView& old, const int32_t* selected,
                                   const TensorView& compressed, const Execution& execution) const {
  const int64_t rate = options_.compression, blocks = compressed.dim(1), width = compressed.dim(2);
  switch (options_.function) {
    case Function::kMean:
    case Function::kMax:
      return PoolRows(device_, options_.function == Function::kMax, rate, old, compressed,
                      execution);
    case Function::kMostUsed: {
      CopyRowsCall call;
      call.from = old;
      call.to = compressed;
      call.rows = blocks;
      call.selected = selected;
      return CopyRows(device_, call, execution);
    }
    case Function::kConvolution:
      return MatMul(convolution_, {Rerow(old, blocks, rate * width), {}, compressed}, execution);
    case Function::kDilatedConvolution:
      break;
  }
  Workspace workspace(execution.workspace);
  const TensorView panel(workspace.Take<float>(old.num_elements()), DType::kF32, old.shape());
  Execution rest = execution;
  rest.workspace = workspace.Rest();
  CopyRowsCall call;
  call.from = old;
  call.to = panel;
  call.rows = old.dim(1);
  call.dilated_block = rate;
  TFB_RETURN_IF_ERROR(CopyRows(device_, call, rest));
  return MatMul(convolution_, {Rerow(panel, blocks, rate * width), {}, compressed}, rest);
}

absl::Status Compression::AutoencodingLoss(const TensorView& old, const TensorView& compressed,
                                           const TensorView& to, const Execution& execution) const {
  const int64_t rate = options_.compression;
  if (!options_.convolves())
    return LossOfDifference(device_, options_.mean_square(), old, compressed, rate, to, execution);
  Workspace workspace(execution.workspace);
  const TensorView decoded(workspace.Take<float>(old.num_elements()), DType::kF32, old.shape());
  Execution rest = execution;
  rest.workspace = workspace.Rest();
  TFB_RETURN_IF_ERROR(MatMul(
      decoder_, {compressed, {}, Rerow(decoded, compressed.dim(1), rate * old.dim(2))}, rest));
  return LossOfDifference(device_, options_.mean_square(), old, decoded, 1, to, rest);
}

}  // namespace tfb::compressive
