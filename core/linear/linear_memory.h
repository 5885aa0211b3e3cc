// The memory of engine linear on the CPU: the sums of a head, the features of a chunk of tokens,
// each thread's scratch, and how a call is cut into tasks.
#ifndef TFB_CORE_LINEAR_LINEAR_MEMORY_H_
#define TFB_CORE_LINEAR_LINEAR_MEMORY_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "core/cpu/kernels.h"
#include "core/flash/rows.h"
#include "core/linear/linear.h"
#include "core/problem.h"
#include "core/workspace.h"

namespace tfb::linear_cpu {

constexpr int64_t kChunk = kLinearChunk;
// Causal: keys that are added at a time, with the queries at their places.
constexpr int64_t kPart = kChunk / 2;
constexpr int64_t kParts = kChunk / kPart;
constexpr float kNegativeInfinity = -std::numeric_limits<float>::infinity();

inline int64_t CeilDivide(int64_t value, int64_t divisor) {
  return (value + divisor - 1) / divisor;
}

struct Sizes {
  Sizes(const Problem& p, const FeatureMap& map)
      : depth(RoundUp(p.head_dim, 4)),
        input_row(RoundUp(p.head_dim, kColumnQuantum)),
        value_row(RoundUp(p.value_dim, kColumnQuantum)),
        projections(map.projections),
        matrices(map.per_head ? p.kv_heads : 1),
        features(map.features()),
        normaliser(RoundUp(features, kColumnQuantum)),
        scaled_sums(features * value_row + normaliser + value_row),
        state(kColumnQuantum + scaled_sums + value_row) {}
  int64_t depth;  // rounded up, since channels are transposed four at a time
  int64_t input_row;
  int64_t value_row;
  int64_t projections;
  int64_t matrices;  // of W
  int64_t features;
  int64_t normaliser;
  int64_t scaled_sums;
  int64_t state;  // floats
};

// The sums over the keys of one head so far; in the backward pass also sums over queries, see
// linear_gradient.h. Matrices of value_row columns are in panels of 64
// columns.
class Sums {
 public:
  struct Header {
    double tokens;         // keys that are tokens
    float reference;       // R = max_j rho_j; -inf without keys
    float maximum;         // max_j M_j
    int64_t maximum_key;   // the first key whose M_j is the maximum
    float scaled_feature;  // sum_j exp(rho_j - R) sum_r E_jr
  };
  static_assert(sizeof(Header) <= kColumnQuantum * sizeof(float));

  Sums(const Sizes& sizes, float* memory) : sizes_(&sizes), memory_(memory) {}

  void Reset() const {
    std::fill_n(memory_, sizes_->state, 0.0f);
    header() = {0, kNegativeInfinity, kNegativeInfinity, -1, 0};
  }
  void Copy(const Sums& from) const { std::copy_n(from.memory_, sizes_->state, memory_); }
  Sums Next(int64_t count) const { return Sums(*sizes_, memory_ + count * sizes_->state); }
  Header& header() const { return *reinterpret_cast<Header*>(memory_); }
  // The next three have the factor exp(-R).
  float* scaled() const { return memory_ + kColumnQuantum; }
  // sum_j exp(rho_j - R) E_jr v_j: [features][value_row]
  float* products() const { return scaled(); }
  // sum_j exp(rho_j - R) E_jr: [features]
  float* normaliser() const { return products() + sizes_->features * sizes_->value_row; }
  // sum_j exp(rho_j - R) (sum_r E_jr) v_j: [value_row]
  float* scaled_values() const { return normaliser() + sizes_->normaliser; }
  // sum_j v_j: [value_row]
  float* values() const { return scaled() + sizes_->scaled_sums; }

