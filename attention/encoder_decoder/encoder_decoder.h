// Transformer blocks: a stack of encoder layers, of decoder layers, or both as one network.
//
//   encoder layer   attention over x itself, feed-forward
//   decoder layer   attention over x itself, attention to the memory, feed-forward
//
// where attention is multi-head (attention/multi_head) and each sublayer S is residual:
//
//   h <- LN(h + S(h))           post_norm, the original
//   h <- h + S(LN(h))           pre_norm
//
// A last LN follows each stack where `final_norm` is true; auto is true unless layers are
// post_norm.
//
//   FF(h) = activation(h W_1 + b_1) W_2 + b_2,   LN as in core/layers/layer_norm.h, epsilon 1e-5
//
// The Sparse Transformer's residual block, H <- H + a + b with a = attention(LN(H)) and b = FF(LN(H
// + a)), is the pre_norm layer written in one line. `sparse` is that layer, with its activation x
// sigmoid(1.702 x) as the default, and with W_2 and W_o drawn smaller by 1/sqrt(2 layers).
//
// `part` says what runs:
//   encoder   out = encoder(x); kv_tokens must be query_tokens
//   decoder   out = decoder(x, memory), memory an input [batch, kv_tokens, model_dim]
//   both      out = decoder(x, encoder(memory))
// Where the problem is causal, self-attention over x is causal; self-attention over the memory and
// attention to it are not. So a language model such as GPT is the causal encoder, and the original
// Transformer is `both`, causal. key_mask [batch, kv_tokens] hides padded keys of the memory in all
// attention that reads it, or of x where there is no memory.
//
// `inner` is the attention in self-attention, any technique on q, k, v; attention to the memory is
// dense. It is one technique for all layers, or a list with one for each layer of a stack
// (TechniqueList in core/options.h):
//
//   longformer[window=32]/longformer[window=64]   windows that grow from layer to layer: Beltagy et
//                                                 al., arXiv:2004.05150v2, section 4.1
//   strided[combine=interleaved]/strided[combine=interleaved,layer=1]
//                                                 the Sparse Transformer's factors by turns; 16*(...)
//                                                 of it is a stack of 32 layers
//   10*dense/2*routing                            routing in the last layers
//   linformer[k=128]/linformer[k=64]              fewer slots in later layers
//
// With part=both the list is that of either stack, or has the encoder's layers and then the
// decoder's: 6*longformer/6*dense is the attention of Longformer-Encoder-Decoder (its section 7).
// What `inner` reads beside q, k, v and key_mask are inputs of the network, such as Longformer's
// global_mask, which all layers of a stack that have such an input read; with part=both they are
// encoder.global_mask and decoder.global_mask. Noise and choices are each attention's own:
// encoder0.attention.u is an input, and routing's choice encoder0.attention.members an input to
// follow and an optional output.
// In 16-bit problems each attention rounds as multi_head does; all else is fp32 between the
// network's input and output. Embeddings, dropout and the output projection are left to the caller.
//
// A Run that has a backward pass keeps, of each sublayer, what its LN reads (model_dim floats a token:
// the sublayer's input with pre_norm, else the residual sum) and what attention
// (core/layers/attention/projected_attention.h) or FF (core/layers/feed_forward.h) keeps. What a
// sublayer reads is computed from that again, by one LN. With recompute=true it keeps what each layer
// but the first reads, and the final LN, and the backward pass computes a layer again before it
// differentiates it (core/layers/recompute.h).
//
// Sources: Vaswani et al. 2017, arXiv:1706.03762v7, sections 3.1 and 3.3; pre-norm: Xiong et al.
// 2020, "On layer normalization in the Transformer architecture", arXiv:2002.04745v2, Table 1, with
// a final norm; core/layers/final_norm.h says who has the other combinations; sparse: Child et al.
// 2019, "Generating long sequences with Sparse Transformers", arXiv:1904.10509v1, section 5.2.
// Projections have biases by default, as in PyTorch and GPT-2; the authors of the first had none
// (`bias`). Tensor2Tensor has epsilon 1e-6.
//
// Cost of a layer and token, d = model_dim, dense, feed_forward_dim 4 d: 24 d^2 FLOPs and 4 d a key seen;
// a decoder layer has 4 d^2 more for it, 4 d^2 for each token of the memory, and 4 d a key of the
// memory.
#ifndef TFB_ATTENTION_ENCODER_DECODER_ENCODER_DECODER_H_
#define TFB_ATTENTION_ENCODER_DECODER_ENCODER_DECODER_H_

#include <cstdint>
#include <vector>

#include "core/layers/activation.h"
#include "core/layers/attention/projected_attention.h"
#include "core/layers/feed_forward_dim.h"
#include "core/layers/recompute.h"
#include "core/technique.h"

