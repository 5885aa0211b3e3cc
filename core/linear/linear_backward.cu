// Engine linear's backward pass on the GPU's FMA units: sums in fp32, whatever the dtypes of tensors.
// linear_gradient.h has the formulas.
//
// Every sum has one owner that adds in a fixed order, so that the bits are the same in every run. A
// block has a chunk of 64 keys or of 64 queries of a head; steps over tokens, chunks and heads are
// functors (linear_backward_steps.h):
//
//   features         F and E of each token                                           r D
//   functors         the maxima before each chunk, where causal of each key
//   key_sums         sums over the keys of each chunk, 64 features by 64 columns     m V
//   functor          sums over the keys before each chunk, an element by a thread
//   rows             D_i, dN_i, dZ_i; where causal, a_ij and t_ij                    64 (m + V)
//   functors         the least R_i after each chunk
//   query_sums       sums over the queries of each chunk                             m V
//   functor          sums over the queries after each chunk
//   query_gradients  of projections                                                  m (V + 64)
//   key_gradients    of projections, and of values                                   2 m V + 64 (m + V)
//   functors         the running maxima's gradients and the gates'
//   inputs           of queries and keys                                             r D
//   matrix           parts of W's, 8 chunks each                                     r D
//   functors         the sums of the parts
//
// On the right are multiply-adds of a token, for m features, r rows of W, D = head_dim and V =
// value_dim + 1; those with 64 are pairs of the chunk, where causal. For r = m = 256 and D = 64 a query
// and a key take 6 x 16 K multiply-adds with inputs and W, 5 x 16.6 K with sums and, where causal, 3 x
// 20.5 K at most with pairs.
//
// Features, gradients, sums and pairs lie in the workspace, whose size is linear in tokens: for a
// chunk and head some 64 (m + r + D) + m V floats of keys, as much of queries, and 64 V of dN and,
// where causal, 64 x 128 of pairs.
//
// Keys and queries that are not finite. A row of queries that is not, in itself or in what it sees,
// has dN = 0, dZ = 0 and factors NaN, which reach the keys that it sees; features that are contracted
// over are 0 where they are not finite. So nothing reaches a token by a product with a weight of 0.
//
// A block of 256 threads multiplies tiles of 64 x 64, 4 x 4 by a thread. Shared memory: two operands
// of 64 x 68 x 4 B, 34 KiB. Registers, with nvcc 13.0 for sm_80, sm_89 and sm_90a, none of them
// spilled, and the blocks of a multiprocessor that they admit:
//
//   key_sums                               64         4
//   query_sums, matrix, inputs, features   70 to 80   3, of features 2 on sm_89 with 84
//   query_gradients, key_gradients, rows   101 to 115 2
//
// features has a stack of 32 B besides, for the arguments of sines far from 0.
//
// Rate. Products of tiles 64 deep take 1,280 instructions of sm_90a a thread, of which 1,024 are
// multiply-adds and 128 loads of 16 B, 3 passes over the banks against 4 cycles of the FMA units;
// loading the operands, an element at a time from tensors of any stride, took 740 (pairs) to 1,600
// (values, W) before four of them were stored at once. So 36 to 51 % of an H100's fp32 peak, 24 to 34 of 67 TFLOP/s, is to be expected at
// most, with 2 TB/s from L2 (16 FLOPs a byte). It is not measured.
#include "core/cuda/register_tile.cuh"
#include "core/linear/linear_backward_kernels.h"
#include "core/linear/linear_rows.cuh"

namespace tfb {
namespace {

constexpr int kStride = kTile + 4;

// ---- Products of tiles ----

struct Operands {
  float a[kTile * kStride];  // [depth][row]
  float b[kTile * kStride];  // [depth][column]
};

// A thread has rows Row() + i and columns Column() + j of a product, i, j < 4. The 16 threads of
// half a warp share rows.
__device__ inline int Row() { return Thread() / 16 * 4; }
__device__ inline int Column() { return Thread() % 16 * 4; }

// In which direction neighbouring threads load an operand.
enum class Along { kDepth, kRows };

// Along depth a thread stores four rows as one vector, since single elements of neighbouring threads would
// be 4 to a bank.
template <Along kAlong, class LoadAt>
__device__ void Stage(int depth, const LoadAt& load, float* to) {
  constexpr int kRowsAtOnce = kAlong == Along::kDepth ? 4 : 1;
#pragma unroll 1
  for (int n = Thread(); n < kTile * kTile / kRowsAtOnce; n += kThreads) {
    const int k = kAlong == Along::kDepth ? n % kTile : n / kTile;
    const int row = kAlong == Along::kDepth ? n / kTile * kRowsAtOnce : n % kTile;
    if (k >= depth) continue;
    float rows[kRowsAtOnce];
#pragma unroll
    for (int i = 0; i < kRowsAtOnce; ++i) rows[i] = load(k, row + i);
    StoreVectors(rows, to + k * kStride + row);
  }
}

// sums += a b for `depth` steps, where a(k, row) and b(k, column) load elements.
template <Along kAlongA, Along kAlongB, class LoadA, class LoadB>
__device__ void Multiply(Operands& operands, int64_t depth, const LoadA& a, const LoadB& b,
                         float (&sums)[4][4]) {
#pragma unroll 1
  for (int64_t first = 0; first < depth; first += kTile) {
    const int count = static_cast<int>(min(depth - first, int64_t{kTile}));
    __syncthreads();  // the previous operands have been read
    Stage<kAlongA>(
        count, [&](int k, int row) { return a(first + k, row); }, operands.a);
    Stage<kAlongB>(
        count, [&](int k, int column) { return b(first + k, column); }, operands.b);
    __syncthreads();
    AddProduct<4>({operands.a + Row(), kStride}, {operands.b + Column(), kStride}, count, sums);
  }
}

template <class Body>
__device__ void ForEachElement(float (&sums)[4][4], const Body& body) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) body(Row() + i, Column() + j, sums[i][j]);
  }
}
__device__ inline void Clear(float (&sums)[4][4]) {
  ForEachElement(sums, [](int, int, float& x) { x = 0; });
}

__device__ inline float FiniteOrZero(float x) { return isfinite(x) ? x : 0; }

// ---- Chunks of tokens ----

