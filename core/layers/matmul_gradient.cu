// The products x^T dy of a product's gradients.
//
// A block makes 64 x 64 of dW for one chunk of rows with 128 threads, each 8 x 4 of it in registers, 16 rows at a time.
//   shared memory  2 x 16 x 68 x 4 B = 8.5 KiB
//   registers      128 a thread of sm_80, 127 of sm_89, 126 of sm_90a, without spills: four blocks are on a multiprocessor
//   rate           For 16 rows of f32 a thread takes some 1,060 instructions of sm_90a, 512 of them multiply-adds, with
//                  a load of 16 B of shared memory for each 11; loading, checks of dy for 0 and the bias are the rest. So
//                  at most 48 % of an H100's fp32 peak, 32 of 67 TFLOP/s, is to be expected; tiles then read 2 TB/s from
//                  L2, 512 B for 8,192 FLOPs. It is not measured.
// The sums of a chunk are in the order of the rows, and chunks are added in theirs (SumOfChunks), so that the bits are the
// same in every run.
#include "core/cuda/for_each.cuh"
#include "core/cuda/register_tile.cuh"
#include "core/layers/layer_rows.cuh"
#include "core/layers/matmul_gradient_kernels.h"

namespace tfb {
namespace {

constexpr int kTile = 64;
constexpr int kDepth = 16;   // rows at a time
constexpr int kStride = 68;  // of a row of a tile
constexpr int kThreads = 128;
constexpr int kTileRows = 8;  // of a thread
constexpr int kLoads = 8;     // neighbouring channels that a thread loads of a row
static_assert(kThreads * kLoads == kDepth * kTile, "one load for each thread");

// Loads channels `first` on of a row, with zeros beyond the last.
__device__ inline void LoadChannels(const DeviceRows& view, int64_t row, int64_t first,
                                    int64_t channels, float (&to)[kLoads]) {
  const int64_t offset = RowOffset(view, row);
#pragma unroll
  for (int n = 0; n < kLoads; ++n) {
    to[n] = first + n < channels ? Load(view, offset, first + n) : 0;
  }
}

__global__ void __launch_bounds__(kThreads) MatMulGradient(const MatMulGradientArguments a) {
  __shared__ __align__(16) float x[kDepth][kStride];
  __shared__ __align__(16) float dy[kDepth][kStride];
  const int t = static_cast<int>(threadIdx.x), tx = t % 16, ty = t / 16;
  const int64_t column_tiles = CeilDiv(a.out, kTile),
                row_tiles = CeilDiv(a.in > 0 ? a.in : 1, kTile);
  const int64_t block = blockIdx.x, tile = block % (row_tiles * column_tiles);
  const int64_t first_in = tile / column_tiles * kTile, first_out = tile % column_tiles * kTile;
  const int64_t chunk = block / (row_tiles * column_tiles);
  const int64_t end = min(a.rows, (chunk + 1) * kGradientChunkRows);
  float sums[kTileRows][4] = {}, bias = 0;
  for (int64_t row = chunk * kGradientChunkRows; row < end; row += kDepth) {
    const int64_t own = row + t / kLoads;
    const int part = t % kLoads * kLoads;
    float of_x[kLoads] = {}, of_y[kLoads] = {};
    bool any = false;
    if (own < end) {
      LoadChannels(a.dy, own, first_out + part, a.out, of_y);
#pragma unroll
      for (int n = 0; n < kLoads; ++n) any = any || of_y[n] != 0;
    }
    // Eight neighbouring lanes have a row. One whose dy is 0 adds nothing, whatever x holds.
    const unsigned nonzero = __ballot_sync(kAllLanes, any) >> (Lane() / kLoads * kLoads) & 0xffu;
    const bool reads_x = nonzero != 0 && a.x.data != nullptr;
    if (reads_x) LoadChannels(a.x, own, first_in + part, a.in, of_x);
    __syncthreads();  // the rows before have been read
#pragma unroll
    for (int n = 0; n < kLoads; ++n) {
      x[t / kLoads][part + n] = of_x[n];
      dy[t / kLoads][part + n] = of_y[n];
    }
    __syncthreads();
    AddProduct<4>({&x[0][ty * kTileRows], kStride}, {&dy[0][tx * 4], kStride}, kDepth, sums);
    if (t >= kTile) continue;
#pragma unroll
    for (int r = 0; r < kDepth; ++r) bias += dy[r][t];
  }
  float* const of_chunk = a.sums + chunk * (a.in + 1) * a.out;
#pragma unroll
  for (int r = 0; r < kTileRows; ++r) {
    const int64_t k = first_in + ty * kTileRows + r;
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const int64_t column = first_out + tx * 4 + c;
      if (k < a.in && column < a.out) of_chunk[k * a.out + column] = sums[r][c];
    }
  }
  if (first_in == 0 && t < kTile && first_out + t < a.out)
    of_chunk[a.in * a.out + first_out + t] = bias;
}

const char* LaunchMatMulGradient(const MatMulGradientArguments& a, void* stream) {
  const int64_t tiles = CeilDiv(a.in > 0 ? a.in : 1, kTile) * CeilDiv(a.out, kTile);
  return Launch("MatMulGradient", &MatMulGradient, {tiles * a.chunks(), kThreads}, stream, a);
}

}  // namespace

TFB_KERNEL_TABLE(MatMulGradientKernels, {&LaunchMatMulGradient});
TFB_FOR_EACH_IN_ROWS(SumOfChunks);

}  // namespace tfb
