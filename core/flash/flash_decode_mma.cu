// Engine flash for a few rows against many keys of 16 bits, on tensor cores: decoding where query heads
// share keys and values. Tasks, blocks and warps are those of flash_decode.cuh.
//
// Both products are mma.sync m16n8k16 with f32 sums, and no operand but the queries passes through
// shared memory: a warp reads its 16 keys and values as they lie in memory, in vectors of 16 bytes, and
// the channels and keys of an operand are numbered so that what a lane has read is what it needs.
//
//   scores [rows x 16 keys]        = Q K^T   lane 4 g + t has read channels 8 t to 8 t + 7 of every 32
//                                            of keys g and g + 8: of two steps, two words each
//   outputs^T [channels x rows]   += V^T P^T lane 4 g + t has read channels 8 g to 8 g + 7 of every 64
//                                            (of 32: 4 of them) of keys 2 t, 2 t + 1, 2 t + 8, 2 t + 9;
//                                            a word has two channels of a key, two words exchange
//                                            halves and are two keys of each of the channels
//
// The scores of a lane are row g's with the keys 2 t, 2 t + 1, 2 t + 8, 2 t + 9: rounded to 16 bits, their
// weights are the right operand of the second product. The first product has room for 16 rows. Up to 8
// leave half of it empty; more, for which there are registers up to 128 channels, have two right operands
// of the second product.
//
// Arithmetic of 16 keys, D = 128: 16 reads of 16 bytes, 32 exchanges of halves, 16 + 8 products, and with
// addresses, masks and the softmax some 560 instructions of sm_90a a warp, 35 a key, where an H100 has 136
// for the time in which memory delivers it (flash_decode.cu's several rows: 100). In flight are 8 KiB a
// warp, 96 KiB a multiprocessor, six times the bandwidth times a latency of 1,000 cycles. Nothing of it has
// been measured on a GPU.
//
// As in flash_mma.cuh, the queries and the weights are rounded to 16 bits; the sum of the weights is taken
// before.
#include "core/flash/flash_decode.cuh"
#include "core/flash/flash_mma_tile.cuh"

namespace tfb {
namespace {

// Bits of 16-bit numbers, two of which are a word. The marks of a word are its bits 15 and 31.
template <class T>
struct Marks {
  // The number 1, whose exponent is all ones but for the first.
  static constexpr unsigned kOne = Sixteen<T>::kExponent >> 1 & Sixteen<T>::kExponent;
  static constexpr unsigned kAll = 0x80008000u;

  // Marks NaNs: without their sign, they are above infinity.
  __device__ static unsigned Nans(unsigned pair) {
    return ((pair & ~kAll) + (0x7fffu - Sixteen<T>::kExponent) * 0x10001u) & kAll;
  }
  // Returns 1 where there is a mark, and 0 elsewhere.
  __device__ static unsigned Ones(unsigned marks) { return (marks >> 15) * kOne; }
  // Returns a pair with zeros in the place of marked numbers.
  __device__ static unsigned Clear(unsigned pair, unsigned marks) {
    return pair & ~((marks >> 15) * 0xffffu);
  }
};

// A block for 8 kRowTiles rows.
template <class T, int kDim, int kRowTiles>
class FlashDecodeMmaBlock : DecodeBlock<T, 8 * kRowTiles> {
  static constexpr int kRows = 8 * kRowTiles;
  using Base = DecodeBlock<T, kRows>;
  using Base::a_;
  using Base::common_;
  using Base::rows_;

 public:
  static constexpr int kPart = kDim + 4;  // a row's outputs, maximum and sum

  struct Shared {
    union {
      unsigned queries[kRows][kDim / 2];  // pairs
      float parts[kWarps][kRows][kPart];  // at the end, of each warp
    };
    typename Base::Common common;
  };

  __device__ FlashDecodeMmaBlock(const FlashArguments& a, int64_t task, Shared& shared)
      : Base(a, shared.common), shared_(shared) {
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) maximum_[r] = -INFINITY;
    this->FindTask(task, 16, kEach * sizeof(T));
    T* queries = reinterpret_cast<T*>(shared.queries[0]);
    for (int n = rows_ * kDim + threadIdx.x; n < kRows * kDim; n += kThreads) {
      StoreElement(queries, Sixteen<T>::kElement, n, 0);
    }
    this->template LoadQueries<kDim>(task, [&](int row, int channel, float x) {
      StoreElement(queries, Sixteen<T>::kElement, row * kDim + channel, x);
    });
    __syncthreads();
  }

