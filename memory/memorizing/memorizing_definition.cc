#include "memory/memorizing/memorizing_definition.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "core/definition.h"
#include "core/dtype.h"
#include "core/layers/stack/stack_definition.h"

namespace tfb::memorizing {
namespace {

using layers::Rows;

// Returns the error that a score q . k of unit vectors may have in an implementation, which
// computes them from hidden states whose own errors are of this size: see the bounds of
// harness/judge/errors.h.
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
  // `retrieved` and those of `computed`, unless null, are [batch, heads, tokens, k].
  MemorizingDefinition(const layers::StackDefinition& stack, const MemorizingOptions& options,
                       DType dtype, const Inputs& inputs, const DefinitionRequest& request,
                       NamedTensors* outputs)
      : stack_(stack),
        options_(options),
        tolerance_(ScoreTolerance(dtype)),
        inputs_(inputs),
        request_(request),
        outputs_(outputs) {
    if (options.store > 0) retrieved_ = outputs->at("retrieved").view();
    if (request.computed != nullptr && request.computed->count("retrieved") > 0) {
      computed_ = request.computed->at("retrieved").view();
    }
  }

  // Returns the first key that token p sees in its own attention, counted from the first given one.
  int64_t FirstSeen(int64_t p) const {
    const int64_t from = options_.same_length ? p + 1 : BeginOfSegment(p);
    return std::max<int64_t>(options_.given_memory + from - options_.memory, 0);
  }

  // Returns the end of the tokens before p's segment, counted likewise.
  int64_t EndOfMemory(int64_t p) const { return options_.given_memory + BeginOfSegment(p); }

  // Computes the attention of layer n, which has the store, in batch row b, with its W_o; `earlier`
  // are the rows of the given memory, and `stopped` is as in StackDefinition::Attention.
  Rows Attention(int64_t n, int64_t b, const Rows& x, const Rows& earlier,
                 const layers::StackDefinition::Stopped* stopped) const {
    const int64_t e = stack_.sizes().head_dim, heads = stack_.sizes().heads;
    Rows list = earlier;
    list.Append(x);
    const Rows q = stack_.Project(n, "w_q", x), k = ForHeads(stack_.Project(n, "w_k", list)),
               v = ForHeads(stack_.Project(n, "w_v", list));
    Rows own(x.rows(), heads);  // log-sum-exps of the layer's own scores
    layers::StackDefinition::Keys keys = {k, v, [this](int64_t p) { return FirstSeen(p); }};
    layers::StackDefinition::Keys of_stopped = {Rows(0, 0), Rows(0, 0), nullptr};
    if (stopped != nullptr) {
      of_stopped.k = ForHeads(stack_.Project(n, "w_k", stopped->rows));
      of_stopped.v = ForHeads(stack_.Project(n, "w_v", stopped->rows));
      keys.stopped = &of_stopped;
      keys.stopped_end = stopped->end;
    }
    Rows y = stack_.Context(n, q, keys, nullptr, &own);
    for (int64_t h = 0; h < heads && options_.store > 0; ++h) {
      const Store store = StoreOf(n, h);
      const Rows unit_q = UnitRows(q, h * e, e);
      Stored stored =
          StoredOf(b, h, k.Sub(earlier.rows(), x.rows()), v.Sub(earlier.rows(), x.rows()));
      stored.keys = layers::Held(request_, std::move(stored.keys));
      stored.values = layers::Held(request_, std::move(stored.values));
      ForEachOf(stack_.pool(), x.rows(), [&](int64_t p) {
        const std::vector<Candidate> taken = Retrieve(unit_q[p], stored, p, ComputedAt(b, h, p));
        int64_t* tokens = retrieved_.MutableAt<int64_t>(b, h, p);
        std::fill_n(tokens, options_.retrieved(), -1);
        for (size_t i = 0; i < taken.size(); ++i) tokens[i] = taken[i].token;
      });
      ChooseRetrieved(b, h);
      ForEachOf(stack_.pool(), x.rows(), [&](int64_t p) {
        Read(store, unit_q[p], TakenAt(b, h, p, unit_q[p], stored), stored, own[p][h],
             y[p] + h * e);
      });
      if (h == 0 || !options_.one_key_value_head) Keep(n, b, h, stored);
    }
    return stack_.Project(n, "w_o", y);
  }

