#include "core/cuda/warp.cuh"
#include "core/retrieval/retrieval_kernels.h"

namespace tfb {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) CopyNeighbours(CopyNeighboursArguments a) {
  const int64_t index = ThreadOfGrid();
  if (index >= a.sizes[0] * a.sizes[1] * a.sizes[2]) return;
  const int64_t n = index % a.sizes[2];
  const int64_t token = index / a.sizes[2] % a.sizes[1];
  const int64_t batch = index / a.sizes[2] / a.sizes[1];
  const int32_t entry =
      a.from[batch * a.from_strides[0] + token * a.from_strides[1] + n * a.from_strides[2]];
  a.to[batch * a.to_strides[0] + token * a.to_strides[1] + n * a.to_strides[2]] =
      entry >= 0 && entry < a.entries ? entry : -1;
}

const char* LaunchCopyNeighbours(const CopyNeighboursArguments& a, void* stream) {
  const int64_t blocks = CeilDiv(a.sizes[0] * a.sizes[1] * a.sizes[2], kThreads);
  return Launch("CopyNeighbours", &CopyNeighbours, {blocks, kThreads}, stream, a);
}

}  // namespace

TFB_KERNEL_TABLE(RetrievalKernels, {&LaunchCopyNeighbours});

}  // namespace tfb
