#include "attention/sinkhorn/sinkhorn_cuda.h"
#include "attention/sinkhorn/sinkhorn_gradients.h"
#include "core/cuda/for_each.cuh"
#include "core/cuda/register_tile.cuh"
#include "core/cuda/warp.cuh"

namespace tfb::sinkhorn {
namespace {

// The matrix is computed in float64, and stored in fp32 or float64, as on the CPU: see
// sinkhorn_cpu.h.

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;

__device__ int64_t OffsetOf(const DeviceView& view, int64_t b, int64_t h, int64_t n) {
  return b * view.strides[0] + h * view.strides[1] + n * view.strides[2];
}

__device__ void StoreSort(const SortMatrix& sort, int64_t offset, double value) {
  if (sort.is_double) {
    static_cast<double*>(sort.data)[offset] = value;
  } else {
    static_cast<float*>(sort.data)[offset] = static_cast<float>(value);
  }
}

// ---- Pooled rows: a block for each block of tokens, a thread for each channel ----

// Returns channel c of x_j, or 0 where j is no token.
__device__ double PooledChannel(const SortArguments& a, int64_t b, int64_t h, int64_t j,
                                int64_t c) {
  if (!IsToken(a.sizes, a.key_mask, b, j)) return 0;
  const int part = c < a.channels[0] ? 0 : 1;
  const DeviceView& rows = a.pooled_rows[part];
  const int64_t channel = c - (part == 0 ? 0 : a.channels[0]);
  double sum = 0;
  for (int64_t g = 0; g < a.heads_summed[part]; ++g) {
    const int64_t row = OffsetOf(rows, b, h * a.heads_summed[part] + g, j);
    sum += LoadElement(rows.data, rows.element, row + channel * rows.strides[3]);
  }
  return sum;
}

__global__ void __launch_bounds__(kThreads) Pool(SortArguments a) {
  const SinkhornSizes& s = a.sizes;
  const int64_t u = blockIdx.x % s.blocks, head = blockIdx.x / s.blocks;
  const int64_t end = min((u + 1) * s.block, s.tokens);
  for (int64_t c = threadIdx.x; c < s.width; c += kThreads) {
    double sum = 0;
    for (int64_t j = u * s.block; j < end; ++j) {
      sum += PooledChannel(a, head / s.heads, head % s.heads, j, c);
    }
    a.pooled[(head * s.blocks + u) * s.width + c] = sum;
  }
}

// Turns the sums of blocks into those of all tokens up to a block's first.
__global__ void __launch_bounds__(kThreads) SumPrefixes(SortArguments a) {
  const SinkhornSizes& s = a.sizes;
  const int64_t head = blockIdx.x;
  for (int64_t c = threadIdx.x; c < s.width; c += kThreads) {
    double sum = 0;
    for (int64_t u = 0; u < s.blocks; ++u) {
      double& pooled = a.pooled[(head * s.blocks + u) * s.width + c];
      const double of_block = pooled;
      pooled = sum + PooledChannel(a, head / s.heads, head % s.heads, u * s.block, c);
      sum += of_block;
    }
  }
}

// ---- Scores: a block for each row of the matrix, a thread for each unit and each score ----

__device__ double Relu(double x) { return x < 0 ? 0 : x; }

// Returns bias[n] + sum_c in[c] weights[c][n].
__device__ double Unit(int64_t depth, int64_t columns, int64_t n, const double* in,
                       const double* weights, const double* bias) {
  double sum = bias[n];
  for (int64_t c = 0; c < depth; ++c) sum += in[c] * weights[c * columns + n];
  return sum;
}

// Returns entry (u, t) of a matrix of floats.
__device__ double LoadScore(const DeviceView& view, int64_t b, int64_t h, int64_t u, int64_t t) {
  return static_cast<const float*>(view.data)[OffsetOf(view, b, h, u) + t * view.strides[3]];
}

__global__ void __launch_bounds__(kThreads) Score(SortArguments a) {
  double* hidden = reinterpret_cast<double*>(DynamicShared());
  const SinkhornSizes& s = a.sizes;
  const int64_t u = blockIdx.x % s.blocks, head = blockIdx.x / s.blocks;
  const int64_t b = head / s.heads, h = head % s.heads, columns = s.Columns();
  const bool is_given = a.given.data != nullptr;
  const double* in = a.pooled + (head * s.blocks + u) * s.width;
  int64_t depth = s.width;
  if (s.hidden > 0 && !is_given) {
    for (int64_t n = threadIdx.x; n < s.hidden; n += kThreads) {
      hidden[n] = Relu(Unit(depth, s.hidden, n, in, a.network.hidden_weights + h * depth * s.hidden,
                            a.network.hidden_bias + h * s.hidden));
      if (a.hidden != nullptr) a.hidden[(head * s.blocks + u) * s.hidden + n] = hidden[n];
    }
    __syncthreads();
    in = hidden;
    depth = s.hidden;
  }
  const int64_t support = s.Support(u);
  for (int64_t t = threadIdx.x; t < support; t += kThreads) {
    double score = is_given
                       ? LoadScore(a.given, b, h, u, t)
                       : Unit(depth, columns, t, in, a.network.score_weights + h * depth * columns,
                              a.network.score_bias + h * columns);
    if (a.results != nullptr) a.results[(head * s.blocks + u) * columns + t] = score;
    if (s.scores == SortScores::kRelu || s.scores == SortScores::kLogRelu) score = Relu(score);
    if (s.scores == SortScores::kLogRelu) score = log(score + 1e-6);
    if (a.noise.data != nullptr) score += LoadScore(a.noise, b, h, u, t);
    a.logits[(head * s.blocks + u) * columns + t] = score / s.temperature;
  }
}

// ---- The balance: a block for each head, a warp for a row, a thread for a column ----

__device__ void NormaliseRow(double* logits, int64_t support) {
  const int lane = Lane();
  double max = -INFINITY;
  for (int64_t t = lane; t < support; t += kWarp) max = fmax(max, logits[t]);
  max = MaxOfWarp(max);
  double sum = 0;
  for (int64_t t = lane; t < support; t += kWarp) sum += exp(logits[t] - max);
  const double log_sum_exp = max + log(SumOfWarp(sum));
  for (int64_t t = lane; t < support; t += kWarp) logits[t] -= log_sum_exp;
}

// Normalises a column. The sum of a column so far is exp(max) sum; where causal each row uses that
// of the rows up to it.
__device__ void NormaliseColumn(double* logits, const SinkhornSizes& s, int64_t t) {
  const int64_t first = s.causal ? max(t + 1 - s.null_blocks, int64_t{0}) : 0;
  double max = -INFINITY, sum = 0;
  for (int64_t u = first; u < s.blocks; ++u) {
    double& logit = logits[u * s.Columns() + t];
    const double smaller = exp(-fabs(logit - max));
    sum = logit > max ? sum * smaller + 1 : sum + smaller;
    max = logit > max ? logit : max;
    if (s.causal) logit -= max + log(sum);
  }
  if (s.causal) return;
  const double log_sum_exp = max + log(sum);
  for (int64_t u = first; u < s.blocks; ++u) logits[u * s.Columns() + t] -= log_sum_exp;
}

// Normalise the matrix of a head. Other threads have then done their part.
__device__ void NormaliseRows(double* logits, const SinkhornSizes& s) {
  for (int64_t u = Warp(); u < s.blocks; u += kWarps) {
    NormaliseRow(logits + u * s.Columns(), s.Support(u));
  }
  __syncthreads();
}
__device__ void NormaliseColumns(double* logits, const SinkhornSizes& s) {
  for (int64_t t = threadIdx.x; t < s.Columns(); t += kThreads) NormaliseColumn(logits, s, t);
  __syncthreads();
}
__device__ void Iterate(double* logits, const SinkhornSizes& s) {
  NormaliseRows(logits, s);
  NormaliseColumns(logits, s);
}

__global__ void __launch_bounds__(kThreads) Balance(SortArguments a) {
  const SinkhornSizes& s = a.sizes;
  const int64_t columns = s.Columns(), entries = s.blocks * columns;
  double* logits = a.logits + blockIdx.x * entries;
  for (int64_t n = 0; n < s.iterations; ++n) Iterate(logits, s);
  // Numbers that are denormal in fp32 change no sum.
  for (int64_t n = threadIdx.x; n < entries; n += kThreads) {
    const double entry = n % columns < s.Support(n / columns) ? exp(logits[n]) : 0;
    StoreSort(a.sort, blockIdx.x * entries + n, entry < 1.17549435e-38 ? 0 : entry);
  }
}

// ---- The gradient of S: a warp for each entry ----

__global__ void __launch_bounds__(kRowThreads) GradientOfMatrix(SortGradientArguments a) {
  const SinkhornSizes& s = a.sizes;
  const int64_t n = WarpOfGrid(), t = n % s.Columns(), row = n / s.Columns();
  const int64_t u = row % s.blocks, head = row / s.blocks;
  if (head >= s.batch * s.heads) return;
  const int64_t b = head / s.heads, h = head % s.heads;
  const bool counts = u < s.mixed_blocks && t < s.Support(u);
  float sum = 0;
  for (int m = 0; counts && m < 2; ++m) {
    const SortGradientArguments::Mixed& mixed = a.mixed[m];
    for (int64_t r = 0; r < s.block; ++r) {
      const int64_t j = (t - s.null_blocks) * s.block + r;
      if (t >= s.null_blocks && !IsToken(s, a.key_mask, b, j)) continue;
      for (int64_t c = Lane(); c < mixed.channels; c += kWarp) {
        const float x = t < s.null_blocks
                            ? static_cast<float>(mixed.null_rows[h * mixed.channels + c])
                            : Load(mixed.rows, Offset(mixed.rows, b, h, j, c));
        sum += x * Load(mixed.sorted, Offset(mixed.sorted, b, h, u * s.block + r, c));
      }
    }
  }
  sum = SumOfWarp(sum);
  if (Lane() == 0) a.matrix[n] = sum;
}

// ---- The gradient of the scores: a block for each head, as in the balance ----

// Calls body(n) for the thread's entries in the support of a head's matrix.
template <class Body>
__device__ void ForEachEntry(const SinkhornSizes& s, const Body& body) {
  for (int64_t n = threadIdx.x; n < s.blocks * s.Columns(); n += kThreads) {
    if (n % s.Columns() < s.Support(n / s.Columns())) body(n);
  }
}
__device__ void CopyEntries(const SinkhornSizes& s, const double* from, double* to) {
  ForEachEntry(s, [&](int64_t n) { to[n] = from[n]; });
  __syncthreads();
}

// Takes the gradient of a matrix whose columns have been normalised to that of the one before.
__device__ void ThroughColumns(const SinkhornSizes& s, const double* normalised, double* gradient) {
  const int64_t columns = s.Columns();
  for (int64_t t = threadIdx.x; t < columns; t += kThreads) {
    const int64_t first = s.causal ? max(t + 1 - s.null_blocks, int64_t{0}) : 0;
    double sum = 0;
    for (int64_t u = first; !s.causal && u < s.blocks; ++u) sum += gradient[u * columns + t];
    for (int64_t u = s.blocks - 1; u >= first; --u) {
      double& of_entry = gradient[u * columns + t];
      const double share = exp(normalised[u * columns + t]);
      if (s.causal) sum += of_entry;
      of_entry -= share * sum;
      if (s.causal) sum *= 1 - share;
    }
  }
  __syncthreads();
}
// The same for rows.
__device__ void ThroughRows(const SinkhornSizes& s, const double* normalised, double* gradient) {
  for (int64_t u = Warp(); u < s.blocks; u += kWarps) {
    const int64_t support = s.Support(u), first = u * s.Columns();
    double sum = 0;
    for (int64_t t = Lane(); t < support; t += kWarp) sum += gradient[first + t];
    sum = SumOfWarp(sum);
    for (int64_t t = Lane(); t < support; t += kWarp) {
      gradient[first + t] -= sum * exp(normalised[first + t]);
    }
  }
  __syncthreads();
}

__global__ void __launch_bounds__(kThreads) ThroughBalance(SortGradientArguments a) {
  const SinkhornSizes& s = a.sizes;
  const int64_t entries = s.blocks * s.Columns(), head = blockIdx.x;
  double* const logits = a.logits + head * entries;
  double* const rows = a.rows + head * entries;
  double* const gradient = a.matrix + head * entries;
  const auto stored = [&](int64_t n) {
    return a.stored + (head * a.stored_matrices + n / a.stride) * entries;
  };
  for (int64_t n = 0; n < s.iterations; ++n) {
    if (n % a.stride == 0) CopyEntries(s, logits, stored(n));
    Iterate(logits, s);
  }
  ForEachEntry(s, [&](int64_t n) { gradient[n] *= exp(logits[n]); });
  __syncthreads();
  for (int64_t n = s.iterations - 1; n >= 0; --n) {
    CopyEntries(s, stored(n), logits);
    for (int64_t step = 0; step < n % a.stride; ++step) Iterate(logits, s);
    NormaliseRows(logits, s);
    CopyEntries(s, logits, rows);
    NormaliseColumns(logits, s);
    ThroughColumns(s, logits, gradient);
    ThroughRows(s, rows, gradient);
  }
  ForEachEntry(s, [&](int64_t n) { gradient[n] /= s.temperature; });
}

// ---- Sums of blocks ----
//
// A block makes 64 sorted blocks x 64 of their block x channels numbers with 256 threads, each 4 x 4
// of it in registers, over 16 blocks at a time.
//   shared memory: 16 x (68 + 64) x 4 B = 8.25 KiB; twice that in float64

constexpr int kTile = 64;
constexpr int kDepth = 16;
constexpr int kPart = 4;  // rows and columns of a thread
constexpr int kLoads = kTile * kDepth / kThreads;

template <class Real>
struct alignas(16) MixTiles {
  Real sort[kDepth][kTile + 4];  // transposed
  Real rows[kDepth][kTile];
};

// The place of the numbers that a block computes.
struct MixTask {
  int64_t b, h;
  int64_t first_row;     // sorted blocks
  int64_t first_column;  // the first of the block x channels columns
};

// A thread loads entry t % 16 of the rows t / 16 + 16 n of S, and number t % 64 of the blocks t /
// 64 + 4 n.
template <class Real>
class MixLoader {
 public:
  __device__ MixLoader(const MixArguments& a, const MixTask& task)
      : a_(a),
        task_(task),
        sort_(static_cast<const Real*>(a.sort.data) +
              (task.b * a.sizes.heads + task.h) * a.sizes.blocks * a.sizes.Columns()) {
    const int64_t column = task.first_column + threadIdx.x % kTile;
    row_of_block_ = column / a.channels;
    channel_ = column % a.channels;
  }

