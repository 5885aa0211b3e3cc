// Engine linear on CUDA: sums over keys.
//
// Summing. A block takes the keys of one group of one key-value head, 128 at a time, and one tile of
// 64 features, whose sums of 64 x value_dim it holds in registers:
//
//   projections [128 x 64] = K [128 x head_dim] W^T [head_dim x 64]
//   features    [128 x 64] = exp(projections - |k|^2 / 2 - R_t), at the tile's own reference
//   sums        [64 x value_dim] += features^T V
//
// Since a tile has a reference of its own, blocks are independent. Each half of the warps takes
// half of the keys of a step, and the halves are added at the end. Keys and values are read once a
// tile: (head_dim + value_dim) 2 B x 128 from L2, 32 KiB at 64 channels of 16 bits, for 2 x 128 x
// 64 x 64 multiply-adds, 1 M. Shared memory in bytes:
//
//                    value_dim <= 64   <= 128     inputs or features, values, W
//   Fp32             88 K              120 K
//   SplitBf16        103 K             136 K
//
// so that two blocks share a multiprocessor of sm_90 at 64. Wider values are cut into parts of 128,
// whose blocks repeat the features.
//
// Merging. A block takes one tile of one head and goes through the groups in their order, so that
// the result is the same in every run.
#include "core/linear/linear_math.cuh"
#include "core/linear/linear_rows.cuh"

namespace tfb {
namespace {

constexpr int kKeys = 128;  // of a step

__host__ __device__ inline int64_t ValueParts(const LinearArguments& a, int columns) {
  return (a.value_dim + columns - 1) / columns;
}

template <class Math, int kPanels>
class SumBlock {
 public:
  static constexpr int kColumns = kTile * kPanels;
  using Inputs = typename Math::template Inputs<kKeys>;
  using Features = typename Math::template Down<kKeys, kTile>;
  using Matrix = typename Math::Matrix;
  using Values = typename Math::template Down<kKeys, kColumns>;
  static constexpr int kInputBytes =
      Inputs::kBytes > Features::kBytes ? Inputs::kBytes : Features::kBytes;
  static constexpr int kElementBytes = sizeof(typename Math::Raw) / 4;
  static constexpr int kFloats = 3 * kKeys + 2 * kWarps;
  static constexpr int kBytes =
      kInputBytes + Values::kBytes + Matrix::kBytes + kFloats * static_cast<int>(sizeof(float));
  static constexpr int kResultRow = kColumns + Math::kPad;
  static_assert((kTile + 1) * kResultRow * 4 <= Values::kBytes, "the sums take the values' place");

  __device__ SumBlock(const LinearArguments& a, int64_t task, unsigned char* memory)
      : a_(a),
        inputs_(memory),
        features_(memory),
        values_(memory + kInputBytes),
        matrix_(memory + kInputBytes + Values::kBytes),
        result_(reinterpret_cast<float*>(memory + kInputBytes)),
        half_square_(
            reinterpret_cast<float*>(memory + kInputBytes + Values::kBytes + Matrix::kBytes)),
        seen_(half_square_ + kKeys),
        normaliser_(seen_ + kKeys),
        partial_(normaliser_ + kKeys) {
    const int64_t parts = ValueParts(a, kColumns);
    part_ = static_cast<int>(task % parts);
    task /= parts;
    tile_ = task % a.sums.tiles;
    task /= a.sums.tiles;
    group_ = task % a.summed_groups;
    head_ = task / a.summed_groups;
    batch_ = static_cast<int>(head_ / a.kv_heads);
    kv_head_ = static_cast<int>(head_ % a.kv_heads);
    first_column_ = part_ * kColumns;
    columns_ = min(kColumns, a.value_dim - first_column_);
  }

  __device__ void Run() {
    for (int p = 0; p < kPanels; ++p) sums_[p].Clear();
    const int64_t begin = group_ * a_.group_tokens;
    const int64_t end = min(begin + a_.group_tokens, a_.kv_tokens);
    for (int64_t first = begin; first < end; first += kKeys) {
      __syncthreads();  // the previous step has been read
      AddKeys(first, static_cast<int>(min(end - first, int64_t{kKeys})));
    }
    __syncthreads();
    Finish();
  }

