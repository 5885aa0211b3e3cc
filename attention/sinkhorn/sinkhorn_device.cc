#include "attention/sinkhorn/sinkhorn_device.h"

#include <algorithm>

#include "attention/sinkhorn/sinkhorn_cuda.h"
#include "attention/sinkhorn/sinkhorn_gradients.h"
#include "core/cuda/for_each.h"
#include "core/cuda/runtime.h"
#include "core/status.h"
#include "core/workspace.h"

namespace tfb::sinkhorn {
namespace {

// The arguments of a call, without where to write but for the matrix.
SortArguments ArgumentsOf(const SortCall& call) {
  SortArguments arguments = {};
  arguments.sizes = call.sizes;
  arguments.network = call.network;
  for (size_t n = 0; n < call.pooled.size() && !call.pooled[n].rows.empty(); ++n) {
    arguments.pooled_rows[n] = ToDeviceView(call.pooled[n].rows);
    arguments.channels[n] = call.pooled[n].rows.dim(3);
    arguments.heads_summed[n] = call.pooled[n].heads_summed;
  }
  arguments.key_mask = ToMask(call.key_mask);
  arguments.given = ToDeviceView(call.logits);
  arguments.noise = ToDeviceView(call.noise);
  arguments.sort = ToSortMatrix(call.sort);
  return arguments;
}

struct SortMemory {
  double* pooled;
  double* logits;
};
SortMemory LayOutSort(const SinkhornSizes& s, Workspace& workspace) {
  const int64_t rows = s.batch * s.heads * s.blocks;
  return {workspace.Take<double>(rows * s.width), workspace.Take<double>(rows * s.Columns())};
}

// The memory of a backward pass. Arrays are of all heads and blocks.
struct BackwardMemory {
  double* matrix;           // [columns]: dS, and then the gradient of the network's output
  float* null_rows;         // [batch * heads][block][channels]: parts of the null row's gradient
  double* logits;           // [columns]
  double* rows;             // [columns]
  double* stored;           // [batch * heads][stored matrices][blocks][columns]
  double* results;          // [columns]: the last layer's
  double* pooled;           // [width]
  double* hidden;           // [hidden]
  double* hidden_gradient;  // [hidden]
  double* pooled_gradient;  // [batch * heads][blocks + 1][width]
};
BackwardMemory LayOutBackward(const SinkhornSizes& s, const std::array<int64_t, 2>& channels,
                              Workspace& workspace) {
  const int64_t heads = s.batch * s.heads, matrices = heads * s.blocks * s.Columns();
  BackwardMemory memory;
  memory.matrix = workspace.Take<double>(matrices);
  memory.null_rows =
      workspace.Take<float>(s.null_blocks * heads * s.block * std::max(channels[0], channels[1]));
  memory.logits = workspace.Take<double>(matrices);
  memory.rows = workspace.Take<double>(matrices);
  memory.stored = workspace.Take<double>(matrices * StoredMatrices(s).count);
  memory.results = workspace.Take<double>(matrices);
  memory.pooled = workspace.Take<double>(heads * s.blocks * s.width);
  memory.hidden = workspace.Take<double>(heads * s.blocks * s.hidden);
  memory.hidden_gradient = workspace.Take<double>(heads * s.blocks * s.hidden);
  memory.pooled_gradient = workspace.Take<double>(heads * (s.blocks + 1) * s.width);
  return memory;
}

// One backward pass on a CUDA device.
class SortBackwardOnCuda {
 public:
  SortBackwardOnCuda(CudaRuntime* runtime, const SortBackwardCall& call, const Execution& execution)
      : device_(runtime->device()),
        kernels_(KernelsOn<SinkhornKernels>(runtime->target())),
        call_(call),
        sizes_(call.forward.sizes),
        execution_(execution) {
    Workspace workspace(execution.workspace);
    memory_ =
        LayOutBackward(sizes_, {call.mixed[0].rows.dim(3), call.mixed[1].rows.dim(3)}, workspace);
  }

  absl::Status Run() const {
    const SortGradientArguments arguments = Arguments();
    TFB_RETURN_IF_ERROR(ToStatus(kernels_.gradient_of_matrix(arguments, execution_.stream)));
    for (const MixedGradients& mixed : call_.mixed) TFB_RETURN_IF_ERROR(OfRows(mixed));
    if (call_.sort_is_given) {
      return AddMatrixTo(device_, sizes_, memory_.matrix, call_.sort_gradient, execution_);
    }
    TFB_RETURN_IF_ERROR(ScoreAgain());
    TFB_RETURN_IF_ERROR(ToStatus(kernels_.through_balance(arguments, execution_.stream)));
    TFB_RETURN_IF_ERROR(
        AddMatrixTo(device_, sizes_, memory_.matrix, call_.noise_gradient, execution_));
    if (sizes_.scores == SortScores::kGiven) {
      return AddMatrixTo(device_, sizes_, memory_.matrix, call_.logits_gradient, execution_);
    }
    TFB_RETURN_IF_ERROR(ThroughNetwork());
    const NetworkPass pass = {memory_.pooled, memory_.hidden, memory_.hidden_gradient,
                              memory_.matrix, memory_.pooled_gradient};
    return AddNetworkGradients(device_, call_, pass, execution_);
  }

