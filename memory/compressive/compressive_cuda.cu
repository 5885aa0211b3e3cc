#include "core/cuda/for_each.cuh"
#include "core/cuda/warp.cuh"
#include "memory/compressive/compressive_cuda.h"
#include "memory/compressive/compressive_functors.h"

namespace tfb::compressive {
namespace {

constexpr int kThreads = 256;

// Returns to thread 0 the sum over the block's threads, always in the same order.
__device__ double SumOfBlock(double value) {
  __shared__ double sums[kThreads];
  sums[threadIdx.x] = value;
  for (unsigned half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
  }
  __syncthreads();
  return sums[0];
}

// ---- Attention ----

// A warp merges a row.
__global__ void __launch_bounds__(kRowThreads) MergeParts(MergePartsArguments a) {
  const int64_t row = WarpOfGrid();
  if (row >= a.batch * a.heads * a.tokens) return;
  const int64_t i = row % a.tokens, h = row / a.tokens % a.heads, b = row / a.tokens / a.heads;
  const float own = a.log_sum_exp[row], other = a.other_log_sum_exp[row];
  const float share = 1 / (1 + expf(other - own));
  const int lane = Lane();
  for (int64_t c = lane; c < a.channels; c += kWarp) {
    const int64_t at = Offset(a.out, b, h, i, c);
    Store(a.out, at,
          share * Load(a.out, at) + (1 - share) * Load(a.other, Offset(a.other, b, h, i, c)));
  }
  __syncwarp();
  if (lane == 0) a.log_sum_exp[row] = fmaxf(own, other) + log1pf(expf(-fabsf(own - other)));
}

const char* LaunchMergeParts(const MergePartsArguments& a, void* stream) {
  return LaunchWarps("MergeParts", &MergeParts, a.batch * a.heads * a.tokens, stream, a);
}

// A block does one key; its threads take queries and heads in turns.
__global__ void __launch_bounds__(kThreads) Received(ReceivedArguments a) {
  const int64_t b = blockIdx.x / a.keys, key = blockIdx.x % a.keys;
  double sum = 0;
  for (int64_t n = threadIdx.x; n < a.heads * a.tokens; n += kThreads) {
    const int64_t h = n / a.tokens, i = n % a.tokens;
    const int64_t distance = a.first_distance + i - key;
    if (distance < 0) continue;
    const int64_t row = min(distance, a.distance_rows - 1) * a.heads + h;
    const float *r = a.distances + row * a.head_dim, *u = a.u + h * a.head_dim;
    float score = a.distance_biases[row];
    for (int64_t c = 0; c < a.head_dim; ++c) {
      const float q = Load(a.q, Offset(a.q, b, h, i, c));
      const float k = Load(a.k, Offset(a.k, b, h, key, c));
      score += q * (k + r[c]) + u[c] * k;
    }
    sum += expf(a.scale * score - a.log_sum_exp[(b * a.heads + h) * a.tokens + i]);
  }
  const double total = SumOfBlock(sum);
  if (threadIdx.x == 0) {
    const float mean = static_cast<float>(total / static_cast<double>(a.heads * a.tokens));
    a.use[b * a.places + (a.first + key) % a.places] = isnan(mean) ? INFINITY : mean;
  }
}

const char* LaunchReceived(const ReceivedArguments& a, void* stream) {
  return Launch("Received", &Received, {a.batch * a.keys, kThreads}, stream, a);
}

// A block does one batch row. The place of a row among those that stay is the number of such rows
// before it; a row stays where fewer than `count` rows precede it by use, then by age.
__global__ void __launch_bounds__(kThreads) SelectRows(SelectRowsArguments a) {
  const int64_t b = blockIdx.x;
  const auto use = [&](int64_t n) { return a.use[b * a.places + (a.first + n) % a.places]; };
  int32_t* flags = a.flags + b * a.rows;
  for (int64_t n = threadIdx.x; n < a.rows; n += kThreads) {
    const float own = use(n);
    int64_t better = 0;
    for (int64_t other = 0; other < a.rows; ++other) {
      const float theirs = use(other);
      better += theirs > own || (!(theirs < own) && other < n);
    }
    flags[n] = better < a.count;
  }
  for (int64_t n = threadIdx.x; a.kept != nullptr && n < a.kept_size; n += kThreads) {
    a.kept[b * a.kept_batch_stride + n * a.kept_stride] = -1;
  }
  __syncthreads();
  for (int64_t n = threadIdx.x; n < a.rows; n += kThreads) {
    int64_t place = 0;
    for (int64_t other = 0; other < n; ++other) place += flags[other];
    if (flags[n] == 0 || place >= a.count) continue;
    a.selected[b * a.count + place] = static_cast<int32_t>(n);
    if (a.kept != nullptr) {
      a.kept[b * a.kept_batch_stride + place * a.kept_stride] = static_cast<int32_t>(n);
    }
  }
}

const char* LaunchSelectRows(const SelectRowsArguments& a, void* stream) {
  return Launch("SelectRows", &SelectRows, {a.batch, kThreads}, stream, a);
}

// ---- Losses ----

// A block does one batch row.
__global__ void __launch_bounds__(kThreads) LossOfDifference(LossOfDifferenceArguments a) {
  const int64_t b = blockIdx.x;
  double sum = 0;
  for (int64_t n = threadIdx.x; n < a.rows * a.channels; n += kThreads) {
    const int64_t row = n / a.channels, c = n % a.channels;
    const double difference = static_cast<double>(Load(a.a, Offset(a.a, b, row, c))) -
                              Load(a.b, Offset(a.b, b, row / a.repeat, c));
    sum += difference * difference;
  }
  const double total = SumOfBlock(sum);
  if (threadIdx.x > 0) return;
  const double elements = static_cast<double>(max(a.rows * a.channels, int64_t{1}));
  const double loss = a.mean_square ? total / elements : sqrt(total);
  Store(a.to, b * a.to.strides[0], static_cast<float>(loss));
}

const char* LaunchLossOfDifference(const LossOfDifferenceArguments& a, void* stream) {
  return Launch("LossOfDifference", &LossOfDifference, {a.batch, kThreads}, stream, a);
}

}  // namespace

TFB_KERNEL_TABLE(CompressiveKernels,
                 {&LaunchMergeParts, &LaunchReceived, &LaunchSelectRows, &LaunchLossOfDifference});
TFB_FOR_EACH_IN_ROWS(PooledRows);
TFB_FOR_EACH_IN_ROWS(GradientOfDifference);

}  // namespace tfb::compressive