// A chunk of keys of a held head, or of queries of one of its query heads.
struct TokenChunk {
  bool is_key;
  int64_t slot;  // which of the held heads
  int64_t b, h;  // of the tensor
  int64_t kv_head;
  int64_t chunk;  // of the head
  int64_t first;  // row of LinearTokenRows
  int64_t token;  // of the tensor; below 0 where no query is at the place of a key
  int64_t tokens;

  __device__ bool Has(int t) const { return token + t >= 0 && token + t < tokens; }
};

__device__ inline int64_t ChunksOfHead(const LinearBackwardArguments& a) {
  return a.key_chunks + a.group * a.query_chunks;
}
// Returns the first query of a chunk.
__device__ inline int64_t FirstQuery(const LinearBackwardArguments& a, int64_t chunk) {
  const LinearArguments& f = a.forward;
  return chunk * kTile - (f.causal ? f.kv_tokens - f.query_tokens : 0);
}

// Returns chunk n of a held head: its keys come first, then the queries of each query head.
__device__ inline TokenChunk ChunkOf(const LinearBackwardArguments& a, int64_t slot, int64_t n) {
  const LinearArguments& f = a.forward;
  TokenChunk c;
  c.is_key = n < a.key_chunks;
  c.slot = slot;
  c.b = (a.first_head + slot) / f.kv_heads;
  c.kv_head = c.h = (a.first_head + slot) % f.kv_heads;
  if (c.is_key) {
    c.chunk = n;
    c.first = (slot * a.key_chunks + n) * kTile;
    c.token = n * kTile;
    c.tokens = f.kv_tokens;
    return c;
  }
  const int64_t g = (n - a.key_chunks) / a.query_chunks;
  c.chunk = (n - a.key_chunks) % a.query_chunks;
  c.h = c.kv_head * a.group + g;
  c.first = ((slot * a.group + g) * a.query_chunks + c.chunk) * kTile;
  c.token = FirstQuery(a, c.chunk);
  c.tokens = f.query_tokens;
  return c;
}
__device__ inline TokenChunk QueriesOf(const LinearBackwardArguments& a, int64_t task) {
  const int64_t each = a.group * a.query_chunks;
  return ChunkOf(a, task / each, a.key_chunks + task % each);
}
__device__ inline TokenChunk KeysOf(const LinearBackwardArguments& a, int64_t task) {
  return ChunkOf(a, task / a.key_chunks, task % a.key_chunks);
}
__device__ inline const LinearTokenRows& RowsOf(const LinearBackwardArguments& a,
                                                const TokenChunk& c) {
  return c.is_key ? a.keys : a.queries;
}

// Tells whether a token takes part: a key that is not masked, a query with weight.
__device__ inline bool IsActive(const LinearBackwardArguments& a, const TokenChunk& c, int t) {
  return (c.is_key ? a.key.seen : a.query.active)[c.first + t] != 0;
}
// Returns channel c of the tensor's row of token t, which exists.
__device__ inline float Input(const LinearBackwardArguments& a, const TokenChunk& chunk, int t,
                              int64_t c) {
  const DeviceView& view = chunk.is_key ? a.forward.k : a.forward.q;
  return Load(view, Offset(view, chunk.b, chunk.h, chunk.token + t, c));
}
// Returns column c of (v_j, 1), of zeros where the key is no token.
__device__ inline float Value(const LinearBackwardArguments& a, const TokenChunk& keys, int j,
                              int64_t c) {
  if (a.key.seen[keys.first + j] == 0 || c >= a.columns) return 0;
  const DeviceView& v = a.forward.v;
  return c + 1 == a.columns ? 1 : Load(v, Offset(v, keys.b, keys.h, keys.token + j, c));
}
// Returns channel c of row r of a head's W.
__device__ inline float MatrixElement(const LinearBackwardArguments& a, int64_t kv_head, int64_t r,
                                      int64_t c) {
  const LinearArguments& f = a.forward;
  if (r >= f.map.projections || c >= f.head_dim) return 0;
  return f.w[((f.map.per_head ? kv_head * f.map.projections : 0) + r) * f.head_dim + c];
}
// Returns phi_ir.
__device__ inline float QueryFeature(const LinearBackwardArguments& a, int64_t row, int64_t r) {
  if (r >= a.features) return 0;
  return fmaf(a.query.query[row], a.queries.features[row * a.features + r],
              a.query.query_epsilon[row]);
}

// Returns sum_r phi_ir.
__device__ inline float FeatureSum(const LinearBackwardArguments& a, int64_t row) {
  return a.query.query[row] * a.queries.total[row] +
         a.query.query_epsilon[row] * a.forward.constants.features;
}

// Returns the sums over the keys that all rows of a chunk see, and their number among the chunks.
__device__ inline int64_t KeySumsOf(const LinearBackwardArguments& a, const TokenChunk& queries) {
  return queries.slot * (a.key_chunks + 1) + (a.forward.causal ? queries.chunk : a.key_chunks);
}
// Returns those over the queries that see all keys of a chunk.
__device__ inline int64_t QuerySumsOf(const LinearBackwardArguments& a, const TokenChunk& keys) {
  return keys.slot * (a.query_chunks + 1) + (a.forward.causal ? keys.chunk + 1 : 0);
}
// Returns the row of the first key at the places of a chunk of queries, where causal.
__device__ inline int64_t FirstKeyRow(const LinearBackwardArguments& a, const TokenChunk& queries) {
  return (queries.slot * a.key_chunks + queries.chunk) * kTile;
}
// Returns the first of the pairs of a chunk, [query][key].
__device__ inline int64_t PairsOf(int64_t first_row) { return first_row * kTile; }

// ---- Features ----

// Computes what makes the tensor's rows x. A warp calls it for a row.
__device__ inline void ScaleToken(const LinearBackwardArguments& a, const TokenChunk& chunk,
                                  int t) {
  const LinearArguments& f = a.forward;
  const bool has = chunk.Has(t) && (!chunk.is_key || IsToken(f, chunk.b, chunk.token + t));
  float square = 0;
  for (int c = OpaqueLane(); has && c < f.head_dim; c += kWarp) {
    const float x = Input(a, chunk, t, c);
    square = fmaf(x, x, square);
  }
  square = SumOfWarp(square);
  float factor = f.map.input_scale;
  if (f.map.unit) factor *= InverseLength(f, 0.5f * square);
  float logit = 0;
  if (chunk.is_key && f.map.gated && has) {
    logit = GateLogit(f, a.first_head + chunk.slot, chunk.token + t);
  }
  if (OpaqueLane() != 0) return;
  const int64_t row = chunk.first + t;
  RowsOf(a, chunk).factor[row] = factor;
  RowsOf(a, chunk).half_square[row] = 0.5f * factor * factor * square;
  if (!chunk.is_key) {
    a.query.active[row] = has ? 1.0f : 0.0f;
    return;
  }
  a.key.seen[row] = has ? 1.0f : 0.0f;
  a.key.logit[row] = logit;
  a.key.gate_gradient[row] = 0;
}

