// Engine flash on the CPU.
//
// Keys are packed once per key-value head into panels [head_dim][64 keys] and values into [64
// keys][value_dim rounded to 16], so that both products are one GEMM kernel whose B operand is, at
// head_dim 64, 16 KiB: half of a 32 KiB L1. The first task that wants a tile packs it, while the
// rows that it reads are about to be used; values that lie as the kernel wants them are used where
// they are. A task is one tile of 64 queries of one head. It gathers up to 8 key tiles, computes
// their scores side by side, runs one softmax pass over all of them, and adds the weighted values:
//
//   work of a chunk, D = Dv = 64:  64 x 512 scores x 128 multiply-adds = 4.2 M FMA
//   memory it reads:               512 keys x 128 channels x 4 B = 256 KiB, from L2 or L3: 16 FMA a
//   byte, far from any limit scores:                        64 x 528 x 4 B = 132 KiB, in L2
//
// so the time is that of the FMA units plus about 0.27 ns a score for the softmax (8 to 10 % of the
// total at D64). Tiles that are full take no mask; the others are cut to what their rows see.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <iterator>
#include <limits>
#include <memory>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "core/cpu/kernels.h"
#include "core/flash/flash.h"
#include "core/flash/flash_scores.h"
#include "core/flash/rows.h"
#include "core/status.h"
#include "core/workspace.h"

namespace tfb {
namespace {

constexpr int64_t kTile = kFlashTile;
// Packed keys and values that tasks share: few enough to stay in the last cache, and enough heads
// for the threads to run out of work together.
constexpr int64_t kPackedBytes = int64_t{4} << 20;
constexpr int64_t kTilesAtATime = 8;
constexpr int64_t kTasksPerThread = 16;
constexpr float kNegativeInfinity = -std::numeric_limits<float>::infinity();

// Sizes that packing, scratch and tasks share.
struct Layout {
  Layout(const Problem& p, bool relative_keys, bool is_packed) : has_positions(relative_keys) {
    key_depth = PackedKeyDepth(p.head_dim);
    value_row = PackedValueRow(p.value_dim);
    key_tiles = RoundUp(p.kv_tokens, kTile) / kTile;
    kv_heads = p.batch * p.kv_heads;
    const int64_t head_bytes =
        std::max<int64_t>(key_tiles * kTile * (key_depth + value_row) * sizeof(float), 1);
    packed_heads = is_packed ? std::max<int64_t>(kv_heads, 1)
                             : std::clamp<int64_t>(kPackedBytes / head_bytes, 1,
                                                   std::max<int64_t>(kv_heads, 1));
    owned_tiles = is_packed ? 0 : packed_heads * key_tiles;
  }
  FlashScores::Sizes scores() const { return {key_depth, has_positions}; }
  int64_t part_row() const { return value_row + 16; }  // output, maximum, sum, in whole cache lines

