// Engine flash for a few queries against many keys: decoding, where keys and values are read once
// and reading them is all the work.
//
// The query heads that share a key-value head, and their queries, are up to 8 rows; a kernel of its
// own has one row. A block of 128 threads does them together, for one part of the keys (see
// FlashArguments::splits), and each of its warps takes 16 of a tile's 64 keys. kDim / 8 lanes, as many
// as rows at least, take a key together.
//
//   products, outputs   a lane has its 8 channels (of 8 rows at D = 32: 4) of all rows
//   softmax             a lane has one row: of 16 lanes, lanes 2 r and 2 r + 1 have row r of 8
//
// 8 sums over 16 lanes take 8 shuffles, after which each row's score is where its maximum, its sum
// and its mask are; 8 shuffles bring the weights back. A lane so computes one exponential for a key
// and not 8. Each group of lanes keeps a softmax of its own over the keys that it has seen; groups,
// warps and parts are merged at the end, in a fixed order.
//
// Arithmetic of one key, D = 128 in bf16: 512 bytes, for which an H100 has 34 cycles a multiprocessor
// (about 15 bytes a cycle), in which it issues 136 instructions. With 8 rows, a warp, which does two
// keys at a time, has 2 x 64 multiply-adds, 16 conversions, 17 shuffles and about as many selections:
// 100 instructions a key with all else. With one row 16 multiply-adds, 16 conversions and 4 shuffles
// are left. In flight are the keys and values of kAtOnce passes: 128 threads x 8 x 16 B = 16 KiB a
// block, whatever the dtype. 64 outputs a lane, 32 words in flight and the products of 8 rows with 2
// keys are 112 of the 168 registers that 3 blocks leave a thread; of one row 8 outputs are left, and 5
// blocks have 96 registers a thread.
#include "core/cuda/register_tile.cuh"
#include "core/flash/flash_tile.cuh"

namespace tfb {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kWarp;
constexpr int kKeysPerWarp = kKeys / kWarps;
constexpr float kHidden = -1;  // in place of the weight of a key that a row does not see

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

// How the channels of a row lie in the lanes that share it, and in shared memory. A lane reads
// vectors of kEach channels, and the lanes' vectors follow each other, so that a read of all is of
// consecutive bytes. In shared memory the lanes' groups of 4 channels follow each other, so that a
// read of 16 bytes a lane meets every bank once.
template <class T, int kDim, int kRows>
struct LaneChannels {
  static constexpr int kLanes = kDim < 8 * kRows ? kRows : kDim / 8;
  static constexpr int kCount = kDim / kLanes;  // of a lane
  static constexpr int kEach = kCount * sizeof(T) < 16 ? kCount : 16 / sizeof(T);

  // Returns the channel that is a lane's channel 0 of vector n.
  __device__ static int First(int lane, int n) { return (n * kLanes + lane) * kEach; }
  // Returns where in a row of shared memory a lane has its group n of 4 channels.
  __device__ static int Place(int lane, int n) { return (n * kLanes + lane) * 4; }
  // Returns where in a row of shared memory a channel is.
  __device__ static int PlaceOf(int channel) {
    const int lane = channel / kEach % kLanes,
              c = channel / (kEach * kLanes) * kEach + channel % kEach;
    return Place(lane, c / 4) + c % 4;
  }
};

// A lane's channels of one row.
template <class T, int kDim, int kRows>
struct Piece {
  using Channels = LaneChannels<T, kDim, kRows>;
  static constexpr int kWords = Channels::kCount * sizeof(T) / sizeof(uint32_t);
  uint32_t words[kWords];

