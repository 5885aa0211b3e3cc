#include "core/layers/exits/exit_stack_definition.h"

#include <algorithm>
#include <cmath>

#include "core/layers/stack/stack_definition.h"

namespace tfb::layers {
namespace {

// Returns the exit in a tensor i32 [batch, tokens]; 0 where there is none.
int64_t ExitIn(const ConstTensorView& exits, int64_t b, int64_t t) {
  return exits.empty() ? 0 : *exits.At<int32_t>(b, t);
}

// One sequence, layer by layer.
class Sequence {
 public:
  Sequence(const StackDefinition& stack, const ExitStackOptions& options, Rows x,
           const SequenceMemories& memories, const DefinitionRequest& request)
      : stack_(stack),
        options_(options),
        memories_(memories),
        request_(request),
        h_(std::move(x)),
        exits_(h_.rows(), 0) {}

  // The states before and after layer n, from 1; states of tokens that have left are copied.
  struct Step {
    Rows before;
    Rows after;
  };
  Step Advance(int64_t n) {
    memories_.Keep(n - 1, h_);
    Step step = {h_, Layer(n - 1)};
    for (int64_t t = 0; t < h_.rows(); ++t) {
      if (exits_[t] > 0) std::copy_n(step.before[t], h_.channels(), step.after[t]);
    }
    h_ = step.after;
    return step;
  }
  int64_t exit(int64_t t) const { return exits_[t]; }  // 0: still there
  void Leave(int64_t t, int64_t n) { exits_[t] = n; }

 private:
  // Computes a layer for all tokens, as in transformer_xl.
  Rows Layer(int64_t l) const {
    if (options_.pre_norm) {
      const Rows g = h_.Plus(Attention(l));
      return g.Plus(stack_.FeedForward(l, stack_.FeedForwardNorm(l, g)));
    }
    const Rows g = stack_.AttentionNorm(l, h_.Plus(Attention(l)));
    return stack_.FeedForwardNorm(l, g.Plus(stack_.FeedForward(l, g)));
  }
  Rows Attention(int64_t l) const {
    const auto begin_of_segment = [&](int64_t p) {
      return p / options_.segment * options_.segment;
    };
    const auto first_seen = [&](int64_t p) {
      const int64_t from = options_.same_length ? p + 1 : begin_of_segment(p);
      return std::max<int64_t>(options_.given_memory + from - options_.memory, 0);
    };
    const auto read = [&](const Rows& rows) {
      return options_.pre_norm ? stack_.AttentionNorm(l, rows) : rows;
    };
    const Rows given = memories_.Given(l, h_.channels());
    if (request_.stopped == nullptr) return stack_.Attention(l, read(h_), first_seen, read(given));
    Rows list = given;
    list.Append(Held(request_, h_));
    const StackDefinition::Stopped stopped = {
        read(list), [&](int64_t p) { return options_.given_memory + begin_of_segment(p); }};
    return stack_.Attention(l, read(h_), first_seen, read(given), &stopped);
  }

  const StackDefinition& stack_;
  const ExitStackOptions& options_;
  const SequenceMemories& memories_;
  const DefinitionRequest& request_;
  Rows h_;
  std::vector<int64_t> exits_;
};

}  // namespace

double StateError(DType dtype) {
  return 2e-5 + (dtype == DType::kF32 ? 0 : 5 * UnitRoundoff(dtype));
}

std::vector<double> NormOf(const NamedTensors& parameters, const std::string& name,
                           const double* row, int64_t channels) {
  std::vector<double> g(channels), b(channels);
  Rows one(1, channels);
  for (int64_t c = 0; c < channels; ++c) {
    g[c] = parameters.at(name + ".gamma").view().Get(c);
    b[c] = parameters.at(name + ".beta").view().Get(c);
    one[0][c] = row[c];
  }
  const Rows normalized = one.Normalized(g, b);
  return std::vector<double>(normalized[0], normalized[0] + channels);
}

absl::StatusOr<NamedTensors> DefineExitStack(
    const Problem& problem, const ExitStackOptions& options, const NamedTensors& parameters,
    const Inputs& inputs, const DefinitionRequest& request,
    const std::function<std::unique_ptr<DefinedRule>(int64_t b)>& rule) {
  const int64_t tokens = problem.query_tokens, layers = options.layers;
  const ConstTensorView x = inputs.Get("x"), given = inputs.Get(kExits);
  ConstTensorView computed;
  if (request.computed != nullptr && request.computed->count(kExits) > 0) {
    computed = request.computed->at(kExits).view();
  }
  // Tells whether a token that is there after layer n leaves.
  const auto leaves = [&](int64_t b, int64_t t, int64_t n, DefinedRule& of_sequence,
                          const Sequence::Step& step) {
    if (n == layers) return true;
    if (!given.empty()) return ExitIn(given, b, t) <= n;
    const ExitScore score = of_sequence.Of(n, t, step.after, step.before);
    const bool near = std::abs(score.value) <= score.error;
    return near && !computed.empty() ? ExitIn(computed, b, t) == n : score.value >= 0;
  };

  NamedTensors outputs;
  outputs["out"] = Tensor(DType::kF64, x.shape());
  outputs[kExits] = Tensor(DType::kF64, {problem.batch, tokens});
  outputs[kExitOutputs] = Tensor(DType::kF64, {problem.batch, layers, tokens, x.dim(2)});
  SequenceMemories::AddOutputs(FinalMemories(problem, options), &outputs);
  const StackDefinition stack(ShapeOf(problem, options).sizes, parameters, options.max_distance,
                              request.pool);
  for (int64_t b = 0; b < problem.batch; ++b) {
    const std::unique_ptr<DefinedRule> of_sequence = rule(b);
    const SequenceMemories memories(inputs.Get(kMemories), &outputs, b);
    Sequence sequence(stack, options, SequenceOf(x, b), memories, request);
    for (int64_t n = 1; n <= layers; ++n) {
      const Sequence::Step step = sequence.Advance(n);
      of_sequence->Read(n, step.after);
      for (int64_t t = 0; t < tokens; ++t) {
        const std::vector<double> out =
            NormOf(parameters, ExitNorm(n, layers), step.after[t], step.after.channels());
        std::copy(out.begin(), out.end(),
                  outputs[kExitOutputs].view().MutableAt<double>(b, n - 1, t));
        if (sequence.exit(t) > 0 || !leaves(b, t, n, *of_sequence, step)) continue;
        sequence.Leave(t, n);
        *outputs[kExits].view().MutableAt<double>(b, t) = static_cast<double>(n);
        std::copy(out.begin(), out.end(), outputs["out"].view().MutableAt<double>(b, t));
      }
    }
  }
  return outputs;
}

}  // namespace tfb::layers