  int64_t key_depth;
  int64_t value_row;
  int64_t key_tiles;
  int64_t kv_heads;      // key-value heads of all batch rows
  int64_t packed_heads;  // heads that are packed at a time
  int64_t owned_tiles;   // tiles in the workspace: 0 where the caller packed them
  bool has_positions;
};

// The state of a tile's place in the workspace: one of the first two, or kPacked with flags.
enum Packing : uint8_t {
  kNotPacked = 0,
  kUnderWay = 1,
  kPacked = 2,
  kValuesInPlace = 4,  // the caller's values are used in place
  kFiniteValues = 8,
};
using PackingState = std::atomic<uint8_t>;
static_assert(sizeof(PackingState) == 1 && PackingState::is_always_lock_free);

// One tile of a head's keys and values in the kernels' layout.
struct PackedTile {
  const float* keys;    // [key_depth][64]
  const float* values;  // [64][value_row]
  int64_t value_row;    // floats
  bool finite;          // whether all values are finite
};

// The scratch memory of one thread for one task.
struct Scratch : FlashScores::Scratch {
  float* accumulator;  // [64][value_row]
  float* max;          // [64]
  float* sum;
  float* rescale;
};

struct Memory {
  float* keys;
  float* values;
  PackingState* packing;  // [owned_tiles]
  Scratch* scratch;       // [threads]
};

Memory LayOut(const Layout& layout, int threads, Workspace& workspace) {
  Memory memory;
  memory.keys = workspace.Take<float>(layout.owned_tiles * layout.key_depth * kTile);
  memory.values = workspace.Take<float>(layout.owned_tiles * layout.value_row * kTile);
  memory.packing = workspace.Take<PackingState>(layout.owned_tiles);
  memory.scratch = workspace.Take<Scratch>(threads);
  for (int t = 0; t < threads; ++t) {
    Scratch scratch;
    static_cast<FlashScores::Scratch&>(scratch) = FlashScores::LayOut(layout.scores(), workspace);
    scratch.accumulator = workspace.Take<float>(kTile * layout.value_row);
    scratch.max = workspace.Take<float>(kTile);
    scratch.sum = workspace.Take<float>(kTile);
    scratch.rescale = workspace.Take<float>(kTile);
    if (memory.scratch != nullptr) memory.scratch[t] = scratch;
  }
  return memory;
}

// The result of the parts of a softmax so far, for each row of a group of heads: [heads][query
// tokens] rows of the outputs not yet divided by their sum, the maximum and the sum.
struct PartRows {
  float* rows = nullptr;  // null: there is one part
  bool is_first = true;
  bool is_last = true;
};

// One call; it does not change while its tasks run.
class FlashRun : public FlashScores {
 public:
  using Scratch = tfb::Scratch;

  FlashRun(const Problem& problem, const FlashCall& call, const Layout& layout,
           const Memory& memory, const PartRows& parts)
      : FlashScores(problem, call, layout.scores()),
        layout_(layout),
        memory_(memory),
        parts_(parts) {
    const auto is_plain = [](const ConstTensorView& view) {
      return view.dtype == DType::kF32 && view.stride(3) == 1;
    };
    out_is_plain_ = call.out.dtype == DType::kF32 && call.out.stride(3) == 1;
    keys_are_plain_ = is_plain(call.k) && problem.head_dim == layout.key_depth;
    values_are_plain_ = is_plain(call.v) && problem.value_dim == layout.value_row;
  }

  // Forgets the packed tiles, before the tasks of other heads.
  void ForgetPacked() const {
    std::uninitialized_value_construct_n(memory_.packing, layout_.owned_tiles);
  }

  // Prefetches the rows that a task gathers; the hardware cannot predict them, since the task's own
  // order names them.
  void Prefetch(const Task& task) const {
    for (int64_t r = 0; call_.query_order.tokens != nullptr && r < task.rows; ++r) {
      PrefetchRow(call_.q, task.batch, task.head, QueryToken(task, r));
      if (parts_.rows != nullptr) {
        PrefetchBytes(PartRow(task, r), layout_.part_row() * sizeof(float));
      }
    }
    // Mostly, the keys that no task has packed yet are those in the queries' places.
    const int64_t tile = task.first_query / kTile;
    if (call_.key_order.tokens == nullptr || !call_.packed.empty() || tile >= layout_.key_tiles ||
        StateOf(task, tile).load(std::memory_order_relaxed) != kNotPacked) {
      return;
    }
    const int64_t first = tile * kTile, keys = std::min(kTile, problem_.kv_tokens - first);
    for (const ConstTensorView* view : {&call_.k, &call_.v}) {
      for (int64_t r = 0; r < keys; ++r) {
        const int64_t token = call_.key_order(task.batch, KvHead(task), first + r);
        PrefetchRow(*view, task.batch, KvHead(task), token);
      }
    }
  }