 private:
  // A thread loads four channels of each of the rows Row() + 16 n.
  static constexpr int kRowStep = kThreads / 16;
  __device__ static int Row() { return Thread() / 16; }
  __device__ static int Channel() { return Thread() % 16 * 4; }
  // A warp's place in projections, and in sums.
  __device__ static int TokenRow() { return OpaqueWarp() % 4 * 32; }
  __device__ static int FeatureColumn() { return OpaqueWarp() / 4 * 32; }
  __device__ static int ResultRow() { return OpaqueWarp() % 2 * 32; }
  __device__ static int ResultColumn() { return OpaqueWarp() / 2 % 2 * 32; }

  __device__ void AddKeys(int64_t first, int count) {
    unsigned seen = 0;  // bit n: the thread's row n is a token
#pragma unroll
    for (int n = 0; n < kKeys / kRowStep; ++n) {
      const int row = Row() + n * kRowStep;
      const bool is_seen = row < count && IsToken(a_, batch_, first + row);
      seen |= (is_seen ? 1u : 0u) << n;
      if (Channel() == 0) seen_[row] = is_seen ? 1.0f : 0.0f;
    }
    tokens_ += __popc(seen);
    LoadValues(first, seen);
    Fragment<32> features;
    features.Clear();
    for (int depth = 0; depth < a_.head_dim; depth += kTile) {
      if (depth > 0) __syncthreads();
      LoadInputs(first, seen, depth);
      // W stays loaded where one piece of channels is all of it.
      if (a_.head_dim > kTile || !has_matrix_) LoadMatrix(depth);
      has_matrix_ = true;
      __syncthreads();
      const int channels = min(kTile, (a_.head_dim - depth + 15) / 16 * 16);
      AddProjections<Math>(a_, inputs_, TokenRow(), matrix_, FeatureColumn(), channels, &features);
    }
    BringToUnitLength<Math>(a_, half_square_ + TokenRow(), &features);
    HideMissingFeatures<Math>(a_, tile_, FeatureColumn(), &features);
    MakePlainFeatures<Math>(a_, tile_, FeatureColumn(), &features);
    MakeFeatures(first, count, &features);
    features_.Store(TokenRow(), FeatureColumn(), features);
    __syncthreads();
    const int half = OpaqueWarp() / 4 * kTile;
    const int depth = min(kTile, (max(count - half, 0) + 15) / 16 * 16);
#pragma unroll
    for (int p = 0; p < kPanels; ++p) {
      Math::Multiply(features_.From(half), ResultRow(), values_.From(half),
                     p * kTile + ResultColumn(), depth, &sums_[p], p == 0 ? normalisers_ : nullptr);
    }
  }

  __device__ void LoadValues(int64_t first, unsigned seen) {
    const int row = Row(), channel = Channel();
    const char* from = RowOf(a_.v, batch_, kv_head_, first + row);
    const int64_t step = kRowStep * a_.v.strides[2] * kElementBytes;
#pragma unroll 4
    for (int n = 0; n < kKeys / kRowStep; ++n, from += step) {
#pragma unroll
      for (int p = 0; p < kPanels; ++p) {
        const int column = p * kTile + channel;
        typename Math::Raw raw = Math::Nothing();
        if ((seen >> n & 1) != 0) {
          raw = FetchFour<Math>(from, a_.v.strides[3], first_column_ + column, a_.value_dim,
                                a_.vector_v);
        }
        const float4 x = Math::Convert(raw, a_.v.element);
        values_.Store(row + n * kRowStep, column, x);
        value_sums_[p].x += x.x;
        value_sums_[p].y += x.y;
        value_sums_[p].z += x.z;
        value_sums_[p].w += x.w;
      }
    }
  }

