#include "attention/linformer/linformer_cuda.h"
#include "core/cuda/register_tile.cuh"
#include "core/cuda/warp.cuh"

namespace tfb::linformer {
namespace {

constexpr int kThreads = 256;

__device__ bool IsToken(const CompressionArguments& a, int64_t b, int64_t token) {
  return token < a.tokens &&
         (a.key_mask == nullptr ||
          a.key_mask[b * a.key_mask_strides[0] + token * a.key_mask_strides[1]] != 0);
}
__device__ float Load(const CompressionArguments& a, int64_t b, int64_t h, int64_t token,
                      int64_t channel) {
  return tfb::Load(a.x, Offset(a.x, b, h, token, channel));
}
// Returns the sums of a slot over the tokens of chunk 0.
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
// A block makes 64 slots x 64 channels of one chunk of tokens, each of its threads 8 x 4 of them in
// registers. Tiles of 16 tokens are double-buffered: the next are loaded to registers while these
// are multiplied.
//   shared memory: 2 x 16 x (64 + 64) x 4 B = 16 KiB

constexpr int kTile = 64;
constexpr int kDepth = 16;
constexpr int kMultiplyThreads = 128;
constexpr int kThreadSlots = 8;
constexpr int kThreadChannels = 4;
constexpr int kLoads = kTile * kDepth / kMultiplyThreads;  // loads of a thread for each matrix
static_assert(kTile / kThreadSlots * (kTile / kThreadChannels) == kMultiplyThreads, "a tile");

struct alignas(16) Tiles {
  float e[kDepth][kTile];
  float x[kDepth][kTile];
};

// Loads tokens of E and x: a thread loads the slot and the channel of its column, for every second
// token.
class TileLoader {
 public:
  // Loads the tokens up to `end`, for head h of batch row b.
  __device__ TileLoader(const CompressionArguments& a, int64_t b, int64_t h, int64_t first_slot,
                        int64_t first_channel, int64_t end)
      : a_(a),
        table_(TableOf(a, b, h)),
        b_(b),
        h_(h),
        slot_(first_slot + threadIdx.x % kTile),
        channel_(first_channel + threadIdx.x % kTile),
        end_(end) {}

  // Loads zeros where there is no token, slot or channel.
  __device__ void Fetch(int64_t first) {
#pragma unroll
    for (int n = 0; n < kLoads; ++n) {
      const int64_t token = first + Depth(n);
      const bool is_token = token < end_ && IsToken(a_, b_, token);
      e_[n] = is_token && slot_ < a_.slot_count ? table_[token * a_.slot_count + slot_] : 0.0f;
      x_[n] = is_token && channel_ < a_.channels ? Load(a_, b_, h_, token, channel_) : 0.0f;
    }
  }
  __device__ void Put(Tiles* tiles) const {
#pragma unroll
    for (int n = 0; n < kLoads; ++n) {
      tiles->e[Depth(n)][threadIdx.x % kTile] = e_[n];
      tiles->x[Depth(n)][threadIdx.x % kTile] = x_[n];
    }
  }

 private:
  __device__ static int Depth(int n) {
    return static_cast<int>(threadIdx.x) / kTile + n * (kMultiplyThreads / kTile);
  }

