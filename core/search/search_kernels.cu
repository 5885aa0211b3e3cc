// Engine search on CUDA. A block has 64 queries of a head and a part of its entries, whose keys it
// streams in tiles of 128: a tiled fp32 product in shared memory and registers. Each score is
// compared with its query's bound in registers, and a score that reaches the bound is appended to
// the query's candidates in global memory. Where these are full, a warp raises the bound and drops
// the candidates below it (Shrink); where too many remain, it scores them in float64 and keeps the
// best (Resolve), as it does at the end. The order in which candidates arrive is arbitrary and has
// no effect: scores and ages alone decide which are kept.
#include <string.h>

#include "core/cuda/register_tile.cuh"
#include "core/cuda/warp.cuh"
#include "core/search/search_kernels.h"

namespace tfb {
namespace {

constexpr int kWarps = kSearchWarps;
constexpr int kThreads = kWarps * kWarp;
constexpr int kQueries = kSearchQueries;
constexpr int kKeys = kSearchKeys;
constexpr int kDepth = 32;  // channels that are staged at once
// A thread has 8 keys x 4 queries of a tile.
constexpr int kThreadKeys = 8;
constexpr int kThreadQueries = 4;
constexpr int kQueryGroups = kQueries / kThreadQueries;
// Rows of staged channels are 16 bytes longer, so that stores of 32 channels go to 8 banks, not to
// one.
constexpr int kKeyStride = kKeys + 4;
constexpr int kQueryStride = kQueries + 4;

__device__ float Lowest() { return __int_as_float(0xff7fffff); }

__device__ int64_t SlotOf(const SearchArguments& a, int64_t age) {
  const int64_t slot = a.oldest + age;
  return slot < a.slots ? slot : slot - a.slots;
}
__device__ int64_t KeyOffset(const SearchArguments& a, int64_t key_head, int64_t slot) {
  return key_head * a.keys.strides[0] + slot * a.keys.strides[1];
}
__device__ int64_t QueryOffset(const SearchArguments& a, int64_t head, int64_t query) {
  return head * a.queries.strides[0] + query * a.queries.strides[1];
}

// ---- Scores in float64 ----

// The exact score of a query and a key by half a warp, of which each lane has one of the sixteen
// sums.
struct ExactScore {
  double score;   // larger is better
  double square;  // of the key
};
__device__ ExactScore ScoreExactly(const SearchArguments& a, int64_t query, int64_t key) {
  const bool distance = a.metric == SearchMetric::kSquaredDistance;
  ExactScore sum = {0, 0};
  for (int64_t c = Lane() % 16; c < a.dim; c += 16) {
    const float x = LoadElement(a.queries.data, a.queries.element, query + c);
    const float y = LoadElement(a.keys.data, a.keys.element, key + c);
    const double difference = x - y;
    sum.score += distance ? -difference * difference : static_cast<double>(x) * y;
    sum.square += static_cast<double>(y) * y;
  }
  return {SumOfLanes<16>(sum.score), SumOfLanes<16>(sum.square)};
}

// ---- Norms of the keys: a warp each ----

__global__ void __launch_bounds__(kThreads) Measure(const SearchArguments a) {
  const int64_t rows = a.key_heads * a.entries;
  for (int64_t n = WarpOfGrid(); n < rows; n += static_cast<int64_t>(gridDim.x) * kWarps) {
    const int64_t head = n / a.entries, slot = SlotOf(a, n % a.entries);
    const int64_t from = KeyOffset(a, head, slot);
    float square = 0;
    for (int64_t c = Lane(); c < a.dim; c += kWarp) {
      const float y = LoadElement(a.keys.data, a.keys.element, from + c);
      square = fmaf(y, y, square);
    }
    square = SumOfWarp(square);
    bool exists = square <= 0.5f * static_cast<float>(kMaxSquaredNorm);
    if (!exists) exists = ScoreExactly(a, 0, from).square <= kMaxSquaredNorm;
    if (Lane() != 0) continue;
    const float half = a.metric == SearchMetric::kSquaredDistance ? square / 2 : 0;
    a.half_norms[head * a.slots + slot] = exists ? half : INFINITY;
    // Bits of non-negative floats have the floats' order.
    if (exists) atomicMax(a.max_squares + head, __float_as_int(square));
  }
}

const char* LaunchMeasure(const SearchArguments& a, void* stream) {
  const int64_t rows = a.key_heads * a.entries;
  return Launch("Measure", &Measure, {BlocksInTurns(CeilDiv(rows, kWarps)), kThreads}, stream, a);
}

// ---- Operations of a warp on the numbers 0, ..., count - 1 of a query ----

template <class Predicate>
__device__ int CountOf(int count, const Predicate& predicate) {
  int sum = 0;
  for (int i = Lane(); i < count; i += kWarp) sum += predicate(i);
  return SumOfWarp(sum);
}

// Returns the largest bound that at least `wanted` keys, of `bits` bits, reach.
template <class Key>
__device__ uint64_t BoundOfLargest(int count, int wanted, int bits, const Key& key) {
  uint64_t bound = 0;
  for (int bit = bits - 1; bit >= 0; --bit) {
    const uint64_t higher = bound | uint64_t{1} << bit;
    if (CountOf(count, [&](int i) { return key(i) >= higher; }) >= wanted) bound = higher;
  }
  return bound;
}

// Map floating-point numbers, which are not NaN, to unsigned integers in the same order, and back.
__device__ uint64_t Ordered(float x) {
  const unsigned bits = __float_as_uint(x);
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}
__device__ float FromOrdered(uint64_t order) {
  const auto bits = static_cast<unsigned>(order);
  return __uint_as_float((bits & 0x80000000u) != 0 ? bits & 0x7fffffffu : ~bits);
}
__device__ uint64_t Ordered(double x) {
  uint64_t bits;
  const double number = x + 0.0;  // -0 becomes 0
  memcpy(&bits, &number, sizeof(bits));
  return bits >> 63 != 0 ? ~bits : bits | uint64_t{1} << 63;
}

// ---- The candidates of a block's queries ----

struct Block {
  // Numbers of the queries, in shared memory.
  double norms[kQueries];  // infinite where there is none
  double lower[kQueries];  // a score that at least `hits` candidates reach
  float bounds[kQueries];  // the score that a candidate must reach
  int counts[kQueries];
  // Keys and queries, channel by channel.
  alignas(16) float keys[kDepth * kKeyStride];
  alignas(16) float queries[kDepth * kQueryStride];
  float half_norms[kKeys];
  int64_t keys_from[kKeys];
};

struct Task {
  int64_t head;
  int64_t key_head;
  int64_t first_query;
  int64_t queries;
  int64_t part;
  double max_norm;  // of the keys
};

__device__ double ErrorOf(const SearchArguments& a, const Task& task, double query_norm) {
  const double norms = query_norm + task.max_norm;
  return a.score_error * norms * norms + kTinyScoreError;
}
__device__ float BoundOf(const SearchArguments& a, const Task& task, double query_norm,
                         double lower) {
  if (!(query_norm < INFINITY)) return INFINITY;
  const double bound = lower - ErrorOf(a, task, query_norm);
  return bound > Lowest() ? static_cast<float>(bound) : Lowest();
}

// The candidates of one query, for a warp.
struct Candidates {
  float* scores;
  int32_t* ages;
  double* exact;  // null while they have not been scored in float64
};
__device__ Candidates CandidatesOf(const SearchArguments& a, int query) {
  const int64_t from = (static_cast<int64_t>(blockIdx.x) * kQueries + query) * a.capacity;
  return {a.candidate_scores + from, a.candidate_ages + from,
          a.exact + (static_cast<int64_t>(blockIdx.x) * kWarps + Warp()) * a.capacity};
}

// Keeps the candidates for which keep(i) is true, in their order; returns how many.
template <class Keep>
__device__ int Compress(const Candidates& c, int count, const Keep& keep) {
  int kept = 0;
  for (int first = 0; first < count; first += kWarp) {
    const int i = first + Lane();
    const bool mine = i < count && keep(i);
    float score = 0;
    int32_t age = 0;
    double exact = 0;
    if (mine) {
      score = c.scores[i];
      age = c.ages[i];
      if (c.exact != nullptr) exact = c.exact[i];
    }
    const unsigned all = __ballot_sync(~0u, mine);
    __syncwarp();  // all lanes have read what is overwritten now; a vote alone orders no memory
    if (mine) {
      const int to = kept + __popc(all & ((1u << Lane()) - 1));
      c.scores[to] = score;
      c.ages[to] = age;
      if (c.exact != nullptr) c.exact[to] = exact;
    }
    kept += __popc(all);
    __syncwarp();
  }
  return kept;
}

// Raises the lower bound. Lane 0 calls it.
__device__ void RaiseLower(const SearchArguments& a, const Task& task, Block& block, int q,
                           double lower, int count) {
  __syncwarp();
  if (Lane() == 0) {
    if (lower > block.lower[q]) {
      block.lower[q] = lower;
      block.bounds[q] = BoundOf(a, task, block.norms[q], lower);
    }
    block.counts[q] = count;
  }
  __syncwarp();
}

// Drops candidates that `hits` others are certainly better than.
__device__ void Shrink(const SearchArguments& a, const Task& task, Block& block, int q) {
  Candidates c = CandidatesOf(a, q);
  c.exact = nullptr;
  const int count = block.counts[q];
  const float best = FromOrdered(BoundOfLargest(count, static_cast<int>(a.hits), 32,
                                                [&](int i) { return Ordered(c.scores[i]); }));
  RaiseLower(a, task, block, q, best - ErrorOf(a, task, block.norms[q]), count);
  const float bound = block.bounds[q];
  const int kept = Compress(c, count, [&](int i) { return c.scores[i] >= bound; });
  RaiseLower(a, task, block, q, block.lower[q], kept);
}

// Scores the candidates in float64, in c.exact, and keeps the best.
__device__ void Resolve(const SearchArguments& a, const Task& task, Block& block, int q) {
  const Candidates c = CandidatesOf(a, q);
  const int count = block.counts[q], hits = static_cast<int>(a.hits);
  const int64_t query = QueryOffset(a, task.head, task.first_query + q);
  __syncwarp();  // all lanes have read the warp's last query in c.exact
  for (int first = 0; first < count; first += 2) {
    const int i = first + Lane() / 16;
    const int64_t slot = SlotOf(a, c.ages[i < count ? i : first]);
    const double score = ScoreExactly(a, query, KeyOffset(a, task.key_head, slot)).score;
    if (i < count && Lane() % 16 == 0) c.exact[i] = score;
  }
  __syncwarp();
  if (count <= hits) return;
  const auto order = [&](int i) { return Ordered(c.exact[i]); };
  const uint64_t worst = BoundOfLargest(count, hits, 64, order);
  const int better = CountOf(count, [&](int i) { return order(i) > worst; });
  // Among those that equal the worst, the oldest are kept.
  const auto youth = [&](int i) {
    return order(i) == worst ? uint64_t{0xffffffff} - static_cast<uint64_t>(c.ages[i]) : 0;
  };
  const uint64_t youngest = BoundOfLargest(count, hits - better, 32, youth);
  const int kept = Compress(c, count, [&](int i) {
    return order(i) > worst || (order(i) == worst && youth(i) >= youngest);
  });
  const double square = block.norms[q] * block.norms[q];
  float least = INFINITY;
  for (int i = Lane(); i < kept; i += kWarp) {
    const bool distance = a.metric == SearchMetric::kSquaredDistance;
    c.scores[i] = static_cast<float>(distance ? (square + c.exact[i]) / 2 : c.exact[i]);
    least = c.scores[i] < least ? c.scores[i] : least;
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    const float other = __shfl_xor_sync(~0u, least, step);
    least = other < least ? other : least;
  }
  RaiseLower(a, task, block, q, least, kept);
}

__device__ void Finish(const SearchArguments& a, const Task& task, Block& block, int q) {
  if (block.counts[q] > a.hits) Shrink(a, task, block, q);
  Resolve(a, task, block, q);
  const Candidates c = CandidatesOf(a, q);
  const int64_t row = task.head * a.query_count + task.first_query + q;
  SearchHit* found = a.found + (row * a.parts + task.part) * a.hits;
  for (int i = Lane(); i < a.hits; i += kWarp) {
    const bool exists = i < block.counts[q];
    found[i].score = exists ? c.exact[i] : -INFINITY;
    found[i].age = exists ? c.ages[i] : -1;
  }
}

// ---- Tiles ----

// Returns the age of entry n of a part; -1 beyond the last.
__device__ int64_t AgeOf(const SearchArguments& a, const Task& task, int64_t n) {
  if (!a.bucketed) {
    const int64_t age = a.entries * task.part / a.parts + n;
    return age < a.entries * (task.part + 1) / a.parts ? age : -1;
  }
  const int64_t slot = task.part + n * a.parts;
  if (slot >= a.slots) return -1;
  // Slots that are not in use have no age; they may lie between those that are.
  const int64_t age = slot - a.oldest;
  return age < 0 ? age + a.slots : age;
}
__device__ int64_t EntriesOf(const SearchArguments& a, const Task& task) {
  if (a.bucketed) return task.part < a.slots ? (a.slots - task.part - 1) / a.parts + 1 : 0;
  return a.entries * (task.part + 1) / a.parts - a.entries * task.part / a.parts;
}

// Finds the tile's keys, and what to subtract from their products.
__device__ void FindKeys(const SearchArguments& a, const Task& task, int64_t first, Block& block) {
  for (int i = static_cast<int>(threadIdx.x); i < kKeys; i += kThreads) {
    const int64_t age = AgeOf(a, task, first + i);
    const bool exists = age >= 0 && age < a.entries;
    const int64_t slot = exists ? SlotOf(a, age) : 0;
    block.keys_from[i] = exists ? KeyOffset(a, task.key_head, slot) : -1;
    block.half_norms[i] = exists ? a.half_norms[task.key_head * a.slots + slot] : INFINITY;
  }
}

// Stages channels first, ..., first + 31 of a tile's keys and of the queries; zeros beyond the
// last.
__device__ void Stage(const SearchArguments& a, const Task& task, int64_t first, Block& block) {
  const int c = Lane();
  const bool channel = first + c < a.dim;
  for (int i = Warp(); i < kKeys; i += kWarps) {
    const int64_t from = block.keys_from[i];
    block.keys[c * kKeyStride + i] =
        channel && from >= 0 ? LoadElement(a.keys.data, a.keys.element, from + first + c) : 0;
  }
  for (int i = Warp(); i < kQueries; i += kWarps) {
    const int64_t from = QueryOffset(a, task.head, task.first_query + i);
    block.queries[c * kQueryStride + i] =
        channel && i < task.queries
            ? LoadElement(a.queries.data, a.queries.element, from + first + c)
            : 0;
  }
}

// Searches the part's entries first, ..., first + 127. All candidate lists have room for so many.
__device__ void SearchTile(const SearchArguments& a, const Task& task, int64_t first,
                           Block& block) {
  const int key = static_cast<int>(threadIdx.x) / kQueryGroups * kThreadKeys;
  const int query = static_cast<int>(threadIdx.x) % kQueryGroups * kThreadQueries;
  float sum[kThreadKeys][kThreadQueries] = {};
  FindKeys(a, task, first, block);
  for (int64_t c = 0; c < a.dim; c += kDepth) {
    __syncthreads();
    Stage(a, task, c, block);
    __syncthreads();
    AddProduct<2>({block.keys + key, kKeyStride}, {block.queries + query, kQueryStride}, kDepth,
                  sum);
  }
  __syncthreads();  // for keys without channels: the keys have been found
#pragma unroll
  for (int j = 0; j < kThreadQueries; ++j) {
    const float bound = block.bounds[query + j];
    const Candidates c = CandidatesOf(a, query + j);
#pragma unroll
    for (int i = 0; i < kThreadKeys; ++i) {
      const float score = sum[i][j] - block.half_norms[key + i];
      if (!(score >= bound)) continue;
      const int place = atomicAdd(block.counts + query + j, 1);
      c.scores[place] = score;
      c.ages[place] = static_cast<int32_t>(AgeOf(a, task, first + key + i));
    }
  }
  __syncthreads();
}

__device__ Task TaskOf(const SearchArguments& a, int64_t n) {
  const int64_t tiles = CeilDiv(a.query_count, kQueries);
  Task task = {};
  task.part = n % a.parts;
  task.first_query = n / a.parts % tiles * kQueries;
  task.queries = min(a.query_count - task.first_query, int64_t{kQueries});
  task.head = n / a.parts / tiles;
  task.key_head = task.head / (a.heads / a.key_heads);
  // An fp32 sum of dim squares has a relative error of at most dim 2^-24.
  const double square = __int_as_float(a.max_squares[task.key_head]);
  task.max_norm = sqrt(square * (1 + static_cast<double>(a.dim + 1) * 0x1p-23));
  return task;
}

// Begins a task. Each warp does some queries.
__device__ void Begin(const SearchArguments& a, const Task& task, Block& block) {
  for (int q = Warp(); q < kQueries; q += kWarps) {
    const bool exists = q < task.queries;
    const int64_t from = QueryOffset(a, task.head, task.first_query + (exists ? q : 0));
    double square = 0;
    for (int64_t c = Lane() % 16; c < a.dim; c += 16) {
      const double x = LoadElement(a.queries.data, a.queries.element, from + c);
      square += x * x;
    }
    square = SumOfLanes<16>(square);
    if (Lane() != 0) continue;
    block.norms[q] = exists && square <= kMaxSquaredNorm ? sqrt(square) : INFINITY;
    block.lower[q] = -INFINITY;
    block.bounds[q] = BoundOf(a, task, block.norms[q], -INFINITY);
    block.counts[q] = 0;
  }
  __syncthreads();
}

__global__ void __launch_bounds__(kThreads) SearchParts(const SearchArguments a) {
  __shared__ Block block;
  const int64_t tasks = a.heads * CeilDiv(a.query_count, kQueries) * a.parts;
  for (int64_t n = blockIdx.x; n < tasks; n += gridDim.x) {
    const Task task = TaskOf(a, n);
    const int64_t entries = EntriesOf(a, task);
    Begin(a, task, block);
    for (int64_t first = 0; first < entries; first += kKeys) {
      for (int q = Warp(); q < task.queries; q += kWarps) {
        if (block.counts[q] + kKeys <= a.capacity) continue;
        Shrink(a, task, block, q);
        if (block.counts[q] + 2 * kKeys > a.capacity) Resolve(a, task, block, q);
      }
      __syncthreads();
      SearchTile(a, task, first, block);
    }
    for (int q = Warp(); q < task.queries; q += kWarps) Finish(a, task, block, q);
    __syncthreads();
  }
}

const char* LaunchSearch(const SearchArguments& a, void* stream) {
  return Launch("SearchParts", &SearchParts, {BlocksInTurns(a.blocks), kThreads}, stream, a);
}

// ---- Results: a block a query ----

__device__ void Exchange(SearchHit& a, SearchHit& b) {
  const double score = a.score;
  const int32_t age = a.age;
  a.score = b.score;
  a.age = b.age;
  b.score = score;
  b.age = age;
}

__device__ bool Before(const SearchHit& a, const SearchHit& b) {
  return a.score > b.score || (a.score == b.score && a.age < b.age);
}

// Sorts bitonically with all exchanges in one direction, so that the entries missing to a power of
// two count as last and are never accessed.
__device__ void Sort(SearchHit* hits, int64_t count) {
  const auto exchange = [&](int64_t distance_mask) {
    for (int64_t i = threadIdx.x; i < count; i += kThreads) {
      const int64_t other = i ^ distance_mask;
      if (other > i && other < count && Before(hits[other], hits[i])) {
        Exchange(hits[i], hits[other]);
      }
    }
    __syncthreads();
  };
  for (int64_t size = 2; size < 2 * count; size *= 2) {
    exchange(size - 1);
    for (int64_t stride = size / 4; stride > 0; stride /= 2) exchange(stride);
  }
}

__global__ void __launch_bounds__(kThreads) Merge(const SearchArguments a) {
  const int64_t count = a.parts * a.hits;
  const bool distance = a.metric == SearchMetric::kSquaredDistance;
  for (int64_t row = blockIdx.x; row < a.heads * a.query_count; row += gridDim.x) {
    SearchHit* hits = a.found + row * count;
    Sort(hits, count);
    for (int64_t n = threadIdx.x; n < a.k; n += kThreads) {
      const bool exists = n < count && hits[n].age >= 0;
      const double score = exists ? hits[n].score : -INFINITY;
      a.result_slots[row * a.k + n] = exists ? static_cast<int32_t>(SlotOf(a, hits[n].age)) : -1;
      a.result_scores[row * a.k + n] = static_cast<float>(distance ? -score : score);
    }
    __syncthreads();
  }
}

const char* LaunchMerge(const SearchArguments& a, void* stream) {
  return Launch("Merge", &Merge, {BlocksInTurns(a.heads * a.query_count), kThreads}, stream, a);
}

}  // namespace

TFB_KERNEL_TABLE(SearchKernels, {&LaunchMeasure, &LaunchSearch, &LaunchMerge});

}  // namespace tfb
