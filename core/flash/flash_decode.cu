// Engine flash for a few queries against many keys: decoding, where keys and values are read once
// and reading them is all the work.
//
// The query heads that share a key-value head, and their queries, are up to 8 rows. A block of 128
// threads does them together, for one part of the keys (see FlashArguments::splits). kDim / 8 lanes
// take a key, 8 channels a lane, so that a row of 16-bit keys is one 16-byte read a lane; a warp
// takes 16 of a tile's 64 keys. Each group of lanes keeps a softmax of its own over the keys that
// it has seen; groups, warps and parts are merged at the end, in a fixed order.
//
// Arithmetic of one key, D = 128 in bf16, 8 rows: 512 bytes, 2 x 8 x 128 multiply-adds and 8 x 4
// shuffles of 16 lanes. An H100 reads about 15 bytes a cycle and multiprocessor, 34 cycles a key, in
// which it issues 136 warp instructions; the key takes some 90. In flight are the keys and values of
// 4 passes: 128 threads x 8 x 16 B = 16 KiB a block.
#include "core/flash/flash_tile.cuh"

namespace tfb {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kWarp;
constexpr int kRows = kFlashDecodeRows;
constexpr int kChannels = 8;  // of a lane
constexpr int kKeysPerWarp = kKeys / kWarps;

template <class T>
__device__ inline float ToFloat(T x);
template <>
__device__ inline float ToFloat(float x) {
  return x;
}
template <>
__device__ inline float ToFloat(__nv_bfloat16 x) {
  return __bfloat162float(x);
}
template <>
__device__ inline float ToFloat(__half x) {
  return __half2float(x);
}

// 8 channels of one row, in memory order.
template <class T>
struct Piece {
  static constexpr int kVectors = kChannels * sizeof(T) / sizeof(uint4);
  uint4 vectors[kVectors];

  // Loads channels `first` on of a row, zeros beyond its `channels`.
  __device__ void Load(const T* row, int64_t stride, int first, int channels) {
    if (first + kChannels <= channels && stride == 1 &&
        reinterpret_cast<uintptr_t>(row + first) % sizeof(uint4) == 0) {
#pragma unroll
      for (int n = 0; n < kVectors; ++n) {
        vectors[n] = reinterpret_cast<const uint4*>(row + first)[n];
      }
      return;
    }
    T* elements = reinterpret_cast<T*>(vectors);
    Clear();
#pragma unroll
    for (int c = 0; c < kChannels; ++c) {
      if (first + c < channels) elements[c] = row[(first + c) * stride];
    }
  }
  __device__ void Clear() {
#pragma unroll
    for (int n = 0; n < kVectors; ++n) vectors[n] = make_uint4(0, 0, 0, 0);
  }
  __device__ float At(int c) const { return ToFloat(reinterpret_cast<const T*>(vectors)[c]); }
};

// A softmax of one row over some keys, in 8 channels.
struct Part {
  float maximum = -INFINITY;
  float sum = 0;
  float output[kChannels] = {};

  __device__ void Add(const Part& other) {
    const float largest = fmaxf(maximum, other.maximum);
    const float shift = largest == -INFINITY ? 0 : largest;
    const float own = ExpOf(maximum - shift), others = ExpOf(other.maximum - shift);
    maximum = largest;
    sum = sum * own + other.sum * others;
#pragma unroll
    for (int c = 0; c < kChannels; ++c) output[c] = output[c] * own + other.output[c] * others;
  }
};

template <class T, int kDim>
class FlashDecodeBlock {
 public:
  static constexpr int kLanes = kDim / kChannels;                // lanes that share a key
  static constexpr int kPasses = kKeysPerWarp * kLanes / kWarp;  // passes of a warp over a tile
  // Passes whose reads are in flight together.
  static constexpr int kAtOnce = kPasses < 4 ? kPasses : 4;
  static constexpr size_t kSharedFloats = kRows * kDim + kWarps * kRows * (kDim + 2);

  // `task.head` is the first query head of the group.
  __device__ FlashDecodeBlock(const FlashArguments& a, const FlashTask& task, float* memory)
      : a_(a), task_(task), queries_(memory), memory_(memory + kRows * kDim) {
    lane_ = threadIdx.x % kWarp % kLanes;
    group_ = threadIdx.x % kWarp / kLanes;
    warp_ = threadIdx.x / kWarp;
    rows_ = static_cast<int>(a.query_heads / a.kv_heads * a.query_tokens);
  }

  __device__ void Run() {
    bool any = false;
    for (int r = 0; r < rows_; ++r) any = any || IsAsked(a_, task_.batch, QueryOf(r));
    if (!any) return;
    LoadQueries();
    __syncthreads();
    TileWalk walk(a_, task_, a_.decode_queries);
    while (walk.Next()) {
#pragma unroll 1
      for (int pass = 0; pass < kPasses; pass += kAtOnce) AddKeys(walk, pass);
    }
    Merge();
  }

