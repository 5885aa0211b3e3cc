// Engine flash on tensor cores of Hopper GPUs (sm_90a), for bf16 and f16 without a score rule: wgmma,
// TMA and warp groups that do different things, as in FlashAttention-3 (Shah et al.,
// arXiv:2407.08608v2, section 3); flash_mma.cuh does everything else.
//
// A block has three warp groups. Warps of the first walk the schedule and copy; the two others
// multiply, each 64 of the block's 128 queries with 128 keys at a time, two tiles of the schedule that
// need not be neighbours. The grid has a block for each multiprocessor: the next task's copies are
// under way while the last one's output is stored.
//
//   overlap         a group starts q k^T of step n, then p v of step n - 1, and exponentiates the
//                   scores of step n while the second runs. The groups start products in turns, so
//                   that one multiplies while the other exponentiates. Between tasks they do not: a
//                   group stores its output, which takes as long as the copies of the next task's
//                   queries and keys
//   first group     where rows are whole 16-byte chunks in the order of their tokens, its first warp
//                   starts copies of boxes (TMA) and finds out which keys a query sees, and its second
//                   looks for values that are not finite; else all four copy row by row. Both give the
//                   same bits
//   shared memory   output, and stages of 128 queries, and of 128 keys and values: one and two at
//                   D = 128, two and four at D = 64. 201 and 189 KiB
//   registers       output D / 2, scores 64, probabilities 32 a thread, of 208; 88 of the first group
//   rate            4 x 128 x 128 x D FLOPs a step, 2,048 cycles of the tensor cores at D = 128 and
//                   1,024 at D = 64, beside 128 x 128 exponentials, 1,024 cycles. Keys and values of a
//                   step come from L2, 64 KiB at D = 128: 5 TB/s at 650 TFLOP/s, which is why blocks
//                   are at the same head at the same time
//
// Rows of panels are 64 channels, 128 bytes, with their 16-byte chunks exchanged by the row's number:
// hopper.cuh. Sums over keys go step by step in the order of the schedule: every run gives the same
// bits.
#ifndef TFB_CORE_FLASH_FLASH_HOPPER_CUH_
#define TFB_CORE_FLASH_FLASH_HOPPER_CUH_

#include "core/cuda/hopper.cuh"
#include "core/cuda/tensor_map.cuh"
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
  static constexpr int kQueryStages = kDim == 64 ? 2 : 1;
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

// A task, as the first group finds it out.
struct HopperTask {
  FlashTask task;
  const int32_t* query_order;  // null: query n is token n
  int first_query;
  int queries;  // of the batch row
  int steps;    // -1 behind the last task
};

enum HopperFlags : unsigned char {
  kHides = 1,   // a query may not see all keys of the step
  kChecks = 2,  // likewise, and values behind hidden keys may be not finite
};

// The groups of a block share this beside panels.
template <int kDim>
struct HopperCommon {
  static constexpr int kStages = HopperShape<kDim>::kStages;
  // A step's words are written with its keys, and read until its values are, one step later.
  static constexpr int kWords = kStages + 2;
  static constexpr int kQueryStages = HopperShape<kDim>::kQueryStages;
  // A task's words are read until its output is stored, after its queries have been released.
  static constexpr int kTasks = kQueryStages + 1;

  uint64_t queries_full[kQueryStages];
  uint64_t queries_empty[kQueryStages];
  uint64_t keys_full[kStages];
  uint64_t keys_empty[kStages];
  uint64_t values_full[kStages];
  uint64_t values_empty[kStages];
  uint64_t values_checked[kStages];
  HopperTask tasks[kTasks];
  unsigned char flags[kWords];            // of HopperFlags
  int not_finite[kStages];                // 1 where some are; the first group looks
  uint64_t visible[kWords][2][kQueries];  // bit c of [t][r]: query r sees key c of tile t
};

template <int kDim>
struct HopperShared {
  using Shape = HopperShape<kDim>;
  static constexpr int kAlignment = 1024;  // of panels
  static constexpr int kTiles = Shape::kQueryStages + 2 * Shape::kStages + 1;
  static constexpr size_t kBytes = kAlignment + kTiles * Shape::kTileBytes;

  unsigned char* queries;
  unsigned char* keys;
  unsigned char* values;
  unsigned char* output;
  HopperCommon<kDim>& common;

  __device__ HopperShared(unsigned char* aligned, HopperCommon<kDim>& of_block)
      : queries(aligned),
        keys(queries + Shape::kQueryStages * Shape::kTileBytes),
        values(keys + Shape::kStages * Shape::kTileBytes),
        output(values + Shape::kStages * Shape::kTileBytes),
        common(of_block) {}
};

