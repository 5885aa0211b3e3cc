// Engine flash's backward pass on tensor cores, for problems of bf16 and f16 without a score rule and
// with at most 128 channels: mma.sync m16n8k16 with f32 sums, sm_80 and later. flash_backward.cu does
// everything else.
//
// Two kernels own different sums, and each forms the scores and the weights' gradients of its tiles
// of 64 x 64 again:
//
//   keys      a tile of 64 keys of a key-value head, over the query heads of its group:
//             S^T = K Q^T, dP^T = V G^T, dv += P^T G, dk += dS^T Q       4 products of 64 x 64 x D
//   queries   a tile of 64 queries of a head: S = Q K^T, dP = G V^T, dq += dS K      3 products
//
// So there are seven products where FlashAttention-2 (Dao, arXiv:2307.08691v1, section 3.1) has five,
// and no more than 5/7 of the rate of the products is seen in the FLOPs of a backward pass. Five need
// one kernel that owns keys and adds to dq from all of its blocks: atomically, which gives other bits
// in every run; or in turns, for which blocks wait for each other; or to a copy of dq for each block
// that runs at a time. All of them read and write 64 D f32 of dq for each pair of tiles, 512 D bytes,
// where the two further products read K and V once more, 256 D. Two owners need no workspace, and
// walk any pattern by its schedule and the transposed one.
//
//   left operand    a warp has some of the owner's rows, keys or queries, and all columns of a tile.
//                   Scores are formed with these rows as rows, so that P^T and dS^T, or dS, have the
//                   layout of the next product's left operand: neither is ever stored
//   rows of a warp  32 where D <= 64, in blocks of two warps; 16 where D = 128, in blocks of four,
//                   since sums of 32 rows, dk and dv, would take all registers
//   registers       dk and dv D each at 16 rows and 2 D at 32, or dq; queries and gradients of the
//                   output D / 4 each at 16 rows and D / 2 at 32; scores and weights' gradients of 32
//                   columns at a time, 16 each at 16 rows and 32 at 32. At most 255, no spills: two
//                   blocks of four warps, or four of two, are on a multiprocessor
//   shared memory   keys: K and V 64 x D, and two stages of Q and G 32 x D: 512 D bytes
//                   queries: two stages of K and V 64 x D, of which the second is Q's and G's first,
//                   which lie in registers from then on: 512 D bytes
//                   16, 32 and 64 KiB at D = 32, 64 and 128, and up to 3 KiB of numbers of rows, the
//                   same on all GPUs: at D = 128 an sm_80 (164 KiB) and an sm_90 (228) have room for
//                   the two blocks, an sm_89 (100) for one
//   reading it      a warp of the keys reads a tile's Q and G twice each, 512 D bytes, and, at 16 rows,
//                   K and V for each half of it, 128 D, for 4 x 16 x 64 x D multiply-adds. At 128 B a
//                   cycle that is 20 D cycles a pair of tiles, against 16 D of sm_80's tensor cores;
//                   at 32 rows 12 D. The queries' warps read K twice and V once: 12 D against 12 D, at
//                   32 rows 6 D
//   rate            mma.sync does some 1,300 multiply-adds a cycle on an H100. At D = 128 shared
//                   memory allows the 40,960 D FLOPs of five products in 32 D cycles, 290 TFLOP/s at
//                   1.7 GHz, and at D = 64 tensor cores allow them in 22 D cycles, beside which
//                   instructions for weights take 6 D. An H100 reaches 177 TFLOP/s at D = 128 and 16,384
//                   tokens, 145 at 4,096 (causal 116), and 142 at D = 64 (causal 102), with all that
//                   the layer does around the kernels
//
// Rounding. The products' factors are of 16 bits, so besides the inputs P and dS are rounded, as in
// FlashAttention, and G where it is of f32. With the unit roundoff u, 2^-8 of bf16 and 2^-11 of f16:
//
//   dv_j errs by u sum_i p_ij |g_i|, and dq_i by u scale sum_j |ds_ij| |k_j|, dk_j likewise with q_i
//
// at most: each term by one rounding, as a term p_ij v_j of the forward pass. D_i is made of G as it
// was rounded, so that it belongs to dp_ij (FlashRowNumbers), of the output, and of what rounding to 16
// bits took from that (FlashCall::out_rest), which is rounded in turn; the forward pass's weights were
// rounded, but for the largest of a row, which is 1 there. So D_i errs by |g_i| (u^2 |y_i| +
// u sum_j p_ij |v_j|), over all j but the largest weight's, and ds_ij by p_ij times that.
// f16 also loses weights and score gradients below 2^-25, for which losses are scaled (core/training),
// and has no score gradients above 65,504.
//
// Numbers that are not finite, of keys, queries or gradients that a row does not see: its weight of 0
// must not be multiplied by them. Where a tile hides pairs they are replaced by zeros once scores have
// been formed. A row that sees such a query or key has a score that is not finite, so that all its
// gradients are NaN, or a weight of 0; gradients of the output, which are in no score, are added to
// the rows of dv that see them.
//
// Every sum has one owner, and is added in the order of the schedule: every run gives the same bits.
#ifndef TFB_CORE_FLASH_FLASH_BACKWARD_MMA_CUH_
#define TFB_CORE_FLASH_FLASH_BACKWARD_MMA_CUH_

