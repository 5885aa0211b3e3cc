// Engine linear on CUDA: decoding, a few tokens one after the other.
//
// A block has one key-value head. For a token it goes through the tiles of features: projections of
// the key and of the queries that share it, their maxima so far, and then one pass over the tile's
// sums, in which each number is read, updated by the key, written, and used for the queries: S <- S
// exp(R - R') + E v^T, y <- y + F S. So a step moves the state once in each direction, 2 features
// (value_dim + 1) 4 B a head, 132 KiB at 256 features and 64 channels, besides W from L2; some two
// multiply-adds a number and query.
//
// Threads read four columns each, and rows `parts` apart, so that a block reads consecutive
// addresses; five rows are being loaded at a time. Sums over rows are taken per thread and then
// over the threads of a column in their order: the result is the same in every run.
#include "core/linear/linear_math.cuh"
#include "core/linear/linear_rows.cuh"

namespace tfb {
namespace {

constexpr int kMaxChannels = 256;
constexpr int kMaxRow = kMaxChannels + 4;
constexpr int kRowsAtOnce = 5;

template <int kHeads>
class AppendBlock {
 public:
  static constexpr int kVectors = 1 + kHeads;  // the key, then the queries

  struct Shared {
    alignas(16) float inputs[kVectors][kMaxChannels];
    float features[kVectors][kTile];   // projections, then features
    float scaled_key[kTile + 1];       // features at the tile's reference, and their sum
    alignas(16) float value[kMaxRow];  // (v, 1)
    alignas(16) float value_sums[kMaxRow];
    alignas(16) float feature_values[kMaxRow];  // the row of values summed over all features
    alignas(16) float result[kHeads][kMaxRow];
    alignas(16) float4 parts[kThreads];
    // Maxima of a vector's projections so far.
    float maximum[kVectors];
    float factor[kVectors];
    float half_square[kVectors];
    float total[kVectors];
    RowFactors factors[kHeads];
    float tile_rescale;    // factor of the tile's sums
    float result_rescale;  // factor of the result of the earlier tiles
    float tile_scale;      // factor of this tile's result
    float reference, key_maximum;
  };

  __device__ AppendBlock(const LinearArguments& a, int64_t head, Shared* shared)
      : a_(a), s_(*shared), batch_(head / a.kv_heads), kv_head_(head % a.kv_heads) {
    state_ = a.total + head * a.sums.head;
    quads_ = static_cast<int>(a.sums.row / 4);
    parts_ = min(kThreads / quads_, kTile + 1);
    quad_ = Thread() % quads_;
    part_ = Thread() / quads_;
    heads_ = static_cast<int>(a.query_heads / a.kv_heads);
  }

  __device__ void Run() {
    for (int64_t token = 0; token < a_.kv_tokens; ++token) {
      LoadToken(token);
      for (int64_t tile = 0; tile < a_.sums.tiles; ++tile) {
        FetchSums(tile, part_);
        Project(tile);
        __syncthreads();
        for (int vector = OpaqueWarp(); vector <= heads_; vector += kWarps)
          MakeFeatures(tile, vector);
        __syncthreads();
        PassOverSums(tile);
        __syncthreads();
      }
      CollectResult();
      StoreRows(token);
      __syncthreads();
    }
  }

