// The stack of memory/transformer_xl/transformer_xl.h in float64, for one sequence. The definitions
// of techniques derived from it share it. These are plain loops in the order of the formulas.
#ifndef TFB_CORE_LAYERS_STACK_STACK_DEFINITION_H_
#define TFB_CORE_LAYERS_STACK_STACK_DEFINITION_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "core/layers/double_rows.h"
#include "core/layers/stack/stack_sizes.h"
#include "core/technique.h"
#include "core/tensor.h"

namespace tfb::layers {

class StackDefinition {
 public:
  // `max_distance` 0: distances are not clamped. The parameters have been checked, and outlive this.
  // `pool`: see DefinitionRequest.
  StackDefinition(const StackSizes& sizes, const NamedTensors& parameters, int64_t max_distance,
                  ThreadPool* pool)
      : sizes_(sizes), parameters_(parameters), max_distance_(max_distance), pool_(pool) {}

  // ---- The formulas of layer n ----

  Rows Matrix(const std::string& name) const { return Rows(parameters_.at(name).view()); }
  std::vector<double> Vector(const std::string& name) const;
  Rows AttentionNorm(int64_t n, const Rows& x) const;
  Rows FeedForwardNorm(int64_t n, const Rows& x) const;
  Rows FeedForward(int64_t n, const Rows& x) const;
  // Normalises what the last layer writes, where the stack has a norm for it.
  Rows FinalNorm(const Rows& h) const;
  Rows Project(int64_t n, const std::string& matrix, const Rows& x) const {  // "w_q"
    return x.Times(Matrix(LayerPrefix(n) + matrix), pool_);
  }

  // Rows through which no gradient passes to what they were made of, in the place of a list's rows
  // before end(p) for query p.
  struct Stopped {
    Rows rows;
    std::function<int64_t(int64_t p)> end;
  };
  // The keys of a list, of which the queries are the last: query p is key p + first_query() and
  // sees the keys first_seen(p), ..., p + first_query().
  struct Keys {
    Rows k;
    Rows v;
    std::function<int64_t(int64_t p)> first_seen;
    // The same numbers for the keys before stopped_end(p), where derivatives are taken; or null.
    const Keys* stopped = nullptr;
    std::function<int64_t(int64_t p)> stopped_end = nullptr;
  };
  // Returns concat_heads(sum_j softmax_j(s_pj) v_j), before W_o: positions are places in the list
  // of keys. `received`, if not null, becomes each key's weight, summed over queries and heads, and
  // `log_sum_exp`, [queries, heads], that of the scores.
  Rows Context(int64_t n, const Rows& q, const Keys& keys, std::vector<double>* received = nullptr,
               Rows* log_sum_exp = nullptr) const;
  // Returns the attention whose queries come from x, and whose keys come from `earlier` rows and x,
  // or from `stopped`, unless that is null.
  Rows Attention(int64_t n, const Rows& x, const std::function<int64_t(int64_t p)>& first_seen,
                 const Rows& earlier, const Stopped* stopped = nullptr) const;
  Rows Attention(int64_t n, const Rows& x,
                 const std::function<int64_t(int64_t p)>& first_seen) const {
    return Attention(n, x, first_seen, Rows(0, x.channels()));
  }

  // ---- All layers ----

  // attention(n, h, x) returns the attention with its W_o, for the input x, which is the state h or
  // its normalisation.
  using AttentionOf = std::function<Rows(int64_t n, const Rows& h, const Rows& x)>;
  // `context`, if not null, becomes the input of the last feed-forward network.
  Rows Forward(const Rows& x, bool pre_norm, const AttentionOf& attention,
               Rows* context = nullptr) const;

  const StackSizes& sizes() const { return sizes_; }
  ThreadPool* pool() const { return pool_; }

 private:
  Rows Sinusoids(int64_t distances) const;  // Returns r_d, [distances, model_dim].
  // Returns r_d W_r, or the learned vectors of layer n, [distances, model_dim].
  Rows KeysOfDistances(int64_t n, int64_t distances) const;
  double SpanWeight(int64_t n, int64_t h, int64_t distance) const;

  StackSizes sizes_;
  const NamedTensors& parameters_;
  int64_t max_distance_;
  ThreadPool* pool_;
};

// Returns a copy of the rows that a request's derivatives hold constant (StoppedValues).
Rows Held(const DefinitionRequest& request, Rows rows);

// The memories of one sequence: those that its layers are given, and those that they leave.
class SequenceMemories {
 public:
  // Adds the output memories to `outputs`, unless `specs` has none, and memories.scale: the input of
  // layer n, from 0, has passed n layers, whose errors add in quadrature, and the bound of errors is
  // that of one layer. So a state counts as sqrt(n) times as large.
  static void AddOutputs(const std::vector<TensorSpec>& specs, NamedTensors* outputs);

  // `given` [batch, layers, tokens, model_dim] may be empty.
  SequenceMemories(const ConstTensorView& given, NamedTensors* outputs, int64_t b)
      : given_(given), outputs_(outputs), b_(b) {}

  Rows Given(int64_t n, int64_t channels) const;
  // Stores what layer n leaves: the last of the rows that it was given and of h, its input.
  void Keep(int64_t n, const Rows& h) const;

 private:
  ConstTensorView given_;
  NamedTensors* outputs_;
  int64_t b_;
};

// Convert the tokens of one batch row of x [batch, tokens, model_dim] to rows, and back into f64.
Rows SequenceOf(const ConstTensorView& x, int64_t b);
void StoreSequence(const Rows& rows, int64_t b, const TensorView& to);

}  // namespace tfb::layers

#endif  // TFB_CORE_LAYERS_STACK_STACK_DEFINITION_H_