  __device__ void LoadInputs(int64_t first, unsigned seen, int depth) {
    const int row = Row(), channel = Channel();
    const char* from = RowOf(a_.k, batch_, kv_head_, first + row);
    const int64_t step = kRowStep * a_.k.strides[2] * kElementBytes;
#pragma unroll 4
    for (int n = 0; n < kKeys / kRowStep; ++n, from += step) {
      typename Math::Raw raw = Math::Nothing();
      if ((seen >> n & 1) != 0) {
        raw = FetchFour<Math>(from, a_.k.strides[3], depth + channel, a_.head_dim, a_.vector_k);
      }
      const int at = row + n * kRowStep;
      Math::StoreInputs(inputs_, at, channel, raw, a_.k.element);
      AddHalfSquare(a_, Math::Convert(raw, a_.k.element), depth == 0, half_square_ + at);
    }
  }

  __device__ void LoadMatrix(int depth) {
    const int channel = Channel();
    for (int row = Row(); row < TileProjections(a_); row += kRowStep) {
      const float4 x =
          FetchMatrix(a_, kv_head_, tile_ * TileProjections(a_) + row, depth + channel);
      matrix_.Store(row, channel, Times(x, a_.map.input_scale));
    }
  }

  // Turns projections into features, and scales the sums to the reference that these keys give.
  __device__ void MakeFeatures(int64_t first, int count, Fragment<32>* features) {
    float reference = -INFINITY, maximum = -INFINITY;
    float gates[4] = {};
    const float decay = LoadGates(first, count, gates);
    const int first_row = TokenRow() + Math::FirstRow();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = first_row + Math::Row(i);
      float largest = 0;
      if (IsExponential(a_)) largest = MaxOf(features->at[i], 8);
      if (seen_[row] == 0) continue;
      reference = fmaxf(
          reference, AsReference(IsExponential(a_) ? largest - HalfSquareOf(a_, half_square_[row])
                                                   : gates[i]));
      maximum = fmaxf(maximum, largest);
    }
    reference = MaxOfWarp(reference);
    maximum = MaxOfWarp(maximum);
    if (OpaqueLane() == 0) {
      partial_[OpaqueWarp()] = reference;
      partial_[kWarps + OpaqueWarp()] = maximum;
    }
    __syncthreads();
    reference = fmaxf(reference_, MaxOf(partial_, kWarps));
    maximum_ = fmaxf(maximum_, MaxOf(partial_ + kWarps, kWarps));
    const float rescale = Rescale(reference_, reference);
    reference_ = reference + decay;
    decay_ += decay;
#pragma unroll
    for (int p = 0; p < kPanels; ++p) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 8; ++j) sums_[p].at[i][j] *= rescale;
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      normalisers_[i] *= rescale;
      const int row = first_row + Math::Row(i);
      const bool is_seen = seen_[row] != 0;
      const float half_square = HalfSquareOf(a_, half_square_[row]), shift = Shift(reference);
      const float scale = a_.map.gated ? ExpOf(gates[i] - shift) : 1;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float x = features->at[i][j];
        // In this order of subtractions no exponent is above 0.
        const float feature = IsExponential(a_) ? ExpOf(x - half_square - shift) : scale * x;
        features->at[i][j] = is_seen ? feature : 0;
      }
    }
  }

  // Loads key_gates of the lane's rows, and returns G of the last key, relative to the first of
  // these 128 keys.
  __device__ float LoadGates(int64_t first, int count, float gates[4]) const {
    if (!a_.map.gated) return 0;
    const bool second = TokenRow() >= kTile;  // whether the row is in the second of two chunks
    const float half = count > kTile ? GatesOf(a_, head_, first + kTile - 1)[1] : 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = TokenRow() + Math::FirstRow() + Math::Row(i);
      gates[i] = GatesOf(a_, head_, first + min(row, count - 1))[0] - (second ? half : 0);
    }
    return half + GatesOf(a_, head_, first + count - 1)[1];
  }

  // Adds the halves of the warps, and writes the sums.
  __device__ void Finish() {
    if (OpaqueWarp() >= kWarps / 2) PutResult(/*adds=*/false);
    __syncthreads();
    if (OpaqueWarp() < kWarps / 2) PutResult(/*adds=*/true);
    __syncthreads();
    const int t = Thread();
    if (t < kColumns) {
      float sum = 0;
      for (int r = 0; r < kTile; ++r) sum += result_[r * kResultRow + t];
      result_[kTile * kResultRow + t] = sum;
    } else if (t / kWarp == kWarps - 1) {
      const float sum = SumOfWarp(normaliser_[OpaqueLane()] + normaliser_[OpaqueLane() + 32]);
      if (OpaqueLane() == 0) normaliser_[kTile] = sum;
    }
    __syncthreads();
    float* head = a_.group_sums + (head_ * a_.groups + group_) * a_.sums.head;
    float* tile = head + tile_ * a_.sums.tile;
    for (int r = OpaqueWarp(); r <= kTile; r += kWarps) {
      float* row = tile + r * a_.sums.row;
      StoreRow(row, result_ + r * kResultRow, normaliser_[r]);
    }
    if (t < 4 && part_ == 0) {
      const float header[4] = {reference_, maximum_, decay_, 0};
      tile[(kTile + 1) * a_.sums.row + t] = header[t];
    }
    if (tile_ == 0) StoreValueSums(head + a_.sums.tiles * a_.sums.tile);
  }
  // Stores this part's columns of a row, and `ones`. One warp calls it.
  __device__ void StoreRow(float* row, const float* columns, float ones) {
    for (int c = OpaqueLane(); c < columns_; c += 32) row[first_column_ + c] = columns[c];
    const int behind = a_.value_dim + OpaqueLane();
    if (part_ == 0 && behind < a_.sums.row) row[behind] = behind == a_.sums.ones ? ones : 0;
  }

  __device__ void PutResult(bool adds) {
    const int row = ResultRow() + Math::FirstRow(), column = ResultColumn() + Math::FirstColumn();
    float* first = result_ + row * kResultRow + column;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int p = 0; p < kPanels; ++p) {
#pragma unroll
        for (int j = 0; j < 8; j += Math::kNeighbours) {
          float* to = first + Math::Row(i) * kResultRow + p * kTile + Math::Column(j);
          float sums[Math::kNeighbours] = {};
          if (adds) LoadVectors(to, sums);
#pragma unroll
          for (int n = 0; n < Math::kNeighbours; ++n) {
            sums[n] = adds ? sums[n] + sums_[p].at[i][j + n] : sums_[p].at[i][j + n];
          }
          StoreVectors(sums, to);
        }
      }
      if (column > 0) continue;
      float* to = normaliser_ + row + Math::Row(i);
      *to = adds ? *to + normalisers_[i] : normalisers_[i];
    }
  }

  __device__ void StoreValueSums(float* to) {
    __syncthreads();  // the result has been read
#pragma unroll
    for (int p = 0; p < kPanels; ++p) {
      *reinterpret_cast<float4*>(result_ + Row() * kResultRow + p * kTile + Channel()) =
          value_sums_[p];
    }
    if (Channel() == 0) normaliser_[Row()] = static_cast<float>(tokens_);
    __syncthreads();
    const int t = Thread();
    if (t < kColumns) {
      float sum = 0;
      for (int r = 0; r < kRowStep; ++r) sum += result_[r * kResultRow + t];
      result_[kRowStep * kResultRow + t] = sum;
    }
    __syncthreads();
    if (OpaqueWarp() > 0) return;
    const float tokens = SumOfWarp(OpaqueLane() < kRowStep ? normaliser_[OpaqueLane()] : 0);
    StoreRow(to, result_ + kRowStep * kResultRow, tokens);
  }

  const LinearArguments& a_;
  const Inputs inputs_;
  const Features features_;
  const Values values_;
  const Matrix matrix_;
  float* const result_;       // [65][kResultRow]
  float* const half_square_;  // [kKeys]
  float* const seen_;         // [kKeys]: 1 for a token
  float* const normaliser_;   // [65]
  float* const partial_;      // [2][kWarps]
  int64_t tile_, group_, head_;
  int part_, batch_, kv_head_;
  int first_column_, columns_;
  bool has_matrix_ = false;
  float reference_ = -INFINITY;
  float maximum_ = -INFINITY;
  float decay_ = 0;  // G of the last key
  Fragment<32> sums_[kPanels];
  float normalisers_[4] = {};
  float4 value_sums_[kPanels] = {};  // sums of values over this thread's rows
  int tokens_ = 0;
};

