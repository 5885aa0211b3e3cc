// Learned window: every head attends to the last tokens, as many as its learned width says.
//
//   y_i = sum_j a_ij v_j,   a_ij = m_h(i - j) exp(scale q_i . k_j) / sum_r m_h(i - r) exp(scale q_i . k_r)
//   m_h(d) = clip((ramp + w_h - d) / ramp, 0, 1)
//
// over j <= i; scale = 1 / sqrt(head_dim); the parameter `widths` w, f32 [query_heads], is in tokens.
// Cost: w_h + ramp pairs a token. Source: Sukhbaatar et al. 2019, arXiv:1905.07799v2, (3) and (4).
#ifndef TFB_TOOLS_LEARNED_WINDOW_LEARNED_WINDOW_H_
#define TFB_TOOLS_LEARNED_WINDOW_LEARNED_WINDOW_H_

#include "core/options.h"

namespace tfb::learned_window {

struct LearnedWindowOptions {
  double window = 256;
  double ramp = 32;

  void Describe(OptionBinder& bind) {
    bind.Real("window", &window, 1, kMaxTokens, "tokens: mean of the drawn widths", {1, 128, 512});
    bind.Real("ramp", &ramp, 1, kMaxTokens, "tokens where weights fall to 0", {1, 32});
  }
};

}  // namespace tfb::learned_window

#endif  // TFB_TOOLS_LEARNED_WINDOW_LEARNED_WINDOW_H_