  // Loads the columns of S from `first_block` on, with zeros beyond the last.
  __device__ void Load(int64_t first_block, MixTiles<Real>* tiles) const {
    const SinkhornSizes& s = a_.sizes;
    const int entry = static_cast<int>(threadIdx.x) % kDepth;
    const int column = static_cast<int>(threadIdx.x) % kTile;
#pragma unroll
    for (int n = 0; n < kLoads; ++n) {
      const int row = static_cast<int>(threadIdx.x) / kDepth + n * (kThreads / kDepth);
      const int64_t u = task_.first_row + row;
      const bool exists = u < s.mixed_blocks && first_block + entry < s.Columns();
      tiles->sort[entry][row] = exists ? sort_[u * s.Columns() + first_block + entry] : 0;
    }
#pragma unroll
    for (int n = 0; n < kLoads; ++n) {
      const int row = static_cast<int>(threadIdx.x) / kTile + n * (kThreads / kTile);
      tiles->rows[row][column] = row_of_block_ < s.block ? Row(first_block + row) : 0;
    }
  }

 private:
  // Returns the thread's number of block t, counted as columns of S are.
  __device__ Real Row(int64_t t) const {
    const SinkhornSizes& s = a_.sizes;
    if (t < s.null_blocks) {
      return static_cast<Real>(a_.null_rows[task_.h * a_.channels + channel_]);
    }
    const int64_t j = (t - s.null_blocks) * s.block + row_of_block_;
    if (!IsToken(s, a_.key_mask, task_.b, j)) return 0;
    return LoadElement(a_.from.data, a_.from.element,
                       OffsetOf(a_.from, task_.b, task_.h, j) + channel_ * a_.from.strides[3]);
  }