// A place in a ring, and the parity of the phase that it is in.
template <int kPlaces>
struct PlaceOf {
  int place = 0;
  unsigned parity = 0;

  __device__ void Advance() {
    if (++place < kPlaces) return;
    place = 0;
    parity ^= 1;
  }
};

// How tensors are copied: in boxes by one thread, with the maps, or row by row by the first group.
struct HopperCopying {
  TensorMap q;
  TensorMap k;
  TensorMap v;
  InChunks in_chunks;
};

// ---- Which task is next ----

// The tasks of a grid that has fewer blocks than there are. A block takes pairs of a head's tasks, a
// long one and a short one, whose keys are about as many in all pairs; the blocks are at the same head
// at the same time, so that its keys and values are read from L2. A pair is found by additions: one
// division of 64 bits takes a thread about as long as the tensor cores take for a quarter of a step.
class HopperTasks {
 public:
  __device__ explicit HopperTasks(const FlashArguments& a) : a_(a) {
    of_head_ = static_cast<int>(a.schedule.query_tiles) * a.splits;
    in_pairs_ = FlashTasks(a) > gridDim.x;
    units_of_head_ = in_pairs_ ? (of_head_ + 1) / 2 : of_head_;
    if (of_head_ == 0) return;
    next_ = At(blockIdx.x);
    stride_ = At(gridDim.x);
    group_ = static_cast<int>(a.query_heads / a.kv_heads);
  }
  // Finds the block's next task. Returns false after the last.
  __device__ bool Next(FlashTask* task) {
    if (of_head_ == 0) return false;
    if (second_ >= 0) {
      Describe(second_, task);
      second_ = -1;
      Advance();
      return true;
    }
    if (next_.batch >= a_.batch) return false;
    Describe(next_.unit, task);
    if (in_pairs_ && of_head_ - 1 - next_.unit > next_.unit) {
      second_ = of_head_ - 1 - next_.unit;
    } else {
      Advance();
    }
    return true;
  }

 private:
  // A pair, or a task, of a head.
  struct Place {
    int batch;
    int head;
    int unit;
  };
  __device__ Place At(unsigned n) const {
    const int64_t head = n / units_of_head_, heads = a_.query_heads;
    return {static_cast<int>(head / heads), static_cast<int>(head % heads),
            static_cast<int>(n % units_of_head_)};
  }
  __device__ void Advance() {
    next_.unit += stride_.unit;
    next_.head += stride_.head;
    next_.batch += stride_.batch;
    if (next_.unit >= units_of_head_) {
      next_.unit -= units_of_head_;
      ++next_.head;
    }
    if (next_.head >= a_.query_heads) {
      next_.head -= static_cast<int>(a_.query_heads);
      ++next_.batch;
    }
  }
  // Describes the n-th task of the head, the longest first.
  __device__ void Describe(int n, FlashTask* task) const {
    const int rank = a_.splits == 1 ? n : n / a_.splits;
    const int tiles = static_cast<int>(a_.schedule.query_tiles);
    task->split = n - rank * a_.splits;
    task->head = next_.head;
    task->batch = next_.batch;
    task->kv_head = group_ == 1 ? next_.head : next_.head / group_;
    // In bands, later queries see more keys or as many.
    task->query_tile = tiles - 1 - rank;
    if (a_.schedule.order == nullptr) return;
    const int pattern = PatternOf(a_.schedule, next_.head);
    task->query_tile = a_.schedule.order[int64_t{pattern} * tiles + rank];
  }

  const FlashArguments& a_;
  int of_head_;  // tasks
  int units_of_head_;
  int group_;
  Place next_;
  Place stride_;     // from one of the block's pairs to the next
  int second_ = -1;  // of a pair of which the first is done
  bool in_pairs_;
};

// Returns the row of the call that query r of a block is; beyond the last query, that of the last.
__device__ inline int64_t RowOfCall(const FlashArguments& a, const HopperTask& task, int r) {
  return QueryRow(a, task.task.batch, min(task.first_query + r, task.queries - 1));
}

// ---- The first group ----

template <class T, int kDim, bool kInBoxes>
class HopperCopies {
 public:
  using Shape = HopperShape<kDim>;
  using Common = HopperCommon<kDim>;

  __device__ HopperCopies(const FlashArguments& a, const HopperCopying& copying,
                          const HopperShared<kDim>& shared)
      : a_(a), copying_(copying), shared_(shared), common_(shared.common) {}

