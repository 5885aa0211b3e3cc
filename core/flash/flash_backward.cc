// Engine flash backward on the CPU.
//
// A task owns 256 keys of a key-value head: their packed transposes, for the scores and for g . v, the
// keys as rows, and the sums of dk and dv. Per tile of 64 queries it computes, at D = Dv = 64:
//
//   five products of 64 x 256 x 64:  5.2 M FMA
//   memory it needs:                 keys and values 3 x 64 KiB, dk and dv 2 x 64 KiB, scores and their
//                                    gradients 2 x 64 KiB: 450 KiB, in L2; q, g and dq of the tile 48 KiB
//
// dk and dv stay where they are, and dq streams by: 32 KiB of it are read and written per 5.2 M FMA.
#include "core/flash/flash_backward.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "core/flash/flash_scores.h"
#include "core/flash/rows.h"
#include "core/flash/turn.h"
#include "core/status.h"
#include "core/workspace.h"

namespace tfb {
namespace {

constexpr int64_t kTile = kFlashTile;
constexpr int64_t kChunkKeys = kChunkKeyTiles * kTile;

struct Layout {
  Layout(const Problem& p, bool relative_keys) : has_positions(relative_keys) {
    key_depth = PackedKeyDepth(p.head_dim);
    value_depth = PackedKeyDepth(p.value_dim);
    query_row = RoundUp(p.head_dim, kColumnQuantum);
    value_row = PackedValueRow(p.value_dim);
    query_tiles = RoundUp(p.query_tokens, kTile) / kTile;
    offsets = query_tiles * kTile + RoundUp(p.kv_tokens, kChunkKeys);
  }
  FlashScores::Sizes scores() const { return {query_row, has_positions}; }

  int64_t key_depth;
  int64_t value_depth;
  int64_t query_row;
  int64_t value_row;
  int64_t query_tiles;
  int64_t offsets;  // of any query and key, tiles being whole
  bool has_positions;
};

// The scratch memory of one thread for one task.
struct Scratch : FlashScores::Scratch {
  float* products;         // [64][kScoreRow], the scores before a ReLU
  float* plain_gradients;  // [64][kScoreRow]
  // The score gradients of a task: [64][gradient_row], plain or in `positions`.
  float* score_gradients;
  int64_t gradient_row;
  const float* output_gradients;  // 64 rows of value_row floats
  int64_t output_gradient_row;    // the distance from a row to the next
  float* copied_gradients;        // [64][value_row]
  float* label_query;             // [64][query_row]
  float* shift;                   // [64]
  float* factor;                  // [64]
  float* delta;                   // [64]
  float* span_gradient;           // [64]
  float (*label_sums)[2];         // [64]
  float* label_vectors;           // [2][query_row], the label keys, scaled
  float* q_gradient;              // [64][query_row]
  float* position_gradient;       // [64][query_row]: the part of q_gradient by relative keys
  // Of the chunk:
  float* keys;        // [4][key_depth][64]
  float* values;      // [4][value_depth][64]
  float* key_rows;    // [256][query_row], scaled
  float* k_gradient;  // [256][query_row]
  float* v_gradient;  // [256][value_row]
  // Sums by offset of a head's pairs, from the least offset that there is:
  float* bias;           // [offsets]
  float* multiplier;     // [offsets]
  float* relative_keys;  // [offsets][query_row]
  float* label_keys;     // [2][query_row]
  float* label_biases;   // [2]
  float* content_bias;   // [query_row]
  float* position_bias;  // [query_row]
  bool keys_finite[kChunkKeyTiles];
};

struct Memory {
  Turn* tile_turns;   // [batch][query_heads][query_tiles]: the chunks that have added to a tile
  Turn* head_turns;   // [query_heads]: the chunks of all batch rows that have added to the terms
  Turn* chunk_turns;  // [batch * kv_heads]: the chunks that have added to keys and values
  Scratch* scratch;   // [threads]
};

Memory LayOut(const Problem& p, const Layout& layout, int threads, Workspace& workspace) {
  Memory memory;
  memory.tile_turns = workspace.Take<Turn>(p.batch * p.query_heads * layout.query_tiles);
  memory.head_turns = workspace.Take<Turn>(p.query_heads);
  memory.chunk_turns = workspace.Take<Turn>(p.batch * p.kv_heads);
  memory.scratch = workspace.Take<Scratch>(threads);
  for (int t = 0; t < threads; ++t) {
    Scratch s{};
    static_cast<FlashScores::Scratch&>(s) = FlashScores::LayOut(layout.scores(), workspace);
    const auto take = [&](int64_t floats) { return workspace.Take<float>(floats); };
    s.products = take(kTile * FlashScores::kScoreRow);
    s.plain_gradients = take(kTile * FlashScores::kScoreRow);
    s.copied_gradients = take(kTile * layout.value_row);
    s.label_query = take(kTile * layout.query_row);
    s.shift = take(kTile);
    s.factor = take(kTile);
    s.delta = take(kTile);
    s.span_gradient = take(kTile);
    s.label_sums = workspace.Take<float[2]>(kTile);
    s.label_vectors = take(2 * layout.query_row);
    s.q_gradient = take(kTile * layout.query_row);
    s.position_gradient = take(layout.has_positions ? kTile * layout.query_row : 0);
    s.keys = take(kChunkKeys * layout.key_depth);
    s.values = take(kChunkKeys * layout.value_depth);
    s.key_rows = take(kChunkKeys * layout.query_row);
    s.k_gradient = take(kChunkKeys * layout.query_row);
    s.v_gradient = take(kChunkKeys * layout.value_row);
    s.bias = take(layout.offsets);
    s.multiplier = take(layout.offsets);
    s.relative_keys = take(layout.has_positions ? layout.offsets * layout.query_row : 0);
    s.label_keys = take(2 * layout.query_row);
    s.label_biases = take(2);
    s.content_bias = take(layout.query_row);
    s.position_bias = take(layout.query_row);
    if (memory.scratch != nullptr) memory.scratch[t] = s;
  }
  return memory;
}

// One call; it does not change while its tasks run.
class BackwardRun : public FlashScores {
 public:
  using Scratch = tfb::Scratch;

  BackwardRun(const Problem& problem, const FlashBackwardCall& call, const Layout& layout,
              const Memory& memory)
      : FlashScores(problem, *call.forward, layout.scores()),
        backward_(call),
        terms_(call.terms),
        layout_(layout),
        memory_(memory),
        has_labels_(call_.rule.label_keys.keys != nullptr),
        least_offset_(1 - layout.query_tiles * kTile - call_.rule.query_position) {
    const TensorView& q = call.q_gradient;
    wants_q_ = !q.empty();
    wants_terms_ = terms_.content_bias != nullptr || terms_.position_bias != nullptr ||
                   terms_.relative_keys != nullptr || terms_.label_keys != nullptr ||
                   terms_.label_biases != nullptr || terms_.relu_multiplier != nullptr ||
                   terms_.bias != nullptr;
    q_is_plain_ = problem.head_dim == layout.query_row && call_.query_order.tokens == nullptr &&
                  wants_q_ && q.stride(3) == 1;
    adds_in_place_ = q_is_plain_ && terms_.content_bias == nullptr && !sums_positions();
    const auto are_plain = [](const ConstTensorView& view, int64_t row) {
      return view.dtype == DType::kF32 && view.stride(3) == 1 && view.dim(3) == row;
    };
    gradients_are_plain_ = are_plain(call.out_gradient, layout.value_row) &&
                           (call_.out_by_row || call_.query_order.tokens == nullptr);
    keys_and_values_are_plain_ = call_.key_order.tokens == nullptr && call_.key_mask.empty() &&
                                 are_plain(call_.k, layout.query_row) &&
                                 are_plain(call_.v, layout.value_row);
  }

