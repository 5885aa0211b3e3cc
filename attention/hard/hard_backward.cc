// Two passes over the scores, so that each gradient has one owner and one order of its sums: by
// tiles of queries for dq, and by tiles of keys for dk and dv. The first finds the maximum and the
// sum of each row's weights, by online softmax, and keeps the queries in fp32 for the second.
#include "attention/hard/hard_backward.h"

#include <algorithm>
#include <cstdint>
#include <limits>

#include "attention/hard/hard_tiles.h"
#include "core/cpu/kernels.h"
#include "core/flash/rows.h"
#include "core/workspace.h"

namespace tfb::hard {
namespace {

constexpr float kNegativeInfinity = -std::numeric_limits<float>::infinity();

struct Layout {
  explicit Layout(const Problem& p)
      : depth(ScoreScratch::PanelDepth(p)),
        key_row(RoundUp(p.head_dim, kColumnQuantum)),
        value_row(RoundUp(p.value_dim, kColumnQuantum)),
        heads(p, depth + key_row) {}
  int64_t depth;
  int64_t key_row;    // floats
  int64_t value_row;  // floats
  PackedHeads heads;
};

// The scratch of one thread for one task.
struct Scratch {
  ScoreScratch tile;
  float* keys;    // [64][key_row]: sums of keys, or gradients of keys
  float* values;  // [64][value_row]: gradients of values
  float* row;     // [value_row]
  float* key;     // [key_row]
  float* max;     // [64]
  float* sum;
  float* rescale;
};

struct Memory {
  float* panels;    // [heads at a time][key tiles][depth][64]
  float* keys;      // [heads at a time][key tiles][64][key_row]
  uint8_t* finite;  // [heads at a time][key tiles]: whether all of the tile's keys are
  // By query head of those at a time, and query.
  float* queries;   // [depth], times the scale
  float* weighted;  // [key_row]: those times -weight / sum_j exp(s_ij - max)
  float* weight;    // the factor of the gradient of log p_ij*; 0 where the query sees no key
  float* max;       // of the query's scores; 0 where it sees no key
  Scratch* scratch;
};

Memory LayOut(const Problem& p, const Layout& layout, int threads, Workspace& workspace) {
  const int64_t tiles = layout.heads.at_a_time * layout.heads.tiles;
  const int64_t rows = layout.heads.at_a_time * p.group() * p.query_tokens;
  Memory memory;
  memory.panels = workspace.Take<float>(tiles * kTile * layout.depth);
  memory.keys = workspace.Take<float>(tiles * kTile * layout.key_row);
  memory.finite = workspace.Take<uint8_t>(tiles);
  memory.queries = workspace.Take<float>(rows * layout.depth);
  memory.weighted = workspace.Take<float>(rows * layout.key_row);
  memory.weight = workspace.Take<float>(rows);
  memory.max = workspace.Take<float>(rows);
  memory.scratch = workspace.Take<Scratch>(threads);
  for (int t = 0; t < threads; ++t) {
    Scratch scratch;
    scratch.tile = ScoreScratch::LayOut(p, workspace);
    scratch.keys = workspace.Take<float>(kTile * layout.key_row);
    scratch.values = workspace.Take<float>(kTile * layout.value_row);
    scratch.row = workspace.Take<float>(layout.value_row);
    scratch.key = workspace.Take<float>(layout.key_row);
    scratch.max = workspace.Take<float>(kTile);
    scratch.sum = workspace.Take<float>(kTile);
    scratch.rescale = workspace.Take<float>(kTile);
    if (memory.scratch != nullptr) memory.scratch[t] = scratch;
  }
  return memory;
}

class HardBackward {
 public:
  HardBackward(const Problem& problem, const HardBackwardCall& call, const Layout& layout,
               const Memory& memory)
      : problem_(problem),
        call_(call),
        layout_(layout),
        memory_(memory),
        tiles_(problem, call.q, call.k, call.key_mask, call.scale) {}

  // Packs tile `tile` of the kv head `kv_head` (counted over batches) into place `slot`.
  void Pack(int64_t slot, int64_t kv_head, int64_t tile) const {
    float* rows = KeyRows(slot, tile);
    tiles_.Pack(kv_head / problem_.kv_heads, kv_head % problem_.kv_heads, tile, rows,
                layout_.key_row, Panel(slot, tile));
    memory_.finite[slot * layout_.heads.tiles + tile] = AllFinite(rows, kTile * layout_.key_row);
  }

