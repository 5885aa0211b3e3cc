// A memorizing layer's reading of its store, once more and with its gradients, on every device.
//
// A Run keeps which tokens each query read, and the keys, of unit length, and the values of its
// tokens and of those that it is given. With a query's unit vector a = q / |q|, scale s, weights p_j
// over what it reads (the null key among it) and local the result of the layer's own attention:
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

#include "absl/status/status.h"
#include "core/cuda/device_array.h"
#include "core/problem.h"
#include "core/technique.h"
#include "core/tensor.h"
#include "core/workspace.h"
#include "memory/memorizing/memorizing_functors.h"
#include "memory/memorizing/memory_store.h"

namespace tfb::memorizing {

// Tensors are in memory of the device. All calls but SetUp allocate nothing, and on CUDA they enqueue on
// the stream. Numbers have one owner each, which adds in a fixed order, so that results have the
// same bits for any number of threads and in every run. Sums are float64; a . k_j, p_j, dy . v_j and
// ds_j are stored in fp32.
class StoreReading {
 public:
  StoreReading() = default;
  // `problem` is the Run's, with the store's kv_heads. Of `given_store` tokens before the Run, the first
  // of which is token 0, the store is given the newest `given_rows`.
  StoreReading(Device device, const Problem& problem, const StoreShape& shape, int64_t given_store,
               int64_t given_rows)
      : device_(device),
        problem_(problem),
        shape_(shape),
        given_store_(given_store),
        given_rows_(given_rows) {}

  // Copies the parameters to the device.
  absl::Status SetUp(const MemoryStore::Parameters& parameters);

  // Tensors that a Run keeps.
  struct Kept {
    TensorView retrieved;  // i64 [batch, heads, query_tokens, k], as MemoryStore::Read writes it
    TensorView keys;  // f32 [batch, kv_heads, given_rows + query_tokens, head_dim], of unit length
    TensorView values;  // f32, likewise
  };
  Kept LayOutKept(Workspace& workspace) const;
  size_t kept_bytes() const;
  // Keeps the keys and values that the store was given, before the Run's first segment is appended.
  absl::Status KeepGiven(const Kept& kept, const MemoryStore& store,
                         const Execution& execution) const;
  // Keeps the keys and values of a segment that begins with token `begin` of the Run, [batch,
  // kv_heads, tokens, head_dim] of any floating dtype.
  absl::Status Keep(const Kept& kept, int64_t begin, const ConstTensorView& k,
                    const ConstTensorView& v, const Execution& execution) const;
  // Copies tokens that were retrieved, i64 [batch, heads, tokens, k].
  absl::Status CopyRetrieved(const TensorView& from, const TensorView& to,
                             const Execution& execution) const;

  // One segment. Tensors are f32 [batch, heads, tokens, head_dim], with channels side by side.
  struct Segment {
    const Kept& kept;
    int64_t begin;
    ConstTensorView q;
    ConstTensorView local;
    ConstTensorView log_sum_exp;  // f32 [batch, heads, tokens], of the layer's own scores
  };
  // Computes y.
  absl::Status Mix(const Segment& segment, const TensorView& y, const Execution& execution) const;

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
    TensorView dlog_sum_exp;  // of m, contiguous, where the layer joins
    Sums sums;
  };
  absl::Status Backward(const Segment& segment, const Gradients& gradients,
                        const Execution& execution) const;
  // Returns the workspace of either.
  size_t workspace_bytes() const;

 private:
  int64_t rows(int64_t tokens) const { return problem_.batch * problem_.query_heads * tokens; }
  // Returns what the queries read, with numbers in the workspace that are not yet computed.
  StoreReads LayOut(int64_t tokens, bool has_gradients, Workspace& workspace) const;
  StoreReads ReadsOf(const Segment& segment, const ConstTensorView& dy, Workspace& workspace) const;
  absl::Status Weigh(const StoreReads& reads, const TensorView& of_log_sum_exp,
                     const Execution& execution) const;

  Device device_ = Device::kCpu;
  Problem problem_;
  StoreShape shape_;
  int64_t given_store_ = 0;
  int64_t given_rows_ = 0;
  // The null keys are of unit length, and the lengths what they were.
  DeviceArray<float> gates_, scales_, null_keys_, null_values_, null_lengths_;
};

}  // namespace tfb::memorizing

#endif  // TFB_MEMORY_MEMORIZING_STORE_READING_H_
