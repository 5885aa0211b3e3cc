#include "core/cuda/register_tile.cuh"
#include "core/layers/activation_functors.h"
#include "core/layers/layer_kernels.h"
#include "core/layers/layer_rows.cuh"

namespace tfb {
namespace {

// ---- The product ----
//
// A block makes 64 x 64 of y with 128 threads, each 8 x 4 of it in registers. Tiles are 16 deep and
// double-buffered: the next ones are on their way to registers while these are multiplied.
//   shared memory: 2 x 16 x (68 + 64) x 4 B = 16.5 KiB
// A row's sum does not depend on the other rows, nor on their number: a product of listed rows has
// the bits of a product of all. The loads gather listed rows and the stores scatter them. A block
// beyond the list's end returns at once; in the last block, warps beyond it only load tiles.

constexpr int kTileRows = 64;
constexpr int kTileColumns = 64;
constexpr int kTileDepth = 16;
constexpr int kMultiplyThreads = 128;
constexpr int kThreadRows = 8;
constexpr int kThreadColumns = 4;
// Loads of a thread for a matrix's tile.
constexpr int kLoads = kTileRows * kTileDepth / 4 / kMultiplyThreads;
static_assert(kTileRows == kTileColumns, "both tiles have as many elements");

struct alignas(16) Tiles {
  float x[kTileDepth][kTileRows + 4];  // transposed; the padding spreads its writes over banks
  float w[kTileDepth][kTileColumns];
};

// Whether four consecutive floats of x, or of W, can be read at once from any multiple of four.
struct InVectors {
  bool x;
  bool weights;
};

// The elements of the next tiles that a thread loads, four neighbouring ones at a time: for x,
// channels 4 (t % 4) on of rows t / 4 + 32 n; for W, columns 4 (t % 16) on of channels t / 16 + 8
// n.
struct Fetched {
  float4 x[kLoads];
  float4 w[kLoads];
};

class TileLoader {
 public:
  // Columns beyond the last repeat others: their results are not stored.
  __device__ TileLoader(const MatMulArguments& a, const InVectors& in_vectors, int64_t rows,
                        int64_t first_row, int64_t first_column)
      : a_(a),
        in_vectors_(in_vectors),
        rows_(static_cast<int>(min(rows - first_row, int64_t{kTileRows}))),
        column_(first_column + WColumn()) {
    if (in_vectors.weights) column_ = min(column_, a.out - 4);
#pragma unroll
    for (int n = 0; n < kLoads; ++n) {
      const int64_t row = first_row + min(XRow(n), rows_ - 1);
      x_offset_[n] = RowOffset(a.x, RowOfList(a.list, row));
    }
  }

  // Loads the tiles of the channels `depth` on, with zeros beyond the last channel and row.
  __device__ void Fetch(int64_t depth, Fetched* next) const {
#pragma unroll
    for (int n = 0; n < kLoads; ++n) {
      next->x[n] =
          XRow(n) < rows_ ? FetchX(x_offset_[n], depth + XChannel()) : make_float4(0, 0, 0, 0);
    }
#pragma unroll
    for (int n = 0; n < kLoads; ++n) next->w[n] = FetchW(depth + WChannel(n));
  }

  __device__ void Put(const Fetched& next, Tiles* tiles) const {
#pragma unroll
    for (int n = 0; n < kLoads; ++n) {
      const float4 x = next.x[n];
      tiles->x[XChannel()][XRow(n)] = x.x;
      tiles->x[XChannel() + 1][XRow(n)] = x.y;
      tiles->x[XChannel() + 2][XRow(n)] = x.z;
      tiles->x[XChannel() + 3][XRow(n)] = x.w;
      *reinterpret_cast<float4*>(&tiles->w[WChannel(n)][WColumn()]) = next.w[n];
    }
  }

 private:
  __device__ static int XRow(int n) {
    return static_cast<int>(threadIdx.x) / (kTileDepth / 4) +
           n * (kMultiplyThreads / (kTileDepth / 4));
  }
  __device__ static int XChannel() { return static_cast<int>(threadIdx.x) % (kTileDepth / 4) * 4; }
  __device__ static int WChannel(int n) {
    return static_cast<int>(threadIdx.x) / (kTileColumns / 4) +
           n * (kMultiplyThreads / (kTileColumns / 4));
  }
  __device__ static int WColumn() { return static_cast<int>(threadIdx.x) % (kTileColumns / 4) * 4; }

  __device__ float4 FetchX(int64_t row_offset, int64_t channel) const {
    if (in_vectors_.x) {
      if (channel >= a_.in) return make_float4(0, 0, 0, 0);
      return *reinterpret_cast<const float4*>(static_cast<const float*>(a_.x.data) + row_offset +
                                              channel);
    }
    const auto at = [&](int64_t c) { return c < a_.in ? Load(a_.x, row_offset, c) : 0.0f; };
    return make_float4(at(channel), at(channel + 1), at(channel + 2), at(channel + 3));
  }
  __device__ float4 FetchW(int64_t channel) const {
    if (channel >= a_.in) return make_float4(0, 0, 0, 0);
    const float* row = a_.weights + channel * a_.weight_stride;
    if (in_vectors_.weights) return *reinterpret_cast<const float4*>(row + column_);
    const auto at = [&](int64_t c) { return row[min(c, a_.out - 1)]; };
    return make_float4(at(column_), at(column_ + 1), at(column_ + 2), at(column_ + 3));
  }

