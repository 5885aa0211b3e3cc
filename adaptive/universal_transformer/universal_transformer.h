// The Universal Transformer: one block, applied again and again, each token as often as it needs.
//
//   H^0 = x,   U = H^(n-1) + P^n,   A = LN(U + MultiHead(U)),   S^n = LN(A + Transition(A))
//   H^n = S^n, n = 1 .. steps
//
// with the parameters of all steps shared and P^n the encoding of position and time of
// positional/universal. A network that never halts (halting=none) returns H^steps: a stack of that
// many equal layers. With adaptive computation time (halting=act) token t stops after its own N_t:
//
//   p^n = sigmoid(w . U_t + b)                       halt_from=before: from the input of step n
//   p^n = sigmoid(w . S^n_t + b)                     halt_from=after
//   N_t = min {n : p^1 + .. + p^n >= threshold}, at most `steps`; or > with halt_when=above
//   R_t = 1 - (p^1 + .. + p^(N_t - 1)),   w^n = p^n for n < N_t,   w^(N_t) = R_t
//   H^n_t = H^(N_t)_t for n > N_t                    halted=copied: the others see its last state
//   H^n_t = S^n_t for n > N_t                        halted=recomputed: the others see it change
//
//   out_t = sum_n w^n S^n_t                          output=accumulated: the weights sum to 1
//   out_t = Y^(N_t), Y^n = w^n S^n + (1 - w^n) Y^(n-1), Y^0 = 0       output=basic
//   out_t = H^(N_t)_t                                output=frozen
//   ponder_t = N_t + R_t                             what training charges
//
// A token that reaches the limit gets the remainder too (remainder_at_limit). Key i of batch b is
// padding where key_mask says so: it is not seen, takes no step and has output 0 and ponder 0.
//
// Transition: feed_forward is relu(A W_1 + b_1) W_2 + b_2; separable_convolution has before each of
// the two products a convolution over tokens within each channel,
//
//   c_t = sum_j k_j z_(t + j - r),   r = (size - 1) / 2, or size - 1 where causal
//
// of 3 tokens of z = A and of 5 of the inner activations, zeros beyond the sequence and for
// padding. A halted token enters it with its values at its last step, unless it is recomputed.
//
// The backward pass: steps_backward.h. A Run keeps one state a step and token. N_t is as it was found,
// so that ponder has the gradient of R_t alone. On the CPU it computes the tokens that took a step, on
// CUDA all tokens in every step, those that had halted with gradients of 0.
//
// Sources: Dehghani et al. 2019, "Universal Transformers", arXiv:1807.03819v3, sections 2.1 (block,
// encoding) and 2.2 (halting; the update of its appendix C is output=basic, its text the copies);
// Graves 2016, "Adaptive computation time for recurrent neural networks", arXiv:1603.08983v6,
// section 2 (halt_from=after). Where these and their authors' code differ, options select the other
// variant. The convolutions' sizes and halting from before are those of tensor2tensor's
// universal_transformer_util.py, whose functions universal_transformer_act_basic and _accumulated
// are output=basic and accumulated with halted=recomputed, halt_when=above and
// remainder_at_limit=false, layer normalisations apart. (Some of its versions subtract the weights
// from the first's mix, an error of precedence that is not followed.)
//
// Cost. A step of a token that goes on: (4 d^2 + 4 d inner) FLOPs and 4 d a key seen in
// self-attention of d = model_dim, 4 d^2 for its key and value, and 2 d for the gate. A halted
// token has its key and value projected once more, from the copied state, and costs nothing after:
// position and state are projected apart from time, whose rows are a table, so its keys only add
// another row of that. So work is proportional to the sum of N_t: on the CPU tokens that go on are
// compacted before each product. On CUDA their number is not known to the host, which does not wait
// for it: a kernel lists their rows, and kernels launched for all rows return at once beyond the
// list, in tiles of 64 rows and, in 16-bit attention, 128. All steps are launched. The loads and
// stores that the simulator counts there fall by 0.99 of the share of the FLOPs that halting saves
// (256 tokens, of which one in two or three in four halt after the first of 3 steps); time on a GPU
// has not been measured. With halted=recomputed all tokens of a sequence take as many steps as the
// one that takes most, whatever they add to the output: halting saves what is behind that step, and
// on CUDA nothing.
#ifndef TFB_ADAPTIVE_UNIVERSAL_TRANSFORMER_UNIVERSAL_TRANSFORMER_H_
#define TFB_ADAPTIVE_UNIVERSAL_TRANSFORMER_UNIVERSAL_TRANSFORMER_H_

#include <cstdint>
#include <vector>

#include "core/layers/attention/position_time.h"
#include "core/layers/feed_forward_dim.h"
#include "core/technique.h"

namespace tfb::universal_transformer {

struct UniversalTransformerOptions {
  enum class Halting { kNone, kAct };
  enum class Output { kAccumulated, kBasic, kFrozen };
  enum class HaltFrom { kBefore, kAfter };
  enum class HaltWhen { kAtLeast, kAbove };
  enum class Halted { kCopied, kRecomputed };
  enum class Transition { kFeedForward, kSeparableConvolution };

  int64_t steps = 2;
  Halting halting = Halting::kAct;
  double threshold = 0.99;
  Output output = Output::kAccumulated;
  HaltFrom halt_from = HaltFrom::kBefore;
  HaltWhen halt_when = HaltWhen::kAtLeast;
  Halted halted = Halted::kCopied;
  bool remainder_at_limit = true;
  Transition transition = Transition::kFeedForward;
  int64_t feed_forward_dim = 0;
  layers::PositionTime encoding;
  bool bias = false;

