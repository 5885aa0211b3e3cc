// Engine flash on tensor cores of Hopper GPUs (sm_90a), for bf16 and f16 without a score rule: wgmma,
// TMA and warp groups that do different things, as in FlashAttention-3 (Shah et al.,
// arXiv:2407.08608v2, section 3); flash_mma.cuh does everything else.
//
// A block has three warp groups. One thread of the first walks the schedule and starts copies; the two
// others multiply, each 64 of the block's 128 queries with 128 keys at a time, two tiles of the
// schedule that need not be neighbours.
//
//   overlap         a group starts q k^T of step n, then p v of step n - 1, and exponentiates the
//                   scores of step n while the second runs. The groups start products in turns, so
//                   that one multiplies while the other exponentiates
//   shared memory   queries and output 128 x D each, and stages of 128 keys and values: two at
//                   D = 128, four at D = 64, 193 and 161 KiB
//   registers       output D / 2, scores 64, probabilities 32 a thread, of 232; 40 of the first group
//   rate            4 x 128 x 128 x D FLOPs a step, 2,048 cycles of the tensor cores at D = 128, and
//                   128 x 128 exponentials, 1,024 cycles
//
// Rows of panels are 64 channels, 128 bytes, with their 16-byte chunks exchanged by the row's number:
// hopper.cuh. Sums over keys go step by step in the order of the schedule: every run gives the same
// bits.
#ifndef TFB_CORE_FLASH_FLASH_HOPPER_CUH_
#define TFB_CORE_FLASH_FLASH_HOPPER_CUH_

#include "core/cuda/hopper.cuh"
#include "core/flash/flash_mma.cuh"

namespace tfb {
namespace {

template <int kDim>
struct HopperShape {
  static constexpr int kThreads = 3 * kWarpGroup;
  static constexpr int kGroupQueries = 64;  // of a warp group
  static constexpr int kStepTiles = 2;      // tiles of keys of a step
  static constexpr int kStepKeys = kStepTiles * kKeys;
  static constexpr int kStages = kDim == 64 ? 4 : 2;
  static constexpr int kPanels = kDim / 64;
  static constexpr int kRowBytes = 128;
  static constexpr int kPanelBytes = 128 * kRowBytes;  // of 128 queries or keys
  static constexpr int kTileBytes = kPanels * kPanelBytes;
  static_assert(kQueries == 2 * kGroupQueries && kStepKeys == 128, "panels have 128 rows");
};

// Returns the offset in a panel's tile of 16-byte chunk `chunk` of row `row`.
template <int kDim>
__device__ inline int PlaceInPanels(int row, int chunk) {
  using Shape = HopperShape<kDim>;
  return chunk / 8 * Shape::kPanelBytes + row * Shape::kRowBytes + ((chunk ^ row) & 7) * 16;
}

// Two tiles of keys. Where there is no second one, it lies behind the last key.
struct HopperStep {
  int index[2];
  int mask[2];  // as in KeyTile
};

// What the first group finds out of a task.
struct HopperTask {
  FlashTask task;
  const int32_t* query_order;  // null: query n is token n
  const int32_t* key_order;
  const uint8_t* key_mask;  // null: every key is a token
  int first_query;
  int queries;  // of the batch row
  int steps;    // -1 behind the last task
};

// What the groups of a block share beside panels.
template <int kDim>
struct HopperCommon {
  static constexpr int kStages = HopperShape<kDim>::kStages;

  uint64_t queries_full;
  uint64_t queries_empty;
  uint64_t keys_full[kStages];
  uint64_t keys_empty[kStages];
  uint64_t values_full[kStages];
  uint64_t values_empty[kStages];
  HopperStep steps[kStages];
  HopperTask tasks[2];  // the n-th of a block is in tasks[n % 2]
  WalkState walk;       // thread 0's
};

template <int kDim>
struct HopperShared {
  using Shape = HopperShape<kDim>;
  static constexpr int kAlignment = 1024;  // of panels
  static constexpr size_t kBytes = kAlignment + (2 + 2 * Shape::kStages) * Shape::kTileBytes;

  unsigned char* queries;
  unsigned char* keys;
  unsigned char* values;
  unsigned char* output;
  HopperCommon<kDim>& common;

  __device__ HopperShared(unsigned char* aligned, HopperCommon<kDim>& of_block)
      : queries(aligned),
        keys(queries + Shape::kTileBytes),
        values(keys + Shape::kStages * Shape::kTileBytes),
        output(values + Shape::kStages * Shape::kTileBytes),
        common(of_block) {}
};

// A place in the ring of stages, and the parity of the phase that it is in.
template <int kStages>
struct StageOf {
  int stage = 0;
  unsigned parity = 0;

