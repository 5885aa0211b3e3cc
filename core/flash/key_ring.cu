#include "core/cuda/warp.cuh"
#include "core/flash/key_ring.h"

namespace tfb {
namespace {

constexpr int kWarps = 4;  // warps of a block; each copies one row of keys and one of values

__device__ void CopyRow(const RingRows& rows, int64_t b, int64_t h, int64_t token, int64_t place) {
  const DeviceView &from = rows.from, &to = rows.to;
  for (int64_t c = Lane(); c < rows.channels; c += kWarp) {
    Store(to, Offset(to, b, h, place, c), Load(from, Offset(from, b, h, token, c)));
  }
}

__global__ void __launch_bounds__(kWarp* kWarps) AppendToRing(KeyRingArguments a) {
  const int64_t row = WarpOfGrid();
  if (row >= a.batch * a.heads * a.tokens) return;
  const int64_t token = row % a.tokens, head = row / a.tokens;
  const int64_t b = head / a.heads, h = head % a.heads;
  const int64_t place = (a.first_place + token) % a.places;
  CopyRow(a.keys, b, h, token, place);
  CopyRow(a.values, b, h, token, place);
}

const char* LaunchAppend(const KeyRingArguments& a, void* stream) {
  const int64_t blocks = CeilDiv(a.batch * a.heads * a.tokens, kWarps);
  return Launch("AppendToRing", &AppendToRing, {blocks, kWarp * kWarps}, stream, a);
}

}  // namespace

TFB_KERNEL_TABLE(KeyRingKernels, {&LaunchAppend});

}  // namespace tfb