  // Does all tasks of the block. Of boxes, the first warp starts the copies, and the second looks at
  // values; of rows, all threads do both.
  __device__ void Run() {
    if (kInBoxes && Warp() == 1) RunChecks();
    if (kInBoxes && Warp() > 0) return;
    HopperTasks tasks(a_);
    for (;; queries_.Advance(), tasks_.Advance()) {
      HopperTask& task = common_.tasks[tasks_.place];
      WalkState walk;
      FindTask(tasks, walk, task);
      CopyQueries(task);
      if (task.steps < 0) return;
      const int steps = task.steps;
      if (steps == 0) continue;
      // Keys of a step before values of the last, whose memory is in use for longer.
      Step step = NextStep(walk);
      CopyKeys(task, step);
#pragma unroll 1
      for (int n = 1; n < steps; ++n) {
        const Step next = NextStep(walk);
        CopyKeys(task, next);
        CopyValues(task, step);
        step = next;
      }
      CopyValues(task, step);
    }
  }

 private:
  static constexpr int kTogether = 4;  // a named barrier
  static constexpr int kChunks = kDim / 8;
  struct Step {
    KeyTile tiles[2];     // without a second one, that lies behind the last key
    unsigned char flags;  // of HopperFlags
  };

  // Waits for the threads that copy.
  __device__ void Together() const {
    if (kInBoxes) {
      __syncwarp();
    } else {
      NamedSync(kTogether, kWarpGroup);
    }
  }

  // Finds the next task with queries, in all threads that copy.
  __device__ void FindTask(HopperTasks& tasks, WalkState& walk, HopperTask& to) const {
    HopperTask found = {};
    found.steps = -1;
    while (tasks.Next(&found.task)) {
      const FlashTask& task = found.task;
      found.first_query = static_cast<int>(task.query_tile) * kQueries;
      found.queries = static_cast<int>(QueriesOf(a_, task.batch));
      if (found.first_query >= found.queries) continue;
      found.query_order =
          a_.query_order.tokens == nullptr ? nullptr : a_.query_order.Of(task.batch, task.head);
      walk.Begin(a_, task, kQueries);
      found.steps = (walk.left + 1) / 2;
      break;
    }
    Wait(&common_.queries_empty[queries_.place], queries_.parity ^ 1);
    if (threadIdx.x == 0) to = found;
    Together();
  }

  __device__ void CopyQueries(const HopperTask& task) {
    uint64_t* full = &common_.queries_full[queries_.place];
    unsigned char* queries = shared_.queries + queries_.place * Shape::kTileBytes;
    if (task.steps < 0) {
      if (threadIdx.x == 0) Arrive(full);
      return;
    }
    if (!kInBoxes) {
      const int64_t offset = task.task.batch * a_.q.strides[0] + task.task.head * a_.q.strides[1];
      const auto token_of = [&](int r) {
        if (task.first_query + r >= task.queries) return int64_t{-1};
        const int64_t row = RowOfCall(a_, task, r);
        return task.query_order == nullptr ? row : int64_t{task.query_order[row]};
      };
      CopyRows(queries, a_.q, offset, a_.head_dim, copying_.in_chunks.q, token_of);
      Together();
      if (threadIdx.x == 0) Arrive(full);
      return;
    }
    if (threadIdx.x > 0) return;
    ArriveAndExpect(full, Shape::kTileBytes);
#pragma unroll
    for (int p = 0; p < Shape::kPanels; ++p) {
      CopyBox(queries + p * Shape::kPanelBytes, copying_.q, p * 64, task.first_query,
              static_cast<int>(task.task.head), static_cast<int>(task.task.batch), full);
    }
  }