  __device__ void Advance() {
    if (++stage < kStages) return;
    stage = 0;
    parity ^= 1;
  }
};

// How tensors are copied.
struct HopperCopying {
  TensorMap q;
  TensorMap k;
  TensorMap v;
  bool boxes_of_q;  // by boxes: rows are whole chunks, one behind the other
  bool boxes_of_k;
  bool boxes_of_v;
  InChunks in_chunks;
  int heads;  // whose keys and values stay in the L2 cache together
};

// ---- Which task is next ----

// Returns the n-th of all tasks. Those of `heads` heads are mixed, the longest first, so that blocks
// that take them in turns have equal shares and the heads' keys and values are read from L2.
__device__ inline FlashTask HopperTaskOf(const FlashArguments& a, int heads, int64_t n) {
  const int64_t tiles = a.schedule.query_tiles, of_head = tiles * a.splits;
  const int64_t section = n / (heads * of_head);
  const int64_t first = section * heads;
  const int64_t count = min(int64_t{heads}, a.batch * a.query_heads - first);
  n -= first * of_head;
  const int64_t head = first + n % count;
  n /= count;
  FlashTask task;
  task.split = n % a.splits;
  const int64_t rank = n / a.splits;
  task.head = head % a.query_heads;
  task.batch = head / a.query_heads;
  task.kv_head = task.head / (a.query_heads / a.kv_heads);
  // In bands, later queries see more keys or as many.
  task.query_tile = a.schedule.order == nullptr
                        ? tiles - 1 - rank
                        : a.schedule.order[task.head % a.schedule.heads * tiles + rank];
  return task;
}
// Returns the block's task of a round. Every other round goes backwards: a block that had a longer one
// has a shorter one next.
__device__ inline int64_t TaskOfRound(int64_t round) {
  const int64_t blocks = gridDim.x, block = blockIdx.x;
  return round * blocks + (round % 2 == 0 ? block : blocks - 1 - block);
}

// ---- The first group ----

template <class T, int kDim>
class HopperCopies {
 public:
  using Shape = HopperShape<kDim>;

  __device__ HopperCopies(const FlashArguments& a, const HopperCopying& copying,
                          const HopperShared<kDim>& shared)
      : a_(a),
        copying_(copying),
        shared_(shared),
        common_(shared.common),
        is_alone_(copying.boxes_of_q && copying.boxes_of_k && copying.boxes_of_v) {}

  // Does all tasks of the block. Boxes take one thread, rows all of the group.
  __device__ void Run() {
    if (is_alone_ && threadIdx.x > 0) return;
    unsigned parity = 0;
    for (int64_t round = 0;; ++round) {
      HopperTask& task = common_.tasks[parity];
      if (threadIdx.x == 0) {
        Wait(&common_.queries_empty, parity ^ 1);
        FindTask(&round, task);
      }
      Together();
      if (task.steps < 0) break;
      CopyQueries(task);
      const int steps = task.steps;
#pragma unroll 1
      for (int n = 0; n < steps; ++n) {
        CopyStep(task);
        at_.Advance();
      }
      parity ^= 1;
    }
    if (threadIdx.x == 0) Arrive(&common_.queries_full);
  }

 private:
  static constexpr int kTogether = 4;  // a named barrier
  static constexpr int kChunks = kDim / 8;

  __device__ void Together() const {
    if (!is_alone_) NamedSync(kTogether, kWarpGroup);
  }

  // Finds the next task with queries from a round on.
  __device__ void FindTask(int64_t* round, HopperTask& to) {
    const int64_t tasks = FlashTasks(a_);
    for (;; ++*round) {
      if (*round * gridDim.x >= tasks) break;
      const int64_t n = TaskOfRound(*round);
      if (n >= tasks) continue;
      const FlashTask task = HopperTaskOf(a_, copying_.heads, n);
      to.first_query = static_cast<int>(task.query_tile) * kQueries;
      to.queries = static_cast<int>(QueriesOf(a_, task.batch));
      if (to.first_query >= to.queries) continue;
      to.task = task;
      to.query_order = OrderOf(a_.query_order, task.batch, task.head);
      to.key_order = OrderOf(a_.key_order, task.batch, task.kv_head);
      to.key_mask =
          a_.key_mask == nullptr ? nullptr : a_.key_mask + task.batch * a_.key_mask_strides[0];
      common_.walk.Begin(a_, task, kQueries);
      to.steps = (common_.walk.left + 1) / 2;
      return;
    }
    to.steps = -1;
  }
  __device__ static const int32_t* OrderOf(const TokenOrder& order, int64_t b, int64_t h) {
    return order.tokens == nullptr ? nullptr : order.Of(b, h);
  }

