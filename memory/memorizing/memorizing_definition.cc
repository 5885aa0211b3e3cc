#include "memory/memorizing/memorizing_definition.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "core/definition.h"
#include "core/dtype.h"
#include "memory/transformer_xl/stack_definition.h"

namespace tfb::memorizing {
namespace {

using transformer_xl::Rows;

// Returns the error that a score q . k of unit vectors may have in an implementation, which
// computes them from hidden states whose own errors are of this size: see the bounds of
// harness/errors.h.
double ScoreTolerance(DType dtype) { return dtype == DType::kF32 ? 2e-5 : 5 * UnitRoundoff(dtype); }

// A token with its score; a query takes the best ones.
struct Candidate {
  int64_t token;
  double score;
};

// Returns the `count` best of the candidates, the lower token first among equal scores; or those of
// `computed` that are candidates, if they are the best within the tolerance, and among equal scores
// the first.
std::vector<Candidate> Best(std::vector<Candidate> candidates, int64_t count,
                            const std::vector<int64_t>& computed, double tolerance) {
  if (static_cast<int64_t>(candidates.size()) <= count) return candidates;
  std::stable_sort(candidates.begin(), candidates.end(),
                   [](const Candidate& a, const Candidate& b) { return a.score > b.score; });
  const double last = candidates[count - 1].score;
  std::vector<Candidate> taken;
  double passed_over = std::nan("");
  bool may_take = true;
  for (const Candidate& candidate : candidates) {
    const bool takes =
        std::find(computed.begin(), computed.end(), candidate.token) != computed.end();
    if (takes) {
      taken.push_back(candidate);
      may_take = may_take && candidate.score >= last - tolerance && candidate.score != passed_over;
    } else {
      passed_over = candidate.score;
      may_take = may_take && candidate.score <= last + tolerance;
    }
  }
  if (may_take && static_cast<int64_t>(taken.size()) == count) return taken;
  candidates.resize(count);
  return candidates;
}

class MemorizingDefinition {
 public:
  // `computed` and `retrieved` are [batch, heads, tokens, k], the former empty where there is none.
  MemorizingDefinition(const transformer_xl::StackDefinition& stack,
                       const MemorizingOptions& options, DType dtype,
                       const ConstTensorView& computed, const TensorView& retrieved)
      : stack_(stack),
        options_(options),
        tolerance_(ScoreTolerance(dtype)),
        computed_(computed),
        retrieved_(retrieved) {}

  // Returns the first key that token p sees in its own attention.
  int64_t FirstSeen(int64_t p) const {
    const int64_t from = options_.same_length ? p + 1 : BeginOfSegment(p);
    return std::max<int64_t>(from - options_.memory, 0);
  }

  // Computes the attention of layer n, which has the store, in batch row b, with its W_o.
  Rows Attention(int64_t n, int64_t b, const Rows& x) const {
    const int64_t e = stack_.sizes().head_dim, heads = stack_.sizes().heads;
    const Rows q = stack_.Project(n, "w_q", x), k = ForHeads(stack_.Project(n, "w_k", x)),
               v = ForHeads(stack_.Project(n, "w_v", x));
    Rows own(x.rows(), heads);  // log-sum-exps of the layer's own scores
    Rows y =
        stack_.Context(n, q, {k, v, [this](int64_t p) { return FirstSeen(p); }}, nullptr, &own);
    for (int64_t h = 0; h < heads && options_.store > 0; ++h) {
      const Store store = StoreOf(n, h);
      const Rows unit_q = UnitRows(q, h * e, e), unit_k = UnitRows(k, h * e, e);
      ForEachOf(stack_.pool(), x.rows(), [&](int64_t p) {
        const std::vector<Candidate> taken = Retrieve(unit_q[p], unit_k, p, ComputedAt(b, h, p));
        int64_t* tokens = retrieved_.MutableAt<int64_t>(b, h, p);
        std::fill_n(tokens, options_.retrieved(), -1);
        for (size_t i = 0; i < taken.size(); ++i) tokens[i] = taken[i].token;
        Read(store, unit_q[p], taken, v, h * e, own[p][h], y[p] + h * e);
      });
    }
    return stack_.Project(n, "w_o", y);
  }

 private:
  // One head's parameters.
  struct Store {
    double gate = 0;
    double scale = 0;
    std::vector<double> null_key, null_value;  // empty: none; the key has unit length
  };
  Store StoreOf(int64_t n, int64_t h) const {
    const std::string prefix = transformer_xl::LayerPrefix(n) + "memory.";
    const int64_t e = stack_.sizes().head_dim;
    Store store;
    if (!options_.joins()) store.gate = stack_.Vector(prefix + "gate")[h];
    store.scale = std::abs(stack_.Vector(prefix + "scale")[h]);
    if (!options_.null_key) return store;
    const Rows keys = stack_.Matrix(prefix + "null_key");
    const Rows values = stack_.Matrix(prefix + "null_value");
    const int64_t row = options_.one_key_value_head ? 0 : h;
    const Rows unit = UnitRows(keys, 0, e);
    store.null_key.assign(unit[row], unit[row] + e);
    store.null_value.assign(values[row], values[row] + e);
    return store;
  }