  // Writes dq of a tile of queries, and finds what the keys' gradients need of their rows.
  void OfQueries(int64_t slot, int64_t b, int64_t h, int64_t query_tile, Scratch& scratch) const {
    const QueryTile task = tiles_.Queries(b, h, query_tile);
    const ScoreScratch tile = ScratchOf(slot, task, scratch);
    tiles_.LoadQueries(task, tile.queries, layout_.depth);
    std::fill_n(scratch.max, task.rows, kNegativeInfinity);
    std::fill_n(scratch.sum, task.rows, 0.0f);
    std::fill_n(scratch.keys, task.rows * layout_.key_row, 0.0f);
    tiles_.ForEachChunk(task, Panel(slot, 0), tile, [&](int64_t first_key, int64_t columns) {
      const ScoreRows scores = {tile.scores, kScoreRow, task.rows, columns};
      HardTiles::HideNans(scores);
      tiles_.kernels().softmax(scores, {scratch.max, scratch.sum, scratch.rescale}, nullptr);
      if (!call_.q_gradient.empty()) AddKeys(slot, first_key / kTile, scores, scratch);
    });
    for (int64_t r = 0; r < task.rows; ++r) FinishQuery(slot, task, r, scratch);
  }

  // Writes dk and dv of a tile of keys.
  void OfKeys(int64_t slot, int64_t b, int64_t kv_head, int64_t key_tile, Scratch& scratch) const {
    const int64_t first_key = key_tile * kTile, group = problem_.group();
    std::fill_n(scratch.keys, kTile * layout_.key_row, 0.0f);
    std::fill_n(scratch.values, kTile * layout_.value_row, 0.0f);
    for (int64_t h = kv_head * group; h < (kv_head + 1) * group; ++h) {
      for (int64_t tile = 0; tile * kTile < problem_.query_tokens; ++tile) {
        const QueryTile task = tiles_.Queries(b, h, tile);
        if (tiles_.KeysEnd(task.first + task.rows - 1) <= first_key) continue;
        if (!call_.k_gradient.empty()) AddMeans(slot, task, key_tile, scratch);
        AddChosen(slot, task, first_key, scratch);
      }
    }
    StoreKeys(b, kv_head, first_key, scratch.keys, layout_.key_row, call_.k_gradient);
    StoreKeys(b, kv_head, first_key, scratch.values, layout_.value_row, call_.v_gradient);
  }

 private:
  float* Panel(int64_t slot, int64_t tile) const {
    return memory_.panels + (slot * layout_.heads.tiles + tile) * tiles_.panel_floats();
  }
  float* KeyRows(int64_t slot, int64_t tile) const {
    return memory_.keys + (slot * layout_.heads.tiles + tile) * kTile * layout_.key_row;
  }
  // Returns the place of the first query in the memory.
  int64_t RowOf(int64_t slot, const QueryTile& task) const {
    const int64_t group = problem_.group();
    return (slot * group + task.head % group) * problem_.query_tokens + task.first;
  }
  // Returns the scratch of scores, with the task's queries.
  ScoreScratch ScratchOf(int64_t slot, const QueryTile& task, const Scratch& scratch) const {
    ScoreScratch tile = scratch.tile;
    tile.queries = memory_.queries + RowOf(slot, task) * layout_.depth;
    return tile;
  }
  int64_t ChosenBy(const QueryTile& task, int64_t r) const {
    return *call_.index.At<int32_t>(task.batch, task.head, task.first + r);
  }

  // C += A B, of which a 0 of A hides what is not finite in B.
  struct Product {
    int64_t rows, depth;
    const float* a;
    int64_t a_row, a_depth;
    const float* b;
    float* c;
    bool finite;  // whether all of B is
  };
  void Add(const Product& p) const {
    const int64_t columns = layout_.key_row;
    if (p.finite) {
      tiles_.kernels().gemm(p.rows, columns, p.depth, p.a, p.a_row, p.a_depth, p.b, columns, p.c,
                            columns, true);
      return;
    }
    for (int64_t r = 0; r < p.rows; ++r) {
      for (int64_t n = 0; n < p.depth; ++n) {
        const float factor = p.a[r * p.a_row + n * p.a_depth];
        if (factor != 0) AddTimes(factor, p.b + n * columns, columns, p.c + r * columns);
      }
    }
  }
  static void AddTimes(float factor, const float* x, int64_t channels, float* y) {
    for (int64_t c = 0; c < channels; ++c) y[c] += factor * x[c];
  }