  __device__ void CopyKeys(const HopperTask& task, const Step& step) {
    Wait(&common_.keys_empty[keys_.place], keys_.parity ^ 1);
    if (threadIdx.x == 0) common_.flags[words_.place] = step.flags;
    if ((step.flags & kHides) != 0) FindVisible(task, step, common_.visible[words_.place]);
    Copy(copying_.k, a_.k, a_.head_dim, copying_.in_chunks.k,
         shared_.keys + keys_.place * Shape::kTileBytes, task, step,
         &common_.keys_full[keys_.place]);
    keys_.Advance();
    words_.Advance();
  }
  __device__ void CopyValues(const HopperTask& task, const Step& step) {
    const int stage = values_.place;
    Wait(&common_.values_empty[stage], values_.parity ^ 1);
    if (threadIdx.x == 0) common_.not_finite[stage] = 0;
    Copy(copying_.v, a_.v, a_.value_dim, copying_.in_chunks.v,
         shared_.values + stage * Shape::kTileBytes, task, step, &common_.values_full[stage]);
    if (!kInBoxes) {
      if ((step.flags & kChecks) != 0) CheckValues(stage, threadIdx.x, kWarpGroup);
      Together();
      if (threadIdx.x == 0) Arrive(&common_.values_checked[stage]);
    }
    values_.Advance();
  }
  __device__ Step NextStep(WalkState& walk) const {
    Step step = {};
    bool full = true, tokens = true;
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      step.tiles[t].index = static_cast<int>((a_.kv_tokens + kKeys - 1) / kKeys);
      step.tiles[t].mask = TileRun::kFull;
      if (walk.Next(a_.schedule)) step.tiles[t] = walk.key_tile(a_.schedule);
      full = full && step.tiles[t].mask == TileRun::kFull;
      tokens = tokens && AllTokens(a_, step.tiles[t].index);
    }
    // Beyond the last key there are zeros.
    step.flags = (full && tokens ? 0 : kHides) | (full && a_.key_mask == nullptr ? 0 : kChecks);
    return step;
  }
  // Copies two tiles of keys or values, and says so.
  __device__ void Copy(const TensorMap& map, const DeviceView& view, int channels, bool in_chunks,
                       unsigned char* to, const HopperTask& task, const Step& step,
                       uint64_t* full) {
    const FlashTask& of = task.task;
    if (!kInBoxes) {
      CopyRows(to, view, of.batch * view.strides[0] + of.kv_head * view.strides[1], channels,
               in_chunks, [&](int r) {
                 return r < kKeys ? KeyTokenOrNone(of, step.tiles[0].index, r)
                                  : KeyTokenOrNone(of, step.tiles[1].index, r - kKeys);
               });
      Together();
      if (threadIdx.x == 0) Arrive(full);
      return;
    }
    if (threadIdx.x > 0) return Arrive(full);
    ArriveAndExpect(full, Shape::kTileBytes);
#pragma unroll
    for (int t = 0; t < 2; ++t) {
#pragma unroll
      for (int p = 0; p < Shape::kPanels; ++p) {
        CopyBox(to + p * Shape::kPanelBytes + t * kKeys * Shape::kRowBytes, map, p * 64,
                step.tiles[t].index * kKeys, static_cast<int>(of.kv_head),
                static_cast<int>(of.batch), full);
      }
    }
  }

  // Returns the token of k and v that is key c of a tile, or -1 where there is none, or padding.
  __device__ int64_t KeyTokenOrNone(const FlashTask& task, int tile, int c) const {
    if (int64_t{tile} * kKeys + c >= a_.kv_tokens) return -1;
    const int64_t token = KeyToken(a_, task, tile, c);
    if (a_.key_mask == nullptr) return token;
    const int64_t of_mask = task.batch * a_.key_mask_strides[0] + token * a_.key_mask_strides[1];
    return a_.key_mask[of_mask] != 0 ? token : -1;
  }

  // Starts copies of 128 rows, or makes them; row r is that of token token_of(r), and zeros where
  // that is below 0 and beyond the last channel. They are visible to products after Together.
  template <class TokenOfRow>
  __device__ void CopyRows(unsigned char* to, const DeviceView& view, int64_t offset, int channels,
                           bool in_chunks, const TokenOfRow& token_of) const {
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
  }

  // ---- Which keys a query sees ----

  // Reads a tile's words before it writes one, since each comes from memory.
  __device__ void FindVisible(const HopperTask& task, const Step& step,
                              uint64_t (&visible)[2][kQueries]) const {
    constexpr int kThreads = kInBoxes ? kWarp : kWarpGroup, kOfThread = kQueries / kThreads;
#pragma unroll 1
    for (int t = 0; t < 2; ++t) {
      const KeyTile tile = t == 0 ? step.tiles[0] : step.tiles[1];
      uint64_t words[kOfThread];
#pragma unroll
      for (int n = 0; n < kOfThread; ++n) {
        const int r = n * kThreads + static_cast<int>(threadIdx.x);
        words[n] = MaskOf(a_.schedule, tile, RowOfCall(a_, task, r), r, kQueries);
      }
      const uint64_t tokens = Tokens(task.task, tile.index);
#pragma unroll
      for (int n = 0; n < kOfThread; ++n) {
        visible[t][n * kThreads + static_cast<int>(threadIdx.x)] = tokens & words[n];
      }
    }
  }
  // Returns which keys of a tile are tokens, in all lanes of a warp.
  __device__ uint64_t Tokens(const FlashTask& task, int tile) const {
    if (a_.key_mask == nullptr) return Bits(0, a_.kv_tokens - int64_t{tile} * kKeys);
    const unsigned low = __ballot_sync(~0u, KeyTokenOrNone(task, tile, Lane()) >= 0);
    const unsigned high = __ballot_sync(~0u, KeyTokenOrNone(task, tile, Lane() + 32) >= 0);
    return low | static_cast<uint64_t>(high) << 32;
  }

  // Looks at the values of all steps of which some may be hidden.
  __device__ void RunChecks() {
    for (;; queries_.Advance(), tasks_.Advance()) {
      Wait(&common_.queries_full[queries_.place], queries_.parity);
      const int steps = common_.tasks[tasks_.place].steps;
      if (steps < 0) return;
#pragma unroll 1
      for (int n = 0; n < steps; ++n) {
        const int stage = values_.place;
        Wait(&common_.values_full[stage], values_.parity);
        if ((common_.flags[words_.place] & kChecks) != 0) CheckValues(stage, Lane(), kWarp);
        Arrive(&common_.values_checked[stage]);
        __syncwarp();
        if (Lane() == 0) Arrive(&common_.values_empty[stage]);
        values_.Advance();
        words_.Advance();
      }
      __syncwarp();
      if (Lane() == 0) Arrive(&common_.queries_empty[queries_.place]);
    }
  }
  // Notes that a value of the stage is not finite: a hidden key's weight of 0 must not be multiplied
  // by it.
  __device__ void CheckValues(int stage, int thread, int threads) const {
    const unsigned char* values = shared_.values + stage * Shape::kTileBytes;
    unsigned found = 0;
#pragma unroll 4
    for (int at = thread * 16; at < Shape::kTileBytes; at += threads * 16) {
      const uint4 x = *reinterpret_cast<const uint4*>(values + at);
      found |= NonFinite<T>(x.x) | NonFinite<T>(x.y) | NonFinite<T>(x.z) | NonFinite<T>(x.w);
    }
    if (found != 0) atomicOr(&common_.not_finite[stage], 1);
  }

  const FlashArguments& a_;
  const HopperCopying& copying_;
  const HopperShared<kDim>& shared_;
  Common& common_;
  PlaceOf<Shape::kQueryStages> queries_;
  PlaceOf<Common::kTasks> tasks_;
  PlaceOf<Shape::kStages> keys_;
  PlaceOf<Shape::kStages> values_;
  PlaceOf<Common::kWords> words_;
};