 private:
  __device__ int64_t HeadOf(int row) const { return task_.head + row / a_.query_tokens; }
  __device__ int64_t QueryOf(int row) const { return row % a_.query_tokens; }

  __device__ void LoadQueries() {
    for (int n = threadIdx.x; n < rows_ * kDim; n += kThreads) {
      const int row = n / kDim, channel = n % kDim;
      if (!IsAsked(a_, task_.batch, QueryOf(row))) {
        queries_[n] = 0;
        continue;
      }
      const int64_t token = a_.query_order(task_.batch, HeadOf(row), QueryOf(row));
      const int64_t offset = task_.batch * a_.q.strides[0] + HeadOf(row) * a_.q.strides[1] +
                             token * a_.q.strides[2] + channel * a_.q.strides[3];
      queries_[n] = channel < a_.head_dim ? LoadElement(a_.q.data, a_.q.element, offset) : 0;
    }
  }

  __device__ const T* RowOf(const DeviceView& view, int64_t token) const {
    return static_cast<const T*>(view.data) + task_.batch * view.strides[0] +
           task_.kv_head * view.strides[1] + token * view.strides[2];
  }

  // Adds the keys of passes `first` to first + kAtOnce - 1.
  __device__ void AddKeys(const TileWalk& walk, int first) {
    Piece<T> keys[kAtOnce], values[kAtOnce];
    unsigned is_token = 0;
#pragma unroll
    for (int p = 0; p < kAtOnce; ++p) {
      const int c = KeyOf(first + p);
      if (IsToken(a_, task_, walk.tile(), c)) {
        is_token |= 1u << p;
        const int64_t token = KeyToken(a_, task_, walk.tile(), c);
        keys[p].Load(RowOf(a_.k, token), a_.k.strides[3], lane_ * kChannels, a_.head_dim);
        values[p].Load(RowOf(a_.v, token), a_.v.strides[3], lane_ * kChannels, a_.value_dim);
      } else {
        keys[p].Clear();
        values[p].Clear();
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (r >= rows_) break;
      const uint64_t mask = walk.Mask(QueryOf(r), static_cast<int>(QueryOf(r)), a_.decode_queries);
      unsigned visible = 0;
#pragma unroll
      for (int p = 0; p < kAtOnce; ++p) {
        visible |= static_cast<unsigned>(mask >> KeyOf(first + p) & 1) << p;
      }
      AddToRow(walk.tile(), first, r, keys, values, visible & is_token, parts_[r]);
    }
  }
  __device__ int KeyOf(int pass) const {
    return warp_ * kKeysPerWarp + pass * (kWarp / kLanes) + group_;
  }

  // Adds keys to a row. Bit p of `visible` says that the row sees the key of pass first + p.
  __device__ void AddToRow(int64_t tile, int first, int row, const Piece<T> (&keys)[kAtOnce],
                           const Piece<T> (&values)[kAtOnce], unsigned visible, Part& part) {
    float query[kChannels];
#pragma unroll
    for (int c = 0; c < kChannels; c += 4) {
      const float4 x =
          *reinterpret_cast<const float4*>(queries_ + row * kDim + lane_ * kChannels + c);
      query[c] = x.x, query[c + 1] = x.y, query[c + 2] = x.z, query[c + 3] = x.w;
    }
    float scores[kAtOnce];
    float largest = part.maximum;
#pragma unroll
    for (int p = 0; p < kAtOnce; ++p) {
      float score = 0;
#pragma unroll
      for (int c = 0; c < kChannels; ++c) score = fmaf(query[c], keys[p].At(c), score);
      score = SumOfLanes<kLanes>(score);
      scores[p] = -INFINITY;
      if ((visible >> p & 1) != 0) {
        scores[p] = score * a_.scale + BiasOf(row, tile, KeyOf(first + p));
      }
      largest = fmaxf(largest, scores[p]);
    }
    const float shift = largest == -INFINITY ? 0 : largest;
    const float rescale = ExpOf(part.maximum - shift);
    part.maximum = largest;
    part.sum *= rescale;
#pragma unroll
    for (int c = 0; c < kChannels; ++c) part.output[c] *= rescale;
#pragma unroll
    for (int p = 0; p < kAtOnce; ++p) {
      // A key that the row does not see adds nothing, whatever its value is.
      if ((visible >> p & 1) == 0) continue;
      const float weight = ExpOf(scores[p] - shift);
      part.sum += weight;
#pragma unroll
      for (int c = 0; c < kChannels; ++c) {
        part.output[c] = fmaf(weight, values[p].At(c), part.output[c]);
      }
    }
  }

  __device__ float BiasOf(int row, int64_t tile, int key) const {
    const DistanceEntries& table = a_.rule.bias;
    if (table.values == nullptr) return 0;
    return table.Of(HeadOf(row))[tile * kKeys + key - QueryOf(row) - a_.rule.query_position];
  }

  // Merges the parts of a warp's groups by shuffles, and those of the warps through shared memory.
  __device__ void Merge() {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (r >= rows_) break;
      Part& part = parts_[r];
#pragma unroll
      for (int step = kLanes; step < kWarp; step *= 2) {
        Part other;
        other.maximum = __shfl_xor_sync(~0u, part.maximum, step);
        other.sum = __shfl_xor_sync(~0u, part.sum, step);
#pragma unroll
        for (int c = 0; c < kChannels; ++c) {
          other.output[c] = __shfl_xor_sync(~0u, part.output[c], step);
        }
        part.Add(other);
      }
      if (group_ == 0) {
        float* to = memory_ + (warp_ * kRows + r) * (kDim + 2);
#pragma unroll
        for (int c = 0; c < kChannels; ++c) to[lane_ * kChannels + c] = part.output[c];
        if (lane_ == 0) to[kDim] = part.maximum;
        if (lane_ == 0) to[kDim + 1] = part.sum;
      }
    }
    __syncthreads();
    for (int r = warp_; r < rows_; r += kWarps) {
      if (IsAsked(a_, task_.batch, QueryOf(r))) StoreRow(r);
    }
  }

