// Engine linear on CUDA: sums over keys.
//
// Summing. A block takes the keys of one group of one key-value head, 128 at a time, and one tile of
// 64 features, whose sums of 64 x value_dim it holds in registers:
//
//   projections [128 x 64] = K [128 x head_dim] W^T [head_dim x 64]
//   features    [128 x 64] = exp(projections - |k|^2 / 2 - R_t), at the tile's own reference
//   sums        [64 x value_dim] += features^T V
//
// Since a tile has a reference of its own, blocks know nothing of each other. Each half of the
// warps takes half of the keys of a step, and the halves are added at the end. Keys and values are
// read once a tile: (head_dim + value_dim) 2 B x 128 from L2, 32 KiB at 64 channels of 16 bits, for
// 2 x 128 x 64 x 64 multiply-adds, 1 M. Shared memory in bytes:
//
//                    value_dim <= 64   <= 128     inputs or features, values, W
//   Fp32             87 K              120 K
//   SplitBf16        91 K              122 K
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
  using Inputs = typename Math::template Across<kKeys>;
  using Features = typename Math::template Down<kKeys, kTile>;
  using Matrix = typename Math::template Across<kTile>;
  using Values = typename Math::template Down<kKeys, kColumns>;
  static constexpr int kInputBytes =
      Inputs::kBytes > Features::kBytes ? Inputs::kBytes : Features::kBytes;
  static constexpr int kFloats = 3 * kKeys + 2 * kWarps;
  static constexpr int kBytes =
      kInputBytes + Values::kBytes + Matrix::kBytes + kFloats * static_cast<int>(sizeof(float));
  static_assert((kTile + 1) * kColumns * 4 <= Values::kBytes, "the sums take the values' place");

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
    part_ = task % parts;
    task /= parts;
    tile_ = task % a.sums.tiles;
    task /= a.sums.tiles;
    group_ = task % a.summed_groups;
    head_ = task / a.summed_groups;
    batch_ = head_ / a.kv_heads;
    kv_head_ = head_ % a.kv_heads;
    first_column_ = static_cast<int>(part_) * kColumns;
    columns_ = min(kColumns, a.value_dim - first_column_);
  }

  __device__ void Run() {
    for (int p = 0; p < kPanels; ++p) sums_[p].Clear();
    const int64_t begin = group_ * a_.group_tokens;
    const int64_t end = min(begin + a_.group_tokens, a_.kv_tokens);
    for (int64_t first = begin; first < end; first += kKeys) {
      __syncthreads();  // the step before has read all
      AddKeys(first, static_cast<int>(min(end - first, int64_t{kKeys})));
    }
    __syncthreads();
    Finish();
  }

 private:
  // Threads load four channels of rows row_ + 16 n each.
  static constexpr int kRowStep = kThreads / 16;

  __device__ void AddKeys(int64_t first, int count) {
    unsigned seen = 0;  // bit n: row row_ + 16 n is a token
#pragma unroll
    for (int n = 0; n < kKeys / kRowStep; ++n) {
      const int row = row_ + n * kRowStep;
      const bool is_seen = row < count && IsToken(a_, batch_, first + row);
      seen |= (is_seen ? 1u : 0u) << n;
      if (channel_ == 0) seen_[row] = is_seen ? 1.0f : 0.0f;
    }
    tokens_ += __popc(seen);
    LoadValues(first, seen);
    Fragment<32> features;
    features.Clear();
    for (int depth = 0; depth < a_.head_dim; depth += kTile) {
      if (depth > 0) __syncthreads();
      LoadInputs(first, seen, depth);
      // W stays where one piece of channels is all of it.
      if (a_.head_dim > kTile || !has_matrix_) LoadMatrix(depth);
      has_matrix_ = true;
      __syncthreads();
      const int channels = min(kTile, (a_.head_dim - depth + 15) / 16 * 16);
      AddProjections<Math>(a_, inputs_, row32_, matrix_, column32_, channels, &features);
    }
    HideMissingFeatures<Math>(a_, tile_, column32_, &features);
    MakeFeatures(&features);
    features_.Store(row32_, column32_, features);
    __syncthreads();
    const int half = Warp() / 4 * kTile;
    const int depth = min(kTile, (max(count - half, 0) + 15) / 16 * 16);
#pragma unroll
    for (int p = 0; p < kPanels; ++p) {
      Math::Multiply(features_.From(half), result_row_, values_.From(half),
                     p * kTile + result_column_, depth, &sums_[p], p == 0 ? normalisers_ : nullptr);
    }
  }

  __device__ void LoadValues(int64_t first, unsigned seen) {
#pragma unroll
    for (int n = 0; n < kKeys / kRowStep; ++n) {
      const int row = row_ + n * kRowStep;
      TensorRow from = {nullptr, 1, 0, false};
      if ((seen >> n & 1) != 0) {
        from = RowOf(a_.v, batch_, kv_head_, first + row, a_.value_dim, a_.vector_v);
      }
#pragma unroll
      for (int p = 0; p < kPanels; ++p) {
        const int column = p * kTile + channel_;
        const float4 x = Math::Convert(from.Fetch<Math>(first_column_ + column), a_.v.element);
        values_.Store(row, column, x);
        value_sums_[p].x += x.x;
        value_sums_[p].y += x.y;
        value_sums_[p].z += x.z;
        value_sums_[p].w += x.w;
      }
    }
  }

  __device__ void LoadInputs(int64_t first, unsigned seen, int depth) {
#pragma unroll
    for (int n = 0; n < kKeys / kRowStep; ++n) {
      const int row = row_ + n * kRowStep;
      TensorRow from = {nullptr, 1, 0, false};
      if ((seen >> n & 1) != 0) {
        from = RowOf(a_.k, batch_, kv_head_, first + row, a_.head_dim, a_.vector_k);
      }
      const float4 x = Math::Convert(from.Fetch<Math>(depth + channel_), a_.k.element);
      inputs_.Store(row, channel_, x);
      AddHalfSquare(a_, x, depth == 0, half_square_ + row);
    }
  }

  __device__ void LoadMatrix(int depth) {
#pragma unroll
    for (int n = 0; n < kTile / kRowStep; ++n) {
      const int row = row_ + n * kRowStep;
      if (row >= TileProjections(a_)) break;
      const TensorRow from = MatrixRow(a_, kv_head_, tile_ * TileProjections(a_) + row);
      matrix_.Store(row, channel_, Times(from.Fetch<Fp32>(depth + channel_), a_.map.input_scale));
    }
  }

  // From projections; brings the sums to the reference that these keys make.
  __device__ void MakeFeatures(Fragment<32>* features) {
    float reference = NegativeInfinity(), maximum = NegativeInfinity();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = row32_ + Math::Row(i);
      float largest = 0;
      if (IsExponential(a_)) largest = MaxOf(features->at[i], 8);
      if (seen_[row] == 0) continue;
      reference = fmaxf(reference, IsExponential(a_) ? largest - half_square_[row] : 0);
      maximum = fmaxf(maximum, largest);
    }
    reference = MaxOfWarp(reference);
    maximum = MaxOfWarp(maximum);
    if (Lane() == 0) {
      partial_[Warp()] = reference;
      partial_[kWarps + Warp()] = maximum;
    }
    __syncthreads();
    reference = fmaxf(reference_, MaxOf(partial_, kWarps));
    maximum_ = fmaxf(maximum_, MaxOf(partial_ + kWarps, kWarps));
    const float rescale = Rescale(reference_, reference);
    reference_ = reference;
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
      const int row = row32_ + Math::Row(i);
      const bool is_seen = seen_[row] != 0;
      const float shift = half_square_[row] + Shift(reference);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float x = features->at[i][j];
        const float feature = IsExponential(a_) ? ExpOf(x - shift) : x < 0 ? 0 : x;
        features->at[i][j] = is_seen ? feature : 0;
      }
    }
  }

  // Adds the halves of the warps, and writes.
  __device__ void Finish() {
    if (Warp() >= kWarps / 2) PutResult(/*adds=*/false);
    __syncthreads();
    if (Warp() < kWarps / 2) PutResult(/*adds=*/true);
    __syncthreads();
    const int t = Thread();
    if (t < kColumns) {
      float sum = 0;
      for (int r = 0; r < kTile; ++r) sum += result_[r * kColumns + t];
      result_[kTile * kColumns + t] = sum;
    } else if (t / 32 == kWarps - 1) {
      const float sum = SumOfWarp(normaliser_[Lane()] + normaliser_[Lane() + 32]);
      if (Lane() == 0) normaliser_[kTile] = sum;
    }
    __syncthreads();
    float* head = a_.group_sums + (head_ * a_.groups + group_) * a_.sums.head;
    float* tile = head + tile_ * a_.sums.tile;
    for (int r = Warp(); r <= kTile; r += kWarps) {
      float* row = tile + r * a_.sums.row;
      for (int c = Lane(); c < columns_; c += 32)
        row[first_column_ + c] = result_[r * kColumns + c];
      FinishRow(row, normaliser_[r]);
    }
    if (t < 4 && part_ == 0) {
      tile[(kTile + 1) * a_.sums.row + t] = t == 0 ? reference_ : t == 1 ? maximum_ : 0;
    }
    if (tile_ == 0) StoreValueSums(head + a_.sums.tiles * a_.sums.tile);
  }
  // The column of ones, and padding.
  __device__ void FinishRow(float* row, float ones) {
    const int column = a_.value_dim + Lane();
    if (part_ == 0 && column < a_.sums.row) row[column] = Lane() == 0 ? ones : 0;
  }

  __device__ void PutResult(bool adds) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int r = result_row_ + Math::Row(i);
