// Parts of the decoding kernels that do not depend on how a block multiplies: its rows and keys, how
// they are read, and the end of a row.
//
// The query heads that share a key-value head, and their queries, are the rows of a task, of one part
// of the keys (see FlashArguments::splits). A block of 128 threads does it: each of its warps takes 16
// of a tile's 64 keys and keeps a softmax of its own over the keys that it has seen. The warps' are
// merged at the end, in a fixed order.
#ifndef TFB_CORE_FLASH_FLASH_DECODE_CUH_
#define TFB_CORE_FLASH_FLASH_DECODE_CUH_

#include <type_traits>

#include "core/cuda/register_tile.cuh"
#include "core/flash/flash_tile.cuh"

namespace tfb {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kWarp;
constexpr int kKeysPerWarp = kKeys / kWarps;

// ---- Rows of keys and values ----

// Puts `count` elements into words that are 0. It is no unrolled loop, whose addresses would take
// registers from the vectors' path.
template <class T, int kWords>
__device__ inline void LoadElements(const T* from, int64_t stride, int count,
                                    uint32_t (&to)[kWords]) {
  constexpr int kOfWord = sizeof(uint32_t) / sizeof(T);
#pragma unroll 1
  for (int c = 0; c < count; ++c) {
    uint32_t bits = 0;
    *reinterpret_cast<T*>(&bits) = from[c * stride];
    bits <<= c % kOfWord * 8 * sizeof(T);
#pragma unroll
    for (int n = 0; n < kWords; ++n) to[n] |= n == c / kOfWord ? bits : 0;
  }
}
// Loads the channels of a row from `first` on, zeros beyond its `channels`. `in_vectors` says whether the
// row is aligned, and whole vectors, of as many channels.
template <class T, int kWords>
__device__ inline void LoadChannels(const T* row, int64_t stride, int first, int channels,
                                    bool in_vectors, uint32_t (&to)[kWords]) {
  constexpr int kEach = kWords * sizeof(uint32_t) / sizeof(T);
#pragma unroll
  for (int n = 0; n < kWords; ++n) to[n] = 0;
  if (first >= channels) return;
  if (in_vectors) {
    LoadVectors(reinterpret_cast<const uint32_t*>(row + first), to);
  } else {
    LoadElements(row + first * stride, stride, min(channels - first, kEach), to);
  }
}

// ---- A block ----

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
__host__ __device__ inline int64_t DecodingTasks(const FlashArguments& a) {
  return a.batch * a.kv_heads * a.splits;
}

// The parts of a task that take a division, or are needed once a tile: they would take registers
// otherwise.
template <class T, int kRows>
struct DecodeShared {
  FlashTask task;
  const T* keys;  // of the head
  const T* values;
  bool keys_in_vectors;  // as in LoadChannels
  bool values_in_vectors;
  const uint8_t* key_mask;     // of the batch row, or null
  const int32_t* key_order;    // of the head, or null
  int row_queries[kRows];      // the query of each row
  const float* biases[kRows];  // of each row, to be indexed by keys; null where there are none
  WalkState walks[kWarps];     // those of lanes 0
};

template <class T, int kRows>
class DecodeBlock {
 protected:
  using Common = DecodeShared<T, kRows>;

  __device__ DecodeBlock(const FlashArguments& a, Common& common)
      : a_(a),
        common_(common),
        rows_(static_cast<int>(a.query_heads / a.kv_heads * a.query_tokens)) {}