  __device__ void Clear() {
#pragma unroll
    for (int n = 0; n < kWords; ++n) words[n] = 0;
  }
  // Loads a row, zeros beyond its `channels`. `is_aligned` says whether vectors may be read.
  __device__ void Load(const T* row, int64_t stride, int lane, int channels, bool is_aligned) {
    constexpr int kEach = Channels::kEach, kOfVector = kEach * sizeof(T) / sizeof(uint32_t);
#pragma unroll
    for (int n = 0; n < kWords / kOfVector; ++n) {
      const int first = Channels::First(lane, n);
      uint32_t vector[kOfVector] = {};
      if (is_aligned && first + kEach <= channels) {
        LoadVectors(reinterpret_cast<const uint32_t*>(row + first), vector);
      } else {
        LoadElements(row + first * stride, stride, min(channels - first, kEach), vector);
      }
#pragma unroll
      for (int c = 0; c < kOfVector; ++c) words[n * kOfVector + c] = vector[c];
    }
  }
  // Puts `count` elements into words that are 0. It is no unrolled loop, whose addresses would take
  // registers from the vectors' path.
  template <int kCount>
  __device__ static void LoadElements(const T* from, int64_t stride, int count,
                                      uint32_t (&to)[kCount]) {
    constexpr int kOfWord = sizeof(uint32_t) / sizeof(T);
#pragma unroll 1
    for (int c = 0; c < count; ++c) {
      uint32_t bits = 0;
      *reinterpret_cast<T*>(&bits) = from[c * stride];
      bits <<= c % kOfWord * 8 * sizeof(T);
#pragma unroll
      for (int n = 0; n < kCount; ++n) to[n] |= n == c / kOfWord ? bits : 0;
    }
  }
  __device__ float At(int c) const { return ToFloat(reinterpret_cast<const T*>(words)[c]); }
};

// Returns task `index` of the grid's. Its head is the first query head of the group.
__device__ inline FlashTask DecodingTask(const FlashArguments& a, int64_t index) {
  FlashTask task;
  task.split = index % a.splits;
  index /= a.splits;
  task.kv_head = index % a.kv_heads;
  task.batch = index / a.kv_heads;
  task.head = task.kv_head * (a.query_heads / a.kv_heads);
  task.query_tile = 0;
  return task;
}

template <class T, int kDim, int kRows>
class FlashDecodeBlock {
 public:
  using Channels = LaneChannels<T, kDim, kRows>;
  static constexpr int kLanes = Channels::kLanes;     // that share a key
  static constexpr int kOfRow = kLanes / kRows;       // lanes that have the same row
  static constexpr int kChannels = Channels::kCount;  // of a lane
  static constexpr int kKeysPerPass = kWarp / kLanes;
  static constexpr int kPasses = kKeysPerWarp / kKeysPerPass;  // of a warp over a tile
  // Passes whose reads are in flight together: 64 bytes of keys a lane, or a tile.
  static constexpr int kMostAtOnce = sizeof(T) == 4 ? 2 : 4;
  static constexpr int kAtOnce = kPasses < kMostAtOnce ? kPasses : kMostAtOnce;
  static_assert(kPasses % kAtOnce == 0 && kAtOnce % 2 == 0, "whole batches of pairs");
  static constexpr int kPart =
      kDim + 4;  // a row's outputs, maximum and sum, in multiples of 16 bytes

  struct Shared {
    union {
      float queries[kRows][kDim];         // by their places
      float parts[kWarps][kRows][kPart];  // at the end, of each warp
    };
    // These numbers take a division, or are needed once a tile: they would take registers otherwise.
    FlashTask task;
    const T* keys;  // of the head
    const T* values;
    bool keys_are_aligned;  // so that vectors of them may be read
    bool values_are_aligned;
    const uint8_t* key_mask;     // of the batch row, or null
    const int32_t* key_order;    // of the head, or null
    int row_queries[kRows];      // the query of each row
    const float* biases[kRows];  // of each row, to be indexed by keys; null where there are none
    WalkState walks[kWarps];     // those of lanes 0
  };

  __device__ FlashDecodeBlock(const FlashArguments& a, int64_t task, Shared& shared)
      : a_(a),
        shared_(shared),
        rows_(static_cast<int>(a.query_heads / a.kv_heads * a.query_tokens)) {
    Begin(DecodingTask(a, task));
  }

  __device__ void Run() {
    if (!IsAnyAsked()) return;
    if (Lane() == 0) shared_.walks[Warp()].Begin(a_, shared_.task, a_.decode_queries);
    for (KeyTile tile = NextTile(); tile.index >= 0; tile = NextTile()) AddTile(tile);
    Merge();
  }

 private:
  using OfKey = Piece<T, kDim, kRows>;

  __device__ static int lane() { return Lane() % kLanes; }
  __device__ static int group() { return Lane() / kLanes; }
  // Returns the row that this lane has in the softmax; lanes beyond the rows repeat the last.
  __device__ int row() const { return min(lane() / kOfRow, rows_ - 1); }
  __device__ int QueryOf(int row) const { return row % static_cast<int>(a_.query_tokens); }
  __device__ int64_t HeadOf(const FlashTask& task, int row) const {
    return task.head + row / static_cast<int>(a_.query_tokens);
  }

