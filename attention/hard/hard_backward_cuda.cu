#include "attention/hard/hard_tiles.cuh"

namespace tfb::hard {
namespace {

// The gradients of the scores s_ij are c_ij = w_i ([j = j*_i] - p_ij), so that those of queries and
// keys are two products of one form,
//
//   dq_i = scale sum_j c_ij k_j,    dk_j = scale sum over heads of the group, i  c_ij q_i
//
// A block owns 64 rows x 64 channels of one of them, and walks the tiles of the other's rows: it
// makes the scores of the pair of tiles again, their c in shared memory, and multiplies, each of its
// 128 threads 8 x 4 of the scores and of the gradient in registers. So each gradient has one owner,
// and sums are in the order of heads and tokens.
//   shared memory: 17 KiB of tiles and 64 x 68 x 4 B of c, together 34 KiB
// Scores are made for each 64 channels of a gradient: at head_dim 128 twice.
//
// An element of a key or a query that is not finite counts as 0 in these products: every score with
// it is NaN or infinite, and c is then 0 or NaN itself.

// ---- Sums over keys: a block for 64 queries ----

// Returns g_i . v_j* plus the baseline, over the lanes that share rows: minus what the reward
// exceeds the baseline by.
__device__ float WeightOf(const HardBackwardArguments& a, const Task& task, int64_t i,
                          int64_t chosen) {
  const HardArguments& f = a.forward;
  const DeviceView &g = a.out_gradient, &v = f.v;
  float weight = 0;
  if (g.data != nullptr && chosen >= 0) {
#pragma unroll 1
    for (int c = TeamMember(); c < f.value_dim; c += kTeam) {
      weight += Load(g, Offset(g, task.batch, task.head, i, c)) *
                Load(v, Offset(v, task.batch, task.head / f.group, chosen, c));
    }
  }
  weight = SumOfLanes<kTeam>(weight);
  const DeviceView& baseline = a.baseline;
  if (baseline.data == nullptr) return weight;
  return weight + Load(baseline, Offset(baseline, task.batch, task.head, i));
}

__global__ void __launch_bounds__(kThreads) SumRows(HardBackwardArguments a) {
  __shared__ Tiles tiles[2];
  const HardArguments& f = a.forward;
  const Task task = QueriesOf(f, blockIdx.x);
  float max[kRows], sum[kRows];
  SumWeights(f, task, tiles, max, sum);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const bool exists = task.first_query + ThreadRow() + r < f.query_tokens;
    const int64_t i = min(task.first_query + ThreadRow() + r, f.query_tokens - 1);
    const int64_t row = a.RowOf(task.batch, task.head, i);
    const int64_t chosen = a.index[row];
    const float weight = WeightOf(a, task, i, chosen);
    if (!exists || TeamMember() > 0) continue;
    const bool sees_a_key = chosen >= 0 && sum[r] > 0;
    a.weight[row] = sees_a_key ? weight : 0;
    a.max[row] = sees_a_key ? max[r] : 0;
    a.sum[row] = sees_a_key ? sum[r] : 1;
  }
}

// ---- The products ----

struct alignas(16) Coefficients {
  float c[kTile][kTile + 4];
};

// Writes the c of a pair of tiles, transposed for the gradients of queries: the rows are those that
// are summed over. The thread has the scores of its 8 queries and the keys from `first_key` on.
template <bool kOfKeys>
__device__ void StoreCoefficients(const HardBackwardArguments& a, const Task& task,
                                  int64_t first_key, const float (&scores)[kRows][kColumns],
                                  Coefficients* to) {
  const int column = TeamMember() * kColumns;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int64_t i = task.first_query + ThreadRow() + r;
    const bool exists = i < a.forward.query_tokens;
    const int64_t row = exists ? a.RowOf(task.batch, task.head, i) : 0;
    const float weight = exists ? a.weight[row] : 0, max = exists ? a.max[row] : 0;
    const float inverse = exists ? 1 / a.sum[row] : 0;
    const int64_t chosen = exists ? a.index[row] : -1;
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
      const float p = Weight(scores[r][n] - max) * inverse;
      const float factor = (first_key + n == chosen ? 1.0f : 0.0f) - p;
      // A weight that is NaN reaches no key that the query does not see.
      const float c = weight == 0 || factor == 0 ? 0 : weight * factor;
      if (kOfKeys) {
        to->c[ThreadRow() + r][column + n] = c;
      } else {
        to->c[column + n][ThreadRow() + r] = c;
      }
    }
  }
}