 private:
  __device__ void LoadToken(int64_t token) {
    const int t = Thread();
    is_seen_ = IsToken(a_, batch_, token);
    for (int vector = 0; vector <= heads_; ++vector) {
      const DeviceView& view = vector == 0 ? a_.k : a_.q;
      const int64_t head = vector == 0 ? kv_head_ : kv_head_ * heads_ + vector - 1;
      const bool exists = vector > 0 || is_seen_;
      for (int c = t; c < (a_.head_dim + 3) / 4 * 4; c += kThreads) {
        const int64_t offset = batch_ * view.strides[0] + head * view.strides[1] +
                               token * view.strides[2] + c * view.strides[3];
        const bool is_channel = exists && c < a_.head_dim;
        const float scale = a_.map.unit ? 1 : a_.map.input_scale;
        s_.inputs[vector][c] =
            is_channel ? scale * LoadElement(view.data, view.element, offset) : 0;
      }
    }
    float* value_sums = state_ + a_.sums.tiles * a_.sums.tile;
    for (int c = t; c < a_.sums.row; c += kThreads) {
      float value = 0;
      if (is_seen_ && c < a_.value_dim) {
        value = LoadElement(a_.v.data, a_.v.element,
                            batch_ * a_.v.strides[0] + kv_head_ * a_.v.strides[1] +
                                token * a_.v.strides[2] + c * a_.v.strides[3]);
      } else if (is_seen_ && c == a_.sums.ones) {
        value = 1;
      }
      s_.value[c] = value;
      value_sums[c] = s_.value_sums[c] = value_sums[c] + value;
    }
    __syncthreads();
    for (int vector = OpaqueWarp(); vector <= heads_; vector += kWarps) {
      float square = 0;
      for (int c = OpaqueLane(); c < a_.head_dim; c += 32) {
        square = fmaf(s_.inputs[vector][c], s_.inputs[vector][c], square);
      }
      square = SumOfWarp(square);
      if (a_.map.unit) {
        const float factor = a_.map.input_scale * InverseLength(a_, square / 2);
        for (int c = OpaqueLane(); c < a_.head_dim; c += 32) s_.inputs[vector][c] *= factor;
      }
      if (OpaqueLane() != 0) continue;
      s_.half_square[vector] = HalfSquareOf(a_, square / 2);
      s_.maximum[vector] = IsExponential(a_) ? -INFINITY : 0;
      s_.total[vector] = 0;
      if (vector == 0) s_.reference = s_.key_maximum = -INFINITY;
    }
    if (a_.map.unit) __syncthreads();  // the inputs have been changed
    if (a_.map.gated) {
      const float* gates = GatesOf(a_, batch_ * a_.kv_heads + kv_head_, token);
      log_gate_ = gates[1] - (token == 0 ? 0 : gates[-1]);
      log_input_gate_ = gates[0] + gates[1];
    }
#pragma unroll
    for (int h = 0; h < kHeads; ++h) result_[h] = make_float4(0, 0, 0, 0);
    feature_values_ = make_float4(0, 0, 0, 0);
  }

  // Four threads have a row of W, and 4 of every 16 channels each.
  __device__ void Project(int64_t tile) {
    const int row = Thread() / 4, quarter = OpaqueLane() % 4;
    const int64_t projection = tile * TileProjections(a_) + row;
    const bool pair = IsPair(a_), is_sin_cos = a_.map.feature == Feature::kSinCos;
    const bool exists = row < TileProjections(a_) && projection < a_.map.projections;
    float dots[kVectors] = {};
    for (int c = quarter * 4; exists && c < a_.head_dim; c += 16) {
      const float4 x = FetchMatrix(a_, kv_head_, projection, c);
#pragma unroll
      for (int vector = 0; vector < kVectors; ++vector) {
        if (vector > heads_) break;
        const float4 y = *reinterpret_cast<const float4*>(s_.inputs[vector] + c);
        dots[vector] = fmaf(x.x, y.x, fmaf(x.y, y.y, fmaf(x.z, y.z, fmaf(x.w, y.w, dots[vector]))));
      }
    }
#pragma unroll
    for (int vector = 0; vector < kVectors; ++vector) {
      if (vector > heads_) break;
      const float dot = SumOfFour(dots[vector]);
      if (quarter != 0 || row >= TileProjections(a_)) continue;
      const float none = IsExponential(a_) ? -INFINITY : 0;
      float second = -dot, first = dot;
      if (is_sin_cos) sincosf(dot, &first, &second);
      // The places are those of AddProjections.
      float* to = s_.features[vector] + (pair ? row / 16 * 32 + row % 16 : row);
      to[0] = exists ? first : none;
      if (pair) to[16] = exists ? second : none;
    }
  }

