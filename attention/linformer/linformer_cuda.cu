#include "attention/linformer/compression_functors.h"
#include "attention/linformer/linformer_cuda.h"
#include "core/cuda/for_each.cuh"
#include "core/cuda/register_tile.cuh"
#include "core/cuda/sum_in_runs.cuh"
#include "core/cuda/warp.cuh"

namespace tfb::linformer {
namespace {

constexpr int kThreads = 256;

__device__ float Load(const CompressionArguments& a, int64_t b, int64_t h, int64_t token,
                      int64_t channel) {
  return tfb::Load(a.x, Offset(a.x, b, h, token, channel));
}
// Returns the sums of a slot over the tokens of chunk 0.
__device__ float* SlotRow(const CompressionArguments& a, int64_t b, int64_t h, int64_t slot) {
  return a.sums + ((b * a.heads + h) * a.slot_count + slot) * a.row;
}
__device__ int64_t ChunkFloats(const CompressionArguments& a) {
  return a.batch * a.heads * a.slot_count * a.row;
}
// ---- Products with E, and their gradients ----
//
// A block makes 64 x 64 sums, each of its 128 threads 8 x 4 of them in registers. Tiles of 16 terms
// are double-buffered: the next are loaded to registers while these are multiplied.
//   shared memory: 2 x 16 x (68 + 68) x 4 B = 17 KiB

constexpr int kTile = 64;
constexpr int kDepth = 16;
constexpr int kMultiplyThreads = 128;
constexpr int kThreadRows = 8;
constexpr int kThreadColumns = 4;
constexpr int kLoads = kTile * kDepth / kMultiplyThreads;  // loads of a thread for each operand
static_assert(kTile / kThreadRows * (kTile / kThreadColumns) == kMultiplyThreads, "a tile");

struct alignas(16) Tiles {
  float left[kDepth][kTile + 4];  // the padding spreads the writes of transposed operands
  float right[kDepth][kTile + 4];
};

__device__ int ThreadRow() {
  return static_cast<int>(threadIdx.x) / (kTile / kThreadColumns) * kThreadRows;
}
__device__ int ThreadColumn() {
  return static_cast<int>(threadIdx.x) % (kTile / kThreadColumns) * kThreadColumns;
}

// Which number of a tile the thread loads as its nth, so that neighbouring threads load neighbours
// in memory: those of one term, or, where an operand's terms lie side by side, the terms of one row.
template <bool kTermsAreNeighbours>
struct Slot {
  __device__ explicit Slot(int n) {
    constexpr int kSide = kTermsAreNeighbours ? kDepth : kTile;
    const int thread = static_cast<int>(threadIdx.x);
    const int near = thread % kSide, far = thread / kSide + n * (kMultiplyThreads / kSide);
    term = kTermsAreNeighbours ? near : far;
    place = kTermsAreNeighbours ? far : near;
  }
  int term;
  int place;
};

// sums[r][c] += sum over terms `begin` to end - 1 of Left(term, r) Right(term, c), in their order,
// for a product that has these functions of the block's rows and columns, 0 where there is none,
// and says of both whether their terms lie side by side.
template <class Product>
__device__ void AddProducts(const Product& product, int64_t begin, int64_t end, Tiles (&tiles)[2],
                            float (&sums)[kThreadRows][kThreadColumns]) {
  using LeftSlot = Slot<Product::kLeftTermsAreNeighbours>;
  using RightSlot = Slot<Product::kRightTermsAreNeighbours>;
  float left[kLoads], right[kLoads];
  const auto fetch = [&](int64_t first) {
#pragma unroll
    for (int n = 0; n < kLoads; ++n) {
      const LeftSlot l(n);
      left[n] = first + l.term < end ? product.Left(first + l.term, l.place) : 0.0f;
      const RightSlot r(n);
      right[n] = first + r.term < end ? product.Right(first + r.term, r.place) : 0.0f;
    }
  };
  const auto put = [&](Tiles* to) {
#pragma unroll
    for (int n = 0; n < kLoads; ++n) {
      const LeftSlot l(n);
      to->left[l.term][l.place] = left[n];
      const RightSlot r(n);
      to->right[r.term][r.place] = right[n];
    }
  };
  fetch(begin);
  __syncthreads();  // the tiles of a product before have been read
  put(&tiles[0]);
  int current = 0;
  for (int64_t first = begin; first < end; first += kDepth, current ^= 1) {
    __syncthreads();  // these tiles have arrived, and the others have been read
    const bool more = first + kDepth < end;
    if (more) fetch(first + kDepth);
    AddProduct<8>({&tiles[current].left[0][ThreadRow()], kTile + 4},
                  {&tiles[current].right[0][ThreadColumn()], kTile + 4}, kDepth, sums);
    if (more) put(&tiles[current ^ 1]);
  }
}

// A block's place: which tile of rows and of columns, and of which matrix.
struct TilePlace {
  int64_t first_row;
  int64_t first_column;
  int64_t matrix;
};
__device__ TilePlace TileOfBlock(int64_t rows, int64_t columns) {
  const int64_t column_tiles = CeilDiv(columns, kTile), row_tiles = CeilDiv(rows, kTile);
  const int64_t block = blockIdx.x;
  return {block / column_tiles % row_tiles * kTile, block % column_tiles * kTile,
          block / column_tiles / row_tiles};
}

// Calls store(row, column, sum) with the thread's sums that are inside the matrix.
template <class Store>
__device__ void ForEachSum(const TilePlace& place, int64_t rows, int64_t columns,
                           const float (&sums)[kThreadRows][kThreadColumns], const Store& store) {
#pragma unroll
  for (int r = 0; r < kThreadRows; ++r) {
    const int64_t row = place.first_row + ThreadRow() + r;
    if (row >= rows) break;
#pragma unroll
    for (int c = 0; c < kThreadColumns; ++c) {
      const int64_t column = place.first_column + ThreadColumn() + c;
      if (column < columns) store(row, column, sums[r][c]);
    }
  }
}

// Slots x channels, of a head: terms are tokens.
struct SlotProduct {
  static constexpr bool kLeftTermsAreNeighbours = false;
  static constexpr bool kRightTermsAreNeighbours = false;
  const CompressionArguments& a;
  const TilePlace& place;
  int64_t b;
  int64_t h;

