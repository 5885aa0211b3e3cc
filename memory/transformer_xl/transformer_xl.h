// Transformer-XL: a stack of attention and feed-forward layers that reads a sequence segment by
// segment and lets each layer attend to the layer below's outputs for earlier tokens.
//
// For layer n = 1 .. layers, with h^0 = x and head_dim e, per head:
//
//   q = h^(n-1) W_q,  k = h^(n-1) W_k,  v = h^(n-1) W_v
//   s_pj = ((q_p + u) . k_j + (q_p + v) . (r_(p-j) W_r)) / sqrt(e)     over the keys j that p sees
//   a_p  = concat_heads(sum_j softmax_j(s_pj) v_j) W_o
//
//   g = LN(h^(n-1) + a),        h^n = LN(g + FF(g))         post-norm, the paper's
//   g = h^(n-1) + a(LN h^(n-1)), h^n = g + FF(LN g)         with `pre_norm`
//   out = h^layers, or LN(h^layers) with `final_norm`
//
//   FF(g) = relu(g W_1 + b_1) W_2 + b_2
//
// r_d is the sinusoid of distance d (core/layers/sinusoid.h), u and v are learned. Which keys token
// p sees, where s is the first token of the segment that p is in:
//
//   same_length = false   max(0, s - memory) <= j <= p      the memory, and the segment up to p
//   same_length = true    0 <= p - j < memory               as many keys for every token
//
// With a span_ramp R each head has a span z of its own, and sees key j with the weight clip((R + z
// - (p - j)) / R, 0, 1): adaptive attention span (adaptive/adaptive_span), which leaves out the
// token itself there and has another encoding of positions. Keys of weight 0 are not computed: a
// head costs no more than ceil(R + z) keys a token.
//
// h^(n-1)_j depends on the layers below at j alone, however the sequence was cut: so the segments
// are one pass over the whole sequence under a banded mask, at any depth. That is the definition
// here, and streaming must equal it. With same_length the mask does not depend on segments, so
// every split of a stream gives the same; without it the segments that were actually appended
// decide the mask, and Run uses `segment`.
//
// Gradients stop at the memory, as in section 3.2: what a layer reads of the tokens before a segment
// is constant for the segment, whichever run it comes from, but not the parameters that make keys
// and values of it. So the backward pass takes the segments one by one. A Run keeps what went into
// each layer but the first, f32 [batch, query_tokens, model_dim] (and into the final norm): one state
// a layer, always, without an option recompute (core/layers/recompute.h). Backward computes a layer's
// segment from that once more.
//
// Source: Dai, Yang, Yang, Carbonell, Le, Salakhutdinov 2019, "Transformer-XL: attentive language
// models beyond a fixed-length context", arXiv:1901.02860v3, sections 3.2 and 3.3; same_length,
// max_distance and pre_norm as in the authors' code (github.com/kimiyoung/transformer-xl,
// pytorch/mem_transformer.py), which has no final norm with pre_norm either; labml_nn's
// TransformerXL has one. Where we differ from that code: keys and values are kept instead of hidden
// states, which are projected once and not in every segment again; a query that no segment precedes
// sees no memory (Hugging Face begins with zero vectors that are attended to); no dropout.
//
// Cost of a token and layer: 8 d^2 + 4 d f FLOPs (d = model_dim, f = feed_forward_dim) and 6 d a key
// seen: time is linear in tokens. State: 2 (memory + segment) d floats a layer and batch row.
#ifndef TFB_MEMORY_TRANSFORMER_XL_TRANSFORMER_XL_H_
#define TFB_MEMORY_TRANSFORMER_XL_TRANSFORMER_XL_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "core/layers/final_norm.h"
#include "core/layers/stack/stack_options.h"
#include "core/technique.h"

namespace tfb::transformer_xl {

struct TransformerXlOptions : layers::RelativeStackOptions {
  bool pre_norm = false;
  double span_ramp = 0;

  void Describe(OptionBinder& bind) {
    DescribeStack(bind, /*max_layers=*/1000);
    bind.Bool("pre_norm", &pre_norm, "normalise the input of each sublayer instead of its output");
    DescribeFinalNorm(bind, &final_norm);
    DescribeGivenMemory(bind);
    bind.Real("span_ramp", &span_ramp, 0, 1 << 20,
              "soft edge, in tokens, of spans that heads have learned; 0: heads have none");
  }
};

// TransformerXl is causal self-attention only: kv_tokens must equal query_tokens, kv_heads
// query_heads, and value_dim head_dim.
//
// The parameters, f32, y = x W, are layerN.w_q, w_k, w_v, w_r, w_o [model_dim, model_dim], head h
// owning columns h head_dim to (h + 1) head_dim - 1 (rows of w_o); u, v (layerN.u, layerN.v where
// they are not shared) [heads, head_dim]; with a span_ramp layerN.span [heads];
// layerN.attention_norm.gamma, .beta, layerN.ff_norm.gamma, .beta [model_dim]; layerN.ff.w1
// [model_dim, f], ff.b1 [f], ff.w2 [f, model_dim], ff.b2 [model_dim]; with a final norm
// final_norm.gamma, .beta [model_dim]. None depends on memory, segment or tokens. Matrices are
// drawn N(0, 1 / inputs), so that scores are of order 1, u and v N(0, 1/4), spans N(48, 256),
// gammas 1, the rest 0.
//
// It writes out and the optional context, [batch, query_tokens, model_dim] both: g of the last
// layer, or LN g with pre_norm, which is what its feed-forward network reads. Techniques that look
// up memories of whole texts use it as their key. A Run also writes, optionally, memories [batch,
// layers, min(memory, given_memory + query_tokens), model_dim]: what went into each layer for the last
// tokens. With given_memory it reads memories [batch, layers, given_memory, model_dim] of an earlier
// run, whose last token precedes the first one; tokens then see what they would in one run over both,
// segments being counted from the first token of this one. A stream reads them with its first
// segment.
//
// The counterpart is the same network with all of the past in its memory.
class TransformerXl : public TechniqueOf<TransformerXlOptions> {
 public:
  TransformerXl();
  absl::StatusOr<TechniqueSpec> Counterpart(const Problem& problem,
                                            const Options& options) const override;

 protected:
  absl::Status Check(const Problem& problem, const TransformerXlOptions& options) const override;
  absl::StatusOr<std::unique_ptr<Layer>> MakeLayer(const Problem& problem,
                                                   const TransformerXlOptions& options,
                                                   Device device, uint64_t seed) const override;
  absl::Status Definition(const Problem& problem, const TransformerXlOptions& options,
                          const NamedTensors& parameters, const Inputs& inputs,
                          const DefinitionRequest& request, NamedTensors* outputs) const override;
  std::vector<TensorSpec> ReadTensors(const Problem& problem,
                                      const TransformerXlOptions& options) const override;
  std::vector<TensorSpec> WrittenTensors(const Problem& problem,
                                         const TransformerXlOptions& options) const override;
};

// The definition of a stream that was cut in other segments: `begins` has the first token of each,
// ascending from 0. Returns out, context and memories in f64. It reads `pool` and `stopped` of the
// request; `memories`: the input of that name, if some are given.
absl::StatusOr<NamedTensors> DefineTransformerXl(
    const Problem& problem, const TransformerXlOptions& options, const NamedTensors& parameters,
    const ConstTensorView& x, absl::Span<const int64_t> begins,
    const DefinitionRequest& request = {}, const ConstTensorView& memories = {});

}  // namespace tfb::transformer_xl

#endif  // TFB_MEMORY_TRANSFORMER_XL_TRANSFORMER_XL_H_
