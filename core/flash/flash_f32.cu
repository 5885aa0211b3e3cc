// Engine flash in fp32 on the GPU's FMA units, and the merging of split keys for all dtypes.
//
// A block does one tile of 64 queries of one head. Of its 128 threads, (ty, tx) of 8 x 16 holds the
// scores of queries 8 ty .. 8 ty + 7 against keys 4 tx .. 4 tx + 3, and the output of its queries in
// kDim / 16 channels; at D = 256 it has 256 threads, of 4 queries each, or the output alone would
// take 128 registers. Queries and keys lie in shared memory by channel (core/cuda/register_tile.cuh).
// Keys and values take the same memory in turns; other blocks of the multiprocessor work while one
// waits for them:
//
//   shared memory, D = 64:   (64 + 64 + 64) x 68 x 4 B = 51 KiB, 3 blocks on sm_80, 4 on sm_90
//                  D = 128:  (128 + 128 + 64) x 68 x 4 B = 85 KiB
//                  D = 256:  (256 + 256 + 64) x 68 x 4 B = 153 KiB
//   label keys add 1 KiB, relative keys that and 64 x 68 x 4 B = 17 KiB, a token rule 5.5 KiB
//
// Sums over keys go tile by tile in the order of the schedule, whatever the number of blocks: the
// result is the same bit by bit in every run.
#include "core/flash/flash_f32.cuh"

namespace tfb {
namespace {

constexpr int kCombineThreads = 128;

template <int kDim, bool kRule>
class FlashF32Block : public ScoreTile<kDim, kRule> {
 public:
  using Base = ScoreTile<kDim, kRule>;
  using Base::kColumns, Base::kGroups, Base::kRows, Base::kThreads, Base::kVector;

  __device__ FlashF32Block(const FlashArguments& a, const FlashTask& task, float* memory)
      : Base(a, task, memory) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) max_[r] = -INFINITY;
  }

  __device__ void Run() {
    if (!HasQueries()) return;
    this->LoadQueries([&](int row) { return this->IsQuery(row); });
    __syncthreads();
    this->BeginQueries();
    TileWalk walk(a_, task_, kQueries);
    while (walk.Next()) {
      if (kRule && !this->WithinAnySpan(walk.tile())) continue;
      const KeyTile tile = walk.key_tile();
      const bool whole = this->IsWhole(tile);
      float scores[kRows][4] = {};
      this->ComputeScores(tile, whole, scores);
      Softmax(walk.tile(), whole, scores);
      __syncthreads();
      const bool finite = LoadValues(walk.tile(), whole);
      if (this->has_rows()) {
        this->template AddRows</*kByKey=*/true>(shared_.p, shared_.kv, finite, output_,
                                                [&](int r, int c) { return this->SeesKey(r, c); });
      }
      __syncthreads();
    }
    Store();
  }

 private:
  using Base::a_, Base::first_query_, Base::queries_, Base::shared_, Base::task_, Base::tx_,
      Base::ty_;

  // Tells whether the task has any query, with the same answer for all threads.
  __device__ bool HasQueries() {
    if (first_query_ >= queries_) return false;
    if (a_.packs_asked || a_.asked.rows == nullptr) return true;
    const int t = static_cast<int>(threadIdx.x);
    if (t < kQueries) {
      const unsigned asked = __ballot_sync(~0u, this->IsQuery(t));
      if (t % kWarp == 0) shared_.flags[t / kWarp] = asked;
    }
    __syncthreads();
    return (shared_.flags[0] | shared_.flags[1]) != 0;
  }

  // Turns scores into softmax numerators, in shared memory, and rescales the earlier sums.
  __device__ void Softmax(int64_t tile, bool whole, float (&scores)[kRows][4]) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (!whole) {
        const uint64_t visible = shared_.visible[ty_ * kRows + r] >> tx_ * 4;
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          if ((visible >> c & 1) == 0) scores[r][c] = -INFINITY;
        }
      }
      float largest = max_[r];
