#include "adaptive/depth_adaptive/exit_stack_definition.h"

#include <algorithm>
#include <cmath>

#include "memory/transformer_xl/stack_definition.h"

namespace tfb {
namespace {

// The layers of one sequence.
class Sequence {
 public:
  Sequence(const StackDefinition& stack, const ExitStackOptions& options, Rows x)
      : stack_(stack), options_(options), h_(std::move(x)) {}

  const Rows& h() const { return h_; }
  // What layer n, from 1, makes of the states, for all tokens.
  Rows Layer(int64_t n) const {
    const auto first_seen = [&](int64_t p) {
      const int64_t from = options_.same_length ? p + 1 : p / options_.segment * options_.segment;
      return std::max<int64_t>(from - options_.memory, 0);
    };
    const int64_t l = n - 1;
    if (options_.pre_norm) {
      const Rows g = h_.Plus(stack_.Attention(l, stack_.AttentionNorm(l, h_), first_seen));
      return g.Plus(stack_.FeedForward(l, stack_.FeedForwardNorm(l, g)));
    }
    const Rows g = stack_.AttentionNorm(l, h_.Plus(stack_.Attention(l, h_, first_seen)));
    return stack_.FeedForwardNorm(l, g.Plus(stack_.FeedForward(l, g)));
  }
  void Set(Rows h) { h_ = std::move(h); }

 private:
  const StackDefinition& stack_;
  const ExitStackOptions& options_;
  Rows h_;
};

// The exits of a tensor i32 [batch, tokens]; 0 where there is none.
int64_t ExitIn(const ConstTensorView& exits, int64_t b, int64_t t) {
  return exits.empty() ? 0 : *exits.At<int32_t>(b, t);
}

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

absl::StatusOr<NamedTensors> DefineExitStack(const Problem& problem,
                                             const ExitStackOptions& options,
                                             const NamedTensors& parameters, const Inputs& inputs,
                                             const DefinitionRequest& request,
                                             const std::function<ExitScoreOf()>& rule) {
  const int64_t tokens = problem.query_tokens, layers = options.layers;
  const ConstTensorView x = inputs.Get("x"), given = inputs.Get(kExits);
  ConstTensorView computed;
  if (request.computed != nullptr && request.computed->count(kExits) > 0) {
    computed = request.computed->at(kExits).view();
  }
  NamedTensors outputs;
  outputs["out"] = Tensor(DType::kF64, x.shape());
  outputs[kExits] = Tensor(DType::kF64, {problem.batch, tokens});
  const StackDefinition stack(ShapeOf(problem, options).sizes, parameters, options.clamp_length);
  for (int64_t b = 0; b < problem.batch; ++b) {
    const ExitScoreOf score_of = rule();
    Sequence sequence(stack, options, SequenceOf(x, b));
    std::vector<bool> left(tokens, false);
    for (int64_t n = 1; n <= layers; ++n) {
      const Rows before = sequence.h();
      Rows after = sequence.Layer(n);
      for (int64_t t = 0; t < tokens; ++t) {
        if (left[t]) std::copy_n(before[t], before.channels(), after[t]);
      }
      for (int64_t t = 0; t < tokens; ++t) {
        if (left[t]) continue;
        bool leaves = n == layers;
        if (!leaves && !given.empty()) leaves = ExitIn(given, b, t) <= n;
        if (!leaves && given.empty()) {
          const ExitScore score = score_of(n, t, after, before);
          leaves = score.value >= 0;
          if (!computed.empty() && std::abs(score.value) <= score.error) {
            leaves = ExitIn(computed, b, t) == n;
          }
        }
        if (!leaves) continue;
        left[t] = true;
        outputs[kExits].view().Set(b * tokens + t, static_cast<double>(n));
        const std::vector<double> out =
            NormOf(parameters, ExitNorm(n, layers), after[t], after.channels());
        std::copy(out.begin(), out.end(), outputs["out"].view().MutableAt<double>(b, t));
      }
      sequence.Set(std::move(after));
    }
  }
  return outputs;
}

}  // namespace tfb