// Turns a row's projections into features. A warp calls it.
__device__ inline void MakeFeatureRow(const LinearBackwardArguments& a, const LinearTokenRows& rows,
                                      int64_t row) {
  const LinearArguments& f = a.forward;
  const bool pair = IsPair(f), exponential = IsExponential(f);
  const int64_t projections = f.map.projections;
  float* features = rows.features + row * a.features;
  float maximum = -INFINITY, total = 0;
  for (int64_t r = OpaqueLane(); exponential && r < projections; r += kWarp) {
    maximum = fmaxf(maximum, pair ? fabsf(features[r]) : features[r]);
  }
  maximum = exponential ? MaxOfWarp(maximum) : 0;
  int first = INT32_MAX;
  for (int64_t r = OpaqueLane(); r < projections; r += kWarp) {
    const float x = features[r];
    float feature = x < 0 ? 0 : x, other = 0;
    if (exponential) {
      feature = ExpOf(x - maximum);
      if (pair) other = ExpOf(-x - maximum);
    } else if (pair) {
      sincosf(x, &feature, &other);
    }
    features[r] = feature;
    if (pair) features[projections + r] = other;
    total += feature + other;
    if (feature == 1) first = min(first, static_cast<int>(r));
    if (pair && other == 1) first = min(first, static_cast<int>(projections + r));
  }
  total = SumOfWarp(total);
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) {
    first = min(first, __shfl_xor_sync(kAllLanes, first, step));
  }
  if (OpaqueLane() != 0) return;
  rows.maximum[row] = maximum;
  rows.total[row] = total;
  rows.maximum_row[row] = first == INT32_MAX ? 0 : first;
}

__device__ inline void MakeFeatures(const LinearBackwardArguments& a, const TokenChunk& chunk,
                                    Operands& operands) {
  const LinearTokenRows& rows = RowsOf(a, chunk);
  for (int t = OpaqueWarp(); t < kTile; t += kWarps) ScaleToken(a, chunk, t);
  __syncthreads();
  for (int64_t first = 0; first < a.forward.map.projections; first += kTile) {
    float sums[4][4];
    Clear(sums);
    Multiply<Along::kDepth, Along::kDepth>(
        operands, a.forward.head_dim,
        [&](int64_t c, int t) {
          return IsActive(a, chunk, t) ? rows.factor[chunk.first + t] * Input(a, chunk, t, c) : 0;
        },
        [&](int64_t c, int r) { return MatrixElement(a, chunk.kv_head, first + r, c); }, sums);
    ForEachElement(sums, [&](int t, int column, float projection) {
      const int64_t r = first + column;
      if (r < a.forward.map.projections) {
        rows.features[(chunk.first + t) * a.features + r] = projection;
      }
    });
  }
  __syncthreads();
  for (int t = OpaqueWarp(); t < kTile; t += kWarps) MakeFeatureRow(a, rows, chunk.first + t);
}

// ---- Sums of a chunk ----

// Stores 64 features by 64 columns of a product of features and rows of values.
__device__ inline void StoreSums(const LinearBackwardArguments& a, int64_t first_feature,
                                 int64_t first_column, float (&sums)[4][4], float* to) {
  ForEachElement(sums, [&](int row, int column, float sum) {
    const int64_t r = first_feature + row, c = first_column + column;
    if (r <= a.features && c < a.columns) to[r * a.columns + c] = sum;
  });
}

__device__ inline void SumKeys(const LinearBackwardArguments& a, const TokenChunk& keys,
                               int64_t first_feature, int64_t first_column, Operands& operands) {
  float sums[4][4];
  Clear(sums);
  Multiply<Along::kRows, Along::kRows>(
      operands, kTile,
      [&](int64_t j, int n) {
        const int64_t row = keys.first + j, r = first_feature + n;
        if (r >= a.features) return r == a.features ? a.key.seen[row] : 0.0f;
        return a.key.scale[row] * a.keys.features[row * a.features + r];
      },
      [&](int64_t j, int n) { return Value(a, keys, static_cast<int>(j), first_column + n); },
      sums);
  const int64_t at = keys.slot * (a.key_chunks + 1) + keys.chunk;
  StoreSums(a, first_feature, first_column, sums, a.key_sums + at * a.sum);
}

// Returns the factor of a query's feature in the sums of its chunk.
__device__ inline float QueryWeight(const LinearBackwardArguments& a, int64_t row, int64_t r,
                                    float reference) {
  if (a.query.active[row] == 0 || r > a.features) return 0;
  if (r == a.features) return a.query.constant[row];
  return a.query.key[row] * ExpOf(reference - a.query.reference[row]) *
         FiniteOrZero(QueryFeature(a, row, r));
}

__device__ inline void SumQueries(const LinearBackwardArguments& a, int64_t slot, int64_t chunk,
                                  int64_t first_feature, int64_t first_column, Operands& operands) {
  const int64_t at = slot * (a.query_chunks + 1) + chunk;
  const float reference = a.query_chunk.scale_reference[at];
  float sums[4][4];
  Clear(sums);
  for (int64_t g = 0; g < a.group; ++g) {
    const int64_t first = ((slot * a.group + g) * a.query_chunks + chunk) * kTile;
    Multiply<Along::kRows, Along::kRows>(
        operands, kTile,
        [&](int64_t t, int n) { return QueryWeight(a, first + t, first_feature + n, reference); },
        [&](int64_t t, int n) {
          const int64_t c = first_column + n;
          return c < a.columns ? a.query.rows[(first + t) * a.columns + c] : 0;
        },
        sums);
  }
  StoreSums(a, first_feature, first_column, sums, a.query_sums + at * a.sum);
}

// ---- Rows ----

class RowBlock {
 public:
  __device__ RowBlock(const LinearBackwardArguments& a, int64_t task, Operands& operands)
      : a_(a),
        operands_(operands),
        queries_(QueriesOf(a, task)),
        sums_at_(KeySumsOf(a, queries_)),
        sums_(a.key_sums + sums_at_ * a.sum),
        first_key_(FirstKeyRow(a, queries_)) {}

