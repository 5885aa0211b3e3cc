// Tiles of rows of 16-bit numbers in shared memory, and their products on tensor cores: mma.sync
// m16n8k16 with f32 sums, sm_80 and later. The kernels of engine flash that use mma share them.
//
// A row has kDim channels, in chunks as core/cuda/sixteen.cuh has them. A tile begins at a row whose
// number is a multiple of 8.
//
// A lane has, of the sums of 16 rows and 8 columns, rows lane / 4 and lane / 4 + 8, and columns
// 2 (lane % 4) and one more. Rounded to 16 bits, the sums of two such tiles side by side are the left
// operand of a further product.
#ifndef TFB_CORE_FLASH_FLASH_MMA_TILE_CUH_
#define TFB_CORE_FLASH_FLASH_MMA_TILE_CUH_

#include "core/cuda/sixteen.cuh"
#include "core/flash/flash_tile.cuh"

namespace tfb {
namespace {

constexpr float kLog2E = 1.44269504f;

// Returns x, opaquely to the compiler: expressions of the result are computed here, not hoisted out
// of a loop and kept in registers through it.
__device__ inline unsigned Anew(unsigned x) {
#ifdef __CUDACC__
  asm volatile("" : "+r"(x));
#endif
  return x;
}

// ---- Rows ----

// Tells whether every row [b, h, token] begins at a multiple of 16 bytes and is whole chunks of the
// type.
template <class T>
bool IsInChunks(const DeviceView& view, int64_t batch, int64_t heads, int channels) {
  constexpr int kChunk = 16 / sizeof(T);
  return view.element == Sixteen<T>::kElement && view.strides[3] == 1 && channels % kChunk == 0 &&
         reinterpret_cast<uintptr_t>(view.data) % 16 == 0 && view.strides[2] % kChunk == 0 &&
         (heads == 1 || view.strides[1] % kChunk == 0) &&
         (batch == 1 || view.strides[0] % kChunk == 0);
}

// ---- Copies to shared memory ----

// Copies and looks at tiles of rows by kThreads threads, of which each handles the same 16-byte chunks
// of a tile in every function.
template <class T, int kDim, int kThreads>
struct RowCopies {
  static constexpr int kChunks = kDim / 8;                       // of a row
  static constexpr int kRowThreads = kChunks < 8 ? kChunks : 8;  // threads that copy a row
  static constexpr int kCopiedRows = kThreads / kRowThreads;     // at a time

  // Calls act(row) for those of kRows rows of which a thread copies chunks.
  template <int kRows, class Act>
  __device__ static void ForEachRow(unsigned thread, const Act& act) {
#pragma unroll
    for (int r = 0; r < kRows; r += kCopiedRows) {
      act(r + static_cast<int>(thread / kRowThreads));
    }
  }
  // Calls act(chunk) for the chunks of a row that a thread copies.
  template <class Act>
  __device__ static void ForEachChunk(unsigned thread, const Act& act) {
#pragma unroll
    for (int c = 0; c < kChunks; c += kRowThreads) {
      act(c + static_cast<int>(thread % kRowThreads));
    }
  }

  // Starts copies of rows that begin `offset` elements into a tensor that is in chunks; row r is that
  // of token token_of(r), and zeros where that is below 0 and beyond the last channel.
  template <int kRows, class TokenOfRow>
  __device__ static void Start(unsigned thread, unsigned char* to, const DeviceView& view,
                               int64_t offset, int channels, const TokenOfRow& token_of) {
    const T* rows = static_cast<const T*>(view.data) + offset;
    ForEachRow<kRows>(thread, [&](int r) {
      const int64_t token = token_of(r);
      const T* from = rows + (token < 0 ? 0 : token) * view.strides[2];
      ForEachChunk(thread, [&](int c) {
        CopyAsync(to + ChunkOffset<kDim>(r, c), from + c * 8, token >= 0 && c * 8 < channels);
      });
    });
  }
  // Starts copies of kRows rows that all exist and follow each other, from row `first` on.
  template <int kRows>
  __device__ static void StartConsecutive(unsigned thread, unsigned char* to,
                                          const DeviceView& view, int64_t offset, int channels,
                                          unsigned first) {
    const int64_t row = first + thread / kRowThreads;
    const T* from = static_cast<const T*>(view.data) + offset + row * view.strides[2];
    ForEachRow<kRows>(thread, [&](int r) {
      ForEachChunk(thread, [&](int c) {
        CopyAsync(to + ChunkOffset<kDim>(r, c), from + c * 8, c * 8 < channels);
      });
      from += kCopiedRows * view.strides[2];
    });
  }
  // Copies like Start, for a tensor that is not in chunks, or of another dtype.
  template <int kRows, class TokenOfRow>
  __device__ static void Convert(unsigned thread, unsigned char* to, const DeviceView& view,
                                 int64_t offset, int channels, const TokenOfRow& token_of) {
#pragma unroll 1
    for (int r = thread / kRowThreads; r < kRows; r += kCopiedRows) {
      const int64_t token = token_of(r);
#pragma unroll 1
      for (int c = thread % kRowThreads; c < kChunks; c += kRowThreads) {
        unsigned* pairs = reinterpret_cast<unsigned*>(to + ChunkOffset<kDim>(r, c));
#pragma unroll 1
        for (int p = 0; p < 4; ++p) {
          const auto at = [&](int channel) {
            return token >= 0 && channel < channels
                       ? LoadElement(view.data, view.element,
                                     offset + token * view.strides[2] + channel * view.strides[3])
                       : 0;
          };
          pairs[p] = Pair<T>(at(c * 8 + p * 2), at(c * 8 + p * 2 + 1));
        }
      }
    }
  }
  // Starts copies, or makes them.
  template <int kRows, class TokenOfRow>
  __device__ static void StartOrConvert(unsigned thread, unsigned char* to, const DeviceView& view,
                                        int64_t offset, int channels, bool in_chunks,
                                        const TokenOfRow& token_of) {
    if (in_chunks) {
      Start<kRows>(thread, to, view, offset, channels, token_of);
    } else {
      Convert<kRows>(thread, to, view, offset, channels, token_of);
    }
  }