  __device__ void Run() {
    if (!this->IsAnyAsked()) return;
    this->BeginWalk();
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        LoadVectors(shared_.queries[r * 8 + group()] + c * 16 + member() * 4, queries_[r][c]);
      }
    }
    for (KeyTile tile = this->NextTile(); tile.index >= 0; tile = this->NextTile()) AddTile(tile);
    Merge();
  }

 private:
  static constexpr int kChunks = kDim / 32;               // of a key's channels
  static constexpr int kEach = kDim < 64 ? kDim / 8 : 8;  // channels of a vector of values
  static constexpr int kWords = kEach / 2;
  static constexpr int kVectors = kDim / (8 * kEach);  // of a value, a lane
  // Whether registers have room for keys and values at once.
  static constexpr bool kLoadsTogether = kDim <= 128;

  // A lane is g = group() and t = member() of the numbering above.
  __device__ static int group() { return Lane() / 4; }
  __device__ static int member() { return Lane() % 4; }
  // Returns the row that this lane has in the softmax of a row tile; lanes beyond the rows repeat the
  // last.
  __device__ int RowOf(int row_tile) const { return min(row_tile * 8 + group(), rows_ - 1); }
  // Returns the key of score e, and of e + 2, of product n, whose rows are a row tile each.
  __device__ static int KeyOf(int n, int e) { return 8 * n + 2 * member() + e; }
  // Returns the first of the channels that are a lane's word w of vector v.
  __device__ static int ChannelOf(int v, int w) { return (v * 8 + group()) * kEach + 2 * w; }

  // Adds the keys of a tile that are this warp's.
  __device__ void AddTile(const KeyTile& tile) {
    const typename Base::Keys of_tile = this->KeysOf(tile);
    unsigned visible[kRowTiles], any = 0, all = of_tile.tokens;
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
      visible[r] = this->VisibleTo(RowOf(r), tile, of_tile);
      any |= visible[r];
      all &= visible[r];
    }
    if (__any_sync(kAllLanes, any != 0) == 0) return;
    unsigned keys[2][kChunks][4], values[kVectors][4][kWords];
    StartKeys(of_tile.token, keys);
    if (kLoadsTogether) StartValues(of_tile.token, values);
    float scores[2][4] = {};
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
#pragma unroll
      for (int step = 0; step < 4; step += 2) {
        unsigned left[4] = {};
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) {
          left[r] = queries_[r][c][step];
          left[r + 2] = queries_[r][c][step + 1];
        }