  void Attend(const Task& task, Scratch& scratch) const {
    if (task.rows == 0) return;
    LoadQueries(task, scratch);
    TokenSide queries;
    scratch.queries = &queries;
    LoadSide(task, &queries);
    std::fill_n(scratch.accumulator, task.rows * layout_.value_row, 0.0f);
    std::fill_n(scratch.max, task.rows, kNegativeInfinity);
    std::fill_n(scratch.sum, task.rows, 0.0f);

    Tile chunk[kChunkTiles];
    size_t tiles = 0;
    int64_t columns = 0;
    bool is_first = true;
    for (const TileRun& run : TileRuns(task)) {
      const uint64_t* mask = run.mask == TileRun::kFull ? nullptr : call_.schedule->Mask(run.mask);
      for (int64_t t = run.first_tile; t < run.first_tile + run.tiles; ++t) {
        if (!WithinSpan(task, t, scratch)) continue;
        const bool gap = tiles > 0 && chunk[tiles - 1].index + 1 != t;
        if (tiles == std::size(chunk) || (gap && reads_offsets_)) {
          Accumulate(task, {chunk, tiles}, is_first, scratch);
          tiles = 0;
          columns = 0;
          is_first = false;
        }
        Tile& tile = chunk[tiles];
        tile = MakeTile(task, t, mask, scratch.visible + tiles * kTile, scratch);
        if (tile.seen.end == 0) continue;
        tile.column = columns - tile.seen.begin;
        columns += tile.seen.end - tile.seen.begin;
        if (call_.packed.empty()) PackIfNobodyHas(task, t, scratch);
        ++tiles;
      }
    }
    if (tiles > 0) Accumulate(task, {chunk, tiles}, is_first, scratch);
    StoreResults(task, scratch);
    scratch.queries = nullptr;
  }

 private:
  absl::Span<const TileRun> TileRuns(const Task& task) const {
    return call_.schedule->Row(task.head, task.first_query / kTile);
  }

  // Packs key tile `tile` of the task's head, unless it is packed already or another task is
  // packing it. Uses the scores' memory.
  void PackIfNobodyHas(const Task& task, int64_t tile, Scratch& scratch) const {
    const int64_t place = task.slot * layout_.key_tiles + tile;
    PackingState& state = StateOf(task, tile);
    uint8_t expected = kNotPacked;
    if (state.load(std::memory_order_relaxed) != expected ||
        !state.compare_exchange_strong(expected, kUnderWay)) {
      return;
    }
    const bool in_place = AreNeighbours(task, tile);
    PackKeys(task, tile, in_place, memory_.keys + place * layout_.key_depth * kTile,
             scratch.scores);
    const bool values_in_place = in_place && values_are_plain_;
    float* values = memory_.values + place * layout_.value_row * kTile;
    const bool finite =
        values_in_place ? AllRowsFinite(task, tile) : PackValues(task, tile, values);
    state.store(static_cast<uint8_t>(kPacked | (values_in_place ? kValuesInPlace : 0) |
                                     (finite ? kFiniteValues : 0)),
                std::memory_order_release);
  }

  PackingState& StateOf(const Task& task, int64_t tile) const {
    return memory_.packing[task.slot * layout_.key_tiles + tile];
  }

  // Tells whether the tile is whole and its tokens follow each other in the tensors.
  bool AreNeighbours(const Task& task, int64_t tile) const {
    if ((tile + 1) * kTile > problem_.kv_tokens) return false;
    if (call_.key_order.tokens == nullptr) return true;
    const int64_t h = KvHead(task), first = call_.key_order(task.batch, h, tile * kTile);
    for (int64_t r = 1; r < kTile; ++r) {
      if (call_.key_order(task.batch, h, tile * kTile + r) != first + r) return false;
    }
    return true;
  }
  // Returns the rows of such a tile in place, or null where the tensor is not plain.
  const float* RowsInPlace(const ConstTensorView& view, const Task& task, int64_t tile) const {
    const int64_t h = KvHead(task);
    return view.At<float>(task.batch, h, call_.key_order(task.batch, h, tile * kTile));
  }

  // Packs keys to to[head_dim][64]; `rows` has room for 64 x key_depth floats. Columns without a
  // token may hold anything: their scores are masked.
  void PackKeys(const Task& task, int64_t tile, bool in_place, float* to, float* rows) const {
    if (in_place && keys_are_plain_) {
      kernels_.transpose64(RowsInPlace(call_.k, task, tile), call_.k.stride(2), layout_.key_depth,
                           to);
      return;
    }
    for (int64_t r = 0; r < kTile; ++r) {
      float* row = rows + r * layout_.key_depth;
      std::memset(row, 0, layout_.key_depth * sizeof(float));
      LoadTokenRow(call_.k, task, tile * kTile + r, problem_.head_dim, row);
    }
    kernels_.transpose64(rows, layout_.key_depth, layout_.key_depth, to);
  }

