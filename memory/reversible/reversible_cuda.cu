#include "core/cuda/kernel.cuh"
#include "memory/reversible/reversible_cuda.h"

namespace tfb::reversible {
namespace {

constexpr int kThreads = 256;
constexpr int kOfThread = 4;  // elements of a thread, which lie a block's threads apart

__global__ void __launch_bounds__(kThreads) Combine(CombineArguments a) {
  const int64_t count = a.batch * a.tokens * a.channels;
  int64_t n = static_cast<int64_t>(blockIdx.x) * kThreads * kOfThread + threadIdx.x;
  for (int i = 0; i < kOfThread && n < count; ++i, n += kThreads) {
    const int64_t c = n % a.channels, t = n / a.channels % a.tokens;
    const int64_t b = n / a.channels / a.tokens;
    const float x = a.a * Load(a.x, Offset(a.x, b, t, c));
    const float z = a.b * Load(a.z, Offset(a.z, b, t, c));
    Store(a.y, Offset(a.y, b, t, c), x + z);
  }
}

const char* LaunchCombine(const CombineArguments& a, void* stream) {
  const int64_t blocks = CeilDiv(a.batch * a.tokens * a.channels, kThreads * kOfThread);
  return Launch("Combine", &Combine, {blocks, kThreads}, stream, a);
}

}  // namespace

TFB_KERNEL_TABLE(ReversibleKernels, {&LaunchCombine});

}  // namespace tfb::reversible