  // Tells whether any number that the thread has copied is infinite or NaN.
  template <int kRows>
  __device__ static bool HasNonFinite(unsigned thread, const unsigned char* rows) {
    unsigned found = 0;
    ForEachRow<kRows>(thread, [&](int r) {
      ForEachChunk(thread, [&](int c) {
        const uint4 x = *reinterpret_cast<const uint4*>(rows + ChunkOffset<kDim>(r, c));
        found |= NonFinite<T>(x.x) | NonFinite<T>(x.y) | NonFinite<T>(x.z) | NonFinite<T>(x.w);
      });
    });
    return found != 0;
  }
  // Puts zeros in the place of the numbers of rows that are not finite.
  template <int kRows>
  __device__ static void ClearNonFinite(unsigned thread, unsigned char* rows) {
    ForEachRow<kRows>(thread, [&](int r) {
#pragma unroll 1
      for (int c = thread % kRowThreads; c < kChunks; c += kRowThreads) {
        unsigned* pairs = reinterpret_cast<unsigned*>(rows + ChunkOffset<kDim>(r, c));
        for (int n = 0; n < 4; ++n) {
          const unsigned non_finite = NonFinite<T>(pairs[n]);
          if ((non_finite & 0x8000u) != 0) pairs[n] &= 0xffff0000u;
          if ((non_finite & 0x80000000u) != 0) pairs[n] &= 0x0000ffffu;
        }
      }
    });
  }
};

// Adds the numbers of a row that are not finite to the sums of those rows for which bit `bit` of
// `seen` is set, and to no others.
template <class T, int kDim, int kRowTiles>
__device__ inline void AddNonFinite(const unsigned char* rows, int row, int bit,
                                    const unsigned (&seen)[kRowTiles][2], int column,
                                    float (&sums)[kRowTiles][kDim / 8][4]) {
#pragma unroll
  for (int n = 0; n < kDim / 8; ++n) {
    const unsigned pair =
        *reinterpret_cast<const unsigned*>(rows + ChunkOffset<kDim>(row, n) + column * 2);
    const unsigned non_finite = NonFinite<T>(pair);
#pragma unroll
    for (int x = 0; x < 2; ++x) {
      if ((non_finite >> (15 + 16 * x) & 1) == 0) continue;
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if ((seen[m][half] >> bit & 1) != 0) sums[m][n][half * 2 + x] += Half<T>(pair, x);
        }
      }
    }
  }
}

// ---- Keys ----

// A tile of keys, prepared for a block.
struct alignas(16) MmaTile {
  int index;           // -1 where the previous tile was the last
  int mask;            // as in KeyTile
  unsigned first_row;  // first row in k and v, or in their order
  int unused;

  MmaTile() = default;
  __device__ MmaTile(const FlashArguments& a, const KeyTile& tile)
      : index(tile.index),
        mask(tile.mask),
        first_row(static_cast<unsigned>(FirstKeyRow(a, tile.index))),
        unused(0) {}
  __device__ static MmaTile Last() {
    MmaTile last;
    last.index = -1;
    last.mask = TileRun::kFull;
    last.first_row = 0;
    last.unused = 0;
    return last;
  }
};

// Returns the list of a batch row and head, or null.
__device__ inline const int32_t* OrderOf(const TokenOrder& order, int64_t batch, int64_t head) {
  return order.tokens == nullptr ? nullptr : order.Of(batch, head);
}

// The keys and values of a batch row and key-value head, as one thread finds them for its block.
struct MmaKeys {
  int64_t keys;  // offset in k, in elements
  int64_t values;
  const int32_t* order;  // null: key n is token n
  const uint8_t* mask;   // null: all are tokens