  int64_t tasks() const {
    return problem_.batch * backward_.schedule->chunks() * problem_.kv_heads;
  }

  // Runs task n. Neighbouring tasks are of other heads, so that threads seldom wait for each other.
  void Own(int64_t n, Scratch& scratch) const {
    Chunk chunk;
    chunk.head = n % problem_.kv_heads;
    chunk.index = n / problem_.kv_heads % backward_.schedule->chunks();
    chunk.batch = n / problem_.kv_heads / backward_.schedule->chunks();
    chunk.first_key = chunk.index * kChunkKeys;
    chunk.keys = std::min(kChunkKeys, problem_.kv_tokens - chunk.first_key);
    const int64_t group = problem_.group(), first_head = chunk.head * group;
    bool is_seen = false;
    for (int64_t h = first_head; h < first_head + group; ++h) {
      is_seen = is_seen || !backward_.schedule->Chunk(h, chunk.index).empty();
    }
    if (is_seen) Pack(chunk, scratch);
    if (is_seen || backward_.sets_k || backward_.sets_v) {
      std::fill_n(scratch.k_gradient, kChunkKeys * layout_.query_row, 0.0f);
      std::fill_n(scratch.v_gradient, kChunkKeys * layout_.value_row, 0.0f);
    }
    for (int64_t h = first_head; h < first_head + group; ++h) {
      const absl::Span<const QueryRun> runs = backward_.schedule->Chunk(h, chunk.index);
      const Offsets offsets = OffsetsOf(chunk, runs);
      ClearTerms(offsets, scratch);
      for (const QueryRun& run : runs) {
        for (int64_t t = run.first_tile; t < run.first_tile + run.tiles; ++t) {
          PrefetchQueries(chunk.batch, h, t + 1);
          Attend(chunk, run, MakeTask(chunk.batch, h, t, 0), scratch);
        }
      }
      if (wants_terms_) AddTerms(chunk, h, offsets, scratch);
    }
    AddKeysAndValues(chunk, is_seen, scratch);
  }

  // Sets the gradients of a tile of queries that no key saw to zero, where nothing else does.
  void SetUnseenToZero(int64_t n) const {
    if (!backward_.sets_q || memory_.tile_turns[n] != 0) return;
    const int64_t head = n / layout_.query_tiles;
    SetQueriesToZero(MakeTask(head / problem_.query_heads, head % problem_.query_heads,
                              n % layout_.query_tiles, 0));
  }

 private:
  // Keys that a task owns.
  struct Chunk {
    int64_t batch;
    int64_t head;  // of keys and values
    int64_t index;
    int64_t first_key;
    int64_t keys;
  };
  // The offsets j - i of a head's queries and a chunk's keys: low to high.
  struct Offsets {
    int64_t low;
    int64_t high;  // below low: none
    int64_t count() const { return std::max<int64_t>(high - low + 1, 0); }
  };

  Offsets OffsetsOf(const Chunk& chunk, absl::Span<const QueryRun> runs) const {
    if (runs.empty()) return {0, -1};
    const int64_t first = runs[0].first_tile, end = runs.back().first_tile + runs.back().tiles;
    const int64_t first_key = chunk.first_key - call_.rule.query_position;
    return {first_key - (end * kTile - 1), first_key + kChunkKeys - 1 - first * kTile};
  }
  // Returns those that have relative keys.
  Offsets OfKeys(const Offsets& offsets) const {
    const RelativeKeys& keys = *call_.rule.relative_keys;
    return {std::max(offsets.low, keys.low()), std::min(offsets.high, keys.high())};
  }
  bool sums_positions() const { return terms_.position_bias != nullptr && layout_.has_positions; }
  // Tells whether gradients of queries are also summed: du = sum_i of their part by keys, dw = sum_i of
  // that by relative keys.
  bool sums_queries() const { return terms_.content_bias != nullptr || sums_positions(); }

  // ---- Keys and values ----

  void Pack(const Chunk& chunk, Scratch& scratch) const {
    Task task{};  // of the chunk's batch row and key-value head
    task.batch = chunk.batch;
    task.head = chunk.head * problem_.group();
    for (int64_t t = 0; t < kChunkKeyTiles; ++t) {
      const int64_t first = chunk.first_key + t * kTile;
      float* rows = scratch.key_rows + t * kTile * layout_.query_row;
      float* keys = scratch.keys + t * kTile * layout_.key_depth;
      float* values = scratch.values + t * kTile * layout_.value_depth;
      if (keys_and_values_are_plain_ && first + kTile <= problem_.kv_tokens) {
        const float* from = call_.k.At<float>(chunk.batch, chunk.head, first);
        scratch.keys_finite[t] =
            kernels_.load_scaled({rows, layout_.query_row, kTile, layout_.query_row},
                                 {from, call_.k.stride(2)}, nullptr, scale_);
        kernels_.transpose64(from, call_.k.stride(2), layout_.key_depth, keys);
        kernels_.transpose64(call_.v.At<float>(chunk.batch, chunk.head, first), call_.v.stride(2),
                             layout_.value_depth, values);
        continue;
      }
      scratch.keys_finite[t] = LoadRows(task, call_.k, first, layout_.query_row, rows);
      kernels_.transpose64(rows, layout_.query_row, layout_.key_depth, keys);
      for (int64_t n = 0; n < kTile * layout_.query_row; ++n) rows[n] *= scale_;
      float* of_values = scratch.v_gradient;  // whose memory is free here
      LoadRows(task, call_.v, first, layout_.value_row, of_values);
      kernels_.transpose64(of_values, layout_.value_row, layout_.value_depth, values);
    }
  }
  // Prefetches the rows of a tile of queries that probably comes next.
  void PrefetchQueries(int64_t b, int64_t h, int64_t tile) const {
    if (call_.query_order.tokens != nullptr) return;
    const int64_t first = tile * kTile, rows = std::min(kTile, problem_.query_tokens - first);
    PrefetchRows(call_.q, b, h, first, rows);
    PrefetchRows(backward_.out_gradient, b, h, first, rows);
    PrefetchRows(backward_.q_gradient, b, h, first, rows);
  }
  // Loads 64 keys or values from key `first` on, zeros where there is no token. Returns whether all
  // are finite.
  bool LoadRows(const Task& task, const ConstTensorView& view, int64_t first, int64_t row,
                float* to) const {
    bool finite = true;
    std::fill_n(to, kTile * row, 0.0f);
    for (int64_t r = 0; r < kTile; ++r) {
      LoadTokenRow(view, task, first + r, view.dim(3), to + r * row);
      finite = finite && AllFinite(to + r * row, view.dim(3));
    }
    return finite;
  }