  __device__ void Run() {
    if (Thread() < kTile) FindFactors(Thread());
    __syncthreads();
    for (int t = OpaqueWarp(); t < kTile; t += kWarps) ReadNormaliser(t);
    __syncthreads();
    float weights[4][4];
    if (a_.forward.causal) MakeWeights(weights);
    __syncthreads();
    for (int t = OpaqueWarp(); t < kTile; t += kWarps) FinishRow(t);
    __syncthreads();
    if (a_.forward.causal) MakePairs(weights);
  }

 private:
  // Finds the factors of a row from what it sees.
  __device__ void FindFactors(int t) {
    const LinearArguments& f = a_.forward;
    const LinearQueryNumbers& q = a_.query;
    const int64_t row = queries_.first + t, key = first_key_ + t;
    const float carried_reference = a_.key_chunk.reference[sums_at_];
    const float reference = f.causal ? a_.key.running_reference[key] : carried_reference;
    const float maximum = f.causal ? a_.key.running_maximum[key] : a_.key_chunk.maximum[sums_at_];
    const float tokens = f.causal ? a_.key.running_tokens[key] : a_.key_chunk.tokens[sums_at_];
    const bool has_keys = queries_.Has(t) && tokens > 0;
    const FeatureFactors factors = FeatureFactorsOf(
        f, {a_.queries.maximum[row], a_.queries.half_square[row], a_.queries.total[row]}, reference,
        maximum);
    q.active[row] = has_keys ? 1.0f : 0.0f;
    q.query[row] = factors.query;
    q.query_epsilon[row] = factors.query_epsilon;
    q.key[row] = factors.key;
    q.key_epsilon[row] = factors.key_epsilon;
    q.constant[row] = factors.key_epsilon * factors.query_sum;
    q.reference[row] = reference;
    q.carried[row] =
        carried_reference == -INFINITY ? 0 : factors.key * ExpOf(carried_reference - reference);
    q.log_scale[row] = factors.log_scale + (f.causal ? a_.key.decay[key] : 0);
    q.extra[row] = ExtraOf(f, 1, factors.largest_key, has_keys);
  }

  // Computes the part of a row's denominator that does not come from pairs. A warp calls it.
  __device__ void ReadNormaliser(int t) {
    const int64_t row = queries_.first + t, ones = a_.columns - 1;
    float dot = 0;
    for (int64_t r = OpaqueLane(); r < a_.features; r += kWarp) {
      dot = fmaf(QueryFeature(a_, row, r), sums_[r * a_.columns + ones], dot);
    }
    dot = SumOfWarp(dot);
    if (OpaqueLane() != 0) return;
    a_.query.denominator[row] = a_.query.carried[row] * dot +
                                a_.query.constant[row] * sums_[a_.features * a_.columns + ones] +
                                a_.query.extra[row] * FeatureSum(a_, row);
  }

  // Returns b_i exp(rho_j - R_i) of a pair.
  __device__ float KeyFactor(int64_t row, int64_t key) const {
    return a_.query.key[row] * ExpOf(a_.key.log_scale[key] - Shift(a_.query.reference[row]));
  }

  // Computes a_ij of the chunk's pairs, and adds them to the denominators.
  __device__ void MakeWeights(float (&weights)[4][4]) {
    Clear(weights);
    Multiply<Along::kDepth, Along::kDepth>(
        operands_, a_.features,
        [&](int64_t r, int t) { return QueryFeature(a_, queries_.first + t, r); },
        [&](int64_t r, int j) { return a_.keys.features[(first_key_ + j) * a_.features + r]; },
        weights);
    ForEachElement(weights, [&](int t, int j, float& weight) {
      const int64_t row = queries_.first + t, key = first_key_ + j;
      const bool is_visible = j <= t && a_.query.active[row] != 0;
      weight =
          is_visible ? KeyFactor(row, key) * weight + a_.query.constant[row] * a_.key.seen[key] : 0;
    });
    AddRowSums(weights, a_.query.denominator);
  }