#pragma unroll
      for (int c = 0; c < 4; ++c) largest = fmaxf(largest, scores[r][c]);
      largest = MaxOfLanes<kThreadsX>(largest);
      // No key has been seen so far: any finite shift makes all weights 0.
      const float shift = largest == -INFINITY ? 0 : largest;
      const float rescale = ExpOf(max_[r] - shift);
      max_[r] = largest;
      float sum = 0;
      const int row = ty_ * kRows + r;
      const float distance = DistanceOf(a_, first_query_ + row, tile * kKeys + tx_ * 4);
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        float weight = ExpOf(scores[r][c] - shift);
        if (kRule && a_.rule.soft_span.span != nullptr) {
          const float ramp =
              a_.rule.soft_span.Weight(shared_.span[row], distance - static_cast<float>(c));
          weight *= fminf(fmaxf(ramp, 0), 1);
        }
        scores[r][c] = weight;
        sum += weight;
      }
      sum_[r] = sum_[r] * rescale + sum;
#pragma unroll
      for (int n = 0; n < kColumns; ++n) output_[r][n] *= rescale;
    }
    this->StoreByKey(scores, shared_.p);
  }

  // Loads the values of a tile as rows.
  __device__ bool LoadValues(int64_t tile, bool whole) {
    return this->LoadRows(whole, Base::kFirstRows, [&](int c) {
      if (!IsToken(a_, task_, tile, c)) return RowReader();
      return RowReader(a_.v, task_.batch, task_.kv_head, KeyToken(a_, task_, tile, c),
                       a_.value_dim);
    });
  }

  __device__ void Store() {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float sum = SumOfLanes<kThreadsX>(sum_[r]);
      const int row = ty_ * kRows + r;
      if (!this->IsQuery(row)) continue;
      const int64_t i = shared_.rows[row], token = this->QueryToken(row);
      const OutputRow output(a_, task_, i, token, sum);
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        float values[kVector];
#pragma unroll
        for (int n = 0; n < kVector; ++n) values[n] = output_[r][g * kVector + n];
        output.Store(g * 64 + tx_ * kVector, values);
      }
      if (tx_ == 0) StoreSums(a_, task_, i, token, max_[r], sum);
    }
  }

  float max_[kRows];
  float sum_[kRows] = {};  // sums over this thread's keys
  float output_[kRows][kColumns] = {};
};

// Returns the blocks that a multiprocessor holds at a time, which limits registers to 168 to 255 a
// thread.
constexpr int BlocksFor(int dim, bool rule) { return dim <= 64 && !rule ? 3 : dim <= 128 ? 2 : 1; }

template <int kDim, bool kRule>
__global__ void __launch_bounds__(ThreadsFor(kDim), BlocksFor(kDim, kRule))
    FlashF32(const FlashArguments a) {
  float* memory = reinterpret_cast<float*>(DynamicShared<Shared<kDim>::MostBytes(kRule)>());
  const int64_t tasks = FlashTasks(a);
  for (int64_t n = blockIdx.x; n < tasks; n += gridDim.x) {
    FlashF32Block<kDim, kRule>(a, TaskOf(a, n), memory).Run();
    __syncthreads();
  }
}

template <int kDim>
const char* LaunchForward(const FlashArguments& a, void* stream) {
  const int64_t tasks = FlashTasks(a);
  const KernelShape shape = {BlocksInTurns(tasks, a.max_blocks), ThreadsFor(kDim),
                             Shared<kDim>::Bytes(a.rule)};
  return a.rule.is_plain()
             ? Launch("FlashF32", &FlashF32<kDim, false>, shape, stream, a)
             : Launch("FlashF32 with a rule", &FlashF32<kDim, true>, shape, stream, a);
}

// All instantiations: two kernels for each of four head sizes.
const char* Forward(const FlashArguments& a, void* stream) {
  const int widest = a.head_dim > a.value_dim ? a.head_dim : a.value_dim;
  if (widest <= 32) return LaunchForward<32>(a, stream);
  if (widest <= 64) return LaunchForward<64>(a, stream);
  if (widest <= 128) return LaunchForward<128>(a, stream);
  return LaunchForward<256>(a, stream);
}

// ---- Merging the parts of split keys ----

