// The memory of engine linear's backward pass on the CPU: chunks of queries and keys with what is
// known of them, each thread's scratch, and how a call is cut into tasks.
#ifndef TFB_CORE_LINEAR_LINEAR_BACKWARD_MEMORY_H_
#define TFB_CORE_LINEAR_LINEAR_BACKWARD_MEMORY_H_

#include <cstdint>

#include "core/linear/linear_memory.h"
#include "core/problem.h"
#include "core/workspace.h"

namespace tfb::linear_cpu {

// Up to 64 queries of one head; names are those of linear_gradient.h.
struct QueryChunk {
  Tokens tokens;  // with inputs; features become gradients of projections
  QueryFactors factors;
  float* rows;  // dN_i: [64][value_row] in panels of 64 columns
  int64_t first;
  int64_t count;
  float active[kChunk];           // 0 for a row without weight, which has no gradient
  float valid[kChunk];            // NaN for a row that is not finite, else 1
  float sum[kChunk];              // dZ_i
  float key[kChunk];              // b_i
  float key_sum[kChunk];          // b_i dZ_i
  float constant[kChunk];         // b'_i sum_r phi_ir
  float denominator_sum[kChunk];  // d'_i dZ_i
  float shift[kChunk];            // R_i, or 0 where there is none
  int32_t visible[kChunk];        // keys of the chunk that the row sees
  // For sums += queries, see Addend.
  float scale[kChunk];
  float normaliser[kChunk];
  float scaled[kChunk];
  float rescale;
  // What the differentiation of the chunk leaves.
  float product[kChunk];           // sum_r of a feature times its gradient
  float maximum_gradient[kChunk];  // dS_i
};

// Up to 64 keys of one head, and the queries at their places.
struct Chunk {
  Keys keys;            // with inputs; features become gradients of projections
  QueryChunk* queries;  // [query heads of a key-value head]
  float* before;        // sums over the keys before the chunk: a state
  float* after;         // sums over the queries after the chunk: a state
  float* own_before;    // the chunk's memory for those sums, which may lie elsewhere
  float* own_after;
  // What the differentiation of the chunk leaves.
  float product[kChunk];        // sum_r of a feature times its gradient
  int32_t maximum_row[kChunk];  // the first feature that is the largest
  float gate_gradient[kChunk];  // of u . k_j + b
};

// What goes through the chunks of a head from the last to the first.
struct HeadChain {
  double rows;  // sums of products of queries and of keys so far
  double columns;
  double maximum;  // of maximum_gradient
  float* gate;     // gradients of u and b: [head_dim + 1]
  // The key with the maximum of the sequence, whose gradient waits for all rows: [input_row] each.
  float* gradient;
  float* input;
  float factor;
  float half_square;
  int32_t maximum_row;
};

// The scratch of one thread for one task.
struct BackwardScratch : LoadScratch {
  float* query_gradients;  // [features][64]
  float* key_gradients;
  float* row_columns;  // [value_row][64]
  float* value_columns;
  float* output;   // [64][value_row] in panels
  float* inputs;   // [64][input_row]
  float* weights;  // [64][64]
  float* pair_gradients;
  float* pair_columns;
  float key_scale[kChunk];  // exp(rho_j - R) of the sums over queries
  float offset[kChunk];     // of the keys' feature gradients
};

// How a call is cut into tasks. Only its sizes decide where that shows in the result.
struct BackwardPlan {
  BackwardPlan(const Problem& problem, const Sizes& sizes, int threads);

  int64_t heads;          // key-value heads of all batch rows
  int64_t held_heads;     // heads that are differentiated at a time
  bool whole_heads;       // causal: a task is a whole head
  int64_t groups = 1;     // not causal: groups of queries, and of keys, each one task
  int64_t matrices;       // of W
  int64_t matrix_floats;  // [projections][input_row]
};

struct BackwardMemory {
  float* w;              // W with rows of input_row
  float* w_gradient;     // [matrices][matrix_floats]
  float* w_parts;        // [held_heads][groups][matrix_floats]
  float* gate_gradient;  // [kv_heads][head_dim + 1]
  // Causal: [threads][2] where heads are whole, else [held_heads][2]; not causal:
  // [held_heads][groups].
  float* states;
  // Causal: [threads][kKeptChunks] where heads are whole, else [held_heads][kKeptChunks]; not
  // causal: [threads].
  Chunk* chunks;
  HeadChain* chains;          // causal: [held_heads]
  double* maximum_gradients;  // not causal: [held_heads][groups]
  BackwardScratch* scratch;   // [threads]
};
BackwardMemory LayOutBackward(const Problem& problem, const Sizes& sizes, const BackwardPlan& plan,
                              int threads, Workspace& workspace);

}  // namespace tfb::linear_cpu

#endif  // TFB_CORE_LINEAR_LINEAR_BACKWARD_MEMORY_H_
