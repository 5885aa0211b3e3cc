#include "core/layers/layer_rows.cuh"
#include "core/layers/list_rows_kernels.h"

namespace tfb {
namespace {

// A block lists 1024 rows, each thread 4. A row's place in the list is the number of rows listed
// before it. A block counts those of earlier blocks itself, 16 flags a load, so that no block waits
// for another; for its own rows it takes a prefix sum over its threads. At 64 Ki rows the 64 blocks
// read 2 MiB of flags in all.
constexpr int kListThreads = 256;
constexpr int kListWarps = kListThreads / kWarp;
constexpr int kThreadFlags = 4;
constexpr int kBlockFlags = kListThreads * kThreadFlags;

__device__ int CountBefore(const uint8_t* flags, int64_t end) {
  int count = 0;
  for (int64_t n = static_cast<int64_t>(threadIdx.x) * 16; n < end; n += kListThreads * 16) {
    const uint4 x = *reinterpret_cast<const uint4*>(flags + n);
    count += __popc(x.x) + __popc(x.y) + __popc(x.z) + __popc(x.w);
  }
  return count;
}

__global__ void __launch_bounds__(kListThreads) ListRowsOfFlags(ListRowsArguments a) {
  __shared__ int of_warp[kListWarps];
  __shared__ int before_of_warp[kListWarps];
  const int64_t block_begin = static_cast<int64_t>(blockIdx.x) * kBlockFlags;
  const int64_t begin = block_begin + static_cast<int>(threadIdx.x) * kThreadFlags;
  int own = 0;
  for (int n = 0; n < kThreadFlags; ++n) {
    own += begin + n < a.row_count ? a.is_listed[begin + n] : 0;
  }
  const int up_to = RunningSum(own);  // of the warp's threads up to this one
  const int before = SumOfWarp(CountBefore(a.is_listed, block_begin));
  if (Lane() == kWarp - 1) {
    of_warp[Warp()] = up_to;
    before_of_warp[Warp()] = before;
  }
  __syncthreads();
  int place = up_to - own;
  for (int w = 0; w < kListWarps; ++w) place += before_of_warp[w] + (w < Warp() ? of_warp[w] : 0);
  for (int64_t row = begin; row < begin + kThreadFlags && row < a.row_count; ++row) {
    if (row % a.tokens == 0) a.begins[row / a.tokens] = place;
    if (a.is_listed[row] != 0) a.rows[place++] = static_cast<int32_t>(row);
    if (row + 1 == a.row_count) a.begins[a.row_count / a.tokens] = place;
  }
}

const char* LaunchListRows(const ListRowsArguments& a, void* stream) {
  if (a.row_count > INT32_MAX) return "a list of more than 2^31 - 1 rows";
  const int64_t blocks = CeilDiv(a.row_count, kBlockFlags);
  return Launch("ListRowsOfFlags", &ListRowsOfFlags, {blocks, kListThreads}, stream, a);
}

}  // namespace

TFB_KERNEL_TABLE(ListRowsKernels, {&LaunchListRows});

}  // namespace tfb