  // Stores a row; one warp calls it.
  __device__ void StoreRow(int row) const {
    const auto part = [&](int warp) { return memory_ + (warp * kRows + row) * (kDim + 2); };
    float largest = -INFINITY;
    for (int w = 0; w < kWarps; ++w) largest = fmaxf(largest, part(w)[kDim]);
    const float shift = largest == -INFINITY ? 0 : largest;
    float factors[kWarps], sum = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      factors[w] = ExpOf(part(w)[kDim] - shift);
      sum = fmaf(factors[w], part(w)[kDim + 1], sum);
    }
    FlashTask task = task_;
    task.head = HeadOf(row);
    const int64_t i = QueryOf(row);
    const int64_t token = a_.query_order(task.batch, task.head, i);
    const OutputRow output(a_, task, i, token, sum);
    for (int c = threadIdx.x % kWarp; c < a_.value_dim; c += kWarp) {
      float value[1] = {0};
#pragma unroll
      for (int w = 0; w < kWarps; ++w) value[0] = fmaf(factors[w], part(w)[c], value[0]);
      output.Store(c, value);
    }
    if (threadIdx.x % kWarp == 0) StoreSums(a_, task, i, token, largest, sum);
  }

  const FlashArguments& a_;
  const FlashTask task_;
  float* queries_;  // [kRows][kDim]
  float* memory_;   // [kWarps][kRows][kDim + 2]: output, maximum, sum
  int lane_;
  int group_;
  int warp_;
  int rows_;
  Part parts_[kRows];
};

template <class T, int kDim>
__global__ void __launch_bounds__(kThreads, 2) FlashDecode(const FlashArguments a) {
  float* memory = reinterpret_cast<float*>(DynamicShared());
  const int64_t tasks = a.batch * a.kv_heads * a.splits;
  for (int64_t n = blockIdx.x; n < tasks; n += gridDim.x) {
    FlashTask task;
    task.split = n % a.splits;
    task.kv_head = n / a.splits % a.kv_heads;
    task.batch = n / a.splits / a.kv_heads;
    task.head = task.kv_head * (a.query_heads / a.kv_heads);
    task.query_tile = 0;
    FlashDecodeBlock<T, kDim>(a, task, memory).Run();
    __syncthreads();
  }
}

template <class T, int kDim>
const char* LaunchDecode(const FlashArguments& a, void* stream) {
  const int64_t tasks = a.batch * a.kv_heads * a.splits;
  return Launch("FlashDecode", &FlashDecode<T, kDim>,
                {BlocksInTurns(tasks, a.max_blocks), kThreads,
                 FlashDecodeBlock<T, kDim>::kSharedFloats * sizeof(float)},
                stream, a);
}

// All instantiations: three dtypes of keys and values, four head sizes.
template <class T>
const char* DecodeOf(const FlashArguments& a, void* stream) {
  const int widest = a.head_dim > a.value_dim ? a.head_dim : a.value_dim;
  if (widest <= 32) return LaunchDecode<T, 32>(a, stream);
  if (widest <= 64) return LaunchDecode<T, 64>(a, stream);
  if (widest <= 128) return LaunchDecode<T, 128>(a, stream);
  return LaunchDecode<T, 256>(a, stream);
}

const char* Decode(const FlashArguments& a, void* stream) {
  switch (a.k.element) {
    case Element::kBf16:
      return DecodeOf<__nv_bfloat16>(a, stream);
    case Element::kF16:
      return DecodeOf<__half>(a, stream);
    default:
      return DecodeOf<float>(a, stream);
  }
}

}  // namespace

TFB_KERNEL_TABLE(FlashDecodeKernels, {&Decode});

}  // namespace tfb
