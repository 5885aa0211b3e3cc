// Engine flash's backward pass on the GPU's FMA units: sums in fp32, whatever the dtypes of
// tensors. flash_backward_mma.cuh has problems of 16 bits without a score rule.
//
// Every sum has one owner, a block that adds in the order of the schedule, so that the bits are the
// same in every run. Three kernels own different things, and each forms the scores S and the
// weights' gradients G V^T of its tiles again:
//
//   queries   a tile of 64 queries of a head: dq, soft spans, sums of the labels       3 products of 64 x 64 x D
//   keys      a tile of 64 keys of a key-value head, over the heads of its group: dk,
//             dv, sums of the content bias                                             4 products
//   offsets   the pairs of tiles with one difference of places: tables by offset and
//             relative keys, over the batch; only where the rule has such terms        2 products, 4 with relative keys
//
// So plain attention takes seven products where the least is five; the two more buy that no block
// waits for another and no sum is kept for each pair of tiles. Of the FMA units' peak no more than
// 5/7 can be seen in the FLOPs of a backward pass.
//
//   shared memory, D = 64:   4 x 64 x 68 x 4 B = 68 KiB: queries, gradients of the output, keys or values, pairs
//                  D = 128:  (2 x 128 + 64) x 68 x 4 B = 85 KiB: queries and gradients of the output take turns
//                  D = 256:  (2 x 256 + 64) x 68 x 4 B = 153 KiB
//   the numbers of rows add 1.5 KiB, terms of the rule what they add in flash_f32.cuh
//
//   registers of a thread, plain and with a rule, of sm_80 and sm_90a; those of sm_89 are at most 13 more than sm_80's:
//                  D = 64                      D = 128                     D = 256
//     queries      168, 230 and 189, 255       204, 199 and 225, 208       157, 234 and 168, 255
//     keys         240, 217 and 248, 219       199, 255 and 221, 255       255, 255 and 255, 255
//     offsets      207 and 211                 240 and 246                 255 and 255
//   D = 256 alone spills: in the plain path keys, two registers; keys and offsets with a rule, and on sm_90a queries
//   (core/flash/BUILD has the bytes). The rows' numbers take 37 to 40, without shared memory and without spills.
//
//   rate           Of 128 threads each has 8 x 4 of a product, and takes 145 to 150 instructions of sm_90a for 128
//                  multiply-adds, with 12 loads of 16 B of shared memory, 4 passes over the banks against 8 cycles of
//                  the FMA units. At D = 64 the products of a pair of tiles are 6,144 multiply-adds a thread of queries
//                  and 8,192 of keys, beside which weights, loads and stores take an estimated 1,500 to 2,000. So some
//                  71 % of the instructions multiply, and 5/7 of those count: up to 34 of an H100's 67 TFLOP/s are to be
//                  expected. One did 14 (core/cuda/README.md): the estimate leaves out waits for loads and barriers,
//                  which two warps a scheduler, all that registers allow, have to hide from each other
//   reading it     For a pair of tiles queries read K twice and V once, keys Q and G twice and K and V once, 768 D and
//                  1,536 D bytes from L2 for 24,576 D and 32,768 D FLOPs: 1.5 and 2.3 TB/s at that rate
#include "core/flash/flash_backward_kernels.h"
#include "core/flash/flash_f32.cuh"