  __device__ float Left(int64_t token, int row) const {
    const int64_t slot = place.first_row + row;
    if (slot >= a.slot_count || !IsToken(a, b, token)) return 0;
    return TableOf(a, b, h)[token * a.slot_count + slot];
  }
  __device__ float Right(int64_t token, int column) const {
    const int64_t channel = place.first_column + column;
    return channel < a.channels && IsToken(a, b, token) ? Load(a, b, h, token, channel) : 0;
  }
};

__global__ void __launch_bounds__(kMultiplyThreads) Multiply(CompressionArguments a) {
  __shared__ Tiles tiles[2];
  const TilePlace place = TileOfBlock(a.slot_count, a.channels);
  const int64_t head = place.matrix % (a.batch * a.heads);
  const int64_t chunk = place.matrix / (a.batch * a.heads);
  const int64_t b = head / a.heads, h = head % a.heads, begin = chunk * a.chunk_tokens;
  float sums[kThreadRows][kThreadColumns] = {};
  AddProducts(SlotProduct{a, place, b, h}, begin, min(begin + a.chunk_tokens, a.tokens), tiles,
              sums);
  ForEachSum(place, a.slot_count, a.channels, sums, [&](int64_t slot, int64_t channel, float sum) {
    SlotRow(a, b, h, slot)[chunk * ChunkFloats(a) + channel] = sum;
  });
}

// Tokens x channels, of a head, dx = E^T dx': terms are slots.
struct RowGradientProduct {
  static constexpr bool kLeftTermsAreNeighbours = true;
  static constexpr bool kRightTermsAreNeighbours = false;
  const CompressionGradientArguments& a;
  const TilePlace& place;
  int64_t b;
  int64_t h;