#include "core/flash/flash_backward_kernels.h"
#include "core/flash/flash_mma_tile.cuh"

namespace tfb {
namespace {

constexpr int kTileQueries = kFlashQueriesF32;  // of the backward pass's schedules
constexpr int kPart = 32;                       // columns of scores at a time
constexpr int kPartTiles = kPart / 8;           // mma tiles of them
static_assert(kTileQueries == kKeys, "owners of keys and of queries have the same shape");

template <int kDim>
struct GradientShape {
  static constexpr int kRowTiles = kDim <= 64 ? 2 : 1;  // row tiles of mma of a warp
  static constexpr int kWarpRows = kRowTiles * 16;
  static constexpr int kThreads = kKeys / kWarpRows * kWarp;
  static constexpr int kBlocks = kDim <= 64 ? 4 : 2;  // of a multiprocessor
  static constexpr int kRowBytes = kDim * 2;
  static constexpr int kTileBytes = kKeys * kRowBytes;
  static constexpr int kOutputTiles = kDim / 8;  // mma tiles of columns of the gradients
};

// Tells whether rows of a tensor are whole 16-byte chunks: see InChunks.
struct GradientInChunks {
  bool q;
  bool k;
  bool v;
  bool out_gradient;
};

// A row of queries, as scores and their gradients need it.
struct alignas(16) GradientRow {
  float shift;  // l; +inf where the row has no gradients
  float rest;   // log2(e) times what rounding took from l
  float delta;  // D
  int token;    // -1 where the row has no gradients
};

// The queries of a batch row and head.
struct GradientQueries {
  int64_t batch;
  int64_t head;
  const int32_t* order;  // null: query n is token n

  __device__ GradientQueries(const FlashArguments& a, int64_t b, int64_t h)
      : batch(b), head(h), order(OrderOf(a.query_order, b, h)) {}

  // Reads row i of the call. Finish makes of it what threads need, later, so that no thread waits for
  // what it reads here.
  __device__ GradientRow Read(const FlashBackwardArguments& b, int64_t i) const {
    const FlashArguments& a = b.forward;
    if (i >= a.query_tokens) return {INFINITY, 0, 0, -1};
    const int64_t token = order == nullptr ? i : order[i];
    const int64_t n = b.numbers.Of(a.query_heads, batch, head, OutRow(a, i, token));
    return {b.numbers.shift[n], b.numbers.rest[n], b.numbers.delta[n], static_cast<int>(token)};
  }
  __device__ static GradientRow Finish(GradientRow row) {
    row.rest *= kLog2E;
    if (row.shift == INFINITY) {
      row.delta = 0;  // which may be NaN
      row.token = -1;
    }
    return row;
  }
};

// Returns the weight of a pair, from the product of its query and key.
__device__ inline float WeightOf(float product, float scale, const GradientRow& row) {
  return Exp2(fmaf(fmaf(product, scale, -row.shift), kLog2E, -row.rest));
}

// Adds to two channels of a row of f32, as far as they exist.
__device__ inline void AddPair(const DeviceView& view, int64_t offset, int channel, int channels,
                               float x, float y) {
  float* sum = static_cast<float*>(view.data) + offset + channel * view.strides[3];
  if (channel < channels) sum[0] += x;
  if (channel + 1 < channels) sum[view.strides[3]] += y;
}

// The owners of keys and of queries share this: a warp has kWarpRows rows of a tile of 64 and their
// sums.
template <class T, int kDim>
class GradientOwner {
 public:
  using Shape = GradientShape<kDim>;
  using Copies = RowCopies<T, kDim, Shape::kThreads>;
  static constexpr int kRowTiles = Shape::kRowTiles;
  using Part = float[kRowTiles][kPartTiles][4];
  using Sums = float[kRowTiles][Shape::kOutputTiles][4];