  __device__ void CopyQueries(const HopperTask& task) {
    uint64_t* full = &common_.queries_full;
    if (!copying_.boxes_of_q) {
      const int64_t offset =
          task.task.batch * a_.q.strides[0] + task.task.head * a_.q.strides[1];
      CopyRows(shared_.queries, a_.q, offset, a_.head_dim, copying_.in_chunks.q, full, [&](int r) {
        if (task.first_query + r >= task.queries) return int64_t{-1};
        const int64_t row = QueryRow(a_, task.task.batch, task.first_query + r);
        return task.query_order == nullptr ? row : int64_t{task.query_order[row]};
      });
      return;
    }
    if (threadIdx.x > 0) return;
    ArriveAndExpect(full, Shape::kTileBytes);
#pragma unroll
    for (int p = 0; p < Shape::kPanels; ++p) {
      CopyBox(shared_.queries + p * Shape::kPanelBytes, copying_.q, p * 64, task.first_query,
              static_cast<int>(task.task.head), static_cast<int>(task.task.batch), full);
    }
  }

  __device__ void CopyStep(const HopperTask& task) {
    HopperStep& step = common_.steps[at_.stage];
    if (threadIdx.x == 0) {
      Wait(&common_.keys_empty[at_.stage], at_.parity ^ 1);
#pragma unroll
      for (int t = 0; t < 2; ++t) {
        const bool exists = common_.walk.Next(a_.schedule);
        const KeyTile tile = common_.walk.key_tile(a_.schedule);
        step.index[t] =
            exists ? tile.index : static_cast<int>((a_.kv_tokens + kKeys - 1) / kKeys);
        step.mask[t] = exists ? tile.mask : TileRun::kFull;
      }
    }
    Together();
    const FlashTask& of = task.task;
    Copy(copying_.k, copying_.boxes_of_k, a_.k, of.batch * a_.k.strides[0] + of.kv_head * a_.k.strides[1],
         a_.head_dim, copying_.in_chunks.k, shared_.keys, task, step, &common_.keys_full[at_.stage]);
    if (threadIdx.x == 0) Wait(&common_.values_empty[at_.stage], at_.parity ^ 1);
    Together();
    Copy(copying_.v, copying_.boxes_of_v, a_.v, of.batch * a_.v.strides[0] + of.kv_head * a_.v.strides[1],
         a_.value_dim, copying_.in_chunks.v, shared_.values, task, step,
         &common_.values_full[at_.stage]);
  }
  // Copies two tiles of keys or values to the stage.
  __device__ void Copy(const TensorMap& map, bool boxes, const DeviceView& view, int64_t offset,
                       int channels, bool in_chunks, unsigned char* ring, const HopperTask& task,
                       const HopperStep& step, uint64_t* full) {
    unsigned char* to = ring + at_.stage * Shape::kTileBytes;
    if (!boxes) {
      CopyRows(to, view, offset, channels, in_chunks, full,
               [&](int r) { return KeyTokenOrNone(a_, task, step.index[r / kKeys], r % kKeys); });
      return;
    }
    if (threadIdx.x > 0) return;
    ArriveAndExpect(full, Shape::kTileBytes);
#pragma unroll
    for (int t = 0; t < 2; ++t) {
#pragma unroll
      for (int p = 0; p < Shape::kPanels; ++p) {
        CopyBox(to + p * Shape::kPanelBytes + t * kKeys * Shape::kRowBytes, map, p * 64,
                step.index[t] * kKeys, static_cast<int>(task.task.kv_head),
                static_cast<int>(task.task.batch), full);
      }
    }
  }

 public:
  // Returns the token of k and v that is key c of a tile, or -1 where there is none, or padding.
  __device__ static int64_t KeyTokenOrNone(const FlashArguments& a, const HopperTask& task, int tile,
                                           int c) {
    if (int64_t{tile} * kKeys + c >= a.kv_tokens) return -1;
    const int64_t row = FirstKeyRow(a, tile) + c;
    const int64_t token = task.key_order == nullptr ? row : task.key_order[row];
    if (task.key_mask == nullptr) return token;
    return task.key_mask[token * a.key_mask_strides[1]] != 0 ? token : -1;
  }

