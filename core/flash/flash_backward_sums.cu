// Sums of the backward pass on CUDA.
//
// A warp adds the rows of places to 8 tokens of a head. It looks at the order of all places, 128 at a
// time, and adds the rows of those that are its own, a lane a channel of each 32, in the order of
// places: no other warp writes there. An order of n places is read n / 8 times, by which all of 65,536
// are 2 GiB a head in L1 and L2; a thread for each channel that walked through all places would wait
// for memory n times.
//
//   shared memory  none
#include "core/cuda/sum_in_runs.cuh"
#include "core/cuda/warp.cuh"
#include "core/flash/flash_backward_sums.h"

namespace tfb {
namespace {

constexpr int kTokensOfWarp = 8;
constexpr int kOrderLoads = 4;  // of a lane at a time

__device__ void AddRow(const AddByTokenArguments& a, int64_t row, int64_t to) {
  const float* const from = a.rows + row * a.channels;
  float* const sum = static_cast<float*>(a.to.data) + to;
  for (int64_t c = Lane(); c < a.channels; c += kWarp) sum[c * a.to.strides[3]] += from[c];
}

__global__ void __launch_bounds__(kRowThreads) AddByToken(AddByTokenArguments a) {
  const int64_t groups = CeilDiv(a.tokens, kTokensOfWarp);
  const int64_t head = WarpOfGrid() / groups, first_token = WarpOfGrid() % groups * kTokensOfWarp;
  if (head >= a.batch * a.heads) return;
  const int64_t b = head / a.heads, h = head % a.heads;
#pragma unroll 1
  for (int64_t first = 0; first < a.places; first += kOrderLoads * kWarp) {
    int64_t token[kOrderLoads];  // of the warp's
#pragma unroll
    for (int n = 0; n < kOrderLoads; ++n) {
      const int64_t place = first + n * kWarp + Lane();
      token[n] = place < a.places ? a.order(b, h, place) - first_token : -1;
    }
#pragma unroll
    for (int n = 0; n < kOrderLoads; ++n) {
      const bool is_own = token[n] >= 0 && token[n] < kTokensOfWarp;
      unsigned left = __ballot_sync(kAllLanes, is_own);
      for (; left != 0; left &= left - 1) {
        const int lane = __ffs(static_cast<int>(left)) - 1;
        const int64_t own = __shfl_sync(kAllLanes, token[n], lane);
        AddRow(a, head * a.places + first + n * kWarp + lane,
               Offset(a.to, b, h, first_token + own));
      }
    }
  }
}

const char* LaunchAddByToken(const AddByTokenArguments& a, void* stream) {
  const int64_t warps = a.batch * a.heads * CeilDiv(a.tokens, kTokensOfWarp);
  return LaunchWarps("AddByToken", &AddByToken, warps, stream, a);
}

}  // namespace

TFB_KERNEL_TABLE(FlashSumKernels, {&LaunchAddByToken});
TFB_FOR_EACH(AddSumOfTiles);
TFB_FOR_EACH(AddLabelSums);
TFB_FOR_EACH(AddTableSums);
TFB_FOR_EACH(AddRelativeKeySums);
TFB_SUM_IN_RUNS(AddPositionBiasSums);

}  // namespace tfb
