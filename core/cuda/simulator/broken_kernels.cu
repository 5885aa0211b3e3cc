#include <stdlib.h>
#include <string.h>

#include "core/cuda/hopper.cuh"
#include "core/cuda/simulator/broken_kernels.h"
#include "core/cuda/tensor_map.cuh"

namespace tfb {
namespace {

__global__ void Reduce(const float* values, float* sum, bool barrier) {
  __shared__ float partial[64];
  const int t = static_cast<int>(threadIdx.x);
  partial[t] = values[t];
  for (int width = 32; width > 0; width /= 2) {
    if (barrier) __syncthreads();
    if (t < width) partial[t] += partial[t + width];
  }
  if (t == 0) *sum = partial[0];
}
const char* LaunchReduce(const float* values, float* sum, bool barrier) {
  return Launch("Reduce", &Reduce, KernelShape{dim3(1), dim3(64)}, nullptr, values, sum, barrier);
}

// ---- Out of bounds ----

__device__ bool IsTheOne() {
  return blockIdx.x == 1 && blockIdx.y == 2 && threadIdx.x == 5 && threadIdx.y == 1;
}

__global__ void ReadAt(float* values, int index) {
  if (IsTheOne()) values[0] = values[index];
}

__global__ void WriteAt(float* values, int index) {
  if (IsTheOne()) values[index] = 1;
}

__global__ void ReadVectorAt(float* values, int index) {
  if (!IsTheOne()) return;
  *reinterpret_cast<float4*>(values) = *reinterpret_cast<const float4*>(values + index);
}

__global__ void ChangeAt(float* values, int index) {
  if (IsTheOne()) atomicAdd(&values[index], 1.0f);
}

struct Row {
  float of[40];
};
__global__ void CopyOverEnd(float* values, int) {
  *reinterpret_cast<Row*>(values + 32) = *reinterpret_cast<const Row*>(values);
}

__global__ void OverrunDynamicShared(float* values, int) {
  float* shared = reinterpret_cast<float*>(DynamicShared());
  shared[threadIdx.x] = values[threadIdx.x];
}

__global__ void LoadMatrixFromDevice(float* values, int) {
  unsigned registers[4];
  LdMatrixX4(registers, values + threadIdx.x % 8 * 4);
  values[threadIdx.x] = static_cast<float>(registers[0]);
}

__global__ void CopyAsynchronouslyToDevice(float* values, int) {
  __pipeline_memcpy_async(values, values + 4, 16);
}

// ---- Misaligned ----

__global__ void ReadMisaligned(float* values, int) {
  const float2 pair = *reinterpret_cast<const float2*>(values + 1);
  values[0] = pair.x + pair.y;
}

__global__ void WriteSharedMisaligned(float* values, int) {
  float* shared = reinterpret_cast<float*>(DynamicShared());
  *reinterpret_cast<float4*>(shared + 2) = make_float4(1, 2, 3, 4);
  values[0] = shared[2];
}

__global__ void CopyMisaligned(float* values, int) {
  __shared__ float4 to;
  __pipeline_memcpy_async(&to, values + 1, sizeof(to));
  __pipeline_commit();
  __pipeline_wait_prior(0);
  values[0] = to.x;
}

// ---- Reads of what nothing wrote ----

__global__ void SumInto(float* values, int) { values[0] += 1; }

__global__ void ReadStaticShared(float* values, int) {
  __shared__ float row[8];
  if (threadIdx.x < 7) row[threadIdx.x] = 1;
  __syncthreads();
  values[threadIdx.x] = row[threadIdx.x];
}

__global__ void ReadDynamicShared(float* values, int) {
  values[0] = reinterpret_cast<const float*>(DynamicShared())[3];
}

__global__ void KeepSharedFromBlockToBlock(float* values, int) {
  __shared__ float first;
  if (blockIdx.x == 0) first = 1;
  values[blockIdx.x] = first;
}

__global__ void ReadBeforeCopyEnds(float* values, int) {
  __shared__ float4 to[2];
  __pipeline_memcpy_async(&to[0], values, sizeof(float4));
  __pipeline_commit();
  __pipeline_memcpy_async(&to[1], values + 4, sizeof(float4));
  __pipeline_commit();
  __pipeline_wait_prior(1);
  values[8] = to[0].x;
  values[9] = to[1].x;
}

// ---- Races ----

__global__ void WriteAfterRead(float* values, int) {
  __shared__ float row[64];
  const unsigned t = threadIdx.x;
  row[t] = values[t];
  __syncthreads();
  const float next = row[(t + 32) % 64];
  row[t] = next;
  __syncthreads();
  values[t] = row[t];
}

__global__ void WriteSamePlace(float* values, int) {
  __shared__ float place;
  if (threadIdx.x == 7 || threadIdx.x == 40) place = 1;
  __syncthreads();
  values[threadIdx.x] = place;
}

__global__ void ExchangeInWarp(float* values, int) {
  __shared__ float row[32];
  const unsigned t = threadIdx.x;
  row[t] = values[t];
  values[t] = row[t ^ 1];
}

__global__ void ExchangeInPartOfWarp(float* values, int mask) {
  __shared__ float row[32];
  const unsigned t = threadIdx.x;
  row[t] = values[t];
  if ((static_cast<unsigned>(mask) >> t & 1) != 0) __syncwarp(static_cast<unsigned>(mask));
  values[t] = row[t ^ 1];
}

__global__ void ReadAtomicCounter(float* values, int) {
  __shared__ int counter;
  if (threadIdx.x == 0) counter = 0;
  __syncthreads();
  atomicAdd(&counter, 1);
  values[threadIdx.x] = static_cast<float>(counter);
}

__global__ void ReadWhatOtherCopied(float* values, int) {
  __shared__ float4 to[2];
  const unsigned t = threadIdx.x;
  __pipeline_memcpy_async(&to[t], values + t * 4, sizeof(float4));
  __pipeline_commit();
  __pipeline_wait_prior(0);
  values[t] = to[1 - t].x;
}

__global__ void OverwriteStage(float* values, int) {
  __shared__ float stages[2][64];
  const unsigned t = threadIdx.x;
  float sum = 0;
  __pipeline_memcpy_async(&stages[0][t], values + t, sizeof(float));
  __pipeline_commit();
  for (int tile = 0; tile < 4; ++tile) {
    // The barrier that is missing here would let all threads finish with the stage of the last
    // round.
    __pipeline_memcpy_async(&stages[(tile + 1) % 2][t], values + t, sizeof(float));
    __pipeline_commit();
    __pipeline_wait_prior(1);
    __syncthreads();
    sum += stages[tile % 2][63 - t];
  }
  values[t] = sum;
}

__global__ void WriteWhereCopyGoes(float* values, int) {
  __shared__ float to;
  __pipeline_memcpy_async(&to, values, sizeof(float));
  to = 3;
  __pipeline_commit();
  __pipeline_wait_prior(0);
  values[1] = to;
}

__global__ void WriteBytes(float* values, int) {
  __shared__ unsigned word;
  if (threadIdx.x == 0) word = 0;
  if (threadIdx.x == 1) reinterpret_cast<unsigned short*>(&word)[1] = 1;
  __syncthreads();
  values[threadIdx.x] = static_cast<float>(word);
}

// ---- Races in device memory ----

__global__ void ReadWhatOtherBlockWrote(float* values, int) {
  const unsigned n = blockIdx.x * blockDim.x + threadIdx.x;
  if (blockIdx.x == 0) values[n] = 1;
  if (blockIdx.x == 1) values[n] = values[n - blockDim.x];
}

__global__ void ShiftFromBlockToBlock(float* values, int) {
  const unsigned n = blockIdx.x * blockDim.x + threadIdx.x;
  if (n > 0) values[n - 1] = values[n] + 1;
}

__global__ void ExchangeInDeviceMemory(float* values, int) {
  values[threadIdx.x] = static_cast<float>(threadIdx.x);
  values[32 + threadIdx.x] = values[threadIdx.x ^ 1];
}

__global__ void WriteWhatOthersReadFromDevice(float* values, int) {
  const unsigned t = threadIdx.x;
  const float first = values[0];
  if (t > 4) values[t == 5 ? 0 : t] = first + 1;
}

__global__ void ReadBesideAtomicsOfBlocks(float* values, int) {
  atomicAdd(&values[0], 1.0f);
  if (blockIdx.x == 3) values[1] = values[0];
}

// Bytes of one word: every block writes the last byte of its neighbour's.
__global__ void WriteBytesOfOtherBlock(float* values, int) {
  unsigned char* bytes = reinterpret_cast<unsigned char*>(values) + 3 * blockIdx.x;
  for (int i = 0; i < 4; ++i) bytes[i] = static_cast<unsigned char>(blockIdx.x);
}

// The last block sums the results of all, as in sound_kernels.cu: but `number` 0 has no fence, 1 a
// fence before the result is written, 2 a counter that is no atomic's.
__global__ void LastBlockSumsTooEarly(float* values, int number) {
  __shared__ bool is_last;
  const unsigned t = threadIdx.x;
  unsigned* finished = reinterpret_cast<unsigned*>(values);
  if (t == 0) {
    if (number == 1) __threadfence();
    values[1 + blockIdx.x] = 1;
    if (number == 2) __threadfence();
    is_last = number == 2 ? ++*finished == gridDim.x : atomicAdd(finished, 1u) == gridDim.x - 1;
  }
  __syncthreads();
  if (t != 1 || !is_last) return;
  float sum = 0;
  for (unsigned block = 0; block < gridDim.x; ++block) sum += values[1 + block];
  values[32] = sum;
}

// ---- Barriers and meetings that are not reached ----

__global__ void ReturnBeforeBarrier(float* values, int) {
  if (threadIdx.x == 33) return;
  __syncthreads();
  values[threadIdx.x] = 1;
}

__global__ void BarrierInBranch(float* values, int) {
  if (threadIdx.x < 16) {
    __syncthreads();
  } else {
    __syncwarp();
  }
  values[threadIdx.x] = 1;
}

__global__ void BarriersOfTwoBranches(float* values, int) {
  if (threadIdx.x < 16) {
    values[threadIdx.x] = 1;
    __syncthreads();
  } else {
    values[threadIdx.x] = 2;
    __syncthreads();
  }
}

__device__ inline void WaitAndAdd(float* value) {
  __syncthreads();
  *value += 1;
}

// The barrier is one in the source; its calls are two.
__global__ void BarrierOfTwoCalls(float* values, int) {
  if (threadIdx.x % 2 == 0) {
    WaitAndAdd(values + threadIdx.x);
  } else {
    WaitAndAdd(values + 64 - threadIdx.x);
  }
}

__global__ void DifferentMasks(float* values, int) {
  __syncwarp(threadIdx.x == 3 ? 0x0f : 0xff);
  values[threadIdx.x] = 1;
}

__global__ void MultiplyInHalfWarp(float* values, int) {
  float d[4] = {};
  const unsigned a[4] = {}, b[2] = {};
  MmaM16N8K16Bf16(d, a, b);
  values[threadIdx.x] = d[0];
}

__global__ void MultiplyAfterReturn(float* values, int) {
  if (threadIdx.x == 9) return;
  float d[4] = {};
  const unsigned a[4] = {}, b[2] = {};
  MmaM16N8K16F16(d, a, b);
  values[threadIdx.x] = d[0];
}

// ---- Shuffles ----

__global__ void ShuffleFromOutside(float* values, int) {
  const unsigned t = threadIdx.x;
  if (t < 16) values[t] = __shfl_sync(0xffff, values[t], static_cast<int>(t) + 1);
}

__global__ void ShuffleByOutsider(float* values, int) {
  const unsigned t = threadIdx.x;
  if (t < 17) values[t] = __shfl_xor_sync(0xffff, values[t], 1);
}

__global__ void ShuffleFromFinished(float* values, int) {
  const unsigned t = threadIdx.x;
  if (t == 31) return;
  values[t] = __shfl_down_sync(~0u, values[t], 1);
}

// ---- The stack ----

#ifdef __CUDACC__
#define TFB_NOT_INLINED __noinline__
#else
#define TFB_NOT_INLINED __attribute__((noinline))
#endif

__device__ TFB_NOT_INLINED float Descend(float* values, int depth) {
  if (depth == 0) return values[32];
  return Descend(values, depth - 1) * values[32 + depth % 32] + 1;
}

__global__ void Recurse(float* values, int depth) {
  values[threadIdx.x] = Descend(values, threadIdx.x == 2 ? depth : 1);
}

// The array exceeds a stack and the page below it: the frame must be touched page by page.
__global__ void BigArray(float* values, int) {
  float numbers[64 << 10];
  const int last = static_cast<int>(values[0]);
  for (int i = 0; i <= last; ++i) numbers[i] = values[i];
  values[1] = numbers[last];
}

// ---- Launches beyond the limits ----

__global__ void TooManyThreads(float* values, int) { values[0] = 1; }

__global__ void TooMuchShared(float* values, int) { values[0] = 1; }

__global__ void StaticAndDynamicShared(float* values, int) {
  __shared__ float row[64];
  row[threadIdx.x] = values[threadIdx.x];
  __syncthreads();
  values[threadIdx.x] = row[63 - threadIdx.x];
}

__global__ void MoreThanItSays(float* values, int) {
  float* memory = reinterpret_cast<float*>(DynamicShared<256>());
  memory[threadIdx.x] = values[threadIdx.x];
}

// ---- Results that depend on the order ----

__global__ void LastWriterWins(float* values, int) {
  values[0] = static_cast<float>(blockIdx.x * blockDim.x + threadIdx.x);
}

// ---- Bank conflicts ----

// Sums up the rows of a tile, a row a lane: lanes read a column, of which a row of kColumns words
// puts all words in one bank where that is a multiple of 32. `first` is a multiple of 32.
template <int kColumns>
__global__ void ReadColumns(float* values, int first) {
  __shared__ float tile[32][kColumns];
  const int t = static_cast<int>(threadIdx.x);
  for (int row = 0; row < 32; ++row) tile[row][t] = values[t] + static_cast<float>(row);
  __syncthreads();
  float sum = 0;
  for (int column = 0; column < 32; ++column) sum += tile[t][(first + column) % 32];
  values[t] = sum;
}

// Half a warp reads in each round, and the other half in the second alone, where it is in the banks
// of the first half's first round.
template <bool kSyncsWarps>
__global__ void ReadInRounds(float* values, int rounds) {
  __shared__ float shared[64];
  const int t = static_cast<int>(threadIdx.x);
  shared[t] = values[t];
  shared[t + 32] = values[t + 32];
  float sum = 0;
  for (int round = 0; round < rounds; ++round) {
    if (kSyncsWarps) {
      __syncwarp();
    } else {
      __syncthreads();
    }
    const int place = round == 0 ? t : 32 + (t + 16) % 32;
    if (t < 16 || round > 0) sum += shared[place];
  }
  values[t] = sum;
}

// Lanes read vectors kStride vectors apart.
template <int kStride>
__global__ void ReadVectors(float* values, int) {
  __shared__ float4 vectors[32 * kStride];
  const int t = static_cast<int>(threadIdx.x);
  const float x = values[t];
  for (int n = 0; n < kStride; ++n) vectors[32 * n + t] = make_float4(x, x + 1, x + 2, x + 3);
  __syncthreads();
  const float4 vector = vectors[kStride * t];
  values[t] = vector.x + 2 * vector.y + 3 * vector.z + 4 * vector.w;
}

// ---- Barriers of the block by number ----

// Two of three warps wait for each other; the third reads what they wrote, where `number` is 1.
__global__ void SyncTwoOfThreeWarps(float* values, int number) {
  __shared__ float row[96];
  const unsigned t = threadIdx.x;
  row[t] = static_cast<float>(t);
  if (t < 64) NamedSync(1, 64);
  if (t >= 64) __syncwarp();
  const float other = row[t < 64 ? t ^ 32 : number == 1 ? t - 64 : t ^ 1];
  if (t < 64 || other < 0) values[t % 64] = other;
}

// One warp arrives at a barrier and the other waits; number 1: the wrong one of them reads.
__global__ void ArriveAndRead(float* values, int number) {
  __shared__ float row[64];
  const unsigned t = threadIdx.x;
  row[t] = static_cast<float>(t);
  if (t < 32) {
    NamedArrive(2, 64);
  } else {
    NamedSync(2, 64);
  }
  if (number == 1 ? t < 32 : t >= 32) values[t % 32] = row[t ^ 32];
}

__global__ void OtherCounts(float* values, int number) {
  NamedSync(3, threadIdx.x < 32 ? 64 : number);
  values[threadIdx.x] = 1;
}

__global__ void BarrierWithoutOthers(float* values, int number) {
  if (threadIdx.x < 32) NamedSync(number, 64);
  values[threadIdx.x] = 1;
}

__global__ void MixedBarriers(float* values, int) {
  if (threadIdx.x < 32) {
    values[threadIdx.x] = NamedAny(1, 64, threadIdx.x) ? 1 : 0;
  } else {
    NamedSync(1, 64);
  }
}

// ---- Barriers in shared memory, copies and products ----

#if TFB_IS_HOPPER
__device__ inline unsigned char* AlignedShared() {
  unsigned char* memory = DynamicShared();
  return memory + (1024 - SharedAddress(memory) % 1024) % 1024;
}
#endif

// Numbers: 0 does not set the barrier up; 1 stores over it; 2 sets it up twice; 3 for no arrivals;
// 4 at an odd address; 5 expects more bytes than a barrier counts; 6 arrives once too often.
__global__ void MisusedBarrier(float* values, int number) {
#if TFB_IS_HOPPER
  __shared__ uint64_t barriers[2];
  uint64_t* barrier = barriers;
  if (number == 4) barrier = reinterpret_cast<uint64_t*>(reinterpret_cast<char*>(barrier) + 4);
  if (number != 0) InitBarrier(barrier, number == 3 ? 0 : 1);
  if (number == 1) barriers[0] = 0;
  if (number == 2) InitBarrier(barrier, 1);
  if (number == 5) ArriveAndExpect(barrier, 1 << 20);
  if (number == 6) ArriveAndExpect(barrier, 64);
  Arrive(barrier);
  Wait(barrier, 0);
  values[0] = 1;
#endif
}

// A warp polls for what never comes, and meets between its tries.
__global__ void PollForever(float* values, int) {
#if TFB_IS_HOPPER
  __shared__ uint64_t barrier;
  if (threadIdx.x == 0) InitBarrier(&barrier, 2);
  __syncwarp();
  if (threadIdx.x == 1) Arrive(&barrier);
  unsigned done = 0;
  while (__any_sync(~0u, done == 0)) {
    TFB_PTX_MEMORY(TFB_PTX_BARRIER_TRY_WAIT, (TFB_PTX_OPERAND("=r", done)),
                   (TFB_PTX_OPERAND("r", SharedAddress(&barrier)), TFB_PTX_OPERAND("r", 0)));
  }
  values[threadIdx.x] = 1;
#endif
}

// The numbers are the descriptor's bits that are changed.
__global__ void MultiplyOtherLayout(float* values, int number) {
#if TFB_IS_HOPPER
  unsigned char* rows = AlignedShared();
  for (unsigned n = threadIdx.x; n < 128 * 32; n += 128) reinterpret_cast<unsigned*>(rows)[n] = 0;
  FenceAsync();
  __syncthreads();
  const uint64_t matrix = DescribeMatrix(rows);
  float d[64];
  for (float& sum : d) sum = 0;
  BeginProducts();
  MultiplyN128<__half, 0>(d, matrix, matrix ^ uint64_t{1} << number);
  EndProducts();
  WaitForProducts<0>();
  if (threadIdx.x == 0) values[0] = d[0];
#endif
}

// Copies a box that is the tensor's first row. Numbers: 1 takes another map than EncodeTensorMap's,
// 3 begins within 16 bytes.
__global__ void CopyRow(const __grid_constant__ TensorMap map, float* values, int number) {
#if TFB_IS_HOPPER
  __shared__ uint64_t full;
  unsigned char* rows = AlignedShared();
  InitBarrier(&full, 1);
  FenceBarrierInit();
  ArriveAndExpect(&full, 128);
  TensorMap other = {};
  CopyBox(rows, number == 1 ? other : map, number == 3 ? 4 : 0, 0, 0, 0, &full);
  Wait(&full, 0);
  values[32] = reinterpret_cast<const float*>(rows)[0];
#endif
}

// The first 32 floats are a row of 64 numbers, of which each second one is 0 in bf16. The kernel sums
// up its square four times, in row and column 0 of a product; values[32] receives it.
__global__ void Pipeline(const __grid_constant__ TensorMap map, float* values, PipelineBug bug) {
#if TFB_IS_HOPPER
  using Bug = PipelineBug;
  constexpr int kSteps = 4, kStages = 2, kStageBytes = 128 * 128;
  __shared__ uint64_t full[kStages], empty[kStages];
  unsigned char* stages = AlignedShared();
  const int t = static_cast<int>(threadIdx.x), group = t / kWarpGroup;
  if (t == 0) {
    const int releases = bug == Bug::kTooFewArrivals ? 9 : bug == Bug::kOneGroupReleases ? 4 : 8;
    for (int s = 0; s < kStages; ++s) {
      InitBarrier(&full[s], 1);
      InitBarrier(&empty[s], releases);
    }
    if (bug != Bug::kBarriersUnfenced) FenceBarrierInit();
  }
  if (bug != Bug::kBarriersUnsynced) __syncthreads();
  if (group == 2) {
    for (int k = 0; t == 2 * kWarpGroup && k < kSteps; ++k) {
      const int stage = k % kStages;
      unsigned char* to = stages + stage * kStageBytes;
      if (bug == Bug::kMisalignedStage) to += 128;
      if (bug != Bug::kCopiesTooEarly)
        Wait(&empty[stage], static_cast<unsigned>(k / kStages + 1) & 1);
      int bytes = kStageBytes;
      if (bug == Bug::kExpectsTooLittle) bytes -= 128;
      if (bug == Bug::kExpectsTooMuch) bytes += 128;
      ArriveAndExpect(&full[stage], static_cast<unsigned>(bytes));
      CopyBox(to, map, 0, 0, 0, 0, &full[stage]);
    }
    if (t == 2 * kWarpGroup && bug == Bug::kCopyUnawaited) {
      Wait(&empty[0], 1);
      ArriveAndExpect(&full[0], kStageBytes);
      CopyBox(stages, map, 0, 0, 0, 0, &full[0]);
    }
    return;
  }
  float d[64];
  for (float& sum : d) sum = 0;
  const auto release = [&](int stage) {
    __syncwarp();
    if (t % 32 == 0 && (group == 0 || bug != Bug::kOneGroupReleases)) Arrive(&empty[stage]);
  };
  for (int k = 0; k < kSteps; ++k) {
    const int stage = k % kStages;
    unsigned char* rows = stages + stage * kStageBytes;
    if (bug != Bug::kReadsTooEarly) Wait(&full[stage], static_cast<unsigned>(k / kStages) & 1);
    // A number of row 1, of which there are only zeros.
    if (t == 0) *reinterpret_cast<unsigned*>(rows + 128) = 0;
    if (bug != Bug::kStoresWithoutFence) FenceAsync();
    NamedSync(1, 2 * kWarpGroup);
    const uint64_t a = DescribeMatrix(rows + group * 64 * 128), b = DescribeMatrix(rows);
    if (bug != Bug::kNoProductFence && (k == 0 || bug != Bug::kChangesSumsUnfenced))
      BeginProducts();
    for (unsigned on = 0; on < 128; on += 32) {
      if (bug == Bug::kWarpMissing && t / 32 == 6 && k == kSteps - 1) continue;
      const unsigned more = bug == Bug::kOtherProduct && t / 32 == 6 && k == 2 ? 32 : 0;
      MultiplyN128<__nv_bfloat16, 1>(d, MatrixOn(a, on), MatrixOn(b, on ^ more));
    }
    if (bug != Bug::kNoCommit) EndProducts();
    if (bug == Bug::kReleasesTooEarly) release(stage);
    if (bug == Bug::kStoresDuringProduct && t == 7) *reinterpret_cast<unsigned*>(rows + 128) = 0;
    if (bug == Bug::kChangesSums) d[5] = 0;
    if (bug != Bug::kNoWaitForProduct || k < kSteps - 1) WaitForProducts<0>();
    if (bug == Bug::kChangesSumsUnfenced) d[5] += 1;
    if (bug != Bug::kReleasesTooEarly) release(stage);
  }
  if (t % kWarpGroup == 0) values[32 + group] = d[0];
#endif
}

// Describes rows of 32 floats as 64 numbers.
const char* DescribeRows(float* values, int64_t rows, int box_rows, TensorMap* map) {
  const BoxedTensor tensor = {values, {64, rows, 1, 1}, {1, 64, 64 * rows, 64 * rows}, box_rows};
  return EncodeTensorMap(tensor, Element::kBf16, map);
}
const char* LaunchCopyRow(const char* name, float* values, int number) {
  TensorMap map;
  // Number 2: the rows are behind the buffer.
  const char* error = DescribeRows(values + (number == 2 ? 64 : 0), 1, 1, &map);
  if (error != nullptr) return error;
  return Launch(name, &CopyRow, KernelShape(1, 1, 2048), nullptr, map, values, number);
}
const char* LaunchPipeline(const char* name, float* values, int number) {
  TensorMap map;
  const char* error = DescribeRows(values, 1, 128, &map);
  if (error != nullptr) return error;
  return Launch(name, &Pipeline, KernelShape(1, 3 * kWarpGroup, 34 << 10), nullptr, map, values,
                static_cast<PipelineBug>(number));
}

// ---- The table ----

using Kernel = void (*)(float* values, int number);

template <Kernel kKernel, unsigned kBlocks, unsigned kThreads, size_t kSharedBytes = 0>
const char* LaunchOf(const char* name, float* values, int number) {
  return Launch(name, kKernel, KernelShape{dim3(kBlocks), dim3(kThreads), kSharedBytes}, nullptr,
                values, number);
}

// `number` is the dynamic shared memory.
template <Kernel kKernel>
const char* LaunchWithShared(const char* name, float* values, int number) {
  return Launch(name, kKernel, KernelShape{dim3(1), dim3(64), static_cast<size_t>(number)}, nullptr,
                values, number);
}

template <Kernel kKernel>
const char* LaunchWithTheOne(const char* name, float* values, int number) {
  return Launch(name, kKernel, KernelShape{dim3(2, 3), dim3(16, 2)}, nullptr, values, number);
}

const struct {
  const char* name;
  const char* (*launch)(const char* name, float* values, int number);
} kKernels[] = {
    {"ReadAt", &LaunchWithTheOne<&ReadAt>},
    {"WriteAt", &LaunchWithTheOne<&WriteAt>},
    {"ReadVectorAt", &LaunchWithTheOne<&ReadVectorAt>},
    {"ChangeAt", &LaunchWithTheOne<&ChangeAt>},
    {"CopyOverEnd", &LaunchOf<&CopyOverEnd, 1, 1>},
    {"OverrunDynamicShared", &LaunchOf<&OverrunDynamicShared, 1, 17, 16 * sizeof(float)>},
    {"LoadMatrixFromDevice", &LaunchOf<&LoadMatrixFromDevice, 1, 32>},
    {"CopyAsynchronouslyToDevice", &LaunchOf<&CopyAsynchronouslyToDevice, 1, 1>},
    {"ReadMisaligned", &LaunchOf<&ReadMisaligned, 1, 1>},
    {"WriteSharedMisaligned", &LaunchOf<&WriteSharedMisaligned, 1, 1, 64>},
    {"CopyMisaligned", &LaunchOf<&CopyMisaligned, 1, 1>},
    {"SumInto", &LaunchOf<&SumInto, 1, 1>},
    {"ReadStaticShared", &LaunchOf<&ReadStaticShared, 1, 8>},
    {"ReadDynamicShared", &LaunchOf<&ReadDynamicShared, 1, 1, 16>},
    {"KeepSharedFromBlockToBlock", &LaunchOf<&KeepSharedFromBlockToBlock, 2, 1>},
    {"ReadBeforeCopyEnds", &LaunchOf<&ReadBeforeCopyEnds, 1, 1>},
    {"WriteAfterRead", &LaunchOf<&WriteAfterRead, 1, 64>},
    {"WriteSamePlace", &LaunchOf<&WriteSamePlace, 1, 64>},
    {"ExchangeInWarp", &LaunchOf<&ExchangeInWarp, 1, 32>},
    {"ExchangeInPartOfWarp", &LaunchOf<&ExchangeInPartOfWarp, 1, 32>},
    {"ReadAtomicCounter", &LaunchOf<&ReadAtomicCounter, 1, 64>},
    {"ReadWhatOtherCopied", &LaunchOf<&ReadWhatOtherCopied, 1, 2>},
    {"OverwriteStage", &LaunchOf<&OverwriteStage, 1, 64>},
    {"WriteWhereCopyGoes", &LaunchOf<&WriteWhereCopyGoes, 1, 1>},
    {"WriteBytes", &LaunchOf<&WriteBytes, 1, 2>},
    {"ReadWhatOtherBlockWrote", &LaunchOf<&ReadWhatOtherBlockWrote, 2, 32>},
    {"ShiftFromBlockToBlock", &LaunchOf<&ShiftFromBlockToBlock, 64, 1>},
    {"ExchangeInDeviceMemory", &LaunchOf<&ExchangeInDeviceMemory, 1, 32>},
    {"WriteWhatOthersReadFromDevice", &LaunchOf<&WriteWhatOthersReadFromDevice, 1, 64>},
    {"ReadBesideAtomicsOfBlocks", &LaunchOf<&ReadBesideAtomicsOfBlocks, 4, 1>},
    {"WriteBytesOfOtherBlock", &LaunchOf<&WriteBytesOfOtherBlock, 4, 1>},
    {"LastBlockSumsTooEarly", &LaunchOf<&LastBlockSumsTooEarly, 8, 32>},
    {"ReturnBeforeBarrier", &LaunchOf<&ReturnBeforeBarrier, 1, 64>},
    {"BarrierInBranch", &LaunchOf<&BarrierInBranch, 1, 32>},
    {"BarriersOfTwoBranches", &LaunchOf<&BarriersOfTwoBranches, 1, 64>},
    {"BarrierOfTwoCalls", &LaunchOf<&BarrierOfTwoCalls, 1, 32>},
    {"DifferentMasks", &LaunchOf<&DifferentMasks, 1, 8>},
    {"MultiplyInHalfWarp", &LaunchOf<&MultiplyInHalfWarp, 1, 16>},
    {"MultiplyAfterReturn", &LaunchOf<&MultiplyAfterReturn, 1, 32>},
    {"ShuffleFromOutside", &LaunchOf<&ShuffleFromOutside, 1, 32>},
    {"ShuffleByOutsider", &LaunchOf<&ShuffleByOutsider, 1, 32>},
    {"ShuffleFromFinished", &LaunchOf<&ShuffleFromFinished, 1, 32>},
    {"Recurse", &LaunchOf<&Recurse, 1, 4>},
    {"BigArray", &LaunchOf<&BigArray, 1, 1>},
    {"TooManyThreads", &LaunchOf<&TooManyThreads, 1, 1025>},
    {"TooMuchShared", &LaunchOf<&TooMuchShared, 1, 1, (227 << 10) + 1>},
    {"StaticAndDynamicShared", &LaunchWithShared<&StaticAndDynamicShared>},
    {"MoreThanItSays", &LaunchWithShared<&MoreThanItSays>},
    {"ReadColumns", &LaunchOf<&ReadColumns<32>, 1, 32>},
    {"ReadPaddedColumns", &LaunchOf<&ReadColumns<33>, 1, 32>},
    {"ReadInRounds", &LaunchOf<&ReadInRounds<false>, 1, 32>},
    {"ReadInRoundsOfTheWarp", &LaunchOf<&ReadInRounds<true>, 1, 32>},
    {"ReadVectors", &LaunchOf<&ReadVectors<1>, 1, 32>},
    {"ReadEverySecondVector", &LaunchOf<&ReadVectors<2>, 1, 32>},
    {"ReadEveryEighthVector", &LaunchOf<&ReadVectors<8>, 1, 32>},
    {"SyncTwoOfThreeWarps", &LaunchOf<&SyncTwoOfThreeWarps, 1, 96>},
    {"ArriveAndRead", &LaunchOf<&ArriveAndRead, 1, 64>},
    {"OtherCounts", &LaunchOf<&OtherCounts, 1, 64>},
    {"BarrierWithoutOthers", &LaunchOf<&BarrierWithoutOthers, 1, 64>},
    {"MixedBarriers", &LaunchOf<&MixedBarriers, 1, 64>},
    {"MisusedBarrier", &LaunchOf<&MisusedBarrier, 1, 1>},
    {"PollForever", &LaunchOf<&PollForever, 1, 32>},
    {"MultiplyOtherLayout", &LaunchOf<&MultiplyOtherLayout, 1, 128, 20 << 10>},
    {"MultiplyInHalfAGroup", &LaunchOf<&MultiplyOtherLayout, 1, 64, 20 << 10>},
    {"CopyRow", &LaunchCopyRow},
    {"Pipeline", &LaunchPipeline},
    {"LastWriterWins", &LaunchOf<&LastWriterWins, 16, 64>},
};

const char* Run(const char* name, float* values, int number) {
  for (const auto& kernel : kKernels) {
    if (strcmp(kernel.name, name) == 0) return kernel.launch(name, values, number);
  }
  abort();  // there is no such kernel
}

}  // namespace

TFB_KERNEL_TABLE(BrokenKernels, {&LaunchReduce, &Run});

}  // namespace tfb