namespace tfb {
namespace {

constexpr int kDeltaThreads = 128;

// ---- The numbers of rows ----

__device__ inline float LoadOr(const DeviceView& view, int64_t b, int64_t h, int64_t row,
                               float other) {
  return view.data == nullptr ? other : Load(view, Offset(view, b, h, row));
}

// Returns the value as an element of that type holds it.
__device__ inline float Rounded(float value, Element type) {
  switch (type) {
    case Element::kBf16:
      return __bfloat162float(__float2bfloat16_rn(value));
    case Element::kF16:
      return __half2float(__float2half_rn(value));
    default:
      return value;
  }
}

// A warp makes the numbers of one row.
__global__ void __launch_bounds__(kDeltaThreads) FlashDelta(const FlashDeltaArguments a) {
  const int64_t rows = a.batch * a.heads * a.numbers.rows;
  const int64_t warps = static_cast<int64_t>(gridDim.x) * (kDeltaThreads / kWarp);
  for (int64_t n = WarpOfGrid(); n < rows; n += warps) {
    const int64_t row = n % a.numbers.rows, h = n / a.numbers.rows % a.heads,
                  b = n / a.numbers.rows / a.heads;
    const bool counts =
        a.marks == nullptr || (a.marks[b * a.marks_stride + row] != 0) == a.counts_marked;
    double sum = 0;
    bool any = false;
    for (int c = Lane(); counts && c < a.value_dim; c += kWarp) {
      const float g =
          Rounded(Load(a.out_gradient, Offset(a.out_gradient, b, h, row, c)), a.factors);
      if (g == 0) continue;  // then the output is not read
      any = true;
      double y = Load(a.out, Offset(a.out, b, h, row, c));
      if (a.out_rest.data != nullptr) y += Load(a.out_rest, Offset(a.out_rest, b, h, row, c));
      sum += g * y;
    }
    sum = SumOfWarp(sum);
    const float delta =
        counts ? static_cast<float>(sum - LoadOr(a.log_sum_exp_gradient, b, h, row, 0)) : 0;
    any = __any_sync(kAllLanes, any) || delta != 0;
    if (Lane() != 0) continue;
    const float shift = any ? LoadOr(a.log_sum_exp, b, h, row, 0) : -INFINITY;
    a.numbers.shift[n] =
        shift == -INFINITY ? INFINITY : shift;  // without keys all weights are 0, too
    a.numbers.rest[n] = shift == -INFINITY ? 0 : LoadOr(a.rest, b, h, row, 0);
    a.numbers.delta[n] = delta;
  }
}

const char* Delta(const FlashDeltaArguments& a, void* stream) {
  const int64_t rows = a.batch * a.heads * a.numbers.rows;
  const int64_t blocks = BlocksInTurns(CeilDiv(rows, kDeltaThreads / kWarp));
  return Launch("FlashDelta", &FlashDelta, {blocks, kDeltaThreads}, stream, a);
}

// ---- What the owners share ----

// The threads of blocks: as many as leave each the registers that its sums and the rule take.
constexpr int QueryThreads(int dim, bool rule) { return rule && dim > 64 ? 256 : ThreadsFor(dim); }
constexpr int KeyThreads(int dim, bool rule) { return rule || dim > 64 ? 256 : ThreadsFor(dim); }
constexpr int kOffsetThreads = 256;
// Returns the blocks that a multiprocessor holds at a time, which limits registers to 255 a thread.
constexpr int BlocksOf(int threads) { return threads <= 128 ? 2 : 1; }

// The numbers of a tile's rows, in shared memory behind what the scores need.
struct TileNumbers {
  float shift[kQueries];
  float rest[kQueries];
  float delta[kQueries];
  float2 labels[kQueries];  // sums of score gradients, of pairs of different ids first
  float columns[kKeys];     // sums of score gradients
};

// Whether the gradients of the output have memory of their own, by channel, beside the queries.
constexpr bool HoldsBoth(int dim) { return dim <= 64; }

// The shared memory besides that of scores.
template <int kDim>
constexpr size_t kGradientBytes = sizeof(TileNumbers) +
                                  (HoldsBoth(kDim) ? kDim * kStride * sizeof(float) : 0);
// Returns the block's shared memory.
template <int kDim, bool kRule>
__device__ inline unsigned char* SharedMemory() {
  return DynamicShared<kGradientBytes<kDim> + Shared<kDim>::MostBytes(kRule)>();
}

// Adds to a row of f32 of any stride.
__device__ inline void AddTo(const DeviceView& view, int64_t offset, int channel, int channels,
                             float value) {
  if (channel >= channels) return;
  float* sum = static_cast<float*>(view.data) + offset + channel * view.strides[3];
  *sum += value;
}

// The score gradients of a tile of queries and a tile of keys.
template <int kDim, bool kRule, int kBlock>
class GradientTile : public ScoreTile<kDim, kRule, kBlock> {
 public:
  using Base = ScoreTile<kDim, kRule, kBlock>;
  using Base::kColumns, Base::kGroups, Base::kRows, Base::kThreads, Base::kValueStride,
      Base::kVector;

  __device__ GradientTile(const FlashBackwardArguments& b, const FlashTask& task,
                          unsigned char* memory)
      : Base(b.forward, task,
             reinterpret_cast<float*>(memory + sizeof(TileNumbers)) +
                 (HoldsBoth(kDim) ? kDim * kStride : 0)),
        b_(b),
        numbers_(*reinterpret_cast<TileNumbers*>(memory)),
        gradients_(HoldsBoth(kDim) ? reinterpret_cast<float*>(memory + sizeof(TileNumbers))
                                   : this->shared_.q),
        value_depth_((b.forward.value_dim + 3) / 4 * 4) {}

 protected:
  using Base::a_, Base::first_query_, Base::queries_, Base::shared_, Base::task_, Base::tx_,
      Base::ty_;

  __device__ int64_t OutputRowOf(int row) const {
    return OutRow(a_, this->RowOf(row), this->QueryToken(row));
  }
  // Tells whether a row of the tile has gradients.
  __device__ bool IsActive(int row) const { return numbers_.shift[row] != INFINITY; }

  // Loads the numbers of the tile's rows. Returns whether any has gradients, with the same answer
  // for all threads. Begins and ends with a barrier.
  __device__ bool LoadNumbers() {
    __syncthreads();
    const int t = static_cast<int>(threadIdx.x);
    if (t < kQueries) {
      float shift = INFINITY;
      if (first_query_ + t < queries_) {
        const int64_t n = b_.numbers.Of(a_.query_heads, task_.batch, task_.head, OutputRowOf(t));
        shift = b_.numbers.shift[n];
        numbers_.rest[t] = b_.numbers.rest[n];
        numbers_.delta[t] = b_.numbers.delta[n];
      } else {
        numbers_.rest[t] = numbers_.delta[t] = 0;
      }
      numbers_.shift[t] = shift;
      const unsigned active = __ballot_sync(~0u, shift != INFINITY);
      if (t % kWarp == 0) shared_.flags[t / kWarp] = active;
    }
    __syncthreads();
    return (shared_.flags[0] | shared_.flags[1]) != 0;
  }

