// Scores of hard attention on CUDA devices, by tiles of 64 queries and 64 keys: what its choice and
// its gradients have in common.
//
// A block makes scores of a tile with 128 threads, each 8 queries x 4 keys in registers, summed in
// the order of the channels by fp32 fused multiply-adds, as on the CPU; tensor cores have an order
// of their own. Tiles are 16 channels deep and double-buffered: the next ones are loaded to
// registers while these are multiplied.
//   shared memory: 2 x 16 x (68 + 68) x 4 B = 17 KiB
#ifndef TFB_ATTENTION_HARD_HARD_TILES_CUH_
#define TFB_ATTENTION_HARD_HARD_TILES_CUH_

#include "attention/hard/hard_cuda.h"
#include "core/cuda/register_tile.cuh"
#include "core/cuda/warp.cuh"

namespace tfb::hard {
namespace {  // internal linkage, as in kernel.cuh

constexpr int kTile = 64;  // queries of a tile, and keys
constexpr int kDepth = 16;
constexpr int kThreads = 128;
constexpr int kRows = 8;  // of a thread
constexpr int kColumns = 4;
constexpr int kTeam = kTile / kColumns;  // threads that share rows: half a warp
constexpr int kLoads = kTile * kDepth / kThreads;

// Returns exp(x) for x <= 0, and 0 where the result would be denormal.
__device__ float Weight(float x) { return x < -87.33f ? 0.0f : expf(x); }

struct alignas(16) Tiles {
  float q[kDepth][kTile + 4];  // transposed; the padding spreads its writes over banks
  float k[kDepth][kTile + 4];
};

struct Task {
  int64_t batch;
  int64_t head;
  int64_t first_query;
};

// Returns block `block`'s task of those that each have 64 queries. Blocks of a head follow each
// other, its last queries first: where the problem is causal, they see most.
__device__ Task QueriesOf(const HardArguments& a, int64_t block) {
  const int64_t tiles = CeilDiv(a.query_tokens, kTile), head = block / tiles;
  return {head / a.query_heads, head % a.query_heads, (tiles - 1 - block % tiles) * kTile};
}

__device__ int TeamMember() { return static_cast<int>(threadIdx.x) % kTeam; }
__device__ int ThreadRow() { return static_cast<int>(threadIdx.x) / kTeam * kRows; }

// Returns the end of the keys that query i may see.
__device__ int64_t KeysEnd(const HardArguments& a, int64_t i) {
  if (!a.causal) return a.kv_tokens;
  return min(max(i + a.kv_tokens - a.query_tokens + 1, int64_t{0}), a.kv_tokens);
}

// Loads tiles of queries and keys: a thread loads channel t % 16 of the rows t / 16 + 8 n, so that
// 16 lanes read consecutive channels.
class TileLoader {
 public:
  __device__ TileLoader(const HardArguments& a, const Task& task)
      : a_(a),
        task_(task),
        k_base_(task.batch * a.k.strides[0] + task.head / a.group * a.k.strides[1]) {}

  // Rows beyond the last repeat it: their results are not used. Channels beyond the last are 0.
  __device__ void Fetch(int64_t key_tile, int depth, float (&q)[kLoads], float (&k)[kLoads]) const {
    const int channel = depth + static_cast<int>(threadIdx.x) % kDepth;
    const bool exists = channel < a_.head_dim;
#pragma unroll
    for (int n = 0; n < kLoads; ++n) {
      const int64_t i = min(task_.first_query + Row(n), a_.query_tokens - 1);
      const int64_t j = min(key_tile * kTile + Row(n), a_.kv_tokens - 1);
      q[n] = exists ? a_.scale * LoadElement(a_.q.data, a_.q.element, QueryOffset(i, channel)) : 0;
      k[n] = exists ? LoadElement(a_.k.data, a_.k.element,
                                  k_base_ + j * a_.k.strides[2] + channel * a_.k.strides[3])
                    : 0;
    }
  }
  __device__ void Put(const float (&q)[kLoads], const float (&k)[kLoads], Tiles* tiles) const {
#pragma unroll
    for (int n = 0; n < kLoads; ++n) {
      tiles->q[threadIdx.x % kDepth][Row(n)] = q[n];
      tiles->k[threadIdx.x % kDepth][Row(n)] = k[n];
    }
  }

 private:
  __device__ static int Row(int n) {
    return static_cast<int>(threadIdx.x) / kDepth + n * (kThreads / kDepth);
  }
  __device__ int64_t QueryOffset(int64_t i, int channel) const {
    return task_.batch * a_.q.strides[0] + task_.head * a_.q.strides[1] + i * a_.q.strides[2] +
           channel * a_.q.strides[3];
  }