  __device__ GradientOwner(const FlashBackwardArguments& b, const GradientInChunks& in_chunks)
      : b_(b), a_(b.forward), in_chunks_(in_chunks) {}

 protected:
  __device__ static int warp_row() { return Warp() * Shape::kWarpRows; }
  // A lane has rows RowOf(m, half), and columns 8 n + column() and one more.
  __device__ static int RowOf(int row_tile, int half) {
    return warp_row() + row_tile * 16 + half * 8 + Lane() / 4;
  }
  __device__ static int column() { return Lane() % 4 * 2; }

  template <int kTiles>
  __device__ static void Clear(float (&sums)[kRowTiles][kTiles][4]) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) sums[m][n][e] = 0;
      }
    }
  }
  // Rounds columns 16 k to 16 k + 15 to a left operand.
  __device__ static void Round(const Part& part, int k, unsigned (&left)[kRowTiles][4]) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float* x = part[m][k * 2 + n] + half * 2;
          left[m][n * 2 + half] = Pair<T>(x[0], x[1]);
        }
      }
    }
  }

  // Starts copies of a tile's keys and values.
  __device__ void StartKeys(const MmaKeys& of, const MmaTile& tile, unsigned char* keys,
                            unsigned char* values) const {
    of.Start<Copies>(a_, tile, threadIdx.x, keys, a_.k, of.keys, a_.head_dim, in_chunks_.k);
    of.Start<Copies>(a_, tile, threadIdx.x, values, a_.v, of.values, a_.value_dim, in_chunks_.v);
  }
  // Starts copies of kRows queries and gradients of the output from row `first` of a tile on.
  template <int kRows>
  __device__ void StartQueries(int64_t batch, int64_t head, int64_t tile, int first,
                               const GradientRow* rows, unsigned char* queries,
                               unsigned char* gradients) const {
    const DeviceView& g = b_.out_gradient;
    Copies::template StartOrConvert<kRows>(
        threadIdx.x, queries, a_.q, batch * a_.q.strides[0] + head * a_.q.strides[1], a_.head_dim,
        in_chunks_.q, [&](int r) { return int64_t{rows[r].token}; });
    Copies::template StartOrConvert<kRows>(
        threadIdx.x, gradients, g, batch * g.strides[0] + head * g.strides[1], a_.value_dim,
        in_chunks_.out_gradient, [&](int r) {
          const int token = rows[r].token;
          return token < 0 ? int64_t{-1} : OutRow(a_, tile * kTileQueries + first + r, token);
        });
  }

  // Adds `factor` times the sums of row RowOf(m, half) to a row of f32.
  __device__ static void AddRow(const Sums& sums, int m, int half, float factor,
                                const DeviceView& view, int64_t offset, int channels) {
#pragma unroll
    for (int n = 0; n < Shape::kOutputTiles; ++n) {
      AddPair(view, offset, n * 8 + column(), channels, factor * sums[m][n][half * 2],
              factor * sums[m][n][half * 2 + 1]);
    }
  }

  const FlashBackwardArguments& b_;
  const FlashArguments& a_;
  const GradientInChunks& in_chunks_;
};

// ---- The owner of keys ----

// Queries of one tile that a block multiplies with its keys.
struct alignas(16) QueryStep {
  int tile;  // -1 where the step before was the last
  int mask;  // as in KeyTile
  int head;
  int first;  // the first of the tile's queries
};

template <int kDim>
struct KeyOwnerShared {
  using Shape = GradientShape<kDim>;
  static constexpr int kStepQueries = 32;
  static constexpr int kStageBytes = 2 * kStepQueries * Shape::kRowBytes;
  static_assert(kStepQueries == kWarp, "the first warp reads the numbers of a step's rows");

  unsigned char keys[Shape::kTileBytes];
  unsigned char values[Shape::kTileBytes];
  unsigned char stages[2][kStageBytes];  // of step n at n % 2: queries, then gradients
  QueryStep steps[4];                    // of step n at n % 4
  GradientRow rows[3][kStepQueries];     // of step n at n % 3
  uint64_t visible[3][kStepQueries];     // bit c: the query sees key c; where the step has a mask
  FlashTask task;
  MmaKeys of_head;
  MmaTile tile;
  bool active[3];     // whether any of the rows has gradients
  int non_finite[2];  // the last step n, at n % 2, with numbers that are not finite
  // The walk, of thread 0.
  int64_t run;
  int64_t runs_end;
  int next;  // tile of the run
  int head;
};

