// Sinusoidal encoding: sinusoids of its position are added to a hidden state, and multi-head
// attention follows.
//
//   u_p = scale x_p + PE[p + position_offset],   y = multi_head(u)
//   PE[p, 2 j] = sin(p w_j),  PE[p, 2 j + 1] = cos(p w_j),   w_j = base^(-2 j / d),  d = model_dim
//
// so that |PE[p]|^2 = d / 2, PE[p] . PE[q] depends on p - q alone, and PE[p + k] is PE[p] with each
// pair of channels turned by k w_j. With an odd d the last cosine is missing, and these properties
// do not hold. Nothing is learned: any offset, any length.
//
// Source: Vaswani et al. 2017, "Attention is all you need", arXiv:1706.03762v7, section 3.5, base
// 10000; the scale sqrt(d) is that of embeddings, section 3.4. Embeddings drawn N(0, 1 / d) are N(0,
// 1) by it, which hidden states here are from the start: so embedding_scale is `one` by default, and
// sqrt_model_dim is the paper's, for embeddings as inputs.
//
// Where known code differs, an option has it. Marian and Transformer-XL put all sines before all
// cosines (layout=concatenated), the same up to the order of channels. tensor2tensor and fairseq do
// so too, and divide by d / 2 - 1 instead of d / 2 (frequencies=inclusive), so that all wavelengths
// but the first differ. Not followed: these two leave the last channel of an odd d 0 where we have
// a sine; and their tables begin at a padding index (position_offset does that).
//
// Cost: that of multi_head, and a table of tokens x d floats, made at Setup with angles in double.
//
// The technique is self-attention on x [batch, tokens, model_dim], with the optional key_mask and
// the further inputs of `inner` (core/layers/attention/encoded_attention.h). Its parameters are
// those of multi_head. The counterpart has the inner technique's counterpart inside.
#ifndef TFB_POSITIONAL_SINUSOIDAL_SINUSOIDAL_H_
#define TFB_POSITIONAL_SINUSOIDAL_SINUSOIDAL_H_

#include <cstdint>

#include "core/layers/attention/projected_attention.h"
#include "core/layers/sinusoid.h"
#include "core/technique.h"

namespace tfb::sinusoidal {

struct SinusoidalOptions {
  // Angles up to 2^30 radians are right to 2^-22, 2.4e-7, since a frequency in double has 2^-52.
  static constexpr int64_t kMaxOffset = int64_t{1} << 30;
  enum class Scale { kOne, kSqrtModelDim };

  SinusoidForm form;
  int64_t position_offset = 0;
  Scale embedding_scale = Scale::kOne;
  TechniqueSpec inner = {"dense", {}};
  bool bias = false;

  void Describe(OptionBinder& bind) {
    bind.Choice("layout", &form.layout,
                {{"interleaved", SinusoidLayout::kInterleaved},
                 {"concatenated", SinusoidLayout::kConcatenated}},
                "sines and cosines in turn, or all sines before all cosines");
    bind.Choice(
        "frequencies", &form.frequencies,
        {{"paper", SinusoidFrequencies::kPaper}, {"inclusive", SinusoidFrequencies::kInclusive}},
        "base^(-2 j / model_dim), or up to 1 / base inclusive, as tensor2tensor has it");
    bind.Real("base", &form.base, 1, 1e9, "of the frequencies");
    bind.Int("position_offset", &position_offset, 0, kMaxOffset, "position of token 0");
    bind.Choice("embedding_scale", &embedding_scale,
                {{"one", Scale::kOne}, {"sqrt_model_dim", Scale::kSqrtModelDim}},
                "factor of x; sqrt_model_dim is for embeddings of variance 1 / model_dim");
    layers::BindInner(bind, &inner);
    bind.Bool("bias", &bias, "projections add biases");
  }
};

}  // namespace tfb::sinusoidal

#endif  // TFB_POSITIONAL_SINUSOIDAL_SINUSOIDAL_H_