#pragma unroll
        for (int n = 0; n < 2; ++n) Sixteen<T>::Multiply(scores[n], left, keys[n][c] + step);
      }
    }
    unsigned weights[kRowTiles][2];
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
      FindWeights(r, visible[r], this->BiasesOf(tile.index, RowOf(r)), scores, weights[r]);
    }
    if (!kLoadsTogether) StartValues(of_tile.token, values);
    const bool hides = __any_sync(kAllLanes, all != of_tile.tokens) != 0;
    if (hides && HasNonFinite(values)) SetAsideNonFinite(visible, values);
    ForEachPairOfChannels(values, [&](const unsigned(&left)[4], int v, int w) {
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) {
        Sixteen<T>::Multiply(outputs_[r][v][w], left, weights[r]);
      }
    });
  }

  // Loads this lane's channels of the keys and values that it needs; reads of all are in flight
  // together.
  __device__ void StartKeys(int token, unsigned (&keys)[2][kChunks][4]) const {
    if (common_.keys_in_vectors) {
      LoadKeys<true>(token, keys);
    } else {
      LoadKeys<false>(token, keys);
    }
  }
  template <bool kInVectors>
  __device__ void LoadKeys(int token, unsigned (&keys)[2][kChunks][4]) const {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const int64_t t = __shfl_sync(kAllLanes, token, group() + 8 * n);
      const T* row = common_.keys + max(t, int64_t{0}) * a_.k.strides[2];
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        LoadChannels(row, a_.k.strides[3], c * 32 + member() * 8, t < 0 ? 0 : a_.head_dim,
                     kInVectors, keys[n][c]);
      }
    }
  }
  __device__ void StartValues(int token, unsigned (&values)[kVectors][4][kWords]) const {
    if (common_.values_in_vectors) {
      LoadValues<true>(token, values);
    } else {
      LoadValues<false>(token, values);
    }
  }
  template <bool kInVectors>
  __device__ void LoadValues(int token, unsigned (&values)[kVectors][4][kWords]) const {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const int64_t t = __shfl_sync(kAllLanes, token, KeyOf(n / 2, n % 2));
      const T* row = common_.values + max(t, int64_t{0}) * a_.v.strides[2];
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        LoadChannels(row, a_.v.strides[3], ChannelOf(v, 0), t < 0 ? 0 : a_.value_dim, kInVectors,
                     values[v][n]);
      }
    }
  }

  // Turns the scores of this lane's row of a row tile into weights relative to the largest so far, which
  // the outputs are brought to, and packs them.
  __device__ void FindWeights(int row_tile, unsigned visible, const float* biases,
                              const float (&scores)[2][4], unsigned (&weights)[2]) {
    float of_row[2][2], largest = maximum_[row_tile];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int key = KeyOf(n, e);
        const bool sees = (visible >> key & 1) != 0;
        const float extra = sees && biases != nullptr ? biases[key] : 0;
        of_row[n][e] = sees ? scores[n][row_tile * 2 + e] * a_.scale + extra : -INFINITY;
        largest = fmaxf(largest, of_row[n][e]);
      }
    }
    largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, 2));
    const float shift = largest == -INFINITY ? 0 : largest;
    if (__any_sync(kAllLanes, largest != maximum_[row_tile]) != 0) {
      Rescale(row_tile, ExpOf(maximum_[row_tile] - shift));
    }
    maximum_[row_tile] = largest;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      float weight[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        weight[e] = ExpOf(of_row[n][e] - shift);
        sum_[row_tile] += weight[e];
      }
      weights[n] = Pair<T>(weight[0], weight[1]);
    }
  }

  // Multiplies the sums of each row of a row tile with the factor that the row's lanes bring.
  __device__ void Rescale(int row_tile, float own) {
    sum_[row_tile] *= own;
    // The lane's outputs are those of rows 2 t and 2 t + 1.
    const float factors[2] = {__shfl_sync(kAllLanes, own, member() * 8),
                              __shfl_sync(kAllLanes, own, member() * 8 + 4)};
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
#pragma unroll
        for (int e = 0; e < 4; ++e) outputs_[row_tile][v][w][e] *= factors[e % 2];
      }
    }
  }

  // Calls act(left, v, w) with the left operand that word w of vector v is, for all words.
  template <class Act>
  __device__ static void ForEachPairOfChannels(const unsigned (&values)[kVectors][4][kWords],
                                               const Act& act) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        const unsigned left[4] = {LowHalves(values[v][0][w], values[v][1][w]),
                                  HighHalves(values[v][0][w], values[v][1][w]),
                                  LowHalves(values[v][2][w], values[v][3][w]),
                                  HighHalves(values[v][2][w], values[v][3][w])};
        act(left, v, w);
      }
    }
  }
  __device__ static unsigned LowHalves(unsigned a, unsigned b) { return (a & 0xffffu) | b << 16; }
  __device__ static unsigned HighHalves(unsigned a, unsigned b) {
    return a >> 16 | (b & 0xffff0000u);
  }

  // ---- Values that are not finite, some of which a row does not see ----

  __device__ static bool HasNonFinite(const unsigned (&values)[kVectors][4][kWords]) {
    unsigned found = 0;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
      for (int n = 0; n < 4; ++n) {
#pragma unroll
        for (int w = 0; w < kWords; ++w) found |= NonFinite<T>(values[v][n][w]);
      }
    }
    return __any_sync(kAllLanes, found != 0) != 0;
  }
  // Adds the values that are not finite to the rows that see them, and puts zeros in their place. The
  // rows' numbers of them are products of ones; NaN is infinite with both signs.
  __device__ void SetAsideNonFinite(const unsigned (&visible)[kRowTiles],
                                    unsigned (&values)[kVectors][4][kWords]) {
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
      unsigned sees[2];
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        sees[n] = Pair<T>(visible[r] >> KeyOf(n, 0) & 1, visible[r] >> KeyOf(n, 1) & 1);
      }
      ForEachPairOfChannels(values, [&](const unsigned(&left)[4], int v, int w) {
        AddNonFinite(left, sees, outputs_[r][v][w]);
      });
    }
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
      for (int n = 0; n < 4; ++n) {
#pragma unroll
        for (int w = 0; w < kWords; ++w) {
          values[v][n][w] = Marks<T>::Clear(values[v][n][w], NonFinite<T>(values[v][n][w]));
        }
      }
    }
  }
  __device__ static void AddNonFinite(const unsigned (&left)[4], const unsigned (&sees)[2],
                                      float (&sums)[4]) {
#pragma unroll 1  // unrolled it would take registers from the path of finite values
    for (int sign = 0; sign < 2; ++sign) {
      unsigned ones[4];
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const unsigned signs = (sign == 0 ? ~left[n] : left[n]) | Marks<T>::Nans(left[n]);
        ones[n] = Marks<T>::Ones(NonFinite<T>(left[n]) & signs);
      }
      float counts[4] = {};
      Sixteen<T>::Multiply(counts, ones, sees);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (counts[e] != 0) sums[e] += sign == 0 ? INFINITY : -INFINITY;
      }
    }
  }

  // Merges the softmaxes of the warps through shared memory.
  __device__ void Merge() {
    __syncthreads();  // all have read the queries
    auto& parts = shared_.parts[Warp()];
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
      float sum = sum_[r] + __shfl_xor_sync(kAllLanes, sum_[r], 1);
      sum += __shfl_xor_sync(kAllLanes, sum, 2);
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int row = r * 8 + member() * 2 + e;
        if (row >= rows_) break;
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
#pragma unroll
          for (int w = 0; w < kWords; ++w) {
            *reinterpret_cast<float2*>(parts[row] + ChannelOf(v, w)) =
                make_float2(outputs_[r][v][w][e], outputs_[r][v][w][e + 2]);
          }
        }
      }
      if (member() == 0 && r * 8 + group() < rows_) {
        parts[r * 8 + group()][kDim] = maximum_[r];
        parts[r * 8 + group()][kDim + 1] = sum;
      }
    }
    __syncthreads();
    this->template StoreRows<kDim>([&](int warp, int row) { return shared_.parts[warp][row]; },
                                   [](int channel) { return channel; });
  }

  Shared& shared_;
  unsigned queries_[kRowTiles][kChunks][4];
  float maximum_[kRowTiles];   // of this lane's rows
  float sum_[kRowTiles] = {};  // of the keys whose weights it has found
  float outputs_[kRowTiles][kVectors][kWords][4] = {};
};