  const MixArguments& a_;
  const MixTask& task_;
  const Real* sort_;
  int64_t row_of_block_;
  int64_t channel_;
};

// Where the tile has blocks outside the support, they are skipped: a product with 0 would let a NaN
// of the future through.
template <bool kWhole, class Real>
__device__ void AddTiles(const MixTiles<Real>& tiles, int row, int column, int64_t first_support,
                         Real (&sums)[kPart][kPart]) {
#pragma unroll
  for (int t = 0; t < kDepth; ++t) {
    Real rows[kPart], columns[kPart];
    LoadVectors(&tiles.sort[t][row], rows);
    LoadVectors(&tiles.rows[t][column], columns);
    AddOuterProduct(rows, columns, sums, 0, [&](int r) { return kWhole || t < first_support + r; });
  }
}

template <class Real>
__global__ void __launch_bounds__(kThreads) Mix(MixArguments a) {
  __shared__ MixTiles<Real> tiles;
  const SinkhornSizes& s = a.sizes;
  const int64_t row_tiles = CeilDiv(s.mixed_blocks, kTile);
  const int64_t column_tiles = CeilDiv(s.block * a.channels, kTile);
  const int64_t head = blockIdx.x / (row_tiles * column_tiles);
  const MixTask task = {head / s.heads, head % s.heads, blockIdx.x % row_tiles * kTile,
                        blockIdx.x / row_tiles % column_tiles * kTile};
  const int row = static_cast<int>(threadIdx.x) / (kTile / kPart) * kPart;
  const int column = static_cast<int>(threadIdx.x) % (kTile / kPart) * kPart;
  const MixLoader<Real> loader(a, task);
  Real sums[kPart][kPart] = {};
  const int64_t columns = s.Columns();
  const int64_t end = s.causal ? min(task.first_row + kTile + s.null_blocks, columns) : columns;
  const int64_t whole = s.causal ? s.Support(task.first_row) : end;  // all rows take these
  for (int64_t t = 0; t < end; t += kDepth) {
    __syncthreads();  // the tiles have been read
    loader.Load(t, &tiles);
    __syncthreads();
    if (s.causal && t + kDepth > whole) {
      AddTiles<false>(tiles, row, column, whole + row - t, sums);
    } else {
      AddTiles<true>(tiles, row, column, 0, sums);
    }
  }
#pragma unroll
  for (int r = 0; r < kPart; ++r) {
#pragma unroll
    for (int c = 0; c < kPart; ++c) {
      const int64_t u = task.first_row + row + r, n = task.first_column + column + c;
      if (u >= s.mixed_blocks || n >= s.block * a.channels) continue;
      StoreElement(a.to.data, a.to.element,
                   OffsetOf(a.to, task.b, task.h, u * s.block + n / a.channels) +
                       n % a.channels * a.to.strides[3],
                   static_cast<float>(sums[r][c]));
    }
  }
}

// ---- Launching ----

template <class Arguments>
const char* LaunchBlocks(const char* name, void (*kernel)(Arguments), int64_t blocks, void* stream,
                         const Arguments& a, int64_t shared_doubles = 0) {
  const size_t shared_bytes = static_cast<size_t>(shared_doubles) * sizeof(double);
  return Launch(name, kernel, {blocks, kThreads, shared_bytes}, stream, a);
}

const char* LaunchScore(const SortArguments& a, void* stream) {
  const int64_t heads = a.sizes.batch * a.sizes.heads;
  const bool is_given = a.given.data != nullptr;
  const char* error =
      is_given ? nullptr : LaunchBlocks("Pool", &Pool, heads * a.sizes.blocks, stream, a);
  if (error == nullptr && a.sizes.causal && !is_given) {
    error = LaunchBlocks("SumPrefixes", &SumPrefixes, heads, stream, a);
  }
  if (error != nullptr) return error;
  return LaunchBlocks("Score", &Score, heads * a.sizes.blocks, stream, a, a.sizes.hidden);
}
const char* LaunchBalance(const SortArguments& a, void* stream) {
  return LaunchBlocks("Balance", &Balance, a.sizes.batch * a.sizes.heads, stream, a);
}

const char* LaunchGradientOfMatrix(const SortGradientArguments& a, void* stream) {
  const SinkhornSizes& s = a.sizes;
  return LaunchWarps("GradientOfMatrix", &GradientOfMatrix,
                     s.batch * s.heads * s.blocks * s.Columns(), stream, a);
}
const char* LaunchThroughBalance(const SortGradientArguments& a, void* stream) {
  return LaunchBlocks("ThroughBalance", &ThroughBalance, a.sizes.batch * a.sizes.heads, stream, a);
}

const char* LaunchMix(const MixArguments& a, void* stream) {
  const SinkhornSizes& s = a.sizes;
  const int64_t row_tiles = CeilDiv(s.mixed_blocks, kTile);
  const int64_t column_tiles = CeilDiv(s.block * a.channels, kTile);
  const int64_t blocks = s.batch * s.heads * row_tiles * column_tiles;
  return a.sort.is_double ? LaunchBlocks("Mix", &Mix<double>, blocks, stream, a)
                          : LaunchBlocks("Mix", &Mix<float>, blocks, stream, a);
}

}  // namespace

TFB_KERNEL_TABLE(SinkhornKernels, {&LaunchScore, &LaunchBalance, &LaunchMix,
                                   &LaunchGradientOfMatrix, &LaunchThroughBalance});
TFB_FOR_EACH(KeysAmongMixedRows);
TFB_FOR_EACH_IN_ROWS(CopyOfSort);
TFB_FOR_EACH_IN_ROWS(AddMatrix);
TFB_FOR_EACH_IN_ROWS(AddNullRows);
TFB_FOR_EACH_IN_ROWS(AddLayerGradients);
TFB_FOR_EACH_IN_ROWS(AddPooledGradients);
TFB_FOR_EACH_IN_ROWS(AddSortedGradients);
TFB_FOR_EACH(ThroughScores);
TFB_FOR_EACH_IN_ROWS(ThroughLayer);
TFB_FOR_EACH_IN_ROWS(SumFromBlocks);

}  // namespace tfb::sinkhorn