  // Ends with a barrier.
  __device__ void Begin(const FlashTask& task) {
    const int t = static_cast<int>(threadIdx.x);
    if (t < rows_) {
      const DistanceEntries& table = a_.rule.bias;
      const int64_t position = QueryOf(t) + a_.rule.query_position;
      shared_.row_queries[t] = QueryOf(t);
      shared_.biases[t] = table.values == nullptr ? nullptr : table.Of(HeadOf(task, t)) - position;
    }
    if (t == 0) {
      shared_.task = task;
      shared_.keys = HeadOf(task, a_.k);
      shared_.values = HeadOf(task, a_.v);
      shared_.keys_are_aligned = IsAligned(a_.k, shared_.keys);
      shared_.values_are_aligned = IsAligned(a_.v, shared_.values);
      shared_.key_mask =
          a_.key_mask == nullptr ? nullptr : a_.key_mask + task.batch * a_.key_mask_strides[0];
      shared_.key_order =
          a_.key_order.tokens == nullptr ? nullptr : a_.key_order.Of(task.batch, task.kv_head);
    }
    LoadQueries(task);
    __syncthreads();
  }
  __device__ const T* HeadOf(const FlashTask& task, const DeviceView& view) const {
    return static_cast<const T*>(view.data) + task.batch * view.strides[0] +
           task.kv_head * view.strides[1];
  }
  __device__ static bool IsAligned(const DeviceView& view, const T* head) {
    constexpr int kBytes = Channels::kEach * sizeof(T);
    return view.strides[3] == 1 && reinterpret_cast<uintptr_t>(head) % kBytes == 0 &&
           view.strides[2] * static_cast<int64_t>(sizeof(T)) % kBytes == 0;
  }
  __device__ void LoadQueries(const FlashTask& task) {
#pragma unroll 1
    for (int n = threadIdx.x; n < rows_ * kDim; n += kThreads) {
      const int row = n / kDim, channel = n % kDim, i = QueryOf(row);
      float value = 0;
      if (channel < a_.head_dim && IsAsked(a_, task.batch, i)) {
        const int64_t head = HeadOf(task, row), token = a_.query_order(task.batch, head, i);
        const int64_t offset = task.batch * a_.q.strides[0] + head * a_.q.strides[1] +
                               token * a_.q.strides[2] + channel * a_.q.strides[3];
        value = LoadElement(a_.q.data, a_.q.element, offset);
      }
      shared_.queries[row][Channels::PlaceOf(channel)] = value;
    }
  }
  __device__ bool IsAnyAsked() const {
    bool any = false;
    for (int i = 0; i < a_.query_tokens; ++i) any = any || IsAsked(a_, shared_.task.batch, i);
    return any;
  }

  // Returns the token that is key `c` of the tile, or -1 where that is none.
  __device__ int TokenOf(int64_t tile, int c) const {
    if (tile * kKeys + c >= a_.kv_tokens) return -1;
    const int64_t row = FirstKeyRow(a_, tile) + c;
    const int64_t token = shared_.key_order == nullptr ? row : shared_.key_order[row];
    if (shared_.key_mask == nullptr) return static_cast<int>(token);
    return shared_.key_mask[token * a_.key_mask_strides[1]] == 0 ? -1 : static_cast<int>(token);
  }

  // Returns the next tile of the warp's walk; its index is -1 after the last.
  __device__ KeyTile NextTile() {
    KeyTile tile = {-1, 0};
    if (Lane() == 0) {
      WalkState& walk = shared_.walks[Warp()];
      if (walk.Next(a_.schedule)) tile = walk.key_tile(a_.schedule);
    }
    return {__shfl_sync(kAllLanes, tile.index, 0), __shfl_sync(kAllLanes, tile.mask, 0)};
  }

  // Adds the keys of a tile that are this warp's.
  __device__ void AddTile(const KeyTile& tile) {
    const int first = Warp() * kKeysPerWarp, key = Lane() % kKeysPerWarp;
    const int token = TokenOf(tile.index, first + key);
    const unsigned tokens = __ballot_sync(kAllLanes, Lane() < kKeysPerWarp && token >= 0);
    const int query = shared_.row_queries[row()];
    const uint64_t mask = MaskOf(a_.schedule, tile, query, query, a_.decode_queries);
    const unsigned visible = static_cast<unsigned>(mask >> first) & tokens;
    if (__any_sync(kAllLanes, visible != 0) == 0) return;
#pragma unroll 1
    for (int pass = 0; pass < kPasses; pass += kAtOnce) AddKeys(tile.index, pass, token, visible);
  }
  __device__ static int KeyOf(int pass) { return pass * kKeysPerPass + group(); }  // of the warp's