  __device__ float Left(int64_t slot, int row) const {
    const int64_t token = place.first_row + row;
    if (token >= a.forward.tokens) return 0;
    return TableOf(a.forward, b, h)[token * a.forward.slot_count + slot];
  }
  __device__ float Right(int64_t slot, int column) const {
    const int64_t channel = place.first_column + column;
    return channel < a.forward.channels ? tfb::Load(a.slots, Offset(a.slots, b, h, slot, channel))
                                        : 0;
  }
};

__global__ void __launch_bounds__(kMultiplyThreads) GradientOfRows(CompressionGradientArguments a) {
  __shared__ Tiles tiles[2];
  const CompressionArguments& f = a.forward;
  const TilePlace place = TileOfBlock(f.tokens, f.channels);
  const int64_t b = place.matrix / f.heads, h = place.matrix % f.heads;
  float sums[kThreadRows][kThreadColumns] = {};
  AddProducts(RowGradientProduct{a, place, b, h}, 0, f.slot_count, tiles, sums);
  ForEachSum(place, f.tokens, f.channels, sums, [&](int64_t token, int64_t channel, float sum) {
    if (!IsToken(f, b, token)) return;
    const int64_t to = Offset(a.x_gradient, b, h, token, channel);
    Store(a.x_gradient, to, tfb::Load(a.x_gradient, to) + sum);
  });
}

// Slots x tokens, of a head, dE = dx' x^T: terms are channels.
struct TableGradientProduct {
  static constexpr bool kLeftTermsAreNeighbours = true;
  static constexpr bool kRightTermsAreNeighbours = true;
  const CompressionGradientArguments& a;
  const TilePlace& place;
  int64_t b;
  int64_t h;