  // Packs values to to[64][value_row]. Returns whether all of them are finite.
  bool PackValues(const Task& task, int64_t tile, float* to) const {
    bool finite = true;
    for (int64_t r = 0; r < kTile; ++r) {
      float* row = to + r * layout_.value_row;
      std::memset(row, 0, layout_.value_row * sizeof(float));
      LoadTokenRow(call_.v, task, tile * kTile + r, problem_.value_dim, row);
      finite = finite && AllFinite(row, problem_.value_dim);
    }
    return finite;
  }
  bool AllRowsFinite(const Task& task, int64_t tile) const {
    const float* rows = RowsInPlace(call_.v, task, tile);
    bool finite = true;
    for (int64_t r = 0; r < kTile; ++r) {
      finite &= AllFinite(rows + r * call_.v.stride(2), problem_.value_dim);
    }
    return finite;
  }
  // Returns a packed tile; waits where another task is still packing it.
  PackedTile Packed(const Task& task, int64_t tile) const {
    if (!call_.packed.empty()) return CallersPacked(task, tile);
    const int64_t place = task.slot * layout_.key_tiles + tile;
    const PackingState& state = StateOf(task, tile);
    uint8_t packing;
    while ((packing = state.load(std::memory_order_acquire)) == kUnderWay) {
      std::this_thread::yield();
    }
    PackedTile packed{memory_.keys + place * layout_.key_depth * kTile,
                      memory_.values + place * layout_.value_row * kTile, layout_.value_row,
                      (packing & kFiniteValues) != 0};
    if ((packing & kValuesInPlace) != 0) {
      packed.values = RowsInPlace(call_.v, task, tile);
      packed.value_row = call_.v.stride(2);
    }
    return packed;
  }
  PackedTile CallersPacked(const Task& task, int64_t tile) const {
    const PackedKeysAndValues& packed = call_.packed;
    const int64_t in_ring = packed.first_tile + tile;
    const int64_t place =
        task.slot * packed.tiles + (in_ring < packed.tiles ? in_ring : in_ring - packed.tiles);
    return {packed.keys + place * layout_.key_depth * kTile,
            packed.values + place * layout_.value_row * kTile, layout_.value_row,
            packed.finite[place] != 0};
  }
  int64_t OutRow(const Task& task, int64_t r) const {
    return call_.out_by_row ? task.first_query + task.Place(r) : QueryToken(task, r);
  }

  // Adds the keys of a chunk of tiles to the running softmax and output.
  void Accumulate(const Task& task, Tiles chunk, bool is_first, Scratch& scratch) const {
    const auto keys_of = [&](int64_t tile) { return Packed(task, tile).keys; };
    ComputeScores(task, chunk, keys_of, scratch);
    if (AllWhole(chunk)) {
      Softmax(task, chunk[0], 0, task.rows, WholeExtent(chunk), scratch);
    } else {
      for (int64_t first = 0; first < task.rows; first += kGroupRows) {
        const int64_t rows = std::min(kGroupRows, task.rows - first);
        Softmax(task, chunk[0], first, rows, ExtentOf(chunk, first / kGroupRows), scratch);
      }
    }

    if (!is_first && std::any_of(scratch.rescale, scratch.rescale + task.rows,
                                 [](float factor) { return factor != 1; })) {
      kernels_.scale_rows({scratch.accumulator, layout_.value_row, task.rows, layout_.value_row},
                          scratch.rescale);
    }
    for (const Tile& tile : chunk) {
      const float* weights = scratch.scores + tile.column;
      const PackedTile packed = Packed(task, tile.index);
      if (!packed.finite && !tile.whole) {
        AddVisibleValues(task, weights, packed, tile.visible, scratch);
        continue;
      }
      ForEachPart(task, tile, [&](int64_t first, int64_t rows, const Extent& extent) {
        kernels_.gemm(rows, layout_.value_row, extent.end - extent.begin,
                      weights + first * kScoreRow + extent.begin, kScoreRow, 1,
                      packed.values + extent.begin * packed.value_row, packed.value_row,
                      scratch.accumulator + first * layout_.value_row, layout_.value_row, true);
      });
    }
  }

