// Keys are packed once per key-value head into panels [head_dim][64 keys], as in engine flash. A
// task is 64 queries of one head. It takes 512 keys at a time: their scores, 64 x 528 x 4 B = 132
// KiB in L2, are made by the GEMM kernel, whose sums are in the order of the channels, and then
// each row is searched for its maximum. The search reads a score once, at 16 B a cycle or more,
// where computing it takes head_dim multiply-adds. The place of the maximum in the row is searched
// for only if the maximum is a new one, which happens about log(chunks) times.
#include "attention/hard/hard_cpu.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>

#include "core/cpu/kernels.h"
#include "core/flash/rows.h"
#include "core/workspace.h"

namespace tfb::hard {
namespace {

constexpr int64_t kTile = 64;
constexpr int64_t kChunkTiles = 8;
constexpr int64_t kScoreRow = kChunkTiles * kTile + 16;  // the 16 make rows differ in cache set
constexpr int64_t kPackedBytes = int64_t{32} << 20;
constexpr float kNegativeInfinity = -std::numeric_limits<float>::infinity();

using Sample = HardOptions::Sample;

struct Layout {
  explicit Layout(const Problem& p)
      : key_depth(RoundUp(p.head_dim, 4)),
        key_tiles((p.kv_tokens + kTile - 1) / kTile),
        kv_heads(p.batch * p.kv_heads),
        tile_floats(key_depth * kTile) {
    const int64_t head_bytes =
        std::max<int64_t>(key_tiles * tile_floats * static_cast<int64_t>(sizeof(float)), 1);
    packed_heads =
        std::clamp<int64_t>(kPackedBytes / head_bytes, 1, std::max<int64_t>(kv_heads, 1));
  }
  int64_t key_depth;
  int64_t key_tiles;
  int64_t kv_heads;      // key-value heads of all batch rows
  int64_t tile_floats;   // floats of a packed tile
  int64_t packed_heads;  // heads packed at a time
};

// The scratch of one thread for one task.
struct Scratch {
  float* queries;  // [64][key_depth]
  float* scores;   // [64][kScoreRow]
  float* noise;    // [kScoreRow]
  float* max;      // [64]: the maximum of the scores so far
  int64_t* index;  // [64]: its key, -1 while there is none
  float* sum;      // [64]; this and the arrays below are for inverse_cdf
  float* rescale;
  double* target;   // u times the sum of all weights
  double* passed;   // the weights of the keys that have been passed
  uint8_t* chosen;  // whether index is final
  uint64_t* visible;
};

struct Memory {
  float* keys;  // [packed_heads][key_tiles][key_depth][64]
  Scratch* scratch;
};

Memory LayOut(const Layout& layout, int threads, Workspace& workspace) {
  Memory memory;
  memory.keys = workspace.Take<float>(layout.packed_heads * layout.key_tiles * layout.tile_floats);
  memory.scratch = workspace.Take<Scratch>(threads);
  for (int t = 0; t < threads; ++t) {
    Scratch scratch;
    scratch.queries = workspace.Take<float>(kTile * layout.key_depth);
    scratch.scores = workspace.Take<float>(kTile * kScoreRow);
    scratch.noise = workspace.Take<float>(kScoreRow);
    scratch.max = workspace.Take<float>(kTile);
    scratch.index = workspace.Take<int64_t>(kTile);
    scratch.sum = workspace.Take<float>(kTile);
    scratch.rescale = workspace.Take<float>(kTile);
    scratch.target = workspace.Take<double>(kTile);
    scratch.passed = workspace.Take<double>(kTile);
    scratch.chosen = workspace.Take<uint8_t>(kTile);
    scratch.visible = workspace.Take<uint64_t>(kTile);
    if (memory.scratch != nullptr) memory.scratch[t] = scratch;
  }
  return memory;
}

typedef float Four __attribute__((vector_size(16), aligned(4), may_alias));

// Returns the maximum of a multiple of 16 scores, ignoring NaN; -inf where there is no other.
float MaxOfRow(const float* row, int64_t columns) {
  Four max[4];
  for (Four& m : max) m = kNegativeInfinity - Four{};
  for (int64_t c = 0; c < columns; c += 16) {
    for (int u = 0; u < 4; ++u) {
      const Four s = *reinterpret_cast<const Four*>(row + c + 4 * u);
      max[u] = s > max[u] ? s : max[u];
    }
  }
  float result = kNegativeInfinity;
  for (const Four& m : max) {
    for (int lane = 0; lane < 4; ++lane) result = m[lane] > result ? m[lane] : result;
  }
  return result;
}

float SumOfTile(const float* weights) {
  Four sum[4] = {};
  for (int64_t c = 0; c < kTile; c += 16) {
    for (int u = 0; u < 4; ++u) sum[u] += *reinterpret_cast<const Four*>(weights + c + 4 * u);
  }
  const Four all = (sum[0] + sum[1]) + (sum[2] + sum[3]);
  return (all[0] + all[1]) + (all[2] + all[3]);
}

// The whole call; it does not change while its tasks run.
class HardRun {
 public:
  HardRun(const Problem& problem, const HardCall& call, const Layout& layout, const Memory& memory)
      : problem_(problem),
        call_(call),
        layout_(layout),
        memory_(memory),
        kernels_(BestCpuKernels()) {}

