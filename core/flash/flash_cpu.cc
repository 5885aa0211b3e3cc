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
#include "core/flash/rows.h"
#include "core/status.h"
#include "core/workspace.h"

namespace tfb {
namespace {

constexpr int64_t kTile = kFlashTile;
constexpr int64_t kChunkTiles = 8;
constexpr int64_t kGroupRows = 16;
constexpr int64_t kScoreRow =
    kChunkTiles * kTile + 16;  // not a multiple of 4 KiB, so that rows differ in cache set
constexpr int64_t kPositionRow =
    (kChunkTiles + 2) * kTile + 16;  // offsets of a chunk in any alignment
// Packed keys and values that tasks share: few enough to stay in the last cache, and enough heads
// for the threads to run out of work together.
constexpr int64_t kPackedBytes = int64_t{4} << 20;
constexpr int64_t kTilesAtATime = 8;
constexpr int64_t kTasksPerThread = 16;
constexpr float kNegativeInfinity = -std::numeric_limits<float>::infinity();

int64_t FloorDiv(int64_t value, int64_t divisor) {
  return (value >= 0 ? value : value - divisor + 1) / divisor;
}

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

// The queries or keys of a tile, where the call has a token rule.
struct TokenSide {
  int32_t tokens[kTile];
  int32_t codes[kMaxTokenSlots][kTile];
};
static_assert(kTile == kPairColumns, "");

// The scratch memory of one thread for one task.
struct Scratch {
  float* content_query;      // [64][key_depth]
  float* position_query;     // [64][key_depth]
  float* scores;             // [64][kScoreRow]
  float* positions;          // [64][kPositionRow]
  float (*label_scores)[2];  // [64] against the label keys
  int32_t* query_ids;        // [64]
  TokenSide* queries;        // null where the call has no token rule
  float* accumulator;        // [64][value_row]
  float* max;                // [64]
  float* sum;
  float* rescale;
  float* limit;
  uint64_t* visible;  // [kChunkTiles][64]: the mask words of the tiles that are not whole
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
    scratch.content_query = workspace.Take<float>(kTile * layout.key_depth);
    scratch.position_query =
        layout.has_positions ? workspace.Take<float>(kTile * layout.key_depth) : nullptr;
    scratch.scores = workspace.Take<float>(kTile * kScoreRow);
    scratch.positions =
        layout.has_positions ? workspace.Take<float>(kTile * kPositionRow) : nullptr;
    scratch.label_scores = workspace.Take<float[2]>(kTile);
    scratch.query_ids = workspace.Take<int32_t>(kTile);
    scratch.accumulator = workspace.Take<float>(kTile * layout.value_row);
    scratch.max = workspace.Take<float>(kTile);
    scratch.sum = workspace.Take<float>(kTile);
    scratch.rescale = workspace.Take<float>(kTile);
    scratch.limit = workspace.Take<float>(kTile);
    scratch.visible = workspace.Take<uint64_t>(kChunkTiles * kTile);
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
class FlashRun {
 public:
  FlashRun(const Problem& problem, const FlashCall& call, const Layout& layout,
           const Memory& memory, const PartRows& parts)
      : problem_(problem),
        call_(call),
        layout_(layout),
        memory_(memory),
        parts_(parts),
        kernels_(BestCpuKernels()) {
    scale_ = static_cast<float>(ProductScale(problem, call.scale));
    const ScoreRule& rule = call.rule;
    reads_offsets_ = rule.relative_keys != nullptr || rule.relu_multiplier.values != nullptr ||
                     rule.bias.values != nullptr || rule.soft_span.span != nullptr;
    const auto is_plain = [](const ConstTensorView& view) {
      return view.dtype == DType::kF32 && view.stride(3) == 1;
    };
    queries_are_plain_ = is_plain(call.q);
    out_is_plain_ = call.out.dtype == DType::kF32 && call.out.stride(3) == 1;
    keys_are_plain_ = is_plain(call.k) && problem.head_dim == layout.key_depth;
    values_are_plain_ = is_plain(call.v) && problem.value_dim == layout.value_row;
  }

