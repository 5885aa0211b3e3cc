#include "core/cuda/for_each.cuh"
#include "positional/rope/rope_cuda.h"

namespace tfb::rope {
namespace {

// One launch rotates queries and keys. A thread rotates four pairs of a row, or copies eight of the
// channels behind the last pair: a row of 64 channels is 8 threads, each with 8 loads in flight. A
// block has rows of one head.
constexpr int kThreads = 256;
constexpr int kPairs = 4;
constexpr int kChannels = 2 * kPairs;

// Returns the threads of a row: at most 33 for 256 channels.
template <class Real>
__host__ __device__ int RowThreads(const TurnArguments<Real>& a) {
  return static_cast<int>(CeilDiv(a.pairs, kPairs) + CeilDiv(a.channels - 2 * a.pairs, kChannels));
}
__host__ __device__ int64_t Blocks(const TurnedRows& rows, int block_rows) {
  return rows.batch * rows.heads * CeilDiv(rows.tokens, block_rows);
}

// A row of `from` and the row of `to` with the same index.
struct Row {
  const DeviceView& from;
  const DeviceView& to;
  int64_t from_offset;
  int64_t to_offset;

  __device__ float Load(int channel) const {
    return tfb::Load(from, from_offset + channel * from.strides[3]);
  }
  __device__ void Store(int channel, float value) const {
    tfb::Store(to, to_offset + channel * to.strides[3], value);
  }
};

template <class Real>
__device__ void TurnPairs(const TurnArguments<Real>& a, const Row& row, int64_t table_row,
                          int first) {
  const int step = a.half ? 1 : 2, second = a.half ? a.pairs : 1;
  const Real* cos = a.cos + table_row * a.pairs;
  const Real* sin = a.sin + table_row * a.pairs;
  float x[kPairs], y[kPairs];
#pragma unroll
  for (int n = 0; n < kPairs; ++n) {
    const int t = min(first + n, a.pairs - 1);
    const Real c = cos[t], s = sin[t];
    const Real left = row.Load(t * step), right = row.Load(t * step + second);
    x[n] = static_cast<float>(left * c - right * s);
    y[n] = static_cast<float>(left * s + right * c);
  }
#pragma unroll
  for (int n = 0; n < kPairs; ++n) {
    const int t = first + n;
    if (t >= a.pairs) break;
    row.Store(t * step, x[n]);
    row.Store(t * step + second, y[n]);
  }
}

template <class Real>
__global__ void __launch_bounds__(kThreads) Turn(TurnArguments<Real> a) {
  const int row_threads = RowThreads(a), block_rows = kThreads / row_threads;
  const int64_t query_blocks = Blocks(a.queries, block_rows);
  const bool is_key = blockIdx.x >= query_blocks;
  const TurnedRows& rows = is_key ? a.keys : a.queries;
  const unsigned block = blockIdx.x - static_cast<unsigned>(is_key ? query_blocks : 0);
  const auto head_blocks = static_cast<unsigned>(CeilDiv(rows.tokens, block_rows));
  const unsigned head = block / head_blocks;
  const int64_t b = head / static_cast<unsigned>(rows.heads);
  const int64_t h = head % static_cast<unsigned>(rows.heads);

  const int row_of_block = static_cast<int>(threadIdx.x) / row_threads;
  const int part = static_cast<int>(threadIdx.x) % row_threads;
  const int64_t n = static_cast<int64_t>(block % head_blocks) * block_rows + row_of_block;
  if (row_of_block >= block_rows || n >= rows.tokens) return;
  const Row row{rows.from, rows.to, Offset(rows.from, b, h, n), Offset(rows.to, b, h, n)};
  const int turning = static_cast<int>(CeilDiv(a.pairs, kPairs));
  if (part < turning) return TurnPairs(a, row, n + rows.first, part * kPairs);
  const int first = 2 * a.pairs + (part - turning) * kChannels;
  for (int c = first; c < min(first + kChannels, a.channels); ++c) row.Store(c, row.Load(c));
}

template <class Real>
const char* LaunchTurn(const TurnArguments<Real>& a, void* stream) {
  const int block_rows = kThreads / RowThreads(a);
  const int64_t blocks = Blocks(a.queries, block_rows) + Blocks(a.keys, block_rows);
  return Launch("Turn", &Turn<Real>, {blocks, kThreads}, stream, a);
}

}  // namespace

TFB_KERNEL_TABLE(RopeKernels<float>, {&LaunchTurn<float>});
TFB_KERNEL_TABLE(RopeKernels<double>, {&LaunchTurn<double>});

TFB_FOR_EACH(TurnBack<float>);
TFB_FOR_EACH(TurnBack<double>);

}  // namespace tfb::rope