// Makes the scores of a pair of tiles. The barriers of AddPair before have seen to it that tiles[0]
// has been read; those in the loop do so for tiles[1].
__device__ void ScorePair(const HardArguments& f, const Task& task, int64_t key_tile,
                          Tiles (&tiles)[2], float (&scores)[kRows][kColumns]) {
  const int slabs = (f.head_dim + kDepth - 1) / kDepth;
  const TileLoader loader(f, task);
  float next_q[kLoads], next_k[kLoads];
  loader.Fetch(key_tile, 0, next_q, next_k);
  loader.Put(next_q, next_k, &tiles[0]);
  for (int slab = 0; slab < slabs; ++slab) {
    __syncthreads();  // these tiles have arrived, and the others have been read
    const bool more = slab + 1 < slabs;
    if (more) loader.Fetch(key_tile, (slab + 1) * kDepth, next_q, next_k);
    AddProduct<kDepth>({&tiles[slab % 2].q[0][ThreadRow()], kTile + 4},
                       {&tiles[slab % 2].k[0][TeamMember() * kColumns], kTile + 4}, kDepth, scores);
    if (more) loader.Put(next_q, next_k, &tiles[(slab + 1) % 2]);
  }
  Finish<HardSample::kNone>(f, task, key_tile * kTile + TeamMember() * kColumns, scores);
}

// Rows of which 64 x 64 channels are multiplied: a thread loads channel t % 64 of the rows t / 64 + 2
// n.
struct Factor {
  DeviceView view;
  int64_t batch;
  int64_t head;
  int64_t first;  // token
  int64_t tokens;
  int channel;  // of the thread
  int channels;

  // Loads rows `row` on, as zeros what is not there or not finite.
  __device__ void Fetch(int row, float (&x)[kLoads]) const {
#pragma unroll
    for (int n = 0; n < kLoads; ++n) {
      const int64_t token = first + row + Row(n);
      x[n] = token < tokens && channel < channels
                 ? Load(view, Offset(view, batch, head, token, channel))
                 : 0;
      if (!isfinite(x[n])) x[n] = 0;
    }
  }
  __device__ static void Put(const float (&x)[kLoads], Tiles* tiles) {
#pragma unroll
    for (int n = 0; n < kLoads; ++n) tiles->k[Row(n)][threadIdx.x % kTile] = x[n];
  }
  __device__ static int Row(int n) {
    return static_cast<int>(threadIdx.x) / kTile + n * (kThreads / kTile);
  }
};

// Adds the product of c with the factor's 64 rows. `c` has been written before, and no barrier has
// passed.
__device__ void AddPair(const Coefficients& c, const Factor& factor, Tiles (&tiles)[2],
                        float (&sums)[kRows][kColumns]) {
  float next[kLoads];
  factor.Fetch(0, next);
  __syncthreads();  // the scores' tiles have been read
  Factor::Put(next, &tiles[0]);
  for (int step = 0; step < kTile / kDepth; ++step) {
    __syncthreads();  // these rows, and c, have arrived, and the others have been read
    const bool more = (step + 1) * kDepth < kTile;
    if (more) factor.Fetch((step + 1) * kDepth, next);
    AddProduct<kDepth>({&c.c[step * kDepth][ThreadRow()], kTile + 4},
                       {&tiles[step % 2].k[0][TeamMember() * kColumns], kTile + 4}, kDepth, sums);
    if (more) Factor::Put(next, &tiles[(step + 1) % 2]);
  }
}

// A block owns a tile of queries, or of keys, of a head and batch row.
struct Owned {
  int64_t batch;
  int64_t head;
  int64_t tile;
  int first_channel;
};
__device__ Owned OwnedBy(const HardArguments& f, int64_t heads, int64_t tokens) {
  const int64_t channel_tiles = CeilDiv(f.head_dim, kTile), tiles = CeilDiv(tokens, kTile);
  const int64_t n = blockIdx.x / channel_tiles, head = n / tiles;
  return {head / heads, head % heads, n % tiles,
          static_cast<int>(blockIdx.x % channel_tiles) * kTile};
}

__device__ void StoreGradient(const DeviceView& to, const Owned& owned, int64_t tokens,
                              int channels, float scale, const float (&sums)[kRows][kColumns]) {
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int64_t token = owned.tile * kTile + ThreadRow() + r;
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
      const int channel = owned.first_channel + TeamMember() * kColumns + n;
      if (token >= tokens || channel >= channels) continue;
      Store(to, Offset(to, owned.batch, owned.head, token, channel), scale * sums[r][n]);
    }
  }
}

// Adds the products of a pair of tiles to the gradient of the keys or the queries.
template <bool kOfKeys>
__device__ void AddTiles(const HardBackwardArguments& a, const Task& task, int64_t key_tile,
                         const Factor& factor, Tiles (&tiles)[2], Coefficients* c,
                         float (&sums)[kRows][kColumns]) {
  float scores[kRows][kColumns] = {};
  ScorePair(a.forward, task, key_tile, tiles, scores);
  StoreCoefficients<kOfKeys>(a, task, key_tile * kTile + TeamMember() * kColumns, scores, c);
  AddPair(*c, factor, tiles, sums);
}