  MmaKeys() = default;
  __device__ MmaKeys(const FlashArguments& a, const FlashTask& task)
      : keys(task.batch * a.k.strides[0] + task.kv_head * a.k.strides[1]),
        values(task.batch * a.v.strides[0] + task.kv_head * a.v.strides[1]),
        order(OrderOf(a.key_order, task.batch, task.kv_head)),
        mask(a.key_mask == nullptr ? nullptr : a.key_mask + task.batch * a.key_mask_strides[0]) {}

  // Returns the token of k and v that is key c of a tile, or -1 where there is none, or padding.
  __device__ int64_t TokenOrNone(const FlashArguments& a, const MmaTile& tile, int c) const {
    if (int64_t{tile.index} * kKeys + c >= a.kv_tokens) return -1;
    const int64_t row = tile.first_row + c;
    const int64_t token = order == nullptr ? row : order[row];
    if (mask == nullptr) return token;
    return mask[token * a.key_mask_strides[1]] != 0 ? token : -1;
  }
  // Returns which keys of a tile are tokens, in all lanes of a warp: bit c of the word is key c.
  __device__ uint64_t Tokens(const FlashArguments& a, const MmaTile& tile, int lane) const {
    if (a.key_mask == nullptr) return Bits(0, a.kv_tokens - int64_t{tile.index} * kKeys);
    const unsigned low = __ballot_sync(~0u, TokenOrNone(a, tile, lane) >= 0);
    const unsigned high = __ballot_sync(~0u, TokenOrNone(a, tile, lane + 32) >= 0);
    return low | static_cast<uint64_t>(high) << 32;
  }
  // Starts copies of a tile's rows of k or v, which begin `offset` elements into it.
  template <class Copies>
  __device__ void Start(const FlashArguments& a, const MmaTile& tile, unsigned thread,
                        unsigned char* to, const DeviceView& view, int64_t offset, int channels,
                        bool in_chunks) const {
    if (!in_chunks || a.key_order.tokens != nullptr || !AllTokens(a, tile.index)) {
      Copies::template StartOrConvert<kKeys>(thread, to, view, offset, channels, in_chunks,
                                             [&](int r) { return TokenOrNone(a, tile, r); });
    } else {
      Copies::template StartConsecutive<kKeys>(thread, to, view, offset, channels, tile.first_row);
    }
  }
};

// ---- Products ----

// Loads the left operands of a product over channels 16 k to 16 k + 15 of 16 kRowTiles rows.
template <int kDim, int kRowTiles>
__device__ inline void LoadLeft(const unsigned char* rows, int k, int lane,
                                unsigned (&left)[kRowTiles][4]) {
  const int offset = ChunkOffset<kDim>(lane % 16, lane / 16);
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
    LdMatrixX4(left[m], rows + ChunksOn<kDim>(offset, k * 2) + m * 16 * (kDim * 2));
  }
}

// Adds to sums[r][c] the inner products of rows r of the left operands, which left_of(k, to) gives for
// channels 16 k to 16 k + 15, and the 8 kColumnTiles rows c of `right`.
template <class T, int kDim, int kRowTiles, int kColumnTiles, class LeftOf>
__device__ inline void AddInnerProducts(const LeftOf& left_of, const unsigned char* right, int lane,
                                        float (&sums)[kRowTiles][kColumnTiles][4]) {
  const int offset = ChunkOffset<kDim>(lane / 16 * 8 + lane % 8, lane / 8 % 2);
#pragma unroll
  for (int k = 0; k < kDim / 16; ++k) {
    unsigned left[kRowTiles][4];
    left_of(k, left);
#pragma unroll
    for (int n = 0; n < kColumnTiles; n += 2) {
      unsigned pair[4];
      LdMatrixX4(pair, right + ChunksOn<kDim>(offset, k * 2) + n * 8 * (kDim * 2));
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        Sixteen<T>::Multiply(sums[m][n], left[m], pair);
        Sixteen<T>::Multiply(sums[m][n + 1], left[m], pair + 2);
      }
    }
  }
}

// Adds to sums[r] the 16 rows of `rows`, each times the weight that row r of the left operand has for
// it.
template <class T, int kDim, int kRowTiles>
__device__ inline void AddWeightedRows(const unsigned (&weight)[kRowTiles][4],
                                       const unsigned char* rows, int lane,
                                       float (&sums)[kRowTiles][kDim / 8][4]) {
  const int offset = ChunkOffset<kDim>(lane % 16, lane / 16);
#pragma unroll
  for (int n = 0; n < kDim / 8; n += 2) {
    unsigned value[4];
    LdMatrixX4Transposed(value, rows + ChunksOn<kDim>(offset, n));
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      Sixteen<T>::Multiply(sums[m][n], weight[m], value);
      Sixteen<T>::Multiply(sums[m][n + 1], weight[m], value + 2);
    }
  }
}

}  // namespace
}  // namespace tfb

#endif  // TFB_CORE_FLASH_FLASH_MMA_TILE_CUH_