// ---- The others ----

template <class T, int kDim>
class HopperProducts {
 public:
  using Shape = HopperShape<kDim>;
  using Common = HopperCommon<kDim>;

  __device__ HopperProducts(const FlashArguments& a, bool out_in_chunks,
                            const HopperShared<kDim>& shared)
      : a_(a),
        out_in_chunks_(out_in_chunks),
        shared_(shared),
        common_(shared.common),
        group_(__shfl_sync(~0u, static_cast<int>(threadIdx.x) / kWarpGroup - 1, 0)),
        factor_(a.scale * kLog2E) {}

  // Does all tasks of the block.
  __device__ void Run() {
    if (group_ == 1) NamedArrive(TurnOf(0), kBoth);
    for (;; queries_.Advance(), tasks_.Advance()) {
      Wait(&common_.queries_full[queries_.place], queries_.parity);
      const HopperTask& task = common_.tasks[tasks_.place];
      if (task.steps < 0) break;
      RunTask(task);
    }
    if (group_ == 0) NamedSync(TurnOf(0), kBoth);
  }

 private:
  static constexpr int kBoth = 2 * kWarpGroup;
  static constexpr int kAside = 3;               // a named barrier
  static constexpr int kKeyTiles = 16;           // of 8 columns of scores
  static constexpr int kOutputTiles = kDim / 8;  // of 8 columns of the output
  static constexpr int kChunks = kDim / 8;       // of 16 bytes of a row
  using Scores = float[kKeyTiles * 4];
  using Words = uint64_t[2][kQueries];

  __device__ static int TurnOf(int group) { return 1 + group; }  // a named barrier
  __device__ static int lane() { return static_cast<int>(threadIdx.x) % kWarp; }
  // The first of the 16 queries of the warp.
  __device__ int warp_row() const {
    return static_cast<int>(threadIdx.x) / kWarp * 16 - kWarpGroup / 2;
  }
  __device__ int RowOf(int half) const { return warp_row() + half * 8 + lane() / 4; }
  __device__ static int column() { return lane() % 4 * 2; }

  __device__ void RunTask(const HopperTask& task) {
    const int steps = task.steps;
#pragma unroll
    for (int n = 0; n < kOutputTiles * 4; ++n) output_[n] = 0;
    sum_[0] = sum_[1] = 0;
    maximum_[0] = maximum_[1] = -INFINITY;
    has_aside_ = false;
    if (steps > 0) {
      RunSteps(steps);
    } else {
      Release(&common_.queries_empty[queries_.place]);
    }
    Store(task);
  }