  // Sets y, the head's local result, to y_p: the scores of what is retrieved, one after the other,
  // and their values.
  void Read(const Store& store, const double* unit_q, const std::vector<Candidate>& taken,
            const Rows& v, int64_t first, double own, double* y) const {
    const int64_t e = stack_.sizes().head_dim;
    std::vector<double> scores;
    std::vector<const double*> values;
    for (const Candidate& one : taken) {
      scores.push_back(store.scale * one.score);
      values.push_back(v[one.token] + first);
    }
    if (!store.null_key.empty()) {
      scores.push_back(store.scale * Dot(unit_q, store.null_key.data(), e));
      values.push_back(store.null_value.data());
    }
    if (scores.empty()) return;
    const double largest = *std::max_element(scores.begin(), scores.end());
    double sum = 0;
    std::vector<double> o(e, 0);
    for (size_t i = 0; i < scores.size(); ++i) {
      const double weight = std::exp(scores[i] - largest);
      sum += weight;
      AddTimes(weight, values[i], e, o.data());
    }
    // In one softmax the two sums' weights are in the ratio of exp of their log-sum-exps.
    const double logit = options_.joins() ? largest + std::log(sum) - own : store.gate;
    const double g = 1 / (1 + std::exp(-logit));
    for (int64_t c = 0; c < e; ++c) y[c] = g * o[c] / sum + (1 - g) * y[c];
  }

  // Returns the keys or values of all heads, which are copies where there is one.
  Rows ForHeads(const Rows& x) const {
    if (!options_.one_key_value_head) return x;
    const int64_t e = x.channels();
    Rows all(x.rows(), stack_.sizes().width());
    for (int64_t t = 0; t < x.rows(); ++t) {
      for (int64_t c = 0; c < all.channels(); ++c) all[t][c] = x[t][c % e];
    }
    return all;
  }

  int64_t BeginOfSegment(int64_t p) const { return p / options_.segment * options_.segment; }

  // Returns one head's channels, each row divided by its norm.
  static Rows UnitRows(const Rows& x, int64_t first, int64_t channels) {
    Rows unit(x.rows(), channels);
    for (int64_t t = 0; t < x.rows(); ++t) {
      const double* row = x[t] + first;
      const double norm = std::max(std::sqrt(Dot(row, row, channels)), 1e-12);
      for (int64_t c = 0; c < channels; ++c) unit[t][c] = row[c] / norm;
    }
    return unit;
  }

  // Returns the best of all or of each bucket, ordered by their tokens.
  std::vector<Candidate> Retrieve(const double* q, const Rows& keys, int64_t p,
                                  const std::vector<int64_t>& computed) const {
    const int64_t end = std::max<int64_t>(BeginOfSegment(p) - options_.lag(), 0);
    const bool bucketed = options_.selection == MemorizingOptions::Selection::kBucketed;
    const int64_t k = options_.retrieved(), slots = options_.store + options_.lag();
    std::vector<std::vector<Candidate>> buckets(bucketed ? k : 1);
    const int64_t begin = std::max<int64_t>(end - options_.store, 0);
    const bool reads_all = options_.lag() == 0 && end - begin <= k;
    for (int64_t j = begin; j < end; ++j) {
      const double score = Dot(q, keys[j], keys.channels());
      if (std::isnan(score) && !reads_all) continue;
      buckets[bucketed ? j % slots % k : 0].push_back({j, score});
    }
    std::vector<Candidate> taken;
    for (std::vector<Candidate>& bucket : buckets) {
      const std::vector<Candidate> best =
          Best(std::move(bucket), bucketed ? 1 : k, computed, tolerance_);
      taken.insert(taken.end(), best.begin(), best.end());
    }
    std::sort(taken.begin(), taken.end(),
              [](const Candidate& a, const Candidate& b) { return a.token < b.token; });
    return taken;
  }

  std::vector<int64_t> ComputedAt(int64_t b, int64_t h, int64_t p) const {
    if (computed_.empty()) return {};
    const int64_t* begin = computed_.At<int64_t>(b, h, p);
    return std::vector<int64_t>(begin, begin + options_.retrieved());
  }

  const transformer_xl::StackDefinition& stack_;
  const MemorizingOptions& options_;
  double tolerance_;
  ConstTensorView computed_;
  TensorView retrieved_;
};

}  // namespace

NamedTensors DefineMemorizing(const Problem& problem, const MemorizingOptions& options,
                              const transformer_xl::StackSizes& sizes,
                              const NamedTensors& parameters, const ConstTensorView& x,
                              const DefinitionRequest& request) {
  const NamedTensors* computed = request.computed;
  NamedTensors outputs;
  for (const char* name : {"out", "context"}) outputs[name] = Tensor(DType::kF64, x.shape());
  ConstTensorView wanted;
  TensorView retrieved;
  if (options.store > 0) {
    outputs["retrieved"] = Tensor(DType::kI64, {problem.batch, problem.query_heads,
                                                problem.query_tokens, options.retrieved()});
    retrieved = outputs["retrieved"].view();
    if (computed != nullptr && computed->count("retrieved") > 0) {
      wanted = computed->at("retrieved").view();
    }
  }
  const transformer_xl::StackDefinition stack(sizes, parameters, options.max_distance,
                                              request.pool);
  const MemorizingDefinition definition(stack, options, problem.dtype, wanted, retrieved);
  for (int64_t b = 0; b < problem.batch; ++b) {
    const auto attention = [&](int64_t n, const Rows&, const Rows& input) {
      if (n == options.layer_with_store()) {
        return definition.Attention(n, b, input);
      }
      return stack.Attention(n, input, [&](int64_t p) { return definition.FirstSeen(p); });
    };
    Rows context(0, problem.model_dim());
    const Rows out =
        stack.Forward(transformer_xl::SequenceOf(x, b), options.pre_norm, attention, &context);
    transformer_xl::StoreSequence(out, b, outputs["out"].view());
    transformer_xl::StoreSequence(context, b, outputs["context"].view());
  }
  return outputs;
}

}  // namespace tfb::memorizing