template <class T, int kDim>
class KeyOwner : public GradientOwner<T, kDim> {
 public:
  using Base = GradientOwner<T, kDim>;
  using Shared = KeyOwnerShared<kDim>;
  using Base::kRowTiles;
  using typename Base::Copies, typename Base::Part, typename Base::Shape, typename Base::Sums;
  static constexpr int kStepQueries = Shared::kStepQueries;

  __device__ KeyOwner(const FlashBackwardArguments& b, const GradientInChunks& in_chunks,
                      Shared& shared)
      : Base(b, in_chunks), shared_(shared), task_(shared.task) {}

  __device__ void Run(int64_t index) {
    if (threadIdx.x == 0) {
      shared_.task = {};
      shared_.task.kv_head = index / b_.key_tiles() % a_.kv_heads;
      shared_.task.batch = index / b_.key_tiles() / a_.kv_heads;
      shared_.of_head = MmaKeys(a_, task_);
      shared_.tile =
          MmaTile(a_, {static_cast<int32_t>(index % b_.key_tiles()), QueryRun::kNotSeen});
      shared_.head = static_cast<int>(task_.kv_head * group()) - 1;
      shared_.run = shared_.runs_end = 0;
      shared_.steps[0] = FirstStep();
      for (int n = 1; n < 3; ++n) shared_.steps[n] = StepAfter(shared_.steps[n - 1]);
      shared_.non_finite[0] = shared_.non_finite[1] = -1;
    }
    __syncthreads();
    if (shared_.steps[0].tile < 0) return;
    this->StartKeys(shared_.of_head, shared_.tile, shared_.keys, shared_.values);
    for (int n = 0; n < 2; ++n) StoreRow(n, ReadRow(n));
    __syncthreads();
    StartStep(0);
    Base::Clear(k_sums_);
    Base::Clear(v_sums_);
    for (int n = 0;; ++n) {
      const QueryStep& step = shared_.steps[n % 4];
      if (step.tile < 0) break;
      const bool hides = step.mask != TileRun::kFull;
      __pipeline_wait_prior(0);
      if (hides) NoteNonFinite(n);
      __syncthreads();  // the step has arrived; the last one has been read
      StartStep(n + 1);
      if (threadIdx.x == 0) shared_.steps[(n + 3) % 4] = StepAfter(shared_.steps[(n + 2) % 4]);
      const GradientRow next = ReadRow(n + 2);
      if (shared_.active[n % 3]) AddStep(n, hides);
      StoreRow(n + 2, next);
    }
    Store();
  }

 private:
  using Base::a_, Base::b_;

  __device__ int64_t group() const { return a_.query_heads / a_.kv_heads; }

  // ---- The walk ----

  __device__ QueryStep FirstStep() {
    return StepAfter({0, QueryRun::kNotSeen, 0, kTileQueries - kStepQueries});
  }
  // Returns the next step after one that is not the end.
  __device__ QueryStep StepAfter(const QueryStep& last) {
    if (last.tile < 0) return last;
    if (last.first + kStepQueries < kTileQueries) {
      return {last.tile, last.mask, last.head, last.first + kStepQueries};
    }
    const TransposedView& schedule = b_.transposed;
    while (true) {
      if (shared_.run < shared_.runs_end) {
        const QueryRun& run = schedule.runs[shared_.run];
        const int mask = run.masks[shared_.tile.index % kChunkKeyTiles];
        if (mask != QueryRun::kNotSeen && shared_.next < run.first_tile + run.tiles) {
          return {shared_.next++, mask, shared_.head, 0};
        }
        ++shared_.run;
      } else {
        if (++shared_.head >= (task_.kv_head + 1) * group()) return {-1, 0, 0, 0};
        const int64_t chunk =
            shared_.head % schedule.heads * schedule.chunks + shared_.tile.index / kChunkKeyTiles;
        shared_.run = schedule.begin[chunk];
        shared_.runs_end = schedule.begin[chunk + 1];
      }
      if (shared_.run < shared_.runs_end) shared_.next = schedule.runs[shared_.run].first_tile;
    }
  }

  // ---- Copies ----