  // Loads the tile's queries, and their gradients where these have memory of their own, and what their scores need. It
  // follows LoadNumbers, behind whose barriers nothing reads what lay there, and ends with a barrier.
  __device__ void LoadTile() {
    this->LoadQueries([&](int row) { return IsActive(row); });
    if (HoldsBoth(kDim)) LoadGradientChannels();
    __syncthreads();
    this->BeginQueries();
  }
  __device__ void LoadGradientChannels() {
    LoadTransposed<Base::kThreads>(gradients_, value_depth_,
                                   [&](int row) { return GradientRow(row); });
  }
  __device__ RowReader GradientRow(int row) const {
    if (!IsActive(row)) return RowReader();
    return RowReader(b_.out_gradient, task_.batch, task_.head, OutputRowOf(row), a_.value_dim);
  }
  __device__ RowReader QueryRowReader(int row) const {
    if (!IsActive(row)) return RowReader();
    return RowReader(a_.q, task_.batch, task_.head, this->QueryToken(row), a_.head_dim);
  }
  __device__ RowReader KeyRow(int64_t tile, int c) const {
    if (!IsToken(a_, task_, tile, c)) return RowReader();
    return RowReader(a_.k, task_.batch, task_.kv_head, KeyToken(a_, task_, tile, c), a_.head_dim);
  }

  // Computes the weights and the gradients of the scores behind the ReLU of this thread's pairs. Queries must lie in
  // shared_.q. When it ends, other threads may be reading values.
  __device__ void ComputeGradients(const KeyTile& tile, bool whole, float (&weights)[kRows][4],
                                   float (&gradients)[kRows][4]) {
    this->ComputeScores(tile, whole, weights, shared_.p);
    __syncthreads();  // keys and queries have been read
    if (!HoldsBoth(kDim)) LoadGradientChannels();
    LoadTransposed<Base::kThreads>(shared_.kv, value_depth_, [&](int c) {
      if (!IsToken(a_, task_, tile.index, c)) return RowReader();
      return RowReader(a_.v, task_.batch, task_.kv_head, KeyToken(a_, task_, tile.index, c),
                       a_.value_dim);
    });
    __syncthreads();
    if (this->has_rows()) {
      AddProduct<2>({gradients_ + ty_ * kRows, kStride}, {shared_.kv + tx_ * 4, kStride},
                    value_depth_, gradients);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int row = ty_ * kRows + r;
      const float shift = numbers_.shift[row], rest = numbers_.rest[row],
                  delta = numbers_.delta[row];
      const float distance = DistanceOf(a_, first_query_ + row, tile.index * kKeys + tx_ * 4);
      const uint64_t visible = whole ? ~uint64_t{0} : shared_.visible[row] >> tx_ * 4;
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const float weight = (visible >> c & 1) == 0 ? 0 : ExpOf(weights[r][c] - shift - rest);
        const float slope = gradients[r][c] - delta;
        float ramp = 1;
        if (kRule && a_.rule.soft_span.span != nullptr) {
          ramp = a_.rule.soft_span.Weight(shared_.span[row], distance - static_cast<float>(c));
          if (ramp > 0 && ramp < 1 && weight != 0) span_[r] += weight * slope;
          ramp = fminf(fmaxf(ramp, 0), 1);
        }
        weights[r][c] = weight * ramp;
        gradients[r][c] = weights[r][c] == 0 ? 0 : weights[r][c] * slope;
      }
    }
  }
  // Takes score gradients through the ReLU.
  __device__ void PassRelu(const KeyTile& tile, float (&gradients)[kRows][4]) {
    if (!kRule || a_.rule.relu_multiplier.values == nullptr) return;
    const int64_t first = tile.index * kKeys - first_query_ - a_.rule.query_position;
    this->ForEachEntry(a_.rule.relu_multiplier, tile.index, first, [&](int r, int c, float entry) {
      gradients[r][c] = ProductBeforeRelu(r, c) > 0 ? gradients[r][c] * entry : 0;
    });
  }
  // Returns a score before the ReLU, which this thread has stored.
  __device__ float ProductBeforeRelu(int r, int c) const {
    return shared_.p[(ty_ * kRows + r) * kStride + tx_ * 4 + c];
  }

  // Adds `factor` times this thread's sums to a row.
  __device__ void AddSums(const float (&sums)[kColumns], float factor, const DeviceView& view,
                          int64_t offset, int channels) const {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
#pragma unroll
      for (int n = 0; n < kVector; ++n) {
        AddTo(view, offset, g * 64 + tx_ * kVector + n, channels, factor * sums[g * kVector + n]);
      }
    }
  }