  const CompressionArguments& a_;
  const float* table_;
  int64_t b_;
  int64_t h_;
  int64_t slot_;
  int64_t channel_;
  int64_t end_;
  float e_[kLoads];
  float x_[kLoads];
};

__global__ void __launch_bounds__(kMultiplyThreads) Multiply(CompressionArguments a) {
  __shared__ Tiles tiles[2];
  const int64_t channel_tiles = CeilDiv(a.channels, kTile);
  const int64_t slot_tiles = CeilDiv(a.slot_count, kTile);
  int64_t block = blockIdx.x;
  const int64_t first_channel = block % channel_tiles * kTile;
  block /= channel_tiles;
  const int64_t first_slot = block % slot_tiles * kTile;
  block /= slot_tiles;
  const int64_t head = block % (a.batch * a.heads), chunk = block / (a.batch * a.heads);
  const int64_t b = head / a.heads, h = head % a.heads;
  const int64_t begin = chunk * a.chunk_tokens;
  const int64_t end = min(begin + a.chunk_tokens, a.tokens);
  const int thread = static_cast<int>(threadIdx.x);
  const int thread_slot = thread / (kTile / kThreadChannels) * kThreadSlots;
  const int thread_channel = thread % (kTile / kThreadChannels) * kThreadChannels;

  float sums[kThreadSlots][kThreadChannels] = {};
  TileLoader loader(a, b, h, first_slot, first_channel, end);
  loader.Fetch(begin);
  loader.Put(&tiles[0]);
  int current = 0;
  for (int64_t first = begin; first < end; first += kDepth, current ^= 1) {
    __syncthreads();  // these tiles have arrived, and the others have been read
    const bool more = first + kDepth < end;
    if (more) loader.Fetch(first + kDepth);
    AddProduct<8>({&tiles[current].e[0][thread_slot], kTile},
                  {&tiles[current].x[0][thread_channel], kTile}, kDepth, sums);
    if (more) loader.Put(&tiles[current ^ 1]);
  }
  for (int s = 0; s < kThreadSlots; ++s) {
    const int64_t slot = first_slot + thread_slot + s;
    if (slot >= a.slot_count) break;
    float* to = SlotRow(a, b, h, slot) + chunk * ChunkFloats(a);
    for (int c = 0; c < kThreadChannels; ++c) {
      const int64_t channel = first_channel + thread_channel + c;
      if (channel < a.channels) to[channel] = sums[s][c];
    }
  }
}

const char* LaunchMultiply(const CompressionArguments& a, void* stream) {
  const int64_t blocks =
      CeilDiv(a.channels, kTile) * CeilDiv(a.slot_count, kTile) * a.batch * a.heads * a.chunks;
  return Launch("Multiply", &Multiply, {blocks, kMultiplyThreads}, stream, a);
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
  int64_t n = ThreadOfGrid();
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

// Convolves channels `first` to first + count - 1 into the element of a slot.
__device__ void ConvolveChannels(const CompressionArguments& a, const Place& p, int64_t first,
                                 int64_t count) {
  const float* kernel = TableOf(a, p.b, p.h) + p.channel;
  float sum = 0;
  for (int64_t t = 0; t < a.window; ++t) {
    const int64_t token = p.slot * a.window + t;
    if (!IsToken(a, p.b, token)) continue;
    for (int64_t c = 0; c < count; ++c) {
      sum += Load(a, p.b, p.h, token, first + c) * kernel[(t * count + c) * a.row];
    }
  }
  SlotRow(a, p.b, p.h, p.slot)[p.channel] = sum;
}

__global__ void __launch_bounds__(kThreads) Convolve(CompressionArguments a) {
  const Place p = PlaceOfThread(a);
  if (p.exists) ConvolveChannels(a, p, 0, a.channels);
}

__global__ void __launch_bounds__(kThreads) ConvolveDepthwise(CompressionArguments a) {
  const Place p = PlaceOfThread(a);
  if (p.exists) ConvolveChannels(a, p, p.channel, 1);
}

const char* LaunchElements(const char* name, void (*kernel)(CompressionArguments),
                           const CompressionArguments& a, void* stream) {
  const int64_t blocks = CeilDiv(a.batch * a.heads * a.slot_count * a.channels, kThreads);
  return Launch(name, kernel, {blocks, kThreads}, stream, a);
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
const char* LaunchConvolveDepthwise(const CompressionArguments& a, void* stream) {
  return LaunchElements("ConvolveDepthwise", &ConvolveDepthwise, a, stream);
}

}  // namespace

TFB_KERNEL_TABLE(LinformerKernels, {&LaunchMultiply, &LaunchAddChunks, &LaunchPool, &LaunchConvolve,
                                    &LaunchConvolveDepthwise});

}  // namespace tfb::linformer