  __device__ void RunSteps(int steps) {
    Scores score;
    unsigned weight[kKeyTiles * 2];
    float rescale[2];
    Wait(&common_.keys_full[keys_.place], keys_.parity);
    StartScores(score);
    WaitForProducts<0>();
    Pin(score);
    ReleaseKeys(steps == 1);
    Exponentiate(score, rescale);
    Round(score, weight);
#pragma unroll 1
    for (int n = 1; n < steps; ++n) {
      Wait(&common_.keys_full[keys_.place], keys_.parity);
      LeaveStep();
      NamedSync(TurnOf(group_), kBoth);
      StartScores(score);
      Wait(&common_.values_full[values_.place], values_.parity);
      StartOutput(weight);
      NamedArrive(TurnOf(1 - group_), kBoth);
      WaitForProducts<1>();
      Pin(score);
      ReleaseKeys(n == steps - 1);
      Exponentiate(score, rescale);
      WaitForProducts<0>();
      Pin(output_);
      ReleaseValues();
      Rescale(rescale);
      Round(score, weight);
    }
    LeaveStep();
    Wait(&common_.values_full[values_.place], values_.parity);
    StartOutput(weight);
    WaitForProducts<0>();
    Pin(output_);
    ReleaseValues();
  }

  // Does with a step's words what is left to do once its scores are weights.
  __device__ void LeaveStep() {
    if ((common_.flags[words_.place] & kChecks) != 0) SetAside();
    words_.Advance();
  }

  // Tells that the warp needs the step's keys no more; after those of a task's last step, its queries
  // neither.
  __device__ void ReleaseKeys(bool is_last) {
    Release(&common_.keys_empty[keys_.place]);
    keys_.Advance();
    if (is_last) Release(&common_.queries_empty[queries_.place]);
  }
  __device__ void ReleaseValues() {
    Release(&common_.values_empty[values_.place]);
    values_.Advance();
  }
  // Tells that the warp needs a stage no more.
  __device__ static void Release(uint64_t* empty) {
    __syncwarp();
    if (lane() == 0) Arrive(empty);
  }

  // ---- Products ----

