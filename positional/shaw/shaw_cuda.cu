#include "core/cuda/for_each.cuh"
#include "positional/shaw/shaw_cuda.h"
#include "positional/shaw/shaw_functors.h"

namespace tfb::shaw {
namespace {

// A warp has a query, whose channels its lanes divide. It begins with the bins of the far keys and
// adds the near ones, 32 at a time: each lane computes its share of 32 scores, which 31 shuffles
// then add up, one score to a lane.
constexpr int kWarps = 4;
constexpr int kShare = 8;  // channels of a lane, for 256 at most

// One query, whose channels the lanes of a warp divide.
class QueryRow {
 protected:
  __device__ QueryRow(const ShawArguments& a, int64_t b, int64_t h, int64_t i)
      : a_(a), lane_(Lane()), b_(b), h_(h), i_(i), kv_head_(h / a.sizes.group) {
    const int64_t table = h % a.sizes.table_heads * a.sizes.bins();
    key_table_ = a.key_table + table * a.sizes.head_dim;
    if (a.value_table != nullptr) value_table_ = a.value_table + table * a.sizes.value_row;
    LoadChannels(a.q, a.sizes.head_dim, query_);
  }

  __device__ int64_t Channel(int n) const { return lane_ + n * kWarp; }
  __device__ bool Has(int n, int64_t channels) const { return Channel(n) < channels; }
  // Returns the query's row in arrays [batch][query_heads][query_tokens].
  __device__ int64_t Row() const {
    return (b_ * a_.sizes.query_heads + h_) * a_.sizes.query_tokens + i_;
  }
  // Loads the lane's nth channel of the row at an offset.
  __device__ float Load(const DeviceView& view, int64_t row, int n) const {
    return tfb::Load(view, row + Channel(n) * view.strides[3]);
  }
  __device__ void LoadChannels(const DeviceView& view, int64_t channels,
                               float (&to)[kShare]) const {
    const int64_t row = Offset(view, b_, h_, i_);
#pragma unroll
    for (int n = 0; n < kShare; ++n) to[n] = Has(n, channels) ? Load(view, row, n) : 0;
  }
  __device__ float Key(int64_t bin, int n) const {
    return key_table_[bin * a_.sizes.head_dim + Channel(n)];
  }
  __device__ float Value(int64_t bin, int n) const {
    return value_table_ == nullptr ? 0 : value_table_[bin * a_.sizes.value_row + Channel(n)];
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
  int64_t kv_head_;
  const float* key_table_;
  const float* value_table_ = nullptr;
  float query_[kShare];
};

// The softmax of one query so far: this lane's part of its channels, and the whole maximum and sum.
class Query : public QueryRow {
 public:
  __device__ Query(const ShawArguments& a, int64_t b, int64_t h, int64_t i)
      : QueryRow(a, b, h, i) {}

  __device__ void AddFarKeys() {
    const ShawSizes& s = a_.sizes;
    for (int64_t part = 0; part < s.far_parts; ++part) {
      const int64_t row = Row();
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
    const int64_t to = Offset(a_.out, b_, h_, i_);
#pragma unroll
    for (int n = 0; n < kShare; ++n) {
      if (!Has(n, a_.sizes.value_dim)) break;
      tfb::Store(a_.out, to + Channel(n) * a_.out.strides[3], output_[n] * inverse);
    }
    if (a_.log_sum_exp == nullptr || lane_ > 0) return;
    const int64_t* strides = a_.log_sum_exp_strides;
    a_.log_sum_exp[b_ * strides[0] + h_ * strides[1] + i_ * strides[2]] =
        sum_ == 0 ? -INFINITY : max_ + logf(sum_);
  }

 private:
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
    float scores[kWarp] = {};
#pragma unroll
    for (int j = 0; j < kWarp; ++j) {
      if (j >= count) break;
      const int64_t from = Offset(a_.k, b_, kv_head_, first + j);
#pragma unroll
      for (int n = 0; n < kShare; ++n) {
        if (!Has(n, s.head_dim)) break;
        scores[j] += query_[n] * (Load(a_.k, from, n) + Key(bin + j, n));
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
      const int64_t from = Offset(a_.v, b_, kv_head_, first + j);
#pragma unroll
      for (int n = 0; n < kShare; ++n) {
        if (!Has(n, s.value_dim)) break;
        output_[n] += of_key * (Load(a_.v, from, n) + Value(bin + j, n));
      }
    }
  }

  float output_[kShare] = {};
  float max_ = -INFINITY;
  float sum_ = 0;
};

// The gradients of one query's bins (see ShawGradients). A lane has every 32nd bin.
class QueryGradients : public QueryRow {
 public:
  __device__ QueryGradients(const ShawBackwardArguments& of, int64_t b, int64_t h, int64_t i)
      : QueryRow(of.forward, b, h, i),
        of_(of),
        weights_(of.weights + Row() * a_.sizes.bins()),
        score_gradients_(of.score_gradients + Row() * a_.sizes.bins()) {
    LoadChannels(of.out_gradient, a_.sizes.value_dim, gradient_);
    const DeviceView& e = of.log_sum_exp_gradient;
    if (e.data != nullptr) of_log_sum_exp_ = tfb::Load(e, Offset(e, b, h, i));
  }