__global__ void __launch_bounds__(kThreads) QueryGradients(HardBackwardArguments a) {
  __shared__ Tiles tiles[2];
  __shared__ Coefficients c;
  const HardArguments& f = a.forward;
  const Owned owned = OwnedBy(f, f.query_heads, f.query_tokens);
  const Task task = {owned.batch, owned.head, owned.tile * kTile};
  const int64_t end = KeysEnd(f, min(task.first_query + kTile, f.query_tokens) - 1);
  Factor keys = {
      f.k,       owned.batch, owned.head / f.group,
      0,         f.kv_tokens, owned.first_channel + static_cast<int>(threadIdx.x) % kTile,
      f.head_dim};
  float sums[kRows][kColumns] = {};
  for (; keys.first < end; keys.first += kTile) {
    AddTiles<false>(a, task, keys.first / kTile, keys, tiles, &c, sums);
  }
  StoreGradient(a.q_gradient, owned, f.query_tokens, f.head_dim, f.scale, sums);
}

__global__ void __launch_bounds__(kThreads) KeyGradients(HardBackwardArguments a) {
  __shared__ Tiles tiles[2];
  __shared__ Coefficients c;
  const HardArguments& f = a.forward;
  const int64_t kv_heads = f.query_heads / f.group;
  const Owned owned = OwnedBy(f, kv_heads, f.kv_tokens);
  float sums[kRows][kColumns] = {};
  for (int64_t h = owned.head * f.group; h < (owned.head + 1) * f.group; ++h) {
    Factor queries = {
        f.q,       owned.batch,    h,
        0,         f.query_tokens, owned.first_channel + static_cast<int>(threadIdx.x) % kTile,
        f.head_dim};
    for (; queries.first < f.query_tokens; queries.first += kTile) {
      const int64_t last = min(queries.first + kTile, f.query_tokens) - 1;
      if (KeysEnd(f, last) <= owned.tile * kTile) continue;
      AddTiles<true>(a, {owned.batch, h, queries.first}, owned.tile, queries, tiles, &c, sums);
    }
  }
  StoreGradient(a.k_gradient, owned, f.kv_tokens, f.head_dim, f.scale, sums);
}

// ---- The values: a warp for each, which reads the index of 32 queries at a time ----

constexpr int kShare = 8;  // channels of a lane, for 256 at most

__global__ void __launch_bounds__(kRowThreads) ValueGradients(HardBackwardArguments a) {
  const HardArguments& f = a.forward;
  const int64_t kv_heads = f.query_heads / f.group, n = WarpOfGrid();
  const int64_t j = n % f.kv_tokens, head = n / f.kv_tokens % kv_heads,
                b = n / f.kv_tokens / kv_heads;
  if (b >= f.batch) return;
  const DeviceView& g = a.out_gradient;
  float sums[kShare] = {};
  for (int64_t h = head * f.group; g.data != nullptr && h < (head + 1) * f.group; ++h) {
    for (int64_t first = 0; first < f.query_tokens; first += kWarp) {
      const int64_t i = first + Lane();
      const bool chooses = i < f.query_tokens && a.index[a.RowOf(b, h, i)] == j;
      for (unsigned left = __ballot_sync(kAllLanes, chooses); left != 0; left &= left - 1) {
        const int64_t chosen_by = first + __ffs(static_cast<int>(left)) - 1;
#pragma unroll
        for (int c = 0; c < kShare; ++c) {
          const int channel = Lane() + c * kWarp;
          if (channel < f.value_dim) sums[c] += Load(g, Offset(g, b, h, chosen_by, channel));
        }
      }
    }
  }
#pragma unroll
  for (int c = 0; c < kShare; ++c) {
    const int channel = Lane() + c * kWarp;
    if (channel >= f.value_dim) break;
    Store(a.v_gradient, Offset(a.v_gradient, b, head, j, channel), sums[c]);
  }
}

const char* LaunchSumRows(const HardBackwardArguments& a, void* stream) {
  const HardArguments& f = a.forward;
  return Launch("SumRows", &SumRows,
                {f.batch * f.query_heads * CeilDiv(f.query_tokens, kTile), kThreads}, stream, a);
}
const char* LaunchProducts(const char* name, void (*kernel)(HardBackwardArguments),
                           const HardBackwardArguments& a, int64_t heads, int64_t tokens,
                           void* stream) {
  const int64_t tiles = CeilDiv(tokens, kTile) * CeilDiv(a.forward.head_dim, kTile);
  return Launch(name, kernel, {a.forward.batch * heads * tiles, kThreads}, stream, a);
}
const char* LaunchQueryGradients(const HardBackwardArguments& a, void* stream) {
  return LaunchProducts("QueryGradients", &QueryGradients, a, a.forward.query_heads,
                        a.forward.query_tokens, stream);
}
const char* LaunchKeyGradients(const HardBackwardArguments& a, void* stream) {
  return LaunchProducts("KeyGradients", &KeyGradients, a, a.forward.query_heads / a.forward.group,
                        a.forward.kv_tokens, stream);
}
const char* LaunchValueGradients(const HardBackwardArguments& a, void* stream) {
  const HardArguments& f = a.forward;
  return LaunchWarps("ValueGradients", &ValueGradients,
                     f.batch * (f.query_heads / f.group) * f.kv_tokens, stream, a);
}

}  // namespace

TFB_KERNEL_TABLE(HardBackwardKernels, {&LaunchSumRows, &LaunchQueryGradients, &LaunchKeyGradients,
                                       &LaunchValueGradients});

}  // namespace tfb::hard