  // Packs tile `tile` of the kv head `kv_head` (counted over batches) into place `slot`.
  void Pack(int64_t slot, int64_t kv_head, int64_t tile, Scratch& scratch) const {
    const int64_t b = kv_head / problem_.kv_heads, h = kv_head % problem_.kv_heads;
    // Scores are free between tasks: 64 rows of key_depth <= 256 floats.
    float* rows = scratch.scores;
    std::memset(rows, 0, layout_.tile_floats * sizeof(float));
    const int64_t keys = std::min(kTile, problem_.kv_tokens - tile * kTile);
    for (int64_t r = 0; r < keys; ++r) {
      LoadRow(call_.k, call_.k.Offset(b, h, tile * kTile + r), call_.k.stride(3), problem_.head_dim,
              rows + r * layout_.key_depth);
    }
    kernels_.transpose64(rows, layout_.key_depth, layout_.key_depth, PackedKeys(slot, tile));
  }

  // Chooses keys for one tile of queries of head `h`, whose keys are in place `slot`.
  void Choose(int64_t slot, int64_t b, int64_t h, int64_t query_tile, Scratch& scratch) const {
    Task task{b, h, query_tile * kTile, 0, slot};
    task.rows = std::min(kTile, problem_.query_tokens - task.first_query);
    LoadQueries(task, scratch);
    std::fill_n(scratch.max, task.rows, kNegativeInfinity);
    std::fill_n(scratch.index, task.rows, int64_t{-1});
    if (call_.sample == Sample::kInverseCdf) {
      Draw(task, scratch);
    } else {
      ForEachChunk(task, scratch, [&](int64_t first_key, int64_t columns) {
        for (int64_t r = 0; r < task.rows; ++r) TakeMaximum(r, first_key, columns, scratch);
      });
    }
    StoreRows(task, scratch);
  }

 private:
  struct Task {
    int64_t batch;
    int64_t head;
    int64_t first_query;
    int64_t rows;
    int64_t slot;
  };

  float* PackedKeys(int64_t slot, int64_t tile) const {
    return memory_.keys + (slot * layout_.key_tiles + tile) * layout_.tile_floats;
  }

  void LoadQueries(const Task& task, Scratch& scratch) const {
    for (int64_t r = 0; r < task.rows; ++r) {
      float* row = scratch.queries + r * layout_.key_depth;
      std::fill(row + problem_.head_dim, row + layout_.key_depth, 0.0f);
      LoadRow(call_.q, call_.q.Offset(task.batch, task.head, task.first_query + r),
              call_.q.stride(3), problem_.head_dim, row);
      for (int64_t c = 0; c < problem_.head_dim; ++c) row[c] *= call_.scale;
    }
  }

  // Returns the end of the keys that query i may see.
  int64_t KeysEnd(int64_t i) const {
    if (!problem_.causal) return problem_.kv_tokens;
    return std::clamp<int64_t>(i + problem_.causal_offset() + 1, 0, problem_.kv_tokens);
  }

