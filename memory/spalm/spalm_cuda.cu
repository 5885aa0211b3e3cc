#include "core/cuda/kernel.cuh"
#include "memory/spalm/spalm_cuda.h"

namespace tfb::spalm {
namespace {

// A block computes one row of z. Its warps divide the scores of the neighbours and of the gate
// among them; the first warp turns the scores into weights; then each thread does one channel at a
// time, summing the neighbours in their order.
//   shared memory: k (4 + 4) B and the gate's score

constexpr int kWarp = 32;
constexpr int kThreads = 128;
constexpr unsigned kAllLanes = 0xffffffffu;

__device__ float NegativeInfinity() { return __int_as_float(0xff800000); }
__device__ int Lane() { return static_cast<int>(threadIdx.x) % kWarp; }
__device__ int Warp() { return static_cast<int>(threadIdx.x) / kWarp; }

__device__ float WarpSum(float x) {
  for (int step = kWarp / 2; step > 0; step /= 2) x += __shfl_xor_sync(kAllLanes, x, step);
  return x;
}
__device__ float WarpMax(float x) {
  for (int step = kWarp / 2; step > 0; step /= 2) {
    x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, step));
  }
  return x;
}

__device__ float X(const SpalmArguments& a, int64_t row, int64_t c) {
  const int64_t offset = row / a.tokens * a.x.strides[0] + row % a.tokens * a.x.strides[1];
  return LoadElement(a.x.data, a.x.element, offset + c * a.x.strides[2]);
}

// Returns x . vector, computed by a warp.
__device__ float DotWith(const SpalmArguments& a, int64_t row, const float* vector) {
  float sum = 0;
  for (int64_t c = Lane(); c < a.dim; c += kWarp) sum += X(a, row, c) * vector[c];
  return WarpSum(sum);
}

// Turns scores into weights that sum to 1, with 0 where there is no neighbour. Returns false where
// there is none at all. A warp calls it.
__device__ bool Softmax(const int* tokens, int k, float* scores) {
  float max = NegativeInfinity(), sum = 0, found = 0;
  for (int n = Lane(); n < k; n += kWarp) {
    found = tokens[n] >= 0 ? 1 : found;
    max = fmaxf(max, scores[n]);
  }
  if (WarpMax(found) == 0) return false;
  max = WarpMax(max);
  for (int n = Lane(); n < k; n += kWarp) {
    scores[n] = tokens[n] < 0 ? 0 : expf(scores[n] - max);
    sum += scores[n];
  }
  sum = WarpSum(sum);
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
    const float score = n < a.k && token < 0 ? NegativeInfinity() : DotWith(a, row, vector);
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
  if (a.rows > INT32_MAX) return "more tokens than a grid has blocks";
  return Launch(
      "Aggregate", &Aggregate,
      {dim3(static_cast<unsigned>(a.rows)), dim3(kThreads), a.k * (sizeof(float) + sizeof(int))},
      stream, a);
}

}  // namespace

TFB_KERNEL_TABLE(SpalmKernels, {&LaunchAggregate});

}  // namespace tfb::spalm
