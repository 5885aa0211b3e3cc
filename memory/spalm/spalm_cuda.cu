#include "core/cuda/warp.cuh"
#include "memory/spalm/spalm_cuda.h"

namespace tfb::spalm {
namespace {

// A block computes one row of z. Its warps divide the scores of the neighbours and of the gate
// among them; the first warp turns the scores into weights; then each thread does one channel at a
// time, summing the neighbours in their order.
//   shared memory: k (4 + 4) B and the gate's score

constexpr int kThreads = 128;

__device__ float X(const SpalmArguments& a, int64_t row, int64_t c) {
  return Load(a.x, Offset(a.x, row / a.tokens, row % a.tokens, c));
}

// Returns x . vector, computed by a warp.
__device__ float DotWith(const SpalmArguments& a, int64_t row, const float* vector) {
  float sum = 0;
  for (int64_t c = Lane(); c < a.dim; c += kWarp) sum += X(a, row, c) * vector[c];
  return SumOfWarp(sum);
}

// Turns scores into weights that sum to 1, with 0 where there is no neighbour. Returns false where
// there is none at all. A warp calls it.
__device__ bool Softmax(const int* tokens, int k, float* scores) {
  float max = -INFINITY, sum = 0, found = 0;
  for (int n = Lane(); n < k; n += kWarp) {
    found = tokens[n] >= 0 ? 1 : found;
    max = fmaxf(max, scores[n]);
  }
  if (MaxOfWarp(found) == 0) return false;
  max = MaxOfWarp(max);
  for (int n = Lane(); n < k; n += kWarp) {
    scores[n] = tokens[n] < 0 ? 0 : expf(scores[n] - max);
    sum += scores[n];
  }
  sum = SumOfWarp(sum);
  for (int n = Lane(); n < k; n += kWarp) scores[n] /= sum;
  return true;
}

__global__ void __launch_bounds__(kThreads) Aggregate(SpalmArguments a) {
  __shared__ float gate;
  float* const weights = reinterpret_cast<float*>(DynamicShared());  // [k]
  int* const tokens = reinterpret_cast<int*>(weights + a.k);         // [k]: -1 for no neighbour
  const int64_t row = blockIdx.x;

  for (int n = Warp(); n <= a.k; n += kThreads / kWarp) {
    const int64_t entry = n < a.k ? a.neighbours[row * a.k + n] : -1;
    const int token = entry >= 0 ? a.values[entry] : -1;
    const float* vector = n == a.k ? a.gate : a.embeddings + (token < 0 ? 0 : token) * a.dim;
    const float score = n < a.k && token < 0 ? -INFINITY : DotWith(a, row, vector);
    if (Lane() != 0) continue;
    if (n == a.k) {
      gate = 1 / (1 + expf(-score));
    } else {
      weights[n] = score;
      tokens[n] = token;
    }
  }
  __syncthreads();
  if (Warp() == 0) {
    const bool found = Softmax(tokens, a.k, weights);
    if (Lane() == 0) {
      if (!found) gate = 1;
      a.statistics[row] = gate;
    }
  }
  __syncthreads();
  const float g = gate;
  for (int64_t c = threadIdx.x; c < a.dim; c += kThreads) {
    float mean = 0;
    for (int n = 0; n < a.k; ++n) {
      if (tokens[n] >= 0) mean += weights[n] * a.embeddings[tokens[n] * a.dim + c];
    }
    a.z[row * a.dim + c] = (1 - g) * mean + g * X(a, row, c);
  }
}

const char* LaunchAggregate(const SpalmArguments& a, void* stream) {
  const size_t shared_bytes = a.k * (sizeof(float) + sizeof(int));
  return Launch("Aggregate", &Aggregate, {a.rows, kThreads, shared_bytes}, stream, a);
}

}  // namespace

TFB_KERNEL_TABLE(SpalmKernels, {&LaunchAggregate});

}  // namespace tfb::spalm
