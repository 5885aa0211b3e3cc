#include "core/cuda/warp.cuh"
#include "core/gather/gather_kernels.h"

namespace tfb {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;

// Returns the offset of row n of a tensor's first three dimensions.
__device__ int64_t RowOffset(const DeviceView& view, int64_t heads, int64_t tokens, int64_t n) {
  return Offset(view, n / tokens / heads, n / tokens % heads, n % tokens);
}

// ---- Normalised rows: a warp each ----

// A row and what its numbers are made of: y_c = (x_c - mean) factor.
class NormalizedRow {
 public:
  __device__ NormalizedRow(const NormalizeArguments& a, int64_t n)
      : x_(a.x), from_(RowOffset(a.x, a.heads, a.tokens, n)) {
    if (a.centered) mean_ = Sum(a, [&](int c) { return At(c); }) / a.channels;
    double squares = Sum(a, [&](int c) { return (At(c) - mean_) * (At(c) - mean_); });
    if (a.mean_square) squares /= a.channels;
    const double root = sqrt(squares + a.epsilon);
    factor_ = root == 0 ? 0 : 1 / root;
  }
  __device__ double factor() const { return factor_; }
  __device__ double operator()(int c) const { return (At(c) - mean_) * factor_; }

  // Returns the sum of term(c) over all channels, for all lanes.
  template <class Term>
  __device__ static double Sum(const NormalizeArguments& a, const Term& term) {
    double sum = 0;
    for (int c = Lane(); c < a.channels; c += kWarp) sum += term(c);
    return SumOfWarp(sum);
  }

 private:
  __device__ double At(int c) const {
    return static_cast<double>(LoadElement(x_.data, x_.element, from_ + c * x_.strides[3]));
  }