template <class Math, int kPanels>
__global__ void __launch_bounds__(kThreads, kPanels == 1 ? 2 : 1)
    LinearSum(const LinearArguments a) {
  using Block = SumBlock<Math, kPanels>;
  const int64_t tasks =
      a.batch * a.kv_heads * a.summed_groups * a.sums.tiles * ValueParts(a, Block::kColumns);
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    Block(a, task, DynamicShared<Block::kBytes>()).Run();
    __syncthreads();
  }
}

template <class Math, int kPanels>
const char* LaunchSum(const char* name, const LinearArguments& a, void* stream) {
  using Block = SumBlock<Math, kPanels>;
  const int64_t tasks =
      a.batch * a.kv_heads * a.summed_groups * a.sums.tiles * ValueParts(a, Block::kColumns);
  return Launch(name, &LinearSum<Math, kPanels>,
                {BlocksInTurns(tasks, a.max_blocks), kThreads, static_cast<size_t>(Block::kBytes)},
                stream, a);
}

// All instantiations: two arithmetics, two widths of values.
const char* Sum(const LinearArguments& a, void* stream) {
  const bool narrow = a.value_dim <= kTile;
  if (a.k.element == Element::kF32) {
    return narrow ? LaunchSum<Fp32, 1>("LinearSum<Fp32, 1>", a, stream)
                  : LaunchSum<Fp32, 2>("LinearSum<Fp32, 2>", a, stream);
  }
  return narrow ? LaunchSum<SplitBf16, 1>("LinearSum<SplitBf16, 1>", a, stream)
                : LaunchSum<SplitBf16, 2>("LinearSum<SplitBf16, 2>", a, stream);
}