  void AddKeysAndValues(const Chunk& chunk, bool is_seen, const Scratch& scratch) const {
    // An order may name a token in several chunks, whose sums are added in the order of places.
    const bool in_turn = call_.key_order.tokens != nullptr;
    Turn& turn = memory_.chunk_turns[chunk.batch * problem_.kv_heads + chunk.head];
    if (in_turn) Await(turn, chunk.index);
    const auto give = [&](const float* rows, int64_t row, bool sets, const TensorView& to) {
      if (to.empty() || (!is_seen && !sets)) return;
      if (!in_turn && to.stride(3) == 1 && to.dim(3) == row) {
        const ScoreRows all{to.MutableAt<float>(chunk.batch, chunk.head, chunk.first_key),
                            to.stride(2), chunk.keys, row};
        if (!sets) return kernels_.add(all, rows, row);
        kernels_.load_scaled(all, {rows, row}, nullptr, 1);
        return;
      }
      for (int64_t n = 0; n < chunk.keys; ++n) {
        if (!sets && !IsToken(chunk.batch, chunk.head, chunk.first_key + n)) continue;
        const int64_t token = call_.key_order(chunk.batch, chunk.head, chunk.first_key + n);
        float* sum = to.MutableAt<float>(chunk.batch, chunk.head, token);
        if (sets) SetRowToZero(to.dim(3), to.stride(3), sum);
        AddRow(rows + n * row, to.dim(3), sum, to.stride(3));
      }
    };
    give(scratch.k_gradient, layout_.query_row, backward_.sets_k, backward_.k_gradient);
    give(scratch.v_gradient, layout_.value_row, backward_.sets_v, backward_.v_gradient);
    if (in_turn) Pass(turn, chunk.index);
  }

  // ---- Queries ----

  int64_t OutRow(const Task& task, int64_t r) const {
    return call_.out_by_row ? task.first_query + task.Place(r) : QueryToken(task, r);
  }

  static bool AllZero(const float* row, int64_t channels) {
    return std::all_of(row, row + channels, [](float value) { return value == 0; });
  }

  // Adds what the queries of a task and the chunk's keys give to all gradients.
  void Attend(const Chunk& chunk, const QueryRun& run, const Task& task, Scratch& scratch) const {
    const int64_t place = (chunk.batch * problem_.query_heads + task.head) * layout_.query_tiles +
                          task.first_query / kTile;
    Turn& turn = memory_.tile_turns[place];
    Tile tiles[kChunkKeyTiles];
    TokenSide side;
    scratch.queries = &side;
    if (task.rows > 0) {
      LoadQueries(task, scratch);
      LoadSide(task, &side);
    }
    const Tiles seen = task.rows == 0 ? Tiles() : SeenTiles(chunk, run, task, tiles, scratch);
    const bool sets_q = backward_.sets_q && run.rank == 0;
    if (seen.empty()) {
      Await(turn, run.rank);
      if (sets_q) SetQueriesToZero(task);
      return Pass(turn, run.rank);
    }
    LoadGradients(task, scratch);
    PlaceScoreGradients(task, scratch);
    const float* packed = scratch.keys;
    ComputeScores(
        task, seen,
        [&](int64_t tile) {
          return packed + (tile - chunk.index * kChunkKeyTiles) * kTile * layout_.key_depth;
        },
        scratch, scratch.products);
    WeightGradients(chunk, task, seen, scratch);
    ScoreGradientsOf(task, seen, scratch);
    AddValueGradients(chunk, task, seen, scratch);
    TermGradients(task, seen, scratch);
    if (!backward_.k_gradient.empty()) AddKeyGradients(chunk, task, seen, scratch);
    if (sums_queries() || (wants_q_ && !adds_in_place_)) {
      FormQueryGradients(chunk, task, seen, scratch);
    }
    Await(turn, run.rank);
    if (sets_q) SetQueriesToZero(task);
    if (adds_in_place_) {
      const TensorView& q = backward_.q_gradient;
      AddQueryGradients(chunk, task, seen, scratch,
                        q.MutableAt<float>(task.batch, task.head, task.first_query), q.stride(2));
    } else if (wants_q_) {
      TakeQueryGradients(task, scratch);
    }
    if (terms_.span != nullptr) AddSpanGradients(task, scratch);
    Pass(turn, run.rank);
    if (terms_.relative_keys == nullptr) return;
    if (!wants_q_ && !sums_queries()) AddRepeats(task, seen, scratch);
    AddRelativeKeys(task, seen, scratch);
  }

  // Score gradients against relative keys are also needed by offset. They are written such that
  // those of an offset lie below each other: a column of `positions`, which ComputeScores needs no
  // more. Rows that lie apart are copied there (Skew).
  void PlaceScoreGradients(const Task& task, Scratch& scratch) const {
    const bool by_offset = layout_.has_positions && !task.gaps;
    scratch.score_gradients =
        by_offset ? scratch.positions + FirstColumn(task, 0) : scratch.plain_gradients;
    scratch.gradient_row = by_offset ? kPositionRow - 1 : kScoreRow;
  }
  // Returns the column of `positions` of row r and column 0 of a chunk.
  static int64_t FirstColumn(const Task& task, int64_t r) { return kTile - 1 - task.Place(r); }

  // Returns the tiles from the first that the task sees to the last; those between that it does not
  // see have no extents.
  Tiles SeenTiles(const Chunk& chunk, const QueryRun& run, const Task& task, Tile* tiles,
                  const Scratch& scratch) const {
    int64_t first = -1, end = 0;
    for (int64_t n = 0; n < kChunkKeyTiles; ++n) {
      const int64_t index = chunk.index * kChunkKeyTiles + n;
      tiles[n] = {};
      tiles[n].index = index;
      const int32_t mask = run.masks[n];
      if (mask == QueryRun::kNotSeen || !WithinSpan(task, index, scratch)) continue;
      tiles[n] =
          MakeTile(task, index, mask == TileRun::kFull ? nullptr : call_.schedule->Mask(mask),
                   scratch.visible + n * kTile, scratch);
      if (tiles[n].seen.end == 0) continue;
      if (first < 0) first = n;
      end = n + 1;
    }
    if (first < 0) return {};
    for (int64_t n = first; n < end; ++n) tiles[n].column = (n - first) * kTile;
    return {tiles + first, static_cast<size_t>(end - first)};
  }