  // A query whose g and e are 0 gives nothing, whatever it holds.
  __device__ void Run() {
    bool is_zero = of_log_sum_exp_ == 0;
#pragma unroll
    for (int n = 0; n < kShare; ++n) is_zero = is_zero && gradient_[n] == 0;
    if (__ballot_sync(kAllLanes, !is_zero) == 0 || !FindLogits()) {
      for (int64_t bin = lane_; bin < a_.sizes.bins(); bin += kWarp) {
        weights_[bin] = 0;
        score_gradients_[bin] = 0;
      }
      return;
    }
    for (int64_t first = 0; first < a_.sizes.bins(); first += kWarp) Differentiate(first);
    if (of_.q_gradient.data == nullptr) return;
#pragma unroll
    for (int n = 0; n < kShare; ++n) {
      if (!Has(n, a_.sizes.head_dim)) break;
      const int64_t to = Offset(of_.q_gradient, b_, h_, i_, Channel(n));
      const float before = tfb::Load(of_.q_gradient, to);
      tfb::Store(of_.q_gradient, to, before + a_.sizes.scale * of_query_[n]);
    }
  }

 private:
  // Returns the near key of a bin, or -1.
  __device__ int64_t NearKey(int64_t bin) const {
    const ShawSizes& s = a_.sizes;
    const int64_t position = s.Position(i_), j = position + bin - s.max_distance;
    return j >= s.FirstNear(position) && j <= s.LastNear(position) ? j : -1;
  }
  // Returns the part of far keys whose bin it is, or -1.
  __device__ int FarPart(int64_t bin) const {
    if (bin == 0) return 0;
    return a_.sizes.far_parts == 2 && bin == a_.sizes.bins() - 1 ? 1 : -1;
  }

  // Sums of_bin(bin)(n) over the channels of 32 bins: a lane returns the sum of bin first + lane, 0
  // for one without keys.
  template <class OfBin>
  __device__ float SumOfBin(int64_t first, int64_t channels, const OfBin& of_bin) const {
    float own = 0;
#pragma unroll 1
    for (int j = 0; j < kWarp && first + j < a_.sizes.bins(); ++j) {
      if (NearKey(first + j) < 0 && FarPart(first + j) < 0) continue;
      const auto of_channel = of_bin(first + j);
      float sum = 0;
#pragma unroll
      for (int n = 0; n < kShare; ++n) {
        if (!Has(n, channels)) break;
        sum += of_channel(n);
      }
      sum = SumOfWarp(sum);
      if (lane_ == j) own = sum;
    }
    return own;
  }

  // Returns the logit of bin first + lane: -inf for one without keys.
  __device__ float Logit(int64_t first) const {
    const ShawSizes& s = a_.sizes;
    const float logit = s.scale * SumOfBin(first, s.head_dim, [&](int64_t bin) {
                          const int64_t key = NearKey(bin), row = Offset(a_.k, b_, kv_head_, key);
                          return [this, bin, key, row](int n) {
                            return query_[n] * (Key(bin, n) + (key < 0 ? 0 : Load(a_.k, row, n)));
                          };
                        });
    const int64_t bin = first + lane_, key = bin < s.bins() ? NearKey(bin) : -1;
    if (key >= 0) return IsToken(key) ? logit : -INFINITY;
    if (bin >= s.bins() || FarPart(bin) < 0) return -INFINITY;
    const float content = a_.far_log_sum_exp[FarPart(bin)][Row()];
    return content == -INFINITY ? content : content + logit;
  }
  // Returns g . (o + P^V) of bin first + lane.
  __device__ float Product(int64_t first) const {
    const ShawSizes& s = a_.sizes;
    return SumOfBin(first, s.value_dim, [&](int64_t bin) {
      const int64_t key = NearKey(bin), row = Offset(a_.v, b_, kv_head_, key);
      const int part = FarPart(bin);
      const float* far = part < 0 ? nullptr : a_.far_rows[part] + Row() * s.value_dim;
      return [this, bin, key, row, far](int n) {
        const float own = key >= 0 ? Load(a_.v, row, n) : far[Channel(n)];
        return gradient_[n] * (own + Value(bin, n));
      };
    });
  }

  // Writes logits and products in the places of the weights and the scores' gradients, and finds
  // the softmax. Returns whether the query sees a key.
  __device__ bool FindLogits() {
    float max = -INFINITY, sum = 0, mean = 0;
    for (int64_t first = 0; first < a_.sizes.bins(); first += kWarp) {
      const float logit = Logit(first), product = Product(first);
      if (first + lane_ < a_.sizes.bins()) {
        weights_[first + lane_] = logit;
        score_gradients_[first + lane_] = product;
      }
      if (logit == -INFINITY) continue;
      const float larger = fmaxf(max, logit), rescale = max == -INFINITY ? 0 : expf(max - larger);
      const float weight = expf(logit - larger);
      max = larger;
      sum = sum * rescale + weight;
      mean = mean * rescale + weight * product;
    }
    max_ = MaxOfWarp(max);
    const float rescale = max == -INFINITY ? 0 : expf(max - max_);
    sum_ = SumOfWarp(sum * rescale);
    delta_ = SumOfWarp(mean * rescale) / sum_ - of_log_sum_exp_;
    return sum_ != 0;
  }