  // Adds the sums of the rows of a tile to numbers of the rows.
  __device__ void AddRowSums(const float (&tile)[4][4], float* numbers) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float sum = SumOfLanes<16>(tile[i][0] + tile[i][1] + (tile[i][2] + tile[i][3]));
      if (Column() == 0) numbers[queries_.first + Row() + i] += sum;
    }
  }

  // Divides a row's gradient by the denominator. A warp calls it.
  __device__ void FinishRow(int t) {
    const LinearQueryNumbers& q = a_.query;
    const int64_t row = queries_.first + t;
    const float raw = q.denominator[row];
    const float floor = DenominatorFloor(a_.forward, q.log_scale[row]);
    const bool is_held = fabsf(raw) <= floor;
    const float denominator = is_held ? copysignf(floor, raw) : raw;
    const float inverse = q.active[row] == 0 || denominator == 0 ? 0 : 1 / denominator;
    float sum = 0;
    bool is_finite = true;
    const bool active = inverse != 0;
    if (active) is_finite = LoadGradient(t, inverse, is_held ? 0 : inverse, &sum);
    __syncwarp();
    if (!active || !is_finite) {
      for (int64_t c = OpaqueLane(); c < a_.columns; c += kWarp) q.rows[row * a_.columns + c] = 0;
      sum = 0;
    } else if (OpaqueLane() == 0) {
      q.rows[(row + 1) * a_.columns - 1] = sum;
    }
    if (OpaqueLane() != 0) return;
    const float valid = is_finite ? 1 : NAN;
    q.active[row] = active ? 1.0f : 0.0f;
    q.valid[row] = valid;
    q.key[row] *= valid;
    q.carried[row] *= valid;
    q.constant[row] *= valid;
    q.extra[row] = active ? sum * q.extra[row] : 0;
    q.pair_sum[row] = 0;
  }

  // Writes dN_i, and computes dZ_i. Returns whether the row is finite. A warp calls it.
  __device__ bool LoadGradient(int t, float inverse, float slope, float* sum) {
    const LinearArguments& f = a_.forward;
    const int64_t row = queries_.first + t, token = queries_.token + t;
    const DeviceView& g = a_.out_gradient;
    const DeviceView& e = a_.log_sum_exp_gradient;
    float product = 0;
    bool is_finite = isfinite(a_.queries.total[row]);
    for (int c = OpaqueLane(); c < f.head_dim; c += kWarp) {
      is_finite = is_finite && isfinite(Input(a_, queries_, t, c));
    }
    for (int c = OpaqueLane(); c < f.value_dim; c += kWarp) {
      float x = 0;
      if (g.data != nullptr) {
        x = Load(g, Offset(g, queries_.b, queries_.h, token, c));
        product = fmaf(x, Load(f.out, Offset(f.out, queries_.b, queries_.h, token, c)), product);
        x *= inverse;
      }
      is_finite = is_finite && isfinite(x);
      a_.query.rows[row * a_.columns + c] = x;
    }
    product = SumOfWarp(product);
    const float of_log_sum_exp =
        e.data == nullptr ? 0 : Load(e, Offset(e, queries_.b, queries_.h, token));
    *sum = slope == 0 ? 0 : slope * (of_log_sum_exp - product);
    return __all_sync(kAllLanes, is_finite && isfinite(*sum));
  }

  // Stores a_ij, and b_i exp(rho_j - R_i) t_ij with the sums of t_ij over keys.
  __device__ void MakePairs(float (&weights)[4][4]) {
    const int64_t pairs = PairsOf(queries_.first);
    ForEachElement(weights, [&](int t, int j, float weight) {
      const int64_t row = queries_.first + t;
      const bool is_visible = j <= t && a_.query.active[row] != 0;
      a_.query.weights[pairs + t * kTile + j] = is_visible ? a_.query.valid[row] * weight : 0;
    });
    TokenChunk keys = ChunkOf(a_, queries_.slot, queries_.chunk);
    float gradients[4][4];
    Clear(gradients);
    Multiply<Along::kDepth, Along::kDepth>(
        operands_, a_.columns,
        [&](int64_t c, int t) { return a_.query.rows[(queries_.first + t) * a_.columns + c]; },
        [&](int64_t c, int j) { return Value(a_, keys, j, c); }, gradients);
    ForEachElement(gradients, [&](int t, int j, float& gradient) {
      const int64_t row = queries_.first + t;
      const bool is_visible = j <= t && a_.query.active[row] != 0;
      if (!is_visible) gradient = 0;
      a_.query.pairs[pairs + t * kTile + j] =
          is_visible ? KeyFactor(row, first_key_ + j) * gradient : 0;
    });
    AddRowSums(gradients, a_.query.pair_sum);
  }

  const LinearBackwardArguments& a_;
  Operands& operands_;
  const TokenChunk queries_;
  const int64_t sums_at_;
  const float* const sums_;
  const int64_t first_key_;
};

// ---- Gradients of projections ----

// The gradients of 64 tokens' features, for 64 rows of W: both features of a pair.
class ProjectionGradients {
 public:
  __device__ ProjectionGradients(const LinearBackwardArguments& a, const LinearTokenRows& rows,
                                 int64_t first_row)
      : a_(a), rows_(rows), first_row_(first_row) {}

  // Turns the gradients of features into those of the projections from `first` on, and adds to the
  // sums of the thread's rows. `offset(t)`, `scale(t)` and `is_active(t)` are of the tokens.
  template <class OfRow, class Scale, class Active>
  __device__ void Finish(int64_t first, const float (&gradients)[2][4][4], const OfRow& offset,
                         const Scale& scale, const Active& is_active) {
    const int64_t projections = a_.forward.map.projections;
    const Feature kind = a_.forward.map.feature;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int t = Row() + i;
      const bool active = is_active(t);
      const float of_row = offset(t), factor = scale(t);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int64_t r = first + Column() + j, row = first_row_ + t;
        if (r >= projections) continue;
        const float* features = rows_.features + row * a_.features;
        const float feature = features[r], d = gradients[0][i][j] + of_row;
        float gradient = feature * d;
        sums_[i] += d;
        products_[i] += gradient;
        if (kind == Feature::kRelu) {
          gradient = feature == 0 ? 0 : d;
        } else if (IsPair(a_.forward)) {
          const float other = features[projections + r], of_other = gradients[1][i][j] + of_row;
          sums_[i] += of_other;
          products_[i] += other * of_other;
          gradient = kind == Feature::kExpPair ? gradient - other * of_other
                                               : d * other - of_other * feature;
        }
        rows_.gradients[row * projections + r] = active ? factor * gradient : 0;
      }
    }
  }

  // Stores the sums of rows: sum_r of gradients, unless null, and of features times gradients.
  template <class Scale, class Active>
  __device__ void StoreSums(const Scale& scale, const Active& is_active, float* sums) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int t = Row() + i;
      const float sum = SumOfLanes<16>(sums_[i]), product = SumOfLanes<16>(products_[i]);
      if (Column() != 0) continue;
      rows_.product[first_row_ + t] = is_active(t) ? scale(t) * product : 0;
      if (sums != nullptr) sums[first_row_ + t] = is_active(t) ? sum : 0;
    }
  }

 private:
  const LinearBackwardArguments& a_;
  const LinearTokenRows& rows_;
  const int64_t first_row_;
  float sums_[4] = {};
  float products_[4] = {};
};

// Computes, for the features [first, first + 64) or both features of as many rows of W, the products
// of rows with sums times a factor of each row, and adds what `pairs` adds.
template <class LoadRow, class Factor, class AddPairs>
__device__ void ReadSums(const LinearBackwardArguments& a, const float* sums, int64_t first,
                         Operands& operands, const LoadRow& row, const Factor& factor,
                         const AddPairs& add_pairs, float (&gradients)[2][4][4]) {
  const int64_t projections = a.forward.map.projections;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    if (n == 1 && !IsPair(a.forward)) break;
    const int64_t feature = n * projections + first;
    Clear(gradients[n]);
    Multiply<Along::kDepth, Along::kDepth>(
        operands, a.columns, row,
        [&](int64_t c, int r) {
          return first + r < projections ? sums[(feature + r) * a.columns + c] : 0;
        },
        gradients[n]);
    ForEachElement(gradients[n], [&](int t, int, float& x) { x *= factor(t); });
    add_pairs(feature, static_cast<int>(min(projections - first, int64_t{kTile})), gradients[n]);
  }
}