  // Reads a row of step n, in the first warp, and starts a copy of the keys that it sees, which is of
  // the next group of copies.
  __device__ GradientRow ReadRow(int n) {
    const QueryStep& step = shared_.steps[n % 4];
    if (threadIdx.x >= kStepQueries || step.tile < 0) return {INFINITY, 0, 0, -1};
    const int r = step.first + static_cast<int>(threadIdx.x);
    if (step.mask != TileRun::kFull) {
      __pipeline_memcpy_async(&shared_.visible[n % 3][threadIdx.x],
                              a_.schedule.masks + int64_t{step.mask} * kTileQueries + r,
                              sizeof(uint64_t));
    }
    return GradientQueries(a_, task_.batch, step.head)
        .Read(b_, int64_t{step.tile} * kTileQueries + r);
  }
  __device__ void StoreRow(int n, const GradientRow& read) {
    if (threadIdx.x >= kStepQueries) return;
    const GradientRow row = GradientQueries::Finish(read);
    const bool active = __any_sync(kAllLanes, row.token >= 0);
    shared_.rows[n % 3][threadIdx.x] = row;
    if (threadIdx.x == 0) shared_.active[n % 3] = active;
  }
  __device__ unsigned char* QueriesOf(int n) const { return shared_.stages[n % 2]; }
  __device__ unsigned char* GradientsOf(int n) const {
    return QueriesOf(n) + kStepQueries * Shape::kRowBytes;
  }
  __device__ void StartStep(int n) {
    const QueryStep& step = shared_.steps[n % 4];
    if (step.tile >= 0 && shared_.active[n % 3]) {
      this->template StartQueries<kStepQueries>(task_.batch, step.head, step.tile, step.first,
                                                shared_.rows[n % 3], QueriesOf(n), GradientsOf(n));
    }
    __pipeline_commit();
  }

  // ---- Products ----

  __device__ void AddStep(int n, bool hides) {
    const int lane = static_cast<int>(Anew(threadIdx.x)) % kWarp;
    Part weights, gradients;
    Base::Clear(weights);
    Base::Clear(gradients);
    const auto rows_of = [&](const unsigned char* tile) {
      return [=](int k, unsigned(&left)[kRowTiles][4]) {
        LoadLeft<kDim, kRowTiles>(tile + Base::warp_row() * Shape::kRowBytes, k, lane, left);
      };
    };
    AddInnerProducts<T, kDim, kRowTiles, kPartTiles>(rows_of(shared_.keys), QueriesOf(n), lane,
                                                     weights);
    AddInnerProducts<T, kDim, kRowTiles, kPartTiles>(rows_of(shared_.values), GradientsOf(n), lane,
                                                     gradients);
    FindGradients(n, hides, weights, gradients);
    if (hides && shared_.non_finite[n % 2] == n) SetAsideNonFinite(n);
#pragma unroll
    for (int k = 0; k < kStepQueries / 16; ++k) {
      unsigned left[kRowTiles][4];
      Base::Round(weights, k, left);
      AddWeightedRows<T, kDim, kRowTiles>(left, GradientsOf(n) + k * 16 * Shape::kRowBytes, lane,
                                          v_sums_);
      Base::Round(gradients, k, left);
      AddWeightedRows<T, kDim, kRowTiles>(left, QueriesOf(n) + k * 16 * Shape::kRowBytes, lane,
                                          k_sums_);
    }
  }

  // Turns products of keys and queries into weights, and those of values and gradients of the output
  // into gradients of scores.
  __device__ void FindGradients(int n, bool hides, Part& weights, Part& gradients) const {
#pragma unroll
    for (int t = 0; t < kPartTiles; ++t) {
#pragma unroll
      for (int x = 0; x < 2; ++x) {
        const GradientRow row = shared_.rows[n % 3][t * 8 + Base::column() + x];
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
          for (int e = x; e < 4; e += 2) {
            weights[m][t][e] = WeightOf(weights[m][t][e], a_.scale, row);
            gradients[m][t][e] = weights[m][t][e] * (gradients[m][t][e] - row.delta);
          }
        }
      }
    }
    if (!hides) return;
#pragma unroll
    for (int t = 0; t < kPartTiles; ++t) {
#pragma unroll
      for (int x = 0; x < 2; ++x) {
        const uint64_t visible =
            shared_.visible[n % 3][t * 8 + Base::column() + x] >> Base::RowOf(0, 0);
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            if ((visible >> (m * 16 + half * 8) & 1) != 0) continue;
            weights[m][t][half * 2 + x] = gradients[m][t][half * 2 + x] = 0;
          }
        }
      }
    }
  }

  // ---- Numbers that are not finite ----

  // Notes that a query or gradient of step n that this thread has copied is not finite.
  __device__ void NoteNonFinite(int n) {
    if (!shared_.active[n % 3]) return;
    if (Copies::template HasNonFinite<kStepQueries>(threadIdx.x, QueriesOf(n)) ||
        Copies::template HasNonFinite<kStepQueries>(threadIdx.x, GradientsOf(n))) {
      atomicMax(&shared_.non_finite[n % 2], n);
    }
  }
  // Adds gradients of the output that are not finite to the keys that their queries see, and puts
  // zeros in their place, and in that of queries.
  __device__ void SetAsideNonFinite(int n) {
#pragma unroll 1
    for (int query = 0; query < kStepQueries; ++query) {
      const uint64_t visible = shared_.visible[n % 3][query];
      unsigned seen[kRowTiles][2];
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          seen[m][half] = static_cast<unsigned>(visible >> Base::RowOf(m, half)) & 1;
        }
      }
      AddNonFinite<T, kDim, kRowTiles>(GradientsOf(n), query, 0, seen, Base::column(), v_sums_);
    }
    __syncthreads();
    Copies::template ClearNonFinite<kStepQueries>(threadIdx.x, QueriesOf(n));
    Copies::template ClearNonFinite<kStepQueries>(threadIdx.x, GradientsOf(n));
    __syncthreads();
  }

  __device__ void Store() const {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int c = Base::RowOf(m, half);
        int64_t row = shared_.of_head.TokenOrNone(a_, shared_.tile, c);
        if (row < 0) continue;
        if (b_.keys_by_place) row = int64_t{shared_.tile.index} * kKeys + c;
        const DeviceView &k = b_.k_gradient, &v = b_.v_gradient;
        if (k.data != nullptr) {
          Base::AddRow(k_sums_, m, half, a_.scale, k, Offset(k, task_.batch, task_.kv_head, row),
                       a_.head_dim);
        }
        if (v.data != nullptr) {
          Base::AddRow(v_sums_, m, half, 1, v, Offset(v, task_.batch, task_.kv_head, row),
                       a_.value_dim);
        }
      }
    }
  }

  Shared& shared_;
  const FlashTask& task_;
  Sums k_sums_;
  Sums v_sums_;
};