  // Turns the scores of some rows into softmax numerators, over the chunk's columns of `extent`.
  void Softmax(const Task& task, const Tile& first_tile, int64_t first, int64_t rows,
               const Extent& extent, Scratch& scratch) const {
    if (extent.end == extent.begin) {
      std::fill_n(scratch.rescale + first, rows, 1.0f);
      return;
    }
    const ScoreRows scores{scratch.scores + first * kScoreRow + extent.begin, kScoreRow, rows,
                           extent.end - extent.begin};
    const SoftmaxState state{scratch.max + first, scratch.sum + first, scratch.rescale + first};
    if (call_.rule.soft_span.span == nullptr) {
      kernels_.softmax(scores, state, nullptr);
      return;
    }
    float distance[kTile];
    const int64_t column = first_tile.index * kTile + extent.begin;
    for (int64_t r = 0; r < rows; ++r) distance[r] = DistanceOf(task, first + r, column);
    const Ramp ramp{scratch.span + first, distance, call_.rule.soft_span.ramp};
    kernels_.softmax(scores, state, &ramp);
  }

  // Adds the product with values some of which are not finite: a hidden key's weight of 0 must not
  // be multiplied by its NaN. The order of additions is gemm's, so that visible keys give the same
  // bits.
  void AddVisibleValues(const Task& task, const float* weights, const PackedTile& packed,
                        const uint64_t* visible, Scratch& scratch) const {
    for (int64_t r = 0; r < task.rows; ++r) {
      float sum[kMaxHeadDim] = {};
      for (int64_t j = 0; j < kTile; ++j) {
        if ((visible[r] >> j & 1) == 0) continue;
        const float weight = weights[r * kScoreRow + j];
        const float* value = packed.values + j * packed.value_row;
        for (int64_t c = 0; c < problem_.value_dim; ++c) sum[c] += weight * value[c];
      }
      float* row = scratch.accumulator + r * layout_.value_row;
      for (int64_t c = 0; c < problem_.value_dim; ++c) row[c] += sum[c];
    }
  }

  // Returns the part's row of the token that is row r of the task.
  float* PartRow(const Task& task, int64_t r) const {
    const int64_t group = problem_.group();
    const int64_t head = task.slot * group + task.head % group;
    return parts_.rows + (head * problem_.query_tokens + QueryToken(task, r)) * layout_.part_row();
  }

  void StorePart(const Task& task, const Scratch& scratch) const {
    for (int64_t r = 0; r < task.rows; ++r) {
      float* row = PartRow(task, r);
      std::memcpy(row, scratch.accumulator + r * layout_.value_row,
                  layout_.value_row * sizeof(float));
      row[layout_.value_row] = scratch.max[r];
      row[layout_.value_row + 1] = scratch.sum[r];
    }
  }

  // Adds the result of the parts before this one for row r.
  void AddEarlierParts(const Task& task, int64_t r, Scratch& scratch) const {
    float* output = scratch.accumulator + r * layout_.value_row;
    const float* part = PartRow(task, r);
    const float max = part[layout_.value_row], sum = part[layout_.value_row + 1];
    if (sum == 0) return;  // they saw no key
    float own_factor = 1, factor = 1;
    if (scratch.sum[r] == 0) {
      own_factor = 0;
      scratch.max[r] = max;
    } else if (max > scratch.max[r]) {
      own_factor = std::exp(scratch.max[r] - max);
      scratch.max[r] = max;
    } else {
      factor = std::exp(max - scratch.max[r]);
    }
    for (int64_t c = 0; c < layout_.value_row; ++c) {
      output[c] = own_factor * output[c] + factor * part[c];
    }
    scratch.sum[r] = own_factor * scratch.sum[r] + factor * sum;
  }