  void LoadGradients(const Task& task, Scratch& scratch) const {
    const int64_t row = layout_.value_row, channels = problem_.value_dim;
    const ConstTensorView& gradient = backward_.out_gradient;
    const bool is_plain = gradients_are_plain_ && !task.gaps;
    if (is_plain) {
      scratch.output_gradients = gradient.At<float>(task.batch, task.head, task.first_query);
      scratch.output_gradient_row = gradient.stride(2);
    } else {
      scratch.output_gradients = scratch.copied_gradients;
      scratch.output_gradient_row = row;
    }
    for (int64_t r = 0; r < task.rows; ++r) {
      const int64_t out = OutRow(task, r);
      if (!is_plain) {
        float* to = scratch.copied_gradients + r * row;
        LoadRow(gradient, gradient.Offset(task.batch, task.head, out), gradient.stride(3), channels,
                to);
        std::fill(to + channels, to + row, 0.0f);
      }
      scratch.shift[r] = *call_.log_sum_exp.At<float>(task.batch, task.head, out);
      if (!backward_.overwritten.empty() &&
          *backward_.overwritten.At<uint8_t>(task.batch, QueryToken(task, r)) != 0) {
        scratch.shift[r] = std::numeric_limits<float>::infinity();
      }
      scratch.factor[r] = 1;
      scratch.delta[r] = *backward_.delta.At<float>(task.batch, task.head, out);
      if (scratch.delta[r] == 0 &&
          AllZero(scratch.output_gradients + r * scratch.output_gradient_row, channels)) {
        Disregard(r, scratch);
      } else if (!call_.log_sum_exp_rest.empty()) {
        scratch.factor[r] =
            std::exp(-*call_.log_sum_exp_rest.At<float>(task.batch, task.head, out));
      }
    }
    if (call_.rule.soft_span.span != nullptr) std::fill_n(scratch.span_gradient, kTile, 0.0f);
  }

  // Makes a query whose g and D are 0 one that multiplies the zeros of its score gradients.
  void Disregard(int64_t r, const Scratch& scratch) const {
    std::fill_n(scratch.content_query + r * layout_.query_row, layout_.query_row, 0.0f);
    if (layout_.has_positions) {
      std::fill_n(scratch.position_query + r * layout_.query_row, layout_.query_row, 0.0f);
    }
    if (has_labels_) std::fill_n(scratch.label_scores[r], 2, 0.0f);
    scratch.shift[r] = std::numeric_limits<float>::infinity();
  }

  // Computes g . v, the gradients of the weights.
  void WeightGradients(const Chunk& chunk, const Task& task, Tiles tiles, Scratch& scratch) const {
    for (const Tile& tile : tiles) {
      const float* values = scratch.values + InChunk(chunk, tile) * layout_.value_depth;
      ForEachPart(task, tile, [&](int64_t row, int64_t rows, const Extent& extent) {
        kernels_.gemm(rows, extent.end - extent.begin, layout_.value_depth,
                      scratch.output_gradients + row * scratch.output_gradient_row,
                      scratch.output_gradient_row, 1, values + extent.begin, kTile,
                      GradientsAt(scratch, row, tile.column + extent.begin), scratch.gradient_row,
                      false);
      });
    }
  }
  static float* GradientsAt(const Scratch& scratch, int64_t row, int64_t column) {
    return scratch.score_gradients + row * scratch.gradient_row + column;
  }
  // Returns the tile's first key, counted from the chunk's.
  static int64_t InChunk(const Chunk& chunk, const Tile& tile) {
    return tile.index * kTile - chunk.first_key;
  }

  // Turns scores into weights, and the weights' gradients into the scores'.
  void ScoreGradientsOf(const Task& task, Tiles tiles, Scratch& scratch) const {
    if (AllWhole(tiles)) {
      return Differentiate(task, tiles[0], WholeExtent(tiles), scratch);
    }
    for (const Tile& tile : tiles) {
      if (tile.seen.end > 0) Differentiate(task, tile, tile.seen, scratch);
    }
  }
  void Differentiate(const Task& task, const Tile& tile, const Extent& columns,
                     Scratch& scratch) const {
    const int64_t column = tile.column + columns.begin;
    SoftmaxGradient softmax{
        scratch.shift, scratch.factor, scratch.delta,        tile.whole ? nullptr : tile.visible,
        columns.begin, nullptr,        scratch.span_gradient};
    float distance[kTile];
    const Ramp ramp{scratch.span, distance, call_.rule.soft_span.ramp};
    if (call_.rule.soft_span.span != nullptr) {
      const int64_t key = tile.index * kTile + columns.begin;
      for (int64_t r = 0; r < task.rows; ++r) distance[r] = DistanceOf(task, r, key);
      softmax.ramp = &ramp;
    }
    kernels_.softmax_backward(
        {scratch.scores + column, kScoreRow, task.rows, columns.end - columns.begin},
        GradientsAt(scratch, 0, column), scratch.gradient_row, softmax);
  }

  // Queries first to end - 1 of a task.
  struct Rows {
    int64_t begin;
    int64_t end;
    bool operator==(const Rows& other) const { return begin == other.begin && end == other.end; }
  };
  // Calls body(first key of the tile, keys, rows) for all keys of a whole tile, or for each 16 keys
  // that any row sees, with the rows from the first to the last that sees one of them.
  template <class Body>
  static void ForEachKeys(const Task& task, const Tile& tile, const Body& body) {
    if (tile.whole) return body(int64_t{0}, kTile, Rows{0, task.rows});
    for (int64_t first = tile.seen.begin; first < tile.seen.end; first += kGroupRows) {
      const uint64_t keys = uint64_t{0xFFFF} << first;
      Rows rows{0, task.rows};
      while (rows.begin < rows.end && (tile.visible[rows.begin] & keys) == 0) ++rows.begin;
      while (rows.begin < rows.end && (tile.visible[rows.end - 1] & keys) == 0) --rows.end;
      if (rows.begin < rows.end) body(first, kGroupRows, rows);
    }
  }
  // Calls body(r, key) for the pairs of a tile that count.
  template <class Body>
  static void ForEachPair(const Task& task, const Tile& tile, const Body& body) {
    for (int64_t r = 0; r < task.rows; ++r) {
      for (uint64_t rest = tile.visible[r]; rest != 0; rest &= rest - 1) {
        body(r, static_cast<int64_t>(__builtin_ctzll(rest)));
      }
    }
  }
  static void SetRowToZero(int64_t count, int64_t stride, float* row) {
    for (int64_t c = 0; c < count; ++c) row[c * stride] = 0;
  }
  static void AddScaled(float factor, const float* from, int64_t count, float* to) {
    for (int64_t c = 0; c < count; ++c) to[c] += factor * from[c];
  }
  static void AddRow(const float* from, int64_t count, float* to, int64_t stride) {
    if (stride == 1) return AddScaled(1, from, count, to);
    for (int64_t c = 0; c < count; ++c) to[c * stride] += from[c];
  }

