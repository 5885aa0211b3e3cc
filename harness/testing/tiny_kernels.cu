#include "core/cuda/warp.cuh"
#include "harness/testing/tiny_kernels.h"

namespace tfb {
namespace {

// Returns NaN where any is NaN.
__device__ float LargestOfWarp(float x) {
  for (int width = kWarp / 2; width > 0; width /= 2) {
    const float other = __shfl_xor_sync(~0u, x, width);
    if (other > x || isnan(other)) x = other;
  }
  return x;
}
// Sums in any order, which is the fault.
__device__ float SumByAtomics(float x, float* sum) {
  if (threadIdx.x == 0) *sum = 0;
  __syncwarp();
  atomicAdd(sum, x);
  __syncwarp();
  return *sum;
}

__device__ bool Sees(const TinyCall& call, int64_t b, int64_t i, int64_t j) {
  const int64_t ahead = j - (i + call.first_query);
  if (call.causal && ahead > 0) return false;
  if (ahead > call.window || -ahead > call.window) return false;
  return call.key_mask == nullptr ||
         call.key_mask[b * call.mask_strides[0] + j * call.mask_strides[1]] != 0;
}

// A warp does a query.
__global__ void Attend(const TinyCall call) {
  const int64_t row = blockIdx.x;
  const int64_t i = row % call.queries, h = row / call.queries % call.heads;
  const int64_t b = row / call.queries / call.heads, kv_head = h / call.group;
  const int lane = static_cast<int>(threadIdx.x);
  const float scale = call.score_factor * call.gain[h] / sqrtf(static_cast<float>(call.head_dim));
  float* const scores = call.scores + row * (call.keys + 1);
  const bool adds = call.fault == TinyKernelFault::kReadsUnwritten && row == 0 && call.keys > 0;
  const float found = adds ? scores[0] : 0;

  float max = -INFINITY;
  for (int64_t j = lane; j < call.keys; j += kWarp) {
    float score = -INFINITY;
    if (Sees(call, b, i, j)) {
      float dot = 0;
      for (int64_t c = 0; c < call.head_dim; ++c) {
        dot += Load(call.q, Offset(call.q, b, h, i, c)) *
               Load(call.k, Offset(call.k, b, kv_head, j, c));
      }
      score = scale * dot;
    }
    scores[j] = score;
    if (score > max || isnan(score)) max = score;
  }
  max = LargestOfWarp(max);

  // Scores become weights; a score of -1 marks a key that is not seen.
  float sum = 0;
  for (int64_t j = lane; j < call.keys; j += kWarp) {
    const float weight = scores[j] == -INFINITY ? -1 : expf(scores[j] - max);
    scores[j] = weight;
    if (!(weight < 0)) sum += weight;
  }
  const bool by_atomics = call.fault == TinyKernelFault::kDependsOnOrder;
  sum = by_atomics ? SumByAtomics(sum, scores + call.keys) : SumOfWarp(sum);
  __syncwarp();

  const bool seen = max != -INFINITY;
  for (int64_t c = lane; c < call.value_dim; c += kWarp) {
    float y = 0;
    for (int64_t j = 0; j < call.keys; ++j) {
      if (!(scores[j] < 0)) y += scores[j] * Load(call.v, Offset(call.v, b, kv_head, j, c));
    }
    Store(call.out, Offset(call.out, b, h, i, c), (seen ? y / sum : 0) + 1e-3f * found);
  }
  if (lane != 0) return;
  if (call.log_sum_exp.data != nullptr) {
    Store(call.log_sum_exp, Offset(call.log_sum_exp, b, h, i, 0),
          seen ? max + logf(sum) : -INFINITY);
  }
  const bool last = row + 1 == call.batch * call.heads * call.queries;
  if (call.fault == TinyKernelFault::kWritesBehindOutput && last) {
    Store(call.out, Offset(call.out, b, h, i, call.value_dim), 0);
  }
}

__global__ void Copy(const TinyCopy copy) {
  const int64_t token = blockIdx.x;
  const int64_t t = token % copy.tokens, h = token / copy.tokens % copy.heads;
  const int64_t b = token / copy.tokens / copy.heads;
  for (int64_t c = threadIdx.x; c < copy.channels; c += kWarp) {
    Store(copy.to, Offset(copy.to, b, h, t, c), Load(copy.from, Offset(copy.from, b, h, t, c)));
  }
}

const char* LaunchAttend(const TinyCall& call, void* stream) {
  return Launch("Attend", &Attend, {call.batch * call.heads * call.queries, kWarp}, stream, call);
}

const char* LaunchCopy(const TinyCopy& copy, void* stream) {
  return Launch("Copy", &Copy, {copy.batch * copy.heads * copy.tokens, kWarp}, stream, copy);
}

}  // namespace

TFB_KERNEL_TABLE(TinyKernels, {&LaunchAttend, &LaunchCopy});

}  // namespace tfb
