#include "attention/longformer/longformer_cuda.h"
#include "core/cuda/warp.cuh"

namespace tfb::longformer {
namespace {

// A block makes the lists of a sequence. It takes 256 tokens at a time, one a thread.

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;

// Returns the number of threads before this one that have the flag, and writes that of all threads.
__device__ int CountBefore(bool flag, int* of_warp, int* count) {
  const unsigned flags = __ballot_sync(kAllLanes, flag);
  if (Lane() == 0) of_warp[Warp()] = __popc(flags);
  __syncthreads();
  int before = __popc(flags & ((1u << Lane()) - 1));
  *count = 0;
  for (int w = 0; w < kWarps; ++w) {
    if (w < Warp()) before += of_warp[w];
    *count += of_warp[w];
  }
  __syncthreads();
  return before;
}

__global__ void __launch_bounds__(kThreads) FindGlobals(const FindGlobalsArguments a) {
  __shared__ int of_warp[kWarps];
  __shared__ int other;  // a token that is not global
  const int64_t b = blockIdx.x, row = b * a.tokens;
  int64_t marked = 0, globals = 0;  // of the tokens before
  if (threadIdx.x == 0) other = 0;
  for (int64_t begin = 0; begin < a.tokens; begin += kThreads) {
    const int64_t i = begin + static_cast<int>(threadIdx.x);
    const bool exists = i < a.tokens;
    const bool is_token =
        exists && (a.key_mask == nullptr ||
                   a.key_mask[b * a.key_mask_strides[0] + i * a.key_mask_strides[1]] != 0);
    const bool is_position = exists && a.is_position[i] != 0;
    const bool is_marked =
        is_token && !is_position && a.global_mask != nullptr &&
        a.global_mask[b * a.global_mask_strides[0] + i * a.global_mask_strides[1]] != 0;
    int count = 0;
    const int64_t rank = marked + CountBefore(is_marked, of_warp, &count);
    marked += count;
    const bool is_global = is_position || (is_marked && rank < a.most_marked);
    const int64_t place = globals + CountBefore(is_global, of_warp, &count);
    globals += count;
    if (!exists) continue;
    a.lists.is_global[row + i] = is_global ? 1 : 0;
    a.lists.local_keys[row + i] = is_token && !is_global ? 1 : 0;
    a.lists.global_keys[row + i] = is_token && is_global ? 1 : 0;
    if (is_global) {
      a.lists.keys[b * a.most + place] = static_cast<int32_t>(i);
    } else {
      atomicMax(&other, static_cast<int>(i));
    }
  }
  __syncthreads();
  for (int64_t n = globals + static_cast<int>(threadIdx.x); n < a.most; n += kThreads) {
    a.lists.keys[b * a.most + n] = other;
  }
}

const char* LaunchFindGlobals(const FindGlobalsArguments& a, void* stream) {
  return Launch("FindGlobals", &FindGlobals, {a.batch, kThreads}, stream, a);
}

}  // namespace

TFB_KERNEL_TABLE(LongformerKernels, {&LaunchFindGlobals});

}  // namespace tfb::longformer