#pragma unroll
      for (int p = 0; p < kPanels; ++p) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          float* to = result_ + r * kColumns + p * kTile + result_column_ + Math::Column(j);
          *to = adds ? *to + sums_[p].at[i][j] : sums_[p].at[i][j];
        }
      }
      if (result_column_ == 0 && Lane() % 4 == 0) {
        normaliser_[r] = adds ? normaliser_[r] + normalisers_[i] : normalisers_[i];
      }
    }
  }

  __device__ void StoreValueSums(float* to) {
    __syncthreads();  // the result has been read
#pragma unroll
    for (int p = 0; p < kPanels; ++p) {
      *reinterpret_cast<float4*>(result_ + row_ * kColumns + p * kTile + channel_) = value_sums_[p];
    }
    if (channel_ == 0) normaliser_[row_] = static_cast<float>(tokens_);
    __syncthreads();
    const int t = Thread();
    if (t < columns_) {
      float sum = 0;
      for (int r = 0; r < kRowStep; ++r) sum += result_[r * kColumns + t];
      to[first_column_ + t] = sum;
    }
    if (Warp() == kWarps - 1) {
      const float tokens = SumOfWarp(Lane() < kRowStep ? normaliser_[Lane()] : 0);
      FinishRow(to, tokens);
    }
  }

  const LinearArguments& a_;
  const Inputs inputs_;
  const Features features_;
  const Values values_;
  const Matrix matrix_;
  float* const result_;       // [65][kColumns]
  float* const half_square_;  // [kKeys]
  float* const seen_;         // [kKeys]: 1 for a token
  float* const normaliser_;   // [65]
  float* const partial_;      // [2][kWarps]
  int64_t part_, tile_, group_, head_, batch_, kv_head_;
  int first_column_, columns_;
  // As a thread that loads, and as a warp: in projections, and in sums.
  const int row_ = Thread() / 16;
  const int channel_ = Thread() % 16 * 4;
  const int row32_ = Warp() % 4 * 32;
  const int column32_ = Warp() / 4 * 32;
  const int result_row_ = Warp() % 2 * 32;
  const int result_column_ = Warp() / 2 % 2 * 32;

  bool has_matrix_ = false;
  float reference_ = NegativeInfinity();
  float maximum_ = NegativeInfinity();
  Fragment<32> sums_[kPanels];
  float normalisers_[4] = {};
  float4 value_sums_[kPanels] = {};  // of this thread's rows
  int tokens_ = 0;
};