  __device__ float Left(int64_t channel, int row) const {
    const int64_t slot = place.first_row + row;
    return slot < a.forward.slot_count ? tfb::Load(a.slots, Offset(a.slots, b, h, slot, channel))
                                       : 0;
  }
  __device__ float Right(int64_t channel, int column) const {
    const int64_t token = place.first_column + column;
    return IsToken(a.forward, b, token) ? Load(a.forward, b, h, token, channel) : 0;
  }
};

// A block adds up the heads that share the table, in their order.
__global__ void __launch_bounds__(kMultiplyThreads)
    GradientOfTables(CompressionGradientArguments a) {
  __shared__ Tiles tiles[2];
  const CompressionArguments& f = a.forward;
  const TilePlace place = TileOfBlock(f.slot_count, f.tokens);
  float sums[kThreadRows][kThreadColumns] = {};
  for (int64_t head = 0; head < f.batch * f.heads; ++head) {
    const int64_t b = head / f.heads, h = head % f.heads;
    if (a.TableIndex(b, h) != place.matrix) continue;
    AddProducts(TableGradientProduct{a, place, b, h}, 0, f.channels, tiles, sums);
  }
  ForEachSum(place, f.slot_count, f.tokens, sums, [&](int64_t slot, int64_t token, float sum) {
    const int64_t to = Offset(a.tables_gradient, place.matrix, slot, token);
    Store(a.tables_gradient, to, (a.adds_to_tables ? tfb::Load(a.tables_gradient, to) : 0) + sum);
  });
}

template <class Arguments>
const char* LaunchTiles(const char* name, void (*kernel)(Arguments), int64_t rows, int64_t columns,
                        int64_t matrices, void* stream, const Arguments& a) {
  const int64_t blocks = CeilDiv(rows, kTile) * CeilDiv(columns, kTile) * matrices;
  return Launch(name, kernel, {blocks, kMultiplyThreads}, stream, a);
}
const char* LaunchMultiply(const CompressionArguments& a, void* stream) {
  return LaunchTiles("Multiply", &Multiply, a.slot_count, a.channels, a.batch * a.heads * a.chunks,
                     stream, a);
}
const char* LaunchGradientOfRows(const CompressionGradientArguments& a, void* stream) {
  const CompressionArguments& f = a.forward;
  return LaunchTiles("GradientOfRows", &GradientOfRows, f.tokens, f.channels, f.batch * f.heads,
                     stream, a);
}
const char* LaunchGradientOfTables(const CompressionGradientArguments& a, void* stream) {
  const CompressionArguments& f = a.forward;
  return LaunchTiles("GradientOfTables", &GradientOfTables, f.slot_count, f.tokens, a.table_count,
                     stream, a);
}

// ---- A thread for each element of the slots ----

struct Place {
  int64_t b;
  int64_t h;
  int64_t slot;
  int64_t channel;
  bool exists;
};
__device__ Place PlaceOfThread(const CompressionArguments& a) {
  int64_t n = ThreadOfGrid();
  Place place;
  place.channel = n % a.channels;
  n /= a.channels;
  place.slot = n % a.slot_count;
  n /= a.slot_count;
  place.h = n % a.heads;
  place.b = n / a.heads;
  place.exists = place.b < a.batch;
  return place;
}

__global__ void __launch_bounds__(kThreads) AddChunks(CompressionArguments a) {
  const Place p = PlaceOfThread(a);
  if (!p.exists) return;
  float* to = SlotRow(a, p.b, p.h, p.slot) + p.channel;
  float sum = to[0];
  for (int64_t chunk = 1; chunk < a.chunks; ++chunk) sum += to[chunk * ChunkFloats(a)];
  to[0] = sum;
}

__global__ void __launch_bounds__(kThreads) Pool(CompressionArguments a) {
  const Place p = PlaceOfThread(a);
  if (!p.exists) return;
  const int64_t begin = p.slot * a.window, end = min(begin + a.window, a.tokens);
  float result = a.is_max ? -INFINITY : 0.0f;
  for (int64_t token = begin; token < end; ++token) {
    const float x = IsToken(a, p.b, token) ? Load(a, p.b, p.h, token, p.channel) : 0.0f;
    if (a.is_max) {
      result = x <= result || result != result ? result : x;  // a NaN stays
    } else {
      result += x;
    }
  }
  if (!a.is_max) result /= static_cast<float>(end - begin);
  SlotRow(a, p.b, p.h, p.slot)[p.channel] = result;
}

// Convolves channels `first` to first + count - 1 into the element of a slot.
__device__ void ConvolveChannels(const CompressionArguments& a, const Place& p, int64_t first,
                                 int64_t count) {
  const float* kernel = TableOf(a, p.b, p.h) + p.channel;
  float sum = 0;
  for (int64_t t = 0; t < a.window; ++t) {
    const int64_t token = p.slot * a.window + t;
    if (!IsToken(a, p.b, token)) continue;
    for (int64_t c = 0; c < count; ++c) {
      sum += Load(a, p.b, p.h, token, first + c) * kernel[(t * count + c) * a.row];
    }
  }
  SlotRow(a, p.b, p.h, p.slot)[p.channel] = sum;
}

__global__ void __launch_bounds__(kThreads) Convolve(CompressionArguments a) {
  const Place p = PlaceOfThread(a);
  if (p.exists) ConvolveChannels(a, p, 0, a.channels);
}

__global__ void __launch_bounds__(kThreads) ConvolveDepthwise(CompressionArguments a) {
  const Place p = PlaceOfThread(a);
  if (p.exists) ConvolveChannels(a, p, p.channel, 1);
}

const char* LaunchElements(const char* name, void (*kernel)(CompressionArguments),
                           const CompressionArguments& a, void* stream) {
  const int64_t blocks = CeilDiv(a.batch * a.heads * a.slot_count * a.channels, kThreads);
  return Launch(name, kernel, {blocks, kThreads}, stream, a);
}
const char* LaunchAddChunks(const CompressionArguments& a, void* stream) {
  return LaunchElements("AddChunks", &AddChunks, a, stream);
}
const char* LaunchPool(const CompressionArguments& a, void* stream) {
  return LaunchElements("Pool", &Pool, a, stream);
}
const char* LaunchConvolve(const CompressionArguments& a, void* stream) {
  return LaunchElements("Convolve", &Convolve, a, stream);
}
const char* LaunchConvolveDepthwise(const CompressionArguments& a, void* stream) {
  return LaunchElements("ConvolveDepthwise", &ConvolveDepthwise, a, stream);
}

}  // namespace

TFB_KERNEL_TABLE(LinformerKernels,
                 {&LaunchMultiply, &LaunchAddChunks, &LaunchPool, &LaunchConvolve,
                  &LaunchConvolveDepthwise, &LaunchGradientOfRows, &LaunchGradientOfTables});
TFB_FOR_EACH_IN_ROWS(GradientOfWindowRows);
TFB_FOR_EACH_IN_ROWS(GradientOfMaximum);
TFB_SUM_IN_RUNS(GradientOfDepthwise);
TFB_FOR_EACH_IN_ROWS(GradientOfConvolvedRows);
TFB_FOR_EACH_IN_ROWS(GradientOfConvolution);

}  // namespace tfb::linformer