// ---- The owner of queries ----

template <int kDim>
struct QueryOwnerShared {
  using Shape = GradientShape<kDim>;

  unsigned char stages[2][2 * Shape::kTileBytes];  // of tile n at n % 2: keys, then values
  MmaTile tiles[4];                                // of tile n at n % 4
  GradientRow rows[kTileQueries];
  int active;         // not 0 where any of the rows has gradients
  int non_finite[2];  // the last tile n, at n % 2, with keys that are not finite
  FlashTask task;
  MmaKeys of_head;
  WalkState walk;  // of thread 0
};

template <class T, int kDim>
class QueryOwner : public GradientOwner<T, kDim> {
 public:
  using Base = GradientOwner<T, kDim>;
  using Shared = QueryOwnerShared<kDim>;
  using Base::kRowTiles;
  using typename Base::Copies, typename Base::Part, typename Base::Shape, typename Base::Sums;

  __device__ QueryOwner(const FlashBackwardArguments& b, const GradientInChunks& in_chunks,
                        Shared& shared)
      : Base(b, in_chunks), shared_(shared), task_(shared.task) {}

  __device__ void Run(int64_t index) {
    if (threadIdx.x == 0) {
      shared_.task = TaskOf(a_, index);
      shared_.of_head = MmaKeys(a_, task_);
      shared_.walk.Begin(a_, task_, kTileQueries);
      for (int n = 0; n < 2; ++n) shared_.tiles[n] = NextTile();
      shared_.non_finite[0] = shared_.non_finite[1] = -1;
      shared_.active = 0;
    }
    __syncthreads();
    if (shared_.tiles[0].index < 0) return;
    for (int r = threadIdx.x; r < kTileQueries; r += Shape::kThreads) {
      const GradientRow row =
          GradientQueries::Finish(GradientQueries(a_, task_.batch, task_.head)
                                      .Read(b_, task_.query_tile * kTileQueries + r));
      shared_.rows[r] = row;
      if (row.token >= 0) atomicOr(&shared_.active, 1);
    }
    __syncthreads();
    if (shared_.active == 0) return;
    this->template StartQueries<kTileQueries>(task_.batch, task_.head, task_.query_tile, 0,
                                              shared_.rows, KeysOf(1), ValuesOf(1));
    StartTile(0);
    __pipeline_wait_prior(0);
    __syncthreads();
    LoadQueries();
    Base::Clear(sums_);
    for (int n = 0;; ++n) {
      const MmaTile tile = shared_.tiles[n % 4];
      if (tile.index < 0) break;
      __pipeline_wait_prior(0);
      if (tile.mask != TileRun::kFull) NoteNonFinite(n);
      __syncthreads();  // the tile has arrived; the last one, or the queries, have been read
      StartTile(n + 1);
      if (threadIdx.x == 0) shared_.tiles[(n + 2) % 4] = NextTile();
      AddTile(n, tile);
    }
    Store();
  }

