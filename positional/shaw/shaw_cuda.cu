#include "core/cuda/warp.cuh"
#include "positional/shaw/shaw_cuda.h"

namespace tfb::shaw {
namespace {

// A warp has a query, whose channels its lanes divide. It begins with the bins of the far keys and
// adds the near ones, 32 at a time: each lane computes its share of 32 scores, which 31 shuffles
// then add up, one score to a lane.
constexpr int kWarps = 4;
constexpr int kShare = 8;  // channels of a lane, for 256 at most

// The softmax of one query so far: this lane's part of its channels, and the whole maximum and sum.
class Query {
 public:
  __device__ Query(const ShawArguments& a, int64_t b, int64_t h, int64_t i)
      : a_(a), lane_(Lane()), b_(b), h_(h), i_(i) {
    const int64_t table = h % a.sizes.table_heads * a.sizes.bins();
    key_table_ = a.key_table + table * a.sizes.head_dim;
    if (a.value_table != nullptr) value_table_ = a.value_table + table * a.sizes.value_row;
    const int64_t from = Offset(a.q, h, i);
#pragma unroll
    for (int n = 0; n < kShare; ++n) {
      query_[n] = Has(n, a.sizes.head_dim)
                      ? LoadElement(a.q.data, a.q.element, from + Channel(n) * a.q.strides[3])
                      : 0;
    }
  }

  __device__ void AddFarKeys() {
    const ShawSizes& s = a_.sizes;
    for (int64_t part = 0; part < s.far_parts; ++part) {
      const int64_t row = (b_ * s.query_heads + h_) * s.query_tokens + i_;
      const int64_t bin = part * (s.bins() - 1);
      const float content = a_.far_log_sum_exp[part][row];
      float position = 0;
#pragma unroll
      for (int n = 0; n < kShare; ++n) {
        if (Has(n, s.head_dim)) position += query_[n] * Key(bin, n);
      }
      const float logit = content == -INFINITY ? content : content + s.scale * SumOfWarp(position);
      if (logit == -INFINITY) continue;  // NaN go on
      const float weight = Admit(logit);
      sum_ += weight;
#pragma unroll
      for (int n = 0; n < kShare; ++n) {
        if (!Has(n, s.value_dim)) break;
        output_[n] += weight * (a_.far_rows[part][row * s.value_dim + Channel(n)] + Value(bin, n));
      }
    }
  }

  __device__ void AddNearKeys() {
    const ShawSizes& s = a_.sizes;
    const int64_t position = s.Position(i_), last = s.LastNear(position);
    for (int64_t first = s.FirstNear(position); first <= last; first += kWarp) {
      const int count = static_cast<int>(min(last - first + 1, static_cast<int64_t>(kWarp)));
      AddNearKeys(first, count, first - position + s.max_distance);
    }
  }

  __device__ void Store() const {
    const float inverse = sum_ == 0 ? 0 : 1 / sum_;
    const int64_t to = Offset(a_.out, h_, i_);
#pragma unroll
    for (int n = 0; n < kShare; ++n) {
      if (!Has(n, a_.sizes.value_dim)) break;
      StoreElement(a_.out.data, a_.out.element, to + Channel(n) * a_.out.strides[3],
                   output_[n] * inverse);
    }
    if (a_.log_sum_exp == nullptr || lane_ > 0) return;
    const int64_t* strides = a_.log_sum_exp_strides;
    a_.log_sum_exp[b_ * strides[0] + h_ * strides[1] + i_ * strides[2]] =
        sum_ == 0 ? -INFINITY : max_ + logf(sum_);
  }

