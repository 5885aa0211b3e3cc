// CALM, confident adaptive language modeling: a token leaves the stack after the first layer whose
// prediction is confident enough.
//
//   exit_t = min { n : c^n_t >= lambda_t },  N where there is none
//   out_t  = LN_n(h^n_t),  n = exit_t                logits of the next token: output out_t
//
// in the stack of core/layers/exits/exit_stack.h. The confidence c^n, n = 1 .. N - 1:
//
//   softmax      the largest probability minus the next, of softmax(output LN_n(h^n_t))
//   saturation   cos(h^n_t, h^(n-1)_t), not used after layer 1
//   classifier   sigmoid(w_n . h^n_t + b_n), learned: the probability that the prediction after layer
//                n is the whole model's
//
// and the threshold, where token t of the stream counts from 0, behind given memories too, and T is
// the problem's tokens:
//
//   constant     lambda
//   decaying     clip(0.9 lambda + 0.1 exp(-temperature t / T), 0, 1)         equation 5
//   t5x          clip(0.9 lambda + 0.1 lambda exp(-temperature t / T), 0, 1)
//
// With a lambda above 1 no token leaves, which is the whole model, bit for bit on every device
// (where all stay for another reason, on a GPU with cuBLAS up to rounding: exit_stack.h). A
// confidence that is NaN never leaves. adaptive/calm/learn_then_test.h finds a lambda that
// guarantees a quality; //adaptive/calm:calibrate does so for the trained model.
//
// The optional output confidence_logits has z^n_t = w_n . h^n_t + b_n of the classifier, whose sigmoid
// is c^n_t, for n = 1, ..., N - 1 and every token; h^n_t is the copied state after a token has left. It
// costs nothing where it is left out. In a backward pass its gradient reaches the classifiers and the
// states that they read. The source trains the exits first, by their losses in proportion to n
// (exit_stack.h), and then the classifiers alone, with all else frozen: whoever does so takes the
// gradients of exitN.confidence and no others. The labels and the loss are in
// adaptive/calm/consistency.h.
//
// Source: Schuster et al. 2022, "Confident adaptive language modeling", arXiv:2207.07061v2,
// sections 3 and 4. The authors' code (github.com/google-research/t5x, t5x/contrib/calm at cc342d4)
// has the third schedule; the test compares confidences and thresholds with it. Not followed there:
// its default score is the largest probability alone; in a batch all tokens wait for the least
// confident, and the norms of the saturation are of the whole batch; a saturation is 0 after the
// first exit, and reaches a threshold of 0; what skipped layers get is the state of the first exit,
// not the last computed.
//
// Cost of a decision, in FLOPs: softmax 2 model_dim vocabulary, which no other layer of the stack
// needs; saturation 6 model_dim; classifier 2 model_dim.
#ifndef TFB_ADAPTIVE_CALM_CALM_H_
#define TFB_ADAPTIVE_CALM_CALM_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "adaptive/calm/calm_cuda.h"
#include "core/layers/exits/exit_stack.h"
#include "core/technique.h"

namespace tfb::calm {

// The name of the optional output of a classifier's logits.
inline constexpr char kConfidenceLogits[] = "confidence_logits";

struct CalmOptions : layers::ExitStackOptions {
  enum class Schedule { kConstant, kDecaying, kT5x };

  Confidence confidence = Confidence::kSoftmax;
  double threshold = 0.5;
  Schedule schedule = Schedule::kConstant;
  double temperature = 4;
  int64_t vocabulary = 256;

  void Describe(OptionBinder& bind) {
    bind.Choice("confidence", &confidence,
                {{"softmax", Confidence::kSoftmax},
                 {"saturation", Confidence::kSaturation},
                 {"classifier", Confidence::kClassifier}},
                "what says that a layer's prediction will do");
    bind.Real("threshold", &threshold, 0, 2,
              "lambda: a token leaves where its confidence reaches it; above 1 none does",
              {0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 2});
    bind.Choice("schedule", &schedule,
                {{"constant", Schedule::kConstant},
                 {"decaying", Schedule::kDecaying},
                 {"t5x", Schedule::kT5x}},
                "how the threshold goes with the token's place");
    bind.Real("temperature", &temperature, 0, 1000, "how fast it decays over the sequence");
    bind.Int("vocabulary", &vocabulary, 2, 65536, "tokens that softmax chooses from");
    layers::ExitStackOptions::Describe(bind);
  }
};

// Calm is causal self-attention only: kv_tokens must equal query_tokens, kv_heads query_heads, and
// value_dim head_dim.
//
// The parameters, f32, are those of transformer_xl; exit0.norm.gamma, .beta, ..., and
// final_norm.gamma, .beta [model_dim] of the last layer; and of the confidence, "output"
// [vocabulary, model_dim], or exitN.confidence.w [model_dim], .b [1]. The output matrix is drawn
// N(0, 16 / model_dim), so that probabilities are of all sizes, w N(0, 1 / model_dim).
//
// Calm reads x and the optional exits, i32 [batch, query_tokens], which then replace the
// confidence; it writes out, normalised, the optional exits and, with a classifier, the optional
// confidence_logits, f32 [batch, query_tokens, N - 1]. The optional memories, which it reads with
// given_memory, are transformer_xl's. The counterpart is the stack that no token leaves.
class Calm : public TechniqueOf<CalmOptions> {
 public:
  Calm();
  absl::StatusOr<TechniqueSpec> Counterpart(const Problem& problem,
                                            const Options& options) const override;

 protected:
  absl::Status Check(const Problem& problem, const CalmOptions& options) const override;
  absl::StatusOr<std::unique_ptr<Layer>> MakeLayer(const Problem& problem,
                                                   const CalmOptions& options, Device device,
                                                   uint64_t seed) const override;
  absl::Status Definition(const Problem& problem, const CalmOptions& options,
                          const NamedTensors& parameters, const Inputs& inputs,
                          const DefinitionRequest& request, NamedTensors* outputs) const override;
  std::vector<TensorSpec> ReadTensors(const Problem& problem,
                                      const CalmOptions& options) const override;
  std::vector<TensorSpec> WrittenTensors(const Problem& problem,
                                         const CalmOptions& options) const override;
};

}  // namespace tfb::calm

#endif  // TFB_ADAPTIVE_CALM_CALM_H_
