#include "adaptive/calm/calm_cuda.h"
#include "core/layers/layer_rows.cuh"

namespace tfb::calm {
namespace {

// Returns 1 / sum_v exp(z_v - z_1) for the largest logit z_1, minus the same for the next one.
__device__ float SoftmaxResponse(const float* logits, int64_t vocabulary) {
  float first = -INFINITY, second = -INFINITY;
  for (int64_t v = Lane(); v < vocabulary; v += kWarp) {
    second = fmaxf(second, fminf(first, logits[v]));
    first = fmaxf(first, logits[v]);
  }
  for (int step = kWarp / 2; step > 0; step /= 2) {
    const float other = __shfl_xor_sync(~0u, first, step);
    second = fmaxf(fmaxf(second, __shfl_xor_sync(~0u, second, step)), fminf(first, other));
    first = fmaxf(first, other);
  }
  float sum = 0;
  for (int64_t v = Lane(); v < vocabulary; v += kWarp) sum += expf(logits[v] - first);
  return (1 - expf(second - first)) / SumOfWarp(sum);
}

__device__ float Cosine(const float* a, const float* b, int64_t channels) {
  float dot = 0, of_a = 0, of_b = 0;
  for (int64_t c = Lane(); c < channels; c += kWarp) {
    dot += a[c] * b[c];
    of_a += a[c] * a[c];
    of_b += b[c] * b[c];
  }
  return SumOfWarp(dot) / sqrtf(SumOfWarp(of_a) * SumOfWarp(of_b));
}

__device__ float Logit(const float* w, float bias, const float* state, int64_t channels) {
  float dot = 0;
  for (int64_t c = Lane(); c < channels; c += kWarp) dot += w[c] * state[c];
  return SumOfWarp(dot) + bias;
}

__device__ float ThresholdAt(const Threshold& a, int64_t t) {
  const float value = a.constant + a.scale * expf(a.rate * static_cast<float>(t));
  return fminf(fmaxf(value, 0.0f), a.most);
}

// A warp does a row.
__global__ void __launch_bounds__(kRowThreads) Decide(ConfidenceArguments a) {
  const int64_t row = RowOfWarp(a.list, a.rows);
  if (row < 0) return;
  const float* state = a.state + row * a.channels;
  float confidence;
  if (a.confidence == Confidence::kSoftmax) {
    confidence = SoftmaxResponse(state, a.channels);
  } else if (a.confidence == Confidence::kSaturation) {
    confidence = Cosine(state, a.before + row * a.channels, a.channels);
  } else {
    const float z = Logit(a.weights, *a.bias, state, a.channels);
    if (Lane() == 0 && a.logits.data != nullptr) {
      const DeviceLogits& to = a.logits;
      to.data[row / a.tokens * to.batch_stride + row % a.tokens * to.token_stride] = z;
    }
    confidence = 1 / (1 + expf(-z));
  }
  if (Lane() == 0 && a.leaves != nullptr) {
    a.leaves[row] =
        confidence >= ThresholdAt(a.threshold, a.first_position + row % a.tokens) ? 1 : 0;
  }
}

const char* LaunchDecide(const ConfidenceArguments& a, void* stream) {
  return LaunchWarps("Decide", &Decide, a.rows, stream, a);
}

}  // namespace

TFB_KERNEL_TABLE(CalmKernels, {&LaunchDecide});

}  // namespace tfb::calm