 private:
  __device__ int64_t Channel(int n) const { return lane_ + n * kWarp; }
  __device__ bool Has(int n, int64_t channels) const { return Channel(n) < channels; }
  __device__ int64_t Offset(const DeviceView& view, int64_t head, int64_t token) const {
    return b_ * view.strides[0] + head * view.strides[1] + token * view.strides[2];
  }
  __device__ float Key(int64_t bin, int n) const {
    return key_table_[bin * a_.sizes.head_dim + Channel(n)];
  }
  __device__ float Value(int64_t bin, int n) const {
    return value_table_ == nullptr ? 0 : value_table_[bin * a_.sizes.value_row + Channel(n)];
  }

  // Raises the maximum to the logit, if that is larger, and returns the logit's weight.
  __device__ float Admit(float logit) {
    const float max = fmaxf(max_, logit), rescale = max_ == -INFINITY ? 0 : expf(max_ - max);
    max_ = max;
    sum_ *= rescale;
#pragma unroll
    for (int n = 0; n < kShare; ++n) output_[n] *= rescale;
    return expf(logit - max);
  }

  // Adds `count` keys from `first` on, whose bins begin with `bin`.
  __device__ void AddNearKeys(int64_t first, int count, int64_t bin) {
    const ShawSizes& s = a_.sizes;
    const int64_t head = h_ / s.group;
    float scores[kWarp] = {};
#pragma unroll
    for (int j = 0; j < kWarp; ++j) {
      if (j >= count) break;
      const int64_t from = Offset(a_.k, head, first + j);
#pragma unroll
      for (int n = 0; n < kShare; ++n) {
        if (!Has(n, s.head_dim)) break;
        scores[j] +=
            query_[n] * (LoadElement(a_.k.data, a_.k.element, from + Channel(n) * a_.k.strides[3]) +
                         Key(bin + j, n));
      }
    }
    float logit = s.scale * SumsOfWarp(scores);
    if (lane_ >= count || !IsToken(first + lane_)) logit = -INFINITY;
    const unsigned seen = __ballot_sync(kAllLanes, logit != -INFINITY);
    if (seen == 0) return;
    const float max = MaxOfWarp(logit);
    Admit(max);
    const float weight = expf(logit - max_);
    sum_ += SumOfWarp(weight);
    for (int j = 0; j < count; ++j) {
      const float of_key = __shfl_sync(kAllLanes, weight, j);
      if ((seen >> j & 1) == 0) continue;
      const int64_t from = Offset(a_.v, head, first + j);
#pragma unroll
      for (int n = 0; n < kShare; ++n) {
        if (!Has(n, s.value_dim)) break;
        output_[n] +=
            of_key * (LoadElement(a_.v.data, a_.v.element, from + Channel(n) * a_.v.strides[3]) +
                      Value(bin + j, n));
      }
    }
  }
  __device__ bool IsToken(int64_t j) const {
    return a_.key_mask == nullptr ||
           a_.key_mask[b_ * a_.mask_strides[0] + j * a_.mask_strides[1]] != 0;
  }

  const ShawArguments& a_;
  int lane_;
  int64_t b_;
  int64_t h_;
  int64_t i_;
  const float* key_table_;
  const float* value_table_ = nullptr;
  float query_[kShare];
  float output_[kShare] = {};
  float max_ = -INFINITY;
  float sum_ = 0;
};

__global__ void __launch_bounds__(kWarps* kWarp) SoftmaxOfBins(ShawArguments a) {
  const ShawSizes& s = a.sizes;
  const int64_t row = WarpOfGrid();
  if (row >= s.rows()) return;
  const int64_t head = row / s.query_tokens;
  Query query(a, head / s.query_heads, head % s.query_heads, row % s.query_tokens);
  query.AddFarKeys();
  query.AddNearKeys();
  query.Store();
}

const char* LaunchSoftmaxOfBins(const ShawArguments& a, void* stream) {
  return Launch("SoftmaxOfBins", &SoftmaxOfBins, {CeilDiv(a.sizes.rows(), kWarps), kWarps * kWarp},
                stream, a);
}

}  // namespace

TFB_KERNEL_TABLE(ShawKernels, {&LaunchSoftmaxOfBins});

}  // namespace tfb::shaw
