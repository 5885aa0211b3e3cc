// The steps of sparse Sinkhorn attention as calls of kernels and functors.
#ifndef TFB_ATTENTION_SINKHORN_SINKHORN_DEVICE_H_
#define TFB_ATTENTION_SINKHORN_SINKHORN_DEVICE_H_

#include <array>
#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "attention/sinkhorn/sinkhorn_backward.h"
#include "attention/sinkhorn/sinkhorn_cpu.h"
#include "attention/sinkhorn/sinkhorn_functors.h"
#include "core/problem.h"
#include "core/technique.h"
#include "core/tensor.h"

namespace tfb::sinkhorn {

SortMatrix ToSortMatrix(const ConstTensorView& view);
SinkhornMask ToMask(const ConstTensorView& key_mask);

// Finds S on a CUDA device, as SortCpu does on the CPU.
size_t SortCudaWorkspaceBytes(const SinkhornSizes& sizes);
absl::Status SortCuda(Device device, const SortCall& call, const Execution& execution);

// How many matrices of a head a backward pass stores, and the iterations between them.
struct StoredMatrices {
  explicit StoredMatrices(const SinkhornSizes& sizes);
  int64_t count;
  int64_t stride;
};

// Adds the gradients on a CUDA device, as SortBackwardCpu does on the CPU.
size_t SortBackwardCudaWorkspaceBytes(const SinkhornSizes& sizes,
                                      const std::array<int64_t, 2>& channels);
absl::Status SortBackwardCuda(Device device, const SortBackwardCall& call,
                              const Execution& execution);

// Steps of a backward pass that all devices run.

// Adds a matrix of doubles, of all heads, to a gradient; none where it is empty.
absl::Status AddMatrixTo(Device device, const SinkhornSizes& sizes, const double* matrix,
                         const TensorView& to, const Execution& execution);
// Adds the parts of the null rows' gradient.
absl::Status AddNullRowsTo(Device device, const SinkhornSizes& sizes, const MixedGradients& mixed,
                           const float* parts, const Execution& execution);

// NetworkPass holds the numbers and gradients of the network of all heads: [batch * heads][blocks],
// in doubles.
struct NetworkPass {
  const double* pooled;           // [width]: X
  const double* hidden;           // [hidden]
  const double* hidden_gradient;  // [hidden]
  const double* result_gradient;  // [columns], 0 outside of the support
  const double* pooled_gradient;  // [blocks + 1] of a head, where causal of the blocks from u on
};
// Adds the gradients of the network's parameters and of the rows that were pooled.
absl::Status AddNetworkGradients(Device device, const SortBackwardCall& call,
                                 const NetworkPass& pass, const Execution& execution);

}  // namespace tfb::sinkhorn

#endif  // TFB_ATTENTION_SINKHORN_SINKHORN_DEVICE_H_
