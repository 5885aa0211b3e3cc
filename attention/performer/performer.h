// Performer (FAVOR+): softmax attention estimated with positive random features, linear in tokens.
//
//   y_i  = sum_j w_ij v_j
//   w_ij = phi(q_i) . phi(k_j) / (sum_j phi(q_i) . phi(k_j) + d sum_r phi(q_i)_r)
//
// The sums are over the keys j that are tokens and, where the problem is causal, j <= i + kv_tokens
// - query_tokens. x is head_dim^(-1/4) times q_i or k_j, w_r a row of W, epsilon and d options (d
// is `denominator_epsilon`), and m = `features` the length of phi:
//
//   softmax     phi(x)_r       = m^(-1/2) (exp(  w_r . x - |x|^2 / 2 - s) + epsilon)    r < m
//   hyperbolic  phi(x)_(r, +-) = m^(-1/2) (exp(+-w_r . x - |x|^2 / 2 - s) + epsilon)    r < m / 2
//   relu        phi(x)_r       = max(w_r . x, 0) + relu_epsilon                         r < m
//
// relu is a kernel of its own, which does not estimate the softmax. W is one matrix for all heads
// or, with `per_head`, one for each key-value head.
//
// The stabiliser s of a query is max_r w_r . x (of |w_r . x| for hyperbolic). The stabiliser of the
// keys is common to all keys of a sum: the maximum over r and over the keys that row i sees
// (`key_maximum` running), so that no row depends on later keys, or over all keys of the batch and
// head that are tokens, later ones too (sequence; published code does so). It cancels in w_ij up to
// epsilon and d. With `stabilise` false, s = 0.
//
// Without stabiliser and epsilon, E over W of phi(q_i) . phi(k_j) = exp(q_i . k_j /
// sqrt(head_dim)), for rows of W that are N(0, I) each: independent (`orthogonal` false), or in
// blocks of head_dim rows that are orthogonal (the last block cut short), with norms drawn from
// chi(head_dim). `norms` sqrt_d makes all of them sqrt(head_dim) long, which is biased. With x, y
// the scaled vectors, z = x + y, SM = exp(x . y), for independent rows:
//
//   softmax     E (phi . phi - SM)^2 = exp(|z|^2) SM^2 (1 - exp(-|z|^2)) / m
//   hyperbolic  that, times (1 - exp(-|z|^2)); with as many rows of W, half of this
//
// Orthogonal rows are better. The error of y_i falls as features^(-1/2); it grows with |q_i + k_j|.
//
// log_sum_exp is the logarithm of the denominator with the stabilisers undone: it estimates that of
// dense attention. A row whose denominator is 0 (relu with relu_epsilon 0) gives y_i = 0.
//
// Source: Choromanski et al. 2021, "Rethinking attention with Performers", arXiv:2009.14794v4:
// lemma 1 (features), lemma 2 (variance), section 2.4 (orthogonal), section 2.2 (relu). Its
// published codes: epsilon 1e-6 (TensorFlow) or 1e-4 (JAX, performer-pytorch), the key maximum over
// the sequence even where causal; for relu TensorFlow and JAX leave out head_dim^(-1/4)
// (`relu_scale` false); performer-pytorch adds 1e-6 to the running sums of features
// (`denominator_epsilon`); W is drawn anew every 1000 steps or at each call (`redraw`). All of them
// have one W for the heads of a layer; the paper does not say. `per_head` is as in Random Feature
// Attention's code (attention/rfa), so that the heads' errors are independent.
//
// Cost for r rows of W: 2 r head_dim FLOPs a token for its projections and 2 m (value_dim + 1) to
// add a key or to read for a query: linear in tokens, 8 tokens m head_dim a head in all
// (hyperbolic: 6). Decoding keeps m (value_dim + 1) numbers a head, whatever the number of tokens.
// Engine linear (core/linear) does the work.
//
// The technique has the parameter w f32, W: [rows of W, head_dim], or with per_head [kv_heads, rows
// of W, head_dim], drawn from the seed.
#ifndef TFB_ATTENTION_PERFORMER_PERFORMER_H_
#define TFB_ATTENTION_PERFORMER_PERFORMER_H_

#include <cstdint>

#include "core/linear/feature_matrix.h"
#include "core/technique.h"

namespace tfb::performer {

struct PerformerOptions {
  enum class Kernel { kSoftmax, kHyperbolic, kRelu };
  using Norms = RowNorms;
  enum class KeyMaximum { kRunning, kSequence };

  int64_t features = 256;
  Kernel kernel = Kernel::kSoftmax;
  bool orthogonal = true;
  Norms norms = Norms::kChi;
  double epsilon = 1e-6;
  double relu_epsilon = 1e-3;
  double denominator_epsilon = 0;
  bool stabilise = true;
  KeyMaximum key_maximum = KeyMaximum::kRunning;
  bool relu_scale = true;
  bool redraw = false;
  bool per_head = false;

  // Returns the number of rows of W.
  int64_t rows() const { return kernel == Kernel::kHyperbolic ? features / 2 : features; }

  void Describe(OptionBinder& bind) {
    bind.Int("features", &features, 1, 65536,
             "length of phi; hyperbolic has two features a row of W, so an even number",
             {32, 64, 128, 256, 512, 1024});
    bind.Choice("kernel", &kernel,
                {{"softmax", Kernel::kSoftmax},
                 {"hyperbolic", Kernel::kHyperbolic},
                 {"relu", Kernel::kRelu}},
                "feature map: exp(w x), exp(w x) and exp(-w x), or max(w x, 0)");
    bind.Bool("orthogonal", &orthogonal, "rows of W orthogonal within blocks of head_dim");
    bind.Choice("norms", &norms, {{"chi", Norms::kChi}, {"sqrt_d", Norms::kSqrtD}},
                "lengths of W's rows: as of a Gaussian vector (unbiased), or all sqrt(head_dim)");
    bind.Real("epsilon", &epsilon, 0, 1, "added to each feature, for softmax and hyperbolic");
    bind.Real("relu_epsilon", &relu_epsilon, 0, 1, "added to each feature, for relu");
    bind.Real("denominator_epsilon", &denominator_epsilon, 0, 1,
              "added to each entry of the sum of key features, in the denominator alone");
    bind.Bool("stabilise", &stabilise, "subtract maxima in the exponents");
    bind.Choice("key_maximum", &key_maximum,
                {{"running", KeyMaximum::kRunning}, {"sequence", KeyMaximum::kSequence}},
                "keys whose maximum is subtracted where causal: those that a row sees, or all");
    bind.Bool("relu_scale", &relu_scale, "multiply inputs by head_dim^(-1/4), for relu");
    bind.Bool(
        "redraw", &redraw,
        "each Setup draws W anew, unless the caller has given one; the first keeps the seed's");
    bind.Bool("per_head", &per_head, "whether each key-value head has a matrix W of its own");
  }
};

}  // namespace tfb::performer

#endif  // TFB_ATTENTION_PERFORMER_PERFORMER_H_
