#include "core/linear/linear_memory.h"

namespace tfb::linear_cpu {
namespace {

constexpr int64_t kGroupTokens = 512;  // least keys in a task
constexpr int64_t kWantedTasks = 16;   // tasks that few heads are cut into
// Causal: rounds of heads for each thread from which on a task is a whole head.
constexpr int64_t kEnoughRounds = 4;
constexpr int64_t kSumsBytes = 32 << 20;  // bytes of heads whose sums are held at a time

}  // namespace

void LayOutKeys(const Sizes& sizes, Workspace& workspace, Keys* keys) {
  float* features = workspace.Take<float>(sizes.features * kChunk);
  float* values = workspace.Take<float>(sizes.value_row * kChunk);
  if (keys == nullptr) return;
  keys->tokens.features = features;
  keys->tokens.inputs = nullptr;
  keys->values = values;
}

void LayOutLoadScratch(const Sizes& sizes, Workspace& workspace, LoadScratch* scratch) {
  float* rows = workspace.Take<float>(std::max(sizes.depth, sizes.value_row) * kChunk);
  float* columns = workspace.Take<float>(sizes.depth * kChunk);
  float* token_features = workspace.Take<float>(sizes.normaliser);
  float* scaled_values = workspace.Take<float>(sizes.value_row * kChunk);
  if (scratch == nullptr) return;
  scratch->rows = rows;
  scratch->columns = columns;
  scratch->token_features = token_features;
  scratch->scaled_values = scaled_values;
  scratch->ahead = {};
}

Kept LayOutKept(const Problem& p, const Sizes& sizes, Workspace& workspace) {
  const int64_t heads = p.batch * p.kv_heads, rows = p.batch * p.query_heads * p.query_tokens;
  Kept kept;
  kept.states = workspace.Take<float>(heads * KeptBlocks(p) * sizes.state);
  kept.inverse = workspace.Take<float>(rows);
  kept.slope = workspace.Take<float>(rows);
  kept.maximum_key = workspace.Take<int64_t>(heads);
  kept.maximum = workspace.Take<float>(heads);
  return kept;
}

namespace {

void LayOutScratch(const Sizes& sizes, Workspace& workspace, Scratch* scratch) {
  LayOutLoadScratch(sizes, workspace, scratch);
  LayOutKeys(sizes, workspace, scratch == nullptr ? nullptr : &scratch->keys);
  float* features = workspace.Take<float>(sizes.features * kChunk);
  float* output = workspace.Take<float>(sizes.value_row * kChunk);
  float* weights = workspace.Take<float>(kChunk * kChunk);
  if (scratch == nullptr) return;
  scratch->queries.features = features;
  scratch->queries.inputs = nullptr;
  scratch->output = output;
  scratch->weights = weights;
}

}  // namespace

bool TakesStepsOfHeads(int64_t heads, int threads) {
  return heads % threads != 0 && heads < kEnoughRounds * threads;
}

Plan::Plan(const Problem& p, const Sizes& sizes, int threads)
    : heads(p.batch * p.kv_heads), chunks(CeilDivide(p.kv_tokens, kChunk)) {
  const int64_t tasks_of_head = CeilDivide(kWantedTasks, std::max<int64_t>(heads, 1));
  if (p.causal) {
    stepped = TakesStepsOfHeads(heads, threads) && chunks > 1;
    step_chunks = stepped ? std::min(chunks, tasks_of_head) : 1;
    return;
  }
  const int64_t most = std::max<int64_t>(CeilDivide(p.kv_tokens, kGroupTokens), 1);
  groups = std::min(tasks_of_head, most);
  const int64_t head_bytes = groups * sizes.state * static_cast<int64_t>(sizeof(float));
  held_heads = std::clamp<int64_t>(kSumsBytes / head_bytes, 1, std::max<int64_t>(heads, 1));
}

Memory LayOut(const Problem& p, const Sizes& sizes, const Plan& plan, bool has_states, int threads,
              Workspace& workspace) {
  Memory memory;
  const int64_t causal_states = has_states ? 0 : plan.stepped ? plan.heads : threads;
  memory.states = workspace.Take<float>((p.causal ? causal_states : plan.held_heads * plan.groups) *
                                        sizes.state);
  const int64_t slots = plan.stepped ? plan.heads * plan.step_chunks : 0;
  memory.chunk_states = workspace.Take<float>(slots * kParts * sizes.state);
  memory.chunk_keys = workspace.Take<Keys>(slots);
  for (int64_t s = 0; s < slots; ++s) {
    LayOutKeys(sizes, workspace, memory.chunk_keys == nullptr ? nullptr : memory.chunk_keys + s);
  }
  memory.sequence_maximum = workspace.Take<float>(plan.heads);
  memory.scratch = workspace.Take<Scratch>(threads);
  for (int t = 0; t < threads; ++t) {
    LayOutScratch(sizes, workspace, memory.scratch == nullptr ? nullptr : memory.scratch + t);
  }
  return memory;
}

}  // namespace tfb::linear_cpu