 private:
  // Copies 128 rows by all threads of the group; row r is that of token token_of(r), and zeros where
  // that is below 0 and beyond the last channel.
  template <class TokenOfRow>
  __device__ void CopyRows(unsigned char* to, const DeviceView& view, int64_t offset, int channels,
                           bool in_chunks, uint64_t* full, const TokenOfRow& token_of) {
#pragma unroll 1
    for (int n = threadIdx.x; n < 128 * kChunks; n += kWarpGroup) {
      const int row = n / kChunks, chunk = n % kChunks;
      const int64_t token = token_of(row);
      const int64_t from = offset + (token < 0 ? 0 : token) * view.strides[2];
      unsigned char* place = to + PlaceInPanels<kDim>(row, chunk);
      if (in_chunks) {
        CopyAsync(place, static_cast<const T*>(view.data) + from + chunk * 8,
                  token >= 0 && chunk * 8 < channels);
        continue;
      }
      unsigned* pairs = reinterpret_cast<unsigned*>(place);
#pragma unroll 1
      for (int p = 0; p < 4; ++p) {
        const auto at = [&](int channel) {
          return token >= 0 && channel < channels
                     ? LoadElement(view.data, view.element, from + channel * view.strides[3])
                     : 0;
        };
        pairs[p] = Pair<T>(at(chunk * 8 + p * 2), at(chunk * 8 + p * 2 + 1));
      }
    }
    __pipeline_commit();
    __pipeline_wait_prior(0);
    FenceAsync();
    NamedSync(kTogether, kWarpGroup);
    if (threadIdx.x == 0) Arrive(full);
  }

  const FlashArguments& a_;
  const HopperCopying& copying_;
  const HopperShared<kDim>& shared_;
  HopperCommon<kDim>& common_;
  const bool is_alone_;
  StageOf<Shape::kStages> at_;
};

// ---- The others ----

template <class T, int kDim>
class HopperProducts {
 public:
  using Shape = HopperShape<kDim>;

  __device__ HopperProducts(const FlashArguments& a, bool out_in_chunks,
                            const HopperShared<kDim>& shared)
      : a_(a),
        out_in_chunks_(out_in_chunks),
        shared_(shared),
        common_(shared.common),
        group_(static_cast<int>(threadIdx.x) / kWarpGroup - 1),
        factor_(a.scale * kLog2E) {}

  __device__ void Run() {
    if (group_ == 1) NamedArrive(TurnOf(0), kBoth);
    for (unsigned parity = 0;; parity ^= 1) {
      Wait(&common_.queries_full, parity);
      const HopperTask& task = common_.tasks[parity];
      if (task.steps < 0) break;
      RunTask(task);
    }
    if (group_ == 0) NamedSync(TurnOf(0), kBoth);
  }

 private:
  static constexpr int kBoth = 2 * kWarpGroup;
  static constexpr int kNonFinite = 3;               // a named barrier
  static constexpr int kKeyTiles = 16;               // of 8 columns of scores
  static constexpr int kOutputTiles = kDim / 8;      // of 8 columns of the output
  static constexpr int kChunks = kDim / 8;           // of 16 bytes of a row
  using Scores = float[kKeyTiles * 4];

  __device__ static int TurnOf(int group) { return 1 + group; }  // a named barrier
  __device__ static int lane() { return static_cast<int>(threadIdx.x) % kWarp; }
  // The first of the 16 queries of the warp.
  __device__ int warp_row() const { return static_cast<int>(threadIdx.x) / kWarp * 16 - kWarpGroup / 2; }
  __device__ int RowOf(int half) const { return warp_row() + half * 8 + lane() / 4; }
  __device__ static int column() { return lane() % 4 * 2; }

  __device__ void RunTask(const HopperTask& task) {
#pragma unroll
    for (int n = 0; n < kOutputTiles * 4; ++n) output_[n] = 0;
    sum_[0] = sum_[1] = 0;
    maximum_[0] = maximum_[1] = -INFINITY;
    if (task.steps > 0) RunSteps(task);
    if (task.steps == 0) Release(&common_.queries_empty);
    Store(task);
  }

  __device__ void RunSteps(const HopperTask& task) {
    StageOf<Shape::kStages> keys = at_;
    Scores score;
    unsigned weight[kKeyTiles * 2];
    Wait(&common_.keys_full[keys.stage], keys.parity);
    HopperStep step = common_.steps[keys.stage];
    StartScores(keys.stage, score);
    WaitForProducts<0>();
    Pin(score);
    Release(&common_.keys_empty[keys.stage]);
    float rescale[2];
    Exponentiate(task, step, score, rescale);
    Round(score, weight);
#pragma unroll 1
    for (int n = 1; n < task.steps; ++n) {
      keys.Advance();
      Wait(&common_.keys_full[keys.stage], keys.parity);
      const HopperStep next = common_.steps[keys.stage];
      if (Hides(step)) SetAsideNonFinite(task, step);
      NamedSync(TurnOf(group_), kBoth);
      StartScores(keys.stage, score);
      Wait(&common_.values_full[at_.stage], at_.parity);
      StartOutput(at_.stage, weight);
      NamedArrive(TurnOf(1 - group_), kBoth);
      WaitForProducts<1>();
      Pin(score);
      Release(&common_.keys_empty[keys.stage]);
      Exponentiate(task, next, score, rescale);
      WaitForProducts<0>();
      Pin(output_);
      Release(&common_.values_empty[at_.stage]);
      at_.Advance();
      Rescale(rescale);
      Round(score, weight);
      step = next;
    }
    // All products with queries are done.
    Release(&common_.queries_empty);
    if (Hides(step)) SetAsideNonFinite(task, step);
    Wait(&common_.values_full[at_.stage], at_.parity);
    StartOutput(at_.stage, weight);
    WaitForProducts<0>();
    Pin(output_);
    Release(&common_.values_empty[at_.stage]);
    at_.Advance();
  }