  // Adds the keys of a chunk, times their weights, to the rows' sums.
  void AddKeys(int64_t slot, int64_t first_tile, const ScoreRows& weights, Scratch& scratch) const {
    tiles_.kernels().scale_rows({scratch.keys, layout_.key_row, weights.rows, layout_.key_row},
                                scratch.rescale);
    const uint8_t* finite = memory_.finite + slot * layout_.heads.tiles + first_tile;
    const bool all_finite = std::all_of(finite, finite + weights.columns / kTile,
                                        [](uint8_t tile) { return tile != 0; });
    Add({weights.rows, weights.columns, weights.scores, kScoreRow, 1, KeyRows(slot, first_tile),
         scratch.keys, all_finite});
  }

  // Returns g_i . y_i plus the baseline: minus what the reward exceeds the baseline by.
  float WeightOf(const QueryTile& task, int64_t r, int64_t chosen, Scratch& scratch) const {
    const int64_t i = task.first + r;
    float weight =
        call_.baseline.empty() ? 0.0f : *call_.baseline.At<float>(task.batch, task.head, i);
    if (call_.out_gradient.empty()) return weight;
    const int64_t channels = problem_.value_dim;
    LoadRow(call_.out_gradient, call_.out_gradient.Offset(task.batch, task.head, i),
            call_.out_gradient.stride(3), channels, scratch.row);
    LoadRow(call_.v, call_.v.Offset(task.batch, task.head / problem_.group(), chosen),
            call_.v.stride(3), channels, scratch.values);
    for (int64_t c = 0; c < channels; ++c) weight += scratch.row[c] * scratch.values[c];
    return weight;
  }

  void FinishQuery(int64_t slot, const QueryTile& task, int64_t r, Scratch& scratch) const {
    const int64_t chosen = ChosenBy(task, r), row = RowOf(slot, task) + r;
    const bool sees_a_key = chosen >= 0 && scratch.sum[r] > 0;
    const float weight = sees_a_key ? WeightOf(task, r, chosen, scratch) : 0;
    memory_.weight[row] = weight;
    memory_.max[row] = sees_a_key ? scratch.max[r] : 0;
    const int64_t channels = problem_.head_dim;
    float* weighted = memory_.weighted + row * layout_.key_row;
    std::fill_n(weighted, layout_.key_row, 0.0f);
    if (sees_a_key) {  // otherwise the query may be no number
      AddTimes(-weight / scratch.sum[r], memory_.queries + row * layout_.depth, channels, weighted);
    }
    if (call_.q_gradient.empty()) return;
    float* gradient = scratch.keys + r * layout_.key_row;
    if (sees_a_key) {
      LoadRow(call_.k, call_.k.Offset(task.batch, task.head / problem_.group(), chosen),
              call_.k.stride(3), channels, scratch.key);
      for (int64_t c = 0; c < channels; ++c) {
        gradient[c] = call_.scale * weight * (scratch.key[c] - gradient[c] / scratch.sum[r]);
      }
    } else {
      std::fill_n(gradient, channels, 0.0f);
    }
    StoreRow(gradient, channels, call_.q_gradient,
             call_.q_gradient.Offset(task.batch, task.head, task.first + r),
             call_.q_gradient.stride(3));
  }

  // Adds, to the gradients of a tile of keys, what the queries give to all keys that they see.
  void AddMeans(int64_t slot, const QueryTile& task, int64_t key_tile, Scratch& scratch) const {
    const int64_t row = RowOf(slot, task);
    const ScoreScratch tile = ScratchOf(slot, task, scratch);
    const ScoreRows scores = {tile.scores, kScoreRow, task.rows, kTile};
    tiles_.ScoreTile(task, Panel(slot, key_tile), key_tile * kTile, 0, tile);
    HardTiles::HideNans(scores);
    tiles_.kernels().exp(scores, memory_.max + row);
    const float* weighted = memory_.weighted + row * layout_.key_row;
    Add({kTile, task.rows, scores.scores, 1, kScoreRow, weighted, scratch.keys,
         AllFinite(weighted, task.rows * layout_.key_row)});
  }

