// Hard attention: each query takes the value of one key, which it chooses or draws.
//
//   s_ij = q_i . k_j                                     sample=none
//          scale q_i . k_j                               inverse_cdf
//          scale q_i . k_j + g_ij                        gumbel
//   j*   = argmax_j s_ij, the lowest such j              none, gumbel
//          min { j : sum_(r <= j) p_ir > u_i sum_r p_ir },  p_ij = exp(s_ij - max_r s_ir)
//                                                        inverse_cdf
//   y_i  = v_j*                                          bit by bit; `index` is j*
//
// The keys j are those that are tokens and, where the problem is causal, j <= i + kv_tokens -
// query_tokens. The noise is an input: u, uniform in [0, 1), or g, of the Gumbel distribution
// -log(-log u). Either draws j with the probability that soft attention gives it, so that y is an
// unbiased estimate of soft attention, of mean squared error tr Cov_p(v).
//
// CPU and CUDA compute the same scores in fp32, and so choose the same keys: the products of
// channels 0, 1, 2, ... are added to 0 in this order by fused multiply-adds; where there is a
// scale, the query's channels are multiplied by it before, and g is added behind. (A CPU without
// fused multiply-adds rounds products too, and may choose another of two keys that tie within
// that.) Where fp32 cannot tell, by the bound of its error, which of two scores is larger, the
// result is not defined: the definition accepts the layer's choice. Among equal keys it must be the
// first, however.
// The weights of inverse_cdf are fp32 exponentials, which devices round differently: a u within
// about 1e-6 of the boundary between two keys may draw either of them. Weights below e^-87.33 of
// the largest are 0.
//
// A row that sees no key gives 0 and the index -1. A score that is NaN or -inf is never chosen. A u
// below 0 counts as 0; one that is not below 1 draws the last key of a weight above 0.
//
// Source: Xu et al. 2015, "Show, attend and tell", arXiv:1502.03044v3, section 4.1 (sampling; there
// learned by REINFORCE); scores as in dense attention. Gumbel-max: Maddison, Tarlow, Minka 2014,
// arXiv:1411.0030v2, section 2.
// Cost: 2 pairs head_dim FLOPs, no exponentials unless inverse_cdf, which computes every score twice.
//
// The technique reads q, k, v, the optional key_mask, and u f32 [batch, query_heads, query_tokens]
// or g f32 [batch, query_heads, query_tokens, kv_tokens]. It writes out and the optional index, i32
// [batch, query_heads, query_tokens].
#ifndef TFB_ATTENTION_HARD_HARD_H_
#define TFB_ATTENTION_HARD_HARD_H_

#include "core/technique.h"

namespace tfb::hard {

struct HardOptions {
  enum class Sample { kNone, kInverseCdf, kGumbel };
  Sample sample = Sample::kNone;
  double scale = 0;

  void Describe(OptionBinder& bind) {
    bind.Choice("sample", &sample,
                {{"none", Sample::kNone},
                 {"inverse_cdf", Sample::kInverseCdf},
                 {"gumbel", Sample::kGumbel}},
                "the key of the largest score, or one drawn by the noise in the input u or g");
    bind.Real("scale", &scale, 0, 1e6,
              "factor on the scores that are drawn from; 0 means 1/sqrt(head_dim)");
  }
};

}  // namespace tfb::hard

#endif  // TFB_ATTENTION_HARD_HARD_H_
