#include "memory/compressive/loss_gradients.h"

#include <algorithm>
#include <optional>
#include <vector>

#include "core/cuda/for_each.h"
#include "core/cuda/runtime.h"
#include "core/flash/flash_backward.h"
#include "core/layers/copy_rows.h"
#include "core/layers/copy_tensor.h"
#include "core/layers/heads.h"
#include "core/layers/matmul_gradient.h"
#include "core/layers/stack/stack_sizes.h"
#include "core/status.h"
#include "memory/compressive/compression.h"
#include "memory/compressive/compressive_functors.h"
#include "memory/compressive/row_operations.h"

namespace tfb::compressive {
LossGradients::LossGradients(Device device, const Problem& problem,
                             const CompressiveOptions& options, int64_t n,
                             const layers::ListSchedules& lists)
    : device_(device),
      problem_(problem),
      engine_(device, problem),
      options_(options),
      lists_(&lists),
      layer_(layers::LayerPrefix(n)),
      w_(layer_ + ConvolutionPrefix(options) + "w"),
      b_(layer_ + ConvolutionPrefix(options) + "b") {}

absl::Status LossGradients::SetUp(const NamedTensors& parameters) {
  const ConstTensorView k = parameters.at(layer_ + "w_k").view();
  const ConstTensorView v = parameters.at(layer_ + "w_v").view();
  TFB_ASSIGN_OR_RETURN(keys_values_, PackedMatrix::Create(device_, {k, v}));
  TFB_ASSIGN_OR_RETURN(keys_values_transposed_, PackedMatrix::CreateTransposed(device_, {k, v}));
  const Tensor& w = parameters.at(w_);
  const Shape matrix = {w.dim(0) * w.dim(1), w.dim(2)};
  TFB_ASSIGN_OR_RETURN(
      convolution_, PackedMatrix::Create(device_, ConstTensorView(w.raw(), DType::kF32, matrix)));
  TFB_ASSIGN_OR_RETURN(decoder_, PackDecoder(device_, w.view()));
  return engine_.SetUp(*lists_, /*rule=*/{});
}

LossGradients::Scratch LossGradients::LayOut(int64_t tokens, int64_t rows,
                                             Workspace& workspace) const {
  const int64_t width = problem_.model_dim(), blocks = rows / options_.compression;
  const auto take = [&](int64_t count, int64_t channels) {
    const Shape shape = {problem_.batch, count, channels};
    return TensorView(workspace.Take<float>(NumElements(shape)), DType::kF32, shape);
  };
  Scratch scratch;
  scratch.old = take(rows, width);
  scratch.panel = take(rows, width);
  scratch.difference = take(rows, width);
  scratch.normalized = take(rows, width);
  scratch.projected = take(rows, 2 * width);
  scratch.of_projected = take(blocks, 2 * width);
  scratch.of_fresh = take(blocks, width);
  scratch.of_old_queries = take(tokens, width);
  scratch.of_queries = take(tokens, width);
  scratch.of_attention = take(tokens, width);
  scratch.log_sum_exp = take(problem_.query_heads, tokens);
  if (device_ != Device::kCpu) scratch.log_sum_exp_rest = take(problem_.query_heads, tokens);
  scratch.rows = engine_.LayOutRows(tokens, std::nullopt, workspace);
  scratch.difference_norm = take(1, 1);
  scratch.difference_norm.rank = 1;
  return scratch;
}

size_t LossGradients::workspace_bytes(int threads) const {
  const int64_t width = problem_.model_dim(), panel = options_.compression * width;
  const int64_t old_rows = problem_.batch * lists_->longest();
  const int64_t rows = std::max(old_rows, problem_.batch * lists_->longest_segment());
  const size_t attention =
      std::max(engine_.workspace_bytes(*lists_, /*relative_keys=*/false, threads),
               engine_.backward_workspace_bytes(*lists_, /*relative_keys=*/false, threads));
  return Workspace::Measure([&](Workspace& workspace) {
           LayOut(lists_->longest_segment(), lists_->longest(), workspace);
         }) +
         std::max({attention, MatMulWorkspaceBytes(device_, rows, width, 2 * width, threads),
                   MatMulWorkspaceBytes(device_, rows, 2 * width, width, threads),
                   MatMulWorkspaceBytes(device_, old_rows, width, panel, threads),
                   MatMulWorkspaceBytes(device_, old_rows, panel, width, threads),
                   MatMulGradientWorkspaceBytes(device_, old_rows, width, width, threads),
                   LayerNorm::workspace_bytes(device_, width, threads),
                   LayerNorm::backward_workspace_bytes(device_, rows, width, threads)});
}

absl::Status LossGradients::Add(const Call& call, const Execution& execution) const {
  const bool is_left_out = call.gradients.Get(w_).empty() && call.gradients.Get(b_).empty();
  if (is_left_out || call.fresh.dim(1) == 0) return absl::OkStatus();
  const int64_t blocks = call.fresh.dim(1), rows = blocks * options_.compression;
  Workspace workspace(execution.workspace);
  const Scratch scratch = LayOut(call.q.dim(1), rows, workspace);
  Execution rest = execution;
  rest.workspace = workspace.Rest();
  int64_t place = 0;
  for (const ConstTensorView& part : call.old) {
    if (part.empty()) continue;
    TFB_RETURN_IF_ERROR(
        CopyAllRows(device_, part, Slice(scratch.old, 1, place, part.dim(1)), rest));
    place += part.dim(1);
  }
  TFB_RETURN_IF_ERROR(ClearTensor(device_, scratch.of_fresh, rest));
  if (!call.attention.empty()) TFB_RETURN_IF_ERROR(OfAttention(call, scratch, rest));
  if (!call.autoencoding.empty()) TFB_RETURN_IF_ERROR(OfAutoencoding(call, scratch, rest));

  CopyRowsCall copy;
  copy.from = scratch.old;
  copy.to = scratch.panel;
  copy.rows = rows;
  if (options_.function == CompressiveOptions::Function::kDilatedConvolution) {
    copy.dilated_block = options_.compression;
  }
  TFB_RETURN_IF_ERROR(CopyRows(device_, copy, rest));
  return AddToMatrix(call, scratch.panel, scratch.of_fresh, call.gradients.Get(b_), rest);
}

absl::Status LossGradients::AddToMatrix(const Call& call, const TensorView& rows,
                                        const ConstTensorView& others, const TensorView& bias,
                                        const Execution& execution) const {
  const int64_t rate = options_.compression;
  const TensorView w = call.gradients.Get(w_);
  for (int64_t i = 0; i < rate; ++i) {
    TensorView matrix;  // w_i
    if (!w.empty()) {
      matrix = Slice(w, 0, i, 1);
      matrix.dims = {w.dim(1), w.dim(2)};
      matrix.strides = {w.stride(1), w.stride(2)};
      matrix.rank = 2;
    }
    TFB_RETURN_IF_ERROR(MatMulGradient(device_,
                                       {Slice(rows, 1, i, others.dim(1), rate), others, matrix,
                                        i == 0 ? bias : TensorView(), /*accumulate=*/true},
                                       execution));
  }
  return absl::OkStatus();
}

// ---- The attention's loss ----

FlashCall LossGradients::FlashOf(const Call& call, const Scratch& scratch, int64_t keys,
                                 const TensorView& out) const {
  const int64_t width = problem_.model_dim(), heads = problem_.query_heads;
  const TensorView projected = Slice(scratch.projected, 1, 0, keys);
  FlashCall flash;
  flash.q = Heads(call.q, heads);
  flash.k = Heads(Slice(projected, 2, 0, width), heads);
  flash.v = Heads(Slice(projected, 2, width, width), heads);
  flash.out = Heads(out, heads);
  flash.log_sum_exp = scratch.log_sum_exp;
  flash.log_sum_exp_rest = scratch.log_sum_exp_rest;
  flash.schedule = &lists_->Of(call.q.dim(1), keys).schedule;
  return flash;
}

absl::Status LossGradients::Attend(const Call& call, const ConstTensorView& rows,
                                   const Scratch& scratch, const TensorView& out,
                                   const Execution& execution) const {
  const int64_t keys = rows.dim(1);
  ConstTensorView read = rows;
  if (call.norm != nullptr) {
    const TensorView normalized = Slice(scratch.normalized, 1, 0, keys);
    TFB_RETURN_IF_ERROR(call.norm->Run(rows, normalized, execution));
    read = normalized;
  }
  TFB_RETURN_IF_ERROR(
      MatMul(keys_values_, {read, {}, Slice(scratch.projected, 1, 0, keys)}, execution));
  return engine_.Run(lists_->Of(call.q.dim(1), keys), FlashOf(call, scratch, keys, out), execution);
}

absl::Status LossGradients::OfAttention(const Call& call, const Scratch& scratch,
                                        const Execution& execution) const {
  const int64_t width = problem_.model_dim(), heads = problem_.query_heads;
  const int64_t tokens = call.q.dim(1), blocks = call.fresh.dim(1);
  TFB_RETURN_IF_ERROR(Attend(call, scratch.old, scratch, scratch.of_old_queries, execution));
  TFB_RETURN_IF_ERROR(Attend(call, call.fresh, scratch, scratch.of_queries, execution));
  TFB_RETURN_IF_ERROR(CopyAllRows(device_, scratch.of_queries, scratch.of_attention, execution));
  TFB_RETURN_IF_ERROR(DifferenceGradient(scratch.of_old_queries, scratch.of_attention,
                                         call.attention, scratch, execution));

  const FlashCall forward = FlashOf(call, scratch, blocks, scratch.of_queries);
  TFB_RETURN_IF_ERROR(ClearTensor(device_, scratch.of_projected, execution));
  FlashBackwardCall backward;
  backward.forward = &forward;
  backward.out_gradient = Heads(scratch.of_attention, heads);
  backward.k_gradient = Heads(Slice(scratch.of_projected, 2, 0, width), heads);
  backward.v_gradient = Heads(Slice(scratch.of_projected, 2, width, width), heads);
  TFB_RETURN_IF_ERROR(engine_.Backward(lists_->Of(tokens, blocks), backward,
                                       /*log_sum_exp_gradient=*/{}, scratch.rows, execution));
  TFB_RETURN_IF_ERROR(
      MatMul(keys_values_transposed_, {scratch.of_projected, {}, scratch.of_fresh}, execution));
  if (call.norm == nullptr) return absl::OkStatus();
  return call.norm->Backward({call.fresh, scratch.of_fresh, {}, scratch.of_fresh, {}, {}},
                             execution);
}

absl::Status LossGradients::DifferenceGradient(const TensorView& a, const TensorView& b,
                                               const ConstTensorView& of_loss,
                                               const Scratch& scratch,
                                               const Execution& execution) const {
  const int64_t rows = a.dim(1), elements = rows * a.dim(2);
  if (!options_.mean_square()) {
    TFB_RETURN_IF_ERROR(LossOfDifference(device_, /*mean_square=*/false, a, b, /*repeat=*/1,
                                         scratch.difference_norm, execution));
  }
  const GradientOfDifference gradient = {
      ToDeviceView(a),
      ToDeviceView(b),
      ToDeviceView(of_loss),
      options_.mean_square() ? DeviceView{} : ToDeviceView(scratch.difference_norm),
      rows,
      2 / static_cast<double>(elements)};
  return ForEachInRows(device_, problem_.batch * rows, a.dim(2), gradient, execution);
}

// ---- The autoencoder's loss ----

absl::Status LossGradients::OfAutoencoding(const Call& call, const Scratch& scratch,
                                           const Execution& execution) const {
  const int64_t blocks = call.fresh.dim(1), panel = options_.compression * problem_.model_dim();
  const TensorView decoded(scratch.difference.mutable_data(), DType::kF32,
                           {problem_.batch, blocks, panel});
  TFB_RETURN_IF_ERROR(MatMul(decoder_, {call.fresh, {}, decoded}, execution));
  TFB_RETURN_IF_ERROR(
      DifferenceGradient(scratch.old, scratch.difference, call.autoencoding, scratch, execution));
  TFB_RETURN_IF_ERROR(AddToMatrix(call, scratch.difference, call.fresh, TensorView(), execution));
  return MatMul(convolution_, {decoded, scratch.of_fresh, scratch.of_fresh}, execution);
}

}  // namespace tfb::compressive