  void StoreLogSumExp(const Task& task, int64_t row, float max, float sum) const {
    const float log_sum = std::log(sum);
    const float log_sum_exp = sum == 0 ? kNegativeInfinity : max + log_sum;
    *call_.log_sum_exp.MutableAt<float>(task.batch, task.head, row) = log_sum_exp;
    if (call_.log_sum_exp_rest.empty()) return;
    *call_.log_sum_exp_rest.MutableAt<float>(task.batch, task.head, row) =
        sum == 0 ? 0.0f : (max - log_sum_exp) + log_sum;
  }

  void StoreResults(const Task& task, Scratch& scratch) const {
    for (int64_t r = 0; !parts_.is_first && r < task.rows; ++r) AddEarlierParts(task, r, scratch);
    if (!parts_.is_last) return StorePart(task, scratch);
    for (int64_t r = 0; r < task.rows; ++r) {
      const float sum = scratch.sum[r];
      scratch.rescale[r] = sum == 0 ? 0 : 1 / sum;  // no key: the accumulator is 0 and stays 0
      if (!call_.log_sum_exp.empty()) {
        StoreLogSumExp(task, OutRow(task, r), scratch.max[r], sum);
      }
    }
    for (int64_t r = 0; r < task.rows; ++r) {
      const int64_t offset = call_.out.Offset(task.batch, task.head, OutRow(task, r));
      const float factor = scratch.rescale[r];
      float* row = scratch.accumulator + r * layout_.value_row;
      float* to = out_is_plain_ ? static_cast<float*>(call_.out.mutable_data()) + offset : row;
      for (int64_t c = 0; c < problem_.value_dim; ++c) to[c] = row[c] * factor;
      if (!out_is_plain_) {
        StoreRow(row, problem_.value_dim, call_.out, offset, call_.out.stride(3));
      }
      if (!call_.out_rest.empty()) StoreOutRest(task, OutRow(task, r), row);
    }
  }
  // Stores what rounding took from a row of the output, which is stored; overwrites the row.
  void StoreOutRest(const Task& task, int64_t out_row, float* row) const {
    const TensorView &out = call_.out, &rest = call_.out_rest;
    float rounded[kMaxHeadDim];
    LoadRow(out, out.Offset(task.batch, task.head, out_row), out.stride(3), problem_.value_dim,
            rounded);
    for (int64_t c = 0; c < problem_.value_dim; ++c) row[c] -= rounded[c];
    StoreRow(row, problem_.value_dim, rest, rest.Offset(task.batch, task.head, out_row),
             rest.stride(3));
  }

