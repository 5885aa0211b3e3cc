// The gradients of the two losses of compressive.h by a convolution's parameters.
//
// Section 3.2 of arXiv:1911.05507v1 stops each loss at the layer's state and parameters: old rows,
// queries, W_k, W_v and the norm are constants. With new = P W + b, where row t of the panel P has
// the c old rows that block t reads side by side, W [c d, d], and l the gradient of the loss:
//
//   attention_loss     A = attn(h, new), D = attn(h, old) - A
//                      dA = -l D / ||D||, or -2 l D / elements with loss=mean_square
//                      and from there as core/flash/flash_backward.h, the projections and the norm:
//                      dnew
//   autoencoding_loss  G_t = new_t V, V [d, c d] the transposed matrices side by side, dG likewise of
//                      old - G; dnew_t = dG_t W, dW = sum_t dG_t^T new_t
//   both               dW += P^T dnew,  db += sum_t dnew_t
//
// (the chain rule). Where a difference is 0, so is its gradient. On every device arithmetic is fp32, and
// sums have a fixed order.
#ifndef TFB_MEMORY_COMPRESSIVE_LOSS_GRADIENTS_H_
#define TFB_MEMORY_COMPRESSIVE_LOSS_GRADIENTS_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "core/flash/flash.h"
#include "core/layers/attention/list_attention.h"
#include "core/layers/layer_norm.h"
#include "core/layers/matmul.h"
#include "core/problem.h"
#include "core/technique.h"
#include "core/tensor.h"
#include "core/workspace.h"
#include "memory/compressive/compressive.h"

namespace tfb::compressive {

class LossGradients {
 public:
  LossGradients() = default;
  // `lists` has the numbers of tokens and old rows, and of tokens and blocks, of all segments that
  // compress rows; it must outlive this.
  LossGradients(Device device, const Problem& problem, const CompressiveOptions& options, int64_t n,
                const layers::ListSchedules& lists);

  // Packs the parameters of the layer.
  absl::Status SetUp(const NamedTensors& parameters);
  size_t workspace_bytes(int threads) const;

  struct Call {
    ConstTensorView q;          // f32 [batch, tokens, model_dim], the segment's queries
    ConstTensorView old[2];     // what was compressed, in parts [batch, rows, model_dim], or empty
    ConstTensorView fresh;      // f32 [batch, blocks, model_dim], what became of it
    const LayerNorm* norm;      // of what the attention reads, or null
    ConstTensorView attention;  // the gradients of the losses, [batch], or empty
    ConstTensorView autoencoding;
    const Outputs& gradients;  // of parameters, which are added to
  };
  absl::Status Add(const Call& call, const Execution& execution) const;

 private:
  // All f32 [batch, ...].
  struct Scratch {
    TensorView old;               // [rows, model_dim]
    TensorView panel;             // of the same size, what the convolution reads
    TensorView difference;        // of the same size: G, and then dG
    TensorView normalized;        // of the same size
    TensorView projected;         // [rows, 2 model_dim]
    TensorView of_projected;      // [blocks, 2 model_dim]
    TensorView of_fresh;          // [blocks, model_dim]
    TensorView of_old_queries;    // [tokens, model_dim]: attn(h, old)
    TensorView of_queries;        // [tokens, model_dim]: A
    TensorView of_attention;      // [tokens, model_dim]: dA
    TensorView log_sum_exp;       // [heads, tokens]
    TensorView log_sum_exp_rest;  // on CUDA: what rounding took from it
    layers::ListEngine::RowScratch rows;
    TensorView difference_norm;  // [batch]
  };
  Scratch LayOut(int64_t tokens, int64_t rows, Workspace& workspace) const;
  FlashCall FlashOf(const Call& call, const Scratch& scratch, int64_t keys,
                    const TensorView& out) const;
  absl::Status Attend(const Call& call, const ConstTensorView& rows, const Scratch& scratch,
                      const TensorView& out, const Execution& execution) const;
  absl::Status OfAttention(const Call& call, const Scratch& scratch,
                           const Execution& execution) const;
  absl::Status OfAutoencoding(const Call& call, const Scratch& scratch,
                              const Execution& execution) const;
  // Adds the product of the transposed rows [batch, blocks, c d] with others [batch, blocks, d] to
  // the gradient of W.
  absl::Status AddToMatrix(const Call& call, const TensorView& rows, const ConstTensorView& others,
                           const TensorView& bias, const Execution& execution) const;
  // Replaces b by the gradient of the norm, or the mean square, of a - b in each batch row.
  absl::Status DifferenceGradient(const TensorView& a, const TensorView& b,
                                  const ConstTensorView& of_loss, const Scratch& scratch,
                                  const Execution& execution) const;

  Device device_ = Device::kCpu;
  Problem problem_;
  layers::ListEngine engine_;
  CompressiveOptions options_;
  const layers::ListSchedules* lists_ = nullptr;
  std::string layer_;
  std::string w_, b_;  // the names of the parameters
  PackedMatrix keys_values_, keys_values_transposed_;
  PackedMatrix convolution_;  // W
  PackedMatrix decoder_;      // V
};

}  // namespace tfb::compressive

#endif  // TFB_MEMORY_COMPRESSIVE_LOSS_GRADIENTS_H_