  const DeviceView& x_;
  const int64_t from_;
  double mean_ = 0;
  double factor_;
};

// Calls body(n) for the rows that a warp has.
template <class Body>
__device__ void ForEachRow(const NormalizeArguments& a, const Body& body) {
  const int64_t rows = a.batch * a.heads * a.tokens;
  for (int64_t n = static_cast<int64_t>(blockIdx.x) * kWarps + Warp(); n < rows;
       n += static_cast<int64_t>(gridDim.x) * kWarps) {
    body(n);
  }
}

__global__ void __launch_bounds__(kThreads) Normalize(const NormalizeArguments a) {
  ForEachRow(a, [&](int64_t n) {
    const NormalizedRow y(a, n);
    const int64_t to = RowOffset(a.y, a.heads, a.tokens, n);
    for (int c = Lane(); c < a.channels; c += kWarp) {
      StoreElement(a.y.data, a.y.element, to + c * a.y.strides[3], static_cast<float>(y(c)));
    }
  });
}

__global__ void __launch_bounds__(kThreads) NormalizeGradient(const NormalizeGradientArguments g) {
  const NormalizeArguments& a = g.forward;
  ForEachRow(a, [&](int64_t n) {
    const float* u = static_cast<const float*>(a.y.data) + RowOffset(a.y, a.heads, a.tokens, n);
    const auto of_y = [&](int c) { return static_cast<double>(u[c * a.y.strides[3]]); };
    bool any = false;
    for (int c = Lane(); c < a.channels; c += kWarp) any = any || of_y(c) != 0;
    if (!__any_sync(kAllLanes, any)) return;  // whatever x holds
    const NormalizedRow y(a, n);
    double along = NormalizedRow::Sum(a, [&](int c) { return of_y(c) * y(c); });
    if (a.mean_square) along /= a.channels;
    const auto w = [&](int c) { return of_y(c) - along * y(c); };
    const double mean = a.centered ? NormalizedRow::Sum(a, w) / a.channels : 0;
    const DeviceView& x = g.x_gradient;
    float* to = static_cast<float*>(x.data) + RowOffset(x, a.heads, a.tokens, n);
    for (int c = Lane(); c < a.channels; c += kWarp) {
      to[c * x.strides[3]] += static_cast<float>((w(c) - mean) * y.factor());
    }
  });
}

int64_t BlocksOfRows(const NormalizeArguments& a) {
  return BlocksInTurns(CeilDiv(a.batch * a.heads * a.tokens, kWarps));
}
const char* LaunchNormalize(const NormalizeArguments& a, void* stream) {
  return Launch("Normalize", &Normalize, {BlocksOfRows(a), kThreads}, stream, a);
}
const char* LaunchNormalizeGradient(const NormalizeGradientArguments& g, void* stream) {
  return Launch("NormalizeGradient", &NormalizeGradient, {BlocksOfRows(g.forward), kThreads},
                stream, g);
}

// ---- Angular hashing ----
//
// A block hashes 64 tokens of a head; a thread has one token and every fourth of a factor's
// columns, and the four threads of a token then agree. Vectors lie in shared memory by channel, so
// that neighbouring threads read neighbouring words; a rotation's element is the same for a warp.

constexpr int kHashTokens = 64;
constexpr int kHashTeams = kThreads / kHashTokens;

// Copies the vectors of 64 tokens of a head to shared memory, by channel, with zeros beyond the
// last token.
__device__ void LoadTokens(const DeviceView& view, int64_t heads, int64_t tokens, int64_t head,
                           int64_t first, int head_dim, float* x) {
  const int slot = static_cast<int>(threadIdx.x) % kHashTokens;
  const bool exists = first + slot < tokens;
  const int64_t from = RowOffset(view, heads, tokens, head * tokens + (exists ? first + slot : 0));
  for (int c = static_cast<int>(threadIdx.x) / kHashTokens; c < head_dim; c += kHashTeams) {
    x[c * kHashTokens + slot] =
        exists ? LoadElement(view.data, view.element, from + c * view.strides[3]) : 0;
  }
}

// A number with its index; the larger number is better, and of equal ones that of the lower index.
struct Best {
  float value;
  int index;
  __device__ void Take(float other, int at) {
    if (other > value || (other == value && at < index)) {
      value = other;
      index = at;
    }
  }
};

__global__ void __launch_bounds__(kThreads) Hash(const HashArguments a) {
  float* x = reinterpret_cast<float*>(DynamicShared());                 // [head_dim][64]
  Best* bests = reinterpret_cast<Best*>(x + a.head_dim * kHashTokens);  // [teams][64]
  const int slot = static_cast<int>(threadIdx.x) % kHashTokens;
  const int team = static_cast<int>(threadIdx.x) / kHashTokens;
  const int64_t tiles = CeilDiv(a.tokens, kHashTokens);
  const int64_t tasks = a.batch * a.heads * tiles;
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const int64_t row = task / tiles, token = task % tiles * kHashTokens + slot;
    const bool exists = token < a.tokens;
    const float* rotations = a.rotations + row % a.heads * a.head_stride;
    LoadTokens(a.x, a.heads, a.tokens, row, task % tiles * kHashTokens, a.head_dim, x);
    __syncthreads();
    for (int64_t round = 0; round < a.rounds; ++round) {
      int bucket = 0, step = 1, first = 0;
      for (int f = 0; f < a.factor_count; ++f) {
        const int columns = a.factors[f];
        Best best = {-INFINITY, 0x7fffffff};
        for (int n = team; n < columns; n += kHashTeams) {
          const float* rotation = rotations + (round * a.columns + first + n) * a.head_dim;
          float sum = 0;
          for (int c = 0; c < a.head_dim; ++c) {
            sum = fmaf(rotation[c], x[c * kHashTokens + slot], sum);
          }
          best.Take(sum, n);
          best.Take(-sum, columns + n);
        }
        bests[team * kHashTokens + slot] = best;
        __syncthreads();
        for (int t = 0; t < kHashTeams; ++t) {
          const Best& other = bests[t * kHashTokens + slot];
          best.Take(other.value, other.index);
        }
        __syncthreads();
        bucket += step * (best.index == 0x7fffffff ? 0 : best.index);
        step *= columns * 2;
        first += columns;
      }
      if (team == 0 && exists) {
        a.buckets[(row * a.rounds + round) * a.tokens + token] = bucket;
      }
    }
  }
}