// ---- Merging ----

constexpr int kMergedGroups = kLinearGroups;

__global__ void __launch_bounds__(kThreads) LinearMerge(const LinearArguments a) {
  __shared__ float references[kMergedGroups], maxima[kMergedGroups], decays[kMergedGroups];
  __shared__ float of_before[kMergedGroups], of_group[kMergedGroups];
  const int64_t tasks = a.batch * a.kv_heads * a.sums.tiles;
  const int t = Thread();
  const int groups = static_cast<int>(a.groups), summed = static_cast<int>(a.summed_groups);
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const int64_t head = task / a.sums.tiles, tile = task % a.sums.tiles;
    float* total = a.total + head * a.sums.head;
    float* first = a.group_sums + head * a.groups * a.sums.head;
    const int64_t at = tile * a.sums.tile, length = (kTile + 1) * a.sums.row;
    // The sums before all groups.
    const float reference = a.continues ? total[at + length] : -INFINITY;
    const float maximum = a.continues ? total[at + length + 1] : -INFINITY;
    __syncthreads();
    if (t < summed) {
      references[t] = first[t * a.sums.head + at + length];
      maxima[t] = first[t * a.sums.head + at + length + 1];
      decays[t] = first[t * a.sums.head + at + length + 2];
    }
    __syncthreads();
    for (int g = t; g <= groups; g += kThreads) {
      float before = reference, largest = maximum;
      for (int n = 0; n < min(g, summed); ++n) {
        before = fmaxf(before + decays[n], references[n]);
        largest = fmaxf(largest, maxima[n]);
      }
      float* header = (g < groups ? first + g * a.sums.head : total) + at + length;
      if (g == groups || a.has_prefixes) {
        header[0] = before;
        header[1] = largest;
        header[2] = header[3] = 0;
      }
      if (g >= summed) continue;
      const float faded = before + decays[g], after = fmaxf(faded, references[g]);
      of_before[g] = Rescale(faded, after);
      of_group[g] = Rescale(references[g], after);
    }
    __syncthreads();
    const auto merge = [&](int64_t offset, bool rescaled) {
      float4 sum = make_float4(0, 0, 0, 0);
      if (a.continues) sum = *reinterpret_cast<const float4*>(total + offset);
      for (int g = 0; g < groups; ++g) {
        float4* group = reinterpret_cast<float4*>(first + g * a.sums.head + offset);
        const float4 before = sum;
        if (g < summed) {
          const float4 more = *group;
          const float x = rescaled ? of_before[g] : 1, y = rescaled ? of_group[g] : 1;
          sum = make_float4(x * sum.x + y * more.x, x * sum.y + y * more.y, x * sum.z + y * more.z,
                            x * sum.w + y * more.w);
        }
        if (a.has_prefixes) *group = before;
      }
      *reinterpret_cast<float4*>(total + offset) = sum;
    };
    for (int64_t n = t * 4; n < length; n += kThreads * 4) merge(at + n, true);
    if (tile > 0) continue;
    for (int64_t n = t * 4; n < a.sums.row; n += kThreads * 4) {
      merge(a.sums.tiles * a.sums.tile + n, false);
    }
  }
}

