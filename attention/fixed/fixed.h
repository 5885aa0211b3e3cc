// The Sparse Transformer's fixed attention: the query's own block, and a few summary tokens of every
// block before it.
//
//   row      A1_i = {j <= i : floor(j / l) = floor(i / l)}
//   column   A2_i = {j <= i : l - (s + 1) c <= j mod l < l - s c},   s = g mod `summaries`
//   y_i      = softmax_j(scale q_i . k_j) v_j over the tokens seen, scale = 1 / sqrt(head_dim)
//
// with l the `stride`, c the `summary` tokens of a block and g the key-value head: with one of
// `summaries` every head sees the last c tokens of each block, with more of them heads take turns at
// distinct runs of c tokens. How the two factors are `combine`d:
//
//   merged       every head sees A1 and A2, each token once
//   interleaved  layer r of a network sees A1 where r is even, else A2: `layer` is r
//   per_head     key-value head g and its query heads see A1 where g is even, else A2
//
// A2 alone leaves the queries before the first summary token without a key: their output is 0 and
// their log-sum-exp -inf. Causal self-attention only.
//
// Source: Child, Gray, Radford, Sutskever 2019, "Generating long sequences with sparse transformers",
// arXiv:1904.10509v1, sections 4.2 and 4.3, with c of 8, 16, 32 and l of 128, 256. The authors'
// published kernels (openai/sparse_attention) merge the factors, with `summaries` = num_verts of c =
// vertsize blocks each.
// Cost: 2 pairs (head_dim + value_dim) FLOPs with about tokens (l / 2 + c tokens / (2 l)) pairs when
// merged: tokens^1.5 where l is about the root of tokens.
#ifndef TFB_ATTENTION_FIXED_FIXED_H_
#define TFB_ATTENTION_FIXED_FIXED_H_

#include <cstdint>

#include "core/options.h"

namespace tfb::fixed {

struct FixedOptions {
  int64_t stride = 128;
  int64_t summary = 8;
  int64_t summaries = 1;
  enum class Combine { kMerged, kInterleaved, kPerHead };
  Combine combine = Combine::kMerged;
  int64_t layer = 0;

  void Describe(OptionBinder& bind) {
    bind.Int("stride", &stride, 1, kMaxTokens, "l: tokens of a block", {32, 64, 128, 256, 512});
    bind.Int("summary", &summary, 1, kMaxTokens,
             "c: summary tokens of a block; summary times summaries is at most stride");
    bind.Int("summaries", &summaries, 1, kMaxTokens,
             "distinct runs of summary tokens, which key-value heads take in turn");
    bind.Choice(
        "combine", &combine,
        {{"merged", Combine::kMerged},
         {"interleaved", Combine::kInterleaved},
         {"per_head", Combine::kPerHead}},
        "how the two factors are used: both by every head, one by each layer, or one by each "
        "key-value head");
    bind.Int("layer", &layer, 0, kMaxTokens,
             "where interleaved: the layer's number; even ones see the row, odd ones the column");
  }
};

}  // namespace tfb::fixed

#endif  // TFB_ATTENTION_FIXED_FIXED_H_