  // Forgets the packed tiles, before the tasks of other heads.
  void ForgetPacked() const {
    std::uninitialized_value_construct_n(memory_.packing, layout_.owned_tiles);
  }

  // One tile of queries of a head: row r is place Place(r) of the tile.
  struct Task {
    int64_t batch;
    int64_t head;
    int64_t first_query;
    int64_t rows;
    int64_t slot;  // where the keys and values of the head are packed
    // Whether the order names no token for a place before that of the last row.
    bool gaps;
    uint8_t places[kTile];  // the places of the rows, ascending; set where there are gaps

    int64_t Place(int64_t r) const { return gaps ? places[r] : r; }
  };
  Task MakeTask(int64_t b, int64_t h, int64_t query_tile, int64_t slot) const {
    Task task;
    task.batch = b;
    task.head = h;
    task.first_query = query_tile * kTile;
    task.rows = std::min(kTile, problem_.query_tokens - task.first_query);
    task.slot = slot;
    task.gaps = false;
    if (call_.query_order.tokens != nullptr) LeaveOut(&task);
    return task;
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
    if (call_.rule.tokens.hides() || call_.rule.tokens.adjusts()) {
      for (int64_t r = 0; r < task.rows; ++r) {
        queries.tokens[r] = static_cast<int32_t>(QueryToken(task, r));
      }
      LoadCodes(task, task.head, task.rows, call_.rule.tokens.query_codes,
                {0, call_.rule.tokens.slots}, &queries);
    }
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
  // Slots begin to end - 1 of the token rule.
  struct Slots {
    int64_t begin;
    int64_t end;
  };
  // A term to add to scores; no term where first is null.
  struct ScoreTerm {
    const float* first = nullptr;  // the term of row 0, column 0
    int64_t row = 0;               // distance from a row to the next

    const float* At(int64_t r, int64_t column) const {
      return first == nullptr ? nullptr : first + r * row + column;
    }
  };
  // Columns begin to end - 1 of a tile, in multiples of a vector.
  struct Extent {
    int64_t begin;
    int64_t end;  // 0: none
  };
  // A key tile and the keys of it that the task's queries see. Products of a tile that is not whole
  // are cut, for 16 rows at a time, to the columns that any of those rows sees: a triangle costs
  // 5/8 of a square, one column 1/4. A tile takes as many columns of the chunk's scores as any row
  // sees, so that a few keys of a tile do not cost a softmax over all 64; it takes all 64 where the
  // rule reads offsets.
  struct Tile {
    int64_t index;
    bool whole;               // every query sees every key
    const uint64_t* visible;  // [64] words, bit c for key c; set where the tile is not whole
    Extent seen;              // the columns that the chunk's scores contain
    // The column of key 0 in the chunk's scores, even where `seen` leaves key 0 out.
    int64_t column;
    Extent extents[kTile / kGroupRows];
    bool all_seen[kTile / kGroupRows];  // each of the rows sees all of `seen`
  };
  using Tiles = absl::Span<const Tile>;  // a chunk

  // Makes rows only for the places for which the order names tokens.
  void LeaveOut(Task* task) const {
    int64_t rows = 0;
    for (int64_t place = 0; place < task->rows; ++place) {
      if (call_.query_order(task->batch, task->head, task->first_query + place) < 0) continue;
      task->places[rows++] = static_cast<uint8_t>(place);
    }
    task->rows = rows;
    task->gaps = rows > 0 && task->places[rows - 1] != rows - 1;
  }

  absl::Span<const TileRun> TileRuns(const Task& task) const {
    return call_.schedule->Row(task.head, task.first_query / kTile);
  }
  int64_t KvHead(const Task& task) const { return task.head / problem_.group(); }

  static void PrefetchBytes(const void* begin, int64_t bytes) {
    constexpr int64_t kLine = 64;
    for (int64_t n = 0; n < bytes; n += kLine) {
      __builtin_prefetch(static_cast<const std::byte*>(begin) + n, 0, 2);
    }
  }
  static void PrefetchRow(const ConstTensorView& view, int64_t b, int64_t head, int64_t token) {
    const int64_t element = SizeOf(view.dtype), offset = view.Offset(b, head, token);
    PrefetchBytes(static_cast<const std::byte*>(view.data) + offset * element,
                  view.dim(3) * view.stride(3) * element);
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
  // Loads key j of the task's head as floats; does nothing where j is no token.
  void LoadTokenRow(const ConstTensorView& view, const Task& task, int64_t j, int64_t channels,
                    float* to) const {
    const int64_t h = KvHead(task);
    if (!IsToken(task.batch, h, j)) return;
    LoadRow(view, view.Offset(task.batch, h, call_.key_order(task.batch, h, j)), view.stride(3),
            channels, to);
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
  bool IsToken(int64_t b, int64_t kv_head, int64_t j) const {
    return j < problem_.kv_tokens &&
           (call_.key_mask.empty() ||
            *call_.key_mask.At<uint8_t>(b, call_.key_order(b, kv_head, j)) != 0);
  }
  int64_t OutRow(const Task& task, int64_t r) const {
    return call_.out_by_row ? task.first_query + task.Place(r) : QueryToken(task, r);
  }
  int64_t QueryToken(const Task& task, int64_t r) const {
    return call_.query_order(task.batch, task.head, task.first_query + task.Place(r));
  }

  // Loads query rows as float with the scale folded in, so that products with keys are scores.
  void LoadQueries(const Task& task, Scratch& scratch) const {
    const ScoreRule& rule = call_.rule;
    const auto load = [&](const float* bias, float* to) {
      const int64_t channels = problem_.head_dim;
      for (int64_t r = 0; r < task.rows; ++r) {
        const int64_t offset = call_.q.Offset(task.batch, task.head, QueryToken(task, r));
        float* row = to + r * layout_.key_depth;
        const float* query = row;
        if (queries_are_plain_) {
          query = static_cast<const float*>(call_.q.data) + offset;
        } else {
          LoadRow(call_.q, offset, call_.q.stride(3), channels, row);
        }
        if (bias != nullptr) {
          const float* of_head = bias + task.head * channels;
          for (int64_t c = 0; c < channels; ++c) row[c] = (query[c] + of_head[c]) * scale_;
        } else {
          for (int64_t c = 0; c < channels; ++c) row[c] = query[c] * scale_;
        }
        std::fill(row + channels, row + layout_.key_depth, 0.0f);
      }
    };
    load(rule.content_bias, scratch.content_query);
    if (rule.relative_keys != nullptr) load(rule.position_bias, scratch.position_query);
    if (rule.label_keys.keys != nullptr) {
      float* rows = scratch.scores;  // the scores' memory, which is free here
      load(rule.position_bias, rows);
      ScoreLabels(task, rows, scratch);
    }
    if (rule.soft_span.span == nullptr) return;
    for (int64_t r = 0; r < task.rows; ++r) scratch.limit[r] = RampLimit(task, r);
  }

  // Computes the scores of the queries in `rows` against the label keys. Each pair has one of them.
  void ScoreLabels(const Task& task, const float* rows, Scratch& scratch) const {
    const LabelKeys& labels = call_.rule.label_keys;
    const int64_t channels = problem_.head_dim;
    for (int64_t label = 0; label < 2; ++label) {
      const float* key = labels.keys + (task.head % labels.heads * 2 + label) * channels;
      kernels_.matrix_vector(task.rows, channels, rows, layout_.key_depth, key,
                             scratch.label_scores[0] + label, 2, false);
      if (labels.biases == nullptr) continue;
      const float bias = scale_ * labels.biases[task.head % labels.heads * 2 + label];
      for (int64_t r = 0; r < task.rows; ++r) scratch.label_scores[r][label] += bias;
    }
    for (int64_t r = 0; r < task.rows; ++r) {
      scratch.query_ids[r] = *call_.query_ids.At<int32_t>(task.batch, QueryToken(task, r));
    }
  }

  // Returns the soft span of row r as ramp + z - (i + causal_offset): the weight of key j is then
  // clip((limit + j) / ramp, 0, 1).
  float RampLimit(const Task& task, int64_t r) const {
    return call_.rule.soft_span.Limit(task.batch, task.head, task.first_query + task.Place(r),
                                      problem_.causal_offset());
  }

  // Tells whether any row of the task gives any key of tile t a weight above 0.
  bool WithinSpan(const Task& task, int64_t t, const Scratch& scratch) const {
    if (call_.rule.soft_span.span == nullptr) return true;
    const float widest = *std::max_element(scratch.limit, scratch.limit + task.rows);
    return widest + static_cast<float>(t * kTile + kTile - 1) > 0;
  }

  Tile MakeTile(const Task& task, int64_t index, const uint64_t* mask, uint64_t* visible,
                const Scratch& scratch) const {
    Tile tile{};
    tile.index = index;
    tile.visible = visible;
    const bool in_span = call_.rule.soft_span.span == nullptr ||
                         *std::min_element(scratch.limit, scratch.limit + task.rows) +
                                 static_cast<float>(index * kTile) >
                             0;
    const bool all_tokens = call_.key_mask.empty() && (index + 1) * kTile <= problem_.kv_tokens;
    tile.whole = mask == nullptr && in_span && all_tokens && !call_.rule.tokens.hides();
    if (tile.whole) {
      tile.seen = {0, kTile};
      for (Extent& extent : tile.extents) extent = {0, kTile};
      return tile;
    }
    const uint64_t tokens = all_tokens ? ~uint64_t{0} : TokensOf(task, index);
    for (int64_t r = 0; r < task.rows; ++r) {
      visible[r] = tokens & (mask == nullptr ? ~uint64_t{0} : mask[task.Place(r)]);
      if (!in_span) visible[r] &= WithinSpanOf(r, index, scratch);
    }
    if (call_.rule.tokens.hides() && !HidePairs(task, index, *scratch.queries, visible))
      return tile;
    uint64_t any_row = 0, all_rows[kTile / kGroupRows];
    for (int64_t g = 0; g * kGroupRows < task.rows; ++g) {
      uint64_t any = 0, all = ~uint64_t{0};
      const int64_t end = std::min(task.rows, (g + 1) * kGroupRows);
      for (int64_t r = g * kGroupRows; r < end; ++r) {
        any |= visible[r];
        all &= visible[r];
      }
      tile.extents[g] = ExtentOf(any);
      all_rows[g] = all;
      any_row |= any;
    }
    if (any_row == 0) return tile;
    tile.seen = reads_offsets_ ? Extent{0, kTile} : ExtentOf(any_row);
    const uint64_t seen = ~uint64_t{0} >> (kTile - tile.seen.end) & ~uint64_t{0} << tile.seen.begin;
    for (int64_t g = 0; g * kGroupRows < task.rows; ++g) {
      tile.all_seen[g] = (seen & ~all_rows[g]) == 0;
    }
    return tile;
  }

  // Loads the codes of the side's tokens in some slots.
  void LoadCodes(const Task& task, int64_t head, int64_t rows, const int32_t* codes, Slots slots,
                 TokenSide* side) const {
    const TokenRule& rule = call_.rule.tokens;
    for (int64_t n = slots.begin; n < slots.end; ++n) {
      const int64_t offset = rule.Codes(n, task.batch, head);
      for (int64_t r = 0; r < rows; ++r) side->codes[n][r] = codes[offset + side->tokens[r]];
    }
  }
  void LoadKeySide(const Task& task, int64_t tile, Slots slots, TokenSide* side) const {
    const int64_t first = tile * kTile, keys = std::min(kTile, problem_.kv_tokens - first);
    for (int64_t r = 0; r < keys; ++r) {
      side->tokens[r] = static_cast<int32_t>(call_.key_order(task.batch, KvHead(task), first + r));
    }
    LoadCodes(task, KvHead(task), keys, call_.rule.tokens.key_codes, slots, side);
    for (int64_t r = keys; r < kTile; ++r) {  // repeats the last code: these keys are hidden anyway
      side->tokens[r] = side->tokens[keys - 1];
      for (int64_t n = slots.begin; n < slots.end; ++n)
        side->codes[n][r] = side->codes[n][keys - 1];
    }
  }

  // Clears the bits of pairs that the token rule hides. Returns false where it hides all pairs,
  // which the ranges of sorted codes mostly show without a look at pairs.
  bool HidePairs(const Task& task, int64_t tile, const TokenSide& queries,
                 uint64_t* visible) const {
    const TokenRule& rule = call_.rule.tokens;
    const Slots own = rule.own < 0 ? Slots{0, 0} : Slots{rule.own, rule.own + 1};
    TokenSide keys;
    LoadKeySide(task, tile, own, &keys);
    if (rule.causal && *std::min_element(keys.tokens, keys.tokens + kTile) >
                           *std::max_element(queries.tokens, queries.tokens + task.rows)) {
      return false;
    }
    TokenPairs pairs = {queries.tokens, keys.tokens, nullptr, nullptr, 0};
    if (rule.own >= 0) {
      pairs.row_codes = queries.codes[rule.own];
      pairs.column_codes = keys.codes[rule.own];
      pairs.slots = 1;
      const auto [low, high] = std::minmax_element(pairs.row_codes, pairs.row_codes + task.rows);
      const auto [first, last] =
          std::minmax_element(pairs.column_codes, pairs.column_codes + kTile);
      if (*high < *first || *low > *last + 1) return false;
    }
    kernels_.hide_pairs(task.rows, pairs, rule.causal, visible);
    if (rule.mask.data != nullptr) HideMaskedPairs(task, queries, keys, visible);
    return true;
  }

  // Clears the bits of pairs that the token rule's mask hides.
  void HideMaskedPairs(const Task& task, const TokenSide& queries, const TokenSide& keys,
                       uint64_t* visible) const {
    const PairMask& mask = call_.rule.tokens.mask;
    for (int64_t r = 0; r < task.rows; ++r) {
      for (uint64_t rest = visible[r]; rest != 0; rest &= rest - 1) {
        const int c = __builtin_ctzll(rest);
        if (mask.Shows(task.batch, queries.tokens[r], keys.tokens[c])) continue;
        visible[r] &= ~(uint64_t{1} << c);
      }
    }
  }

  void AdjustPairs(const Task& task, const Tile& tile, Scratch& scratch) const {
    const TokenRule& rule = call_.rule.tokens;
    const Slots counted = {0, rule.counts ? rule.slots : 0};
    TokenSide keys;
    LoadKeySide(task, tile.index, counted, &keys);
    const TokenSide& queries = *scratch.queries;
    ForEachPart(task, tile, [&](int64_t row, int64_t rows, const Extent& extent) {
      const int64_t column = extent.begin;
      kernels_.adjust_pairs({scratch.scores + row * kScoreRow + tile.column + column, kScoreRow,
                             rows, extent.end - column},
                            {queries.tokens + row, keys.tokens + column, queries.codes[0] + row,
                             keys.codes[0] + column, counted.end},
                            rule.self_bias);
    });
  }

  static Extent ExtentOf(uint64_t keys) {
    if (keys == 0) return {0, 0};
    return {__builtin_ctzll(keys) / kColumnQuantum * kColumnQuantum,
            RoundUp(kTile - __builtin_clzll(keys), kColumnQuantum)};
  }

  // Returns the keys of a tile that row r gives a weight above 0: those from -limit on.
  uint64_t WithinSpanOf(int64_t r, int64_t tile, const Scratch& scratch) const {
    const float first = std::floor(-scratch.limit[r] - static_cast<float>(tile * kTile)) + 1;
    if (first <= 0) return ~uint64_t{0};
    return first >= static_cast<float>(kTile) ? 0 : ~uint64_t{0} << static_cast<int64_t>(first);
  }

  // Calls body(first_row, rows, extent) once for the whole tile, or for each group of rows that
  // sees any of it.
  template <class Body>
  void ForEachPart(const Task& task, const Tile& tile, const Body& body) const {
    if (tile.whole) return body(int64_t{0}, task.rows, Extent{0, kTile});
    for (int64_t first = 0; first < task.rows; first += kGroupRows) {
      const Extent& extent = tile.extents[first / kGroupRows];
      if (extent.end > extent.begin) {
        body(first, std::min(kGroupRows, task.rows - first), extent);
      }
    }
  }

  // Adds the keys of a chunk of tiles to the running softmax and output.
  void Accumulate(const Task& task, Tiles chunk, bool is_first, Scratch& scratch) const {
    ComputeScores(task, chunk, scratch);
    if (AllWhole(chunk)) {
      Softmax(chunk[0], 0, task.rows, WholeExtent(chunk), scratch);
    } else {
      for (int64_t first = 0; first < task.rows; first += kGroupRows) {
        const int64_t rows = std::min(kGroupRows, task.rows - first);
        Softmax(chunk[0], first, rows, ExtentOf(chunk, first / kGroupRows), scratch);
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

  static bool AllWhole(Tiles chunk) {
    return std::all_of(chunk.begin(), chunk.end(), [](const Tile& tile) { return tile.whole; });
  }
  // Returns the columns of a chunk whose tiles are whole; others have fewer.
  static Extent WholeExtent(Tiles chunk) { return {0, static_cast<int64_t>(chunk.size()) * kTile}; }
  // Returns the extent from the first column of the chunk that the group sees to the last.
  static Extent ExtentOf(Tiles chunk, int64_t group) {
    Extent all{};
    for (const Tile& tile : chunk) {
      const Extent& extent = tile.extents[group];
      if (extent.end == extent.begin) continue;
      if (all.end == all.begin) all.begin = tile.column + extent.begin;
      all.end = tile.column + extent.end;
    }
    return all;
  }

  // Turns the scores of some rows into softmax numerators, over the chunk's columns of `extent`.
  void Softmax(const Tile& first_tile, int64_t first, int64_t rows, const Extent& extent,
               Scratch& scratch) const {
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
    float limit[kTile];
    for (int64_t r = 0; r < rows; ++r) {
      limit[r] =
          scratch.limit[first + r] + static_cast<float>(first_tile.index * kTile + extent.begin);
    }
    const Ramp ramp{limit, 1 / call_.rule.soft_span.ramp};
    kernels_.softmax(scores, state, &ramp);
  }

  void ComputeScores(const Task& task, Tiles chunk, Scratch& scratch) const {
    const ScoreRule& rule = call_.rule;
    const ScoreRows scores{scratch.scores, kScoreRow, task.rows, WholeExtent(chunk).end};
    // Place 0 of the tile at column 0 has the offset `first`; one place further down it is one
    // less.
    const int64_t first = chunk[0].index * kTile - task.first_query - rule.query_position;
    const bool whole = AllWhole(chunk);
    // One term that depends on the distance is added where the products are still in registers.
    ScoreTerm term;
    const bool adds_positions = rule.relative_keys != nullptr && (!whole || task.gaps);
    const bool adds_bias =
        rule.bias.values != nullptr &&
        (rule.relative_keys != nullptr || rule.relu_multiplier.values != nullptr || task.gaps);
    if (rule.relative_keys != nullptr && !adds_positions) {
      term = PositionScores(task, 0, task.rows, WholeExtent(chunk), first, scratch);
    } else if (rule.bias.values != nullptr && !adds_bias) {
      term = {rule.bias.Of(task.head) + first, -1};
    }
    for (const Tile& tile : chunk) {
      const float* keys = Packed(task, tile.index).keys;
      ForEachPart(task, tile, [&](int64_t row, int64_t rows, const Extent& extent) {
        const int64_t column = tile.column + extent.begin;
        kernels_.gemm_plus(rows, extent.end - extent.begin, layout_.key_depth,
                           scratch.content_query + row * layout_.key_depth, layout_.key_depth, 1,
                           keys + extent.begin, kTile, term.At(row, column), term.row,
                           scratch.scores + row * kScoreRow + column, kScoreRow);
      });
    }
    if (adds_positions) AddPositions(task, chunk, first, scratch);
    if (rule.label_keys.keys != nullptr) {
      for (const Tile& tile : chunk) AddLabels(task, tile, scratch);
    }
    if (rule.relu_multiplier.values != nullptr) {
      ApplyTable(task, scores, rule.relu_multiplier.Of(task.head) + first, kernels_.relu_multiply);
    }
    if (adds_bias) ApplyTable(task, scores, rule.bias.Of(task.head) + first, kernels_.add);
    if (call_.rule.tokens.adjusts()) {
      for (const Tile& tile : chunk) AdjustPairs(task, tile, scratch);
    }
    // Hiding comes last, since it also overwrites the columns outside the extents, which hold
    // anything so far.
    for (const Tile& tile : chunk) {
      if (!tile.whole) Hide(task, tile, scratch);
    }
  }

  // Hides keys where not all rows see every column that the tile has in the chunk's scores.
  void Hide(const Task& task, const Tile& tile, Scratch& scratch) const {
    const auto [begin, end] = tile.seen;
    for (int64_t first = 0; first < task.rows; first += kGroupRows) {
      if (tile.all_seen[first / kGroupRows]) continue;
      kernels_.mask({scratch.scores + first * kScoreRow + tile.column + begin, kScoreRow,
                     std::min(kGroupRows, task.rows - first), end - begin},
                    tile.visible + first, begin);
    }
  }

  void AddLabels(const Task& task, const Tile& tile, Scratch& scratch) const {
    int32_t key_ids[kTile] = {};  // keys that do not exist may have any id
    const int64_t first = tile.index * kTile;
    for (int64_t c = 0; c < std::min(kTile, problem_.kv_tokens - first); ++c) {
      const int64_t token = call_.key_order(task.batch, KvHead(task), first + c);
      key_ids[c] = *call_.key_ids.At<int32_t>(task.batch, token);
    }
    ForEachPart(task, tile, [&](int64_t row, int64_t rows, const Extent& extent) {
      const int64_t column = extent.begin;
      kernels_.add_by_label({scratch.scores + row * kScoreRow + tile.column + column, kScoreRow,
                             rows, extent.end - column},
                            scratch.query_ids + row, key_ids + column, scratch.label_scores + row);
    });
  }

  // Calls a kernel that reads a table along offsets; `first` is the entry of place 0, column 0.
  template <class Kernel>
  void ApplyTable(const Task& task, const ScoreRows& scores, const float* first,
                  Kernel kernel) const {
    if (!task.gaps) return kernel(scores, first, -1);
    for (int64_t r = 0; r < task.rows; ++r) {
      kernel({scores.scores + r * scores.stride, scores.stride, 1, scores.columns},
             first - task.Place(r), 0);
    }
  }

  // Adds scores against the relative keys to rows that see different columns, 16 of them at a time.
  void AddPositions(const Task& task, Tiles chunk, int64_t first, Scratch& scratch) const {
    for (int64_t row = 0; row < task.rows; row += kGroupRows) {
      const int64_t rows = std::min(kGroupRows, task.rows - row);
      const Extent extent = ExtentOf(chunk, row / kGroupRows);
      if (extent.end == extent.begin) continue;
      const ScoreTerm positions = PositionScores(task, row, rows, extent, first, scratch);
      if (positions.first == nullptr) continue;
      const int64_t columns = extent.end - extent.begin;
      float* scores = scratch.scores + row * kScoreRow + extent.begin;
      if (!task.gaps) {
        kernels_.add({scores, kScoreRow, rows, columns}, positions.first, positions.row);
        continue;
      }
      for (int64_t r = 0; r < rows; ++r) {
        const int64_t earlier = task.Place(row + r) - task.Place(row);
        kernels_.add({scores + r * kScoreRow, kScoreRow, 1, columns},
                     positions.first + r * kPositionRow - earlier, 0);
      }
    }
  }
  // Returns the scores against the relative keys of some rows, from column extent.begin on; place 0
  // has the offset `first_of_tile` at column 0. The result is valid until the next call.
  ScoreTerm PositionScores(const Task& task, int64_t row, int64_t rows, const Extent& extent,
                           int64_t first_of_tile, Scratch& scratch) const {
    const RelativeKeys& keys = *call_.rule.relative_keys;
    const int64_t first = first_of_tile - task.Place(row);
    const int64_t lowest = first_of_tile + extent.begin - task.Place(row + rows - 1);
    const int64_t highest = first + extent.end - 1;
    if (highest < keys.low() || lowest > keys.high()) return {};  // zeros
    constexpr int64_t kBlock = RelativeKeys::kBlock, kOfPanel = kTile / kBlock;
    const int64_t first_block = FloorDiv(lowest, kBlock);
    const int64_t end_block = FloorDiv(highest, kBlock) + 1;
    for (int64_t block = first_block, end; block < end_block; block = end) {
      const int64_t p = FloorDiv(block, kOfPanel);
      const float* panel = keys.Panel(task.head, p);
      float* columns = scratch.positions + (block - first_block) * kBlock;
      end = block + 1;
      if (panel == nullptr || (block > first_block && keys.Repeats(task.head, block))) {
        for (int64_t r = 0; r < rows; ++r, columns += kPositionRow) {
          std::fill_n(columns, kBlock, panel == nullptr ? 0.0f : columns[-1]);
        }
        continue;
      }
      while (end < std::min(end_block, (p + 1) * kOfPanel) && !keys.Repeats(task.head, end)) ++end;
      kernels_.gemm(rows, (end - block) * kBlock, problem_.head_dim,
                    scratch.position_query + row * layout_.key_depth, layout_.key_depth, 1,
                    panel + (block - p * kOfPanel) * kBlock, kTile, columns, kPositionRow, false);
    }
    // The scores of each further place begin one column earlier.
    return {scratch.positions + (first + extent.begin - first_block * kBlock), kPositionRow - 1};
  }

  // Returns a word whose bit c says whether key c of the tile is a token: not padding, and not
  // beyond the sequence.
  uint64_t TokensOf(const Task& task, int64_t tile) const {
    const int64_t keys = std::min(kTile, problem_.kv_tokens - tile * kTile);
    const uint64_t exist = keys == kTile ? ~uint64_t{0} : (uint64_t{1} << keys) - 1;
    if (call_.key_mask.empty()) return exist;
    uint64_t tokens = 0;
    for (int64_t c = 0; c < keys; ++c) {
      tokens |= uint64_t{IsToken(task.batch, KvHead(task), tile * kTile + c)} << c;
    }
    return tokens;
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

  void StoreResults(const Task& task, Scratch& scratch) const {
    for (int64_t r = 0; !parts_.is_first && r < task.rows; ++r) AddEarlierParts(task, r, scratch);
    if (!parts_.is_last) return StorePart(task, scratch);
    for (int64_t r = 0; r < task.rows; ++r) {
      const float sum = scratch.sum[r];
      scratch.rescale[r] = sum == 0 ? 0 : 1 / sum;  // no key: the accumulator is 0 and stays 0
      if (!call_.log_sum_exp.empty()) {
        *call_.log_sum_exp.MutableAt<float>(task.batch, task.head, OutRow(task, r)) =
            sum == 0 ? kNegativeInfinity : scratch.max[r] + std::log(sum);
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
    }
  }

  const Problem& problem_;
  const FlashCall& call_;
  const Layout& layout_;
  const Memory& memory_;
  const PartRows& parts_;
  const CpuKernels& kernels_;
  float scale_;
  bool reads_offsets_;  // the rule reads tables along consecutive keys, so a gap must end a chunk
  // Rows are adjacent floats of the kernels' lengths. Where such rows follow each other, keys are
  // transposed directly from them and values are used in place.
  bool keys_are_plain_;
  bool values_are_plain_;
  bool queries_are_plain_;  // rows of q are adjacent floats
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
