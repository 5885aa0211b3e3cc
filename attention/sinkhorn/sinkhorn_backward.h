// The backward pass of the sorting of sparse Sinkhorn attention, on the CPU here, on CUDA devices in
// sinkhorn_device.h.
//
// From the gradients of K^s and V^s, dS_ut = sum dK^s_u . K_t + sum dV^s_u . V_t, and dK_t = sum_u
// S_ut dK^s_u. Then dA = S dS goes back through the iterations, whose steps' results A' are computed
// again:
//
//   rows             A'_ut = A_ut - log sum_t' exp A_ut'
//                    dA_ut = dA'_ut - exp(A'_ut) sum_t' dA'_ut'
//   columns          A'_ut = A_ut - log sum_u' exp A_u't
//                    dA_ut = dA'_ut - exp(A'_ut) sum_u' dA'_u't
//   causal columns   A'_ut = A_ut - log sum_(u' <= u) exp A_u't
//                    dA_ut = dA'_ut - exp(A'_ut) G_ut
//                    G_ut = dA'_ut + (1 - exp A'_(u+1)t) G_(u+1)t
//
// since 1 - exp A'_(u+1)t is the ratio of the sums up to u and up to u + 1. The matrices before
// some iterations are stored, as many as fit 32 MiB (of a thread; on CUDA, of a head), and those between are computed again
// from them. All of this is float64, as in the forward pass; the products with keys and values are
// fp32.
#ifndef TFB_ATTENTION_SINKHORN_SINKHORN_BACKWARD_H_
#define TFB_ATTENTION_SINKHORN_SINKHORN_BACKWARD_H_

#include <array>
#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "attention/sinkhorn/sinkhorn_cpu.h"
#include "attention/sinkhorn/sinkhorn_sizes.h"
#include "core/technique.h"
#include "core/tensor.h"

namespace tfb::sinkhorn {

// Gradients are added to f32 tensors of any strides; an empty one is not computed.

// Keys or values, and what was mixed of them.
struct MixedGradients {
  ConstTensorView rows;             // [batch, heads, tokens, channels]
  const double* null_rows;          // [heads][channels], or null
  ConstTensorView sorted_gradient;  // f32 [batch, heads, mixed_blocks block, channels]
  TensorView gradient;              // of `rows`
  double* null_gradient;            // of null_rows, or null
};

// The gradients of PooledRows.
struct PooledGradients {
  TensorView rows;
  int64_t heads_summed = 1;
};

// Sums of the gradients of the parameters, in the layout of SortNetwork.
struct SortNetworkGradients {
  double* hidden_weights;
  double* hidden_bias;
  double* score_weights;
  double* score_bias;
};

struct SortBackwardCall {
  SortCall forward;            // with the matrix as the Run found it, or as it was given
  bool sort_is_given = false;  // then the gradients end at the matrix
  std::array<MixedGradients, 2> mixed = {};
  std::array<PooledGradients, 2> pooled;
  SortNetworkGradients network = {};
  TensorView logits_gradient, noise_gradient, sort_gradient;  // f32, of the shape of the matrix
};

// `channels` are those of keys and of values.
size_t SortBackwardWorkspaceBytes(const SinkhornSizes& sizes,
                                  const std::array<int64_t, 2>& channels, int threads);
// Adds the gradients. It allocates nothing, and the result does not depend on the number of
// threads.
absl::Status SortBackwardCpu(const SortBackwardCall& call, const Execution& execution);

}  // namespace tfb::sinkhorn

#endif  // TFB_ATTENTION_SINKHORN_SINKHORN_BACKWARD_H_
