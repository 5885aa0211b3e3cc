#include "core/linear/linear_backward_memory.h"

#include <algorithm>

namespace tfb::linear_cpu {
namespace {

constexpr int64_t kGroupTokens = 512;     // least queries, and keys, in a task
constexpr int64_t kWantedTasks = 16;      // not causal: tasks that few heads are cut into
constexpr int64_t kHeldBytes = 32 << 20;  // bytes of heads whose sums are held at a time

QueryChunk* LayOutQueries(const Sizes& sizes, int64_t group, Workspace& workspace) {
  QueryChunk* queries = workspace.Take<QueryChunk>(group);
  for (int64_t g = 0; g < group; ++g) {
    float* features = workspace.Take<float>(sizes.features * kChunk);
    float* query_inputs = workspace.Take<float>(kChunk * sizes.input_row);
    float* rows = workspace.Take<float>(kChunk * sizes.value_row);
    if (queries == nullptr) continue;
    queries[g].tokens.features = features;
    queries[g].tokens.inputs = query_inputs;
    queries[g].rows = rows;
  }
  return queries;
}

// A chunk has, beside its keys, queries and perhaps memory of its own for either kind of sums.
struct ChunkParts {
  QueryChunk* queries;
  bool has_before;
  bool has_after;
};

// `chunk` is null while the workspace only counts.
void LayOutChunk(const Sizes& sizes, const ChunkParts& parts, Workspace& workspace, Chunk* chunk) {
  LayOutKeys(sizes, workspace, chunk == nullptr ? nullptr : &chunk->keys);
  float* inputs = workspace.Take<float>(kChunk * sizes.input_row);
  float* before = workspace.Take<float>(parts.has_before ? sizes.state : 0);
  float* after = workspace.Take<float>(parts.has_after ? sizes.state : 0);
  if (chunk == nullptr) return;
  chunk->keys.tokens.inputs = inputs;
  chunk->queries = parts.queries;
  chunk->own_before = before;
  chunk->own_after = after;
}

// Lays out `count` chunks. Where heads are whole, a thread's chunks share the memory of queries, of
// which it needs one chunk's at a time.
Chunk* LayOutChunks(const Problem& p, const Sizes& sizes, const BackwardPlan& plan, int64_t count,
                    Workspace& workspace) {
  Chunk* chunks = workspace.Take<Chunk>(count);
  const int64_t sharing = plan.whole_heads ? kKeptChunks : 1;
  ChunkParts parts = {nullptr, p.causal, p.causal && !plan.whole_heads};
  for (int64_t n = 0; n < count; ++n) {
    if (n % sharing == 0) {
      parts.queries = LayOutQueries(sizes, p.causal ? p.group() : 1, workspace);
    }
    LayOutChunk(sizes, parts, workspace, chunks == nullptr ? nullptr : chunks + n);
  }
  return chunks;
}

void LayOutBackwardScratch(const Sizes& sizes, Workspace& workspace, BackwardScratch* scratch) {
  LayOutLoadScratch(sizes, workspace, scratch);
  float* query_gradients = workspace.Take<float>(sizes.features * kChunk);
  float* key_gradients = workspace.Take<float>(sizes.features * kChunk);
  float* row_columns = workspace.Take<float>(sizes.value_row * kChunk);
  float* value_columns = workspace.Take<float>(sizes.value_row * kChunk);
  float* output = workspace.Take<float>(kChunk * sizes.value_row);
  float* inputs = workspace.Take<float>(kChunk * sizes.input_row);
  float* weights = workspace.Take<float>(kChunk * kChunk);
  float* pair_gradients = workspace.Take<float>(kChunk * kChunk);
  float* pair_columns = workspace.Take<float>(kChunk * kChunk);
  if (scratch == nullptr) return;
  scratch->query_gradients = query_gradients;
  scratch->key_gradients = key_gradients;
  scratch->row_columns = row_columns;
  scratch->value_columns = value_columns;
  scratch->output = output;
  scratch->inputs = inputs;
  scratch->weights = weights;
  scratch->pair_gradients = pair_gradients;
  scratch->pair_columns = pair_columns;
}

}  // namespace

BackwardPlan::BackwardPlan(const Problem& p, const Sizes& sizes, int threads)
    : heads(p.batch * p.kv_heads),
      matrices(sizes.matrices),
      matrix_floats(sizes.projections * sizes.input_row) {
  const int64_t most_heads = std::max<int64_t>(heads, 1);
  whole_heads = p.causal && !TakesStepsOfHeads(heads, threads);
  if (whole_heads) {
    const int64_t part_bytes = matrix_floats * static_cast<int64_t>(sizeof(float));
    const int64_t wanted = std::max<int64_t>(kHeldBytes / part_bytes / threads, 1) * threads;
    held_heads = std::min(wanted, most_heads);
    return;
  }
  if (p.causal) {
    // The chunks of a block and head are tasks, two for each thread at least; more heads would only
    // take more of the caches.
    held_heads = std::min(CeilDivide(2 * threads, kKeptChunks), most_heads);
    return;
  }
  const int64_t tokens = std::max(p.query_tokens, p.kv_tokens);
  groups = std::min(CeilDivide(kWantedTasks, most_heads),
                    std::max<int64_t>(CeilDivide(tokens, kGroupTokens), 1));
  const int64_t head_bytes =
      groups * (sizes.state + matrix_floats) * static_cast<int64_t>(sizeof(float));
  held_heads = std::clamp<int64_t>(kHeldBytes / head_bytes, 1, most_heads);
}

BackwardMemory LayOutBackward(const Problem& p, const Sizes& sizes, const BackwardPlan& plan,
                              int threads, Workspace& workspace) {
  BackwardMemory memory;
  memory.w = workspace.Take<float>(plan.matrices * plan.matrix_floats);
  memory.w_gradient = workspace.Take<float>(plan.matrices * plan.matrix_floats);
  memory.w_parts = workspace.Take<float>(plan.held_heads * plan.groups * plan.matrix_floats);
  memory.gate_gradient = workspace.Take<float>(p.kv_heads * (p.head_dim + 1));
  const int64_t slots = plan.whole_heads ? threads : plan.held_heads;
  memory.states = workspace.Take<float>(slots * (p.causal ? 2 : plan.groups) * sizes.state);
  memory.chunks = LayOutChunks(p, sizes, plan, p.causal ? slots * kKeptChunks : threads, workspace);
  memory.chains = workspace.Take<HeadChain>(p.causal ? plan.held_heads : 0);
  for (int64_t n = 0; p.causal && n < plan.held_heads; ++n) {
    float* gate = workspace.Take<float>(p.head_dim + 1);
    float* gradient = workspace.Take<float>(sizes.input_row);
    float* input = workspace.Take<float>(sizes.input_row);
    if (memory.chains == nullptr) continue;
    memory.chains[n].gate = gate;
    memory.chains[n].gradient = gradient;
    memory.chains[n].input = input;
  }
  memory.maximum_gradients = workspace.Take<double>(p.causal ? 0 : plan.held_heads * plan.groups);
  memory.scratch = workspace.Take<BackwardScratch>(threads);
  for (int t = 0; t < threads; ++t) {
    LayOutBackwardScratch(sizes, workspace,
                          memory.scratch == nullptr ? nullptr : memory.scratch + t);
  }
  return memory;
}

}  // namespace tfb::linear_cpu
