#include "attention/routing/routing_cuda.h"
#include "core/cuda/warp.cuh"

namespace tfb::routing {
namespace {

// A thread does one token and cluster.

constexpr int kThreads = 256;

KernelShape ShapeFor(int64_t items) { return {BlocksInTurns(CeilDiv(items, kThreads)), kThreads}; }

__device__ int64_t MarkOf(const RoutingMarkArguments& a, int64_t b, int64_t h, int64_t token,
                          int64_t cluster) {
  return b * a.strides[0] + h * a.strides[1] + token * a.strides[2] +
         (a.first + cluster) * a.strides[3];
}

__global__ void __launch_bounds__(kThreads) FromMarks(const RoutingMarkArguments a) {
  const int64_t items = a.batch * a.heads * a.clusters * a.tokens;
  for (int64_t n = ThreadOfGrid(); n < items; n += static_cast<int64_t>(gridDim.x) * kThreads) {
    const int64_t token = n % a.tokens, row = n / a.tokens, cluster = row % a.clusters;
    const int64_t head = row / a.clusters;
    const int64_t mark = MarkOf(a, head / a.heads, a.first_head + head % a.heads, token, cluster);
    a.scores[row * a.stride + token] = a.marks[mark] != 0 ? 1 : 0;
  }
}

const char* LaunchFromMarks(const RoutingMarkArguments& a, void* stream) {
  return Launch("FromMarks", &FromMarks, ShapeFor(a.batch * a.heads * a.clusters * a.tokens),
                stream, a);
}

__global__ void __launch_bounds__(kThreads) ToMarks(const RoutingMarkArguments a) {
  const int64_t heads = a.first_head + a.heads;
  const int64_t items = a.batch * heads * a.clusters * a.tokens;
  for (int64_t n = ThreadOfGrid(); n < items; n += static_cast<int64_t>(gridDim.x) * kThreads) {
    const int64_t cluster = n % a.clusters, token = n / a.clusters % a.tokens;
    const int64_t b = n / a.clusters / a.tokens / heads, h = n / a.clusters / a.tokens % heads;
    bool found = false;
    if (h >= a.first_head) {
      const int64_t row = (b * a.heads + h - a.first_head) * a.clusters + cluster;
      const int32_t* members = a.members + row * a.size;
      int64_t begin = 0, end = a.size;
      while (begin < end) {
        const int64_t middle = (begin + end) / 2;
        if (members[middle] < token) {
          begin = middle + 1;
        } else {
          end = middle;
        }
      }
      found = begin < a.size && members[begin] == token;
    }
    a.marks[MarkOf(a, b, h, token, cluster)] = found ? 1 : 0;
  }
}

const char* LaunchToMarks(const RoutingMarkArguments& a, void* stream) {
  return Launch("ToMarks", &ToMarks,
                ShapeFor(a.batch * (a.first_head + a.heads) * a.clusters * a.tokens), stream, a);
}

}  // namespace

TFB_KERNEL_TABLE(RoutingKernels, {&LaunchFromMarks, &LaunchToMarks});

}  // namespace tfb::routing
