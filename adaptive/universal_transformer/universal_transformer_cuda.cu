// A warp has a row, each lane every 32nd channel.
#include "adaptive/universal_transformer/universal_transformer_cuda.h"
#include "adaptive/universal_transformer/universal_transformer_functors.h"
#include "core/cuda/for_each.cuh"
#include "core/cuda/sum_in_runs.cuh"
#include "core/layers/layer_rows.cuh"
#include "core/layers/listed_rows_functor.h"

namespace tfb::universal_transformer {
namespace {

// Decides for a token that runs; `dot` is the lane's part of w . row. Returns the weight of the
// step's state.
__device__ float Decide(const HaltingArguments& a, float dot, int64_t row, int64_t step,
                        int32_t* stop) {
  const float p = 1 / (1 + expf(-(SumOfWarp(dot) + a.bias[0])));
  const float total = a.total[row], sum = total + p;
  const bool reaches = a.above ? sum > a.threshold : sum >= a.threshold;
  const bool halts = reaches || step + 1 == a.limit;
  const bool takes_remainder = reaches || (halts && a.remainder_at_limit);
  const float weight = takes_remainder ? 1 - total : p;
  __syncwarp();  // all lanes have read the total
  if (Lane() == 0) {
    a.total[row] = sum;
    a.weight[row] = weight;
    a.ponder[row] = static_cast<float>(step + 1) + (takes_remainder ? 1 - total : 0.0f);
    if (halts) stop[row] = static_cast<int32_t>(step + 1);
    if (a.takes_remainder != nullptr) a.takes_remainder[row] = takes_remainder ? 1 : 0;
  }
  return weight;
}

__global__ void __launch_bounds__(kRowThreads) BeginSteps(BeginStepsArguments a) {
  const int64_t row = WarpOfGrid();
  if (row >= a.rows) return;
  const int64_t b = row / a.tokens, t = row % a.tokens;
  const int64_t x = b * a.x.strides[0] + t * a.x.strides[1];
  for (int64_t c = Lane(); c < a.channels; c += kWarp) {
    a.state[row * a.channels + c] = LoadElement(a.x.data, a.x.element, x + c * a.x.strides[2]);
    if (a.output != nullptr) a.output[row * a.channels + c] = 0;
  }
  const bool is_token =
      a.key_mask == nullptr || a.key_mask[b * a.mask_strides[0] + t * a.mask_strides[1]] != 0;
  for (int64_t c = Lane(); !is_token && c < a.key_channels; c += kWarp) {
    a.keys_values[row * a.key_channels + c] = 0;
  }
  if (Lane() != 0) return;
  if (a.goes_on != nullptr) a.goes_on[row] = is_token ? 1 : 0;
  a.total[row] = 0;
  a.ponder[row] = is_token && !a.halts ? static_cast<float>(a.limit) : 0;
  a.stop[row] = is_token ? static_cast<int32_t>(a.limit) : 0;
}

const char* LaunchBegin(const BeginStepsArguments& a, void* stream) {
  return LaunchWarps("BeginSteps", &BeginSteps, a.rows, stream, a);
}

__global__ void __launch_bounds__(kRowThreads) ReadStates(ReadStatesArguments a) {
  const int64_t row = RowOfWarp(a.list, a.rows);
  if (row < 0) return;
  const float* position = a.positions + row % a.tokens * a.channels;
  const bool halts = a.halting.weight_of_channels != nullptr && a.step < a.stop[row];
  float dot = 0;
  for (int64_t c = Lane(); c < a.channels; c += kWarp) {
    const float placed = a.state[row * a.channels + c] + position[c], u = placed + a.time[c];
    a.placed[row * a.channels + c] = placed;
    a.read[row * a.channels + c] = u;
    if (halts) dot += a.halting.weight_of_channels[c] * u;
  }
  if (halts) Decide(a.halting, dot, row, a.step, a.stop);
}

const char* LaunchRead(const ReadStatesArguments& a, void* stream) {
  return LaunchWarps("ReadStates", &ReadStates, a.rows, stream, a);
}

// Tells whether a row is computed in a step: a token's that runs, or that is recomputed.
__device__ bool IsComputed(int32_t stop, int64_t step, bool recomputes) {
  return step < stop || (recomputes && stop > 0);
}

__global__ void __launch_bounds__(kRowThreads) KeepStates(KeepStatesArguments a) {
  const int64_t row = RowOfWarp(a.list, a.rows);
  if (row < 0 || !IsComputed(a.stop[row], a.step, a.recomputes)) return;
  const float* made = a.made + row * a.channels;
  const bool runs = a.step < a.stop[row];
  float weight = 1;
  if (runs && a.halting.weight_of_channels != nullptr) {
    float dot = 0;
    for (int64_t c = Lane(); c < a.channels; c += kWarp) {
      dot += a.halting.weight_of_channels[c] * made[c];
    }
    weight = Decide(a.halting, dot, row, a.step, a.stop);
  } else if (a.weight != nullptr) {
    weight = a.weight[row];
  }
  const float kept = a.is_mix ? 1 - weight : 1;
  for (int64_t c = Lane(); c < a.channels; c += kWarp) {
    a.state[row * a.channels + c] = made[c];
    if (!runs || a.output == nullptr) continue;
    float* output = a.output + row * a.channels + c;
    *output = a.is_last ? made[c] : kept * *output + weight * made[c];
  }
  if (Lane() == 0 && a.goes_on != nullptr) a.goes_on[row] = a.step + 1 < a.stop[row] ? 1 : 0;
}

const char* LaunchKeep(const KeepStatesArguments& a, void* stream) {
  return LaunchWarps("KeepStates", &KeepStates, a.rows, stream, a);
}

__global__ void __launch_bounds__(kRowThreads) ShowRows(ShowRowsArguments a) {
  const int64_t row = RowOfWarp(a.list, a.rows);
  if (row < 0 || !IsComputed(a.stop[row], a.step, a.recomputes)) return;
  for (int64_t c = Lane(); c < a.channels; c += kWarp) {
    a.shown[row * a.channels + c] = a.from[row * a.channels + c];
  }
}

const char* LaunchShow(const ShowRowsArguments& a, void* stream) {
  return LaunchWarps("ShowRows", &ShowRows, a.rows, stream, a);
}

__global__ void __launch_bounds__(kRowThreads) Convolve(ConvolveArguments a) {
  const int64_t row = RowOfWarp(a.list, a.rows);
  if (row < 0) return;
  const int64_t t = row % a.tokens, first = row - t;
  for (int64_t c = Lane(); c < a.channels; c += kWarp) {
    float sum = 0;
    for (int64_t j = 0; j < a.size; ++j) {
      const int64_t other = t + j - a.before;
      if (other < 0 || other >= a.tokens || a.stop[first + other] == 0) continue;
      sum += a.kernel[j * a.channels + c] * a.shown[(first + other) * a.channels + c];
    }
    a.y[row * a.channels + c] = sum;
  }
}

const char* LaunchConvolve(const ConvolveArguments& a, void* stream) {
  return LaunchWarps("Convolve", &Convolve, a.rows, stream, a);
}

__global__ void __launch_bounds__(kRowThreads) WriteStates(WriteStatesArguments a) {
  const int64_t row = WarpOfGrid();
  if (row >= a.rows) return;
  const int64_t b = row / a.tokens, t = row % a.tokens;
  const int64_t out = b * a.out.strides[0] + t * a.out.strides[1];
  for (int64_t c = Lane(); c < a.channels; c += kWarp) {
    const float value = a.stop[row] == 0 ? 0 : a.from[row * a.channels + c];
    StoreElement(a.out.data, a.out.element, out + c * a.out.strides[2], value);
  }
  if (Lane() != 0) return;
  if (a.ponder_out.data != nullptr) {
    StoreElement(a.ponder_out.data, a.ponder_out.element,
                 b * a.ponder_out.strides[0] + t * a.ponder_out.strides[1], a.ponder[row]);
  }
  if (a.steps_out != nullptr) {
    a.steps_out[b * a.steps_strides[0] + t * a.steps_strides[1]] = a.stop[row];
  }
}

const char* LaunchWrite(const WriteStatesArguments& a, void* stream) {
  return LaunchWarps("WriteStates", &WriteStates, a.rows, stream, a);
}

}  // namespace

TFB_KERNEL_TABLE(UniversalTransformerKernels, {&LaunchBegin, &LaunchRead, &LaunchKeep, &LaunchShow,
                                               &LaunchConvolve, &LaunchWrite});
TFB_FOR_EACH(KeepSteps);
TFB_FOR_EACH_IN_ROWS(KeepRowsOfTokens);
TFB_FOR_EACH(HaltingProducts);
TFB_FOR_EACH(HaltingGradients);
TFB_FOR_EACH(LastStepCounts);
TFB_FOR_EACH(TellsTaking);
TFB_FOR_EACH_IN_ROWS(ReadAgain);
TFB_FOR_EACH_IN_ROWS(MadeGradient);
TFB_FOR_EACH_IN_ROWS(ReluGradient);
TFB_FOR_EACH_IN_ROWS(ListedRows<ReluGradient>);
TFB_FOR_EACH_IN_ROWS(InputGradient);
TFB_FOR_EACH_IN_ROWS(ConvolveAgain);
TFB_FOR_EACH_IN_ROWS(ConvolutionRowsGradient);
TFB_SUM_IN_RUNS(ConvolutionKernelGradient);
TFB_FOR_EACH_IN_ROWS(TakeShownGradient);

}  // namespace tfb::universal_transformer