  bool halts() const { return halting == Halting::kAct; }
  bool recomputes() const { return halts() && halted == Halted::kRecomputed; }
  // Tells whether outputs are kept apart from the states.
  bool keeps_outputs() const { return recomputes() || (halts() && output != Output::kFrozen); }
  bool convolves() const { return transition == Transition::kSeparableConvolution; }

  void Describe(OptionBinder& bind) {
    bind.Int("steps", &steps, 1, 32, "steps of every token, or at most with halting=act");
    bind.Choice("halting", &halting, {{"none", Halting::kNone}, {"act", Halting::kAct}},
                "never, or adaptive computation time for each token");
    bind.Real("threshold", &threshold, 0, 1,
              "sum of halting probabilities at which a token stops; 1 - epsilon of the paper",
              {0, 0.5, 0.9, 0.99, 0.999});
    bind.Choice("output", &output,
                {{"accumulated", Output::kAccumulated},
                 {"basic", Output::kBasic},
                 {"frozen", Output::kFrozen}},
                "the weighted sum of the states, a running mix of them, or the last state");
    bind.Choice("halt_from", &halt_from,
                {{"before", HaltFrom::kBefore}, {"after", HaltFrom::kAfter}},
                "halting probabilities of what a step reads, or of the state that it makes");
    bind.Choice(
        "halt_when", &halt_when, {{"at_least", HaltWhen::kAtLeast}, {"above", HaltWhen::kAbove}},
        "a token stops where its sum is at least the threshold; above it, in tensor2tensor");
    bind.Choice("halted", &halted,
                {{"copied", Halted::kCopied}, {"recomputed", Halted::kRecomputed}},
                "the state of a token that has stopped is copied from step to step, or computed as "
                "before, which saves nothing; tensor2tensor's is");
    bind.Bool("remainder_at_limit", &remainder_at_limit,
              "the last step of a token that never reaches the threshold weighs the remainder; "
              "false: its probability, as tensor2tensor has it");
    bind.Choice("transition", &transition,
                {{"feed_forward", Transition::kFeedForward},
                 {"separable_convolution", Transition::kSeparableConvolution}},
                "of a token alone, or of its neighbours too");
    DescribeFeedForwardDim(bind, &feed_forward_dim);
    encoding.Describe(bind);
    bind.Bool("bias", &bias, "attention's projections add biases");
  }
};

// The inputs are x [batch, tokens, model_dim] and the optional key_mask. The outputs are out, and
// with halting=act the optional ponder, of the problem's dtype, and steps, i32 N_t, [batch,
// tokens].
//
// The parameters, f32, are attention.w_q, ... of ProjectionSpecs; attention_norm and ff_norm,
// .gamma and .beta [model_dim]; ff.w1 [model_dim, inner], .b1, .w2 [inner, model_dim], .b2, and
// with separable convolutions ff.k1 [3, model_dim], .k2 [5, inner]; with halting=act halting.w
// [model_dim] and .b [1], drawn as 1; with time=learned t [steps, model_dim]. Hidden states between
// steps are fp32; attention in 16-bit problems rounds as multi_head does.
//
// The statistics of the last Run are mean_steps, max_steps and mean_ponder over tokens that are not
// padding, and saved_flops, as a share of the FLOPs of a network that never halts. cost().flops are
// those of the last Run with halting=act, unknown before it. Steps are N_t; FLOPs and saved_flops
// count the steps in which a halted token is recomputed. A backward pass always computes steps again
// from the states before them, so that there is no option recompute (core/layers/recompute.h).
//
// The counterpart is the same network with halting=none.
class UniversalTransformer : public TechniqueOf<UniversalTransformerOptions> {
 public:
  UniversalTransformer();
  absl::StatusOr<TechniqueSpec> Counterpart(const Problem& problem,
                                            const Options& options) const override;

 protected:
  absl::Status Check(const Problem& problem,
                     const UniversalTransformerOptions& options) const override;
  absl::StatusOr<std::unique_ptr<Layer>> MakeLayer(const Problem& problem,
                                                   const UniversalTransformerOptions& options,
                                                   Device device, uint64_t seed) const override;
  absl::Status Definition(const Problem& problem, const UniversalTransformerOptions& options,
                          const NamedTensors& parameters, const Inputs& inputs,
                          const DefinitionRequest& request, NamedTensors* outputs) const override;
  std::vector<TensorSpec> ReadTensors(const Problem& problem,
                                      const UniversalTransformerOptions& options) const override;
  std::vector<TensorSpec> WrittenTensors(const Problem& problem,
                                         const UniversalTransformerOptions& options) const override;
};

// Returns the FLOPs of a run in which token t of batch row b takes steps[b tokens + t] steps, 0 for
// padding.
double UniversalTransformerFlops(const Problem& problem, const UniversalTransformerOptions& options,
                                 const std::vector<int32_t>& steps);
// Returns those of its backward pass, which computes the steps again.
double UniversalTransformerBackwardFlops(const Problem& problem,
                                         const UniversalTransformerOptions& options,
                                         const std::vector<int32_t>& steps);

}  // namespace tfb::universal_transformer

#endif  // TFB_ADAPTIVE_UNIVERSAL_TRANSFORMER_UNIVERSAL_TRANSFORMER_H_