  const Layout& layout_;
  const Memory& memory_;
  const PartRows& parts_;
  // Rows are adjacent floats of the kernels' lengths. Where such rows follow each other, keys are
  // transposed directly from them and values are used in place.
  bool keys_are_plain_;
  bool values_are_plain_;
  bool out_is_plain_;
};

float* TakePartRows(size_t parts, const Problem& problem, int64_t kv_heads, int64_t row,
                    Workspace& workspace) {
  const int64_t heads = parts > 1 ? kv_heads * problem.group() : 0;
  return workspace.Take<float>(heads * problem.query_tokens * row);
}

absl::Status CheckSchedule(const Problem& problem, const BlockSchedule& schedule) {
  if (schedule.query_tile == kTile && schedule.key_tile == kTile &&
      schedule.query_tokens == problem.query_tokens && schedule.kv_tokens == problem.kv_tokens) {
    return absl::OkStatus();
  }
  return absl::InternalError(absl::StrCat("schedule of ", schedule.query_tokens, " x ",
                                          schedule.kv_tokens, " tokens does not fit the problem ",
                                          problem.ToString()));
}

// Runs the part's call for key-value heads first, first + 1, ..., counted over batches, whose
// packed keys and values fit the memory. A thread takes a few query tiles at a time, which mostly
// see the same keys.
void AttendHeads(const FlashPartCall& part, const PartRows& rows, int64_t first, int64_t heads,
                 absl::Span<std::byte> memory_of_part, ThreadPool* pool) {
  const Problem& problem = *part.problem;
  const FlashCall& call = *part.call;
  const Layout layout(problem, call.rule.relative_keys != nullptr, !call.packed.empty());
  Workspace workspace(memory_of_part);
  const Memory memory = LayOut(layout, pool->threads(), workspace);
  const FlashRun run(problem, call, layout, memory, rows);
  run.ForgetPacked();

  const BlockSchedule& schedule = *call.schedule;
  const int64_t query_tiles = schedule.query_tiles(), group = problem.group();
  const int64_t tiles = heads * group * query_tiles;
  const int64_t at_a_time =
      std::clamp<int64_t>(tiles / (kTasksPerThread * pool->threads()), 1, kTilesAtATime);
  const auto task_of = [&](int64_t n) {
    const int64_t slot = n / (group * query_tiles);
    const int64_t b = (first + slot) / problem.kv_heads;
    const int64_t h = (first + slot) % problem.kv_heads * group + n / query_tiles % group;
    const int64_t rank = h % schedule.heads * query_tiles + n % query_tiles;
    return run.MakeTask(b, h, schedule.order[rank], slot);
  };
  pool->ParallelFor((tiles + at_a_time - 1) / at_a_time, [&](int64_t task, int worker) {
    for (int64_t n = task * at_a_time; n < std::min(tiles, (task + 1) * at_a_time); ++n) {
      if (n + 1 < tiles) run.Prefetch(task_of(n + 1));
      run.Attend(task_of(n), memory.scratch[worker]);
    }
  });
}

}  // namespace

size_t FlashWorkspaceBytes(const Problem& problem, bool relative_keys, int threads) {
  return FlashWorkspaceBytesOfParts({&problem, 1}, relative_keys, threads);
}

size_t FlashWorkspaceBytesPacked(const Problem& problem, bool relative_keys, int threads) {
  const Layout layout(problem, relative_keys, /*is_packed=*/true);
  return Workspace::Measure([&](Workspace& workspace) { LayOut(layout, threads, workspace); });
}

size_t FlashWorkspaceBytesOfParts(absl::Span<const Problem> parts, bool relative_keys,
                                  int threads) {
  size_t bytes = 0;
  int64_t heads = std::numeric_limits<int64_t>::max(), row = 0;
  for (const Problem& problem : parts) {
    const Layout layout(problem, relative_keys, /*is_packed=*/false);
    bytes = std::max(bytes, Workspace::Measure(
                                [&](Workspace& workspace) { LayOut(layout, threads, workspace); }));
    heads = std::min(heads, layout.packed_heads);
    row = layout.part_row();
  }
  return bytes + Workspace::Measure([&](Workspace& workspace) {
           TakePartRows(parts.size(), parts[0], heads, row, workspace);
         });
}

absl::Status FlashCpu(const Problem& problem, const FlashCall& call, const Execution& execution) {
  const FlashPartCall whole{&problem, &call};
  return FlashCpu({&whole, 1}, execution);
}

absl::Status FlashCpu(absl::Span<const FlashPartCall> parts, const Execution& execution) {
  int64_t at_a_time = std::numeric_limits<int64_t>::max(), part_row = 0;
  for (const auto [problem, call] : parts) {
    TFB_RETURN_IF_ERROR(CheckSchedule(*problem, *call->schedule));
    if (call->rule.label_keys.keys != nullptr) TFB_RETURN_IF_ERROR(CheckIds(*call));
    TFB_RETURN_IF_ERROR(CheckTokenRule(call->rule.tokens));
    const Layout layout(*problem, call->rule.relative_keys != nullptr, !call->packed.empty());
    at_a_time = std::min(at_a_time, layout.packed_heads);
    part_row = layout.part_row();
  }
  // The next part takes up a part's result for a group of heads at once, while it is in the caches.
  const Problem& problem = *parts[0].problem;
  Workspace workspace(execution.workspace);
  PartRows rows;
  rows.rows = TakePartRows(parts.size(), problem, at_a_time, part_row, workspace);
  const int64_t kv_heads = problem.batch * problem.kv_heads;
  for (int64_t first = 0; first < kv_heads; first += at_a_time) {
    const int64_t heads = std::min(at_a_time, kv_heads - first);
    for (size_t n = 0; n < parts.size(); ++n) {
      rows.is_first = n == 0;
      rows.is_last = n + 1 == parts.size();
      AttendHeads(parts[n], rows, first, heads, workspace.Rest(), execution.pool);
    }
  }
  return absl::OkStatus();
}

}  // namespace tfb
