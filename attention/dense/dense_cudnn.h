// Dense attention by cuDNN's fused kernel, with which this project's is compared on a GPU.
#ifndef TFB_ATTENTION_DENSE_DENSE_CUDNN_H_
#define TFB_ATTENTION_DENSE_DENSE_CUDNN_H_

#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "core/cuda/cudnn.h"
#include "core/problem.h"
#include "core/technique.h"

namespace tfb::dense {

// Returns the graph of attention for contiguous tensors of the problem, with its log-sum-exp.
// `cudnn` must outlive it.
CudnnGraph CudnnAttentionGraph(const Cudnn* cudnn, const Problem& problem);

// Returns Unimplemented, with the name, where the view is not contiguous, or its address is no
// multiple of CudnnGraph::kAlignment.
absl::Status CheckCudnnTensor(absl::string_view name, const ConstTensorView& view);

// Returns the layer's cost, which is that of dense attention without padding. Causal problems have
// no more queries than keys.
Cost CudnnCost(const Problem& problem);

// Makes a layer without a key mask, whose inputs and outputs must pass CheckCudnnTensor. Returns
// Unimplemented, with the reason, for other devices than a GPU, and for problems that cuDNN does
// not support: fp32, channels that are no multiple of 8, no keys, causal problems with more queries
// than keys. Returns Unavailable where there is no GPU or no cuDNN. `scale` 0 means 1 /
// sqrt(head_dim).
absl::StatusOr<std::unique_ptr<Layer>> MakeCudnnDense(const Problem& problem, double scale,
                                                      Device device);

}  // namespace tfb::dense

#endif  // TFB_ATTENTION_DENSE_DENSE_CUDNN_H_
