// A task is 64 queries of one head. It takes 512 keys at a time: their scores, 64 x 528 x 4 B = 132
// KiB in L2, are made by the GEMM kernel, and then each row is searched for its maximum. The
// search reads a score once, at 16 B a cycle or more, where computing it takes head_dim
// multiply-adds. The place of the maximum in the row is searched for only if the maximum is a new
// one, which happens about log(chunks) times.
#include "attention/hard/hard_cpu.h"

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

using Sample = HardOptions::Sample;

// The scratch of one thread for one task.
struct Scratch {
  ScoreScratch tile;
  float* noise;    // [kScoreRow]
  float* max;      // [64]: the maximum of the scores so far
  int64_t* index;  // [64]: its key, -1 while there is none
  float* sum;      // [64]; this and the arrays below are for inverse_cdf
  float* rescale;
  double* target;   // u times the sum of all weights
  double* passed;   // the weights of the keys that have been passed
  uint8_t* chosen;  // whether index is final
};

struct Memory {
  float* keys;  // [heads at a time][key tiles][depth][64]
  Scratch* scratch;
};

PackedHeads PackedHeadsOf(const Problem& problem) {
  return PackedHeads(problem, ScoreScratch::PanelDepth(problem));
}

Memory LayOut(const Problem& problem, int threads, Workspace& workspace) {
  const PackedHeads heads = PackedHeadsOf(problem);
  Memory memory;
  memory.keys = workspace.Take<float>(heads.at_a_time * heads.tiles * kTile *
                                      ScoreScratch::PanelDepth(problem));
  memory.scratch = workspace.Take<Scratch>(threads);
  for (int t = 0; t < threads; ++t) {
    Scratch scratch;
    scratch.tile = ScoreScratch::LayOut(problem, workspace);
    scratch.noise = workspace.Take<float>(kScoreRow);
    scratch.max = workspace.Take<float>(kTile);
    scratch.index = workspace.Take<int64_t>(kTile);
    scratch.sum = workspace.Take<float>(kTile);
    scratch.rescale = workspace.Take<float>(kTile);
    scratch.target = workspace.Take<double>(kTile);
    scratch.passed = workspace.Take<double>(kTile);
    scratch.chosen = workspace.Take<uint8_t>(kTile);
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
  HardRun(const Problem& problem, const HardCall& call, const PackedHeads& heads,
          const Memory& memory)
      : problem_(problem),
        call_(call),
        heads_(heads),
        memory_(memory),
        tiles_(problem, call.q, call.k, call.key_mask, call.scale) {}

  // Packs tile `tile` of the kv head `kv_head` (counted over batches) into place `slot`.
  void Pack(int64_t slot, int64_t kv_head, int64_t tile, Scratch& scratch) const {
    // Scores are free between tasks: 64 rows of at most 256 floats.
    tiles_.Pack(kv_head / problem_.kv_heads, kv_head % problem_.kv_heads, tile, scratch.tile.scores,
                ScoreScratch::PanelDepth(problem_),
                PackedKeys(slot) + tile * tiles_.panel_floats());
  }

  // Chooses keys for one tile of queries of head `h`, whose keys are in place `slot`.
  void Choose(int64_t slot, int64_t b, int64_t h, int64_t query_tile, Scratch& scratch) const {
    const QueryTile task = tiles_.Queries(b, h, query_tile);
    tiles_.LoadQueries(task, scratch.tile.queries, ScoreScratch::PanelDepth(problem_));
    std::fill_n(scratch.max, task.rows, kNegativeInfinity);
    std::fill_n(scratch.index, task.rows, int64_t{-1});
    const float* keys = PackedKeys(slot);
    if (call_.sample == Sample::kInverseCdf) {
      Draw(task, keys, scratch);
    } else {
      tiles_.ForEachChunk(task, keys, scratch.tile, [&](int64_t first_key, int64_t columns) {
        if (call_.sample == Sample::kGumbel) AddNoise(task, first_key, columns, scratch);
        for (int64_t r = 0; r < task.rows; ++r) TakeMaximum(r, first_key, columns, scratch);
      });
    }
    StoreRows(task, scratch);
  }

 private:
  float* PackedKeys(int64_t slot) const {
    return memory_.keys + slot * heads_.tiles * tiles_.panel_floats();
  }

  void AddNoise(const QueryTile& task, int64_t first, int64_t columns, Scratch& scratch) const {
    const int64_t keys = std::min(columns, problem_.kv_tokens - first);
    std::fill(scratch.noise + keys, scratch.noise + columns, 0.0f);
    for (int64_t r = 0; r < task.rows; ++r) {
      LoadRow(call_.noise, call_.noise.Offset(task.batch, task.head, task.first + r, first),
              call_.noise.stride(3), keys, scratch.noise);
      tiles_.kernels().add({scratch.tile.scores + r * kScoreRow, kScoreRow, 1, columns},
                           scratch.noise, 0);
    }
  }

  static void TakeMaximum(int64_t r, int64_t first_key, int64_t columns, Scratch& scratch) {
    const float* row = scratch.tile.scores + r * kScoreRow;
    const float max = MaxOfRow(row, columns);
    if (!(max > scratch.max[r])) return;
    scratch.max[r] = max;
    scratch.index[r] = first_key + (std::find(row, row + columns, max) - row);
  }

  // ---- Inverse CDF: two passes over the keys, one for the sum of their weights and one up to u of
  // it ----

  void Draw(const QueryTile& task, const float* keys, Scratch& scratch) const {
    const auto scores = [&](int64_t columns) {
      return ScoreRows{scratch.tile.scores, kScoreRow, task.rows, columns};
    };
    std::fill_n(scratch.sum, task.rows, 0.0f);
    tiles_.ForEachChunk(task, keys, scratch.tile, [&](int64_t, int64_t columns) {
      HardTiles::HideNans(scores(columns));
      tiles_.kernels().softmax(scores(columns), {scratch.max, scratch.sum, scratch.rescale},
                               nullptr);
    });
    for (int64_t r = 0; r < task.rows; ++r) {
      const float u = *call_.noise.At<float>(task.batch, task.head, task.first + r);
      scratch.target[r] = (u < 0 ? 0.0 : static_cast<double>(u)) * scratch.sum[r];
      scratch.passed[r] = 0;
      scratch.chosen[r] = scratch.sum[r] == 0;
      if (scratch.max[r] == kNegativeInfinity) scratch.max[r] = 0;  // all weights are exp(-inf)
    }
    tiles_.ForEachChunk(task, keys, scratch.tile, [&](int64_t first_key, int64_t columns) {
      HardTiles::HideNans(scores(columns));
      tiles_.kernels().exp(scores(columns), scratch.max);
      for (int64_t r = 0; r < task.rows; ++r) {
        for (int64_t c = 0; c < columns && !scratch.chosen[r]; c += kTile) {
          Pass(r, first_key + c, scratch.tile.scores + r * kScoreRow + c, scratch);
        }
      }
    });
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

  void StoreRows(const QueryTile& task, const Scratch& scratch) const {
    const int64_t kv_head = task.head / problem_.group();
    for (int64_t r = 0; r < task.rows; ++r) {
      const int64_t i = task.first + r, j = scratch.index[r];
      for (const TensorView& index : {call_.index, call_.kept_index}) {
        if (index.empty()) continue;
        *index.MutableAt<int32_t>(task.batch, task.head, i) = static_cast<int32_t>(j);
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
  const PackedHeads& heads_;
  const Memory& memory_;
  const HardTiles tiles_;
};

}  // namespace

size_t HardCpuWorkspaceBytes(const Problem& problem, int threads) {
  return Workspace::Measure([&](Workspace& workspace) { LayOut(problem, threads, workspace); });
}

void HardCpu(const Problem& problem, const HardCall& call, const Execution& execution) {
  const PackedHeads packed = PackedHeadsOf(problem);
  Workspace workspace(execution.workspace);
  const Memory memory = LayOut(problem, execution.pool->threads(), workspace);
  const HardRun run(problem, call, packed, memory);
  const int64_t group = problem.group();
  const int64_t query_tiles = (problem.query_tokens + kTile - 1) / kTile;
  for (int64_t first = 0; first < packed.heads; first += packed.at_a_time) {
    const int64_t heads = std::min(packed.at_a_time, packed.heads - first);
    execution.pool->ParallelFor(heads * packed.tiles, [&](int64_t task, int worker) {
      const int64_t slot = task / packed.tiles;
      run.Pack(slot, first + slot, task % packed.tiles, memory.scratch[worker]);
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
