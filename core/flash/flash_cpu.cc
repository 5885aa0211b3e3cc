// Engine flash on the CPU.
//
// Keys are packed once per key-value head into panels [head_dim][64 keys] and values into [64
// keys][value_dim rounded to 16], so that both products are one GEMM kernel whose B operand is
// contiguous and, at head_dim 64, 16 KiB: half of a 32 KiB L1. A task is one tile of 64 queries of
// one head. It gathers up to 8 key tiles, computes their scores side by side, runs one softmax pass
// over all of them, and adds the weighted values:
//
//   work of a chunk, D = Dv = 64:  64 x 512 scores x 128 multiply-adds = 4.2 M FMA
//   memory it reads:               512 keys x 128 channels x 4 B = 256 KiB, from L2 or L3: 16 FMA a
//   byte, far from any limit scores:                        64 x 528 x 4 B = 132 KiB, in L2
//
// so the time is that of the FMA units plus about 0.27 ns a score for the softmax (8 to 10 % of the
// total at D64). Tiles that are full take no mask; the others get one pass over 64 x 64 scores.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "absl/strings/str_cat.h"
#include "core/cpu/kernels.h"
#include "core/flash/flash.h"
#include "core/flash/rows.h"
#include "core/workspace.h"

namespace tfb {
namespace {

constexpr int64_t kTile = kFlashTile;
constexpr int64_t kChunkTiles = 8;
constexpr int64_t kScoreRow =
    kChunkTiles * kTile + 16;  // not a multiple of 4 KiB, so that rows differ in cache set
constexpr int64_t kPositionRow = (kChunkTiles + 1) * kTile + 16;
constexpr int64_t kPackedBytes = int64_t{32} << 20;
constexpr float kNegativeInfinity = -std::numeric_limits<float>::infinity();

int64_t RoundUp(int64_t value, int64_t quantum) {
  return (value + quantum - 1) / quantum * quantum;
}

// Whether no exponent is all ones, as that of an infinity or NaN is.
bool AllFinite(const float* row, int64_t channels) {
  constexpr uint32_t kExponent = 0x7F800000;
  uint32_t found = 0;
  for (int64_t c = 0; c < channels; ++c) {
    uint32_t bits;
    std::memcpy(&bits, row + c, sizeof(bits));
    found |= (bits & kExponent) == kExponent;
  }
  return found == 0;
}

// Sizes that packing, scratch and tasks share.
struct Layout {
  Layout(const Problem& p, const ScoreRule& rule) {
    key_depth = RoundUp(p.head_dim, 4);  // transposed four channels at a time
    value_row = RoundUp(p.value_dim, kColumnQuantum);
    key_tiles = RoundUp(p.kv_tokens, kTile) / kTile;
    has_positions = rule.relative_keys != nullptr;
    kv_heads = p.batch * p.kv_heads;
    const int64_t head_bytes =
        std::max<int64_t>(key_tiles * kTile * (key_depth + value_row) * sizeof(float), 1);
    packed_heads =
        std::clamp<int64_t>(kPackedBytes / head_bytes, 1, std::max<int64_t>(kv_heads, 1));
  }
  int64_t key_depth;
  int64_t value_row;
  int64_t key_tiles;
  int64_t kv_heads;      // of all batches
  int64_t packed_heads;  // packed at a time
  bool has_positions;
};

// One head's keys and values as the kernels want them.
struct PackedHead {
  float* keys;      // [key_tiles][key_depth][64]
  float* values;    // [key_tiles][64][value_row]
  uint8_t* finite;  // [key_tiles] whether all values of the tile are
};

// What one thread needs for one task.
struct Scratch {
  float* content_query;   // [64][key_depth]
  float* position_query;  // [64][key_depth]
  float* scores;          // [64][kScoreRow]
  float* positions;       // [64][kPositionRow]
  float* accumulator;     // [64][value_row]
  float* max;             // [64]
  float* sum;
  float* rescale;
  float* limit;
  uint64_t* visible;  // [kChunkTiles][64]: the mask words of the tiles that have any
};

struct Memory {
  float* keys;
  float* values;
  uint8_t* finite;
  Scratch* scratch;  // [threads]
};

Memory LayOut(const Layout& layout, int threads, Workspace& workspace) {
  Memory memory;
  memory.keys =
      workspace.Take<float>(layout.packed_heads * layout.key_tiles * layout.key_depth * kTile);
  memory.values =
      workspace.Take<float>(layout.packed_heads * layout.key_tiles * layout.value_row * kTile);
  memory.finite = workspace.Take<uint8_t>(layout.packed_heads * layout.key_tiles);
  memory.scratch = workspace.Take<Scratch>(threads);
  for (int t = 0; t < threads; ++t) {
    Scratch scratch;
    scratch.content_query = workspace.Take<float>(kTile * layout.key_depth);
    scratch.position_query =
        layout.has_positions ? workspace.Take<float>(kTile * layout.key_depth) : nullptr;
    scratch.scores = workspace.Take<float>(kTile * kScoreRow);
    scratch.positions =
        layout.has_positions ? workspace.Take<float>(kTile * kPositionRow) : nullptr;
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

// The whole call: fixed while its tasks run.
class FlashRun {
 public:
  FlashRun(const Problem& problem, const FlashCall& call, const Layout& layout,
           const Memory& memory)
      : problem_(problem),
        call_(call),
        layout_(layout),
        memory_(memory),
        kernels_(BestCpuKernels()) {
    scale_ = static_cast<float>(
        call.scale != 0 ? call.scale : 1 / std::sqrt(static_cast<double>(problem.head_dim)));
  }

  // Packs tile `tile` of the kv head `kv_head` (counted over batches) into place `slot`.
  void Pack(int64_t slot, int64_t kv_head, int64_t tile, Scratch& scratch) const {
    const int64_t b = kv_head / problem_.kv_heads, h = kv_head % problem_.kv_heads;
    const PackedHead head = Packed(slot);
    float* rows = scratch.scores;  // free between tasks: 64 rows of key_depth <= 256 floats
    for (int64_t r = 0; r < kTile; ++r) {
      const int64_t j = tile * kTile + r;
      float* row = rows + r * layout_.key_depth;
      std::memset(row, 0, layout_.key_depth * sizeof(float));
      if (IsToken(b, h, j)) {
        LoadRow(call_.k, call_.k.Offset(b, h, call_.key_order(b, h, j)), call_.k.stride(3),
                problem_.head_dim, row);
      }
    }
    kernels_.transpose64(rows, layout_.key_depth, layout_.key_depth,
                         head.keys + tile * layout_.key_depth * kTile);
    bool finite = true;
    for (int64_t r = 0; r < kTile; ++r) {
      const int64_t j = tile * kTile + r;
      float* row = head.values + (tile * kTile + r) * layout_.value_row;
      std::memset(row, 0, layout_.value_row * sizeof(float));
      if (IsToken(b, h, j)) {
        LoadRow(call_.v, call_.v.Offset(b, h, call_.key_order(b, h, j)), call_.v.stride(3),
                problem_.value_dim, row);
        finite = finite && AllFinite(row, problem_.value_dim);
      }
    }
    head.finite[tile] = finite;
  }

  // One tile of queries of head `h`, whose keys and values are in place `slot`.
  void Attend(int64_t slot, int64_t b, int64_t h, int64_t query_tile, Scratch& scratch) const {
    Task task{b, h, query_tile * kTile, 0, Packed(slot)};
    task.rows = std::min(kTile, problem_.query_tokens - task.first_query);
    LoadQueries(task, scratch);
    std::fill_n(scratch.accumulator, task.rows * layout_.value_row, 0.0f);
    std::fill_n(scratch.max, task.rows, kNegativeInfinity);
    std::fill_n(scratch.sum, task.rows, 0.0f);

    Tile chunk[kChunkTiles];
    int64_t tiles = 0;
    for (const TileRun& run : call_.schedule->Row(h, query_tile)) {
      const uint64_t* mask = run.mask == TileRun::kFull ? nullptr : call_.schedule->Mask(run.mask);
      for (int64_t t = run.first_tile; t < run.first_tile + run.tiles; ++t) {
        if (!WithinSpan(task, t, scratch)) continue;
        // Tables and the ramp are read along consecutive keys, so a gap ends a chunk.
        if (tiles == kChunkTiles || (tiles > 0 && chunk[tiles - 1].index + 1 != t)) {
          Accumulate(task, chunk, tiles, scratch);
          tiles = 0;
        }
        chunk[tiles++] = {t, mask};
      }
    }
    if (tiles > 0) Accumulate(task, chunk, tiles, scratch);
    StoreResults(task, scratch);
  }

 private:
  struct Task {
    int64_t batch;
    int64_t head;
    int64_t first_query;
    int64_t rows;
    PackedHead packed;
  };
  struct Tile {
    int64_t index;
    const uint64_t* mask;  // null: full
  };

  PackedHead Packed(int64_t slot) const {
    return {memory_.keys + slot * layout_.key_tiles * layout_.key_depth * kTile,
            memory_.values + slot * layout_.key_tiles * layout_.value_row * kTile,
            memory_.finite + slot * layout_.key_tiles};
  }
  bool IsToken(int64_t b, int64_t kv_head, int64_t j) const {
    return j < problem_.kv_tokens &&
           (call_.key_mask.empty() ||
            *call_.key_mask.At<uint8_t>(b, call_.key_order(b, kv_head, j)) != 0);
  }
  int64_t QueryToken(const Task& task, int64_t r) const {
    return call_.query_order(task.batch, task.head, task.first_query + r);
  }

  // Query rows as float with the scale folded in, so that products with keys are scores.
  void LoadQueries(const Task& task, Scratch& scratch) const {
    const ScoreRule& rule = call_.rule;
    const auto load = [&](const float* bias, float* to) {
      for (int64_t r = 0; r < task.rows; ++r) {
        float* row = to + r * layout_.key_depth;
        std::fill(row + problem_.head_dim, row + layout_.key_depth, 0.0f);
        LoadRow(call_.q, call_.q.Offset(task.batch, task.head, QueryToken(task, r)),
                call_.q.stride(3), problem_.head_dim, row);
        if (bias != nullptr) {
          for (int64_t c = 0; c < problem_.head_dim; ++c) {
            row[c] += bias[task.head * problem_.head_dim + c];
          }
        }
        for (int64_t c = 0; c < problem_.head_dim; ++c) row[c] *= scale_;
      }
    };
    load(rule.content_bias, scratch.content_query);
    if (rule.relative_keys != nullptr) load(rule.position_bias, scratch.position_query);
    if (rule.soft_span.span == nullptr) return;
    for (int64_t r = 0; r < task.rows; ++r) scratch.limit[r] = RampLimit(task, r);
  }

  // The soft span of row r as ramp + z - (i + causal_offset): the weight of key j is then
  // clip((limit + j) / ramp, 0, 1).
  float RampLimit(const Task& task, int64_t r) const {
    const SoftSpan& soft = call_.rule.soft_span;
    const int64_t i = task.first_query + r;
    const float z = soft.span[task.batch * soft.batch_stride + task.head * soft.head_stride +
                              i * soft.query_stride];
    return soft.ramp + z - static_cast<float>(i + problem_.causal_offset());
  }

  // Whether any row of the task gives any key of tile t a weight above 0.
  bool WithinSpan(const Task& task, int64_t t, const Scratch& scratch) const {
    if (call_.rule.soft_span.span == nullptr) return true;
    const float widest = *std::max_element(scratch.limit, scratch.limit + task.rows);
    return widest + static_cast<float>(t * kTile + kTile - 1) > 0;
  }

  // Adds the keys of `tiles` consecutive tiles to the running softmax and output.
  void Accumulate(const Task& task, const Tile* chunk, int64_t tiles, Scratch& scratch) const {
    const ScoreRows scores{scratch.scores, kScoreRow, task.rows, tiles * kTile};
    ComputeScores(task, chunk, tiles, scores, scratch);

    const SoftmaxState state{scratch.max, scratch.sum, scratch.rescale};
    if (call_.rule.soft_span.span == nullptr) {
      kernels_.softmax(scores, state, nullptr);
    } else {
      float limit[kTile];
      for (int64_t r = 0; r < task.rows; ++r) {
        limit[r] = scratch.limit[r] + static_cast<float>(chunk[0].index * kTile);
      }
      const Ramp ramp{limit, 1 / call_.rule.soft_span.ramp};
      kernels_.softmax(scores, state, &ramp);
    }

    const ScoreRows accumulator{scratch.accumulator, layout_.value_row, task.rows,
                                layout_.value_row};
    if (std::any_of(scratch.rescale, scratch.rescale + task.rows,
                    [](float factor) { return factor != 1; })) {
      kernels_.scale_rows(accumulator, scratch.rescale);
    }
    for (int64_t t = 0; t < tiles; ++t) {
      const float* weights = scratch.scores + t * kTile;
      const float* values = task.packed.values + chunk[t].index * kTile * layout_.value_row;
      if (task.packed.finite[chunk[t].index] || FullyVisible(chunk[t])) {
        kernels_.gemm(task.rows, layout_.value_row, kTile, weights, kScoreRow, 1, values,
                      layout_.value_row, accumulator.scores, layout_.value_row, true);
      } else {
        AddVisibleValues(task, weights, values, scratch.visible + t * kTile, scratch);
      }
    }
  }

  void ComputeScores(const Task& task, const Tile* chunk, int64_t tiles, const ScoreRows& scores,
                     Scratch& scratch) const {
    const ScoreRule& rule = call_.rule;
    if (rule.relative_keys != nullptr) ComputePositions(task, chunk[0].index, tiles, scratch);
    for (int64_t t = 0; t < tiles; ++t) {
      float* columns = scores.scores + t * kTile;
      kernels_.gemm(task.rows, kTile, layout_.key_depth, scratch.content_query, layout_.key_depth,
                    1, task.packed.keys + chunk[t].index * layout_.key_depth * kTile, kTile,
                    columns, kScoreRow, false);
    }
    // Row r at column 0 has the offset first; one row further down it is one less.
    const int64_t first = chunk[0].index * kTile - task.first_query;
    if (rule.relative_keys != nullptr) {
      kernels_.add(scores, scratch.positions + kTile, kPositionRow - 1);
    }
    if (rule.relu_multiplier != nullptr) {
      kernels_.relu_multiply(scores, rule.relu_multiplier->At(task.head, first), -1);
    }
    if (rule.bias != nullptr) kernels_.add(scores, rule.bias->At(task.head, first), -1);
    for (int64_t t = 0; t < tiles; ++t) {
      if (!FullyVisible(chunk[t])) MaskTile(task, chunk[t], t, scores, scratch);
    }
  }

  // Scores against the relative keys of offsets first - 64 to first + 64 tiles - 1, with first = 64
  // (tile - query_tile): row r of the chunk's column 0 is at column 64 - r.
  void ComputePositions(const Task& task, int64_t tile, int64_t tiles, Scratch& scratch) const {
    const int64_t first_panel = tile - task.first_query / kTile - 1;
    for (int64_t p = 0; p <= tiles; ++p) {
      const float* panel = call_.rule.relative_keys->Panel(task.head, first_panel + p);
      float* columns = scratch.positions + p * kTile;
      if (panel != nullptr) {
        kernels_.gemm(task.rows, kTile, problem_.head_dim, scratch.position_query,
                      layout_.key_depth, 1, panel, kTile, columns, kPositionRow, false);
      } else {
        for (int64_t r = 0; r < task.rows; ++r)
          std::fill_n(columns + r * kPositionRow, kTile, 0.0f);
      }
    }
  }

  // Whether every query sees all 64 keys of the tile: no mask bit, no padding, no end of the
  // sequence.
  bool FullyVisible(const Tile& tile) const {
    return tile.mask == nullptr && call_.key_mask.empty() &&
           (tile.index + 1) * kTile <= problem_.kv_tokens;
  }

  // Bit c says whether key c of the tile is a token: not padding, and not beyond the sequence.
  uint64_t TokensOf(const Task& task, int64_t tile) const {
    const int64_t keys = std::min(kTile, problem_.kv_tokens - tile * kTile);
    const uint64_t exist = keys == kTile ? ~uint64_t{0} : (uint64_t{1} << keys) - 1;
    if (call_.key_mask.empty()) return exist;
    uint64_t tokens = 0;
    const int64_t kv_head = task.head / problem_.group();
    for (int64_t c = 0; c < keys; ++c) {
      tokens |= uint64_t{IsToken(task.batch, kv_head, tile * kTile + c)} << c;
    }
    return tokens;
  }

  void MaskTile(const Task& task, const Tile& tile, int64_t t, const ScoreRows& scores,
                Scratch& scratch) const {
    const uint64_t tokens = TokensOf(task, tile.index);
    uint64_t* visible = scratch.visible + t * kTile;
    for (int64_t r = 0; r < task.rows; ++r) {
      visible[r] = tokens & (tile.mask == nullptr ? ~uint64_t{0} : tile.mask[r]);
    }
    kernels_.mask({scores.scores + t * kTile, scores.stride, scores.rows, kTile}, visible);
  }

  // The product with values of which some are not finite: a hidden key's weight of 0 must not meet
  // its NaN.
  void AddVisibleValues(const Task& task, const float* weights, const float* values,
                        const uint64_t* visible, Scratch& scratch) const {
    for (int64_t r = 0; r < task.rows; ++r) {
      float* row = scratch.accumulator + r * layout_.value_row;
      for (int64_t j = 0; j < kTile; ++j) {
        if ((visible[r] >> j & 1) == 0) continue;
        const float weight = weights[r * kScoreRow + j];
        const float* value = values + j * layout_.value_row;
        for (int64_t c = 0; c < problem_.value_dim; ++c) row[c] += weight * value[c];
      }
    }
  }

  void StoreResults(const Task& task, Scratch& scratch) const {
    for (int64_t r = 0; r < task.rows; ++r) {
      const float sum = scratch.sum[r];
      scratch.rescale[r] = sum == 0 ? 0 : 1 / sum;  // no key: the accumulator is 0 and stays it
      if (!call_.log_sum_exp.empty()) {
        *call_.log_sum_exp.MutableAt<float>(task.batch, task.head, QueryToken(task, r)) =
            sum == 0 ? kNegativeInfinity : scratch.max[r] + std::log(sum);
      }
    }
    kernels_.scale_rows({scratch.accumulator, layout_.value_row, task.rows, layout_.value_row},
                        scratch.rescale);
    for (int64_t r = 0; r < task.rows; ++r) {
      StoreRow(scratch.accumulator + r * layout_.value_row, problem_.value_dim, call_.out,
               call_.out.Offset(task.batch, task.head, QueryToken(task, r)), call_.out.stride(3));
    }
  }

  const Problem& problem_;
  const FlashCall& call_;
  const Layout& layout_;
  const Memory& memory_;
  const CpuKernels& kernels_;
  float scale_;
};

}  // namespace

size_t FlashWorkspaceBytes(const Problem& problem, const ScoreRule& rule, int threads) {
  const Layout layout(problem, rule);
  return Workspace::Measure([&](Workspace& workspace) { LayOut(layout, threads, workspace); });
}

absl::Status FlashCpu(const Problem& problem, const FlashCall& call, const Execution& execution) {
  const BlockSchedule& schedule = *call.schedule;
  if (schedule.query_tile != kTile || schedule.key_tile != kTile ||
      schedule.query_tokens != problem.query_tokens || schedule.kv_tokens != problem.kv_tokens) {
    return absl::InternalError(absl::StrCat("schedule of ", schedule.query_tokens, " x ",
                                            schedule.kv_tokens, " tokens does not fit the problem ",
                                            problem.ToString()));
  }
  const Layout layout(problem, call.rule);
  Workspace workspace(execution.workspace);
  const Memory memory = LayOut(layout, execution.pool->threads(), workspace);
  const FlashRun run(problem, call, layout, memory);

  // Heads in groups whose packed keys and values fit the workspace: pack them, then attend with
  // them.
  const int64_t group = problem.group();
  for (int64_t first = 0; first < layout.kv_heads; first += layout.packed_heads) {
    const int64_t heads = std::min(layout.packed_heads, layout.kv_heads - first);
    execution.pool->ParallelFor(heads * layout.key_tiles, [&](int64_t task, int worker) {
      run.Pack(task / layout.key_tiles, first + task / layout.key_tiles, task % layout.key_tiles,
               memory.scratch[worker]);
    });
    const int64_t query_tiles = schedule.query_tiles();
    execution.pool->ParallelFor(heads * group * query_tiles, [&](int64_t task, int worker) {
      const int64_t slot = task / (group * query_tiles);
      const int64_t b = (first + slot) / problem.kv_heads;
      const int64_t h = (first + slot) % problem.kv_heads * group + task / query_tiles % group;
      const int64_t rank = h % schedule.heads * query_tiles + task % query_tiles;
      run.Attend(slot, b, h, schedule.order[rank], memory.scratch[worker]);
    });
  }
  return absl::OkStatus();
}

}  // namespace tfb
