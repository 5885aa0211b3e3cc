// Random Feature Attention: a softmax over unit vectors, estimated with random Fourier features, linear
// in tokens.
//
//   y_i = sum_j a_ij v_j / D_i,   a_ij = c_ij phi(q_i) . phi(k_j),   D_i = sum_j a_ij
//
// over the keys j that are tokens and, where the problem is causal, j <= i' = i + kv_tokens -
// query_tokens. With u = x / |x| the direction of a query or key, w_r row r of its key-value head's
// matrix W, drawn from N(0, I), and n = features:
//
//   gaussian  phi(x) = (n / 2)^(-1/2) [sin(w_r . u / sigma), cos(w_r . u / sigma)], r < n / 2
//   arccos    phi(x) = n^(-1/2) [max(w_r . u / sigma, 0)],                          r < n
//
// c_ij is 1 or, with `gate` key, the factor of key j in the recurrence S_t = g_t S_(t-1) + (1 -
// g_t) phi(k_t) v_t, and in the same recurrence for the sum that divides:
//
//   c_ij = (1 - g_j) prod_(j < l <= i') g_l,   g_t = sigmoid(gate_w . k_t + gate_b)
//
// with gate_w and gate_b those of the key-value head, and products over tokens alone. The paper's
// gate reads the hidden state x_t; here it reads k_t, which a layer computes from x_t by a matrix.
// gate_w = 0 makes the gate constant: keys then weigh g^(i' - j). Gates are for causal problems.
//
// phi . phi estimates, without bias, exp(-|u - u'|^2 / (2 sigma^2)) for gaussian, with the variance
// (1 - exp(-|u - u'|^2 / sigma^2))^2 / n. For unit vectors that is exp(u . u' / sigma^2) up to a common
// factor, so that without gates y_i estimates dense attention among the directions of queries and keys
// at the temperature sigma^2, its error falling as features^(-1/2); it is dense attention of q and k
// themselves where these are of length head_dim^(1/4) / sigma. arccos, the arc-cosine kernel of degree
// 1, is one of its own.
//
// D_i can be 0 or negative: where |D_i| < denominator_floor, that takes its place, with the sign of
// D_i. The statistic rows_without_weight is the share of rows whose D_i is not above it. A sum that may
// be negative has no logarithm, so there is no log_sum_exp. Where D_i is small beside sum_j |a_ij|, as
// a small sigma with few features makes it, errors and roundings grow in that proportion.
//
// A vector shorter than 2^-60 has no direction: u = 0. One longer than 2^63 gives NaN.
//
// With `channel_scale`, a parameter [kv_heads, head_dim], 1 until it is set, multiplies the columns
// of W: a learned sigma for each channel, w_r = scale * w~_r.
//
// Source: Peng et al. 2021, "Random Feature Attention", arXiv:2103.02143v2, sections 2.2 (features), 3.1
// (attention) and 3.2 (gate). w_r / sigma is N(0, sigma^(-2) I), as its code has it too; with
// N(0, sigma^2 I), which is also found in print, the kernel would be exp(-sigma^2 |u - u'|^2 / 2). The
// code (Noahs-ARK/RFA) divides by |x| + 1e-3 (`length_epsilon`) and draws W from a pool of 500 (`redraw`
// draws it anew). Not followed: it scales features by 0.1, which the ratio cancels, and then holds D_i
// at 1 from below (its masked form |D_i| at 1e-3), which is not small; its orthogonal matrices have
// orthogonal columns and norms of chi(rows), which are not those of Gaussian rows. Here `orthogonal` is
// as Performer's: rows orthogonal in blocks of head_dim, lengths chi(head_dim).
//
// Cost for r rows of W: 2 r head_dim FLOPs a token for its projections and 2 features (value_dim + 1)
// to add a key or to read for a query, linear in tokens: 6 tokens features head_dim a head in all
// (arccos: 8). Decoding keeps features (value_dim + 1) numbers a head, whatever the number of tokens.
// Engine linear (core/linear) does the work.
//
// The parameters, in f32, are w [kv_heads, rows of W, head_dim], drawn from the seed; with a gate
// `gate` [kv_heads, head_dim + 1], gate_w and then gate_b, of which the first is drawn from N(0, 1
// / head_dim); with channel_scale that [kv_heads, head_dim].
#ifndef TFB_ATTENTION_RFA_RFA_H_
#define TFB_ATTENTION_RFA_RFA_H_

#include <cstdint>

#include "core/technique.h"

namespace tfb::rfa {

struct RfaOptions {
  enum class Kernel { kGaussian, kArccos };
  enum class Gate { kNone, kKey };

  int64_t features = 256;
  Kernel kernel = Kernel::kGaussian;
  double sigma = 1;
  Gate gate = Gate::kNone;
  double gate_bias = 2;
  bool channel_scale = false;
  bool orthogonal = false;
  double length_epsilon = 0;
  double denominator_floor = 1e-6;
  bool redraw = false;

  // Returns the number of rows of W.
  int64_t rows() const { return kernel == Kernel::kGaussian ? features / 2 : features; }

  void Describe(OptionBinder& bind) {
    bind.Int("features", &features, 32, 65536,
             "length of phi; gaussian has two features a row of W, so an even number",
             {64, 128, 256, 512, 1024});
    bind.Choice("kernel", &kernel, {{"gaussian", Kernel::kGaussian}, {"arccos", Kernel::kArccos}},
                "feature map: sin(w u) and cos(w u), or max(w u, 0)");
    bind.Real("sigma", &sigma, 0.05, 20,
              "square root of the temperature: scores are u u' / sigma^2");
    bind.Choice("gate", &gate, {{"none", Gate::kNone}, {"key", Gate::kKey}},
                "what makes earlier keys fade, where causal: nothing, or a gate on each key");
    bind.Real("gate_bias", &gate_bias, -20, 20, "gate_b of a fresh layer: 2 keeps 0.88 a token");
    bind.Bool("channel_scale", &channel_scale, "a parameter scales each channel of W");
    bind.Bool("orthogonal", &orthogonal, "rows of W orthogonal within blocks of head_dim");
    bind.Real("length_epsilon", &length_epsilon, 0, 1,
              "added to the length that divides queries and keys");
    bind.Real("denominator_floor", &denominator_floor, 0, 1,
              "smallest magnitude of what divides a row");
    bind.Bool(
        "redraw", &redraw,
        "each Setup draws W anew, unless the caller has given one; the first keeps the seed's");
  }
};

}  // namespace tfb::rfa

#endif  // TFB_ATTENTION_RFA_RFA_H_