  // Tells that the warp needs a stage no more.
  __device__ static void Release(uint64_t* empty) {
    __syncwarp();
    if (lane() == 0) Arrive(empty);
  }

  // ---- Products ----

  __device__ void StartScores(int stage, Scores& score) {
    const uint64_t queries =
        DescribeMatrix(shared_.queries + group_ * Shape::kGroupQueries * Shape::kRowBytes);
    const uint64_t keys = DescribeMatrix(shared_.keys + stage * Shape::kTileBytes);
    Pin(score);
    BeginProducts();
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k) {
      const unsigned bytes = k / 4 * Shape::kPanelBytes + k % 4 * 32;
      if (k == 0) {
        MultiplyN128<T, 0>(score, MatrixOn(queries, bytes), MatrixOn(keys, bytes));
      } else {
        MultiplyN128<T, 1>(score, MatrixOn(queries, bytes), MatrixOn(keys, bytes));
      }
    }
    EndProducts();
  }
  __device__ void StartOutput(int stage, const unsigned (&weight)[kKeyTiles * 2]) {
    const uint64_t values =
        DescribeMatrix(shared_.values + stage * Shape::kTileBytes, Shape::kPanelBytes);
    Pin(output_);
    BeginProducts();
#pragma unroll
    for (int k = 0; k < Shape::kStepKeys / 16; ++k) {
      MultiplyTransposed<T>(output_, weight + k * 4, MatrixOn(values, k * 16 * Shape::kRowBytes));
    }
    EndProducts();
  }

  // ---- Which keys a query sees ----