constexpr int kCombineWarps = kCombineThreads / kWarp;
constexpr int kMostChannels = 256;

// Returns the warps of a block that merge a row: few parts are those of many rows, and many parts
// those of few, which wait for memory and not for its bandwidth.
__host__ __device__ constexpr int CombineWarpsOfRow(int splits) {
  return splits <= 2 * kCombineWarps ? 1 : kCombineWarps;
}

// Merges rows: o = sum_s e^(m_s - m) o_s / sum_s e^(m_s - m) l_s. Of W warps of a row warp w adds
// parts w, w + W, ..., and the warps' sums are added in their order.
__global__ void __launch_bounds__(kCombineThreads) FlashCombine(const FlashArguments a) {
  __shared__ float outputs[kCombineWarps][kMostChannels];
  __shared__ float sums[kCombineWarps];
  const int of_row = CombineWarpsOfRow(a.splits), warp = Warp() % of_row;
  const int first_warp = Warp() - warp, rows_of_block = kCombineWarps / of_row;
  const int64_t rows = a.batch * a.query_heads * a.query_tokens;
  for (int64_t first = int64_t{blockIdx.x} * rows_of_block; first < rows;
       first += int64_t{gridDim.x} * rows_of_block) {
    const int64_t n = min(first + Warp() / of_row, rows - 1);
    const int64_t i = n % a.query_tokens, h = n / a.query_tokens % a.query_heads;
    const int64_t b = n / a.query_tokens / a.query_heads;
    const bool is_asked = first + Warp() / of_row < rows && IsAsked(a, b, i);
    float maximum = -INFINITY;
    if (is_asked) {
      for (int s = Lane(); s < a.splits; s += kWarp) {
        maximum = fmaxf(maximum, PartialRow(a, s, b, h, i)[a.value_dim]);
      }
    }
    maximum = MaxOfWarp(maximum);
    const float shift = maximum == -INFINITY ? 0 : maximum;
    if (is_asked) {
      float sum = 0, output[kMostChannels / kWarp] = {};
#pragma unroll 4
      for (int s = warp; s < a.splits; s += of_row) {
        const float* part = PartialRow(a, s, b, h, i);
        const float factor = ExpOf(part[a.value_dim] - shift);
        sum = fmaf(factor, part[a.value_dim + 1], sum);
#pragma unroll
        for (int c = 0; c < kMostChannels / kWarp; ++c) {
          const int column = c * kWarp + Lane();
          if (column < a.value_dim) output[c] = fmaf(factor, part[column], output[c]);
        }
      }
#pragma unroll
      for (int c = 0; c < kMostChannels / kWarp; ++c) {
        outputs[Warp()][c * kWarp + Lane()] = output[c];
      }
      if (Lane() == 0) sums[Warp()] = sum;
    }
    __syncthreads();
    if (is_asked) {
      float sum = 0;
      for (int w = 0; w < of_row; ++w) sum += sums[first_warp + w];
      FlashArguments whole = a;
      whole.partial = nullptr;
      const FlashTask task = {b, h, 0, 0, 0};
      const int64_t token = a.partial_by_token ? i : a.query_order(b, h, i);
      const OutputRow row(whole, task, i, token, sum);
      for (int column = warp * kWarp + Lane(); column < a.value_dim; column += of_row * kWarp) {
        float total[1] = {0};
        for (int w = 0; w < of_row; ++w) total[0] += outputs[first_warp + w][column];
        row.Store(column, total);
      }
      if (warp == 0 && Lane() == 0) StoreSums(whole, task, i, token, maximum, sum);
    }
    __syncthreads();
  }
}

const char* Combine(const FlashArguments& a, void* stream) {
  const int64_t rows = a.batch * a.query_heads * a.query_tokens;
  const int64_t blocks = CeilDiv(rows, kCombineWarps / CombineWarpsOfRow(a.splits));
  return Launch("FlashCombine", &FlashCombine,
                {BlocksInTurns(blocks, a.max_blocks), kCombineThreads}, stream, a);
}

}  // namespace

TFB_KERNEL_TABLE(FlashF32Kernels, {&Forward, &Combine});

}  // namespace tfb