namespace tfb::encoder_decoder {

struct EncoderDecoderOptions {
  enum class Part { kEncoder, kDecoder, kBoth };
  enum class BlockKind { kPostNorm, kPreNorm, kSparse };
  enum class FinalNorm { kAuto, kTrue, kFalse };
  Part part = Part::kEncoder;
  BlockKind block = BlockKind::kPostNorm;
  FinalNorm final_norm = FinalNorm::kAuto;
  int64_t layers = 2;
  int64_t feed_forward_dim = 0;
  Activation activation = Activation::kNone;  // the default activation of the block
  TechniqueList inner = {{{"dense", {}}}};
  bool bias = true;
  bool recompute = false;

  void Describe(OptionBinder& bind) {
    bind.Choice(
        "part", &part,
        {{"encoder", Part::kEncoder}, {"decoder", Part::kDecoder}, {"both", Part::kBoth}},
        "layers on x; on x with attention to the input memory; or both, with encoder layers "
        "on the memory");
    bind.Choice("block", &block,
                {{"post_norm", BlockKind::kPostNorm},
                 {"pre_norm", BlockKind::kPreNorm},
                 {"sparse", BlockKind::kSparse}},
                "where layers normalise; sparse is the Sparse Transformer's residual block");
    bind.Choice(
        "final_norm", &final_norm,
        {{"auto", FinalNorm::kAuto}, {"true", FinalNorm::kTrue}, {"false", FinalNorm::kFalse}},
        "normalise what the last layer of a stack writes once more; auto is false for "
        "block=post_norm, else true");
    bind.Int("layers", &layers, 1, 128, "of each stack");
    DescribeFeedForwardDim(bind, &feed_forward_dim);
    bind.Choice("activation", &activation,
                {{"auto", Activation::kNone},
                 {"relu", Activation::kRelu},
                 {"gelu", Activation::kGelu},
                 {"gelu_tanh", Activation::kGeluTanh},
                 {"gelu_sigmoid", Activation::kGeluSigmoid}},
                "of the feed-forward sublayers; auto is gelu_sigmoid for block=sparse, else relu");
    layers::BindInner(bind, &inner);
    bind.Bool("bias", &bias, "attention's projections add biases");
    DescribeRecompute(bind, &recompute);
  }

  bool has_final_norm() const {
    return final_norm == FinalNorm::kAuto ? block != BlockKind::kPostNorm
                                          : final_norm == FinalNorm::kTrue;
  }
};

// Parameters, f32: encoderN.attention, decoderN.self and decoderN.cross with .w_q, ... of
// ProjectionSpecs and .inner.NAME; encoderN.ff and decoderN.ff with .w1 [model_dim, f], .b1 [f], .w2
// [f, model_dim], .b2 [model_dim]; a norm beside each of them, encoderN.attention_norm, decoderN.
// ff_norm, with .gamma and .beta [model_dim]; encoder_norm and decoder_norm where there is a final
// norm. Matrices and biases are drawn N(0, 1 / rows of the matrix), gammas 1, betas 0.
//
// It returns InvalidArgument where `inner` has another number of techniques. The counterpart is the
// same network with the inner techniques' counterparts inside.
class EncoderDecoder : public TechniqueOf<EncoderDecoderOptions> {
 public:
  EncoderDecoder();
  absl::StatusOr<TechniqueSpec> Counterpart(const Problem& problem,
                                            const Options& options) const override;

 protected:
  absl::Status Check(const Problem& problem, const EncoderDecoderOptions& options) const override;
  absl::StatusOr<std::unique_ptr<Layer>> MakeLayer(const Problem& problem,
                                                   const EncoderDecoderOptions& options,
                                                   Device device, uint64_t seed) const override;
  absl::Status Definition(const Problem& problem, const EncoderDecoderOptions& options,
                          const NamedTensors& parameters, const Inputs& inputs,
                          const DefinitionRequest& request, NamedTensors* outputs) const override;
  std::vector<TensorSpec> ReadTensors(const Problem& problem,
                                      const EncoderDecoderOptions& options) const override;
  std::vector<TensorSpec> WrittenTensors(const Problem& problem,
                                         const EncoderDecoderOptions& options) const override;
};

// Returns how many numbers the parameters above have, without those of `inner`. For an encoder with
// biases, equal heads, feed_forward_dim 4 d and d = model_dim: 12 d^2 + 13 d a layer, and 2 d for the
// final norm.
int64_t ParameterCount(const Problem& problem, const EncoderDecoderOptions& options);
// Returns the number of parameters of a language model: with an embedding of the vocabulary, which
// is the output projection too, and a learned one of the positions. GPT-2 small (12 pre_norm layers
// of 768, 50257 tokens, 1024 positions) has 124,439,808.
int64_t LanguageModelParameterCount(const Problem& problem, const EncoderDecoderOptions& options,
                                    int64_t vocabulary, int64_t positions);

}  // namespace tfb::encoder_decoder

#endif  // TFB_ATTENTION_ENCODER_DECODER_ENCODER_DECODER_H_