 private:
  // One head's keys, of unit length, and values: given ones and all of this run. They are those of
  // the tokens first, first + 1, ... .
  struct Stored {
    int64_t first;
    Rows keys, values;
    std::vector<double> lengths;  // of the keys before they were divided by them
  };
  Stored StoredOf(int64_t b, int64_t h, const Rows& k, const Rows& v) const {
    const int64_t e = stack_.sizes().head_dim;
    const int64_t of_head = options_.one_key_value_head ? 0 : h;
    Rows keys = GivenRows("store_keys", b, of_head), values = GivenRows("store_values", b, of_head);
    Stored stored = {options_.given_store - keys.rows(), Rows(0, e), Rows(0, e), {}};
    keys.Append(Channels(k, h * e, e));
    values.Append(Channels(v, h * e, e));
    stored.keys = UnitRows(keys, 0, e);
    stored.values = values;
    for (int64_t t = 0; t < keys.rows(); ++t) {
      stored.lengths.push_back(std::max(std::sqrt(Dot(keys[t], keys[t], e)), 1e-12));
    }
    return stored;
  }
  Rows GivenRows(const char* name, int64_t b, int64_t h) const {
    const ConstTensorView given = inputs_.Get(name);
    const int64_t e = stack_.sizes().head_dim;
    Rows rows(given.empty() ? 0 : given.dim(2), e);
    for (int64_t t = 0; t < rows.rows(); ++t) {
      for (int64_t c = 0; c < e; ++c) rows[t][c] = given.Get(given.Offset(b, h, t, c));
    }
    return rows;
  }
  static Rows Channels(const Rows& x, int64_t first, int64_t count) {
    Rows part(x.rows(), count);
    for (int64_t t = 0; t < x.rows(); ++t) std::copy_n(x[t] + first, count, part[t]);
    return part;
  }

  // Makes the tokens that a head retrieves those of the derivatives' point, where some are taken.
  void ChooseRetrieved(int64_t b, int64_t h) const {
    if (request_.stopped == nullptr) return;
    const int64_t count = retrieved_.dim(2) * retrieved_.dim(3);
    int64_t* const tokens = retrieved_.MutableAt<int64_t>(b, h);
    std::vector<double> choice(tokens, tokens + count);
    request_.stopped->Choose(absl::MakeSpan(choice));
    for (int64_t n = 0; n < count; ++n) tokens[n] = static_cast<int64_t>(choice[n]);
  }
  // Returns what token p retrieves, with the scores.
  std::vector<Candidate> TakenAt(int64_t b, int64_t h, int64_t p, const double* q,
                                 const Stored& stored) const {
    std::vector<Candidate> taken;
    const int64_t* tokens = retrieved_.At<int64_t>(b, h, p);
    for (int64_t n = 0; n < options_.retrieved() && tokens[n] >= 0; ++n) {
      const double* key = stored.keys[tokens[n] - stored.first];
      taken.push_back({tokens[n], Dot(q, key, stored.keys.channels())});
    }
    return taken;
  }

  // Stores what layer n leaves in the store, and the units of errors: the input of layer n, from 0,
  // has passed n layers, whose errors add in quadrature, and the bound of errors is that of one. A
  // key's error, that of the largest, grows as its length is made 1.
  void Keep(int64_t n, int64_t b, int64_t h, const Stored& stored) const {
    const int64_t e = stack_.sizes().head_dim;
    const auto found = outputs_->find("store_keys");
    if (found == outputs_->end()) return;
    const int64_t kept = found->second.dim(2), begin = stored.keys.rows() - kept;
    const double layers = std::sqrt(static_cast<double>(n));
    double largest = 0;
    for (const double length : stored.lengths) largest = std::max(largest, length);
    const auto row = [&](const char* name, int64_t t) {
      return outputs_->at(name).view().MutableAt<double>(b, h, t);
    };
    for (int64_t t = 0; t < kept; ++t) {
      std::copy_n(stored.keys[begin + t], e, row("store_keys", t));
      std::copy_n(stored.values[begin + t], e, row("store_values", t));
      std::fill_n(row("store_keys.scale", t), e, layers * largest / stored.lengths[begin + t]);
      for (int64_t c = 0; c < e; ++c) {
        row("store_values.scale", t)[c] = layers * std::abs(stored.values[begin + t][c]);
      }
    }
  }