const char* LaunchHash(const HashArguments& a, void* stream) {
  const int64_t tiles = CeilDiv(a.tokens, kHashTokens);
  const size_t shared =
      static_cast<size_t>(a.head_dim) * kHashTokens * sizeof(float) + kThreads * sizeof(Best);
  return Launch("Hash", &Hash, {BlocksInTurns(a.batch * a.heads * tiles), kThreads, shared}, stream,
                a);
}

// ---- Scores against vectors. A block has 64 tokens of a head; a thread has a token and every
// fourth vector.

__global__ void __launch_bounds__(kThreads) Score(const VectorScoreArguments a) {
  float* x = reinterpret_cast<float*>(DynamicShared());  // [head_dim][64]
  const int slot = static_cast<int>(threadIdx.x) % kHashTokens;
  const int64_t tiles = CeilDiv(a.tokens, kHashTokens);
  const int64_t tasks = a.batch * a.heads * tiles;
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const int64_t head = task / tiles, token = task % tiles * kHashTokens + slot;
    LoadTokens(a.x, a.heads, a.tokens, head, task % tiles * kHashTokens, a.head_dim, x);
    __syncthreads();
    const bool hidden =
        token < a.tokens && a.key_mask != nullptr &&
        a.key_mask[head / a.heads * a.key_mask_strides[0] + token * a.key_mask_strides[1]] == 0;
    for (int64_t n = static_cast<int>(threadIdx.x) / kHashTokens; n < a.count; n += kHashTeams) {
      const float* vector = a.vectors + (head % a.heads * a.count + n) * a.head_dim;
      float sum = 0;
      for (int c = 0; c < a.head_dim; ++c) sum = fmaf(vector[c], x[c * kHashTokens + slot], sum);
      if (token >= a.tokens) continue;
      a.scores[(head * a.count + n) * a.stride + token] = hidden ? -INFINITY : sum;
    }
    __syncthreads();
  }
}

const char* LaunchScore(const VectorScoreArguments& a, void* stream) {
  const int64_t tiles = CeilDiv(a.tokens, kHashTokens);
  const size_t shared = static_cast<size_t>(a.head_dim) * kHashTokens * sizeof(float);
  return Launch("Score", &Score, {BlocksInTurns(a.batch * a.heads * tiles), kThreads, shared},
                stream, a);
}

// ---- Sorting: a block a row ----
//
// A block first counts the tokens of each key and computes where each key begins. Then it goes tile
// by tile: a token's place is its key's next free place plus the number of tokens of that key
// before it in the tile.

// Returns the sum of the x of all threads before this one; *total becomes the sum over all threads.
__device__ int ExclusiveSum(int x, int* of_warps, int* total) {
  const int sum = RunningSum(x);
  if (Lane() == kWarp - 1) of_warps[Warp()] = sum;
  __syncthreads();
  int before = 0, all = 0;
  for (int w = 0; w < kWarps; ++w) {
    if (w < Warp()) before += of_warps[w];
    all += of_warps[w];
  }
  __syncthreads();
  *total = all;
  return before + sum - x;
}

__global__ void __launch_bounds__(kThreads) Sort(const SortArguments a) {
  __shared__ int of_warps[kWarps];
  __shared__ int32_t tile[kThreads];
  const int t = static_cast<int>(threadIdx.x);
  for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
    const int32_t* keys = a.keys + row * a.tokens;
    int32_t* counts = a.counts + row * a.key_count;
    for (int64_t k = t; k < a.key_count; k += kThreads) counts[k] = 0;
    __syncthreads();
    for (int64_t n = t; n < a.tokens; n += kThreads) atomicAdd(counts + keys[n], 1);
    __syncthreads();
    int begin = 0;
    for (int64_t first = 0; first < a.key_count; first += kThreads) {
      const int64_t k = first + t;
      int total;
      const int before = ExclusiveSum(k < a.key_count ? counts[k] : 0, of_warps, &total);
      if (k < a.key_count) counts[k] = begin + before;
      begin += total;
    }
    __syncthreads();
    for (int64_t first = 0; first < a.tokens; first += kThreads) {
      const int64_t n = first + t;
      const int in_tile = static_cast<int>(min(a.tokens - first, int64_t{kThreads}));
      const int32_t key = t < in_tile ? keys[n] : 0;
      tile[t] = key;
      __syncthreads();
      int rank = 0, later = 0;
      for (int other = 0; other < in_tile; ++other) {
        const bool same = tile[other] == key;
        rank += same && other < t;
        later += same && other > t;
      }
      int place = 0;
      if (t < in_tile) {
        place = counts[key] + rank;
        a.order[row * a.order_stride + place] = static_cast<int32_t>(n);
        if (a.places != nullptr) a.places[row * a.tokens + n] = place;
      }
      __syncthreads();  // counts have been read
      if (t < in_tile && later == 0) counts[key] = place + 1;
      __syncthreads();
    }
  }
}

