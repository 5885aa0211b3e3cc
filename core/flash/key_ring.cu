#include "core/cuda/kernel.cuh"
#include "core/flash/key_ring.h"

namespace tfb {
namespace {

constexpr int kWarp = 32;
constexpr int kWarps = 4;  // warps of a block; each copies one row of keys and one of values

__device__ void CopyRow(const RingRows& rows, int64_t b, int64_t h, int64_t token, int64_t place) {
  const DeviceView &from = rows.from, &to = rows.to;
  const int64_t from_row = b * from.strides[0] + h * from.strides[1] + token * from.strides[2];
  const int64_t to_row = b * to.strides[0] + h * to.strides[1] + place * to.strides[2];
  for (int64_t c = threadIdx.x % kWarp; c < rows.channels; c += kWarp) {
    const float x = LoadElement(from.data, from.element, from_row + c * from.strides[3]);
    StoreElement(to.data, to.element, to_row + c * to.strides[3], x);
  }
}

__global__ void __launch_bounds__(kWarp* kWarps) AppendToRing(KeyRingArguments a) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarp;
  if (row >= a.batch * a.heads * a.tokens) return;
  const int64_t token = row % a.tokens, head = row / a.tokens;
  const int64_t b = head / a.heads, h = head % a.heads;
  const int64_t place = (a.first_place + token) % a.places;
  CopyRow(a.keys, b, h, token, place);
  CopyRow(a.values, b, h, token, place);
}

const char* LaunchAppend(const KeyRingArguments& a, void* stream) {
  const int64_t blocks = (a.batch * a.heads * a.tokens + kWarps - 1) / kWarps;
  if (blocks > INT32_MAX) return "more keys to append than a grid has warps for";
  return Launch("AppendToRing", &AppendToRing,
                {dim3(static_cast<unsigned>(blocks)), dim3(kWarp * kWarps)}, stream, a);
}

}  // namespace

TFB_KERNEL_TABLE(KeyRingKernels, {&LaunchAppend});

}  // namespace tfb