 private:
  SortGradientArguments Arguments() const {
    const StoredMatrices stored(sizes_);
    SortGradientArguments a = {};
    a.sizes = sizes_;
    a.key_mask = ToMask(call_.forward.key_mask);
    for (size_t n = 0; n < call_.mixed.size(); ++n) {
      const MixedGradients& mixed = call_.mixed[n];
      a.mixed[n] = {ToDeviceView(mixed.rows), mixed.rows.dim(3), mixed.null_rows,
                    ToDeviceView(mixed.sorted_gradient)};
    }
    a.matrix = memory_.matrix;
    a.logits = memory_.logits;
    a.rows = memory_.rows;
    a.stored = memory_.stored;
    a.stored_matrices = stored.count;
    a.stride = stored.stride;
    return a;
  }

  // Takes the gradients of sorted rows to those of the rows of blocks.
  absl::Status OfRows(const MixedGradients& mixed) const {
    const AddSortedGradients add = {sizes_,
                                    ToMask(call_.forward.key_mask),
                                    ToSortMatrix(call_.forward.sort),
                                    ToDeviceView(mixed.sorted_gradient),
                                    ToDeviceView(mixed.gradient),
                                    memory_.null_rows,
                                    mixed.rows.dim(3)};
    const int64_t rows = sizes_.batch * sizes_.heads * sizes_.Columns() * sizes_.block;
    TFB_RETURN_IF_ERROR(ForEachInRows(device_, rows, mixed.rows.dim(3), add, execution_));
    return AddNullRowsTo(device_, sizes_, mixed, memory_.null_rows, execution_);
  }

  absl::Status ScoreAgain() const {
    SortArguments arguments = ArgumentsOf(call_.forward);
    arguments.pooled = memory_.pooled;
    arguments.logits = memory_.logits;
    arguments.hidden = memory_.hidden;
    arguments.results = memory_.results;
    return ToStatus(kernels_.score(arguments, execution_.stream));
  }

  // Takes the gradient of R + g to those of the last layer's result, the units, and X.
  absl::Status ThroughNetwork() const {
    const int64_t rows = sizes_.batch * sizes_.heads * sizes_.blocks;
    const int64_t hidden = sizes_.hidden, width = sizes_.width, columns = sizes_.Columns();
    const SortNetwork& network = call_.forward.network;
    if (sizes_.scores != SortScores::kLinear) {
      const ThroughScores scores = {sizes_, memory_.results, memory_.matrix};
      TFB_RETURN_IF_ERROR(ForEach(device_, rows * columns, scores, execution_));
    }
    ThroughLayer first = {
        sizes_,  network.score_weights, memory_.matrix,          nullptr,          width,
        columns, /*is_last=*/true,      memory_.pooled_gradient, sizes_.blocks + 1};
    if (hidden > 0) {
      const ThroughLayer last = {
          sizes_,  network.score_weights, memory_.matrix,          memory_.hidden, hidden,
          columns, /*is_last=*/true,      memory_.hidden_gradient, sizes_.blocks};
      TFB_RETURN_IF_ERROR(ForEachInRows(device_, rows, hidden, last, execution_));
      first.weights = network.hidden_weights;
      first.gradients = memory_.hidden_gradient;
      first.outputs = hidden;
      first.is_last = false;
    }
    TFB_RETURN_IF_ERROR(ForEachInRows(device_, rows, width, first, execution_));
    return ForEachInRows(device_, sizes_.batch * sizes_.heads, width,
                         SumFromBlocks{sizes_, memory_.pooled_gradient}, execution_);
  }