  // Adds the product of the transposed pairs [keys][queries] with rows of the queries to sums of the
  // keys. Rows that are not finite must not meet the zeros of pairs that do not count.
  void AddTransposed(const Chunk& chunk, const Task& task, Tiles tiles, const float* pairs,
                     int64_t pair_row, const ConstRows& rows, int64_t row, bool all_finite,
                     float* sums) const {
    if (AllWhole(tiles)) {
      kernels_.gemm(WholeExtent(tiles).end, row, task.rows, pairs, 1, pair_row, rows.first,
                    rows.stride, sums + InChunk(chunk, tiles[0]) * row, row, true);
      return;
    }
    const bool finite = all_finite || kernels_.all_finite(rows, task.rows, row);
    for (const Tile& tile : tiles) {
      if (tile.seen.end == 0) continue;
      const float* of_tile = pairs + tile.column;
      float* to = sums + InChunk(chunk, tile) * row;
      if (!finite && !tile.whole) {
        ForEachPair(task, tile, [&](int64_t r, int64_t key) {
          AddScaled(of_tile[r * pair_row + key], rows.first + r * rows.stride, row, to + key * row);
        });
        continue;
      }
      ForEachKeys(task, tile, [&](int64_t first, int64_t keys, const Rows& seen) {
        kernels_.gemm(keys, row, seen.end - seen.begin, of_tile + seen.begin * pair_row + first, 1,
                      pair_row, rows.first + seen.begin * rows.stride, rows.stride,
                      to + first * row, row, true);
      });
    }
  }
  void AddValueGradients(const Chunk& chunk, const Task& task, Tiles tiles,
                         Scratch& scratch) const {
    if (backward_.v_gradient.empty()) return;
    AddTransposed(chunk, task, tiles, scratch.scores, kScoreRow,
                  {scratch.output_gradients, scratch.output_gradient_row}, layout_.value_row, false,
                  scratch.v_gradient);
  }
  void AddKeyGradients(const Chunk& chunk, const Task& task, Tiles tiles, Scratch& scratch) const {
    AddTransposed(chunk, task, tiles, scratch.score_gradients, scratch.gradient_row,
                  {scratch.content_query, layout_.query_row}, layout_.query_row,
                  scratch.queries_finite, scratch.k_gradient);
  }

  // Adds the product of the score gradients with the keys to rows that lie `stride` apart.
  void AddKeyProducts(const Chunk& chunk, const Task& task, Tiles tiles, const Scratch& scratch,
                      float* to, int64_t stride) const {
    const int64_t row = layout_.query_row;
    if (AllWhole(tiles)) {
      kernels_.gemm(task.rows, row, WholeExtent(tiles).end, scratch.score_gradients,
                    scratch.gradient_row, 1, scratch.key_rows + InChunk(chunk, tiles[0]) * row, row,
                    to, stride, true);
      return;
    }
    for (const Tile& tile : tiles) {
      const float* pairs = scratch.score_gradients + tile.column;
      const float* keys = scratch.key_rows + InChunk(chunk, tile) * row;
      if (tile.seen.end > 0 && !tile.whole && !scratch.keys_finite[InChunk(chunk, tile) / kTile]) {
        ForEachPair(task, tile, [&](int64_t r, int64_t key) {
          AddScaled(pairs[r * scratch.gradient_row + key], keys + key * row, row, to + r * stride);
        });
        continue;
      }
      ForEachPart(task, tile, [&](int64_t first, int64_t rows, const Extent& extent) {
        kernels_.gemm(rows, row, extent.end - extent.begin,
                      pairs + first * scratch.gradient_row + extent.begin, scratch.gradient_row, 1,
                      keys + extent.begin * row, row, to + first * stride, stride, true);
      });
    }
  }

  // Adds the queries' gradients of the chunk to rows that lie `stride` apart.
  void AddQueryGradients(const Chunk& chunk, const Task& task, Tiles tiles, Scratch& scratch,
                         float* to, int64_t stride) const {
    AddKeyProducts(chunk, task, tiles, scratch, to, stride);
    if (layout_.has_positions) {
      AddRepeats(task, tiles, scratch);
      AddPositionProducts(task, tiles, scratch, to, stride);
    }
    AddLabelProducts(task, scratch, to, stride);
  }
  void AddLabelProducts(const Task& task, const Scratch& scratch, float* to, int64_t stride) const {
    if (!has_labels_) return;
    kernels_.gemm(task.rows, layout_.query_row, 2, scratch.label_sums[0], 2, 1,
                  scratch.label_vectors, layout_.query_row, to, stride, true);
  }
  // The same, to scratch.q_gradient, and sums over the queries.
  void FormQueryGradients(const Chunk& chunk, const Task& task, Tiles tiles,
                          Scratch& scratch) const {
    const int64_t row = layout_.query_row;
    const ScoreRows all{scratch.q_gradient, row, task.rows, row};
    std::fill_n(scratch.q_gradient, task.rows * row, 0.0f);
    if (terms_.content_bias == nullptr && !sums_positions()) {
      return AddQueryGradients(chunk, task, tiles, scratch, scratch.q_gradient, row);
    }
    AddKeyProducts(chunk, task, tiles, scratch, scratch.q_gradient, row);
    if (terms_.content_bias != nullptr) kernels_.add_columns(all, scratch.content_bias);
    if (layout_.has_positions) {
      float* products = scratch.position_gradient;
      std::fill_n(products, task.rows * row, 0.0f);
      AddRepeats(task, tiles, scratch);
      AddPositionProducts(task, tiles, scratch, products, row);
      if (sums_positions()) {
        kernels_.add_columns({products, row, task.rows, row}, scratch.position_bias);
      }
      kernels_.add(all, products, row);
    }
    AddLabelProducts(task, scratch, scratch.q_gradient, row);
  }
  void SetQueriesToZero(const Task& task) const {
    const TensorView& q = backward_.q_gradient;
    if (q.empty()) return;
    for (int64_t r = 0; r < task.rows; ++r) {
      float* row = q.MutableAt<float>(task.batch, task.head, task.first_query + r);
      if (q.stride(3) == 1) {
        std::fill_n(row, q.dim(3), 0.0f);
      } else {
        SetRowToZero(q.dim(3), q.stride(3), row);
      }
    }
  }
  // Adds the computed gradients of a task where they belong.
  void TakeQueryGradients(const Task& task, const Scratch& scratch) const {
    const TensorView& q = backward_.q_gradient;
    if (q_is_plain_) {
      const int64_t row = layout_.query_row;
      return kernels_.add({q.MutableAt<float>(task.batch, task.head, task.first_query), q.stride(2),
                           task.rows, row},
                          scratch.q_gradient, row);
    }
    for (int64_t r = 0; r < task.rows; ++r) {
      AddRow(scratch.q_gradient + r * layout_.query_row, problem_.head_dim,
             q.MutableAt<float>(task.batch, task.head, OutRow(task, r)), q.stride(3));
    }
  }
  void AddSpanGradients(const Task& task, const Scratch& scratch) const {
    float* spans = terms_.span +
                   (task.batch * problem_.query_heads + task.head) * problem_.query_tokens +
                   task.first_query;
    for (int64_t r = 0; r < task.rows; ++r) spans[task.Place(r)] += scratch.span_gradient[r];
  }

  // ---- Terms of the score ----

  void ClearTerms(const Offsets& offsets, Scratch& scratch) const {
    const auto clear = [&](float* sums) {
      std::fill_n(sums + offsets.low - least_offset_, offsets.count(), 0.0f);
    };
    if (terms_.bias != nullptr) clear(scratch.bias);
    if (terms_.relu_multiplier != nullptr) clear(scratch.multiplier);
    if (terms_.relative_keys != nullptr) {
      const Offsets keys = OfKeys(offsets);
      std::fill_n(RelativeRow(keys.low, scratch), keys.count() * layout_.query_row, 0.0f);
    }
    std::fill_n(scratch.label_keys, 2 * layout_.query_row, 0.0f);
    std::fill_n(scratch.label_biases, 2, 0.0f);
    std::fill_n(scratch.content_bias, layout_.query_row, 0.0f);
    std::fill_n(scratch.position_bias, layout_.query_row, 0.0f);
  }
  // Returns the sum of an offset that has a relative key.
  float* RelativeRow(int64_t offset, const Scratch& scratch) const {
    return scratch.relative_keys + (offset - least_offset_) * layout_.query_row;
  }