  // Adds the keys of passes `first` to first + kAtOnce - 1 of a tile. Lane n has the token of the
  // warp's key n. Bit n of `visible` says that this lane's row sees it.
  __device__ void AddKeys(int64_t tile, int first, int token, unsigned visible) {
    int tokens[kAtOnce];
#pragma unroll
    for (int p = 0; p < kAtOnce; ++p) {
      tokens[p] = __shfl_sync(kAllLanes, token, KeyOf(first + p));
    }
    OfKey keys[kAtOnce], values[kAtOnce];
#pragma unroll
    for (int p = 0; p < kAtOnce; ++p) {
      keys[p].Clear();
      values[p].Clear();
      const int64_t t = tokens[p];
      if (t < 0) continue;
      keys[p].Load(shared_.keys + t * a_.k.strides[2], a_.k.strides[3], lane(), a_.head_dim,
                   shared_.keys_are_aligned);
      values[p].Load(shared_.values + t * a_.v.strides[2], a_.v.strides[3], lane(), a_.value_dim,
                     shared_.values_are_aligned);
    }
    float scores[kAtOnce];
#pragma unroll
    for (int p = 0; p < kAtOnce; p += 2) Multiply(keys[p], keys[p + 1], scores[p], scores[p + 1]);
    const float* bias = shared_.biases[row()];
    if (bias != nullptr) bias += tile * kKeys + Warp() * kKeysPerWarp;
    float largest = maximum_;
#pragma unroll
    for (int p = 0; p < kAtOnce; ++p) {
      const int key = KeyOf(first + p);
      const bool sees = (visible >> key & 1) != 0;
      const float extra = sees && bias != nullptr ? bias[key] : 0;
      scores[p] = sees ? scores[p] * a_.scale + extra : -INFINITY;
      largest = fmaxf(largest, scores[p]);
    }
    const float shift = largest == -INFINITY ? 0 : largest;
    if (__any_sync(kAllLanes, largest != maximum_) != 0) Rescale(ExpOf(maximum_ - shift));
    maximum_ = largest;
#pragma unroll
    for (int p = 0; p < kAtOnce; ++p) {
      float weight = kHidden;
      if ((visible >> KeyOf(first + p) & 1) != 0) {
        weight = ExpOf(scores[p] - shift);
        sum_ += weight;
      }
      AddValues(weight, values[p]);
    }
  }

  // Computes the products of this lane's row with two keys.
  __device__ void Multiply(const OfKey& key0, const OfKey& key1, float& product0,
                           float& product1) const {
    float products[2][kRows] = {};
#pragma unroll
    for (int n = 0; n < kChannels; n += 4) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        if (r >= rows_) break;
        float query[4];
        LoadVectors(shared_.queries[r] + Channels::Place(lane(), n / 4), query);
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          products[0][r] = fmaf(query[c], key0.At(n + c), products[0][r]);
          products[1][r] = fmaf(query[c], key1.At(n + c), products[1][r]);
        }
      }
    }
    product0 = SumsOfLanes<kLanes>(products[0]);
    product1 = SumsOfLanes<kLanes>(products[1]);
  }

  // Returns the number that a lane of this group has whose row is `row`.
  __device__ static float OfRow(int row, float own) {
    if (kRows == 1) return own;
    return __shfl_sync(kAllLanes, own, row * kOfRow, kLanes);
  }

  // Multiplies the sums of each row with the factor that the row's lanes bring.
  __device__ void Rescale(float own) {
    sum_ *= own;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (r >= rows_) break;
      const float factor = OfRow(r, own);
#pragma unroll
      for (int c = 0; c < kChannels; ++c) outputs_[r][c] *= factor;
    }
  }

  // Adds a key's value to each row with the weight that the row's lanes bring. A key that the row
  // does not see adds nothing, whatever its value is.
  __device__ void AddValues(float own, const OfKey& value) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (r >= rows_) break;
      const float weight = OfRow(r, own);
      if (weight != kHidden) {
#pragma unroll
        for (int c = 0; c < kChannels; ++c) {
          outputs_[r][c] = fmaf(weight, value.At(c), outputs_[r][c]);
        }
      }
    }
  }

  // Merges the softmaxes of a warp's groups by shuffles, and those of the warps through shared
  // memory.
  __device__ void Merge() {
    float largest = maximum_;
#pragma unroll
    for (int step = kLanes; step < kWarp; step *= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, step));
    }
    Rescale(ExpOf(maximum_ - (largest == -INFINITY ? 0 : largest)));
    sum_ = SumOfGroups(sum_);
    __syncthreads();  // all have read the queries
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (r >= rows_) break;
#pragma unroll
      for (int c = 0; c < kChannels; ++c) outputs_[r][c] = SumOfGroups(outputs_[r][c]);
      if (group() != 0) continue;