  const FlashBackwardArguments& b_;
  TileNumbers& numbers_;
  float* const gradients_;  // [kDim][kStride], by channel
  const int value_depth_;
  float span_[kRows] = {};
};

// ---- The owner of queries ----

template <int kDim, bool kRule>
class QueryOwner : public GradientTile<kDim, kRule, QueryThreads(kDim, kRule)> {
 public:
  using Base = GradientTile<kDim, kRule, QueryThreads(kDim, kRule)>;
  using Base::Base;
  using Base::kColumns, Base::kGroups, Base::kRows, Base::kThreads, Base::kValueStride,
      Base::kVector;

  __device__ void Run() {
    if (first_query_ >= queries_ || !this->LoadNumbers()) return;
    this->LoadTile();
    TileWalk walk(a_, task_, kQueries);
    bool holds_queries = true;
    while (walk.Next()) {
      const KeyTile tile = walk.key_tile();
      if (kRule && !this->WithinAnySpan(tile.index)) continue;
      if (!holds_queries) this->LoadQueryChannels([&](int row) { return this->IsActive(row); });
      AddTile(tile);
      holds_queries = HoldsBoth(kDim);
    }
    if (kRule && a_.rule.label_keys.keys != nullptr) FinishLabels(holds_queries);
    Store();
  }

 private:
  using Base::a_, Base::b_, Base::first_query_, Base::numbers_, Base::queries_, Base::shared_,
      Base::span_, Base::task_, Base::tx_, Base::ty_;

  __device__ void AddTile(const KeyTile& tile) {
    const bool whole = this->IsWhole(tile);
    float weights[kRows][4] = {}, gradients[kRows][4] = {};
    this->ComputeGradients(tile, whole, weights, gradients);
    this->PassRelu(tile, gradients);
    if (kRule && a_.rule.label_keys.keys != nullptr) SumLabels(gradients);
    __syncthreads();  // values and products have been read
    this->StoreByKey(gradients, shared_.p);
    const bool finite =
        this->LoadRows(whole, Base::kFirstRows, [&](int c) { return this->KeyRow(tile.index, c); });
    if (this->has_rows()) {
      this->template AddRows</*kByKey=*/true>(shared_.p, shared_.kv, finite, sums_,
                                              [&](int r, int c) { return this->SeesKey(r, c); });
    }
    if (kRule && a_.rule.relative_key_rows.rows != nullptr) AddRelativeKeys(tile.index);
    __syncthreads();
  }

  // Adds the products of the score gradients with the relative keys of the tile's 127 offsets, 64 at a time.
  __device__ void AddRelativeKeys(int64_t tile) {
    const RelativeKeyRows& keys = a_.rule.relative_key_rows;
    const int last_row = shared_.rows[kQueries - 1], offsets = kKeys + last_row - shared_.rows[0];
    const int64_t lowest = tile * kKeys - last_row - a_.rule.query_position;
    for (int begin = 0; begin < offsets; begin += 64) {
      if (lowest + begin > keys.high || lowest + begin + 63 < keys.low) continue;  // all are zero
      __syncthreads();  // the rows before have been read
      this->LoadRows(true, Base::kFirstRows,
                     [&](int n) { return this->RelativeKeyRow(lowest + begin + n); });
#pragma unroll 1
      for (int n = 0; n < 64; ++n) {
        float weights[kRows];
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          const int row = ty_ * kRows + r, c = n + begin - (last_row - shared_.rows[row]);
          weights[r] = c < 0 || c >= kKeys ? 0 : shared_.p[Base::KeyRowOf(c) * kStride + row];
        }
        this->AddRow(weights, shared_.kv + n * kValueStride, sums_, [](int) { return true; });
      }
    }
  }

  // Sums the score gradients of this thread's pairs by whether their ids are equal.
  __device__ void SumLabels(const float (&gradients)[kRows][4]) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int id = shared_.query_ids[ty_ * kRows + r];
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const bool same = shared_.key_ids[tx_ * 4 + c] == id;
        labels_[r][0] += same ? 0 : gradients[r][c];
        labels_[r][1] += same ? gradients[r][c] : 0;
      }
    }
  }
  // Adds the label keys' part to dq, and stores the sums of the tile's queries.
  __device__ void FinishLabels(bool holds_queries) {
    const LabelKeys& labels = a_.rule.label_keys;
    const int dim = a_.head_dim;
    const float* keys = labels.keys + task_.head % labels.heads * 2 * dim;
    if (!holds_queries) this->LoadQueryChannels([&](int row) { return this->IsActive(row); });
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float sums[2];
#pragma unroll
      for (int label = 0; label < 2; ++label) {
        sums[label] = SumOfLanes<kThreadsX>(labels_[r][label]);
#pragma unroll
        for (int n = 0; n < kColumns; ++n) {
          const int channel = n / kVector * 64 + tx_ * kVector + n % kVector;
          if (channel < dim)
            sums_[r][n] = fmaf(sums[label], keys[label * dim + channel], sums_[r][n]);
        }
      }
      if (tx_ == 0) numbers_.labels[ty_ * kRows + r] = make_float2(sums[0], sums[1]);
    }
    __syncthreads();
    if (b_.labels == nullptr) return;
    const float* bias =
        a_.rule.position_bias == nullptr ? nullptr : a_.rule.position_bias + task_.head * dim;
    const int64_t tile =
        (task_.batch * a_.query_heads + task_.head) * a_.schedule.query_tiles + task_.query_tile;
    for (int n = threadIdx.x; n < 2 * (dim + 1); n += kThreads) {
      const int label = n / (dim + 1), c = n % (dim + 1);
      float sum = 0;
      for (int row = 0; row < kQueries; ++row) {
        const float weight = label == 0 ? numbers_.labels[row].x : numbers_.labels[row].y;
        const float query =
            c == dim ? 1 : shared_.q[c * kStride + row] + (bias == nullptr ? 0 : bias[c]);
        sum = weight == 0 ? sum : fmaf(weight, query, sum);
      }
      b_.labels[tile * 2 * (dim + 1) + n] = sum * a_.scale;
    }
  }

  __device__ void Store() {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int row = ty_ * kRows + r;
      const float span = kRule && b_.span != nullptr ? SumOfLanes<kThreadsX>(span_[r]) : 0;
      if (!this->IsActive(row)) continue;
      if (kRule && b_.span != nullptr && tx_ == 0) {
        b_.span[(task_.batch * a_.query_heads + task_.head) * a_.query_tokens + first_query_ +
                row] += span / a_.rule.soft_span.ramp;
      }
      const DeviceView& q = b_.q_gradient;
      if (q.data == nullptr) continue;
      this->AddSums(sums_[r], a_.scale, q,
                    Offset(q, task_.batch, task_.head, this->OutputRowOf(row)), a_.head_dim);
    }
  }

  float sums_[kRows][kColumns] = {};
  float labels_[kRows][2] = {};
};