// Computes the part of dphi that all features of a row share. A warp calls it.
__device__ inline void FindOffset(const LinearBackwardArguments& a, const TokenChunk& queries,
                                  const float* constants, int t) {
  const LinearQueryNumbers& q = a.query;
  const int64_t row = queries.first + t;
  float dot = 0;
  for (int64_t c = OpaqueLane(); c < a.columns; c += kWarp) {
    dot = fmaf(constants[c], q.rows[row * a.columns + c], dot);
  }
  dot = SumOfWarp(dot);
  if (OpaqueLane() != 0) return;
  const bool active = q.active[row] != 0;
  const float shared =
      a.forward.constants.epsilon != 0 ? q.key_epsilon[row] * (dot + q.pair_sum[row]) : 0;
  const float offset = active ? shared + q.extra[row] : 0;
  q.offset[row] = offset;
  q.maximum_gradient[row] =
      active && a.has_maximum_gradient ? q.valid[row] * FeatureSum(a, row) * offset : 0;
}

__device__ inline void DifferentiateQueries(const LinearBackwardArguments& a, int64_t task,
                                            Operands& operands) {
  const LinearQueryNumbers& q = a.query;
  const TokenChunk queries = QueriesOf(a, task);
  const float* sums = a.key_sums + KeySumsOf(a, queries) * a.sum;
  const int64_t pairs = PairsOf(queries.first), first_key = FirstKeyRow(a, queries);
  for (int t = OpaqueWarp(); t < kTile; t += kWarps) {
    FindOffset(a, queries, sums + a.features * a.columns, t);
  }
  __syncthreads();
  const auto scale = [&](int t) { return q.query[queries.first + t]; };
  const auto is_active = [&](int t) { return q.active[queries.first + t] != 0; };
  ProjectionGradients result(a, a.queries, queries.first);
  for (int64_t first = 0; first < a.forward.map.projections; first += kTile) {
    float gradients[2][4][4];
    ReadSums(
        a, sums, first, operands,
        [&](int64_t c, int t) { return q.rows[(queries.first + t) * a.columns + c]; },
        [&](int t) { return q.carried[queries.first + t]; },
        [&](int64_t feature, int count, float(&to)[4][4]) {
          if (!a.forward.causal) return;
          Multiply<Along::kDepth, Along::kRows>(
              operands, kTile, [&](int64_t j, int t) { return q.pairs[pairs + t * kTile + j]; },
              [&](int64_t j, int r) {
                return r < count ? FiniteOrZero(
                                       a.keys.features[(first_key + j) * a.features + feature + r])
                                 : 0;
              },
              to);
        },
        gradients);
    result.Finish(
        first, gradients, [&](int t) { return q.offset[queries.first + t]; }, scale, is_active);
  }
  result.StoreSums(scale, is_active, q.gradient_sum);
  if (!a.has_maximum_gradient || a.forward.constants.epsilon == 0) return;
  __syncthreads();
  const int t = Thread();
  if (t >= kTile || !is_active(t)) return;
  // The gradient of s.
  const int64_t row = queries.first + t, projections = a.forward.map.projections;
  const int64_t feature = a.queries.maximum_row[row];
  const float gradient = q.query_epsilon[row] * q.gradient_sum[row];
  a.queries.gradients[row * projections + feature % projections] +=
      feature < projections ? gradient : -gradient;
}

__device__ inline void DifferentiateValues(const LinearBackwardArguments& a, const TokenChunk& keys,
                                           const float* sums, float reference, Operands& operands) {
  const DeviceView& v = a.v_gradient;
  for (int64_t first = 0; first < a.forward.value_dim; first += kTile) {
    float gradients[4][4];
    Clear(gradients);
    Multiply<Along::kDepth, Along::kRows>(
        operands, a.features,
        [&](int64_t r, int j) { return a.keys.features[(keys.first + j) * a.features + r]; },
        [&](int64_t r, int c) {
          return first + c < a.columns ? sums[r * a.columns + first + c] : 0;
        },
        gradients);
    ForEachElement(gradients, [&](int j, int n, float& x) {
      const int64_t c = first + n;
      x *= ExpOf(a.key.log_scale[keys.first + j] - reference);
      if (c < a.columns) x += sums[a.features * a.columns + c];
    });
    for (int64_t g = 0; a.forward.causal && g < a.group; ++g) {
      const int64_t row = ((keys.slot * a.group + g) * a.query_chunks + keys.chunk) * kTile;
      Multiply<Along::kRows, Along::kRows>(
          operands, kTile,
          [&](int64_t t, int j) { return a.query.weights[PairsOf(row) + t * kTile + j]; },
          [&](int64_t t, int c) {
            return first + c < a.columns ? a.query.rows[(row + t) * a.columns + first + c] : 0;
          },
          gradients);
    }
    ForEachElement(gradients, [&](int j, int n, float x) {
      const int64_t c = first + n;
      if (c >= a.forward.value_dim || !keys.Has(j)) return;
      Store(v, Offset(v, keys.b, keys.h, keys.token + j, c),
            a.key.seen[keys.first + j] != 0 ? x : 0);
    });
  }
}

__device__ inline void DifferentiateKeys(const LinearBackwardArguments& a, int64_t task,
                                         Operands& operands) {
  const TokenChunk keys = KeysOf(a, task);
  const int64_t at = QuerySumsOf(a, keys);
  const float* sums = a.query_sums + at * a.sum;
  const float reference = a.query_chunk.reference[at];
  const auto scale = [](int) { return 1.0f; };
  const auto is_active = [&](int j) { return a.key.seen[keys.first + j] != 0; };
  ProjectionGradients result(a, a.keys, keys.first);
  for (int64_t first = 0; first < a.forward.map.projections; first += kTile) {
    float gradients[2][4][4];
    ReadSums(
        a, sums, first, operands, [&](int64_t c, int j) { return Value(a, keys, j, c); },
        [&](int j) { return ExpOf(a.key.log_scale[keys.first + j] - reference); },
        [&](int64_t feature, int count, float(&to)[4][4]) {
          for (int64_t g = 0; a.forward.causal && g < a.group; ++g) {
            const int64_t row = ((keys.slot * a.group + g) * a.query_chunks + keys.chunk) * kTile;
            Multiply<Along::kRows, Along::kRows>(
                operands, kTile,
                [&](int64_t t, int j) { return a.query.pairs[PairsOf(row) + t * kTile + j]; },
                [&](int64_t t, int r) {
                  return r < count ? FiniteOrZero(QueryFeature(a, row + t, feature + r)) : 0;
                },
                to);
          }
        },
        gradients);
    result.Finish(
        first, gradients, [](int) { return 0.0f; }, scale, is_active);
  }
  result.StoreSums(scale, is_active, nullptr);
  if (a.v_gradient.data != nullptr) DifferentiateValues(a, keys, sums, reference, operands);
}

