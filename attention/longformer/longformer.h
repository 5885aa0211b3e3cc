// Longformer: a sliding window, dilated per head, and a few global tokens, which see all tokens and
// are seen by all.
//
// Token i that is not global sees token j when
//
//   j is global, or |i - j| <= d w / 2 and d divides i - j                      not causal
//   j <= i and j is global, or 0 <= i - j <= d w_1 and d divides i - j          causal
//
// with w the `window`, d the head's `dilation` and w_1 `one_sided`. A global token sees every token
// (every earlier one where causal). Then
//
//   y_i = softmax_j(scale q_i . k_j) v_j over the tokens seen, scale = 1 / sqrt(head_dim)
//
// where global rows use queries, keys and values of their own (q_global, k_global, v_global, the
// results of separate projections) if `projections` is own, and the common ones if it is shared. A
// global token inside the window counts once.
//
// Which tokens are global is the task's choice, so that none is by default. Those of the option
// `globals` are global in every sequence. With max_globals > 0 there is also the optional input
// global_mask, u8 [batch, tokens], by which each sequence has global tokens of its own: the first
// max_globals tokens that it marks with 1, not counting those of `globals`. Padding that it marks
// is no global token.
//
// Source: Beltagy, Peters, Cohan 2020, "Longformer: the long-document transformer",
// arXiv:2004.05150v2, sections 3.1 and 3.2. Causal windows as in its language models; globals with
// a causal mask are this project's addition (the paper uses none there). global_mask is Hugging
// Face's global_attention_mask, which has no largest number. Deviations of others that are not
// followed: Hugging Face and allenai mask with -10000, and zero the rows of padded queries.
// Cost: 2 pairs (head_dim + value_dim) FLOPs with about tokens (w + 1 + 2 globals) pairs: linear.
// On a GPU, which does not tell the host how many tokens are marked, each token passes over
// max_globals keys.
#ifndef TFB_ATTENTION_LONGFORMER_LONGFORMER_H_
#define TFB_ATTENTION_LONGFORMER_LONGFORMER_H_

#include <cstdint>
#include <vector>

#include "core/options.h"

namespace tfb::longformer {

struct LongformerOptions {
  int64_t window = 512;
  int64_t one_sided = -1;
  std::vector<int64_t> dilation = {1};
  std::vector<int64_t> globals = {-1};
  int64_t max_globals = 0;
  enum class Projections { kShared, kOwn };
  Projections projections = Projections::kShared;

  void Describe(OptionBinder& bind) {
    bind.Int("window", &window, 0, kMaxTokens,
             "keys seen beside the query's own, half of them on each side",
             {32, 64, 128, 256, 512, 1024});
    bind.Int("one_sided", &one_sided, -1, kMaxTokens,
             "earlier keys seen where causal; -1 means window / 2");
    bind.Ints("dilation", &dilation, 1, kMaxTokens,
              "gap between the window's keys: one for all heads, or one per key-value head");
    bind.Ints("globals", &globals, -1, kMaxTokens,
              "positions of the global tokens; those beyond the sequence and -1 stand for none");
    bind.Int("max_globals", &max_globals, 0, kMaxTokens,
             "tokens of a sequence that the optional input global_mask can make global; 0 means "
             "that there is no such input");
    bind.Choice("projections", &projections,
                {{"shared", Projections::kShared}, {"own", Projections::kOwn}},
                "whether global rows have queries, keys and values of their own");
  }
};

}  // namespace tfb::longformer

#endif  // TFB_ATTENTION_LONGFORMER_LONGFORMER_H_