  // Tells whether keys that there are may be hidden.
  __device__ bool Hides(const HopperStep& step) const {
    return step.mask[0] != TileRun::kFull || step.mask[1] != TileRun::kFull ||
           a_.key_mask != nullptr;
  }
  __device__ bool IsWhole(const HopperStep& step) const {
    return !Hides(step) && AllTokens(a_, step.index[0]) && AllTokens(a_, step.index[1]);
  }
  // Returns the row of the call that query r of the block is; beyond the last query, that of the last.
  __device__ int64_t RowOfCall(const HopperTask& task, int r) const {
    return QueryRow(a_, task.task.batch, min(task.first_query + r, task.queries - 1));
  }
  // Returns which keys of a tile are tokens, in all lanes of a warp.
  __device__ uint64_t Tokens(const HopperTask& task, int tile) const {
    if (a_.key_mask == nullptr) return Bits(0, a_.kv_tokens - int64_t{tile} * kKeys);
    using Copies = HopperCopies<T, kDim>;
    const unsigned low =
        __ballot_sync(~0u, Copies::KeyTokenOrNone(a_, task, tile, lane()) >= 0);
    const unsigned high =
        __ballot_sync(~0u, Copies::KeyTokenOrNone(a_, task, tile, lane() + 32) >= 0);
    return low | static_cast<uint64_t>(high) << 32;
  }
  // Returns a word whose bit c says that query r of the block sees key c of tile t.
  __device__ uint64_t Visible(const HopperTask& task, const HopperStep& step, int t, int r,
                              uint64_t tokens) const {
    const KeyTile tile = {step.index[t], step.mask[t]};
    return MaskOf(a_.schedule, tile, RowOfCall(task, r), r, kQueries) & tokens;
  }
  __device__ void Hide(const HopperTask& task, const HopperStep& step, Scores& score) const {
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      const uint64_t tokens = Tokens(task, step.index[t]);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint64_t visible = Visible(task, step, t, RowOf(half), tokens) >> column();
        const unsigned low = static_cast<unsigned>(visible);
        const unsigned high = static_cast<unsigned>(visible >> 32);
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
          for (int x = 0; x < 2; ++x) {
            const unsigned bit = 1u << (n % 4 * 8 + x);
            if (((n < 4 ? low : high) & bit) == 0) {
              score[(t * 8 + n) * 4 + half * 2 + x] = -INFINITY;
            }
          }
        }
      }
    }
  }

  // ---- Softmax: see FlashMmaBlock::Shift ----

  // Turns scores into weights, updates maxima and sums, and returns the factors of earlier outputs.
  __device__ void Exponentiate(const HopperTask& task, const HopperStep& step, Scores& score,
                               float (&rescale)[2]) {
    if (!IsWhole(step)) Hide(task, step, score);
    float minus[2];
    bool far = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float largest = maximum_[half];
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) {
        largest = fmaxf(largest, fmaxf(score[n * 4 + half * 2], score[n * 4 + half * 2 + 1]));
      }
      largest = MaxOfFour(largest);
      const float old = maximum_[half];
      rescale[half] = old == largest ? 1 : Exp2((old - largest) * factor_);
      sum_[half] *= rescale[half];
      maximum_[half] = largest;
      minus[half] = (largest == -INFINITY ? 0 : largest) * factor_;
      far |= fabsf(minus[half]) > 256;
    }
    if (__any_sync(~0u, far)) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float less = fabsf(minus[half]) > 256 ? maximum_[half] : 0;
        minus[half] = fabsf(minus[half]) > 256 ? 0 : minus[half];
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n) {
          score[n * 4 + half * 2] -= less;
          score[n * 4 + half * 2 + 1] -= less;
        }
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) {
        float(&x)[kKeyTiles * 4] = score;
        const int at = n * 4 + half * 2;
        x[at] = Exp2(fmaf(x[at], factor_, -minus[half]));
        x[at + 1] = Exp2(fmaf(x[at + 1], factor_, -minus[half]));
        sum_[half] += x[at] + x[at + 1];
      }
    }
  }
  __device__ static void Round(const Scores& score, unsigned (&weight)[kKeyTiles * 2]) {
#pragma unroll
    for (int n = 0; n < kKeyTiles * 2; ++n) weight[n] = Pair<T>(score[n * 2], score[n * 2 + 1]);
  }
  __device__ void Rescale(const float (&rescale)[2]) {
#pragma unroll
    for (int n = 0; n < kOutputTiles * 4; ++n) output_[n] *= rescale[n / 2 % 2];
  }

  // ---- Values that are not finite: see FlashMmaBlock::SetAsideNonFinite ----

  __device__ void SetAsideNonFinite(const HopperTask& task, const HopperStep& step) {
    unsigned char* values = shared_.values + at_.stage * Shape::kTileBytes;
    Wait(&common_.values_full[at_.stage], at_.parity);
    const int thread = static_cast<int>(threadIdx.x) - kWarpGroup;
    unsigned found = 0;
#pragma unroll 4
    for (int at = thread * 16; at < Shape::kTileBytes; at += kBoth * 16) {
      const uint4 x = *reinterpret_cast<const uint4*>(values + at);
      found |= NonFinite<T>(x.x) | NonFinite<T>(x.y) | NonFinite<T>(x.z) | NonFinite<T>(x.w);
    }
    if (!NamedAny(kNonFinite, kBoth, found)) return;
#pragma unroll 1
    for (int first = 0; first < Shape::kStepKeys; first += 32) {
      const int t = first / kKeys;
      const uint64_t tokens = Tokens(task, t == 0 ? step.index[0] : step.index[1]);
      unsigned seen[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint64_t visible = t == 0 ? Visible(task, step, 0, RowOf(half), tokens)
                                        : Visible(task, step, 1, RowOf(half), tokens);
        seen[half] = static_cast<unsigned>(visible >> first % kKeys);
      }
#pragma unroll 1
      for (int c = 0; c < 32; ++c) AddNonFinite(values, first + c, c, seen);
    }
    NamedSync(kNonFinite, kBoth);
#pragma unroll 1
    for (int at = thread * 16; at < Shape::kTileBytes; at += kBoth * 16) {
      unsigned* pairs = reinterpret_cast<unsigned*>(values + at);
      for (int n = 0; n < 4; ++n) {
        const unsigned non_finite = NonFinite<T>(pairs[n]);
        if ((non_finite & 0x8000u) != 0) pairs[n] &= 0xffff0000u;
        if ((non_finite & 0x80000000u) != 0) pairs[n] &= 0x0000ffffu;
      }
    }
    FenceAsync();
    NamedSync(kNonFinite, kBoth);
  }
  __device__ void AddNonFinite(const unsigned char* values, int key, int bit,
                               const unsigned (&seen)[2]) {
#pragma unroll
    for (int n = 0; n < kOutputTiles; ++n) {
      const unsigned pair =
          *reinterpret_cast<const unsigned*>(values + PlaceInPanels<kDim>(key, n) + column() * 2);
      const unsigned non_finite = NonFinite<T>(pair);
#pragma unroll
      for (int x = 0; x < 2; ++x) {
        if ((non_finite >> (15 + 16 * x) & 1) == 0) continue;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if ((seen[half] >> bit & 1) != 0) output_[n * 4 + half * 2 + x] += Half<T>(pair, x);
        }
      }
    }
  }

  // ---- Results ----

  __device__ void Store(const HopperTask& task) {
    float sum[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      sum[half] = SumOfFour(sum_[half]);
      if (lane() % 4 > 0 || !IsQuery(task, RowOf(half))) continue;
      const int64_t i = RowOfCall(task, RowOf(half));
      StoreSums(a_, task.task, i, QueryToken(task, i), maximum_[half] * a_.scale, sum[half]);
    }
    if (out_in_chunks_) {
      StoreInChunks(task, sum);
    } else {
      StorePairs(task, sum);
    }
  }
  __device__ static bool IsQuery(const HopperTask& task, int r) {
    return task.first_query + r < task.queries;
  }
  __device__ static int64_t QueryToken(const HopperTask& task, int64_t i) {
    return task.query_order == nullptr ? i : task.query_order[i];
  }
  // Stores the output through shared memory, from where whole rows are written in order.
  __device__ void StoreInChunks(const HopperTask& task, const float (&sum)[2]) {
    unsigned char* rows = shared_.output + warp_row() * kDim * 2;
    const auto place = [&](int row, int chunk) {
      return rows + row * kDim * 2 + ((chunk ^ (row & 7)) * 16);
    };
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float inverse = sum[half] == 0 ? 0 : 1 / sum[half];
#pragma unroll
      for (int n = 0; n < kOutputTiles; ++n) {
        const float* x = output_ + n * 4 + half * 2;
        *reinterpret_cast<unsigned*>(place(half * 8 + lane() / 4, n) + column() * 2) =
            Pair<T>(x[0] * inverse, x[1] * inverse);
      }
    }
    __syncwarp();
    T* to = static_cast<T*>(a_.out.data) + task.task.batch * a_.out.strides[0] +
            task.task.head * a_.out.strides[1];
