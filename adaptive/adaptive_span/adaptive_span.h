// Adaptive attention span: each head, or each token, learns how far it looks back, and looks no
// further.
//
//   x    = i + kv_tokens - query_tokens - j                  distance, 1 <= x <= max_span
//   s_ij = q_i . (k_j + p_x) / sqrt(head_dim)
//   m(x) = clip((ramp + z - x) / ramp, 0, 1)
//   a_ij = m(x_ij) exp(s_ij) / sum_r m(x_ir) exp(s_ir),   y_i = sum_j a_ij v_j
//
// p is learned and shared by all heads. z is learned per head, or, where `dynamic`, z_i = max_span
// sigmoid(w_h . x_i + b_h) of the hidden state x_i. A token does not see itself, so that the first
// token sees nothing: its output is 0. Keys of weight 0 are not computed: a head costs
// min(max_span, ceil(ramp + z) - 1) keys a query.
//
// Source: Sukhbaatar, Grave, Bojanowski, Joulin 2019, "Adaptive attention span in transformers",
// ACL, arXiv:1905.07799v2, equations 3 to 5 and section 3. Deviations of the authors' code, not
// followed: distance 1 has index 0 there, and 1e-8 is added to the normaliser.
// Cost: 2 pairs (2 head_dim + value_dim) FLOPs over the pairs of weight above 0; memory linear in
// tokens and max_span.
//
// Parameters: span [query_heads] in tokens, or span_weight [query_heads, model_dim] and span_bias
// [query_heads]; with positions, position [max_span, head_dim], where row x - 1 is for distance x,
// of the problem's dtype; the others are f32.
// Statistics: mean_span and max_span, in tokens.
// Training adds a penalty on spans: span_penalty.h.
#ifndef TFB_ADAPTIVE_ADAPTIVE_SPAN_ADAPTIVE_SPAN_H_
#define TFB_ADAPTIVE_ADAPTIVE_SPAN_ADAPTIVE_SPAN_H_

#include <cstdint>

#include "core/options.h"

namespace tfb::adaptive_span {

struct AdaptiveSpanOptions {
  int64_t max_span = 1024;
  double span = 128;
  double ramp = 32;
  bool dynamic = false;
  bool positions = true;

  void Describe(OptionBinder& bind) {
    bind.Int("max_span", &max_span, 1, int64_t{1} << 24,
             "farthest distance that any head can reach, in tokens");
    bind.Real("span", &span, 0, 1 << 24,
              "mean of the seeded spans z, in tokens; spans are exponential over heads, as learned "
              "ones are",
              {32, 64, 128, 256, 512});
    bind.Real("ramp", &ramp, 1, 1 << 20, "length of the soft edge, in tokens");
    bind.Bool("dynamic", &dynamic, "a span per token, computed from the hidden state \"x\"");
    bind.Bool("positions", &positions, "learned position embeddings p in the keys");
  }
};

}  // namespace tfb::adaptive_span

#endif  // TFB_ADAPTIVE_ADAPTIVE_SPAN_ADAPTIVE_SPAN_H_