  // Makes the features of one vector, by one warp.
  __device__ void MakeFeatures(int64_t tile, int vector) {
    float* features = s_.features[vector];
    float low = features[OpaqueLane()], high = features[OpaqueLane() + 32];
    const float before = s_.maximum[vector];
    float now = before;
    if (IsExponential(a_)) {
      now = fmaxf(now, MaxOfWarp(fmaxf(low, high)));
      low = ExpOf(low - now);
      high = ExpOf(high - now);
    } else if (a_.map.feature == Feature::kRelu) {
      low = low < 0 ? 0 : low;
      high = high < 0 ? 0 : high;
    }
    const float factor = Rescale(before, now), sum = SumOfWarp(low + high);
    features[OpaqueLane()] = low;
    features[OpaqueLane() + 32] = high;
    __syncwarp();  // all lanes have read the maximum
    if (OpaqueLane() == 0) {
      s_.maximum[vector] = now;
      s_.factor[vector] = factor;
      s_.total[vector] = fmaf(s_.total[vector], factor, sum);
    }
    if (vector == 0) ScaleKey(tile, now, low, high, sum);
  }
  __device__ void ScaleKey(int64_t tile, float maximum, float low, float high, float sum) {
    float* header = state_ + tile * a_.sums.tile + (kTile + 1) * a_.sums.row;
    const float before = header[0] + log_gate_, largest = header[1];
    const float log_scale = IsExponential(a_) ? maximum - s_.half_square[0] : log_input_gate_;
    const float reference = is_seen_ ? fmaxf(before, AsReference(log_scale)) : before;
    const float scale = is_seen_ ? ExpOf(log_scale - Shift(reference)) : 0;
    s_.scaled_key[OpaqueLane()] = scale * low;
    s_.scaled_key[OpaqueLane() + 32] = scale * high;
    __syncwarp();  // all lanes have read the header
    if (OpaqueLane() != 0) return;
    s_.scaled_key[kTile] = scale * sum;
    header[0] = reference;
    header[1] = is_seen_ ? fmaxf(largest, maximum) : largest;
    s_.tile_rescale = Rescale(before, reference);
    const float of_all = fmaxf(s_.reference, reference);
    s_.result_rescale = Rescale(s_.reference, of_all);
    s_.tile_scale = reference == -INFINITY ? 0 : Rescale(reference, of_all);
    s_.reference = of_all;
    s_.key_maximum = fmaxf(s_.key_maximum, header[1]);
  }

  __device__ static void AddTo(float4* sum, float factor, const float4& x) {
    sum->x = fmaf(factor, x.x, sum->x);
    sum->y = fmaf(factor, x.y, sum->y);
    sum->z = fmaf(factor, x.z, sum->z);
    sum->w = fmaf(factor, x.w, sum->w);
  }

  __device__ float4* SumsAt(int64_t tile, int row) const {
    return reinterpret_cast<float4*>(state_ + tile * a_.sums.tile + row * a_.sums.row) + quad_;
  }
  // Starts to load rows from `first` on; those of the first call arrive while features are made.
  __device__ void FetchSums(int64_t tile, int first) {
    if (part_ >= parts_) return;
#pragma unroll
    for (int n = 0; n < kRowsAtOnce; ++n) {
      const int row = first + n * parts_;
      if (row <= kTile) rows_[n] = *SumsAt(tile, row);
    }
  }
  __device__ void PassOverSums(int64_t tile) {
    if (part_ >= parts_) return;
    const float4 value = *reinterpret_cast<const float4*>(s_.value + quad_ * 4);
    const float rescale = s_.tile_rescale, scale = s_.tile_scale;
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      if (h < heads_) result_[h] = Times(result_[h], s_.factor[1 + h] * s_.result_rescale);
    }
    feature_values_ = Times(feature_values_, s_.result_rescale);
    for (int first = part_; first <= kTile; first += kRowsAtOnce * parts_) {
      if (first > part_) FetchSums(tile, first);
#pragma unroll
      for (int n = 0; n < kRowsAtOnce; ++n) {
        const int row = first + n * parts_;
        if (row > kTile) break;
        float4 sum = Times(rows_[n], rescale);
        AddTo(&sum, s_.scaled_key[row], value);
        *SumsAt(tile, row) = sum;
        if (row == kTile) {
          AddTo(&feature_values_, scale, sum);
          break;
        }
#pragma unroll
        for (int h = 0; h < kHeads; ++h) {
          if (h < heads_) AddTo(&result_[h], scale * s_.features[1 + h][row], sum);
        }
      }
    }
  }