#pragma unroll 1
    for (int n = lane(); n < 16 * kChunks; n += kWarp) {
      const int row = n / kChunks, chunk = n % kChunks;
      if (!IsQuery(task, warp_row() + row) || chunk * 8 >= a_.value_dim) continue;
      const int64_t i = RowOfCall(task, warp_row() + row);
      *reinterpret_cast<uint4*>(to + OutRow(a_, i, QueryToken(task, i)) * a_.out.strides[2] +
                                chunk * 8) = *reinterpret_cast<const uint4*>(place(row, chunk));
    }
    __syncwarp();
  }
  __device__ void StorePairs(const HopperTask& task, const float (&sum)[2]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (!IsQuery(task, RowOf(half))) continue;
      const int64_t i = RowOfCall(task, RowOf(half));
      const OutputRow row(a_, task.task, i, QueryToken(task, i), sum[half]);
#pragma unroll
      for (int n = 0; n < kOutputTiles; ++n) {
        const float pair[2] = {output_[n * 4 + half * 2], output_[n * 4 + half * 2 + 1]};
        row.Store(n * 8 + column(), pair);
      }
    }
  }

  const FlashArguments& a_;
  const bool out_in_chunks_;
  const HopperShared<kDim>& shared_;
  HopperCommon<kDim>& common_;
  const int group_;
  const float factor_;  // exponent of 2 for a unit of products
  StageOf<Shape::kStages> at_;  // of values
  float output_[kOutputTiles * 4];
  float maximum_[2];  // of products
  float sum_[2];      // over this lane's keys
};

// ---- Launching ----

template <class T, int kDim>
__global__ void __launch_bounds__(HopperShape<kDim>::kThreads, 1)
    FlashHopper(const __grid_constant__ FlashArguments a,
                const __grid_constant__ HopperCopying copying) {
#if TFB_IS_HOPPER
  __shared__ HopperCommon<kDim> common;
  using Shared = HopperShared<kDim>;
  unsigned char* memory = DynamicShared<Shared::kBytes>();
  const unsigned past = SharedAddress(memory) % Shared::kAlignment;
  const Shared shared(memory + (past == 0 ? 0 : Shared::kAlignment - past), common);
  if (threadIdx.x == 0) {
    constexpr int kWarps = 2 * kWarpGroup / kWarp;  // that multiply
    InitBarrier(&common.queries_full, 1);
    InitBarrier(&common.queries_empty, kWarps);
    for (int n = 0; n < HopperShape<kDim>::kStages; ++n) {
      InitBarrier(&common.keys_full[n], 1);
      InitBarrier(&common.keys_empty[n], kWarps);
      InitBarrier(&common.values_full[n], 1);
      InitBarrier(&common.values_empty[n], kWarps);
    }
    FenceBarrierInit();
  }
  __syncthreads();
  if (threadIdx.x < kWarpGroup) {
    FewerRegisters<40>();
    HopperCopies<T, kDim>(a, copying, shared).Run();
  } else {
    MoreRegisters<232>();
    HopperProducts<T, kDim>(a, copying.in_chunks.out, shared).Run();
  }
#endif
}