// ---- The owner of keys ----

template <int kDim, bool kRule>
class KeyOwner : public GradientTile<kDim, kRule, KeyThreads(kDim, kRule)> {
 public:
  using Base = GradientTile<kDim, kRule, KeyThreads(kDim, kRule)>;
  using Base::kColumns, Base::kGroups, Base::kRows, Base::kThreads, Base::kValueStride,
      Base::kVector;

  __device__ KeyOwner(const FlashBackwardArguments& b, const FlashTask& task, int64_t key_tile,
                      unsigned char* memory)
      : Base(b, task, memory), key_tile_(key_tile) {}

  __device__ void Run() {
    const int64_t group = a_.query_heads / a_.kv_heads;
    for (int64_t h = task_.kv_head * group; h < (task_.kv_head + 1) * group; ++h) {
      task_.head = h;
      if (threadIdx.x < kKeys) numbers_.columns[threadIdx.x] = 0;
      for (Walk walk = BeginWalk(); Next(&walk);) {
        AddTile({static_cast<int32_t>(key_tile_), walk.mask}, walk.query_tile);
      }
      if (a_.rule.content_bias != nullptr) FinishContentBias();
    }
    Store();
  }

 private:
  using Base::a_, Base::b_, Base::numbers_, Base::shared_, Base::task_, Base::tx_, Base::ty_;

  // The tiles of queries that see the keys: of the schedule's runs, or of the listed queries.
  struct Walk {
    int run, end;  // of the schedule
    int next;      // tile, of the run or of all listed queries
    int query_tile;
    int32_t mask;  // of a KeyTile
  };
  __device__ Walk BeginWalk() const {
    Walk walk = {};
    const TransposedView& schedule = b_.transposed;
    const int64_t chunk =
        task_.head % schedule.heads * schedule.chunks + key_tile_ / kChunkKeyTiles;
    walk.run = static_cast<int>(schedule.begin[chunk]);
    walk.end = static_cast<int>(schedule.begin[chunk + 1]);
    return walk;
  }
  __device__ bool Next(Walk* walk) const {
    if (a_.packs_asked) return NextListed(walk);
    for (; walk->run < walk->end; ++walk->run, walk->next = 0) {
      const QueryRun& run = b_.transposed.runs[walk->run];
      walk->mask = run.masks[key_tile_ % kChunkKeyTiles];
      if (walk->mask == QueryRun::kNotSeen || walk->next >= run.tiles) continue;
      walk->query_tile = run.first_tile + walk->next++;
      return true;
    }
    return false;
  }
  __device__ bool NextListed(Walk* walk) const {
    const Band& band = a_.schedule.band;
    const int64_t first = key_tile_ * kKeys, queries = this->queries_;
    while (int64_t{walk->next} * kQueries < queries) {
      walk->query_tile = walk->next++;
      const int64_t row = int64_t{walk->query_tile} * kQueries;
      const int64_t first_row = QueryRow(a_, task_.batch, row);
      const int64_t last_row = QueryRow(a_, task_.batch, min(row + kQueries, queries) - 1);
      if (first + kKeys <= max(first_row + band.low, band.first_key)) continue;
      if (first > last_row + band.high) continue;
      const bool whole = IsWholeInBand(band, key_tile_, first_row, last_row);
      walk->mask = whole ? TileRun::kFull : KeyTile::kBand;
      return true;
    }
    return false;
  }

