// Multi-head attention as a layer on hidden states: projections to heads, attention in each, and a
// projection of all heads together.
//
//   q = x W_q + b_q,  k = m W_k + b_k,  v = m W_v + b_v     m = x, or with `cross` the input memory
//   y = concat_heads(inner(q, k, v)) W_o + b_o
//
// `inner` is dense attention, or any other technique on q, k and v, which thereby becomes a layer
// on hidden states: multi_head:inner=longformer[window=64]. The inner technique decides its scale,
// with head_dim and not model_dim, its masks, and which problems it refuses. Where it reads further
// queries, keys or values, they have projections of their own: with projections=own Longformer's
// q_global is x W_q_global + b_q_global. What else it reads and writes is an input or output of the
// layer under its own name: Longformer's global_mask, ETC's segment, the noise of hard attention,
// routing's members. With max_globals and projections=own the layer is Hugging Face's
// LongformerSelfAttention and the product with W_o. A token that sees no key has heads of 0, so
// that y is b_o. In 16-bit problems q, k, v and the heads' results are rounded to the problem's
// dtype, as they are wherever attention runs in it; that is a part of the definition. W and b are
// f32.
//
// Source: Vaswani et al. 2017, "Attention is all you need", arXiv:1706.03762v7, section 3.2.2. There
// b is absent, as it is here by default; torch.nn.MultiheadAttention has it by default. Fewer
// key-value heads than query heads: Ainslie et al. 2023, "GQA", arXiv:2305.13245v3, section 2.2.
//
// Cost, d = model_dim: 8 tokens d^2 FLOPs of projections in self-attention, 4 query_tokens d^2 + 4
// kv_tokens d^2 in cross attention, and those of `inner`; 4 d^2 parameters, 4 d of biases (with
// kv_heads = query_heads and value_dim = head_dim).
//
// The technique reads x [batch, query_tokens, model_dim], with `cross` memory, the optional
// key_mask, and those of FurtherInputsOf. It writes out, and those of FurtherOutputsOf. Without
// `cross` kv_tokens must be query_tokens. Its parameters are those of ProjectionSpecs, and the
// inner technique's as inner.NAME. Its statistics are the inner layer's; on a GPU also cublas, 1
// where cuBLAS computes the projections.
//
// The layer reads whole sequences: it is no StreamingLayer, even where the inner technique's layer
// is one.
//
// The counterpart is the same layer with the inner technique's counterpart inside.
#ifndef TFB_ATTENTION_MULTI_HEAD_MULTI_HEAD_H_
#define TFB_ATTENTION_MULTI_HEAD_MULTI_HEAD_H_

#include "core/layers/attention/projected_attention.h"
#include "core/technique.h"

namespace tfb::multi_head {

struct MultiHeadOptions {
  TechniqueSpec inner = {"dense", {}};
  bool cross = false;
  bool bias = false;

  void Describe(OptionBinder& bind) {
    layers::BindInner(bind, &inner);
    bind.Bool("cross", &cross,
              "keys and values come from a second input, memory [batch, kv_tokens, model_dim]");
    bind.Bool("bias", &bias, "projections add biases");
  }
};

}  // namespace tfb::multi_head

#endif  // TFB_ATTENTION_MULTI_HEAD_MULTI_HEAD_H_
