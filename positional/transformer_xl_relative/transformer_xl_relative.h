// Transformer-XL's relative positions: a query scores a key by content and by distance, both with a
// learned bias added to the query.
//
//   s_ij  = ((q_i + u) . k_j + (q_i + v) . (r_d W_r)) / sqrt(head_dim),   d = p_i - j
//   p_i   = i + kv_tokens - query_tokens
//   r_d   = [sin(d f_0), sin(d f_1), ..., cos(d f_0), cos(d f_1), ...],   f_c = 10000^(-2c/model_dim)
//
// with u and v per head, and head h's columns of W_r. The paper is causal, d >= 0. Without a causal
// mask r of a later key, d < 0, is the same formula: its sines change sign, as in XLNet.
//
// Source: Dai, Yang, Yang, Carbonell, Le, Salakhutdinov 2019, "Transformer-XL: attentive language
// models beyond a fixed-length context", arXiv:1901.02860v3, section 3.3 and appendix B; XLNet:
// Yang et al., arXiv:1906.08237v2, section 2.4. The negative distances and max_distance are as in
// the authors' codes. The paper's projections W_E and W_q are left to the caller: queries and keys
// come projected. In 16-bit problems r_d W_r is rounded to their dtype, like the keys to which it
// is added (r_d itself is fp32, as W_r is). Segments and their memory are memory/transformer_xl,
// which shares core/layers/attention/relative_positions.h.
//
// Cost: a product of head_dim more a score: 1.5 times dense attention, 1.6 times in the backward
// pass. Setup, and the gradient of W_r, 2 model_dim^2 FLOPs a distance. Memory: heads
// (query_tokens + kv_tokens) head_dim floats.
//
// The parameters, f32, with H = query_heads, are w_r [H head_dim, H head_dim], y = r W_r, u and v
// [H, head_dim]; drawn N(0, 0.02^2), as the authors' code does.
#ifndef TFB_POSITIONAL_TRANSFORMER_XL_RELATIVE_TRANSFORMER_XL_RELATIVE_H_
#define TFB_POSITIONAL_TRANSFORMER_XL_RELATIVE_TRANSFORMER_XL_RELATIVE_H_

#include <cstdint>

#include "core/options.h"

namespace tfb::transformer_xl_relative {

struct TransformerXlRelativeOptions {
  static constexpr int64_t kMaxClamp = int64_t{1} << 20;

  int64_t max_distance = 0;

  void Describe(OptionBinder& bind) {
    bind.Int("max_distance", &max_distance, 0, kMaxClamp,
             "larger distances count as this one; 0 means none do");
  }
};

}  // namespace tfb::transformer_xl_relative

#endif  // TFB_POSITIONAL_TRANSFORMER_XL_RELATIVE_TRANSFORMER_XL_RELATIVE_H_
