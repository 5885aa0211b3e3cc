// BigBird: a window of three blocks, global tokens, and a few random blocks of each head.
//
// Behind the first g tokens the sequence is cut into n blocks of b tokens, the last of which may be
// short: token i is in block u(i) = floor((i - g) / b). Query i of head h sees key j when
//
//   i is global, or j is global, or |u(i) - u(j)| <= 1, or u(j) is in R_h(u(i))
//
//   itc: g = 0, and the tokens of blocks 0 and n - 1 are global
//   etc: the first g = `global_tokens` tokens are global, no block is
//
// y_i = softmax_j(scale q_i . k_j) v_j over those keys, scale = 1 / sqrt(head_dim). R is the
// parameter `random`, i32 [query_heads, n, `random`]; -1 stands for no block. The seed draws each
// row without repetition from the blocks that the query does not see anyway, as many as there are.
// Any other table is allowed: a key that it names twice, or that is seen anyway, counts once. With
// `count_repeats` its weight is multiplied by
//
//   n_ij = [j is global or |u(i) - u(j)| <= 1] + number of times that R_h(u(i)) names u(j)
//
// for i that is not global.
//
// Source: Zaheer et al. 2020, "Big Bird: transformers for longer sequences", NeurIPS,
// arXiv:2007.14062v2, section 2 and appendix D. Encoders only: the paper has no causal form. It
// has sets of keys; Hugging Face's and the authors' code count a key as often as `count_repeats`
// does, whose tables repeat a block where the last two rows draw one of their window and, in
// Hugging Face's when not training, where block 0 is in the place of every random block: its keys
// then count 1 + r times. Deviations of that code that are not followed: tokens in whole blocks,
// and enough of them; random blocks of the first 1,024 positions alone for some lengths, or of the
// first 2r + 5 blocks; padding by -10000; padded queries give 0.
// Cost: 2 pairs (head_dim + value_dim) FLOPs with about tokens b (3 + 2 + r) + 2 b tokens pairs; a
// pair that counts n times is computed n times.
#ifndef TFB_ATTENTION_BIGBIRD_BIGBIRD_H_
#define TFB_ATTENTION_BIGBIRD_BIGBIRD_H_

#include <cstdint>
#include <memory>

#include "core/options.h"

namespace tfb::bigbird {

struct BigBirdOptions {
  static constexpr int64_t kMaxRandom = 1024;

  int64_t block = 64;
  int64_t random = 3;
  enum class Construction { kItc, kEtc };
  Construction construction = Construction::kItc;
  int64_t global_tokens = 128;
  bool count_repeats = false;

  void Describe(OptionBinder& bind) {
    bind.Int("block", &block, 1, kMaxTokens, "tokens of a block", {16, 32, 64, 128, 256});
    bind.Int("random", &random, 0, kMaxRandom, "random blocks seen by each block of queries");
    bind.Choice("construction", &construction,
                {{"itc", Construction::kItc}, {"etc", Construction::kEtc}},
                "what is global: the first and the last block (internal transformer construction), "
                "or tokens before all blocks (extended)");
    bind.Int("global_tokens", &global_tokens, 0, kMaxTokens,
             "where etc, the global tokens that the sequence begins with");
    bind.Bool(
        "count_repeats", &count_repeats,
        "whether a key that the table repeats, or that is seen anyway, counts more than once");
  }
};

}  // namespace tfb::bigbird

#endif  // TFB_ATTENTION_BIGBIRD_BIGBIRD_H_