  // Adds what the queries of a tile give.
  __device__ void AddTile(const KeyTile& tile, int64_t query_tile) {
    this->SetQueryTile(query_tile);
    if (!this->LoadNumbers()) return;
    this->LoadTile();
    if (kRule && !this->WithinAnySpan(tile.index)) return;
    const bool whole = this->IsWhole(tile);
    float weights[kRows][4] = {}, gradients[kRows][4] = {};
    this->ComputeGradients(tile, whole, weights, gradients);
    this->PassRelu(tile, gradients);
    // Keys are the rows of this product, and queries what they are multiplied with.
    const auto takes = [&](int r, int i) {
      return (shared_.visible[i] >> (ty_ * kRows + r) & 1) != 0;
    };
    this->StoreByQuery(weights, shared_.p);
    __syncthreads();  // values have been read
    bool finite =
        this->LoadRows(whole, Base::kFirstRows, [&](int row) { return this->GradientRow(row); });
    this->template AddRows</*kByKey=*/false>(shared_.p, shared_.kv, finite, v_sums_, takes);
    __syncthreads();
    this->StoreByQuery(gradients, shared_.p);
    finite = this->LoadRows(whole, Base::kSecondRows,
                            [&](int row) { return this->QueryRowReader(row); });
    this->template AddRows</*kByKey=*/false>(shared_.p, shared_.kv, finite, k_sums_, takes);
    if (a_.rule.content_bias == nullptr || threadIdx.x >= kKeys) return;
    float sum = 0;
    for (int i = 0; i < kQueries; ++i) sum += shared_.p[i * kStride + threadIdx.x];
    numbers_.columns[threadIdx.x] += sum;
  }

  // Adds what a head's content bias gives to the keys, and stores what the keys give to it.
  __device__ void FinishContentBias() {
    const float* bias = a_.rule.content_bias + task_.head * a_.head_dim;
    __syncthreads();
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float sum = numbers_.columns[ty_ * kRows + r];
#pragma unroll
      for (int n = 0; n < kColumns; ++n) {
        const int channel = n / kVector * 64 + tx_ * kVector + n % kVector;
        if (channel < a_.head_dim) k_sums_[r][n] = fmaf(sum, bias[channel], k_sums_[r][n]);
      }
    }
    this->LoadKeys(key_tile_);
    __syncthreads();
    if (b_.content_bias == nullptr) return;
    float* sums =
        b_.content_bias +
        ((task_.batch * a_.query_heads + task_.head) * b_.key_tiles() + key_tile_) * a_.head_dim;
    for (int c = threadIdx.x; c < a_.head_dim; c += kThreads) {
      float sum = 0;
      for (int n = 0; n < kKeys; ++n) {
        // A key that no query sees may be no number.
        if (numbers_.columns[n] != 0)
          sum = fmaf(numbers_.columns[n], shared_.kv[c * kStride + n], sum);
      }
      sums[c] = sum * a_.scale;
    }
    __syncthreads();
  }

  __device__ void Store() {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int c = ty_ * kRows + r;
      if (!IsToken(a_, task_, key_tile_, c)) continue;
      const int64_t place = key_tile_ * kKeys + c;
      const int64_t row = b_.keys_by_place ? place : KeyToken(a_, task_, key_tile_, c);
      const DeviceView &k = b_.k_gradient, &v = b_.v_gradient;
      if (k.data != nullptr) {
        this->AddSums(k_sums_[r], a_.scale, k, Offset(k, task_.batch, task_.kv_head, row),
                      a_.head_dim);
      }
      if (v.data != nullptr) {
        this->AddSums(v_sums_[r], 1, v, Offset(v, task_.batch, task_.kv_head, row), a_.value_dim);
      }
    }
  }

  const int64_t key_tile_;
  float k_sums_[kRows][kColumns] = {};
  float v_sums_[kRows][kColumns] = {};
};

// ---- The owner of offsets ----

template <int kDim>
class OffsetOwner : public GradientTile<kDim, true, kOffsetThreads> {
 public:
  using Base = GradientTile<kDim, true, kOffsetThreads>;
  using Base::kColumns, Base::kGroups, Base::kRows, Base::kThreads, Base::kValueStride,
      Base::kVector;

  __device__ OffsetOwner(const FlashBackwardArguments& b, const FlashTask& task, int64_t block,
                         unsigned char* memory)
      : Base(b, task, memory),
        block_(block),
        difference_(block + 1 - b.forward.schedule.query_tiles) {}

