// The depth-adaptive Transformer: small classifiers decide after which layer a token, or a
// sequence, leaves the stack.
//
//   out_t = LN_n(h^n_t),  n = exit_t                 logits of the next token: output out_t
//
// in the stack of core/layers/exits/exit_stack.h, where exit_t is, for layers 1 .. N,
//
//   sequence      argmax_n softmax(W s + b)_n        s the mean of h^1 over the segment before; N in
//                                                    the first segment
//   multinomial   argmax_n softmax(W h^1_t + b)_n
//   geometric     the first n < N with chi^n_t = sigmoid(w_n . h^n_t + b_n) > 1/2, else N: the mode of
//                 q_t(n) = chi^n_t prod_(n' < n) (1 - chi^n'_t) where chi are far from 1/2
//   confidence    the first n < N with max_v softmax(output LN_n(h^n_t))_v >= tau_n, else N
//   fixed         `exit`
//
// Ties go to the smallest n. The classifiers were trained to predict oracles, q*, of the frozen
// model (oracle.h). The options `oracle` and `level`, the penalty on later exits, choose the
// oracle: level 0 leaves earliest. Confidence is not learned; //adaptive/depth_adaptive:evaluate
// finds its thresholds tau by a search on held-out text (thresholds.h).
//
// Source: Elbayad, Gu, Grave, Auli 2020, "Depth-adaptive Transformer", arXiv:1910.10073v4, section
// 3. There s is the mean of the encoder's output; this decoder has no encoder, so the previous
// segment replaces it. Training is the aligned one, with classifiers on a frozen model. The source
// leaves open how the geometric-like classifier decides: the first chi above 1/2, as the authors'
// code does.
//
// The optional output exit_probabilities has q_t(n) for every n: the softmax of sequence, with 1 at
// N in the first segment, or of multinomial; and of geometric, where h^n_t is the copied state
// after a token has left,
//
//   q_t(n) = chi^n_t prod_(n' < n) (1 - chi^n'_t) for n < N,  q_t(N) = prod_(n' < N) (1 - chi^n'_t)
//
// So the probabilities of a token sum to 1. They are the classifier's where exits are given, too;
// confidence and fixed have none. They cost nothing where the output is left out. In a backward pass
// their gradient reaches the classifier, and the states that it reads, but for sequence those of the
// segment before, at which gradients stop. The loss of a classifier is the cross-entropy of its
// probabilities against an oracle's exit (the source's section 3.2); that of the exits themselves is
// in exit_stack.h.
//
// Cost of a decision: multinomial and sequence 2 model_dim N FLOPs once a token or segment, geometric
// 2 model_dim after each layer, confidence 2 model_dim vocabulary.
#ifndef TFB_ADAPTIVE_DEPTH_ADAPTIVE_DEPTH_ADAPTIVE_H_
#define TFB_ADAPTIVE_DEPTH_ADAPTIVE_DEPTH_ADAPTIVE_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "core/layers/exits/exit_stack.h"
#include "core/technique.h"

namespace tfb::depth_adaptive {

// The name of the optional output of probabilities.
inline constexpr char kExitProbabilities[] = "exit_probabilities";

struct DepthAdaptiveOptions : layers::ExitStackOptions {
  static constexpr int64_t kNeverReached = 1001;
  enum class Classifier { kSequence, kMultinomial, kGeometric, kConfidence, kFixed };
  enum class Oracle { kLikelihood, kCorrectness };

  Classifier classifier = Classifier::kGeometric;
  Oracle oracle = Oracle::kLikelihood;
  int64_t level = 2;
  int64_t exit = 1;
  std::vector<int64_t> thresholds = {900};
  int64_t vocabulary = 256;

  void Describe(OptionBinder& bind) {
    bind.Choice("classifier", &classifier,
                {{"sequence", Classifier::kSequence},
                 {"multinomial", Classifier::kMultinomial},
                 {"geometric", Classifier::kGeometric},
                 {"confidence", Classifier::kConfidence},
                 {"fixed", Classifier::kFixed}},
                "what decides after which layer a token leaves");
    bind.Choice("oracle", &oracle,
                {{"likelihood", Oracle::kLikelihood}, {"correctness", Oracle::kCorrectness}},
                "what the classifier was trained to foretell");
    bind.Int("level", &level, 0, 4, "which of its classifiers: higher ones leave later",
             {0, 1, 2, 3, 4});
    bind.Int("exit", &exit, 1, 32, "of fixed: the layer after which all leave");
    bind.Ints("thresholds", &thresholds, 0, kNeverReached,
              "of confidence: tau_1/tau_2/..., in thousandths; the last is that of all further "
              "layers, and none reaches 1001");
    bind.Int("vocabulary", &vocabulary, 2, 65536, "of confidence: tokens that there are");
    layers::ExitStackOptions::Describe(bind);
  }
};

// Returns tau_n of the classifier "confidence".
double ConfidenceThreshold(const DepthAdaptiveOptions& options, int64_t n);

// DepthAdaptive is causal self-attention only: kv_tokens must equal query_tokens, kv_heads
// query_heads, and value_dim head_dim.
//
// The parameters, f32, are those of transformer_xl; exit0.norm.gamma, .beta, ..., final_norm.gamma,
// .beta [model_dim]; and, of the classifier, in the name of oracle and level,
// likelihood.2.multinomial.w [model_dim, N], .b [N], sequence likewise, or likelihood.2.geometric.w
// [N - 1, model_dim], .b [N - 1]. Drawn N(0, 4 / model_dim), so that tokens differ, the b N(0, 1).
// Confidence has "output" [vocabulary, model_dim] instead, drawn N(0, 16 / model_dim), so
// that probabilities are of all sizes.
//
// DepthAdaptive reads x and the optional exits, i32 [batch, query_tokens], which then replace the
// classifier; it writes out, normalised, the optional exits and, with a classifier that has them,
// the optional exit_probabilities, f32 [batch, query_tokens, N]. The optional memories, which it
// reads with given_memory, are transformer_xl's. The counterpart is the stack that no token leaves.
class DepthAdaptive : public TechniqueOf<DepthAdaptiveOptions> {
 public:
  DepthAdaptive();
  absl::StatusOr<TechniqueSpec> Counterpart(const Problem& problem,
                                            const Options& options) const override;

 protected:
  absl::Status Check(const Problem& problem, const DepthAdaptiveOptions& options) const override;
  absl::StatusOr<std::unique_ptr<Layer>> MakeLayer(const Problem& problem,
                                                   const DepthAdaptiveOptions& options,
                                                   Device device, uint64_t seed) const override;
  absl::Status Definition(const Problem& problem, const DepthAdaptiveOptions& options,
                          const NamedTensors& parameters, const Inputs& inputs,
                          const DefinitionRequest& request, NamedTensors* outputs) const override;
  std::vector<TensorSpec> ReadTensors(const Problem& problem,
                                      const DepthAdaptiveOptions& options) const override;
  std::vector<TensorSpec> WrittenTensors(const Problem& problem,
                                         const DepthAdaptiveOptions& options) const override;
};

}  // namespace tfb::depth_adaptive

#endif  // TFB_ADAPTIVE_DEPTH_ADAPTIVE_DEPTH_ADAPTIVE_H_