  // Calls body(scores, first offset) for the columns of a chunk that hold scores: whole rows, or row
  // by row where places lie apart; the first offset is that of row 0, column 0.
  template <class Body>
  void ForEachOffsetRows(const Task& task, Tiles tiles, float* scores, int64_t row,
                         const Body& body) const {
    const auto visit = [&](const Tile& tile, const Extent& columns) {
      float* first = scores + tile.column + columns.begin;
      const int64_t count = columns.end - columns.begin;
      const int64_t offset =
          tile.index * kTile + columns.begin - task.first_query - call_.rule.query_position;
      if (!task.gaps) return body(ScoreRows{first, row, task.rows, count}, offset);
      for (int64_t r = 0; r < task.rows; ++r) {
        body(ScoreRows{first + r * row, row, 1, count}, offset - task.Place(r));
      }
    };
    if (AllWhole(tiles)) return visit(tiles[0], WholeExtent(tiles));
    for (const Tile& tile : tiles) {
      if (tile.seen.end > 0) visit(tile, tile.seen);
    }
  }
  void AddDiagonals(const Task& task, Tiles tiles, float* scores, int64_t row, float* sums) const {
    ForEachOffsetRows(task, tiles, scores, row, [&](const ScoreRows& rows, int64_t offset) {
      kernels_.add_diagonals(rows, sums + offset - (rows.rows - 1) - least_offset_);
    });
  }

  // Sums the gradients of the terms, and takes the scores' gradients through the ReLU.
  void TermGradients(const Task& task, Tiles tiles, Scratch& scratch) const {
    const ScoreRule& rule = call_.rule;
    const auto add_diagonals = [&](float* sums) {
      AddDiagonals(task, tiles, scratch.score_gradients, scratch.gradient_row, sums);
    };
    if (terms_.bias != nullptr) add_diagonals(scratch.bias);
    if (rule.relu_multiplier.values != nullptr) {
      ForEachOffsetRows(
          task, tiles, scratch.products, kScoreRow, [&](const ScoreRows& products, int64_t offset) {
            const int64_t at = products.scores - scratch.products;
            kernels_.relu_multiply_backward({GradientsAt(scratch, at / kScoreRow, at % kScoreRow),
                                             scratch.gradient_row, products.rows, products.columns},
                                            products.scores, kScoreRow,
                                            rule.relu_multiplier.Of(task.head) + offset, -1);
          });
      if (terms_.relu_multiplier != nullptr) {
        AddDiagonals(task, tiles, scratch.products, kScoreRow, scratch.multiplier);
      }
    }
    if (layout_.has_positions) Skew(task, tiles, scratch);
    if (has_labels_) SumLabels(task, tiles, scratch);
  }

  // Makes positions[r][u] the score gradient of row r at the offset FirstSkewed() + u, 0 where the
  // chunk has none.
  void Skew(const Task& task, Tiles tiles, Scratch& scratch) const {
    const int64_t columns = WholeExtent(tiles).end;
    for (int64_t r = 0; r < task.rows; ++r) {
      float* row = scratch.positions + r * kPositionRow;
      float* first = row + FirstColumn(task, r);
      std::fill(row, first, 0.0f);
      for (const Tile& tile : tiles) {
        float* to = first + tile.column;
        if (tile.seen.end == 0) {
          std::fill_n(to, kTile, 0.0f);
        } else if (task.gaps) {
          std::copy_n(GradientsAt(scratch, r, tile.column), kTile, to);
        }
      }
      std::fill(first + columns, row + columns + kTile, 0.0f);
    }
  }
  // Adds the score gradients of offsets that repeat a relative key to those of that key.
  void AddRepeats(const Task& task, Tiles tiles, Scratch& scratch) const {
    const int64_t first = FirstSkewed(task, tiles);
    ForEachStretch(SkewedKeys(task, tiles), [&](const Offsets& keys, int64_t last) {
      float* repeated = scratch.positions + (keys.high + 1 - first);
      for (int64_t r = 0; keys.high < last && r < task.rows; ++r, repeated += kPositionRow) {
        repeated[-1] += SumOf(repeated, last - keys.high);
      }
    });
  }
  // Sums the gradients of the relative keys: for the columns of `positions` at which the same groups
  // of rows have pairs at once.
  void AddRelativeKeys(const Task& task, Tiles tiles, Scratch& scratch) const {
    const int64_t first = FirstSkewed(task, tiles), row = layout_.query_row;
    const Groups groups(task, tiles);
    ForEachStretch(SkewedKeys(task, tiles), [&](const Offsets& keys, int64_t last) {
      const int64_t end = keys.high + 1 - first;
      // Returns the rows with pairs at up to 16 columns; the last column also has what later ones
      // repeat.
      const auto rows_at = [&](int64_t u) {
        const int64_t next = std::min(NextBlock(u), end);
        return groups.RowsAt(u, next == end ? last + 1 - first : next);
      };
      for (int64_t u = keys.low - first, next; u < end; u = next) {
        const Rows rows = rows_at(u);
        for (next = NextBlock(u); next < end && rows_at(next) == rows;) next = NextBlock(next);
        next = std::min(next, end);
        if (rows.begin >= rows.end) continue;
        kernels_.gemm(next - u, row, rows.end - rows.begin,
                      scratch.positions + rows.begin * kPositionRow + u, 1, kPositionRow,
                      scratch.position_query + rows.begin * row, row,
                      RelativeRow(first + u, scratch), row, true);
      }
    });
  }
  static int64_t NextBlock(int64_t u) { return u / kGroupRows * kGroupRows + kGroupRows; }

  // The columns of `positions` at which groups of 16 rows have pairs.
  class Groups {
   public:
    Groups(const Task& task, Tiles tiles) : rows_(task.rows) {
      for (int64_t r = 0; r < task.rows; r += kGroupRows) {
        const Extent extent =
            AllWhole(tiles) ? WholeExtent(tiles) : FlashScores::ExtentOf(tiles, r / kGroupRows);
        const int64_t last = std::min(r + kGroupRows, task.rows) - 1;
        Extent& columns = columns_[r / kGroupRows];
        if (extent.end == extent.begin) continue;
        columns = {FirstColumn(task, last) + extent.begin, FirstColumn(task, r) + extent.end};
      }
    }
    const Extent& Columns(int64_t group) const { return columns_[group]; }
    // Returns the rows of the groups from the first to the last that have pairs at columns u to
    // end - 1.
    Rows RowsAt(int64_t u, int64_t end) const {
      Rows rows{rows_, 0};
      for (int64_t r = 0; r < rows_; r += kGroupRows) {
        const Extent& columns = columns_[r / kGroupRows];
        if (columns.begin >= end || columns.end <= u) continue;
        rows = {std::min(rows.begin, r), std::min(r + kGroupRows, rows_)};
      }
      return rows;
    }