  // Finds the weights and the scores' gradients of 32 bins, and adds what they give to the query
  // and to far keys.
  __device__ void Differentiate(int64_t first) {
    const ShawSizes& s = a_.sizes;
    const int64_t bin = first + lane_;
    float weight = 0, ds = 0;
    if (bin < s.bins()) {
      const float logit = weights_[bin];
      weight = logit == -INFINITY ? 0 : expf(logit - max_) / sum_;
      ds = weight == 0 ? 0 : weight * (score_gradients_[bin] - delta_);
      weights_[bin] = weight;
      score_gradients_[bin] = ds;
    }
#pragma unroll 1
    for (int j = 0; j < kWarp; ++j) {
      const float of_bin = __shfl_sync(kAllLanes, ds, j);
      if (of_bin == 0) continue;  // a key that is hidden may be NaN
      const int64_t key = NearKey(first + j), row = Offset(a_.k, b_, kv_head_, key);
#pragma unroll
      for (int n = 0; n < kShare; ++n) {
        if (!Has(n, s.head_dim)) break;
        of_query_[n] += of_bin * (Key(first + j, n) + (key < 0 ? 0 : Load(a_.k, row, n)));
      }
    }
    for (int part = 0; part < s.far_parts; ++part) {
      const int64_t lane = part * (s.bins() - 1) - first;
      if (lane < 0 || lane >= kWarp) continue;
      const float of_bin = __shfl_sync(kAllLanes, weight, static_cast<int>(lane));
      if (of_bin == 0) continue;
      if (lane_ == lane) of_.far_log_sum_exp[part][Row()] += ds;
      float* const to = of_.far_rows[part] + Row() * s.value_dim;
#pragma unroll
      for (int n = 0; n < kShare; ++n) {
        if (!Has(n, s.value_dim)) break;
        to[Channel(n)] += of_bin * gradient_[n];
      }
    }
  }

  const ShawBackwardArguments& of_;
  float* weights_;
  float* score_gradients_;
  float gradient_[kShare];
  float of_log_sum_exp_ = 0;
  float of_query_[kShare] = {};
  float max_ = -INFINITY;
  float sum_ = 0;
  float delta_ = 0;
};

// The query of a row in arrays [batch][query_heads][query_tokens].
struct Place {
  int64_t b;
  int64_t h;
  int64_t i;
};
__device__ Place PlaceOf(const ShawSizes& s, int64_t row) {
  const int64_t head = row / s.query_tokens;
  return {head / s.query_heads, head % s.query_heads, row % s.query_tokens};
}

__global__ void __launch_bounds__(kWarps* kWarp) SoftmaxOfBins(ShawArguments a) {
  if (WarpOfGrid() >= a.sizes.rows()) return;
  const Place place = PlaceOf(a.sizes, WarpOfGrid());
  Query query(a, place.b, place.h, place.i);
  query.AddFarKeys();
  query.AddNearKeys();
  query.Store();
}

// With the registers that three blocks leave each other it spills none.
__global__ void __launch_bounds__(kWarps* kWarp, 3) DifferentiateBins(ShawBackwardArguments a) {
  if (WarpOfGrid() >= a.forward.sizes.rows()) return;
  const Place place = PlaceOf(a.forward.sizes, WarpOfGrid());
  QueryGradients(a, place.b, place.h, place.i).Run();
}

template <class Arguments>
const char* LaunchQueries(const char* name, void (*kernel)(Arguments), int64_t queries,
                          void* stream, const Arguments& a) {
  return Launch(name, kernel, {CeilDiv(queries, kWarps), kWarps * kWarp}, stream, a);
}
const char* LaunchSoftmaxOfBins(const ShawArguments& a, void* stream) {
  return LaunchQueries("SoftmaxOfBins", &SoftmaxOfBins, a.sizes.rows(), stream, a);
}
const char* LaunchDifferentiateBins(const ShawBackwardArguments& a, void* stream) {
  return LaunchQueries("DifferentiateBins", &DifferentiateBins, a.forward.sizes.rows(), stream, a);
}

}  // namespace

TFB_KERNEL_TABLE(ShawKernels, {&LaunchSoftmaxOfBins, &LaunchDifferentiateBins});
TFB_FOR_EACH_IN_ROWS(AddToNearKeys);
TFB_FOR_EACH_IN_ROWS(SumOfBins);
TFB_FOR_EACH_IN_ROWS(AddSumsOfBins);

}  // namespace tfb::shaw
