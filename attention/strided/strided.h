// The Sparse Transformer's strided attention: a window of the last l tokens, and every l-th token.
//
//   row      A1_i = {max(0, i - l), ..., i}              bandwidth = paper; i - l + 1 where code
//   column   A2_i = {j <= i : (i - j) mod l = 0}
//   y_i      = softmax_j(scale q_i . k_j) v_j over the tokens seen, scale = 1 / sqrt(head_dim)
//
// with l the `stride`, about the square root of the tokens. Two steps reach every earlier token. How
// the two factors are `combine`d:
//
//   merged       every head sees A1 and A2, each token once
//   interleaved  layer r of a network sees A1 where r is even, else A2: `layer` is r
//   per_head     key-value head g and its query heads see A1 where g is even, else A2
//
// A token always sees itself. Causal self-attention only.
//
// Source: Child, Gray, Radford, Sutskever 2019, "Generating long sequences with sparse transformers",
// arXiv:1904.10509v1, sections 4.2 and 4.3. Its A1 begins at i - l, and so holds l + 1 tokens; the
// authors' published kernels (openai/sparse_attention) keep l of them, i itself included.
// Cost: 2 pairs (head_dim + value_dim) FLOPs with about tokens (l + tokens / (2 l)) pairs when merged:
// tokens^1.5 where l is about the root of tokens.
#ifndef TFB_ATTENTION_STRIDED_STRIDED_H_
#define TFB_ATTENTION_STRIDED_STRIDED_H_

#include <cstdint>

#include "core/options.h"

namespace tfb::strided {

struct StridedOptions {
  int64_t stride = 128;
  enum class Combine { kMerged, kInterleaved, kPerHead };
  Combine combine = Combine::kMerged;
  int64_t layer = 0;
  enum class Bandwidth { kPaper, kCode };
  Bandwidth bandwidth = Bandwidth::kPaper;

  void Describe(OptionBinder& bind) {
    bind.Int("stride", &stride, 1, kMaxTokens,
             "l: how far the row reaches back, and the step of the column; best near the square "
             "root of the tokens",
             {32, 64, 128, 256, 512});
    bind.Choice(
        "combine", &combine,
        {{"merged", Combine::kMerged},
         {"interleaved", Combine::kInterleaved},
         {"per_head", Combine::kPerHead}},
        "how the two factors are used: both by every head, one by each layer, or one by each "
        "key-value head");
    bind.Int("layer", &layer, 0, kMaxTokens,
             "where interleaved: the layer's number; even ones see the row, odd ones the column");
    bind.Choice(
        "bandwidth", &bandwidth, {{"paper", Bandwidth::kPaper}, {"code", Bandwidth::kCode}},
        "tokens of the row, the query's own included: stride + 1 as in the paper, stride as "
        "in its authors' code");
  }
};

}  // namespace tfb::strided

#endif  // TFB_ATTENTION_STRIDED_STRIDED_H_
