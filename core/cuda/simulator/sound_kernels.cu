#include <stdlib.h>
#include <string.h>

#include "core/cuda/kernel.cuh"
#include "core/cuda/simulator/sound_kernels.h"

namespace tfb {
namespace {

// ---- Warps ----

// Neighbours exchange values through shared memory; whole warps sync.
__global__ void ExchangeInWarp(const float* input, float* output) {
  __shared__ float row[64];
  const unsigned t = threadIdx.x;
  row[t] = input[t];
  __syncwarp();
  const float other = row[t ^ 1];
  __syncwarp();
  row[t] = other;  // the value that another lane has read
  __syncwarp();
  output[t] = row[t ^ 2];
}

// Does the same, where eight lanes sync at a time, and then all.
__global__ void ExchangeInPartsOfWarp(const float* input, float* output) {
  __shared__ float row[64];
  const unsigned t = threadIdx.x;
  const unsigned mask = 0xffu << t % 32 / 8 * 8;
  row[t] = input[t];
  __syncwarp(mask);
  const float other = row[t ^ 1];
  __syncwarp(mask);
  row[t] = other;
  __syncwarp(mask);
  const float sum = row[t ^ 1] + row[t ^ 2] + row[t ^ 4];
  __syncwarp();
  row[t] = sum;
  __syncwarp();
  output[t] = row[t ^ 16];
}

// A lane passes on the value that it received: 0 to 1 to 2, each step a sync of two lanes.
__global__ void HandOn(const float* input, float* output) {
  __shared__ float place;
  const unsigned t = threadIdx.x;
  if (t == 0) {
    place = input[0];
    __syncwarp(0b011);
  } else if (t == 1) {
    __syncwarp(0b011);
    __syncwarp(0b110);
  } else if (t == 2) {
    __syncwarp(0b110);
    place += 1;  // after lane 0's write, through lane 1
    output[0] = place;
  }
}

__global__ void Shuffles(const float* input, float* output) {
  const unsigned t = threadIdx.x;
  const float own = input[t];
  float sum = __shfl_xor_sync(~0u, own, 5);
  sum += 2 * __shfl_up_sync(~0u, own, 3);
  sum += 3 * __shfl_down_sync(~0u, own, 7);
  sum += 4 * __shfl_sync(~0u, own, 9);
  sum += 5 * __shfl_xor_sync(~0u, own, 1, 8);
  sum += 6 * __shfl_up_sync(~0u, own, 2, 8);
  sum += 7 * __shfl_down_sync(~0u, own, 2, 16);
  sum += 8 * __shfl_sync(~0u, own, 11, 4);
  if (t % 32 < 12) sum += 9 * __shfl_down_sync(0xfffu, own, 1, 4);
  const double wide = __shfl_xor_sync(~0u, static_cast<double>(own), 31);
  output[t] = sum + 10 * static_cast<float>(wide);
}

__global__ void Votes(const float* input, float* output) {
  const unsigned t = threadIdx.x;
  const bool odd = static_cast<int>(input[t]) % 2 == 1;
  unsigned result = __ballot_sync(~0u, odd) == 0x55555555u ? 1 : 0;
  result += __any_sync(~0u, t % 32 == 3) ? 2 : 0;
  result += __all_sync(~0u, t % 32 == 3) ? 4 : 0;
  if (t % 32 >= 16) result += __all_sync(0xffff0000u, t % 32 >= 16) ? 8 : 0;
  output[t] = static_cast<float>(result);
}

// No lane waits for lanes that have finished, as from Volta on.
__global__ void LanesReturnEarly(const float* input, float* output) {
  const unsigned t = threadIdx.x;
  if (t % 32 >= 24) return;
  __syncwarp();
  output[t] = __shfl_xor_sync(~0u, input[t], 1);
}

// Two groups wait for a lane that then returns.
__global__ void OneReturnsTwoWait(const float* input, float* output) {
  __shared__ float row[32];
  const unsigned t = threadIdx.x;
  if (t == 31) return;
  const unsigned mask = t < 16 ? 0x8000ffffu : 0xffff0000u;
  row[t] = input[t];
  __syncwarp(mask);
  output[t] = row[t < 16 ? 15 - t : 46 - t];
}

// The block has a warp and a half.
__global__ void HalfWarpAtTheEnd(const float* input, float* output) {
  __shared__ float row[48];
  const unsigned t = threadIdx.x;
  row[t] = __shfl_xor_sync(~0u, input[t], 8);
  __syncwarp();
  const float other = row[t ^ 15];
  __syncthreads();
  output[t] = other + row[47 - t];
}

__global__ void WarpsReturnEarly(const float* input, float* output) {
  if (threadIdx.x >= 32) return;
  output[threadIdx.x] = input[threadIdx.x + 32];
}

// ---- Shared memory ----

__global__ void StaticAndDynamicShared(const float* input, float* output) {
  __shared__ float first[64];
  float* second = reinterpret_cast<float*>(DynamicShared());
  const unsigned t = threadIdx.x;
  first[t] = input[t];
  second[t] = -input[t];
  __syncthreads();
  output[t] = first[63 - t] + 2 * second[t];
}

// All threads read a place before the barrier, and one writes it after; several times.
__global__ void ReadByAllThenWrite(const float* input, float* output) {
  __shared__ float place;
  const unsigned t = threadIdx.x;
  float sum = 0;
  for (unsigned round = 0; round < 4; ++round) {
    if (t == round) place = input[round];
    __syncthreads();
    sum += place;
    __syncthreads();
  }
  output[t] = sum;
}

// The compiler may copy a barrier between two branches on one condition, so that threads wait at
// different addresses.
__global__ void BarrierBetweenBranches(const float* input, float* output) {
  __shared__ float shared[64];
  const unsigned t = threadIdx.x;
  const bool first = t < 10;
  float sum = 0;
  if (first) sum = input[t];
  shared[t] = input[t] + sum;
  __syncthreads();
  if (first) sum += shared[63 - t];
  output[t] = sum;
}

// Different threads write, read and write again neighbours of 1 and 2 bytes.
__global__ void NeighbouringBytes(const float* input, float* output) {
  __shared__ unsigned char bytes[64];
  __shared__ __align__(8) unsigned short words[64];
  const unsigned t = threadIdx.x;
  bytes[t] = static_cast<unsigned char>(input[t]);
  words[t] = static_cast<unsigned short>(2 * bytes[t]);
  words[t] = static_cast<unsigned short>(words[t] + bytes[t]);
  __syncthreads();
  const unsigned other = bytes[t ^ 1] + words[t ^ 2];
  const uint2 eight = *reinterpret_cast<const uint2*>(&words[t / 4 * 4]);
  __syncthreads();
  bytes[t] = 0;
  output[t] = static_cast<float>(other + (eight.x & 0xffff) + bytes[t]);
}

__global__ void Atomics(const float* input, float* output) {
  __shared__ int counter, least, most;
  __shared__ float sum;
  const unsigned t = threadIdx.x;
  if (t == 0) {
    counter = 0;
    least = 1 << 30;
    most = -1;
    sum = 0;
  }
  __syncthreads();
  atomicAdd(&counter, 1);
  atomicMin(&least, static_cast<int>(input[t]));
  atomicMax(&most, static_cast<int>(input[t]));
  atomicAdd(&sum, input[t]);
  __syncthreads();
  output[t] = static_cast<float>(counter + least + most) + sum;
  __syncthreads();
  if (t < 32) {  // a sync among the lanes of a warp
    if (t == 0) counter = 0;
    __syncwarp();
    atomicAdd(&counter, 2);
    __syncwarp();
    output[t] += static_cast<float>(counter);
  }
}

// The last block to finish sums the results of all: threadFenceReduction of the CUDA samples.
__global__ void LastBlockSums(const float* input, float* output) {
  __shared__ bool is_last;
  const unsigned t = threadIdx.x;
  if (t == 0) {
    output[1 + blockIdx.x] = input[blockIdx.x];
    __threadfence();
    unsigned* finished = reinterpret_cast<unsigned*>(output);
    is_last = atomicAdd(finished, 1u) == gridDim.x - 1;
  }
  __syncthreads();
  if (!is_last || t != 0) return;
  float sum = 0;
  for (unsigned block = 0; block < gridDim.x; ++block) sum += output[1 + block];
  output[0] = sum;
}

// The same with more threads: all of a block write, one passes their results on, and another sums.
// The last block of each half sums the half, and the last of these two sums the halves: the order
// goes through two counters.
__global__ void LastBlockSumsInTwoSteps(const float* input, float* output) {
  __shared__ bool is_last;
  const unsigned t = threadIdx.x, half = blockIdx.x / 4;
  unsigned* finished = reinterpret_cast<unsigned*>(output);
  float* sums = output + 8;
  if (t < 4) sums[blockIdx.x * 4 + t] = input[blockIdx.x * 4 + t];
  __syncthreads();
  const auto is_last_of = [&](unsigned counter, unsigned count) {
    if (t == 31) {
      __threadfence();
      is_last = atomicAdd(finished + counter, 1u) == count - 1;
    }
    __syncthreads();
    return is_last;
  };
  if (!is_last_of(half, 4)) return;
  if (t == 0) {
    output[4 + half] = 0;
    for (unsigned i = 0; i < 16; ++i) output[4 + half] += sums[half * 16 + i];
  }
  __syncthreads();
  if (!is_last_of(2, 2) || t != 7) return;
  output[3] = output[4] + output[5];
  output[6] = sums[0] + sums[31];  // through both counters
}

// ---- Device memory ----

// Threads exchange values through device memory, in the block and in a warp; blocks use
// neighbouring bytes.
__global__ void ExchangeInDeviceMemory(const float* input, float* output) {
  const unsigned t = threadIdx.x, n = blockIdx.x * blockDim.x + t;
  output[n] = input[n];
  __syncthreads();
  const float other = output[n ^ 15];
  __syncthreads();
  output[n] = other;
  __syncwarp();
  const float next = output[n ^ 1];
  __syncwarp();
  output[n] = next;
}

__global__ void WriteNeighbouringBytes(const float* input, float* output) {
  const unsigned t = threadIdx.x, block = blockIdx.x;
  for (unsigned i = 2 * t; i < 2 * t + 2; ++i) {
    reinterpret_cast<unsigned char*>(output)[block * 4 + i] =
        static_cast<unsigned char>(__float_as_uint(input[block]) >> 8 * i);
  }
  reinterpret_cast<unsigned short*>(output)[64 + block * 2 + t] =
      static_cast<unsigned short>(__float_as_uint(input[32 + block]) >> 16 * t);
}

// All blocks add to one number, after each has read it atomically.
__global__ void AddAtomicallyFromAllBlocks(const float* input, float* output) {
  const float before = atomicAdd(output, 0.0f);
  atomicAdd(output, input[threadIdx.x] + before * 0);
}

// ---- Asynchronous copies ----

// Each tile of 16 floats is copied while the previous one is used.
__global__ void DoubleBuffered(const float* input, float* output) {
  __shared__ __align__(16) float stages[2][16];
  const unsigned t = threadIdx.x;
  const auto copy = [&](int tile) {
    if (tile < 4 && t < 4) {
      __pipeline_memcpy_async(&stages[tile % 2][t * 4], input + tile * 16 + t * 4, 16);
    }
    __pipeline_commit();
  };
  float sum = 0;
  copy(0);
  for (int tile = 0; tile < 4; ++tile) {
    copy(tile + 1);
    __pipeline_wait_prior(1);
    __syncthreads();
    sum += stages[tile % 2][t % 16];
    __syncthreads();  // before the next copy to the stage
  }
  output[t] = sum;
}

// The last bytes of a copy may be zeros, and its source may then end earlier.
__global__ void CopyWithZeros(const float* input, float* output) {
  __shared__ float4 to[17];
  const unsigned t = threadIdx.x;
  if (t < 16) __pipeline_memcpy_async(&to[t], input + t * 4, 16, t % 4 * 4);
  if (t == 16) __pipeline_memcpy_async(&to[t], input + 64, 16, 16);
  __pipeline_commit();
  __pipeline_wait_prior(0);
  if (t < 17) output[t] = to[t].x + 2 * to[t].y + 4 * to[t].z + 8 * to[t].w;
}

// ---- Grids, data, the stack ----

__global__ void ThreeDimensions(const float* input, float* output) {
  const unsigned thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  const unsigned block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  const unsigned i = thread + 8 * block;
  output[i] = 2 * input[i];
}

__constant__ float constants[4] = {3, 1, 4, 1};

struct Row {
  float of[24];
};

// The compiler may copy or fill the structs' memory at once, and read it without a type.
__global__ void Structs(const float* input, float* output) {
  Row* rows = reinterpret_cast<Row*>(output);
  rows[0] = *reinterpret_cast<const Row*>(input);
  rows[1] = {};
  float unaligned;
  memcpy(&unaligned, reinterpret_cast<const char*>(input) + 1, sizeof(unaligned));
  output[24] = unaligned;
  for (int i = 48; i < 64; ++i) output[i] = constants[i % 4];
}

template <int kCount>
__global__ void ArraysOnTheStack(const float* input, float* output) {
  __shared__ float shared[kCount];
  float numbers[kCount];
  for (int i = 0; i < kCount; ++i)
    numbers[(i * 7 + static_cast<int>(input[0])) % kCount] = input[i];
  for (int i = 0; i < kCount; ++i) shared[i] = numbers[i];
  for (int i = 0; i < kCount; ++i) output[i] = shared[i];
}

// ---- Matrices ----

template <class T>
__device__ T Round(float x);
template <>
__device__ __nv_bfloat16 Round(float x) {
  return __float2bfloat16_rn(x);
}
template <>
__device__ __half Round(float x) {
  return __float2half_rn(x);
}
__device__ void MultiplyAdd(float d[4], const unsigned a[4], const unsigned b[2], __nv_bfloat16) {
  MmaM16N8K16Bf16(d, a, b);
}
__device__ void MultiplyAdd(float d[4], const unsigned a[4], const unsigned b[2], __half) {
  MmaM16N8K16F16(d, a, b);
}

template <class T>
__global__ void MultiplyMatrices(const float* a, const float* b, float* c, bool transposed) {
  __shared__ __align__(16) T tile_a[16][16];
  __shared__ __align__(16) T tile_b[16][8];
  const unsigned lane = threadIdx.x, g = lane / 4, t = lane % 4;
  for (unsigned i = lane; i < 256; i += 32) tile_a[i / 16][i % 16] = Round<T>(a[i]);
  for (unsigned i = lane; i < 128; i += 32) tile_b[i / 8][i % 8] = Round<T>(b[i]);
  __syncwarp();
  // Registers 0 to 3 of a are its quarters (0, 0), (8, 0), (0, 8), (8, 8).
  const unsigned row = lane % 8 + lane / 8 % 2 * 8, column = lane / 16 * 8;
  const unsigned row_t = lane % 8 + lane / 16 * 8, column_t = lane / 8 % 2 * 8;
  unsigned registers_a[4], registers_b[4];
  if (transposed) {
    LdMatrixX4Transposed(registers_a, &tile_a[row_t][column_t]);
  } else {
    LdMatrixX4(registers_a, &tile_a[row][column]);
  }
  // b's registers hold columns; rows are in memory.
  LdMatrixX4Transposed(registers_b, &tile_b[lane % 16][0]);
  float d[4] = {};
  MultiplyAdd(d, registers_a, registers_b, T());
  c[g * 8 + 2 * t] = d[0];
  c[g * 8 + 2 * t + 1] = d[1];
  c[(g + 8) * 8 + 2 * t] = d[2];
  c[(g + 8) * 8 + 2 * t + 1] = d[3];
}
const char* LaunchMultiply(const float* a, const float* b, float* c, bool is_bf16,
                           bool transposed) {
  return Launch("MultiplyMatrices",
                is_bf16 ? &MultiplyMatrices<__nv_bfloat16> : &MultiplyMatrices<__half>,
                KernelShape{dim3(1), dim3(32)}, nullptr, a, b, c, transposed);
}

// ---- Kernels that the benchmark times ----

// Tiles of 32 x 32; a thread computes 2 x 2 elements.
__global__ void MultiplyInTiles(const float* a, const float* b, float* c, int n) {
  __shared__ float tile_a[32][33], tile_b[32][33];
  const int x = static_cast<int>(threadIdx.x), y = static_cast<int>(threadIdx.y);
  const int row = static_cast<int>(blockIdx.y) * 32, column = static_cast<int>(blockIdx.x) * 32;
  float sums[2][2] = {};
  for (int k = 0; k < n; k += 32) {
    for (int i = 0; i < 32; i += 16) {
      for (int j = 0; j < 32; j += 16) {
        tile_a[y + i][x + j] = a[(row + y + i) * n + k + x + j];
        tile_b[y + i][x + j] = b[(k + y + i) * n + column + x + j];
      }
    }
    __syncthreads();
    for (int l = 0; l < 32; ++l) {
      for (int i = 0; i < 2; ++i) {
        for (int j = 0; j < 2; ++j) sums[i][j] += tile_a[y + 16 * i][l] * tile_b[l][x + 16 * j];
      }
    }
    __syncthreads();
  }
  for (int i = 0; i < 2; ++i) {
    for (int j = 0; j < 2; ++j) c[(row + y + 16 * i) * n + column + x + 16 * j] = sums[i][j];
  }
}
const char* LaunchMultiplyInTiles(const float* a, const float* b, float* c, int n) {
  const unsigned tiles = static_cast<unsigned>(n) / 32;
  return Launch("MultiplyInTiles", &MultiplyInTiles, KernelShape{dim3(tiles, tiles), dim3(16, 16)},
                nullptr, a, b, c, n);
}

__global__ void SyncOften(float* output, int count) {
  for (int i = 0; i < count; ++i) __syncthreads();
  if (threadIdx.x == 0) output[0] = 1;
}
const char* LaunchSyncOften(float* output, int count) {
  return Launch("SyncOften", &SyncOften, KernelShape{dim3(1), dim3(256)}, nullptr, output, count);
}

__global__ void ShuffleOften(float* output, int count) {
  float sum = static_cast<float>(threadIdx.x);
  for (int i = 0; i < count; ++i) sum = 1 - __shfl_xor_sync(~0u, sum, 1);
  if (threadIdx.x < 64) output[threadIdx.x] = sum;
}
const char* LaunchShuffleOften(float* output, int count) {
  return Launch("ShuffleOften", &ShuffleOften, KernelShape{dim3(1), dim3(256)}, nullptr, output,
                count);
}

// ---- The table ----

using Kernel = void (*)(const float* input, float* output);

template <Kernel kKernel, unsigned kBlocks, unsigned kThreads, size_t kSharedBytes = 0>
const char* LaunchOf(const char* name, const float* input, float* output) {
  return Launch(name, kKernel, KernelShape{dim3(kBlocks), dim3(kThreads), kSharedBytes}, nullptr,
                input, output);
}
const char* LaunchThreeDimensions(const char* name, const float* input, float* output) {
  return Launch(name, &ThreeDimensions, KernelShape{dim3(2, 2, 2), dim3(2, 2, 2)}, nullptr, input,
                output);
}

const struct {
  const char* name;
  const char* (*launch)(const char* name, const float* input, float* output);
} kKernels[] = {
    {"ExchangeInWarp", &LaunchOf<&ExchangeInWarp, 1, 64>},
    {"ExchangeInPartsOfWarp", &LaunchOf<&ExchangeInPartsOfWarp, 1, 64>},
    {"HandOn", &LaunchOf<&HandOn, 1, 32>},
    {"Shuffles", &LaunchOf<&Shuffles, 1, 64>},
    {"Votes", &LaunchOf<&Votes, 1, 64>},
    {"LanesReturnEarly", &LaunchOf<&LanesReturnEarly, 1, 64>},
    {"OneReturnsTwoWait", &LaunchOf<&OneReturnsTwoWait, 1, 32>},
    {"HalfWarpAtTheEnd", &LaunchOf<&HalfWarpAtTheEnd, 1, 48>},
    {"WarpsReturnEarly", &LaunchOf<&WarpsReturnEarly, 1, 64>},
    {"StaticAndDynamicShared", &LaunchOf<&StaticAndDynamicShared, 1, 64, 64 * sizeof(float)>},
    {"ReadByAllThenWrite", &LaunchOf<&ReadByAllThenWrite, 1, 64>},
    {"BarrierBetweenBranches", &LaunchOf<&BarrierBetweenBranches, 1, 64>},
    {"NeighbouringBytes", &LaunchOf<&NeighbouringBytes, 1, 64>},
    {"Atomics", &LaunchOf<&Atomics, 1, 64>},
    {"LastBlockSums", &LaunchOf<&LastBlockSums, 8, 32>},
    {"LastBlockSumsInTwoSteps", &LaunchOf<&LastBlockSumsInTwoSteps, 8, 32>},
    {"ExchangeInDeviceMemory", &LaunchOf<&ExchangeInDeviceMemory, 4, 16>},
    {"WriteNeighbouringBytes", &LaunchOf<&WriteNeighbouringBytes, 32, 2>},
    {"AddAtomicallyFromAllBlocks", &LaunchOf<&AddAtomicallyFromAllBlocks, 4, 8>},
    {"DoubleBuffered", &LaunchOf<&DoubleBuffered, 1, 64>},
    {"CopyWithZeros", &LaunchOf<&CopyWithZeros, 1, 64>},
    {"ThreeDimensions", &LaunchThreeDimensions},
    {"Structs", &LaunchOf<&Structs, 1, 1>},
    {"ArraysOnTheStack", &LaunchOf<&ArraysOnTheStack<64>, 1, 1>},
};

const char* Run(const char* name, const float* input, float* output) {
  for (const auto& kernel : kKernels) {
    if (strcmp(kernel.name, name) == 0) return kernel.launch(name, input, output);
  }
  abort();  // there is no such kernel
}

}  // namespace

TFB_KERNEL_TABLE(SoundKernels, {&Run, &LaunchMultiply, &LaunchMultiplyInTiles, &LaunchSyncOften,
                                &LaunchShuffleOften});

}  // namespace tfb
