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
// Gradients, of a loss L with g_i = dL/dy_i, for the choice that the Run made:
//
//   dv_j  = sum_i [j = j*_i] g_i
//   ds_ij = w_i ([j = j*_i] - p_ij)                      inverse_cdf and gumbel; w_i = b_i - R_i
//
// The choice has no derivative. With sample=none, therefore, no gradient reaches q and k. A drawn
// key has the score-function estimate of the paper (its learning rule in section 4.1, with lambda_r
// = 1; REINFORCE): -(R - b) grad log p_ij*, where R is the reward and b a baseline. A layer knows
// no more of the loss than g, so that the reward of a row is minus the loss to first order in its
// output, R_i = -g_i . y_i. Where L is linear in y, the mean of the gradients over the noise is the
// gradient of L at soft attention, with any b that does not depend on the row's noise; otherwise
// each is that of L linearised at the draw. The baseline is the optional input of that name, which
// only Backward reads, 0 where it is left out: a moving average of the paper's kind is b = 0.9 b +
// 0.1 mean R, broadcast to all rows. For another reward R', such as -L itself, with a baseline b'
// of its own, it is b' - R' - g_i . y_i. The paper's entropy term, and its half of draws that are
// replaced by their mean, are left out.
//
// Source: Xu et al. 2015, "Show, attend and tell", arXiv:1502.03044v3, section 4.1 (sampling and
// its gradient); scores as in dense attention. Gumbel-max: Maddison, Tarlow, Minka 2014,
// arXiv:1411.0030v2, section 2.
// Cost: 2 pairs head_dim FLOPs, no exponentials unless inverse_cdf, which computes scores twice.
// Backward: value_dim additions a row; where keys are drawn 6 pairs head_dim FLOPs, and every score
// and its exponential computed twice. A Run keeps the index.
//
// The technique reads q, k, v, the optional key_mask, and u f32 [batch, query_heads, query_tokens]
// or g f32 [batch, query_heads, query_tokens, kv_tokens] with the optional baseline, f32 [batch,
// query_heads, query_tokens]. It writes out and the optional index, i32 [batch, query_heads,
// query_tokens].
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