 private:
  const Sizes* sizes_;
  float* memory_;
};

// The features of up to 64 tokens relative to their maximum: exp(w_r . x) = features[r] exp(max).
struct Tokens {
  float* features;       // [features][64]
  float* inputs;         // where not null, receives x: [64][input_row]
  float factor[kChunk];  // of the tensor's rows, which makes them x
  float max[kChunk];
  float half_square[kChunk];  // |x|^2 / 2
  float total[kChunk];        // sum of the features
  float dot[kChunk];          // product of queries' features with the normaliser
};

struct Keys {
  Tokens tokens;
  float* values;                    // [64][value_row] in panels of 64 columns
  float log_scale[kChunk];          // rho_j; -inf for padding
  float gate[kChunk];               // u . k_j + b, of gates
  float decay[kChunk];              // G_j, from the chunk's beginning on; 0 without gates
  float seen[kChunk];               // 1 for a token, 0 for padding
  float running_reference[kChunk];  // R and max M over the keys before and up to this one
  float running_maximum[kChunk];
  int64_t first;
  int64_t count;
  bool finite;  // whether all values are finite
  // For sums += keys: exp(rho_j - R) with R after the addition, times 1 and times sum_r E_jr, and
  // the scale of the earlier sums.
  float scale[kChunk];
  float total_scale[kChunk];
  float rescale[kParts];  // one for each part
};

// Numbers of a row of queries.
struct QueryFactors {
  float reference[kChunk];    // R over the keys that the row sees
  float key_maximum[kChunk];  // their S
  float decay[kChunk];        // G of the last key that the row sees
  // exp(lambda_i - s) and epsilon, divided by the larger of the two, and the same for exp(R - S);
  // without epsilon 1, 0, 1, 0.
  float query[kChunk];
  float query_epsilon[kChunk];
  float key[kChunk];
  float key_epsilon[kChunk];
  // What D_i is divided by: log D_i = log(denominator) + log_scale + 2 log c.
  float log_scale[kChunk];
};

// What a thread needs to load tokens.
struct LoadScratch {
  float* rows;            // [64][depth], or value_row
  float* columns;         // [depth][64]
  float* token_features;  // [features], of one token
  float* scaled_values;   // [64][value_row] in panels
  Ahead ahead;            // what the task's products ask for
};

// The scratch of one thread for one task.
struct Scratch : LoadScratch {
  Keys keys;
  Tokens queries;
  QueryFactors factors;
  float* output;   // [64][value_row] in panels
  float* weights;  // [64][64]
  // Numbers of a row of queries.
  float shift[kChunk];    // R, or 0 where there is none
  float product[kChunk];  // factors of the four terms, see linear.h
  float key[kChunk];
  float constant[kChunk];
  float carry[kChunk];  // exp(reference of the sums - reference)
  float denominator[kChunk];
  float sum[kChunk];
  int32_t visible[kChunk];  // keys of the chunk that the row sees
};

// How a call is cut into tasks. Only its sizes decide where that shows in the result.
struct Plan {
  Plan(const Problem& problem, const Sizes& sizes, int threads);

  int64_t heads;   // key-value heads of all batch rows
  int64_t chunks;  // of keys
  // Not causal.
  int64_t groups = 1;      // groups of keys, each summed by one task
  int64_t held_heads = 1;  // heads whose sums are held at a time
  // Causal.
  bool stepped = false;     // several chunks of a head at once
  int64_t step_chunks = 1;  // chunks of each head at a time
};

// Tells whether the chunks of causal heads are taken in steps, each by all threads, because tasks of
// whole heads would leave threads without work.
bool TakesStepsOfHeads(int64_t heads, int threads);

struct Memory {
  float* states;  // not causal: [held_heads][groups]; causal: [heads] if stepped, else [threads]
  float* chunk_states;      // [heads][step_chunks][kParts]
  Keys* chunk_keys;         // [heads][step_chunks]
  float* sequence_maximum;  // [heads]
  Scratch* scratch;         // [threads]
};

// Chunks between two sums that a causal run keeps for the backward pass.
constexpr int64_t kKeptChunks = 8;

// What a run keeps for the backward pass.
struct Kept {
  // Not causal: [heads], over all keys; causal: [heads][blocks of kKeptChunks], before each block.
  float* states = nullptr;
  // [batch, query_heads, query_tokens]: 1 / denominator, 0 where that is 0; and the same where the
  // floor does not hold the denominator, else 0.
  float* inverse;
  float* slope;
  // [heads]: max_j M_j and the first key that has it, of a causal run with the maximum of the
  // sequence.
  float* maximum;
  int64_t* maximum_key;
};
Kept LayOutKept(const Problem& problem, const Sizes& sizes, Workspace& workspace);
inline int64_t KeptBlocks(const Problem& problem) {
  return problem.causal ? CeilDivide(CeilDivide(problem.kv_tokens, kChunk), kKeptChunks) : 1;
}

// `keys` and `scratch` are null while the workspace only counts.
void LayOutKeys(const Sizes& sizes, Workspace& workspace, Keys* keys);
void LayOutLoadScratch(const Sizes& sizes, Workspace& workspace, LoadScratch* scratch);

// Takes the memory of a call from the workspace. With `has_states`, a causal call starts from sums
// which the caller keeps, and needs none of its own.
Memory LayOut(const Problem& problem, const Sizes& sizes, const Plan& plan, bool has_states,
              int threads, Workspace& workspace);

}  // namespace tfb::linear_cpu

#endif  // TFB_CORE_LINEAR_LINEAR_MEMORY_H_
