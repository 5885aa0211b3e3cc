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
        value_row(RoundUp(p.value_dim, kColumnQuantum)),
        projections(map.projections),
        features(map.features()),
        normaliser(RoundUp(features, kColumnQuantum)),
        scaled_sums(features * value_row + normaliser + value_row),
        state(kColumnQuantum + scaled_sums + value_row) {}
  int64_t depth;  // rounded up, since channels are transposed four at a time
  int64_t value_row;
  int64_t projections;
  int64_t features;
  int64_t normaliser;
  int64_t scaled_sums;
  int64_t state;  // floats
};

// The sums over the keys of one head so far. Matrices of value_row columns are in panels of 64
// columns.
class Sums {
 public:
  struct Header {
    double tokens;         // keys that are tokens
    float reference;       // R = max_j rho_j; -inf without keys
    float maximum;         // max_j M_j
    float scaled_feature;  // sum_j exp(rho_j - R) sum_r E_jr
  };
  static_assert(sizeof(Header) <= kColumnQuantum * sizeof(float));

  Sums(const Sizes& sizes, float* memory) : sizes_(&sizes), memory_(memory) {}

  void Reset() const {
    std::fill_n(memory_, sizes_->state, 0.0f);
    header() = {0, kNegativeInfinity, kNegativeInfinity, 0};
  }
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

// Factors of two sums at references a and b that bring them to the larger reference.
struct Rescale {
  Rescale(float a, float b) : reference(b > a ? b : a) {
    first = Factor(a);
    second = Factor(b);
  }
  float Factor(float from) const {
    if (from == reference) return 1;
    return from == kNegativeInfinity ? 0 : std::exp(from - reference);
  }
  float reference;
  float first;
  float second;
};

// The features of up to 64 tokens relative to their maximum: exp(w_r . x) = features[r] exp(max).
struct Tokens {
  float* features;  // [features][64]
  float max[kChunk];
  float half_square[kChunk];  // |x|^2 / 2
  float total[kChunk];        // sum of the features
  float dot[kChunk];          // product of queries' features with the normaliser
};

struct Keys {
  Tokens tokens;
  float* values;                    // [64][value_row] in panels of 64 columns
  float log_scale[kChunk];          // rho_j; -inf for padding
  float decay[kChunk];              // G_j, from the chunk's beginning on; 0 without gates
  float seen[kChunk];               // 1 for a token, 0 for padding
  float running_reference[kChunk];  // R and max M over the keys before and up to this one
  float running_maximum[kChunk];
  int64_t count;
  bool finite;  // whether all values are finite
  // For sums += keys: exp(rho_j - R) with R after the addition, and the scale of the earlier sums.
  float scale[kChunk];
  float rescale[kParts];  // one for each part
};

// The scratch of one thread for one task.
struct Scratch {
  Keys keys;
  Tokens queries;
  float* rows;            // [64][depth], or value_row
  float* columns;         // [depth][64]
  float* token_features;  // [features], of one token
  float* scaled_values;   // [64][value_row] in panels
  float* output;          // [64][value_row] in panels
  float* weights;         // [64][64]
  // Numbers of a row of queries.
  float reference[kChunk];    // R over the keys that the row sees
  float shift[kChunk];        // R, or 0 where there is none
  float key_maximum[kChunk];  // their S
  float decay[kChunk];        // G of the last key that the row sees
  float product[kChunk];      // factors of the four terms, see linear.h
  float key[kChunk];
  float constant[kChunk];
  float carry[kChunk];  // exp(reference of the sums - reference)
  // Scale of the denominator: log D_i = log(denominator) + log_scale + 2 log c.
  float log_scale[kChunk];
  float denominator[kChunk];
  float sum[kChunk];
  float exponent[4][kChunk];
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

struct Memory {
  float* states;  // not causal: [held_heads][groups]; causal: [heads] if stepped, else [threads]
  float* chunk_states;      // [heads][step_chunks][kParts]
  Keys* chunk_keys;         // [heads][step_chunks]
  float* sequence_maximum;  // [heads]
  Scratch* scratch;         // [threads]
};

// Takes the memory of a call from the workspace. With `has_states`, a causal call starts from sums
// which the caller keeps, and needs none of its own.
Memory LayOut(const Problem& problem, const Sizes& sizes, const Plan& plan, bool has_states,
              int threads, Workspace& workspace);

}  // namespace tfb::linear_cpu

#endif  // TFB_CORE_LINEAR_LINEAR_MEMORY_H_
