#include "core/cuda/kernel.cuh"
#include "memory/reversible/reversible_cuda.h"

namespace tfb::reversible {
namespace {

constexpr int kThreads = 256;
constexpr int kOfThread = 4;  // elements of a thread, which lie a block's threads apart

__device__ int64_t Offset(const DeviceView& view, int64_t b, int64_t t, int64_t c) {
  return b * view.strides[0] + t * view.strides[1] + c * view.strides[2];
}

__global__ void __launch_bounds__(kThreads) Combine(CombineArguments a) {
  const int64_t count = a.batch * a.tokens * a.channels;
  int64_t n = static_cast<int64_t>(blockIdx.x) * kThreads * kOfThread + threadIdx.x;
  for (int i = 0; i < kOfThread && n < count; ++i, n += kThreads) {
    const int64_t c = n % a.channels, t = n / a.channels % a.tokens;
    const int64_t b = n / a.channels / a.tokens;
    const float x = a.a * LoadElement(a.x.data, a.x.element, Offset(a.x, b, t, c));
    const float z = a.b * LoadElement(a.z.data, a.z.element, Offset(a.z, b, t, c));
    StoreElement(a.y.data, a.y.element, Offset(a.y, b, t, c), x + z);
  }
}

const char* LaunchCombine(const CombineArguments& a, void* stream) {
  const int64_t of_block = kThreads * kOfThread;
  const int64_t blocks = (a.batch * a.tokens * a.channels + of_block - 1) / of_block;
  if (blocks > INT32_MAX) return "more elements than a grid has threads for";
  return Launch("Combine", &Combine, {dim3(static_cast<unsigned>(blocks)), dim3(kThreads)}, stream,
                a);
}

}  // namespace

TFB_KERNEL_TABLE(ReversibleKernels, {&LaunchCombine});

}  // namespace tfb::reversible
