// Learned window: every head attends to the last tokens, as many as its learned width says.
//
//   y_i = sum_j a_ij v_j,   a_ij = m_h(p_i - j) exp(scale q_i . k_j) / sum_r m_h(p_i - r) exp(scale q_i . k_r)
//   m_h(d) = clip((ramp + w_h - d) / ramp, 0, 1)
//
// over the tokens j <= p_i = i + kv_tokens - query_tokens; scale = 1 / sqrt(head_dim). The parameter
// `widths` w is f32 [query_heads] in tokens and 0 or more. The weights fall to 0 over `ramp` tokens
// behind the width, so that there is a gradient of w. Cost: tokens (w_h + ramp) pairs a head.
//
// Source: Sukhbaatar et al. 2019, arXiv:1905.07799v2, equations (3) and (4), without their positions.
#ifndef TFB_TOOLS_LEARNED_WINDOW_LEARNED_WINDOW_H_
#define TFB_TOOLS_LEARNED_WINDOW_LEARNED_WINDOW_H_

#include "core/options.h"

namespace tfb::learned_window {

struct LearnedWindowOptions {
  double window = 256;
  double ramp = 32;

  void Describe(OptionBinder& bind) {
    bind.Real("window", &window, 0, kMaxTokens, "mean of the drawn widths, in tokens",
              {0, 128, 512});
    bind.Real("ramp", &ramp, 1, kMaxTokens, "tokens behind the width where weights fall to 0",
              {1, 32});
  }
};

}  // namespace tfb::learned_window

#endif  // TFB_TOOLS_LEARNED_WINDOW_LEARNED_WINDOW_H_