  // Calls body(first_key, columns) with the scores of each chunk of keys in scratch.scores: -inf
  // where a query does not see a key.
  template <class Body>
  void ForEachChunk(const Task& task, Scratch& scratch, const Body& body) const {
    const int64_t end = KeysEnd(task.first_query + task.rows - 1);
    for (int64_t first = 0; first < end; first += kChunkTiles * kTile) {
      const int64_t columns = std::min(kChunkTiles * kTile, RoundUp(end - first, kTile));
      for (int64_t c = 0; c < columns; c += kTile) {
        kernels_.gemm(task.rows, kTile, layout_.key_depth, scratch.queries, layout_.key_depth, 1,
                      PackedKeys(task.slot, (first + c) / kTile), kTile, scratch.scores + c,
                      kScoreRow, false);
      }
      if (call_.sample == Sample::kGumbel) AddNoise(task, first, columns, scratch);
      for (int64_t c = 0; c < columns; c += kTile) MaskTile(task, first + c, c, scratch);
      body(first, columns);
    }
  }

  void AddNoise(const Task& task, int64_t first, int64_t columns, Scratch& scratch) const {
    const int64_t keys = std::min(columns, problem_.kv_tokens - first);
    std::fill(scratch.noise + keys, scratch.noise + columns, 0.0f);
    for (int64_t r = 0; r < task.rows; ++r) {
      LoadRow(call_.noise, call_.noise.Offset(task.batch, task.head, task.first_query + r, first),
              call_.noise.stride(3), keys, scratch.noise);
      kernels_.add({scratch.scores + r * kScoreRow, kScoreRow, 1, columns}, scratch.noise, 0);
    }
  }

  // Hides the keys of the tile that begins with key `first`, at column `column`, from the queries
  // that do not see them.
  void MaskTile(const Task& task, int64_t first, int64_t column, Scratch& scratch) const {
    const bool whole = call_.key_mask.empty() && first + kTile <= KeysEnd(task.first_query);
    if (whole) return;
    uint64_t tokens = ~uint64_t{0};
    for (int64_t c = 0; !call_.key_mask.empty() && c < kTile; ++c) {
      const bool is_token =
          first + c < problem_.kv_tokens && *call_.key_mask.At<uint8_t>(task.batch, first + c) != 0;
      if (!is_token) tokens &= ~(uint64_t{1} << c);
    }
    for (int64_t r = 0; r < task.rows; ++r) {
      const int64_t seen = std::clamp<int64_t>(KeysEnd(task.first_query + r) - first, 0, kTile);
      scratch.visible[r] = seen == kTile ? tokens : tokens & ((uint64_t{1} << seen) - 1);
    }
    kernels_.mask({scratch.scores + column, kScoreRow, task.rows, kTile}, scratch.visible, 0);
  }

  static void TakeMaximum(int64_t r, int64_t first_key, int64_t columns, Scratch& scratch) {
    const float* row = scratch.scores + r * kScoreRow;
    const float max = MaxOfRow(row, columns);
    if (!(max > scratch.max[r])) return;
    scratch.max[r] = max;
    scratch.index[r] = first_key + (std::find(row, row + columns, max) - row);
  }

  // ---- Inverse CDF: two passes over the keys, one for the sum of their weights and one up to u of
  // it ----

  void Draw(const Task& task, Scratch& scratch) const {
    std::fill_n(scratch.sum, task.rows, 0.0f);
    ForEachChunk(task, scratch, [&](int64_t, int64_t columns) {
      HideNans(task, columns, scratch);
      kernels_.softmax({scratch.scores, kScoreRow, task.rows, columns},
                       {scratch.max, scratch.sum, scratch.rescale}, nullptr);
    });
    for (int64_t r = 0; r < task.rows; ++r) {
      const float u = *call_.noise.At<float>(task.batch, task.head, task.first_query + r);
      scratch.target[r] = (u < 0 ? 0.0 : static_cast<double>(u)) * scratch.sum[r];
      scratch.passed[r] = 0;
      scratch.chosen[r] = scratch.sum[r] == 0;
      if (scratch.max[r] == kNegativeInfinity) scratch.max[r] = 0;  // all weights are exp(-inf)
    }
    ForEachChunk(task, scratch, [&](int64_t first_key, int64_t columns) {
      HideNans(task, columns, scratch);
      kernels_.exp({scratch.scores, kScoreRow, task.rows, columns}, scratch.max);
      for (int64_t r = 0; r < task.rows; ++r) {
        for (int64_t c = 0; c < columns && !scratch.chosen[r]; c += kTile) {
          Pass(r, first_key + c, scratch.scores + r * kScoreRow + c, scratch);
        }
      }
    });
  }