  __device__ void StartScores(Scores& score) {
    const uint64_t queries = DescribeMatrix(shared_.queries + queries_.place * Shape::kTileBytes +
                                            group_ * Shape::kGroupQueries * Shape::kRowBytes);
    const uint64_t keys = DescribeMatrix(shared_.keys + keys_.place * Shape::kTileBytes);
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
  __device__ void StartOutput(const unsigned (&weight)[kKeyTiles * 2]) {
    const uint64_t values =
        DescribeMatrix(shared_.values + values_.place * Shape::kTileBytes, Shape::kPanelBytes);
    Pin(output_);
    BeginProducts();
#pragma unroll
    for (int k = 0; k < Shape::kStepKeys / 16; ++k) {
      MultiplyTransposed<T>(output_, weight + k * 4, MatrixOn(values, k * 16 * Shape::kRowBytes));
    }
    EndProducts();
  }

  // ---- Softmax: see FlashMmaBlock::Shift ----

  __device__ void Hide(const Words& visible, Scores& score) const {
#pragma unroll
    for (int t = 0; t < 2; ++t) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint64_t word = visible[t][RowOf(half)] >> column();
        const unsigned low = static_cast<unsigned>(word);
        const unsigned high = static_cast<unsigned>(word >> 32);
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
  // Turns scores into weights, updates maxima and sums, and returns the factors of earlier outputs.
  __device__ void Exponentiate(Scores& score, float (&rescale)[2]) {
    if ((common_.flags[words_.place] & kHides) != 0) Hide(common_.visible[words_.place], score);
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
        float& x = score[n * 4 + half * 2];
        float& y = score[n * 4 + half * 2 + 1];
        x = Exp2(fmaf(x, factor_, -minus[half]));
        y = Exp2(fmaf(y, factor_, -minus[half]));
        sum_[half] += x + y;
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

  // ---- Values that are not finite ----

  // Puts zeros in the place of values that are not finite, and adds these to what is kept for the rows
  // that see them, in the output's memory: they stay infinite or NaN under any weight above 0.
  __device__ void SetAside() {
    const int stage = values_.place;
    Wait(&common_.values_full[stage], values_.parity);
    Wait(&common_.values_checked[stage], values_.parity);
    if (common_.not_finite[stage] == 0) return;
    unsigned char* values = shared_.values + stage * Shape::kTileBytes;
    const Words& visible = common_.visible[words_.place];
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
#pragma unroll 1
      for (int n = 0; n < kOutputTiles; ++n) {
        unsigned* kept = PairOfOutput(half, n);
        float sums[2] = {0, 0};
        if (has_aside_) {
          sums[0] = Half<T>(*kept, 0);
          sums[1] = Half<T>(*kept, 1);
        }
#pragma unroll 1
        for (int key = 0; key < Shape::kStepKeys; ++key) {
          if ((visible[key / kKeys][RowOf(half)] >> key % kKeys & 1) == 0) continue;
          const unsigned pair = *reinterpret_cast<const unsigned*>(
              values + PlaceInPanels<kDim>(key, n) + column() * 2);
          const unsigned not_finite = NonFinite<T>(pair);
          if ((not_finite & 0x8000u) != 0) sums[0] += Half<T>(pair, 0);
          if ((not_finite & 0x80000000u) != 0) sums[1] += Half<T>(pair, 1);
        }
        *kept = Pair<T>(sums[0], sums[1]);
      }
    }
    has_aside_ = true;
    NamedSync(kAside, kBoth);
#pragma unroll 1
    for (int at = (static_cast<int>(threadIdx.x) - kWarpGroup) * 4; at < Shape::kTileBytes;
         at += kBoth * 4) {
      unsigned* pair = reinterpret_cast<unsigned*>(values + at);
      const unsigned not_finite = NonFinite<T>(*pair);
      if ((not_finite & 0x8000u) != 0) *pair &= 0xffff0000u;
      if ((not_finite & 0x80000000u) != 0) *pair &= 0x0000ffffu;
    }
    FenceAsync();
    NamedSync(kAside, kBoth);
  }

  // ---- Results ----

  // Returns the place of the lane's pair of columns of tile n, of one of its two rows.
  __device__ unsigned* PairOfOutput(int half, int n) const {
    const int row = RowOf(half);
    return reinterpret_cast<unsigned*>(shared_.output + row * kDim * 2 + (n ^ (row & 7)) * 16 +
                                       column() * 2);
  }

  __device__ void Store(const HopperTask& task) {
    if (has_aside_) {
#pragma unroll
      for (int n = 0; n < kOutputTiles * 2; ++n) {
        const unsigned kept = *PairOfOutput(n % 2, n / 2);
        output_[n * 2] += Half<T>(kept, 0);
        output_[n * 2 + 1] += Half<T>(kept, 1);
      }
    }
    float sum[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      sum[half] = SumOfFour(sum_[half]);
      if (lane() % 4 > 0 || !IsQuery(task, RowOf(half))) continue;
      const int64_t i = RowOfCall(a_, task, RowOf(half));
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
  // Stores the output through shared memory, from where whole rows are written in order, and then
  // what rounding took from it.
  __device__ void StoreInChunks(const HopperTask& task, const float (&sum)[2]) {
    const float inverse[2] = {sum[0] == 0 ? 0 : 1 / sum[0], sum[1] == 0 ? 0 : 1 / sum[1]};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int n = 0; n < kOutputTiles; ++n) {
        const float* x = output_ + n * 4 + half * 2;
        *PairOfOutput(half, n) = Pair<T>(x[0] * inverse[half], x[1] * inverse[half]);
      }
    }
    CopyRows(task, a_.out);
    if (a_.out_rest.data == nullptr) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int n = 0; n < kOutputTiles; ++n) {
        const float* x = output_ + n * 4 + half * 2;
        const unsigned rounded = *PairOfOutput(half, n);
        *PairOfOutput(half, n) = Pair<T>(fmaf(x[0], inverse[half], -Half<T>(rounded, 0)),
                                         fmaf(x[1], inverse[half], -Half<T>(rounded, 1)));
      }
    }
    CopyRows(task, a_.out_rest);
  }
  // Copies the warp's rows from shared memory.
  __device__ void CopyRows(const HopperTask& task, const DeviceView& view) const {
    __syncwarp();
    T* to = static_cast<T*>(view.data) + task.task.batch * view.strides[0] +
            task.task.head * view.strides[1];
#pragma unroll 1
    for (int n = lane(); n < 16 * kChunks; n += kWarp) {
      const int row = warp_row() + n / kChunks, chunk = n % kChunks;
      if (!IsQuery(task, row) || chunk * 8 >= a_.value_dim) continue;
      const int64_t i = RowOfCall(a_, task, row);
      *reinterpret_cast<uint4*>(to + OutRow(a_, i, QueryToken(task, i)) * view.strides[2] +
                                chunk * 8) =
          *reinterpret_cast<const uint4*>(shared_.output + row * kDim * 2 +
                                          (chunk ^ (row & 7)) * 16);
    }
    __syncwarp();
  }
  __device__ void StorePairs(const HopperTask& task, const float (&sum)[2]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (!IsQuery(task, RowOf(half))) continue;
      const int64_t i = RowOfCall(a_, task, RowOf(half));
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
  Common& common_;
  const int group_;
  const float factor_;  // exponent of 2 for a unit of products
  PlaceOf<Shape::kQueryStages> queries_;
  PlaceOf<Common::kTasks> tasks_;
  PlaceOf<Shape::kStages> keys_;
  PlaceOf<Shape::kStages> values_;
  PlaceOf<Common::kWords> words_;  // of the step whose weights are next or known
  float output_[kOutputTiles * 4];
  float maximum_[2];  // of products
  float sum_[2];      // over this lane's keys
  bool has_aside_ = false;
};

// ---- Launching ----

template <class T, int kDim, bool kInBoxes>
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
    // In boxes, whatever a lane of the first two warps writes for others it says itself.
    constexpr int kCopying = kInBoxes ? kWarp : 1;
    constexpr int kLooks = kInBoxes ? 1 : 0;  // warps that look at values
    for (int n = 0; n < HopperShape<kDim>::kQueryStages; ++n) {
      InitBarrier(&common.queries_full[n], 1);
      InitBarrier(&common.queries_empty[n], kWarps + kLooks);
    }
    for (int n = 0; n < HopperShape<kDim>::kStages; ++n) {
      InitBarrier(&common.keys_full[n], kCopying);
      InitBarrier(&common.keys_empty[n], kWarps);
      InitBarrier(&common.values_full[n], kCopying);
      InitBarrier(&common.values_empty[n], kWarps + kLooks);
      InitBarrier(&common.values_checked[n], kCopying);
    }
    FenceBarrierInit();
  }
  __syncthreads();
  if (threadIdx.x < kWarpGroup) {
    FewerRegisters<88>();
    HopperCopies<T, kDim, kInBoxes>(a, copying, shared).Run();
  } else {
    MoreRegisters<208>();
    HopperProducts<T, kDim>(a, copying.in_chunks.out, shared).Run();
  }
