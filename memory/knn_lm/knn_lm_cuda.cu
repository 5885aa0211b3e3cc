#include "core/cuda/warp.cuh"
#include "memory/knn_lm/knn_lm_cuda.h"

namespace tfb::knn_lm {
namespace {

// A block mixes one row. Its warps divide the neighbours among them to compute distances; after
// that a thread does one neighbour or one token of the vocabulary at a time. The weights of a token
// that several neighbours have are summed by the thread of the first of these, in their order, so
// that the order of threads has no effect.
//   shared memory: k (8 + 4 + 4 + 4) B, 20 KiB for k = 1024

constexpr int kThreads = 128;

// Finds the largest of the lanes' scores, and among equal ones the lowest index.
struct Best {
  double score;
  int index;

  __device__ void Take(double other, int other_index) {
    if (other < score || (other == score && other_index >= index)) return;
    score = other;
    index = other_index;
  }
};
__device__ Best WarpBest(Best best) {
  for (int step = kWarp / 2; step > 0; step /= 2) {
    const double score = __shfl_xor_sync(kAllLanes, best.score, step);
    const int index = __shfl_xor_sync(kAllLanes, best.index, step);
    best.Take(score, index);
  }
  return best;
}

struct Shared {
  double* distance;  // [k]
  float* exponent;   // [k]: logarithms of the weights; -inf: no neighbour
  int* token;        // [k]: the value; -1: no neighbour
  float* mixed;  // [k]: log p of the token, where the neighbour is the first that has it; else NaN
};

struct Summary {
  Best nearest;
  float total;  // sum of the weights
};

__device__ int64_t Offset(const DeviceView& view, const KnnLmArguments& a, int64_t row) {
  return row / a.tokens * view.strides[0] + row % a.tokens * view.strides[1];
}
__device__ float LogP(const KnnLmArguments& a, int64_t row, int64_t y) {
  return static_cast<const float*>(a.log_p.data)[Offset(a.log_p, a, row) + y * a.log_p.strides[2]];
}
__device__ void Write(const KnnLmArguments& a, int64_t row, int64_t y, float value) {
  StoreElement(a.out.data, a.out.element, Offset(a.out, a, row) + y * a.out.strides[2], value);
}

// Measures distances as the search does: differences in fp32, their squares in float64.
__device__ void MeasureNeighbours(const KnnLmArguments& a, int64_t row, const Shared& shared) {
  const int64_t context = Offset(a.context, a, row);
  for (int n = Warp(); n < a.k; n += kThreads / kWarp) {
    const int64_t entry = a.neighbours[row * a.k + n];
    double sum = 0;
    for (int64_t c = Lane(); entry >= 0 && c < a.dim; c += kWarp) {
      const float x =
          LoadElement(a.context.data, a.context.element, context + c * a.context.strides[2]);
      const double difference = x - a.keys[entry * a.dim + c];
      sum += difference * difference;
    }
    sum = SumOfWarp(sum);
    if (Lane() != 0) continue;
    shared.distance[n] = sum;
    shared.token[n] = entry >= 0 && isfinite(sum) ? a.values[entry] : -1;
  }
}

__device__ Best Nearest(const KnnLmArguments& a, const Shared& shared) {
  Best best = {-INFINITY, INT32_MAX};
  for (int n = Lane(); n < a.k; n += kWarp) {
    if (shared.token[n] >= 0) best.Take(-shared.distance[n], n);
  }
  return WarpBest(best);
}

__device__ float LambdaOf(const KnnLmArguments& a, int64_t row) {
  if (a.lambdas == nullptr) return a.lambda;
  const float lambda =
      a.lambdas[row / a.tokens * a.lambda_strides[0] + row % a.tokens * a.lambda_strides[1]];
  return lambda < 0 ? 0 : lambda > 1 ? 1 : lambda;
}

// Returns the sum of the weights. The first warp calls it.
__device__ float Summarize(const KnnLmArguments& a, int64_t row, const Shared& shared,
                           const Best& nearest) {
  Best likely = {-INFINITY, INT32_MAX};
  for (int64_t y = Lane(); y < a.vocabulary; y += kWarp) {
    likely.Take(LogP(a, row, y), static_cast<int>(y));
  }
  likely = WarpBest(likely);
  float total = 0, mass = 0;
  for (int n = Lane(); n < a.k; n += kWarp) {
    const float weight = expf(shared.exponent[n]);
    total += weight;
    mass += shared.token[n] == likely.index ? weight : 0;
  }
  total = SumOfWarp(total);
  mass = SumOfWarp(mass);
  if (Lane() == 0) {
    const bool found = nearest.index < a.k;
    a.statistics[2 * row] = found && shared.token[nearest.index] == likely.index ? 1 : 0;
    a.statistics[2 * row + 1] = found ? LambdaOf(a, row) * mass / total : 0;
  }
  return total;
}

// Returns log(exp(a) + exp(b)).
__device__ float LogAdd(float a, float b) {
  const float max = fmaxf(a, b);
  return max == -INFINITY ? max : max + log1pf(expf(fminf(a, b) - max));
}

// Returns log p of neighbour n's token, or NaN where an earlier neighbour has the same token. It
// works in logarithms: the weight of a far neighbour may underflow fp32.
__device__ float MixedOf(const KnnLmArguments& a, int64_t row, const Shared& shared, int n,
                         float total) {
  const int token = shared.token[n];
  if (token < 0) return NAN;
  float log_mass = -INFINITY;
  for (int other = 0; other < a.k; ++other) {
    if (shared.token[other] != token) continue;
    if (other < n) return NAN;
    log_mass = LogAdd(log_mass, shared.exponent[other]);
  }
  const float lambda = LambdaOf(a, row);
  return LogAdd(log1pf(-lambda) + LogP(a, row, token), logf(lambda) + (log_mass - logf(total)));
}

__global__ void __launch_bounds__(kThreads) Mix(KnnLmArguments a) {
  __shared__ Summary summary;
  Shared shared;
  shared.distance = reinterpret_cast<double*>(DynamicShared());
  shared.exponent = reinterpret_cast<float*>(shared.distance + a.k);
  shared.token = reinterpret_cast<int*>(shared.exponent + a.k);
  shared.mixed = reinterpret_cast<float*>(shared.token + a.k);
  const int64_t row = blockIdx.x;

  MeasureNeighbours(a, row, shared);
  __syncthreads();
  if (Warp() == 0) {
    const Best nearest = Nearest(a, shared);
    if (Lane() == 0) summary.nearest = nearest;
  }
  __syncthreads();
  const Best nearest = summary.nearest;
  for (int n = threadIdx.x; n < a.k; n += kThreads) {
    const double exponent = (-nearest.score - shared.distance[n]) / a.temperature;
    shared.exponent[n] = shared.token[n] < 0 ? -INFINITY : static_cast<float>(exponent);
  }
  __syncthreads();
  if (Warp() == 0) {
    const float total = Summarize(a, row, shared, nearest);
    if (Lane() == 0) summary.total = total;
  }
  __syncthreads();
  for (int n = threadIdx.x; n < a.k; n += kThreads) {
    shared.mixed[n] = MixedOf(a, row, shared, n, summary.total);
  }
  __syncthreads();  // log_p of the neighbours' tokens has been read
  const float log_share = nearest.index < a.k ? log1pf(-LambdaOf(a, row)) : 0;
  for (int64_t y = threadIdx.x; y < a.vocabulary; y += kThreads) {
    Write(a, row, y, log_share + LogP(a, row, y));
  }
  __syncthreads();
  for (int n = threadIdx.x; n < a.k; n += kThreads) {
    if (!isnan(shared.mixed[n])) Write(a, row, shared.token[n], shared.mixed[n]);
  }
}

const char* LaunchMix(const KnnLmArguments& a, void* stream) {
  const size_t shared_bytes = a.k * (sizeof(double) + 2 * sizeof(float) + sizeof(int));
  return Launch("Mix", &Mix, {a.rows, kThreads, shared_bytes}, stream, a);
}

}  // namespace

TFB_KERNEL_TABLE(KnnLmKernels, {&LaunchMix});

}  // namespace tfb::knn_lm