  const HardArguments& a_;
  const Task& task_;
  int64_t k_base_;
};

// Adds the noise, and sets the scores that a query does not see, and NaN, to -inf.
template <HardSample kSample>
__device__ void Finish(const HardArguments& a, const Task& task, int64_t first_key,
                       float (&scores)[kRows][kColumns]) {
  bool is_token[kColumns];
#pragma unroll
  for (int n = 0; n < kColumns; ++n) {
    const int64_t j = first_key + n;
    is_token[n] = j < a.kv_tokens &&
                  (a.key_mask == nullptr ||
                   a.key_mask[task.batch * a.key_mask_strides[0] + j * a.key_mask_strides[1]] != 0);
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int64_t i = min(task.first_query + ThreadRow() + r, a.query_tokens - 1);
    const int64_t end = KeysEnd(a, i);
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
      float& score = scores[r][n];
      const bool sees = is_token[n] && first_key + n < end;
      if (sees && kSample == HardSample::kGumbel) {
        score += LoadElement(a.noise.data, a.noise.element,
                             task.batch * a.noise.strides[0] + task.head * a.noise.strides[1] +
                                 i * a.noise.strides[2] + (first_key + n) * a.noise.strides[3]);
      }
      score = sees && score == score ? score : -INFINITY;
    }
  }
}

// Calls body(first_key, scores) for each tile of keys, where a thread's keys are first_key, ...,
// first_key + 3.
template <HardSample kSample, class Body>
__device__ void ForEachTile(const HardArguments& a, const Task& task, Tiles (&tiles)[2],
                            const Body& body) {
  const int64_t last_query = min(task.first_query + kTile, a.query_tokens) - 1;
  const int slabs = (a.head_dim + kDepth - 1) / kDepth;
  const int64_t steps = (KeysEnd(a, last_query) + kTile - 1) / kTile * slabs;
  if (steps == 0) return;
  const TileLoader loader(a, task);
  float next_q[kLoads], next_k[kLoads];
  float scores[kRows][kColumns] = {};
  __syncthreads();  // the previous walk has read its tiles
  loader.Fetch(0, 0, next_q, next_k);
  loader.Put(next_q, next_k, &tiles[0]);
  int slab = 0;
  int64_t key_tile = 0;
  for (int64_t step = 0; step < steps; ++step) {
    __syncthreads();  // these tiles have arrived, and the others have been read
    const bool last_slab = slab + 1 == slabs;
    const int next_slab = last_slab ? 0 : slab + 1;
    const int64_t next_tile = key_tile + last_slab;
    if (step + 1 < steps) loader.Fetch(next_tile, next_slab * kDepth, next_q, next_k);
    const Tiles& staged = tiles[step % 2];
    AddProduct<kDepth>({&staged.q[0][ThreadRow()], kTile + 4},
                       {&staged.k[0][TeamMember() * kColumns], kTile + 4}, kDepth, scores);
    if (step + 1 < steps) loader.Put(next_q, next_k, &tiles[(step + 1) % 2]);
    if (last_slab) {
      const int64_t first_key = key_tile * kTile + TeamMember() * kColumns;
      Finish<kSample>(a, task, first_key, scores);
      body(first_key, scores);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int n = 0; n < kColumns; ++n) scores[r][n] = 0;
      }
    }
    slab = next_slab;
    key_tile = next_tile;
  }
}

// Finds the largest score of each row, and the sum of all weights relative to it.
__device__ void SumWeights(const HardArguments& a, const Task& task, Tiles (&tiles)[2],
                           float (&max)[kRows], float (&sum)[kRows]) {
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    max[r] = -INFINITY;
    sum[r] = 0;
  }
  ForEachTile<HardSample::kInverseCdf>(a, task, tiles,
                                       [&](int64_t, const float(&scores)[kRows][kColumns]) {
#pragma unroll
                                         for (int r = 0; r < kRows; ++r) {
                                           float larger = max[r];
#pragma unroll
                                           for (int n = 0; n < kColumns; ++n)
                                             larger = fmaxf(larger, scores[r][n]);
                                           if (larger == -INFINITY) continue;
                                           sum[r] *= Weight(max[r] - larger);
                                           max[r] = larger;
#pragma unroll
                                           for (int n = 0; n < kColumns; ++n)
                                             sum[r] += Weight(scores[r][n] - larger);
                                         }
                                       });
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const float largest = MaxOfLanes<kTeam>(max[r]);
    sum[r] = max[r] == -INFINITY ? 0 : sum[r] * Weight(max[r] - largest);
    sum[r] = SumOfLanes<kTeam>(sum[r]);
    max[r] = largest;
  }
}

}  // namespace
}  // namespace tfb::hard

#endif  // TFB_ATTENTION_HARD_HARD_TILES_CUH_
