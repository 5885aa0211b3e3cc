// Learned absolute position encoding: a hidden state has the row of its position added, and
// multi-head attention follows.
//
//   h^0 = x,   h^n = multi_head_n(h^(n-1)_p + P^n[p + position_offset]),   y = h^layers
//
// P^n is a parameter [max_tokens, model_dim], drawn N(0, 0.02^2). The default is one layer. In a
// stack only the first layer has a table, which is added to its input as if to an embedding, or
// with per_layer each layer has its own; multi_head_n have parameters of their own, and nothing
// else is between them: no residual, no normalisation. There are no positions beyond the table: a
// problem that needs them is refused.
//
// Sources: Gehring et al. 2017, "Convolutional sequence to sequence learning", arXiv:1705.03122v3,
// section 3.1; a table for each layer: Al-Rfou et al. 2019, "Character-level language modeling with
// deeper self-attention", arXiv:1808.04444v2, section 2.2. The deviation 0.02 is GPT-2's.
//
// max_tokens is 4096 by default, more than the 1024 of GPT-2 and the 512 of BERT. Code with a row
// for padding before the others, as fairseq and OPT have it, is position_offset=2. Not followed:
// OPT counts positions without padded tokens.
//
// Cost: that of multi_head a layer, and max_tokens model_dim parameters a table.
//
// The technique is self-attention on x [batch, tokens, model_dim], with the optional key_mask and
// the further inputs of `inner` (core/layers/attention/encoded_attention.h). Its parameters are p
// [tables, max_tokens, model_dim], and those of multi_head, as applicationN.NAME where there are
// several layers. `inner` is one technique for all layers, or one for each. It returns
// InvalidArgument where a token is beyond the tables. The counterpart has the inner techniques'
// counterparts inside.
#ifndef TFB_POSITIONAL_LEARNED_LEARNED_H_
#define TFB_POSITIONAL_LEARNED_LEARNED_H_

#include <cstdint>

#include "core/layers/attention/projected_attention.h"
#include "core/layers/recompute.h"
#include "core/technique.h"

namespace tfb::learned {

struct LearnedOptions {
  static constexpr int64_t kMaxPositions = int64_t{1} << 20;

  int64_t max_tokens = 4096;
  int64_t layers = 1;
  bool per_layer = false;
  int64_t position_offset = 0;
  TechniqueList inner = {{{"dense", {}}}};
  bool bias = false;
  bool recompute = false;

  int64_t tables() const { return per_layer ? layers : 1; }

  void Describe(OptionBinder& bind) {
    bind.Int("max_tokens", &max_tokens, 1, kMaxPositions, "rows of a table");
    bind.Int("layers", &layers, 1, 16, "multi-head attention layers, one on the other");
    bind.Bool("per_layer", &per_layer, "each layer adds a table of its own; else only the first");
    bind.Int("position_offset", &position_offset, 0, kMaxPositions, "row of token 0");
    layers::BindInner(bind, &inner);
    bind.Bool("bias", &bias, "projections add biases");
    DescribeRecompute(bind, &recompute);
  }
};

}  // namespace tfb::learned

#endif  // TFB_POSITIONAL_LEARNED_LEARNED_H_