  // Adds what the queries give to the keys that they chose.
  void AddChosen(int64_t slot, const QueryTile& task, int64_t first_key, Scratch& scratch) const {
    for (int64_t r = 0; r < task.rows; ++r) {
      const int64_t column = ChosenBy(task, r) - first_key;
      if (column < 0 || column >= kTile) continue;
      if (!call_.k_gradient.empty()) {
        const int64_t row = RowOf(slot, task) + r;
        AddTimes(memory_.weight[row], memory_.queries + row * layout_.depth, problem_.head_dim,
                 scratch.keys + column * layout_.key_row);
      }
      if (call_.v_gradient.empty() || call_.out_gradient.empty()) continue;
      LoadRow(call_.out_gradient, call_.out_gradient.Offset(task.batch, task.head, task.first + r),
              call_.out_gradient.stride(3), problem_.value_dim, scratch.row);
      AddTimes(1, scratch.row, problem_.value_dim, scratch.values + column * layout_.value_row);
    }
  }

  // Stores the rows of a tile, and 0 for padding.
  void StoreKeys(int64_t b, int64_t kv_head, int64_t first_key, float* rows, int64_t stride,
                 const TensorView& to) const {
    if (to.empty()) return;
    const int64_t count = std::min(kTile, problem_.kv_tokens - first_key);
    for (int64_t r = 0; r < count; ++r) {
      if (!tiles_.IsToken(b, first_key + r)) std::fill_n(rows + r * stride, stride, 0.0f);
      StoreRow(rows + r * stride, to.dim(3), to, to.Offset(b, kv_head, first_key + r),
               to.stride(3));
    }
  }

  const Problem& problem_;
  const HardBackwardCall& call_;
  const Layout& layout_;
  const Memory& memory_;
  const HardTiles tiles_;
};

}  // namespace

size_t HardBackwardCpuWorkspaceBytes(const Problem& problem, int threads) {
  const Layout layout(problem);
  return Workspace::Measure(
      [&](Workspace& workspace) { LayOut(problem, layout, threads, workspace); });
}

void HardBackwardCpu(const Problem& problem, const HardBackwardCall& call,
                     const Execution& execution) {
  const Layout layout(problem);
  Workspace workspace(execution.workspace);
  const Memory memory = LayOut(problem, layout, execution.pool->threads(), workspace);
  const HardBackward run(problem, call, layout, memory);
  const PackedHeads& packed = layout.heads;
  const int64_t group = problem.group();
  const int64_t query_tiles = (problem.query_tokens + kTile - 1) / kTile;
  const bool of_scores = !call.q_gradient.empty() || !call.k_gradient.empty();
  for (int64_t first = 0; first < packed.heads; first += packed.at_a_time) {
    const int64_t heads = std::min(packed.at_a_time, packed.heads - first);
    if (of_scores) {
      execution.pool->ParallelFor(heads * packed.tiles, [&](int64_t task, int) {
        run.Pack(task / packed.tiles, first + task / packed.tiles, task % packed.tiles);
      });
      // The last queries come first: where the problem is causal, they see most.
      execution.pool->ParallelFor(heads * group * query_tiles, [&](int64_t task, int worker) {
        const int64_t slot = task / (group * query_tiles);
        const int64_t h = (first + slot) % problem.kv_heads * group + task / query_tiles % group;
        run.OfQueries(slot, (first + slot) / problem.kv_heads, h,
                      query_tiles - 1 - task % query_tiles, memory.scratch[worker]);
      });
    }
    if (call.k_gradient.empty() && call.v_gradient.empty()) continue;
    execution.pool->ParallelFor(heads * packed.tiles, [&](int64_t task, int worker) {
      const int64_t slot = task / packed.tiles, kv_head = first + slot;
      run.OfKeys(slot, kv_head / problem.kv_heads, kv_head % problem.kv_heads, task % packed.tiles,
                 memory.scratch[worker]);
    });
  }
}

}  // namespace tfb::hard