// Returns how many heads' keys and values, of which the L2 cache of 50 MB holds a part, are read at
// a time.
inline int HeadsAtATime(const FlashArguments& a) {
  constexpr int64_t kBytes = 24 << 20;
  const int64_t of_head = a.kv_tokens * (a.head_dim + a.value_dim) * 2;
  const int64_t kv_heads = of_head == 0 ? a.batch * a.kv_heads : kBytes / of_head;
  const int64_t heads = (kv_heads < 1 ? 1 : kv_heads) * (a.query_heads / a.kv_heads);
  return static_cast<int>(heads < a.batch * a.query_heads ? heads : a.batch * a.query_heads);
}

// Describes a tensor for copies of boxes. Returns false where it is none for them.
template <class T>
bool Describe(const DeviceView& view, bool in_chunks, int64_t batch, int64_t heads, int64_t tokens,
              int channels, int box_rows, TensorMap* map) {
  if (!in_chunks) return false;
  const BoxedTensor tensor = {view.data,
                              {channels, tokens, heads, batch},
                              {1, view.strides[2], view.strides[1], view.strides[0]},
                              box_rows};
  return EncodeTensorMap(tensor, view.element, map) == nullptr;
}

template <class T, int kDim>
const char* LaunchHopperOf(const FlashArguments& a, const InChunks& in_chunks, void* stream) {
  HopperCopying copying = {};
  copying.in_chunks = in_chunks;
  copying.heads = HeadsAtATime(a);
  const bool of_keys = a.key_order.tokens == nullptr && a.ring_tiles == 0;
  const bool of_queries = a.query_order.tokens == nullptr && a.asked.rows == nullptr;
  copying.boxes_of_q =
      of_queries && Describe<T>(a.q, in_chunks.q, a.batch, a.query_heads, a.query_tokens, a.head_dim,
                                kQueries, &copying.q);
  copying.boxes_of_k = of_keys && Describe<T>(a.k, in_chunks.k, a.batch, a.kv_heads, a.kv_tokens,
                                              a.head_dim, kKeys, &copying.k);
  copying.boxes_of_v = of_keys && Describe<T>(a.v, in_chunks.v, a.batch, a.kv_heads, a.kv_tokens,
                                              a.value_dim, kKeys, &copying.v);
  int device = 0, blocks = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&blocks, cudaDevAttrMultiProcessorCount, device);
  return Launch("FlashHopper", &FlashHopper<T, kDim>,
                {BlocksInTurns(FlashTasks(a), blocks < a.max_blocks ? blocks : a.max_blocks),
                 HopperShape<kDim>::kThreads, HopperShared<kDim>::kBytes},
                stream, a, copying);
}

// Tells whether the device is of compute capability 9.0 and the program has code for sm_90a.
template <class T, int kDim>
bool HasHopper() {
  int device = 0, major = 0, minor = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess ||
      cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) != cudaSuccess ||
      major != 9 || minor != 0) {
    return false;
  }
#ifdef __CUDACC__
  // An empty body has no shared memory.
  static const bool has_code = [] {
    cudaFuncAttributes attributes;
    return cudaFuncGetAttributes(&attributes, &FlashHopper<T, kDim>) == cudaSuccess &&
           attributes.sharedSizeBytes > 0;
  }();
  return has_code;
#else
  return true;
#endif
}

// Tells whether the kernels here do the call. Strides and what there is of orders and masks do not
// matter, so that they change no bit of the result.
template <class T, int kDim>
bool IsForHopper(const FlashArguments& a) {
  return a.rule.is_plain() && a.rule.content_bias == nullptr &&
         a.rule.relative_key_rows.rows == nullptr && a.scale > 0 &&
         (a.asked.rows == nullptr || a.packs_asked) && HasHopper<T, kDim>();
}

}  // namespace
}  // namespace tfb

#endif  // TFB_CORE_FLASH_FLASH_HOPPER_CUH_