  __device__ void Run() {
    const int64_t group = a_.query_heads / a_.kv_heads;
    task_.kv_head = task_.head / group;
    for (task_.batch = 0; task_.batch < a_.batch; ++task_.batch) {
      for (int64_t t = 0; t < a_.schedule.query_tiles; ++t) {
        const int64_t key_tile = t + difference_;
        if (key_tile < 0 || key_tile >= b_.key_tiles()) continue;
        const int32_t mask = MaskAt(t, key_tile);
        if (mask != QueryRun::kNotSeen) AddTile({static_cast<int32_t>(key_tile), mask}, t);
      }
    }
    Store();
  }

 private:
  using Base::a_, Base::b_, Base::first_query_, Base::shared_, Base::task_, Base::tx_, Base::ty_;

  // Returns what the schedule says of a pair of tiles.
  __device__ int32_t MaskAt(int64_t query_tile, int64_t key_tile) const {
    const ScheduleView& schedule = a_.schedule;
    const int64_t row = task_.head % schedule.heads * schedule.query_tiles + query_tile;
    int64_t low = schedule.row_begin[row], high = schedule.row_begin[row + 1];
    while (low < high) {  // finds the first run that ends behind the tile
      const int64_t middle = (low + high) / 2;
      const TileRun& run = schedule.runs[middle];
      if (run.first_tile + run.tiles > key_tile) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    if (low == schedule.row_begin[row + 1] || schedule.runs[low].first_tile > key_tile)
      return QueryRun::kNotSeen;
    return schedule.runs[low].mask;
  }

  __device__ void AddTile(const KeyTile& tile, int64_t query_tile) {
    this->SetQueryTile(query_tile);
    if (!this->LoadNumbers()) return;
    this->LoadTile();
    if (!this->WithinAnySpan(tile.index)) return;
    const bool whole = this->IsWhole(tile);
    float weights[kRows][4] = {}, gradients[kRows][4] = {};
    this->ComputeGradients(tile, whole, weights, gradients);
    if (a_.rule.relu_multiplier.values != nullptr) {
      float before[kRows][4], of_factor[kRows][4];
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          const float product = this->ProductBeforeRelu(r, c);
          before[r][c] = gradients[r][c];
          of_factor[r][c] = before[r][c] == 0 || product <= 0 ? 0 : before[r][c] * product;
        }
      }
      this->PassRelu(tile, gradients);
      if (b_.bias != nullptr) bias_ += SumOfOffset(before);
      if (b_.relu_multiplier != nullptr) factor_ += SumOfOffset(of_factor);
      positions_ += SumOfOffset(gradients);
    } else {
      positions_ += SumOfOffset(gradients);
    }
    if (b_.relative_keys != nullptr) AddRelativeKeys(whole);
  }

  // Stores numbers of pairs by query, and returns the sum of those of this thread's offset. Begins with a barrier.
  __device__ float SumOfOffset(const float (&pairs)[kRows][4]) {
    __syncthreads();
    this->StoreByQuery(pairs, shared_.p);
    __syncthreads();
    const int n = static_cast<int>(threadIdx.x);
    if (n >= kBlockOffsets - 1) return 0;
    float sum = 0;
    for (int row = max(63 - n, 0); row < min(127 - n, 64); ++row) {
      sum += shared_.p[row * kStride + n - 63 + row];
    }
    return sum;
  }

  // Adds the products of the score gradients, which lie in shared memory by query, with the queries.
  __device__ void AddRelativeKeys(bool whole) {
    const bool finite =
        this->LoadRows(whole, Base::kFirstRows, [&](int row) { return this->QueryRowReader(row); });
#pragma unroll 1
    for (int i = 0; i < kQueries; ++i) {
      if (!this->IsActive(i)) continue;  // all its score gradients are 0
      const uint64_t visible = finite ? ~uint64_t{0} : shared_.visible[i];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int first = half * 64 + ty_ * kRows - 63 + i;  // key of this thread's first offset
        float own[kRows];
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          const int c = first + r;
          own[r] = c < 0 || c >= kKeys ? 0 : shared_.p[i * kStride + c];
        }
        this->AddRow(own, shared_.kv + i * kValueStride, relative_[half], [&](int r) {
          return first + r >= 0 && first + r < kKeys && (visible >> (first + r) & 1) != 0;
        });
      }
    }
  }

  __device__ void Store() {
    const int64_t block = task_.head * b_.offset_blocks() + block_;
    if (threadIdx.x < kBlockOffsets - 1) {
      const int64_t n = block * kBlockOffsets + threadIdx.x;
      const bool has_relu = a_.rule.relu_multiplier.values != nullptr;
      if (b_.bias != nullptr) b_.bias[n] = has_relu ? bias_ : positions_;
      if (b_.relu_multiplier != nullptr) b_.relu_multiplier[n] = factor_;
      if (b_.positions != nullptr) b_.positions[n] = positions_;
    }
    if (b_.relative_keys == nullptr) return;
    const int dim = a_.head_dim;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const int n = half * 64 + ty_ * kRows + r;
        const DeviceView sums = {b_.relative_keys, {0, 0, dim, 1}, Element::kF32};
        this->AddSums(relative_[half][r], a_.scale, sums, (block * kBlockOffsets + n) * dim, dim);
      }
    }
  }

  const int64_t block_;
  const int64_t difference_;  // of places of tiles
  float bias_ = 0;            // sums of offset threadIdx.x of the block
  float factor_ = 0;
  float positions_ = 0;
  float relative_[2][kRows][kColumns] = {};  // of offsets 64 half + ty kRows + r
};