  const MatMulArguments& a_;
  const InVectors& in_vectors_;
  int rows_;  // of the tile
  int64_t column_;
  int64_t x_offset_[kLoads];
};

// Blocks of one column tile follow each other, so that the tile's part of W stays in L2.
__global__ void __launch_bounds__(kMultiplyThreads)
    Multiply(MatMulArguments a, InVectors in_vectors) {
  __shared__ Tiles tiles[2];
  const int64_t row_tiles = CeilDiv(a.rows, kTileRows);
  const int64_t first_row = blockIdx.x % row_tiles * kTileRows;
  const int64_t rows = RowsOfList(a.list, a.rows);
  if (first_row >= rows) return;
  const int64_t first_column = blockIdx.x / row_tiles * kTileColumns;
  const int thread_row = threadIdx.x / (kTileColumns / kThreadColumns) * kThreadRows;
  const int thread_column = threadIdx.x % (kTileColumns / kThreadColumns) * kThreadColumns;

  float sums[kThreadRows][kThreadColumns] = {};
  const bool has_rows = first_row + thread_row < rows;  // a thread has 8 rows, a warp 16
  const TileLoader loader(a, in_vectors, rows, first_row, first_column);
  Fetched next;
  if (a.in > 0) {
    loader.Fetch(0, &next);
    loader.Put(next, &tiles[0]);
  }
  int current = 0;
  for (int64_t depth = 0; depth < a.in; depth += kTileDepth, current ^= 1) {
    __syncthreads();  // these tiles have arrived, and the others have been read
    const bool more = depth + kTileDepth < a.in;
    if (more) loader.Fetch(depth + kTileDepth, &next);
    if (has_rows) {
      AddProduct<kTileDepth>({&tiles[current].x[0][thread_row], kTileRows + 4},
                             {&tiles[current].w[0][thread_column], kTileColumns}, kTileDepth, sums);
    }
    if (more) loader.Put(next, &tiles[current ^ 1]);
  }

#pragma unroll
  for (int r = 0; r < kThreadRows; ++r) {
    if (first_row + thread_row + r >= rows) break;
    const int64_t row = RowOfList(a.list, first_row + thread_row + r);
    const int64_t y_offset = RowOffset(a.y, row);
    const int64_t residual_offset = a.residual.data == nullptr ? 0 : RowOffset(a.residual, row);
    const bool keeps = a.pre_activation.data != nullptr;
    const int64_t kept_offset = keeps ? RowOffset(a.pre_activation, row) : 0;
#pragma unroll
    for (int c = 0; c < kThreadColumns; ++c) {
      const int64_t column = first_column + thread_column + c;
      if (column >= a.out) break;
      const float bias = a.bias == nullptr ? 0.0f : a.bias[column];
      if (keeps) Store(a.pre_activation, kept_offset, column, sums[r][c] + bias);
      float value = ActivationOf(a.activation, sums[r][c] + bias);
      if (a.residual.data != nullptr) value += Load(a.residual, residual_offset, column);
      Store(a.y, y_offset, column, value);
    }
  }
}

const char* LaunchMultiply(const MatMulArguments& a, void* stream) {
  const int64_t blocks = CeilDiv(a.rows, kTileRows) * CeilDiv(a.out, kTileColumns);
  const auto is_aligned = [](const void* data) {
    return reinterpret_cast<uintptr_t>(data) % sizeof(float4) == 0;
  };
  const InVectors in_vectors = {
      a.x.element == Element::kF32 && a.x.channel_stride == 1 && a.x.token_stride % 4 == 0 &&
          a.x.batch_stride % 4 == 0 && a.in % 4 == 0 && is_aligned(a.x.data),
      a.weight_stride % 4 == 0 && a.out % 4 == 0 && is_aligned(a.weights)};
  return Launch("Multiply", &Multiply, {blocks, kMultiplyThreads}, stream, a, in_vectors);
}

// ---- Work on rows, a warp each ----

__global__ void __launch_bounds__(kRowThreads) Finish(FinishArguments a) {
  const RowPart part = RowPartOfWarp(a.channels);
  const int64_t row = part.row;
  if (row >= a.rows) return;
  const int64_t x_offset = RowOffset(a.x, row), y_offset = RowOffset(a.y, row);
  const int64_t residual_offset = a.residual.data == nullptr ? 0 : RowOffset(a.residual, row);
  const bool keeps = a.pre_activation.data != nullptr;
  const int64_t kept_offset = keeps ? RowOffset(a.pre_activation, row) : 0;
  for (int64_t c = part.begin + Lane(); c < part.end; c += kWarp) {
    const float bias = a.bias == nullptr ? 0.0f : a.bias[c];
    const float sum = a.scale * Load(a.x, x_offset, c) + bias;
    if (keeps) Store(a.pre_activation, kept_offset, c, sum);
    float value = ActivationOf(a.activation, sum);
    if (a.residual.data != nullptr) value += Load(a.residual, residual_offset, c);
    Store(a.y, y_offset, c, value);
  }
}

const char* LaunchFinish(const FinishArguments& a, void* stream) {
  return LaunchWarps("Finish", &Finish, RowParts(a.rows, a.channels), stream, a);
}

}  // namespace

TFB_KERNEL_TABLE(LayerKernels, {&LaunchMultiply, &LaunchFinish});

}  // namespace tfb
