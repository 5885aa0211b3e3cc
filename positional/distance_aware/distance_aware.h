// DA-Transformer: distance-aware attention, whose heads learn how far they look.
//
//   s_ij = relu(q_i . k_j) f_h(|p_i - j|) / sqrt(head_dim),   p_i = i + kv_tokens - query_tokens
//   f_h(n) = (1 + exp(beta_h)) / (1 + exp(beta_h - alpha_h n))
//          = exp(softplus(beta_h) - softplus(beta_h - alpha_h n))
//
// f(0) = 1. With distance, alpha > 0 multiplies scores by up to 1 + exp(beta), and alpha < 0 takes
// them to 0. A score of 0 keeps the weight exp(0): neither f -> 0 nor the ReLU of a negative product
// hides a key, they flatten attention. Masks act after the product. The layer computes f in its
// second form, which does not overflow before f does.
//
// Source: Wu, Wu, Huang 2021, "DA-Transformer: distance-aware transformer", NAACL,
// arXiv:2010.06925v2, section 3. Its model is an encoder, without a causal mask, and its queries and
// keys are of the same tokens: p_i = i. No code of the authors is public.
// Where the paper is silent, this project decides: d under the root is head_dim, not model_dim.
// alpha is drawn from N(0, 0.1^2), so that half of the heads prefer far keys, half near ones, and f
// changes over tens of tokens; beta from N(0, 1).
//
// Cost: dense attention and two operations a score; memory heads (query_tokens + kv_tokens) floats.
// Parameters: alpha [query_heads], beta [query_heads].
#ifndef TFB_POSITIONAL_DISTANCE_AWARE_DISTANCE_AWARE_H_
#define TFB_POSITIONAL_DISTANCE_AWARE_DISTANCE_AWARE_H_

#include <cstdint>

#include "core/traced.h"

namespace tfb::distance_aware {

// Returns f(distance) by the stable form.
Traced DistanceAwareFactor(const Traced& alpha, const Traced& beta, int64_t distance);

}  // namespace tfb::distance_aware

#endif  // TFB_POSITIONAL_DISTANCE_AWARE_DISTANCE_AWARE_H_