  // Finds a task, whose rows of keys and values are read in vectors of so many bytes. The caller
  // calls BeginWalk after a barrier.
  __device__ void FindTask(int64_t index, int key_bytes, int value_bytes) {
    const FlashTask task = DecodingTask(a_, index);
    const int t = static_cast<int>(threadIdx.x);
    if (t < rows_) {
      const DistanceEntries& table = a_.rule.bias;
      const int64_t position = QueryOf(t) + a_.rule.query_position;
      common_.row_queries[t] = QueryOf(t);
      common_.biases[t] = table.values == nullptr ? nullptr : table.Of(HeadOf(task, t)) - position;
    }
    if (t == 0) {
      common_.task = task;
      common_.keys = HeadOf(task, a_.k);
      common_.values = HeadOf(task, a_.v);
      common_.keys_in_vectors = IsInVectors(a_.k, common_.keys, a_.head_dim, key_bytes);
      common_.values_in_vectors = IsInVectors(a_.v, common_.values, a_.value_dim, value_bytes);
      common_.key_mask =
          a_.key_mask == nullptr ? nullptr : a_.key_mask + task.batch * a_.key_mask_strides[0];
      common_.key_order =
          a_.key_order.tokens == nullptr ? nullptr : a_.key_order.Of(task.batch, task.kv_head);
    }
  }
  __device__ void BeginWalk() {
    if (Lane() == 0) common_.walks[Warp()].Begin(a_, common_.task, a_.decode_queries);
  }
  // Calls put(row, channel, x) for the elements of the rows' queries, with zeros for those that are
  // not asked for and beyond head_dim.
  template <int kDim, class Put>
  __device__ void LoadQueries(int64_t index, const Put& put) {
    const FlashTask task = DecodingTask(a_, index);
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
      put(row, channel, value);
    }
  }
  __device__ bool IsAnyAsked() const {
    bool any = false;
    for (int i = 0; i < a_.query_tokens; ++i) any = any || IsAsked(a_, common_.task.batch, i);
    return any;
  }

  // Returns the next tile of the warp's walk; its index is -1 after the last.
  __device__ KeyTile NextTile() {
    KeyTile tile = {-1, 0};
    if (Lane() == 0) {
      WalkState& walk = common_.walks[Warp()];
      if (walk.Next(a_.schedule)) tile = walk.key_tile(a_.schedule);
    }
    return {__shfl_sync(kAllLanes, tile.index, 0), __shfl_sync(kAllLanes, tile.mask, 0)};
  }

  // The warp's 16 keys of a tile.
  struct Keys {
    int token;        // of key lane % 16; -1 where that is none
    unsigned tokens;  // bit n: key n is a token
  };
  __device__ Keys KeysOf(const KeyTile& tile) const {
    Keys keys;
    keys.token = TokenOf(tile.index, Warp() * kKeysPerWarp + Lane() % kKeysPerWarp);
    keys.tokens = __ballot_sync(kAllLanes, Lane() < kKeysPerWarp && keys.token >= 0);
    return keys;
  }
  // Returns a word whose bit n says that a row sees key n.
  __device__ unsigned VisibleTo(int row, const KeyTile& tile, const Keys& keys) const {
    const int query = common_.row_queries[row];
    const uint64_t mask = MaskOf(a_.schedule, tile, query, query, a_.decode_queries);
    return static_cast<unsigned>(mask >> Warp() * kKeysPerWarp) & keys.tokens;
  }
  // Returns the biases of a row for the warp's keys of a tile, or null where there are none.
  __device__ const float* BiasesOf(int64_t tile, int row) const {
    const float* bias = common_.biases[row];
    return bias == nullptr ? nullptr : bias + tile * kKeys + Warp() * kKeysPerWarp;
  }

  // Stores the rows that are asked for. Part part(warp)[row] is the softmax of a warp: outputs, of
  // which channel c is at place_of(c), then the maximum at kDim and the sum. The caller has a barrier
  // before it.
  template <int kDim, class Part, class PlaceOf>
  __device__ void StoreRows(const Part& part, const PlaceOf& place_of) const {
    for (int r = Warp(); r < rows_; r += kWarps) {
      if (!IsAsked(a_, common_.task.batch, common_.row_queries[r])) continue;
      StoreRow<kDim>(
          r, [&](int warp) { return part(warp, r); }, place_of);
    }
  }