const char* LaunchSort(const SortArguments& a, void* stream) {
  return Launch("Sort", &Sort, {BlocksInTurns(a.rows), kThreads}, stream, a);
}

// ---- The largest: a block a row ----
//
// Radix selection of the count-th largest, 8 bits at a time from the top, then one pass that keeps
// the larger scores, and of those that equal it the first.

// Maps floats to unsigned numbers in the same order; NaN map below all others.
__device__ unsigned Ordered(float x) {
  if (isnan(x)) return 0;
  const unsigned bits = static_cast<unsigned>(__float_as_int(x + 0.0f));  // -0 becomes 0
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

__global__ void __launch_bounds__(kThreads) Largest(const LargestArguments a) {
  __shared__ int of_warps[kWarps];
  __shared__ int histogram[256];
  __shared__ unsigned shared_prefix;
  __shared__ int64_t shared_wanted;
  const int t = static_cast<int>(threadIdx.x);
  for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
    const float* scores = a.scores + row * a.stride;
    unsigned prefix = 0;       // the known leading bits of the count-th largest
    int64_t wanted = a.count;  // how many are wanted of the scores that begin with `prefix`
    for (int shift = 24; shift >= 0; shift -= 8) {
      histogram[t] = 0;
      __syncthreads();
      for (int64_t n = t; n < a.tokens; n += kThreads) {
        const unsigned key = Ordered(scores[n]);
        const bool candidate = shift == 24 || key >> (shift + 8) == prefix >> (shift + 8);
        if (candidate) atomicAdd(histogram + (key >> shift & 255), 1);
      }
      __syncthreads();
      if (t == 0) {
        int digit = 255;
        while (digit > 0 && histogram[digit] < wanted) wanted -= histogram[digit--];
        shared_prefix = prefix | static_cast<unsigned>(digit) << shift;
        shared_wanted = wanted;
      }
      __syncthreads();
      prefix = shared_prefix;
      wanted = shared_wanted;
    }
    int64_t kept = 0, equals = 0;
    for (int64_t first = 0; first < a.tokens; first += kThreads) {
      const int64_t n = first + t;
      const unsigned key = n < a.tokens ? Ordered(scores[n]) : 0;
      const bool equal = n < a.tokens && key == prefix;
      int total;
      const int64_t rank = equals + ExclusiveSum(equal, of_warps, &total);
      equals += total;
      const bool keep = (n < a.tokens && key > prefix) || (equal && rank < wanted);
      const int64_t place = kept + ExclusiveSum(keep, of_warps, &total);
      kept += total;
      if (keep) a.members[row * a.count + place] = static_cast<int32_t>(n);
    }
    __syncthreads();
  }
}

const char* LaunchLargest(const LargestArguments& a, void* stream) {
  if (a.count == 0) return nullptr;
  return Launch("Largest", &Largest, {BlocksInTurns(a.rows), kThreads}, stream, a);
}

// ---- Means over groups: a warp a token ----

// Returns the place of `token` among the ascending members, or -1 where it is none of them.
__device__ int64_t Find(const int32_t* members, int64_t size, int64_t token) {
  int64_t begin = 0, end = size;
  while (begin < end) {
    const int64_t middle = (begin + end) / 2;
    if (members[middle] < token) {
      begin = middle + 1;
    } else {
      end = middle;
    }
  }
  return begin < size && members[begin] == token ? begin : -1;
}

