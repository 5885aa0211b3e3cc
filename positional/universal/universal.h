// The Universal Transformer's encoding of position and time: before each application of one
// multi-head attention the sum of two encodings is added, of the token's position and of the step.
//
//   h^0 = x,   h^n = multi_head(h^(n-1)_p + PE[p + position_offset] + T[n - 1 + first_step])
//   y = h^steps,    n = 1 .. steps
//   T = PE, the same sinusoids, or with time=learned a parameter with a row for each step
//
// PE is as in positional/sinusoidal. So P^t[p] = PE[p] + PE[t] is separable, and differs from the
// sinusoidal encoding by one row that all tokens have in common.
//
// Source: Dehghani et al. 2019, "Universal Transformers", arXiv:1807.03819v3, section 2.1: steps
// count from 1 and sinusoids are the original's. This is the part of that network which concerns
// positions: residuals, layer norms, the transition function and halting belong to the whole
// network. So the one multi-head attention, whose parameters all steps share, is applied to its own
// output.
//
// Where known code differs, an option has it: tensor2tensor (universal_transformer_util.py) learns T
// by default (time=learned), counts steps from 0 (first_step=0), and has its own sinusoids
// (layout=concatenated, frequencies=inclusive). T is drawn N(0, 1), as large as tensor2tensor's,
// which is N(0, 1 / model_dim) times sqrt(model_dim).
//
// Cost: that of multi_head a step; tables of tokens x model_dim and steps x model_dim, and never of
// their product.
//
// The technique is self-attention on x [batch, tokens, model_dim], with the optional key_mask and
// the further inputs of `inner` (core/layers/attention/encoded_attention.h). Its parameters are
// those of multi_head, and with time=learned t [steps, model_dim]. The counterpart has the inner
// technique's counterpart inside.
#ifndef TFB_POSITIONAL_UNIVERSAL_UNIVERSAL_H_
#define TFB_POSITIONAL_UNIVERSAL_UNIVERSAL_H_

#include <cstdint>

#include "core/layers/attention/position_time.h"
#include "core/layers/attention/projected_attention.h"
#include "core/layers/recompute.h"
#include "core/technique.h"

namespace tfb::universal {

struct UniversalOptions {
  int64_t steps = 2;
  layers::PositionTime encoding;
  TechniqueSpec inner = {"dense", {}};
  bool bias = false;
  bool recompute = false;

  void Describe(OptionBinder& bind) {
    bind.Int("steps", &steps, 1, 16, "applications of the attention");
    encoding.Describe(bind);
    layers::BindInner(bind, &inner);
    bind.Bool("bias", &bias, "projections add biases");
    DescribeRecompute(bind, &recompute);
  }
};

}  // namespace tfb::universal

#endif  // TFB_POSITIONAL_UNIVERSAL_UNIVERSAL_H_