template <class Math, int kPanels>
__global__ void __launch_bounds__(kThreads, kPanels == 1 ? 2 : 1)
    LinearSum(const LinearArguments a) {
  using Block = SumBlock<Math, kPanels>;
  const int64_t tasks =
      a.batch * a.kv_heads * a.summed_groups * a.sums.tiles * ValueParts(a, Block::kColumns);
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    Block(a, task, DynamicShared()).Run();
    __syncthreads();
  }
}

template <class Math, int kPanels>
const char* LaunchSum(const char* name, const LinearArguments& a, void* stream) {
  using Block = SumBlock<Math, kPanels>;
  const int64_t tasks =
      a.batch * a.kv_heads * a.summed_groups * a.sums.tiles * ValueParts(a, Block::kColumns);
  return Launch(name, &LinearSum<Math, kPanels>,
                {Blocks(a, tasks), dim3(kThreads), static_cast<size_t>(Block::kBytes)}, stream, a);
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
  __shared__ float references[kMergedGroups], maxima[kMergedGroups];
  __shared__ float of_before[kMergedGroups], of_group[kMergedGroups];
  const int64_t tasks = a.batch * a.kv_heads * a.sums.tiles;
  const int t = Thread();
  const int groups = static_cast<int>(a.groups), summed = static_cast<int>(a.summed_groups);
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const int64_t head = task / a.sums.tiles, tile = task % a.sums.tiles;
    float* total = a.total + head * a.sums.head;
    float* first = a.group_sums + head * a.groups * a.sums.head;
    const int64_t at = tile * a.sums.tile, length = (kTile + 1) * a.sums.row;
    // What precedes all groups.
    const float reference = a.continues ? total[at + length] : NegativeInfinity();
    const float maximum = a.continues ? total[at + length + 1] : NegativeInfinity();
    __syncthreads();
    if (t < summed) {
      references[t] = first[t * a.sums.head + at + length];
      maxima[t] = first[t * a.sums.head + at + length + 1];
    }
    __syncthreads();
    for (int g = t; g <= groups; g += kThreads) {
      float before = reference, largest = maximum;
      for (int n = 0; n < min(g, summed); ++n) {
        before = fmaxf(before, references[n]);
        largest = fmaxf(largest, maxima[n]);
      }
      float* header = (g < groups ? first + g * a.sums.head : total) + at + length;
      if (g == groups || a.has_prefixes) {
        header[0] = before;
        header[1] = largest;
        header[2] = header[3] = 0;
      }
      if (g >= summed) continue;
      const float after = fmaxf(before, references[g]);
      of_before[g] = Rescale(before, after);
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

const char* Merge(const LinearArguments& a, void* stream) {
  return Launch("LinearMerge", &LinearMerge,
                {Blocks(a, a.batch * a.kv_heads * a.sums.tiles), dim3(kThreads)}, stream, a);
}

}  // namespace

TFB_KERNEL_TABLE(LinearSumKernels, {&Sum, &Merge});

}  // namespace tfb
