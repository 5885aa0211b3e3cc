// A warp has a row of a tensor or one query of a head, each lane every 32nd channel.
#include "core/cuda/for_each.cuh"
#include "core/cuda/sum_in_runs.cuh"
#include "core/cuda/warp.cuh"
#include "memory/memorizing/memorizing_cuda.h"
#include "memory/memorizing/memorizing_functors.h"

namespace tfb::memorizing {
namespace {

constexpr int kMaxChannels = 256;  // kMaxHeadDim
constexpr int kOfLane = kMaxChannels / kWarp;

// ---- Rows into a ring ----

__device__ double NormOf(const DeviceView& view, int64_t row, int64_t stride, int64_t channels) {
  double square = 0;
  for (int64_t c = Lane(); c < channels; c += kWarp) {
    const double x = LoadElement(view.data, view.element, row + c * stride);
    square += x * x;
  }
  return sqrt(SumOfWarp(square));
}

__global__ void __launch_bounds__(kRowThreads) CopyRows(CopyRowsArguments a) {
  const int64_t n = WarpOfGrid();
  if (n >= a.batch * a.heads * a.tokens) return;
  const int64_t t = n % a.tokens, head = n / a.tokens;
  const int64_t from = head / a.heads * a.from.strides[0] + head % a.heads * a.from.strides[1] +
                       t * a.from.strides[2];
  const int64_t to = head * a.to.strides[0] + (a.first_place + t) % a.places * a.to.strides[1];
  double factor = a.length == RowLength::kScale ? fabsf(a.scales[head % a.heads]) : 1;
  if (a.length != RowLength::kKept) {
    const double norm = NormOf(a.from, from, a.from.strides[3], a.channels);
    factor /= norm < kLeastNorm ? kLeastNorm : norm;
  }
  for (int64_t c = Lane(); c < a.channels; c += kWarp) {
    const float x = LoadElement(a.from.data, a.from.element, from + c * a.from.strides[3]);
    StoreElement(a.to.data, a.to.element, to + c * a.to.strides[2], static_cast<float>(x * factor));
  }
}

const char* LaunchCopyRows(const CopyRowsArguments& a, void* stream) {
  return LaunchWarps("CopyRows", &CopyRows, a.batch * a.heads * a.tokens, stream, a);
}

// ---- Attention over what was found ----

__device__ int64_t AgeIn(const MixArguments& a, int slot) {
  const int64_t age = slot - a.oldest;
  return age < 0 ? age + a.places : age;
}

// Writes each token to the place given by the number of older ones. `slots` null means all entries.
__device__ void WriteRetrieved(const MixArguments& a, const int32_t* slots, int64_t to) {
  for (int64_t n = Lane(); n < a.k; n += kWarp) {
    int64_t token = -1, place = n;
    if (slots == nullptr) {
      if (n < a.entries) token = a.first_token + n;
    } else if (slots[n] >= 0) {
      const int64_t age = AgeIn(a, slots[n]);
      token = a.first_token + age;
      place = 0;
      for (int64_t m = 0; m < a.k && slots[m] >= 0; ++m) place += AgeIn(a, slots[m]) < age;
    }
    a.retrieved[to + place * a.retrieved_strides[3]] = token;
  }
}

// Computes the lane's channels of the softmax of k scores over the values in the slots. Returns the
// log-sum-exp of the scaled scores.
__device__ float ReadSlots(const MixArguments& a, const int32_t* slots, const float* scores,
                           int64_t head, float (&read)[kOfLane]) {
  const float scale = fabsf(a.scales[head % a.heads]), largest = scores[0];
  const int64_t values = head / a.group * a.values.strides[0];
  float weights = 0;
  for (int64_t first = 0; first < a.k; first += kWarp) {
    const int64_t n = first + Lane();
    const int slot = n < a.k ? slots[n] : -1;
    const float weight = slot < 0 ? 0 : expf(scale * (scores[n] - largest));
    for (int i = 0; i < kWarp; ++i) {
      const int of_entry = __shfl_sync(~0u, slot, i);
      const float share = __shfl_sync(~0u, weight, i);
      if (of_entry < 0) break;  // for all lanes together
      weights += share;
#pragma unroll
      for (int part = 0; part < kOfLane; ++part) {
        const int64_t c = Lane() + part * kWarp;
        if (c >= a.channels) break;
        read[part] +=
            share * LoadElement(a.values.data, a.values.element,
                                values + of_entry * a.values.strides[1] + c * a.values.strides[2]);
      }
    }
  }
#pragma unroll
  for (int part = 0; part < kOfLane; ++part) read[part] /= weights;
  return scale * largest + logf(weights);
}

// Adds the null slot to the lane's channels of what was read, and to its log-sum-exp, which it
// returns.
__device__ float AddNull(const MixArguments& a, int64_t row, int64_t h, float log_sum_exp,
                         float (&read)[kOfLane]) {
  const float* key = a.null_keys + h / a.group * a.channels;
  const float* value = a.null_values + h / a.group * a.channels;
  float score = 0;
  for (int64_t c = Lane(); c < a.channels; c += kWarp) {
    score += a.queries[row * a.channels + c] * key[c];
  }
  score = SumOfWarp(score);
  if (a.slots != nullptr) score *= fabsf(a.scales[h]);
  const float largest = fmaxf(score, log_sum_exp);
  const float of_null = expf(score - largest), of_read = expf(log_sum_exp - largest);
#pragma unroll
  for (int part = 0; part < kOfLane; ++part) {
    const int64_t c = Lane() + part * kWarp;
    if (c >= a.channels) break;
    const float sum = of_read == 0 ? 0 : of_read * read[part];
    read[part] = (of_null * value[c] + sum) / (of_null + of_read);
  }
  return largest + logf(of_null + of_read);
}

// Returns the weight of what was read, whose scores have this log-sum-exp.
__device__ float GateOf(const MixArguments& a, int64_t b, int64_t h, int64_t t, float log_sum_exp) {
  const DeviceView& own = a.own_log_sum_exp;
  if (own.data == nullptr) return 1 / (1 + expf(-a.gates[h]));
  const float of_own = static_cast<const float*>(
      own.data)[b * own.strides[0] + h * own.strides[1] + t * own.strides[2]];
  return 1 / (1 + expf(of_own - log_sum_exp));
}

__global__ void __launch_bounds__(kRowThreads) Mix(MixArguments a) {
  const int64_t row = WarpOfGrid();
  if (row >= a.batch * a.heads * a.tokens) return;
  const int64_t t = row % a.tokens, head = row / a.tokens;
  const int64_t h = head % a.heads, b = head / a.heads;
  const int32_t* slots = a.slots == nullptr ? nullptr : a.slots + row * a.k;
  if (a.retrieved != nullptr) {
    WriteRetrieved(
        a, slots,
        b * a.retrieved_strides[0] + h * a.retrieved_strides[1] + t * a.retrieved_strides[2]);
  }
  const bool any = slots != nullptr ? slots[0] >= 0 : a.entries > 0;
  if (!any && a.null_keys == nullptr) return;

  float read[kOfLane] = {}, log_sum_exp = -INFINITY;
  if (any && slots != nullptr) {
    log_sum_exp = ReadSlots(a, slots, a.scores + row * a.k, head, read);
  } else if (any) {
    if (a.mean_log_sum_exp != nullptr) log_sum_exp = a.mean_log_sum_exp[row];
    for (int part = 0; part < kOfLane && Lane() + part * kWarp < a.channels; ++part) {
      read[part] = a.mean[row * a.channels + Lane() + part * kWarp];
    }
  }
  if (a.null_keys != nullptr) log_sum_exp = AddNull(a, row, h, log_sum_exp, read);
  const float gate = GateOf(a, b, h, t, log_sum_exp);
  const int64_t out = b * a.out.strides[0] + h * a.out.strides[1] + t * a.out.strides[2];
#pragma unroll
  for (int part = 0; part < kOfLane; ++part) {
    const int64_t c = Lane() + part * kWarp;
    if (c >= a.channels) break;
    const int64_t at = out + c * a.out.strides[3];
    const float local = LoadElement(a.out.data, a.out.element, at);
    StoreElement(a.out.data, a.out.element, at, gate * read[part] + (1 - gate) * local);
  }
}

const char* LaunchMix(const MixArguments& a, void* stream) {
  return LaunchWarps("Mix", &Mix, a.batch * a.heads * a.tokens, stream, a);
}

}  // namespace

TFB_KERNEL_TABLE(MemorizingKernels, {&LaunchCopyRows, &LaunchMix});
TFB_FOR_EACH(ScoresOfReads);
TFB_FOR_EACH(WeightsOfReads);
TFB_FOR_EACH_IN_ROWS(MixOfReads);
TFB_FOR_EACH_IN_ROWS(GradientsOfReads);
TFB_SUM_IN_RUNS(SumsOfReads);
TFB_SUM_IN_RUNS(SumsOfNull);
TFB_FOR_EACH(CopyOfTokens);

}  // namespace tfb::memorizing
