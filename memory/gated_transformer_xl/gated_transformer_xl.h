// Gated Transformer-XL (GTrXL): Transformer-XL whose normalisations stand before the sublayers and
// whose residual connections are gates, which makes it trainable by reinforcement.
//
// For layer n = 1 .. layers, with h^0 = x:
//
//   g   = gate_1(h^(n-1), relu(attention(LN [memory; h^(n-1)])))
//   h^n = gate_2(g, relu(FF(LN g)))                        FF(x) = relu(x W_1 + b_1) W_2 + b_2
//   out = h^layers, or LN(h^layers) with `final_norm`
//
// Attention, its memory, masks, and parameters are those of memory/transformer_xl/transformer_xl.h:
// queries come from the segment, keys and values from the memory too, all of them normalised. With *
// channel by channel and s the logistic function, gate(x, y) of the state x and the sublayer's y is
//
//   gate = gru            r = s(y W_r + x U_r),  z = s(y W_z + x U_z - b_g)
//                         (1 - z) * x + z * tanh(y W_g + (r * x) U_g)
//                         with gate_biases b_r, b_z and b_h are added in r, z and tanh
//   gate = input          s(x W_g) * x + y
//   gate = output         x + s(x W_g - b_g) * y
//   gate = highway        s(x W_g + b_g) * x + (1 - s(x W_g + b_g)) * y
//   gate = sigmoid_tanh   x + s(y W_g - b_g) * tanh(y U_g)
//   gate = sum            x + y: with `relu`, the paper's TrXL-I; without, pre-norm Transformer-XL
//
// With normalise_memory=false keys and values of tokens of earlier segments come from h^(n-1) as it
// is, and LN h^(n-1) gives the queries, and the keys and values of the segment itself.
//
// A large b_g makes every gate but input and sum pass x by: the network begins as a policy without
// memory. With all matrices 0 the gru gives (1 - s(-b_g)) x, 0.88 x at b_g = 2, not x.
//
// Gradients stop at the memory, as in Transformer-XL, and a Run keeps for its backward pass what that
// keeps, one state a layer.
//
// Source: Parisotto, Song, Rae, Pascanu, Gulcehre, Jayakumar, Jaderberg, Lopez Kaufman, Clark,
// Noury, Botvinick, Heess, Hadsell 2020, "Stabilizing Transformers for reinforcement learning",
// arXiv:1910.06764v1, section 3. Other implementations: RLlib's
// (rllib/models/torch/attention_net.py) has no biases in its feed-forward networks, which equals
// zero biases here, and is otherwise the same. Transformers-RL (github.com/dhruvramani, layers.py),
// from which others are derived, has normalise_memory=false, gate_biases=true and relu=false; its
// memory begins as vectors of zeros, which is not followed. DI-engine's takes queries from h^(n-1)
// as it is and normalises keys and values alone, which the paper's equations do not; this is not
// followed. There is no dropout.
//
// Cost of a token and layer: Transformer-XL's and, for two gates of `gru`, 24 d^2 FLOPs (d =
// model_dim): as much again as a feed-forward network of 4 d takes with its attention's projections.
// The other gates: 8 d^2 for sigmoid_tanh, else 4 d^2. A memory that is not normalised: 4 d^2 for
// its keys and values.
#ifndef TFB_MEMORY_GATED_TRANSFORMER_XL_GATED_TRANSFORMER_XL_H_
#define TFB_MEMORY_GATED_TRANSFORMER_XL_GATED_TRANSFORMER_XL_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "core/layers/final_norm.h"
#include "core/layers/stack/stack_options.h"
#include "core/technique.h"

namespace tfb::gated_transformer_xl {

struct GatedTransformerXlOptions : layers::RelativeStackOptions {
  enum class Gate { kGru, kInput, kOutput, kHighway, kSigmoidTanh, kSum };

  Gate gate = Gate::kGru;
  double gate_bias = 2;
  bool gate_biases = false;
  bool relu = true;
  bool normalise_memory = true;

  GatedTransformerXlOptions() { layers = 1; }  // as in RLlib

  void Describe(OptionBinder& bind) {
    // The paper's largest has 12. Each gate shrinks the state, whose rounding errors the next
    // normalisation magnifies: 40 layers of gates as drawn have a relative error of 1e-4 in fp32.
    DescribeStack(bind, /*max_layers=*/32);
    DescribeGivenMemory(bind);
    bind.Choice("gate", &gate,
                {{"gru", Gate::kGru},
                 {"input", Gate::kInput},
                 {"output", Gate::kOutput},
                 {"highway", Gate::kHighway},
                 {"sigmoid_tanh", Gate::kSigmoidTanh},
                 {"sum", Gate::kSum}},
                "what joins a sublayer's output with the state");
    // Section 3.2: positive values begin near the identity. RLlib's default is 2.
    bind.Real("gate_bias", &gate_bias, -1e4, 1e4,
              "the value that b_g begins with; larger ones let less of a sublayer through");
    bind.Bool("gate_biases", &gate_biases, "gate=gru also adds biases to its matrices' products");
    bind.Bool("normalise_memory", &normalise_memory,
              "keys and values of earlier segments are of normalised states, as the segment's are; "
              "else of the states");
    bind.Bool("relu", &relu, "a ReLU on what a sublayer gives to its gate");
    DescribeFinalNorm(bind, &final_norm);
  }
};

// GatedTransformerXl is causal self-attention only: kv_tokens must equal query_tokens, kv_heads
// query_heads, and value_dim head_dim. It writes out and, as transformer_xl does, the optional context
// and memories, which it reads with given_memory.
//
// The parameters are transformer_xl's, and for each of the gates layerN.attention_gate and
// layerN.ff_gate those of its kind: .w_r, .w_z, .w_g, .u_r, .u_z, .u_g [model_dim, model_dim],
// drawn N(0, 1 / model_dim), and .b_g [model_dim], filled with gate_bias; with gate_biases .b_r,
// .b_z and .b_h [model_dim], N(0, 1 / model_dim), each the sum of the biases of two matrices.
//
// The counterpart is the same network with all of the past in its memory.
class GatedTransformerXl : public TechniqueOf<GatedTransformerXlOptions> {
 public:
  GatedTransformerXl();
  absl::StatusOr<TechniqueSpec> Counterpart(const Problem& problem,
                                            const Options& options) const override;

 protected:
  absl::Status Check(const Problem& problem,
                     const GatedTransformerXlOptions& options) const override;
  absl::StatusOr<std::unique_ptr<Layer>> MakeLayer(const Problem& problem,
                                                   const GatedTransformerXlOptions& options,
                                                   Device device, uint64_t seed) const override;
  absl::Status Definition(const Problem& problem, const GatedTransformerXlOptions& options,
                          const NamedTensors& parameters, const Inputs& inputs,
                          const DefinitionRequest& request, NamedTensors* outputs) const override;
  std::vector<TensorSpec> ReadTensors(const Problem& problem,
                                      const GatedTransformerXlOptions& options) const override;
  std::vector<TensorSpec> WrittenTensors(const Problem& problem,
                                         const GatedTransformerXlOptions& options) const override;
};

}  // namespace tfb::gated_transformer_xl

#endif  // TFB_MEMORY_GATED_TRANSFORMER_XL_GATED_TRANSFORMER_XL_H_