// ---- Gates ----

// A gate below e^-18, a quarter of a rounding of 1, is a complete reset; the bound keeps sums of
// logarithms small. A gate of NaN counts as one, since its key's rho_j is NaN.
constexpr float kLeastLogGate = -18;

// Returns log(1 / (1 + exp(-x))).
__device__ inline float LogSigmoid(float x) { return fminf(x, 0) - log1pf(expf(-fabsf(x))); }

// A warp takes 64 keys of a head, and a lane has key `lane` of each half.
__global__ void __launch_bounds__(kThreads) LinearGates(const LinearArguments a) {
  const int64_t chunks = CeilDiv(a.kv_tokens, kTile);
  const int64_t tasks = a.batch * a.kv_heads * chunks;
  for (int64_t task = static_cast<int64_t>(blockIdx.x) * kWarps + OpaqueWarp(); task < tasks;
       task += static_cast<int64_t>(gridDim.x) * kWarps) {
    const int64_t head = task / chunks, first = task % chunks * kTile;
    float before = 0;
    for (int half = 0; half < kTile; half += 32) {
      float logit = 0;
      for (int n = 0; n < 32; ++n) {
        const int64_t key = first + half + n;
        if (key >= a.kv_tokens || !IsToken(a, head / a.kv_heads, key)) continue;
        const float of_key = GateLogit(a, head, key);
        if (OpaqueLane() == n) logit = of_key;
      }
      const int64_t key = first + half + OpaqueLane();
      const bool is_seen = key < a.kv_tokens && IsToken(a, head / a.kv_heads, key);
      const float log_gate = LogSigmoid(logit);
      const float kept = is_seen ? fmaxf(log_gate, kLeastLogGate) : 0;
      const float decay = before + RunningSum(kept);
      before = __shfl_sync(~0u, decay, 31);
      if (key >= a.kv_tokens) continue;
      float* to = a.key_gates + (head * a.kv_tokens + key) * 2;
      to[0] = LogSigmoid(-logit) - decay;
      to[1] = decay;
    }
  }
}

const char* Gates(const LinearArguments& a, void* stream) {
  const int64_t chunks = a.batch * a.kv_heads * CeilDiv(a.kv_tokens, kTile);
  return Launch("LinearGates", &LinearGates,
                {BlocksInTurns(CeilDiv(chunks, kWarps), a.max_blocks), kThreads}, stream, a);
}

const char* Merge(const LinearArguments& a, void* stream) {
  return Launch("LinearMerge", &LinearMerge,
                {BlocksInTurns(a.batch * a.kv_heads * a.sums.tiles, a.max_blocks), kThreads},
                stream, a);
}

}  // namespace

TFB_KERNEL_TABLE(LinearSumKernels, {&Gates, &Sum, &Merge});

}  // namespace tfb