  // Sums the result over the threads of a column.
  __device__ void CollectResult() {
    if (part_ == kTile % parts_) {
      *reinterpret_cast<float4*>(s_.feature_values + quad_ * 4) = feature_values_;
    }
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      if (h >= heads_) break;
      s_.parts[Thread()] = result_[h];
      __syncthreads();
      if (part_ == 0) {
        float4 sum = make_float4(0, 0, 0, 0);
        for (int part = 0; part < parts_; ++part) AddTo(&sum, 1, s_.parts[part * quads_ + quad_]);
        *reinterpret_cast<float4*>(s_.result[h] + quad_ * 4) = sum;
      }
      __syncthreads();
    }
    if (Thread() < heads_) {
      const int vector = Thread() + 1;
      s_.factors[Thread()] =
          FactorsOf(a_, {s_.maximum[vector], s_.half_square[vector], s_.total[vector]},
                    s_.reference, s_.key_maximum);
    }
    __syncthreads();
  }

  __device__ float ResultOf(int h, int column) const {
    const RowFactors& factors = s_.factors[h];
    float y = factors.product * s_.result[h][column];
    if (a_.constants.epsilon == 0) return y;
    return y + factors.key * s_.feature_values[column] + factors.constant * s_.value_sums[column];
  }

  __device__ void StoreRows(int64_t token) {
    const bool has_keys = s_.reference != -INFINITY;
    for (int h = 0; h < heads_; ++h) {
      const int64_t head = kv_head_ * heads_ + h;
      float denominator = 0;
      if (has_keys) {
        denominator =
            HoldDenominator(a_, ResultOf(h, static_cast<int>(a_.sums.ones)) + s_.factors[h].extra,
                            s_.factors[h].log_scale, Thread() == 0);
      }
      const float inverse = denominator == 0 ? 0 : 1 / denominator;
      for (int c = Thread() * 4; c < a_.value_dim; c += kThreads * 4) {
        float y[4];
        for (int n = 0; n < 4; ++n) y[n] = has_keys ? ResultOf(h, c + n) * inverse : 0;
        StoreOut(a_, batch_, head, token, c, a_.value_dim - c, make_float4(y[0], y[1], y[2], y[3]));
      }
      if (Thread() == 0) {
        StoreLogSumExp(a_, batch_, head, token, denominator, s_.factors[h].log_scale, has_keys);
      }
    }
  }

  const LinearArguments& a_;
  Shared& s_;
  const int64_t batch_, kv_head_;
  float* state_;
  int quads_, parts_;  // quads of columns in a row; threads that share a column
  int quad_, part_;
  int heads_;
  bool is_seen_ = false;
  float log_gate_ = 0, log_input_gate_ = 0;  // log g and log(1 - g) of the token
  float4 rows_[kRowsAtOnce] = {};            // rows that are being loaded
  float4 result_[kHeads];
  float4 feature_values_;
};

template <int kHeads>
__global__ void __launch_bounds__(kThreads) LinearAppend(const LinearArguments a) {
  using Block = AppendBlock<kHeads>;
  auto* shared =
      reinterpret_cast<typename Block::Shared*>(DynamicShared<sizeof(typename Block::Shared)>());
  for (int64_t head = blockIdx.x; head < a.batch * a.kv_heads; head += gridDim.x) {
    Block(a, head, shared).Run();
  }
}

template <int kHeads>
const char* LaunchAppend(const char* name, const LinearArguments& a, void* stream) {
  return Launch(name, &LinearAppend<kHeads>,
                {BlocksInTurns(a.batch * a.kv_heads, a.max_blocks), kThreads,
                 sizeof(typename AppendBlock<kHeads>::Shared)},
                stream, a);
}

// All instantiations: one query head a key-value head, or up to kLinearAppendHeads.
const char* Append(const LinearArguments& a, void* stream) {
  return a.query_heads == a.kv_heads
             ? LaunchAppend<1>("LinearAppend<1>", a, stream)
             : LaunchAppend<kLinearAppendHeads>("LinearAppend<8>", a, stream);
}

}  // namespace

TFB_KERNEL_TABLE(LinearAppendKernels, {&Append});

}  // namespace tfb