 private:
  using Base::a_, Base::b_;

  __device__ MmaTile NextTile() {
    if (!shared_.walk.Next(a_.schedule)) return MmaTile::Last();
    return MmaTile(a_, shared_.walk.key_tile(a_.schedule));
  }
  __device__ unsigned char* KeysOf(int n) const { return shared_.stages[n % 2]; }
  __device__ unsigned char* ValuesOf(int n) const { return KeysOf(n) + Shape::kTileBytes; }
  __device__ void StartTile(int n) {
    const MmaTile& tile = shared_.tiles[n % 4];
    if (tile.index >= 0) this->StartKeys(shared_.of_head, tile, KeysOf(n), ValuesOf(n));
    __pipeline_commit();
  }
  // Loads the warp's queries and gradients of the output to registers.
  __device__ void LoadQueries() {
    const int offset = Base::warp_row() * Shape::kRowBytes;
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k) {
      LoadLeft<kDim, kRowTiles>(KeysOf(1) + offset, k, Lane(), queries_[k]);
      LoadLeft<kDim, kRowTiles>(ValuesOf(1) + offset, k, Lane(), out_gradients_[k]);
    }
  }

  __device__ void AddTile(int n, const MmaTile& tile) {
    const int lane = static_cast<int>(Anew(threadIdx.x)) % kWarp;
    const bool hides = tile.mask != TileRun::kFull || !AllTokens(a_, tile.index);
    const auto operands_of = [](const Operands& operands) {
      return [&](int k, unsigned(&left)[kRowTiles][4]) {
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
          for (int r = 0; r < 4; ++r) left[m][r] = operands[k][m][r];
        }
      };
    };
#pragma unroll 1
    for (int part = 0; part < kKeys / kPart; ++part) {
      unsigned char* keys = KeysOf(n) + part * kPart * Shape::kRowBytes;
      const unsigned char* values = ValuesOf(n) + part * kPart * Shape::kRowBytes;
      Part weights, gradients;
      Base::Clear(weights);
      Base::Clear(gradients);
      AddInnerProducts<T, kDim, kRowTiles, kPartTiles>(operands_of(queries_), keys, lane, weights);
      AddInnerProducts<T, kDim, kRowTiles, kPartTiles>(operands_of(out_gradients_), values, lane,
                                                       gradients);
      FindGradients(weights, gradients);
      if (hides) Hide(tile, part * kPart, gradients);
      if (tile.mask != TileRun::kFull && shared_.non_finite[n % 2] == n) {
        __syncthreads();  // the part's keys have been read
        Copies::template ClearNonFinite<kPart>(threadIdx.x, keys);
        __syncthreads();
      }
#pragma unroll
      for (int k = 0; k < kPart / 16; ++k) {
        unsigned left[kRowTiles][4];
        Base::Round(gradients, k, left);
        AddWeightedRows<T, kDim, kRowTiles>(left, keys + k * 16 * Shape::kRowBytes, lane, sums_);
      }
    }
  }

  // Turns products into weights and gradients of scores.
  __device__ void FindGradients(Part& weights, Part& gradients) const {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const GradientRow row = shared_.rows[Base::RowOf(m, half)];
#pragma unroll
        for (int t = 0; t < kPartTiles; ++t) {
#pragma unroll
          for (int e = half * 2; e < half * 2 + 2; ++e) {
            weights[m][t][e] = WeightOf(weights[m][t][e], a_.scale, row);
            gradients[m][t][e] = weights[m][t][e] * (gradients[m][t][e] - row.delta);
          }
        }
      }
    }
  }
  // Clears the gradients of pairs that are not seen, of the keys from `first` of the tile on.
  __device__ void Hide(const MmaTile& tile, int first, Part& gradients) const {
    const uint64_t tokens = shared_.of_head.Tokens(a_, tile, Lane());
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int r = Base::RowOf(m, half);
        uint64_t visible = tokens;
        if (tile.mask != TileRun::kFull) {
          visible &= a_.schedule.masks[int64_t{tile.mask} * kTileQueries + r];
        }
        const unsigned seen = static_cast<unsigned>(visible >> first) >> Base::column();
#pragma unroll
        for (int t = 0; t < kPartTiles; ++t) {
#pragma unroll
          for (int x = 0; x < 2; ++x) {
            if ((seen >> (t * 8 + x) & 1) == 0) gradients[m][t][half * 2 + x] = 0;
          }
        }
      }
    }
  }

  // Notes that a key of tile n that this thread has copied is not finite.
  __device__ void NoteNonFinite(int n) {
    if (Copies::template HasNonFinite<kKeys>(threadIdx.x, KeysOf(n))) {
      atomicMax(&shared_.non_finite[n % 2], n);
    }
  }

  __device__ void Store() const {
    const DeviceView& q = b_.q_gradient;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int r = Base::RowOf(m, half), token = shared_.rows[r].token;
        if (token < 0) continue;
        const int64_t row = OutRow(a_, task_.query_tile * kTileQueries + r, token);
        Base::AddRow(sums_, m, half, a_.scale, q, Offset(q, task_.batch, task_.head, row),
                     a_.head_dim);
      }
    }
  }

  Shared& shared_;
  const FlashTask& task_;
  using Operands = unsigned[kDim / 16][kRowTiles][4];
  Operands queries_;
  Operands out_gradients_;
  Sums sums_;
};