#endif
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
const char* LaunchHopper(const FlashArguments& a, void* stream) {
  const InChunks in_chunks = InChunksOf<T>(a);
  HopperCopying copying = {};
  copying.in_chunks = in_chunks;
  const bool in_boxes = a.key_order.tokens == nullptr && a.ring_tiles == 0 &&
                        a.query_order.tokens == nullptr && a.asked.rows == nullptr &&
                        Describe<T>(a.q, in_chunks.q, a.batch, a.query_heads, a.query_tokens,
                                    a.head_dim, kQueries, &copying.q) &&
                        Describe<T>(a.k, in_chunks.k, a.batch, a.kv_heads, a.kv_tokens, a.head_dim,
                                    kKeys, &copying.k) &&
                        Describe<T>(a.v, in_chunks.v, a.batch, a.kv_heads, a.kv_tokens, a.value_dim,
                                    kKeys, &copying.v);
  const int64_t most = a.multiprocessors < a.max_blocks ? a.multiprocessors : a.max_blocks;
  return Launch(
      "FlashHopper", in_boxes ? &FlashHopper<T, kDim, true> : &FlashHopper<T, kDim, false>,
      {BlocksInTurns(FlashTasks(a), most), HopperShape<kDim>::kThreads, HopperShared<kDim>::kBytes},
      stream, a, copying);
}

// Tells whether the device is a Hopper GPU and the program has code for sm_90a.
template <class T, int kDim>
bool HasHopper(const FlashArguments& a) {
  if (a.compute_capability != 90) return false;
#ifdef __CUDACC__
  // An empty body has no shared memory.
  static const bool has_code = [] {
    cudaFuncAttributes attributes;
    return cudaFuncGetAttributes(&attributes, &FlashHopper<T, kDim, true>) == cudaSuccess &&
           attributes.sharedSizeBytes > 0;
  }();
  return has_code;
#else
  return true;
#endif
}

// Launches the kernel of the call's shape that the device has. On Hopper GPUs all calls without a rule
// and with 33 to 128 channels go one way: strides, orders and masks change no bit of the result.
template <class T>
const char* LaunchFlash16(const FlashArguments& a, void* stream) {
  const int widest = a.head_dim > a.value_dim ? a.head_dim : a.value_dim;
  const bool plain = IsPlain(a) && (a.asked.rows == nullptr || a.packs_asked);
  if (plain && widest > 32 && widest <= 64 && HasHopper<T, 64>(a)) {
    return LaunchHopper<T, 64>(a, stream);
  }
  if (plain && widest > 64 && widest <= 128 && HasHopper<T, 128>(a)) {
    return LaunchHopper<T, 128>(a, stream);
  }
  return LaunchFlashMma<T>(a, stream);
}

}  // namespace
}  // namespace tfb

#endif  // TFB_CORE_FLASH_FLASH_HOPPER_CUH_