  const FlashArguments& a_;
  Common& common_;
  const int rows_;  // query heads of the group times queries

 private:
  __device__ int QueryOf(int row) const { return row % static_cast<int>(a_.query_tokens); }
  __device__ int64_t HeadOf(const FlashTask& task, int row) const {
    return task.head + row / static_cast<int>(a_.query_tokens);
  }
  __device__ const T* HeadOf(const FlashTask& task, const DeviceView& view) const {
    return static_cast<const T*>(view.data) + task.batch * view.strides[0] +
           task.kv_head * view.strides[1];
  }
  __device__ static bool IsInVectors(const DeviceView& view, const T* head, int channels,
                                     int bytes) {
    constexpr int kBytes = sizeof(T);
    return view.strides[3] == 1 && reinterpret_cast<uintptr_t>(head) % bytes == 0 &&
           channels * kBytes % bytes == 0 && view.strides[2] * kBytes % bytes == 0;
  }

  // Returns the token that is key `c` of the tile, or -1 where that is none.
  __device__ int TokenOf(int64_t tile, int c) const {
    if (tile * kKeys + c >= a_.kv_tokens) return -1;
    const int64_t row = FirstKeyRow(a_, tile) + c;
    const int64_t token = common_.key_order == nullptr ? row : common_.key_order[row];
    if (common_.key_mask == nullptr) return static_cast<int>(token);
    return common_.key_mask[token * a_.key_mask_strides[1]] == 0 ? -1 : static_cast<int>(token);
  }

  // Stores a row; one warp calls it.
  template <int kDim, class Part, class PlaceOf>
  __device__ void StoreRow(int row, const Part& part, const PlaceOf& place_of) const {
    float largest = -INFINITY;
    for (int w = 0; w < kWarps; ++w) largest = fmaxf(largest, part(w)[kDim]);
    const float shift = largest == -INFINITY ? 0 : largest;
    float factors[kWarps], sum = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      factors[w] = ExpOf(part(w)[kDim] - shift);
      sum = fmaf(factors[w], part(w)[kDim + 1], sum);
    }
    FlashTask task = common_.task;
    task.head = HeadOf(task, row);
    const int64_t i = common_.row_queries[row];
    const int64_t token = a_.query_order(task.batch, task.head, i);
    const OutputRow output(a_, task, i, token, sum);
    for (int c = Lane(); c < a_.value_dim; c += kWarp) {
      float value[1] = {0};
#pragma unroll
      for (int w = 0; w < kWarps; ++w) value[0] = fmaf(factors[w], part(w)[place_of(c)], value[0]);
      output.Store(c, value);
    }
    if (Lane() == 0) StoreSums(a_, task, i, token, largest, sum);
  }
};

// Returns launch(dim) with the least of the kernels' channels that holds the call's heads, as a
// constant.
template <class Launcher>
const char* LaunchForChannels(const FlashArguments& a, const Launcher& launch) {
  const int widest = a.head_dim > a.value_dim ? a.head_dim : a.value_dim;
  if (widest <= 32) return launch(std::integral_constant<int, 32>());
  if (widest <= 64) return launch(std::integral_constant<int, 64>());
  if (widest <= 128) return launch(std::integral_constant<int, 128>());
  return launch(std::integral_constant<int, 256>());
}

// Does the tasks of a grid, each with a Block.
template <class Block>
__device__ inline void RunDecodingTasks(const FlashArguments& a) {
  auto& shared =
      *reinterpret_cast<typename Block::Shared*>(DynamicShared<sizeof(typename Block::Shared)>());
  for (int64_t n = blockIdx.x; n < DecodingTasks(a); n += gridDim.x) {
    Block(a, n, shared).Run();
    __syncthreads();
  }
}

}  // namespace
}  // namespace tfb

#endif  // TFB_CORE_FLASH_FLASH_DECODE_CUH_