// ---- Inputs, gates and W ----

// Turns the gradient of x into that of the tensor's row, and writes it. A warp calls it.
__device__ inline void StoreInputGradient(const LinearBackwardArguments& a, const TokenChunk& chunk,
                                          int t, const DeviceView& to) {
  const LinearArguments& f = a.forward;
  const LinearTokenRows& rows = RowsOf(a, chunk);
  const int64_t row = chunk.first + t;
  const bool active = IsActive(a, chunk, t);
  const float factor = rows.factor[row], half_square = rows.half_square[row];
  const float product = IsExponential(f) ? rows.product[row] : 0;
  const float* gradients = rows.input_gradients + row * f.head_dim;
  float along = 0;
  if (active && f.map.unit && half_square != 0) {
    for (int c = OpaqueLane(); c < f.head_dim; c += kWarp) {
      const float x = factor * Input(a, chunk, t, c);
      along = fmaf(x, gradients[c] - product * x, along);
    }
    along = SumOfWarp(along) / (f.map.input_scale * sqrtf(2 * half_square));
  }
  for (int c = OpaqueLane(); c < f.head_dim; c += kWarp) {
    float gradient = 0;
    if (active) {
      const float x = factor * Input(a, chunk, t, c);
      gradient = factor == 0 ? 0 : factor * (gradients[c] - product * x - along * x);
      if (chunk.is_key && f.map.gated) {
        gradient =
            fmaf(a.key.gate_gradient[row], f.gate[chunk.kv_head * (f.head_dim + 1) + c], gradient);
      }
      if (!chunk.is_key) gradient *= a.query.valid[row];
    }
    Store(to, Offset(to, chunk.b, chunk.h, chunk.token + t, c), gradient);
  }
}

// Clears the gradients of the rows before the place of the first key.
__device__ inline void ClearKeylessRows(const LinearBackwardArguments& a, const TokenChunk& chunk) {
  const LinearArguments& f = a.forward;
  const DeviceView& q = a.q_gradient;
  const int64_t keyless = f.causal ? min(f.query_tokens - f.kv_tokens, f.query_tokens) : 0;
  for (int64_t i = OpaqueWarp(); i < keyless; i += kWarps) {
    for (int c = OpaqueLane(); c < f.head_dim; c += kWarp) {
      Store(q, Offset(q, chunk.b, chunk.h, i, c), 0);
    }
  }
}

__device__ inline void SumGates(const LinearBackwardArguments& a, const TokenChunk& keys) {
  const int64_t dim = a.forward.head_dim;
  float* to = a.gate_parts + (keys.slot * a.key_chunks + keys.chunk) * (dim + 1);
  for (int64_t c = Thread(); c <= dim; c += kThreads) {
    float sum = 0;
    for (int j = 0; j < kTile; ++j) {
      if (a.key.seen[keys.first + j] == 0) continue;
      sum = fmaf(a.key.gate_gradient[keys.first + j], c < dim ? Input(a, keys, j, c) : 1, sum);
    }
    to[c] = sum;
  }
}

__device__ inline void DifferentiateInputs(const LinearBackwardArguments& a,
                                           const TokenChunk& chunk, Operands& operands) {
  const LinearTokenRows& rows = RowsOf(a, chunk);
  const DeviceView& to = chunk.is_key ? a.k_gradient : a.q_gradient;
  const int64_t dim = a.forward.head_dim, projections = a.forward.map.projections;
  if (chunk.is_key && a.gate_parts != nullptr) SumGates(a, chunk);
  if (to.data == nullptr) return;
  for (int64_t first = 0; first < dim; first += kTile) {
    float sums[4][4];
    Clear(sums);
    Multiply<Along::kDepth, Along::kRows>(
        operands, projections,
        [&](int64_t r, int t) { return rows.gradients[(chunk.first + t) * projections + r]; },
        [&](int64_t r, int c) { return MatrixElement(a, chunk.kv_head, r, first + c); }, sums);
    ForEachElement(sums, [&](int t, int column, float x) {
      const int64_t c = first + column;
      if (c < dim) rows.input_gradients[(chunk.first + t) * dim + c] = x;
    });
  }
  __syncthreads();
  for (int t = OpaqueWarp(); t < kTile; t += kWarps) {
    if (chunk.Has(t)) StoreInputGradient(a, chunk, t, to);
  }
  if (!chunk.is_key && chunk.chunk == 0) ClearKeylessRows(a, chunk);
}

// Sums 64 rows by 64 channels of W's gradient over some chunks.
__device__ inline void SumMatrix(const LinearBackwardArguments& a, int64_t slot, int64_t part,
                                 int64_t first_row, int64_t first_channel, Operands& operands) {
  const int64_t dim = a.forward.head_dim, projections = a.forward.map.projections;
  const int64_t begin = part * kLinearPartChunks;
  const int64_t end = min(begin + kLinearPartChunks, ChunksOfHead(a));
  float sums[4][4];
  Clear(sums);
  for (int64_t n = begin; n < end; ++n) {
    const TokenChunk chunk = ChunkOf(a, slot, n);
    const LinearTokenRows& rows = RowsOf(a, chunk);
    Multiply<Along::kRows, Along::kRows>(
        operands, kTile,
        [&](int64_t t, int r) {
          return first_row + r < projections
                     ? rows.gradients[(chunk.first + t) * projections + first_row + r]
                     : 0;
        },
        [&](int64_t t, int c) {
          const int token = static_cast<int>(t);
          if (first_channel + c >= dim || !IsActive(a, chunk, token)) return 0.0f;
          return rows.factor[chunk.first + t] * Input(a, chunk, token, first_channel + c);
        },
        sums);
  }
  float* to = a.w_parts + (slot * a.parts + part) * projections * dim;
  ForEachElement(sums, [&](int row, int column, float sum) {
    const int64_t r = first_row + row, c = first_channel + column;
    if (r < projections && c < dim) to[r * dim + c] = sum;
  });
}

// ---- Kernels ----