  Device device_;
  const SinkhornKernels& kernels_;
  const SortBackwardCall& call_;
  const SinkhornSizes& sizes_;
  const Execution& execution_;
  BackwardMemory memory_;
};

}  // namespace

SortMatrix ToSortMatrix(const ConstTensorView& view) {
  SortMatrix sort = {const_cast<void*>(view.data), {}, view.dtype == DType::kF64};
  std::copy_n(view.strides.data(), 4, sort.strides);
  return sort;
}

SinkhornMask ToMask(const ConstTensorView& key_mask) {
  if (key_mask.empty()) return {};
  return {static_cast<const uint8_t*>(key_mask.data), {key_mask.stride(0), key_mask.stride(1)}};
}

size_t SortCudaWorkspaceBytes(const SinkhornSizes& sizes) {
  return Workspace::Measure([&](Workspace& workspace) { LayOutSort(sizes, workspace); });
}

absl::Status SortCuda(Device device, const SortCall& call, const Execution& execution) {
  TFB_ASSIGN_OR_RETURN(CudaRuntime * runtime, CudaRuntime::For(device));
  const SinkhornKernels& kernels = KernelsOn<SinkhornKernels>(runtime->target());
  Workspace workspace(execution.workspace);
  const SortMemory memory = LayOutSort(call.sizes, workspace);
  SortArguments arguments = ArgumentsOf(call);
  arguments.pooled = memory.pooled;
  arguments.logits = memory.logits;
  TFB_RETURN_IF_ERROR(ToStatus(kernels.score(arguments, execution.stream)));
  return ToStatus(kernels.balance(arguments, execution.stream));
}

StoredMatrices::StoredMatrices(const SinkhornSizes& sizes) {
  constexpr int64_t kStoredBytes = int64_t{32} << 20;
  const int64_t matrix_bytes =
      sizes.blocks * sizes.Columns() * static_cast<int64_t>(sizeof(double));
  count = std::clamp<int64_t>(kStoredBytes / matrix_bytes, 1, sizes.iterations);
  stride = (sizes.iterations + count - 1) / count;
}

size_t SortBackwardCudaWorkspaceBytes(const SinkhornSizes& sizes,
                                      const std::array<int64_t, 2>& channels) {
  return Workspace::Measure(
      [&](Workspace& workspace) { LayOutBackward(sizes, channels, workspace); });
}

absl::Status SortBackwardCuda(Device device, const SortBackwardCall& call,
                              const Execution& execution) {
  TFB_ASSIGN_OR_RETURN(CudaRuntime * runtime, CudaRuntime::For(device));
  return SortBackwardOnCuda(runtime, call, execution).Run();
}

absl::Status AddMatrixTo(Device device, const SinkhornSizes& sizes, const double* matrix,
                         const TensorView& to, const Execution& execution) {
  if (to.empty()) return absl::OkStatus();
  return ForEachInRows(device, sizes.batch * sizes.heads * sizes.blocks, sizes.Columns(),
                       AddMatrix{sizes, matrix, ToDeviceView(to)}, execution);
}

absl::Status AddNullRowsTo(Device device, const SinkhornSizes& sizes, const MixedGradients& mixed,
                           const float* parts, const Execution& execution) {
  if (sizes.null_blocks == 0) return absl::OkStatus();
  const int64_t channels = mixed.rows.dim(3);
  return ForEachInRows(device, sizes.heads, channels,
                       AddNullRows{sizes, parts, channels, mixed.null_gradient}, execution);
}

absl::Status AddNetworkGradients(Device device, const SortBackwardCall& call,
                                 const NetworkPass& pass, const Execution& execution) {
  const SinkhornSizes& s = call.forward.sizes;
  const auto add_layer = [&](const double* inputs, int64_t depth, const double* gradients,
                             int64_t outputs, double* weights, double* bias) -> absl::Status {
    const AddLayerGradients of_weights = {s, inputs, depth, gradients, outputs, weights};
    TFB_RETURN_IF_ERROR(ForEachInRows(device, s.heads * depth, outputs, of_weights, execution));
    const AddLayerGradients of_bias = {s, nullptr, 1, gradients, outputs, bias};
    return ForEachInRows(device, s.heads, outputs, of_bias, execution);
  };
  const SortNetworkGradients& to = call.network;
  if (s.hidden > 0) {
    TFB_RETURN_IF_ERROR(add_layer(pass.pooled, s.width, pass.hidden_gradient, s.hidden,
                                  to.hidden_weights, to.hidden_bias));
  }
  TFB_RETURN_IF_ERROR(add_layer(s.hidden > 0 ? pass.hidden : pass.pooled,
                                s.hidden > 0 ? s.hidden : s.width, pass.result_gradient,
                                s.Columns(), to.score_weights, to.score_bias));
  int64_t first = 0;
  for (size_t n = 0; n < call.pooled.size(); ++n) {
    const PooledRows& of_run = call.forward.pooled[n];
    if (of_run.rows.empty()) continue;
    const int64_t channels = of_run.rows.dim(3);
    if (!call.pooled[n].rows.empty()) {
      const AddPooledGradients add = {
          s,     ToMask(call.forward.key_mask), pass.pooled_gradient,
          first, of_run.heads_summed,           ToDeviceView(call.pooled[n].rows)};
      TFB_RETURN_IF_ERROR(ForEachInRows(device, s.batch * s.tokens, channels, add, execution));
    }
    first += channels;
  }
  return absl::OkStatus();
}

}  // namespace tfb::sinkhorn
