#include "core/cuda/warp.cuh"
#include "memory/knn_lm/knn_lm_cuda.h"
#include "memory/knn_lm/mixture.h"

namespace tfb::knn_lm {
namespace {

// A block mixes one row, or differentiates it. Its warps divide the neighbours among them to compute
// distances; after that a thread does one neighbour, one token of the vocabulary or one channel at a
// time. The weights of a token that several neighbours have are summed by the thread of the first of
// these, in their order; sums over the block are those of its threads, in the order of the warps. So
// the order of threads has no effect.
//   shared memory: k (8 + 4 + 4 + 4) B, 20 KiB for k = 1024

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kWarp;

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

// Returns the sum over the block to all its threads, which call it. `of_warps` is shared.
template <class T>
__device__ T SumOfBlock(T x, T (&of_warps)[kWarps]) {
  x = SumOfWarp(x);
  if (Lane() == 0) of_warps[Warp()] = x;
  __syncthreads();
  T sum = 0;
  for (int w = 0; w < kWarps; ++w) sum += of_warps[w];
  return sum;
}

struct Shared {
  double* distance;  // [k]; of a backward pass then g_y b
  float* exponent;   // [k]: logarithms of the weights; -inf: no neighbour
  int* token;        // [k]: the value; -1: no neighbour
  // [k]: log p of the token, where the neighbour is the first that has it, else NaN; of a backward
  // pass the factors of context - key.
  float* mixed;
};
__device__ Shared SharedOf(int k) {
  Shared shared;
  shared.distance = reinterpret_cast<double*>(DynamicShared());
  shared.exponent = reinterpret_cast<float*>(shared.distance + k);
  shared.token = reinterpret_cast<int*>(shared.exponent + k);
  shared.mixed = reinterpret_cast<float*>(shared.token + k);
  return shared;
}
size_t SharedBytes(const KnnLmArguments& a) {
  return a.k * (sizeof(double) + 2 * sizeof(float) + sizeof(int));
}

// The row of a block: token i of sequence b.
struct Row {
  int64_t index, b, i;
};
__device__ Row RowOfBlock(const KnnLmArguments& a) {
  const int64_t row = blockIdx.x;
  return {row, row / a.tokens, row % a.tokens};
}
__device__ float Element(const DeviceView& view, const Row& row, int64_t n) {
  return Load(view, Offset(view, row.b, row.i, n));
}
__device__ void Write(const DeviceView& view, const Row& row, int64_t n, float value) {
  Store(view, Offset(view, row.b, row.i, n), value);
}
__device__ float LogP(const KnnLmArguments& a, const Row& row, int64_t y) {
  return static_cast<const float*>(a.log_p.data)[Offset(a.log_p, row.b, row.i, y)];
}

// Measures distances as the search does: differences in fp32, their squares in float64.
__device__ void MeasureNeighbours(const KnnLmArguments& a, const Row& row, const Shared& shared) {
  for (int n = Warp(); n < a.k; n += kWarps) {
    const int64_t entry = a.neighbours[row.index * a.k + n];
    double sum = 0;
    for (int64_t c = Lane(); entry >= 0 && c < a.dim; c += kWarp) {
      const double difference = Element(a.context, row, c) - a.keys[entry * a.dim + c];
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

// Computes the tokens and exponents of the neighbours, and returns the nearest to all threads.
// `nearest` is shared.
__device__ Best Weigh(const KnnLmArguments& a, const Row& row, const Shared& shared,
                      Best* nearest) {
  MeasureNeighbours(a, row, shared);
  __syncthreads();
  if (Warp() == 0) {
    const Best best = Nearest(a, shared);
    if (Lane() == 0) *nearest = best;
  }
  __syncthreads();
  const Best best = *nearest;
  for (int n = threadIdx.x; n < a.k; n += kThreads) {
    const double exponent = (-best.score - shared.distance[n]) / a.temperature;
    shared.exponent[n] = shared.token[n] < 0 ? -INFINITY : static_cast<float>(exponent);
  }
  __syncthreads();
  return best;
}
__device__ bool IsFound(const KnnLmArguments& a, const Best& nearest) {
  return nearest.index < a.k;
}

// Returns the lambda that is given for a row, or the one of all.
__device__ float GivenLambda(const KnnLmArguments& a, const Row& row) {
  if (a.lambdas == nullptr) return a.lambda;
  return a.lambdas[row.b * a.lambda_strides[0] + row.i * a.lambda_strides[1]];
}
__device__ float LambdaOf(const KnnLmArguments& a, const Row& row) {
  return InRange(GivenLambda(a, row));
}

// Returns the logarithm of the sum of the weights that have neighbour n's token, or NaN where there is
// no neighbour, or an earlier one has the same token. It works in logarithms: the weight of a far
// neighbour may underflow fp32.
__device__ float LogMassOf(const Shared& shared, int k, int n) {
  const int token = shared.token[n];
  if (token < 0) return NAN;
  float log_mass = -INFINITY;
  for (int other = 0; other < k; ++other) {
    if (shared.token[other] != token) continue;
    if (other < n) return NAN;
    log_mass = LogAdd(log_mass, shared.exponent[other]);
  }
  return log_mass;
}

// ---- The forward pass ----

// Returns the sum of the weights. The first warp calls it.
__device__ float Summarize(const KnnLmArguments& a, const Row& row, const Shared& shared,
                           const Best& nearest, float* statistics) {
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
    const bool found = IsFound(a, nearest);
    statistics[0] = found && shared.token[nearest.index] == likely.index ? 1 : 0;
    statistics[1] = found ? LambdaOf(a, row) * mass / total : 0;
  }
  return total;
}

__global__ void __launch_bounds__(kThreads) Mix(KnnLmArguments a, KnnLmOutputs outputs) {
  __shared__ Best of_block;
  __shared__ float sum_of_weights;
  const Shared shared = SharedOf(a.k);
  const Row row = RowOfBlock(a);
  const Best nearest = Weigh(a, row, shared, &of_block);
  if (Warp() == 0) {
    const float total = Summarize(a, row, shared, nearest, outputs.statistics + 2 * row.index);
    if (Lane() == 0) sum_of_weights = total;
  }
  __syncthreads();
  const Mixture mixture = MixtureOf(LambdaOf(a, row));
  const float log_total = logf(sum_of_weights);
  for (int n = threadIdx.x; n < a.k; n += kThreads) {
    const float log_mass = LogMassOf(shared, a.k, n);
    shared.mixed[n] =
        isnan(log_mass) ? NAN : mixture.LogP(LogP(a, row, shared.token[n]), log_mass - log_total);
  }
  __syncthreads();  // log_p of the neighbours' tokens has been read
  const float log_share = IsFound(a, nearest) ? mixture.log_model : 0;
  for (int64_t y = threadIdx.x; y < a.vocabulary; y += kThreads) {
    Write(outputs.out, row, y, log_share + LogP(a, row, y));
  }
  __syncthreads();
  for (int n = threadIdx.x; n < a.k; n += kThreads) {
    if (!isnan(shared.mixed[n])) Write(outputs.out, row, shared.token[n], shared.mixed[n]);
  }
}

// ---- The backward pass ----

// Differentiates a row without neighbours, whose prediction is the model's.
__device__ void DifferentiateModel(const KnnLmArguments& a, const KnnLmGradients& g,
                                   const Row& row) {
  for (int64_t y = threadIdx.x; y < a.vocabulary; y += kThreads) {
    g.log_p[row.index * a.vocabulary + y] = Element(g.out, row, y);
  }
  for (int64_t c = threadIdx.x; g.context.data != nullptr && c < a.dim; c += kThreads) {
    Write(g.context, row, c, 0);
  }
  if (threadIdx.x == 0 && g.lambda.data != nullptr) Write(g.lambda, row, 0, 0);
}

// Writes log p_kNN of the whole vocabulary; `log_total` is the logarithm of the sum of the weights.
// Before, the tokens have -inf.
__device__ void WriteNeighbourLogP(const KnnLmArguments& a, const Shared& shared, float log_total,
                                   float* log_p_knn) {
  for (int n = threadIdx.x; n < a.k; n += kThreads) {
    const float log_mass = LogMassOf(shared, a.k, n);
    if (!isnan(log_mass)) log_p_knn[shared.token[n]] = log_mass - log_total;
  }
}

// Writes the gradient of the context, a thread a channel, which sums over the neighbours in their order.
__device__ void DifferentiateDistances(const KnnLmArguments& a, const Row& row,
                                       const Shared& shared, const DeviceView& gradient) {
  for (int64_t c = threadIdx.x; c < a.dim; c += kThreads) {
    const float x = Element(a.context, row, c);
    float sum = 0;
    for (int n = 0; n < a.k; ++n) {
      if (shared.token[n] < 0) continue;
      const int64_t entry = a.neighbours[row.index * a.k + n];
      sum += shared.mixed[n] * (x - a.keys[entry * a.dim + c]);
    }
    Write(gradient, row, c, sum);
  }
}

__global__ void __launch_bounds__(kThreads) Differentiate(KnnLmArguments a, KnnLmGradients g) {
  __shared__ Best of_block;
  __shared__ float weights_of_warps[kWarps];
  __shared__ double products_of_warps[kWarps];
  __shared__ float lambda_of_warps[kWarps];
  const Shared shared = SharedOf(a.k);
  const Row row = RowOfBlock(a);
  const Best nearest = Weigh(a, row, shared, &of_block);
  if (!IsFound(a, nearest)) return DifferentiateModel(a, g, row);

  // The row of the gradient is log p_kNN first.
  float* const gradient = g.log_p + row.index * a.vocabulary;
  for (int64_t y = threadIdx.x; y < a.vocabulary; y += kThreads) gradient[y] = -INFINITY;
  float total = 0;
  for (int n = threadIdx.x; n < a.k; n += kThreads) total += expf(shared.exponent[n]);
  const float log_total = logf(SumOfBlock(total, weights_of_warps));
  WriteNeighbourLogP(a, shared, log_total, gradient);
  __syncthreads();

  // In double, in which products of floats are exact: those of a neighbour that is alone cancel.
  const Mixture mixture = MixtureOf(LambdaOf(a, row));
  double sum = 0;
  for (int n = threadIdx.x; n < a.k; n += kThreads) {
    const int token = shared.token[n];
    if (token < 0) continue;
    const float log_p = mixture.LogP(LogP(a, row, token), gradient[token]);
    shared.distance[n] = static_cast<double>(Element(g.out, row, token)) *
                         mixture.ByNeighbour(shared.exponent[n] - log_total, log_p);
    sum += shared.distance[n];
  }
  sum = SumOfBlock(sum, products_of_warps);  // all have read log p_kNN
  for (int n = threadIdx.x; n < a.k; n += kThreads) {
    const double weight = expf(shared.exponent[n] - log_total);
    if (shared.token[n] >= 0) {
      shared.mixed[n] = DifferenceFactor(shared.distance[n] - weight * sum, a.temperature);
    }
  }

  float of_lambda = 0;
  for (int64_t y = threadIdx.x; y < a.vocabulary; y += kThreads) {
    const float log_p_lm = LogP(a, row, y), log_p_knn = gradient[y];
    const float log_p = mixture.LogP(log_p_lm, log_p_knn), of_y = Element(g.out, row, y);
    of_lambda += of_y * Mixture::ByLambda(log_p_lm, log_p_knn, log_p);
    gradient[y] = of_y * mixture.ByModel(log_p_lm, log_p);
  }
  of_lambda = SumOfBlock(of_lambda, lambda_of_warps);  // all factors are written
  if (threadIdx.x == 0 && g.lambda.data != nullptr) {
    const bool counts = GivenLambda(a, row) == LambdaOf(a, row);
    Write(g.lambda, row, 0, counts ? of_lambda : 0);
  }
  if (g.context.data != nullptr) DifferentiateDistances(a, row, shared, g.context);
}

const char* LaunchMix(const KnnLmArguments& a, const KnnLmOutputs& outputs, void* stream) {
  return Launch("Mix", &Mix, {a.rows, kThreads, SharedBytes(a)}, stream, a, outputs);
}
const char* LaunchDifferentiate(const KnnLmArguments& a, const KnnLmGradients& gradients,
                                void* stream) {
  return Launch("Differentiate", &Differentiate, {a.rows, kThreads, SharedBytes(a)}, stream, a,
                gradients);
}

}  // namespace

TFB_KERNEL_TABLE(KnnLmKernels, {&LaunchMix, &LaunchDifferentiate});

}  // namespace tfb::knn_lm