  // One head's parameters.
  struct Store {
    double gate = 0;
    double scale = 0;
    std::vector<double> null_key, null_value;  // empty: none; the key has unit length
  };
  Store StoreOf(int64_t n, int64_t h) const {
    const std::string prefix = layers::LayerPrefix(n) + "memory.";
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
            const Stored& stored, double own, double* y) const {
    const int64_t e = stack_.sizes().head_dim;
    std::vector<double> scores;
    std::vector<const double*> values;
    for (const Candidate& one : taken) {
      scores.push_back(store.scale * one.score);
      values.push_back(stored.values[one.token - stored.first]);
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
  std::vector<Candidate> Retrieve(const double* q, const Stored& stored, int64_t p,
                                  const std::vector<int64_t>& computed) const {
    const int64_t before = options_.given_store + BeginOfSegment(p);
    const int64_t end = std::max<int64_t>(before - options_.lag(), stored.first);
    const bool bucketed = options_.selection == MemorizingOptions::Selection::kBucketed;
    const int64_t k = options_.retrieved(), slots = options_.store + options_.lag();
    std::vector<std::vector<Candidate>> buckets(bucketed ? k : 1);
    const int64_t begin = std::max<int64_t>(end - options_.store, stored.first);
    const bool reads_all = options_.lag() == 0 && end - begin <= k;
    for (int64_t j = begin; j < end; ++j) {
      const double score = Dot(q, stored.keys[j - stored.first], stored.keys.channels());
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

  const layers::StackDefinition& stack_;
  const MemorizingOptions& options_;
  double tolerance_;
  const Inputs& inputs_;
  const DefinitionRequest& request_;
  ConstTensorView computed_;  // empty where there is none
  TensorView retrieved_;
  NamedTensors* outputs_;
};

// Adds the outputs, without values.
void AddOutputs(const Problem& problem, const MemorizingOptions& options, const Shape& hidden,
                NamedTensors* outputs) {
  const auto add = [&](const std::string& name, const Shape& shape) {
    if (shape[2] > 0) (*outputs)[name] = Tensor(DType::kF64, shape);
  };
  add("out", hidden);
  add("context", hidden);
  const int64_t memories = std::min(options.memory, options.given_memory + problem.query_tokens);
  for (const char* name : {"memories", "memories.scale"}) {
    add(name, {problem.batch, options.layers, memories, problem.model_dim()});
  }
  if (options.store == 0) return;
  (*outputs)["retrieved"] = Tensor(
      DType::kI64, {problem.batch, problem.query_heads, problem.query_tokens, options.retrieved()});
  const int64_t heads = options.one_key_value_head ? 1 : problem.query_heads;
  const int64_t kept =
      std::min(options.store + options.lag(), options.given_store + problem.query_tokens);
  for (const char* name :
       {"store_keys", "store_keys.scale", "store_values", "store_values.scale"}) {
    add(name, {problem.batch, heads, kept, problem.head_dim});
  }
}

}  // namespace

NamedTensors DefineMemorizing(const Problem& problem, const MemorizingOptions& options,
                              const layers::StackSizes& sizes, const NamedTensors& parameters,
                              const Inputs& inputs, const DefinitionRequest& request) {
  const ConstTensorView x = inputs.Get("x"), memories = inputs.Get("memories");
  NamedTensors outputs;
  AddOutputs(problem, options, x.shape(), &outputs);
  const layers::StackDefinition stack(sizes, parameters, options.max_distance, request.pool);
  const MemorizingDefinition definition(stack, options, problem.dtype, inputs, request, &outputs);
  for (int64_t b = 0; b < problem.batch; ++b) {
    const layers::SequenceMemories memory(memories, &outputs, b);
    const auto attention = [&](int64_t n, const Rows& h, const Rows& input) {
      memory.Keep(n, h);
      const auto read = [&](const Rows& rows) {
        return options.pre_norm ? stack.AttentionNorm(n, rows) : rows;
      };
      Rows list = memory.Given(n, h.channels());
      const Rows given = read(list);
      list.Append(layers::Held(request, h));
      const layers::StackDefinition::Stopped held = {
          read(list), [&](int64_t p) { return definition.EndOfMemory(p); }};
      const layers::StackDefinition::Stopped* stopped =
          request.stopped == nullptr ? nullptr : &held;
      if (n == options.layer_with_store()) {
        return definition.Attention(n, b, input, given, stopped);
      }
      return stack.Attention(
          n, input, [&](int64_t p) { return definition.FirstSeen(p); }, given, stopped);
    };
    Rows context(0, problem.model_dim());
    const Rows out = stack.Forward(layers::SequenceOf(x, b), options.pre_norm, attention, &context);
    layers::StoreSequence(out, b, outputs["out"].view());
    layers::StoreSequence(context, b, outputs["context"].view());
  }
  return outputs;
}

}  // namespace tfb::memorizing