// ---- Kernels ----

template <class Shared>
__device__ inline Shared& SharedMemory() {
  return *reinterpret_cast<Shared*>(DynamicShared<sizeof(Shared)>());
}

__host__ __device__ inline int64_t KeyTasks(const FlashBackwardArguments& b) {
  return b.forward.batch * b.forward.kv_heads * b.key_tiles();
}

template <class T, int kDim>
__global__ void __launch_bounds__(GradientShape<kDim>::kThreads, GradientShape<kDim>::kBlocks)
    FlashKeysMma(const FlashBackwardArguments b, const GradientInChunks in_chunks) {
  for (int64_t n = blockIdx.x; n < KeyTasks(b); n += gridDim.x) {
    KeyOwner<T, kDim>(b, in_chunks, SharedMemory<KeyOwnerShared<kDim>>()).Run(n);
    __syncthreads();
  }
}

template <class T, int kDim>
__global__ void __launch_bounds__(GradientShape<kDim>::kThreads, GradientShape<kDim>::kBlocks)
    FlashQueriesMma(const FlashBackwardArguments b, const GradientInChunks in_chunks) {
  const int64_t tasks = FlashTasks(b.forward);
  for (int64_t n = blockIdx.x; n < tasks; n += gridDim.x) {
    QueryOwner<T, kDim>(b, in_chunks, SharedMemory<QueryOwnerShared<kDim>>()).Run(n);
    __syncthreads();
  }
}

template <class T>
GradientInChunks GradientInChunksOf(const FlashBackwardArguments& b) {
  const FlashArguments& a = b.forward;
  return {IsInChunks<T>(a.q, a.batch, a.query_heads, a.head_dim),
          IsInChunks<T>(a.k, a.batch, a.kv_heads, a.head_dim),
          IsInChunks<T>(a.v, a.batch, a.kv_heads, a.value_dim),
          IsInChunks<T>(b.out_gradient, a.batch, a.query_heads, a.value_dim)};
}

template <class T, int kDim>
const char* LaunchKeysMma(const FlashBackwardArguments& b, void* stream) {
  return Launch("FlashKeysMma", &FlashKeysMma<T, kDim>,
                {BlocksInTurns(KeyTasks(b), b.forward.max_blocks), GradientShape<kDim>::kThreads,
                 sizeof(KeyOwnerShared<kDim>)},
                stream, b, GradientInChunksOf<T>(b));
}
template <class T, int kDim>
const char* LaunchQueriesMma(const FlashBackwardArguments& b, void* stream) {
  return Launch("FlashQueriesMma", &FlashQueriesMma<T, kDim>,
                {BlocksInTurns(FlashTasks(b.forward), b.forward.max_blocks),
                 GradientShape<kDim>::kThreads, sizeof(QueryOwnerShared<kDim>)},
                stream, b, GradientInChunksOf<T>(b));
}

// All instantiations: two kernels for each of three head sizes.
template <class T>
const char* LaunchKeys16(const FlashBackwardArguments& b, void* stream) {
  const int widest = b.widest();
  if (widest <= 32) return LaunchKeysMma<T, 32>(b, stream);
  if (widest <= 64) return LaunchKeysMma<T, 64>(b, stream);
  return LaunchKeysMma<T, 128>(b, stream);
}
template <class T>
const char* LaunchQueries16(const FlashBackwardArguments& b, void* stream) {
  const int widest = b.widest();
  if (widest <= 32) return LaunchQueriesMma<T, 32>(b, stream);
  if (widest <= 64) return LaunchQueriesMma<T, 64>(b, stream);
  return LaunchQueriesMma<T, 128>(b, stream);
}

}  // namespace
}  // namespace tfb

#endif  // TFB_CORE_FLASH_FLASH_BACKWARD_MMA_CUH_
