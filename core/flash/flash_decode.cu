// Engine flash for a few rows against many keys, where keys and values are read once and reading them is
// all the work: decoding in f32, and of one row in 16 bits. flash_decode_mma.cu has several rows in 16
// bits. Tasks, blocks and warps are those of flash_decode.cuh; up to 8 rows have a kernel, and one row
// has another.
//
// kDim / 8 lanes, as many as rows at least, take a key together.
//
//   products, outputs   a lane has its 8 channels (of 8 rows at D = 32: 4) of all rows
//   softmax             a lane has one row: of 16 lanes, lanes 2 r and 2 r + 1 have row r of 8
//
// 8 sums over 16 lanes take 8 shuffles, after which each row's score is where its maximum, its sum
// and its mask are; 8 shuffles bring the weights back. A lane so computes one exponential for a key
// and not 8. Each group of lanes keeps a softmax of its own over the keys that it has seen; groups are
// merged before warps are.
//
// Arithmetic of one key, D = 128 in f32: 1,024 bytes, for which an H100 has 68 cycles a multiprocessor
// (about 15 bytes a cycle), in which it issues 272 instructions. With 8 rows, a warp, which does two
// keys at a time, has 2 x 64 multiply-adds, 17 shuffles and about as many selections: 90 instructions a
// key with all else. With one row 16 multiply-adds and 4 shuffles are left. In flight are the keys and
// values of kAtOnce passes: 128 threads x 8 x 16 B = 16 KiB a block, whatever the dtype. 64 outputs a
// lane, 32 words in flight and the products of 8 rows with 2 keys are 112 of the 168 registers that 3
// blocks leave a thread; of one row 8 outputs are left, and 5 blocks have 96 registers a thread.
#include "core/flash/flash_decode.cuh"

namespace tfb {
namespace {

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
  // Loads a row as LoadChannels does.
  __device__ void Load(const T* row, int64_t stride, int lane, int channels, bool in_vectors) {
    constexpr int kOfVector = Channels::kEach * sizeof(T) / sizeof(uint32_t);
#pragma unroll
    for (int n = 0; n < kWords / kOfVector; ++n) {
      uint32_t vector[kOfVector];
      LoadChannels(row, stride, Channels::First(lane, n), channels, in_vectors, vector);
#pragma unroll
      for (int c = 0; c < kOfVector; ++c) words[n * kOfVector + c] = vector[c];
    }
  }
  __device__ float At(int c) const { return ToFloat(reinterpret_cast<const T*>(words)[c]); }
};

template <class T, int kDim, int kRows>
class FlashDecodeBlock : DecodeBlock<T, kRows> {
  using Base = DecodeBlock<T, kRows>;
  using Base::a_;
  using Base::rows_;

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
    typename Base::Common common;
  };

  __device__ FlashDecodeBlock(const FlashArguments& a, int64_t task, Shared& shared)
      : Base(a, shared.common), shared_(shared) {
    constexpr int kBytes = Channels::kEach * sizeof(T);
    this->FindTask(task, kBytes, kBytes);
    this->template LoadQueries<kDim>(task, [&](int row, int channel, float x) {
      shared_.queries[row][Channels::PlaceOf(channel)] = x;
    });
    __syncthreads();
  }

  __device__ void Run() {
    if (!this->IsAnyAsked()) return;
    this->BeginWalk();
    for (KeyTile tile = this->NextTile(); tile.index >= 0; tile = this->NextTile()) AddTile(tile);
    Merge();
  }

 private:
  using OfKey = Piece<T, kDim, kRows>;

  __device__ static int lane() { return Lane() % kLanes; }
  __device__ static int group() { return Lane() / kLanes; }
  // Returns the row that this lane has in the softmax; lanes beyond the rows repeat the last.
  __device__ int row() const { return min(lane() / kOfRow, rows_ - 1); }

  // Adds the keys of a tile that are this warp's.
  __device__ void AddTile(const KeyTile& tile) {
    const typename Base::Keys keys = this->KeysOf(tile);
    const unsigned visible = this->VisibleTo(row(), tile, keys);
    if (__any_sync(kAllLanes, visible != 0) == 0) return;
    const float* biases = this->BiasesOf(tile.index, row());
#pragma unroll 1
    for (int pass = 0; pass < kPasses; pass += kAtOnce) AddKeys(pass, keys.token, visible, biases);
  }
  __device__ static int KeyOf(int pass) { return pass * kKeysPerPass + group(); }  // of the warp's

  // Adds the keys of passes `first` to first + kAtOnce - 1 of a tile. Lane n has the token of the
  // warp's key n. Bit n of `visible` says that this lane's row sees it, and `biases` are the row's.
  __device__ void AddKeys(int first, int token, unsigned visible, const float* biases) {
    const typename Base::Common& common = shared_.common;
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
      keys[p].Load(common.keys + t * a_.k.strides[2], a_.k.strides[3], lane(), a_.head_dim,
                   common.keys_in_vectors);
      values[p].Load(common.values + t * a_.v.strides[2], a_.v.strides[3], lane(), a_.value_dim,
                     common.values_in_vectors);
    }
    float scores[kAtOnce];
#pragma unroll
    for (int p = 0; p < kAtOnce; p += 2) Multiply(keys[p], keys[p + 1], scores[p], scores[p + 1]);
    float largest = maximum_;
#pragma unroll
    for (int p = 0; p < kAtOnce; ++p) {
      const int key = KeyOf(first + p);
      const bool sees = (visible >> key & 1) != 0;
      const float extra = sees && biases != nullptr ? biases[key] : 0;
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
    this->template StoreRows<kDim>([&](int warp, int row) { return shared_.parts[warp][row]; },
                                   [](int channel) { return Channels::PlaceOf(channel); });
  }
  __device__ static float SumOfGroups(float x) {
#pragma unroll
    for (int step = kLanes; step < kWarp; step *= 2) x += __shfl_xor_sync(kAllLanes, x, step);
    return x;
  }

  Shared& shared_;
  float maximum_ = -INFINITY;  // of this lane's row
  float sum_ = 0;
  float outputs_[kRows][kChannels] = {};
};

template <class T, int kDim, int kRows>
__global__ void __launch_bounds__(kThreads, FlashDecodeBlocks(kRows))
    FlashDecode(const FlashArguments a) {
  RunDecodingTasks<FlashDecodeBlock<T, kDim, kRows>>(a);
}

template <class T, int kDim, int kRows>
const char* LaunchRows(const FlashArguments& a, void* stream) {
  return Launch("FlashDecode", &FlashDecode<T, kDim, kRows>,
                {BlocksInTurns(DecodingTasks(a), a.max_blocks), kThreads,
                 sizeof(typename FlashDecodeBlock<T, kDim, kRows>::Shared)},
                stream, a);
}

// All instantiations: three dtypes of keys and values, four head sizes, one row and several.
template <class T>
const char* DecodeOf(const FlashArguments& a, void* stream) {
  const bool one = a.query_heads == a.kv_heads && a.query_tokens == 1;
  return LaunchForChannels(a, [&](auto dim) {
    return one ? LaunchRows<T, dim(), 1>(a, stream)
               : LaunchRows<T, dim(), kFlashDecodeRows>(a, stream);
  });
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
