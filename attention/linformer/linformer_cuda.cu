#include "attention/linformer/linformer_cuda.h"
#include "core/cuda/kernel.cuh"

namespace tfb {
namespace {

constexpr int kThreads = 256;

__host__ __device__ constexpr int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

__device__ bool IsToken(const CompressionArguments& a, int64_t b, int64_t token) {
  return token < a.tokens &&
         (a.key_mask == nullptr ||
          a.key_mask[b * a.key_mask_strides[0] + token * a.key_mask_strides[1]] != 0);
}
__device__ float Load(const CompressionArguments& a, int64_t b, int64_t h, int64_t token,
                      int64_t channel) {
  return LoadElement(
      a.x.data, a.x.element,
      b * a.x.strides[0] + h * a.x.strides[1] + token * a.x.strides[2] + channel * a.x.strides[3]);
}
// The sums of a slot over the tokens of chunk 0.
__device__ float* SlotRow(const CompressionArguments& a, int64_t b, int64_t h, int64_t slot) {
  return a.sums + ((b * a.heads + h) * a.slot_count + slot) * a.row;
}
__device__ int64_t ChunkFloats(const CompressionArguments& a) {
  return a.batch * a.heads * a.slot_count * a.row;
}
__device__ const float* TableOf(const CompressionArguments& a, int64_t b, int64_t h) {
  return a.tables + b * a.batch_stride + h * a.head_stride;
}

// ---- The product with E ----
//
// A block makes 64 slots x 64 channels of one chunk of tokens, each of its threads 4 x 4 of them in
// registers, 16 tokens at a time from shared memory: 8 floats read for 16 multiply-adds.

constexpr int kTile = 64;
constexpr int kDepth = 16;
constexpr int kOfThread = 4;
constexpr int kLoads = kTile * kDepth / kThreads;

__global__ void __launch_bounds__(kThreads) Multiply(CompressionArguments a) {
  __shared__ float e[kDepth][kTile];
  __shared__ float x[kDepth][kTile];
  const int64_t channel_tiles = CeilDiv(a.channels, kTile),
                slot_tiles = CeilDiv(a.slot_count, kTile);
  int64_t block = blockIdx.x;
  const int64_t first_channel = block % channel_tiles * kTile;
  block /= channel_tiles;
  const int64_t first_slot = block % slot_tiles * kTile;
  block /= slot_tiles;
  const int64_t head = block % (a.batch * a.heads), chunk = block / (a.batch * a.heads);
  const int64_t b = head / a.heads, h = head % a.heads;
  const float* table = TableOf(a, b, h);
  const int64_t begin = chunk * a.chunk_tokens;
  const int64_t end = min(begin + a.chunk_tokens, a.tokens);
  const int thread_slot = static_cast<int>(threadIdx.x) / (kTile / kOfThread) * kOfThread;
  const int thread_channel = static_cast<int>(threadIdx.x) % (kTile / kOfThread) * kOfThread;

  float sums[kOfThread][kOfThread] = {};
  for (int64_t first = begin; first < end; first += kDepth) {
#pragma unroll
    for (int n = 0; n < kLoads; ++n) {
      const int depth = static_cast<int>(threadIdx.x) / kTile + n * (kThreads / kTile);
      const int column = static_cast<int>(threadIdx.x) % kTile;
      const int64_t token = first + depth, slot = first_slot + column;
      const int64_t channel = first_channel + column;
      const bool is_token = token < end && IsToken(a, b, token);
      e[depth][column] =
          is_token && slot < a.slot_count ? table[token * a.slot_count + slot] : 0.0f;
      x[depth][column] = is_token && channel < a.channels ? Load(a, b, h, token, channel) : 0.0f;
    }
    __syncthreads();
#pragma unroll
    for (int depth = 0; depth < kDepth; ++depth) {
#pragma unroll
      for (int s = 0; s < kOfThread; ++s) {
#pragma unroll
        for (int c = 0; c < kOfThread; ++c) {
          sums[s][c] += e[depth][thread_slot + s] * x[depth][thread_channel + c];
        }
      }
    }
    __syncthreads();
  }
  for (int s = 0; s < kOfThread; ++s) {
    const int64_t slot = first_slot + thread_slot + s;
    if (slot >= a.slot_count) break;
    float* to = SlotRow(a, b, h, slot) + chunk * ChunkFloats(a) + first_channel;
    for (int c = thread_channel; c < thread_channel + kOfThread; ++c) {
      if (first_channel + c < a.channels) to[c] = sums[s][c - thread_channel];
    }
  }
}

const char* LaunchMultiply(const CompressionArguments& a, void* stream) {
  const int64_t blocks =
      CeilDiv(a.channels, kTile) * CeilDiv(a.slot_count, kTile) * a.batch * a.heads * a.chunks;
  if (blocks > INT32_MAX) return "more than 2^31 - 1 tiles of slots";
  return Launch("Multiply", &Multiply, {dim3(static_cast<unsigned>(blocks)), dim3(kThreads)},
                stream, a);
}

// ---- A thread for each element of the slots ----

struct Place {
  int64_t b;
  int64_t h;
  int64_t slot;
  int64_t channel;
  bool exists;
};
__device__ Place PlaceOfThread(const CompressionArguments& a) {
  int64_t n = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  Place place;
  place.channel = n % a.channels;
  n /= a.channels;
  place.slot = n % a.slot_count;
  n /= a.slot_count;
  place.h = n % a.heads;
  place.b = n / a.heads;
  place.exists = place.b < a.batch;
  return place;
}

__global__ void __launch_bounds__(kThreads) AddChunks(CompressionArguments a) {
  const Place p = PlaceOfThread(a);
  if (!p.exists) return;
  float* to = SlotRow(a, p.b, p.h, p.slot) + p.channel;
  float sum = to[0];
  for (int64_t chunk = 1; chunk < a.chunks; ++chunk) sum += to[chunk * ChunkFloats(a)];
  to[0] = sum;
}

__global__ void __launch_bounds__(kThreads) Pool(CompressionArguments a) {
  const Place p = PlaceOfThread(a);
  if (!p.exists) return;
  const int64_t begin = p.slot * a.window, end = min(begin + a.window, a.tokens);
  float result = a.is_max ? -INFINITY : 0.0f;
  for (int64_t token = begin; token < end; ++token) {
    const float x = IsToken(a, p.b, token) ? Load(a, p.b, p.h, token, p.channel) : 0.0f;
    if (a.is_max) {
      result = x <= result || result != result ? result : x;  // a NaN stays
    } else {
      result += x;
    }
  }
  if (!a.is_max) result /= static_cast<float>(end - begin);
  SlotRow(a, p.b, p.h, p.slot)[p.channel] = result;
}

__global__ void __launch_bounds__(kThreads) Convolve(CompressionArguments a) {
  const Place p = PlaceOfThread(a);
  if (!p.exists) return;
  const float* table = TableOf(a, p.b, p.h) + p.channel;
  float sum = 0;
  for (int64_t t = 0; t < a.window; ++t) {
    const int64_t token = p.slot * a.window + t;
    if (!IsToken(a, p.b, token)) continue;
    for (int64_t c = 0; c < a.channels; ++c) {
      sum += Load(a, p.b, p.h, token, c) * table[(t * a.channels + c) * a.row];
    }
  }
  SlotRow(a, p.b, p.h, p.slot)[p.channel] = sum;
}

const char* LaunchElements(const char* name, void (*kernel)(CompressionArguments),
                           const CompressionArguments& a, void* stream) {
  const int64_t blocks = CeilDiv(a.batch * a.heads * a.slot_count * a.channels, kThreads);
  if (blocks > INT32_MAX) return "more slots than a grid has threads";
  return Launch(name, kernel, {dim3(static_cast<unsigned>(blocks)), dim3(kThreads)}, stream, a);
}
const char* LaunchAddChunks(const CompressionArguments& a, void* stream) {
  return LaunchElements("AddChunks", &AddChunks, a, stream);
}
const char* LaunchPool(const CompressionArguments& a, void* stream) {
  return LaunchElements("Pool", &Pool, a, stream);
}
const char* LaunchConvolve(const CompressionArguments& a, void* stream) {
  return LaunchElements("Convolve", &Convolve, a, stream);
}

}  // namespace

TFB_KERNEL_TABLE(LinformerKernels,
                 {&LaunchMultiply, &LaunchAddChunks, &LaunchPool, &LaunchConvolve});

}  // namespace tfb