   private:
    const int64_t rows_;
    Extent columns_[kTile / kGroupRows] = {};
  };
  // Returns the sum, in lanes that the compiler makes a vector.
  static float SumOf(const float* from, int64_t count) {
    constexpr int64_t kLanes = RelativeKeyVectors::kBlock;
    float lanes[kLanes] = {};
    for (; count >= kLanes; count -= kLanes, from += kLanes) {
      for (int64_t n = 0; n < kLanes; ++n) lanes[n] += from[n];
    }
    for (int64_t n = 0; n < count; ++n) lanes[n] += from[n];
    return std::accumulate(lanes, lanes + kLanes, 0.0f);
  }
  // Calls body(keys, last) for stretches of offsets: `keys` and, to offset `last`, those that repeat
  // the last of them.
  template <class Body>
  void ForEachStretch(const Offsets& offsets, const Body& body) const {
    constexpr int64_t kBlock = RelativeKeyVectors::kBlock;
    const RelativeKeyVectors& vectors = *backward_.relative_keys;
    for (int64_t low = offsets.low; low <= offsets.high;) {
      int64_t block = RelativeKeyVectors::BlockOf(low) + 1;
      while (block * kBlock <= offsets.high && !vectors.Repeats(block)) ++block;
      const int64_t high = std::min(block * kBlock - 1, offsets.high);
      while (block * kBlock <= offsets.high && vectors.Repeats(block)) ++block;
      const int64_t last = std::min(block * kBlock - 1, offsets.high);
      body(Offsets{low, high}, last);
      low = last + 1;
    }
  }
  int64_t FirstSkewed(const Task& task, Tiles tiles) const {
    return tiles[0].index * kTile - task.first_query - call_.rule.query_position - (kTile - 1);
  }
  // Returns the offsets of the chunk's tiles that have relative keys.
  Offsets SkewedKeys(const Task& task, Tiles tiles) const {
    const int64_t first = FirstSkewed(task, tiles);
    return OfKeys({first, first + WholeExtent(tiles).end + kTile - 2});
  }
  // Adds the product of the score gradients with the relative keys to rows that lie `stride` apart,
  // a group of rows at a time.
  void AddPositionProducts(const Task& task, Tiles tiles, const Scratch& scratch, float* to,
                           int64_t stride) const {
    const int64_t row = layout_.query_row, first = FirstSkewed(task, tiles);
    const float* vectors = backward_.relative_keys->Of(task.head);
    const Groups groups(task, tiles);
    ForEachStretch(SkewedKeys(task, tiles), [&](const Offsets& keys, int64_t last) {
      const int64_t end = keys.high + 1 - first;
      for (int64_t u = keys.low - first, next; u < end; u = next) {
        next = std::min(u / kTile * kTile + kTile, end);  // relative keys that stay in L1
        // The last column also has what later ones repeat.
        const int64_t until = next == end ? last + 1 - first : next;
        for (int64_t r = 0; r < task.rows; r += kGroupRows) {
          const Extent& columns = groups.Columns(r / kGroupRows);
          if (columns.begin >= until || columns.end <= u) continue;
          const int64_t begin = std::min(std::max(columns.begin, u), next - 1);
          kernels_.gemm(std::min(kGroupRows, task.rows - r), row,
                        std::min(columns.end, next) - begin,
                        scratch.positions + r * kPositionRow + begin, kPositionRow, 1,
                        vectors + (begin + first - call_.rule.relative_keys->low()) * row, row,
                        to + r * stride, stride, true);
        }
      }
    });
  }

  void SumLabels(const Task& task, Tiles tiles, Scratch& scratch) const {
    const LabelKeys& labels = call_.rule.label_keys;
    std::fill_n(scratch.label_sums[0], 2 * kTile, 0.0f);
    for (const Tile& tile : tiles) {
      if (tile.seen.end == 0) continue;
      int32_t ids[kTile] = {};
      LoadKeyIds(task, tile.index, ids);
      kernels_.add_sums_by_label({GradientsAt(scratch, 0, tile.column + tile.seen.begin),
                                  scratch.gradient_row, task.rows, tile.seen.end - tile.seen.begin},
                                 scratch.query_ids, ids + tile.seen.begin, scratch.label_sums);
    }
    const int64_t channels = problem_.head_dim, row = layout_.query_row;
    for (int64_t label = 0; label < 2; ++label) {
      const float* key = labels.keys + (task.head % labels.heads * 2 + label) * channels;
      float* vector = scratch.label_vectors + label * row;
      std::fill_n(vector, row, 0.0f);
      AddScaled(scale_, key, channels, vector);
    }
    if (!wants_terms_) return;
    for (int64_t label = 0; label < 2; ++label) {
      float sum = 0;
      for (int64_t r = 0; r < task.rows; ++r) sum += scratch.label_sums[r][label];
      AddScaled(sum, scratch.label_vectors + label * row, channels, scratch.position_bias);
      scratch.label_biases[label] += scale_ * sum;
    }
    const float* queries = scratch.position_query;
    if (!layout_.has_positions || !kernels_.all_finite({queries, row}, task.rows, row)) {
      LoadQueryRows(task, call_.rule.position_bias, scratch.label_query);
      for (int64_t r = 0; r < task.rows; ++r) {
        const float* sums = scratch.label_sums[r];
        if (sums[0] != 0 || sums[1] != 0) continue;
        std::fill_n(scratch.label_query + r * row, row, 0.0f);  // a disregarded query may be NaN
      }
      queries = scratch.label_query;
    }
    kernels_.gemm(2, row, task.rows, scratch.label_sums[0], 1, 2, queries, row, scratch.label_keys,
                  row, true);
  }

  // Adds a head's sums to the gradients of the terms, in the order of batch rows and chunks.
  void AddTerms(const Chunk& chunk, int64_t h, const Offsets& offsets, Scratch& scratch) const {
    const int64_t channels = problem_.head_dim, row = layout_.query_row;
    Turn& turn = memory_.head_turns[h];
    const int64_t number = chunk.batch * backward_.schedule->chunks() + chunk.index;
    Await(turn, number);
    AddTable(call_.rule.bias, offsets, h, scratch.bias, terms_.bias);
    AddTable(call_.rule.relu_multiplier, offsets, h, scratch.multiplier, terms_.relu_multiplier);
    if (terms_.content_bias != nullptr) {
      AddScaled(1, scratch.content_bias, channels, terms_.content_bias + h * channels);
    }
    if (terms_.position_bias != nullptr) {
      AddScaled(1, scratch.position_bias, channels, terms_.position_bias + h * channels);
    }
    if (terms_.relative_keys != nullptr) {
      const RelativeKeys& all = *call_.rule.relative_keys;
      const Offsets keys = OfKeys(offsets);
      float* to =
          terms_.relative_keys + (h * (all.high() - all.low() + 1) + keys.low - all.low()) * row;
      kernels_.add({to, row, keys.count(), row}, RelativeRow(keys.low, scratch), row);
    }
    for (int64_t label = 0; label < 2; ++label) {
      if (terms_.label_keys != nullptr) {
        AddScaled(1, scratch.label_keys + label * row, channels,
                  terms_.label_keys + (h * 2 + label) * channels);
      }
      if (terms_.label_biases != nullptr) {
        terms_.label_biases[h * 2 + label] += scratch.label_biases[label];
      }
    }
    Pass(turn, number);
  }
  // Adds sums to a head's row of a table; offsets of padding, which the table lacks, have none.
  void AddTable(const DistanceEntries& entries, const Offsets& offsets, int64_t h,
                const float* sums, float* table) const {
    if (table == nullptr || offsets.count() == 0) return;
    const int64_t low = std::max(offsets.low, -entries.zero);
    const int64_t high = std::min(offsets.high, entries.row - 1 - entries.zero);
    if (low > high) return;
    AddScaled(1, sums + low - least_offset_, high - low + 1,
              table + h * entries.row + entries.zero + low);
  }