// ---- Kernels ----

template <int kDim, bool kRule>
__global__ void __launch_bounds__(QueryThreads(kDim, kRule), BlocksOf(QueryThreads(kDim, kRule)))
    FlashQueries(const FlashBackwardArguments b) {
  const int64_t tasks = FlashTasks(b.forward);
  for (int64_t n = blockIdx.x; n < tasks; n += gridDim.x) {
    QueryOwner<kDim, kRule>(b, TaskOf(b.forward, n), SharedMemory<kDim, kRule>()).Run();
    __syncthreads();
  }
}

__host__ __device__ inline int64_t KeyTasks(const FlashBackwardArguments& b) {
  return b.forward.batch * b.forward.kv_heads * b.key_tiles();
}

template <int kDim, bool kRule>
__global__ void __launch_bounds__(KeyThreads(kDim, kRule), BlocksOf(KeyThreads(kDim, kRule)))
    FlashKeys(const FlashBackwardArguments b) {
  for (int64_t n = blockIdx.x; n < KeyTasks(b); n += gridDim.x) {
    FlashTask task = {};
    task.kv_head = n / b.key_tiles() % b.forward.kv_heads;
    task.batch = n / b.key_tiles() / b.forward.kv_heads;
    KeyOwner<kDim, kRule>(b, task, n % b.key_tiles(), SharedMemory<kDim, kRule>()).Run();
    __syncthreads();
  }
}

template <int kDim>
__global__ void __launch_bounds__(kOffsetThreads, 1) FlashOffsets(const FlashBackwardArguments b) {
  const int64_t blocks = b.offset_blocks(), tasks = b.forward.query_heads * blocks;
  for (int64_t n = blockIdx.x; n < tasks; n += gridDim.x) {
    FlashTask task = {};
    task.head = n / blocks;
    OffsetOwner<kDim>(b, task, n % blocks, SharedMemory<kDim, true>()).Run();
    __syncthreads();
  }
}

template <int kNumber>
struct Constant {
  constexpr int operator()() const { return kNumber; }
};
// Calls launch(constant of the head size) for the least size that the kernels have.
template <class LaunchFor>
const char* ForHeadSize(const FlashBackwardArguments& b, const LaunchFor& launch) {
  const int widest = b.widest();
  if (widest <= 64) return launch(Constant<64>());
  if (widest <= 128) return launch(Constant<128>());
  return launch(Constant<256>());
}

template <int kDim>
KernelShape ShapeOf(const FlashBackwardArguments& b, int64_t tasks, int threads) {
  return {BlocksInTurns(tasks, b.forward.max_blocks), threads,
          kGradientBytes<kDim> + Shared<kDim>::Bytes(b.forward.rule)};
}

const char* Queries(const FlashBackwardArguments& b, void* stream) {
  return ForHeadSize(b, [&](auto dim) {
    constexpr int kDim = dim();
    const int64_t tasks = FlashTasks(b.forward);
    return b.forward.rule.is_plain()
               ? Launch("FlashQueries", &FlashQueries<kDim, false>,
                        ShapeOf<kDim>(b, tasks, QueryThreads(kDim, false)), stream, b)
               : Launch("FlashQueries with a rule", &FlashQueries<kDim, true>,
                        ShapeOf<kDim>(b, tasks, QueryThreads(kDim, true)), stream, b);
  });
}

const char* Keys(const FlashBackwardArguments& b, void* stream) {
  return ForHeadSize(b, [&](auto dim) {
    constexpr int kDim = dim();
    return b.forward.rule.is_plain()
               ? Launch("FlashKeys", &FlashKeys<kDim, false>,
                        ShapeOf<kDim>(b, KeyTasks(b), KeyThreads(kDim, false)), stream, b)
               : Launch("FlashKeys with a rule", &FlashKeys<kDim, true>,
                        ShapeOf<kDim>(b, KeyTasks(b), KeyThreads(kDim, true)), stream, b);
  });
}

const char* Offsets(const FlashBackwardArguments& b, void* stream) {
  return ForHeadSize(b, [&](auto dim) {
    constexpr int kDim = dim();
    const int64_t tasks = b.forward.query_heads * b.offset_blocks();
    return Launch("FlashOffsets", &FlashOffsets<kDim>, ShapeOf<kDim>(b, tasks, kOffsetThreads),
                  stream, b);
  });
}

}  // namespace

TFB_KERNEL_TABLE(FlashBackwardKernels, {&Delta, &Queries, &Keys, &Offsets});

}  // namespace tfb