#pragma unroll
      for (int n = 0; n < kChannels; n += 4) {
        float* to = shared_.parts[Warp()][r] + Channels::Place(lane(), n / 4);
        *reinterpret_cast<float4*>(to) =
            make_float4(outputs_[r][n], outputs_[r][n + 1], outputs_[r][n + 2], outputs_[r][n + 3]);
      }
    }
    if (group() == 0 && lane() % kOfRow == 0 && lane() / kOfRow < rows_) {
      shared_.parts[Warp()][row()][kDim] = largest;
      shared_.parts[Warp()][row()][kDim + 1] = sum_;
    }
    __syncthreads();
    for (int r = Warp(); r < rows_; r += kWarps) {
      if (IsAsked(a_, shared_.task.batch, shared_.row_queries[r])) StoreRow(r);
    }
  }
  __device__ static float SumOfGroups(float x) {
#pragma unroll
    for (int step = kLanes; step < kWarp; step *= 2) x += __shfl_xor_sync(kAllLanes, x, step);
    return x;
  }

  // Stores a row; one warp calls it.
  __device__ void StoreRow(int row) const {
    const auto part = [&](int warp) { return shared_.parts[warp][row]; };
    float largest = -INFINITY;
    for (int w = 0; w < kWarps; ++w) largest = fmaxf(largest, part(w)[kDim]);
    const float shift = largest == -INFINITY ? 0 : largest;
    float factors[kWarps], sum = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      factors[w] = ExpOf(part(w)[kDim] - shift);
      sum = fmaf(factors[w], part(w)[kDim + 1], sum);
    }
    FlashTask task = shared_.task;
    task.head = HeadOf(task, row);
    const int64_t i = shared_.row_queries[row];
    const int64_t token = a_.query_order(task.batch, task.head, i);
    const OutputRow output(a_, task, i, token, sum);
    for (int c = Lane(); c < a_.value_dim; c += kWarp) {
      float value[1] = {0};
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        value[0] = fmaf(factors[w], part(w)[Channels::PlaceOf(c)], value[0]);
      }
      output.Store(c, value);
    }
    if (Lane() == 0) StoreSums(a_, task, i, token, largest, sum);
  }

  const FlashArguments& a_;
  Shared& shared_;
  const int rows_;             // query heads of the group times queries
  float maximum_ = -INFINITY;  // of this lane's row
  float sum_ = 0;
  float outputs_[kRows][kChannels] = {};
};

template <class T, int kDim, int kRows>
__global__ void __launch_bounds__(kThreads, FlashDecodeBlocks(kRows))
    FlashDecode(const FlashArguments a) {
  using Block = FlashDecodeBlock<T, kDim, kRows>;
  auto& shared =
      *reinterpret_cast<typename Block::Shared*>(DynamicShared<sizeof(typename Block::Shared)>());
  const int64_t tasks = a.batch * a.kv_heads * a.splits;
  for (int64_t n = blockIdx.x; n < tasks; n += gridDim.x) {
    Block(a, n, shared).Run();
    __syncthreads();
  }
}

template <class T, int kDim, int kRows>
const char* LaunchRows(const FlashArguments& a, void* stream) {
  const int64_t tasks = a.batch * a.kv_heads * a.splits;
  return Launch("FlashDecode", &FlashDecode<T, kDim, kRows>,
                {BlocksInTurns(tasks, a.max_blocks), kThreads,
                 sizeof(typename FlashDecodeBlock<T, kDim, kRows>::Shared)},
                stream, a);
}

template <class T, int kDim>
const char* LaunchDecode(const FlashArguments& a, void* stream) {
  const bool one = a.query_heads == a.kv_heads && a.query_tokens == 1;
  return one ? LaunchRows<T, kDim, 1>(a, stream) : LaunchRows<T, kDim, kFlashDecodeRows>(a, stream);
}

// All instantiations: three dtypes of keys and values, four head sizes, one row and several.
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
