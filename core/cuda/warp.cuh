// The lanes of a warp: which one a thread is, and sums and maxima over several. Every lane of the
// warp calls such a function; the result is the same in every run, since the order is fixed.
#ifndef TFB_CORE_CUDA_WARP_CUH_
#define TFB_CORE_CUDA_WARP_CUH_

#include "core/cuda/kernel.cuh"

namespace tfb {
namespace {  // internal linkage, as in kernel.cuh

constexpr int kWarp = 32;  // lanes
constexpr unsigned kAllLanes = ~0u;

// These hold in blocks of one dimension, whose size is a multiple of kWarp.
__device__ inline int Lane() { return static_cast<int>(threadIdx.x) % kWarp; }
__device__ inline int Warp() { return static_cast<int>(threadIdx.x) / kWarp; }  // of the block
__device__ inline int64_t ThreadOfGrid() {
  return static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
}
__device__ inline int64_t WarpOfGrid() { return ThreadOfGrid() / kWarp; }

// Return the sum and the maximum over the kLanes lanes that have the same Lane() / kLanes, a power
// of two. They first combine lanes kLanes / 2 apart, at last neighbours. A maximum ignores NaN.
template <int kLanes, class T>
__device__ inline T SumOfLanes(T x) {
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) x += __shfl_xor_sync(kAllLanes, x, step);
  return x;
}
__device__ inline float Larger(float x, float y) { return fmaxf(x, y); }
__device__ inline double Larger(double x, double y) { return fmax(x, y); }
template <int kLanes, class T>
__device__ inline T MaxOfLanes(T x) {
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) {
    x = Larger(x, __shfl_xor_sync(kAllLanes, x, step));
  }
  return x;
}
template <class T>
__device__ inline T SumOfWarp(T x) {
  return SumOfLanes<kWarp>(x);
}
template <class T>
__device__ inline T MaxOfWarp(T x) {
  return MaxOfLanes<kWarp>(x);
}

// The same over the four lanes that share rows of a fragment of mma: neighbours come first.
__device__ inline float SumOfFour(float x) {
  x += __shfl_xor_sync(kAllLanes, x, 1);
  return x + __shfl_xor_sync(kAllLanes, x, 2);
}
__device__ inline float MaxOfFour(float x) {
  x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, 1));
  return fmaxf(x, __shfl_xor_sync(kAllLanes, x, 2));
}

// Returns the sum over the lanes up to this one.
template <class T>
__device__ inline T RunningSum(T x) {
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) {
    const T other = __shfl_up_sync(kAllLanes, x, step);
    if (Lane() >= step) x += other;
  }
  return x;
}

// Sums each of the values over the kLanes lanes that have the same Lane() / kLanes, with kCount - 1
// shuffles that halve the number of values and log2(kLanes / kCount) more. A lane receives the sum of
// values[Lane() % kLanes / (kLanes / kCount)]; what the array has then is unspecified.
template <int kLanes, int kCount>
__device__ inline float SumsOfLanes(float (&values)[kCount]) {
  static_assert(kLanes >= kCount, "every sum has a lane");
#pragma unroll
  for (int step = 1; step < kCount; step *= 2) {
    const int count = kCount / 2 / step, distance = kLanes / 2 / step;
    const bool upper = (Lane() & distance) != 0;
#pragma unroll
    for (int n = 0; n < kCount / 2; ++n) {
      if (n >= count) break;
      const float kept = upper ? values[n + count] : values[n];
      const float given = upper ? values[n] : values[n + count];
      values[n] = kept + __shfl_xor_sync(kAllLanes, given, distance);
    }
  }
  return SumOfLanes<kLanes / kCount>(values[0]);
}
// Sums each of the values over the warp, with 31 shuffles for all of them. Lane n receives the sum
// of values[n].
__device__ inline float SumsOfWarp(float (&values)[kWarp]) { return SumsOfLanes<kWarp>(values); }

constexpr int kRowThreads = 256;

// Launches `kernel` with a warp for each of `warps` tasks, in blocks of kRowThreads. WarpOfGrid()
// of the last block may be beyond the last task.
template <class... Parameters, class Arguments>
const char* LaunchWarps(const char* name, void (*kernel)(Parameters...), int64_t warps,
                        void* stream, const Arguments& arguments) {
  return Launch(name, kernel, {CeilDiv(warps, kRowThreads / kWarp), kRowThreads}, stream,
                arguments);
}

}  // namespace
}  // namespace tfb

#endif  // TFB_CORE_CUDA_WARP_CUH_