template <class T, int kDim, int kRowTiles>
__global__ void __launch_bounds__(kThreads, FlashDecodeMmaBlocks(8 * kRowTiles, kDim))
    FlashDecodeMma(const FlashArguments a) {
  RunDecodingTasks<FlashDecodeMmaBlock<T, kDim, kRowTiles>>(a);
}

template <class T, int kDim, int kRowTiles>
const char* LaunchRows(const FlashArguments& a, void* stream) {
  return Launch("FlashDecodeMma", &FlashDecodeMma<T, kDim, kRowTiles>,
                {BlocksInTurns(DecodingTasks(a), a.max_blocks), kThreads,
                 sizeof(typename FlashDecodeMmaBlock<T, kDim, kRowTiles>::Shared)},
                stream, a);
}
// All instantiations: two dtypes of keys and values, four head sizes, and up to 8 or 16 rows.
template <class T>
const char* DecodeOf(const FlashArguments& a, void* stream) {
  const bool few = a.query_heads / a.kv_heads * a.query_tokens <= 8;
  return LaunchForChannels(a, [&](auto dim) {
    constexpr int kRowTiles = FlashDecodeMmaRows(dim()) / 8;
    return few ? LaunchRows<T, dim(), 1>(a, stream) : LaunchRows<T, dim(), kRowTiles>(a, stream);
  });
}

const char* Decode(const FlashArguments& a, void* stream) {
  return a.k.element == Element::kBf16 ? DecodeOf<__nv_bfloat16>(a, stream)
                                       : DecodeOf<__half>(a, stream);
}

}  // namespace

TFB_KERNEL_TABLE(FlashDecodeMmaKernels, {&Decode});

}  // namespace tfb
