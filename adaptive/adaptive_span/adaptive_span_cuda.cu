#include "adaptive/adaptive_span/adaptive_span_cuda.h"
#include "core/cuda/for_each.cuh"
#include "core/cuda/sum_in_runs.cuh"

namespace tfb::adaptive_span {
namespace {

// A warp computes the spans of 8 tokens for 4 heads at a time: its lanes divide the channels, so
// that 12 loads serve 32 multiply-adds, and then exchange sums: lane n ends with the sum of token n
// / 4 and head n % 4.
constexpr int kWarps = 4;
constexpr int kTokens = 8;
constexpr int kHeads = 4;
static_assert(kTokens * kHeads == kWarp, "a sum for each lane");

__global__ void __launch_bounds__(kWarp* kWarps) Gate(GateArguments a) {
  const int lane = Lane();
  const int64_t rows = a.batch * a.tokens, first_row = WarpOfGrid() * kTokens;
  if (first_row >= rows) return;
  // Tokens and heads beyond the last repeat it: their results are not stored.
  int64_t x_offset[kTokens];
#pragma unroll
  for (int r = 0; r < kTokens; ++r) {
    const int64_t row = min(first_row + r, rows - 1);
    x_offset[r] = row / a.tokens * a.x.strides[0] + row % a.tokens * a.x.strides[1];
  }
  for (int64_t first_head = 0; first_head < a.heads; first_head += kHeads) {
    const float* weight[kHeads];
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      weight[h] = a.weight + min(first_head + h, a.heads - 1) * a.channels;
    }
    float sums[kTokens * kHeads] = {};
    for (int64_t c = lane; c < a.channels; c += kWarp) {
      float w[kHeads];
#pragma unroll
      for (int h = 0; h < kHeads; ++h) w[h] = weight[h][c];
#pragma unroll
      for (int r = 0; r < kTokens; ++r) {
        const float x = LoadElement(a.x.data, a.x.element, x_offset[r] + c * a.x.strides[2]);
#pragma unroll
        for (int h = 0; h < kHeads; ++h) sums[r * kHeads + h] += x * w[h];
      }
    }
    const float sum = SumsOfWarp(sums);
    const int64_t row = first_row + lane / kHeads, head = first_head + lane % kHeads;
    if (row < rows && head < a.heads) {
      const int64_t to = (row / a.tokens * a.heads + head) * a.tokens + row % a.tokens;
      const float e = expf(-(sum + a.bias[head]));
      a.spans[to] = a.max_span / (1 + e);
      a.slopes[to] = a.max_span / ((1 + e) * (1 + 1 / e));
    }
  }
}

const char* LaunchGate(const GateArguments& a, void* stream) {
  const int64_t blocks = CeilDiv(a.batch * a.tokens, kWarps * kTokens);
  return Launch("Gate", &Gate, {blocks, kWarp * kWarps}, stream, a);
}

}  // namespace

TFB_KERNEL_TABLE(AdaptiveSpanKernels, {&LaunchGate});

TFB_SUM_IN_RUNS(AddToWeight);
TFB_SUM_IN_RUNS(AddToBias);
TFB_FOR_EACH_IN_ROWS(AddToHidden);

}  // namespace tfb::adaptive_span