  static void HideNans(const Task& task, int64_t columns, Scratch& scratch) {
    for (int64_t r = 0; r < task.rows; ++r) {
      float* row = scratch.scores + r * kScoreRow;
      for (int64_t c = 0; c < columns; ++c) row[c] = row[c] == row[c] ? row[c] : kNegativeInfinity;
    }
  }

  // Passes over the weights of a tile, or stops at the key at which they exceed the target. Until
  // then the index is the last key of a weight above 0.
  static void Pass(int64_t r, int64_t first_key, const float* weights, Scratch& scratch) {
    const double passed = scratch.passed[r] + SumOfTile(weights);
    scratch.chosen[r] = passed > scratch.target[r];
    double sum = scratch.passed[r];
    scratch.passed[r] = passed;
    if (!scratch.chosen[r]) {
      for (int64_t c = kTile - 1; c >= 0; --c) {
        if (weights[c] > 0) {
          scratch.index[r] = first_key + c;
          return;
        }
      }
      return;
    }
    for (int64_t c = 0; c < kTile; ++c) {
      sum += weights[c];
      if (weights[c] > 0) scratch.index[r] = first_key + c;
      if (sum > scratch.target[r]) return;
    }
  }

  void StoreRows(const Task& task, const Scratch& scratch) const {
    const int64_t kv_head = task.head / problem_.group();
    for (int64_t r = 0; r < task.rows; ++r) {
      const int64_t i = task.first_query + r, j = scratch.index[r];
      if (!call_.index.empty()) {
        *call_.index.MutableAt<int32_t>(task.batch, task.head, i) = static_cast<int32_t>(j);
      }
      if (call_.v.dtype == DType::kF32) {
        CopyValue<uint32_t>(task.batch, task.head, kv_head, i, j);
      } else {
        CopyValue<uint16_t>(task.batch, task.head, kv_head, i, j);
      }
    }
  }
  // Copies a value as bits, so that no conversion changes it; 0 for key -1.
  template <class Bits>
  void CopyValue(int64_t b, int64_t head, int64_t kv_head, int64_t i, int64_t j) const {
    Bits* to = call_.out.MutableAt<Bits>(b, head, i);
    const Bits* from = j < 0 ? nullptr : call_.v.At<Bits>(b, kv_head, j);
    for (int64_t c = 0; c < problem_.value_dim; ++c) {
      to[c * call_.out.stride(3)] = from == nullptr ? Bits{0} : from[c * call_.v.stride(3)];
    }
  }

  const Problem& problem_;
  const HardCall& call_;
  const Layout& layout_;
  const Memory& memory_;
  const CpuKernels& kernels_;
};

}  // namespace

size_t HardCpuWorkspaceBytes(const Problem& problem, int threads) {
  const Layout layout(problem);
  return Workspace::Measure([&](Workspace& workspace) { LayOut(layout, threads, workspace); });
}

void HardCpu(const Problem& problem, const HardCall& call, const Execution& execution) {
  const Layout layout(problem);
  Workspace workspace(execution.workspace);
  const Memory memory = LayOut(layout, execution.pool->threads(), workspace);
  const HardRun run(problem, call, layout, memory);
  const int64_t group = problem.group();
  const int64_t query_tiles = (problem.query_tokens + kTile - 1) / kTile;
  for (int64_t first = 0; first < layout.kv_heads; first += layout.packed_heads) {
    const int64_t heads = std::min(layout.packed_heads, layout.kv_heads - first);
    execution.pool->ParallelFor(heads * layout.key_tiles, [&](int64_t task, int worker) {
      const int64_t slot = task / layout.key_tiles;
      run.Pack(slot, first + slot, task % layout.key_tiles, memory.scratch[worker]);
    });
    // The last queries come first: where the problem is causal, they see most.
    execution.pool->ParallelFor(heads * group * query_tiles, [&](int64_t task, int worker) {
      const int64_t slot = task / (group * query_tiles);
      const int64_t h = (first + slot) % problem.kv_heads * group + task / query_tiles % group;
      run.Choose(slot, (first + slot) / problem.kv_heads, h, query_tiles - 1 - task % query_tiles,
                 memory.scratch[worker]);
    });
  }
}

}  // namespace tfb::hard
