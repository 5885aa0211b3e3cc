// A memorizing layer's reading of its store, once more and with its gradients, on the CPU.
//
// A Run keeps which tokens each query read, and of its tokens the keys, of unit length, and the
// values. With a query's unit vector a = q / |q|, scale s, weights p_j over what it reads (the null
// key among it) and local the result of the layer's own attention:
//
//   s_j = |s| a . k_j,  l = log sum_j exp(s_j),  p_j = exp(s_j - l),  o = sum_j p_j v_j
//   y = g o + (1 - g) local,  g = 1 / (1 + exp(-t)),  t = gate, or l - m where it joins
//
// with m the log-sum-exp of the layer's own scores. With dy = dL/dy:
//
//   dlocal = (1 - g) dy,  dt = g (1 - g) dy . (o - local),  do = g dy
//   ds_j = p_j (do . v_j - do . o + dl)           dl = dt and dm = -dt where it joins, else 0
//   da = |s| sum_j ds_j k_j,  dq = (da - a (a . da)) / |q|,  ds = sign(s) sum_j ds_j (a . k_j)
//
// (the chain rule), and of the null key and value, which are parameters, dv = p do and what passes
// through its unit vector as dq does. What is read of tokens is constant: section 3.2 of
// arXiv:2203.08913v1 has no gradients into the memory. So is which tokens are read.
#ifndef TFB_MEMORY_MEMORIZING_STORE_READING_H_
#define TFB_MEMORY_MEMORIZING_STORE_READING_H_

#include <cstddef>
#include <cstdint>

#include "absl/types/span.h"
#include "core/problem.h"
#include "core/technique.h"
#include "core/tensor.h"
#include "core/workspace.h"
#include "memory/memorizing/memory_store.h"

namespace tfb::memorizing {

class StoreReading {
 public:
  StoreReading() = default;
  // `problem` is the Run's, with the store's kv_heads; the first of `given_store` tokens is token 0.
  StoreReading(const Problem& problem, const StoreShape& shape, int64_t given_store)
      : problem_(problem), shape_(shape), given_store_(given_store) {}

  // Tensors that a Run keeps.
  struct Kept {
    TensorView retrieved;  // i64 [batch, heads, query_tokens, k], as MemoryStore::Read writes it
    TensorView keys;       // f32 [batch, kv_heads, query_tokens, head_dim], of unit length
    TensorView values;     // f32, likewise
  };
  Kept LayOutKept(Workspace& workspace) const;
  size_t kept_bytes() const;
  // Keeps the keys and values of a segment that begins with token `begin` of the Run, [batch,
  // kv_heads, tokens, head_dim] of any floating dtype.
  void Keep(const Kept& kept, int64_t begin, const ConstTensorView& k, const ConstTensorView& v,
            ThreadPool* pool) const;

  // One segment. Tensors are f32 [batch, heads, tokens, head_dim].
  struct Segment {
    const Kept& kept;
    ConstTensorView given_keys, given_values;  // [batch, kv_heads, tokens, head_dim], or empty
    int64_t begin;
    MemoryStore::Parameters parameters;
    ConstTensorView q;
    ConstTensorView local;
    ConstTensorView log_sum_exp;  // f32 [batch, heads, tokens], of the layer's own scores
  };
  // Computes y. These allocate nothing.
  void Mix(const Segment& segment, const TensorView& y, const Execution& execution) const;

  // Sums over segments in float64, which are 0 at first.
  struct Sums {
    double* gate;        // [heads]
    double* scale;       // [heads]
    double* null_key;    // [kv_heads][head_dim]
    double* null_value;  // [kv_heads][head_dim]
  };
  Sums LayOutSums(Workspace& workspace) const;
  struct Gradients {
    ConstTensorView dy;
    TensorView dlocal;  // may be dy
    TensorView dq;
    TensorView dlog_sum_exp;  // of m, where the layer joins
    Sums sums;
  };
  void Backward(const Segment& segment, const Gradients& gradients,
                const Execution& execution) const;
  // Returns the workspace of either.
  size_t workspace_bytes(int threads) const;

 private:
  // The memory of a thread.
  struct Scratch {
    float* unit_query;  // [head_dim]
    float* unit_null;   // [head_dim]
    float* key;         // [head_dim], of a given token
    float* value;       // [head_dim], likewise
    double* weights;    // [k + 1], of the null key last
    double* of_memory;  // [head_dim]: o
    double* of_unit;    // [head_dim]: da
    float* y;           // [head_dim]
    float* local;       // [head_dim]
  };
  // The sums of one batch row and head.
  struct OwnSums {
    double gate, scale;
    double null_key[kMaxHeadDim], null_value[kMaxHeadDim];
  };
  struct Memory {
    Scratch* scratch;  // [threads]
    OwnSums* sums;     // [batch * heads]
  };
  Memory LayOut(int threads, Workspace& workspace) const;

  // The numbers of what a query reads.
  struct Read {
    int64_t count;  // of tokens
    double query_length;
    double null_length;  // 0: there is no null key
    double scale;        // |s|
    double log_sum_exp;
    double gate;  // g
    bool any() const { return count > 0 || null_length > 0; }
  };
  // Reads what query t of a batch row and head read, and computes p and o in the scratch.
  Read ReadAgain(const Segment& segment, int64_t b, int64_t h, int64_t t,
                 const Scratch& scratch) const;
  // Return a token's row, which is loaded to `memory` where the token is a given one.
  const float* KeyOf(const Segment& segment, int64_t b, int64_t kv_head, int64_t token,
                     float* memory) const;
  const float* ValueOf(const Segment& segment, int64_t b, int64_t kv_head, int64_t token,
                       float* memory) const;
  void QueryBackward(const Segment& segment, const Gradients& gradients, int64_t b, int64_t h,
                     int64_t t, const Scratch& scratch, OwnSums* sums) const;

  Problem problem_;
  StoreShape shape_;
  int64_t given_store_ = 0;
};

}  // namespace tfb::memorizing

#endif  // TFB_MEMORY_MEMORIZING_STORE_READING_H_