  const FlashBackwardCall& backward_;
  const ScoreGradients& terms_;
  const Layout& layout_;
  const Memory& memory_;
  const bool has_labels_;
  const int64_t least_offset_;  // the index of an offset in sums by offset is offset - this
  bool wants_q_;
  bool wants_terms_;
  bool q_is_plain_;     // queries' gradients lie as the kernels want them
  bool adds_in_place_;  // products are added to them there
  // Whole rows of floats, as the kernels want them, follow each other in the tensors.
  bool gradients_are_plain_;
  bool keys_and_values_are_plain_;
};

}  // namespace

RelativeKeyVectors::RelativeKeyVectors(const RelativeKeys& keys, int64_t head_dim, double scale)
    : heads_(keys.heads()),
      offsets_(std::max<int64_t>(keys.high() - keys.low() + 1, 0)),
      row_(RoundUp(head_dim, kColumnQuantum)) {
  values_.assign(heads_ * offsets_ * row_, 0.0f);
  for (int64_t h = 0; h < heads_; ++h) {
    for (int64_t n = 0; n < offsets_; ++n) {
      const int64_t offset = keys.low() + n;
      const int64_t panel = offset >= 0 ? offset / kTile : (offset - kTile + 1) / kTile;
      const float* from = keys.Panel(h, panel) + (offset - panel * kTile);
      float* to = values_.data() + (h * offsets_ + n) * row_;
      for (int64_t c = 0; c < head_dim; ++c) to[c] = static_cast<float>(scale) * from[c * kTile];
    }
  }
  if (offsets_ == 0) return;
  first_block_ = BlockOf(keys.low());
  repeats_.assign(BlockOf(keys.high()) - first_block_ + 1, true);
  repeats_[0] = false;
  for (int64_t offset = keys.low() + 1; offset <= keys.high(); ++offset) {
    if (keys.ElementOf(0, offset) == keys.ElementOf(0, offset - 1)) continue;
    repeats_[BlockOf(offset) - first_block_] = false;
  }
}

void FlashDelta(const ConstTensorView& out, const ConstTensorView& out_rest,
                const ConstTensorView& out_gradient, const ConstTensorView& log_sum_exp_gradient,
                const TensorView& delta, ThreadPool* pool) {
  constexpr int64_t kRows = 64;
  const int64_t heads = out.dim(1), tokens = out.dim(2), channels = out.dim(3);
  const int64_t blocks = (tokens + kRows - 1) / kRows;
  const CpuKernels& kernels = BestCpuKernels();
  const auto is_plain = [](const ConstTensorView& view) {
    return view.dtype == DType::kF32 && view.stride(3) == 1 && view.dim(3) % kColumnQuantum == 0;
  };
  const bool are_plain = is_plain(out) && out_rest.empty() && is_plain(out_gradient);
  pool->ParallelFor(out.dim(0) * heads * blocks, [&](int64_t task, int) {
    const int64_t b = task / blocks / heads, h = task / blocks % heads;
    const int64_t first = task % blocks * kRows, rows = std::min(tokens - first, kRows);
    double sums[kRows];
    if (are_plain) {
      kernels.row_dots({out.At<float>(b, h, first), out.stride(2)},
                       {out_gradient.At<float>(b, h, first), out_gradient.stride(2)}, rows,
                       channels, sums);
    } else {
      float y[kMaxHeadDim] = {}, rest[kMaxHeadDim] = {}, g[kMaxHeadDim] = {};
      for (int64_t r = 0; r < rows; ++r) {
        LoadRow(out, out.Offset(b, h, first + r), out.stride(3), channels, y);
        LoadRow(out_gradient, out_gradient.Offset(b, h, first + r), out_gradient.stride(3),
                channels, g);
        kernels.row_dots({y, 0}, {g, 0}, 1, RoundUp(channels, kColumnQuantum), sums + r);
        if (out_rest.empty()) continue;
        double of_rest;
        LoadRow(out_rest, out_rest.Offset(b, h, first + r), out_rest.stride(3), channels, rest);
        kernels.row_dots({rest, 0}, {g, 0}, 1, RoundUp(channels, kColumnQuantum), &of_rest);
        sums[r] += of_rest;
      }
    }
    for (int64_t r = 0; r < rows; ++r) {
      if (!log_sum_exp_gradient.empty()) {
        sums[r] -= *log_sum_exp_gradient.At<float>(b, h, first + r);
      }
      *delta.MutableAt<float>(b, h, first + r) = static_cast<float>(sums[r]);
    }
  });
}

size_t FlashBackwardWorkspaceBytes(const Problem& problem, bool relative_keys, int threads) {
  const Layout layout(problem, relative_keys);
  return Workspace::Measure(
      [&](Workspace& workspace) { LayOut(problem, layout, threads, workspace); });
}

absl::Status FlashBackwardCpu(const Problem& problem, const FlashBackwardCall& call,
                              const Execution& execution) {
  const FlashCall& forward = *call.forward;
  if (forward.schedule == nullptr || forward.schedule->query_tile != kTile) {
    return absl::InternalError("a backward call has no schedule of tiles of 64");
  }
  if (forward.log_sum_exp.empty()) {
    return absl::InternalError("a backward call has no log-sum-exp of the forward pass");
  }
  if (forward.rule.label_keys.keys != nullptr) TFB_RETURN_IF_ERROR(CheckIds(forward));
  TFB_RETURN_IF_ERROR(CheckTokenRule(forward.rule.tokens));
  const Layout layout(problem, forward.rule.relative_keys != nullptr);
  Workspace workspace(execution.workspace);
  const Memory memory = LayOut(problem, layout, execution.pool->threads(), workspace);
  const int64_t tiles = problem.batch * problem.query_heads * layout.query_tiles;
  std::uninitialized_value_construct_n(memory.tile_turns, tiles);
  std::uninitialized_value_construct_n(memory.head_turns, problem.query_heads);
  std::uninitialized_value_construct_n(memory.chunk_turns, problem.batch * problem.kv_heads);
  const BackwardRun run(problem, call, layout, memory);
  execution.pool->ParallelFor(
      run.tasks(), [&](int64_t task, int worker) { run.Own(task, memory.scratch[worker]); });
  if (call.sets_q) {
    execution.pool->ParallelFor(tiles, [&](int64_t n, int) { run.SetUnseenToZero(n); });
  }
  return absl::OkStatus();
}

}  // namespace tfb