// Calls body(task) for the block's tasks.
template <class Body>
__device__ void ForEachTask(int64_t tasks, const Body& body) {
#pragma unroll 1
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    body(task, *reinterpret_cast<Operands*>(DynamicShared<sizeof(Operands)>()));
    __syncthreads();
  }
}
__host__ __device__ inline int64_t TilesOf(int64_t count) { return CeilDiv(count, kTile); }

struct FeatureTasks {
  static __host__ __device__ int64_t Count(const LinearBackwardArguments& a) {
    return a.heads * (a.key_chunks + a.group * a.query_chunks);
  }
  static __device__ void Run(const LinearBackwardArguments& a, int64_t task, Operands& operands) {
    MakeFeatures(a, ChunkOf(a, task / ChunksOfHead(a), task % ChunksOfHead(a)), operands);
  }
};
// The tiles of sums of a chunk.
__host__ __device__ inline int64_t SumTiles(const LinearBackwardArguments& a) {
  return TilesOf(a.features + 1) * TilesOf(a.columns);
}
struct KeySumTasks {
  static __host__ __device__ int64_t Count(const LinearBackwardArguments& a) {
    return a.heads * a.key_chunks * SumTiles(a);
  }
  static __device__ void Run(const LinearBackwardArguments& a, int64_t task, Operands& operands) {
    const int64_t tile = task % SumTiles(a), columns = TilesOf(a.columns);
    SumKeys(a, KeysOf(a, task / SumTiles(a)), tile / columns * kTile, tile % columns * kTile,
            operands);
  }
};
struct RowTasks {
  static __host__ __device__ int64_t Count(const LinearBackwardArguments& a) {
    return a.heads * a.group * a.query_chunks;
  }
  static __device__ void Run(const LinearBackwardArguments& a, int64_t task, Operands& operands) {
    RowBlock(a, task, operands).Run();
  }
};
struct QuerySumTasks {
  static __host__ __device__ int64_t Count(const LinearBackwardArguments& a) {
    return a.heads * a.query_chunks * SumTiles(a);
  }
  static __device__ void Run(const LinearBackwardArguments& a, int64_t task, Operands& operands) {
    const int64_t tile = task % SumTiles(a), columns = TilesOf(a.columns);
    const int64_t chunk = task / SumTiles(a);
    SumQueries(a, chunk / a.query_chunks, chunk % a.query_chunks, tile / columns * kTile,
               tile % columns * kTile, operands);
  }
};
struct QueryGradientTasks {
  static __host__ __device__ int64_t Count(const LinearBackwardArguments& a) {
    return a.heads * a.group * a.query_chunks;
  }
  static __device__ void Run(const LinearBackwardArguments& a, int64_t task, Operands& operands) {
    DifferentiateQueries(a, task, operands);
  }
};
struct KeyGradientTasks {
  static __host__ __device__ int64_t Count(const LinearBackwardArguments& a) {
    return a.heads * a.key_chunks;
  }
  static __device__ void Run(const LinearBackwardArguments& a, int64_t task, Operands& operands) {
    DifferentiateKeys(a, task, operands);
  }
};
struct InputTasks {
  static __host__ __device__ int64_t Count(const LinearBackwardArguments& a) {
    return FeatureTasks::Count(a);
  }
  static __device__ void Run(const LinearBackwardArguments& a, int64_t task, Operands& operands) {
    DifferentiateInputs(a, ChunkOf(a, task / ChunksOfHead(a), task % ChunksOfHead(a)), operands);
  }
};
struct MatrixTasks {
  static __host__ __device__ int64_t Tiles(const LinearBackwardArguments& a) {
    return TilesOf(a.forward.map.projections) * TilesOf(a.forward.head_dim);
  }
  static __host__ __device__ int64_t Count(const LinearBackwardArguments& a) {
    return a.heads * a.parts * Tiles(a);
  }
  static __device__ void Run(const LinearBackwardArguments& a, int64_t task, Operands& operands) {
    const int64_t tile = task % Tiles(a), channels = TilesOf(a.forward.head_dim);
    const int64_t part = task / Tiles(a);
    SumMatrix(a, part / a.parts, part % a.parts, tile / channels * kTile, tile % channels * kTile,
              operands);
  }
};

template <class Tasks>
__global__ void __launch_bounds__(kThreads, 2) LinearBackward(const LinearBackwardArguments a) {
  ForEachTask(Tasks::Count(a),
              [&](int64_t task, Operands& operands) { Tasks::Run(a, task, operands); });
}

template <class Tasks>
const char* LaunchTasks(const char* name, const LinearBackwardArguments& a, void* stream) {
  return Launch(name, &LinearBackward<Tasks>,
                {BlocksInTurns(Tasks::Count(a), a.forward.max_blocks), kThreads, sizeof(Operands)},
                stream, a);
}

const char* Features(const LinearBackwardArguments& a, void* stream) {
  return LaunchTasks<FeatureTasks>("LinearBackward<FeatureTasks>", a, stream);
}
const char* KeySums(const LinearBackwardArguments& a, void* stream) {
  return LaunchTasks<KeySumTasks>("LinearBackward<KeySumTasks>", a, stream);
}
const char* Rows(const LinearBackwardArguments& a, void* stream) {
  return LaunchTasks<RowTasks>("LinearBackward<RowTasks>", a, stream);
}
const char* QuerySums(const LinearBackwardArguments& a, void* stream) {
  return LaunchTasks<QuerySumTasks>("LinearBackward<QuerySumTasks>", a, stream);
}
const char* QueryGradients(const LinearBackwardArguments& a, void* stream) {
  return LaunchTasks<QueryGradientTasks>("LinearBackward<QueryGradientTasks>", a, stream);
}
const char* KeyGradients(const LinearBackwardArguments& a, void* stream) {
  return LaunchTasks<KeyGradientTasks>("LinearBackward<KeyGradientTasks>", a, stream);
}
const char* InputGradients(const LinearBackwardArguments& a, void* stream) {
  return LaunchTasks<InputTasks>("LinearBackward<InputTasks>", a, stream);
}
const char* MatrixParts(const LinearBackwardArguments& a, void* stream) {
  return LaunchTasks<MatrixTasks>("LinearBackward<MatrixTasks>", a, stream);
}

}  // namespace

TFB_KERNEL_TABLE(LinearBackwardKernels, {&Features, &KeySums, &Rows, &QuerySums, &QueryGradients,
                                         &KeyGradients, &InputGradients, &MatrixParts});

}  // namespace tfb