__global__ void __launch_bounds__(kThreads) GroupMean(const GroupMeanArguments a) {
  const int64_t tokens = a.batch * a.heads * a.tokens;
  for (int64_t n = static_cast<int64_t>(blockIdx.x) * kWarps + Warp(); n < tokens;
       n += static_cast<int64_t>(gridDim.x) * kWarps) {
    const int64_t head = n / a.tokens, token = n % a.tokens;
    const int32_t* members = a.members + head * a.groups * a.size;
    const int64_t from = head / a.heads * a.rows.strides[0] + head % a.heads * a.rows.strides[1];
    // A warp searches 32 groups at once; their rows are added in order. The first round of channels
    // counts the groups.
    const int64_t to = RowOffset(a.out, a.heads, a.tokens, n);
    for (int first = 0; first < a.channels; first += kWarp) {
      const int c = first + Lane();
      float sum = 0;
      int count = 0;
      for (int64_t g = 0; g < a.groups; g += kWarp) {
        const int64_t group = g + Lane();
        const int64_t found = group < a.groups ? Find(members + group * a.size, a.size, token) : -1;
        for (unsigned left = __ballot_sync(~0u, found >= 0); left != 0; left &= left - 1) {
          const int source = __ffs(static_cast<int>(left)) - 1;
          const int64_t place =
              (g + source) * a.size + __shfl_sync(~0u, static_cast<int>(found), source);
          if (c < a.channels) {
            sum += LoadElement(a.rows.data, a.rows.element,
                               from + place * a.rows.strides[2] + c * a.rows.strides[3]);
          }
          ++count;
        }
      }
      if (c < a.channels) {
        StoreElement(a.out.data, a.out.element, to + c * a.out.strides[3],
                     count == 0 ? 0 : sum / static_cast<float>(count));
      }
    }
  }
}

const char* LaunchGroupMean(const GroupMeanArguments& a, void* stream) {
  const int64_t tokens = a.batch * a.heads * a.tokens;
  return Launch("GroupMean", &GroupMean, {BlocksInTurns(CeilDiv(tokens, kWarps)), kThreads}, stream,
                a);
}

// A warp has a place, whose token may be in other groups, too.
__global__ void __launch_bounds__(kThreads) GroupGradient(const GroupGradientArguments g) {
  const GroupMeanArguments& a = g.forward;
  const int64_t places = a.groups * a.size, rows = a.batch * a.heads * places;
  for (int64_t n = static_cast<int64_t>(blockIdx.x) * kWarps + Warp(); n < rows;
       n += static_cast<int64_t>(gridDim.x) * kWarps) {
    const int64_t head = n / places, place = n % places, b = head / a.heads, h = head % a.heads;
    const int32_t* members = a.members + head * places;
    const int64_t token = members[place];
    int count = 0;
    for (int64_t group = Lane(); group < a.groups; group += kWarp) {
      count += Find(members + group * a.size, a.size, token) >= 0 ? 1 : 0;
    }
    const float share = 1 / static_cast<float>(SumOfWarp(count));
    const int64_t from = b * a.out.strides[0] + h * a.out.strides[1] + token * a.out.strides[2];
    float* to = static_cast<float*>(a.rows.data) + b * a.rows.strides[0] + h * a.rows.strides[1] +
                place * a.rows.strides[2];
    for (int c = Lane(); c < a.channels; c += kWarp) {
      to[c * a.rows.strides[3]] +=
          share * LoadElement(a.out.data, a.out.element, from + c * a.out.strides[3]);
    }
  }
}

const char* LaunchGroupGradient(const GroupGradientArguments& g, void* stream) {
  const GroupMeanArguments& a = g.forward;
  const int64_t places = a.batch * a.heads * a.groups * a.size;
  return Launch("GroupGradient", &GroupGradient, {BlocksInTurns(CeilDiv(places, kWarps)), kThreads},
                stream, g);
}

}  // namespace

TFB_KERNEL_TABLE(GatherKernels,
                 {&LaunchNormalize, &LaunchHash, &LaunchScore, &LaunchSort, &LaunchLargest,
                  &LaunchGroupMean, &LaunchNormalizeGradient, &LaunchGroupGradient});

}  // namespace tfb
