// Blockwise attention (BlockBERT): each block of queries sees one block of keys, which a
// permutation of the blocks names, another one in other heads.
//
//   b(i) = floor(i n / query_tokens),  b(j) = floor(j n / kv_tokens)     n = `blocks`
//   y_i  = softmax_j(scale q_i . k_j) v_j over the keys with b(j) = pi_h(b(i)), scale = 1 / sqrt(head_dim)
//
// With pi_h(u) = (u + s_h) mod n, the cyclic shift by s_h; s_h = 0 is block-diagonal attention.
// pi_h can also be any permutation, given as a list. Blocks that cannot be equal differ by one
// token; with n > tokens some are empty. A query whose block of keys is empty, or holds only
// padding, gives 0.
//
// The shift of a head: the `shares` w_0 / w_1 / ... of the shifts, w their sum, are scaled to the
// heads by
//
//   s_h = min { s : (h + 1) / heads <= (w_0 + ... + w_s) / w },   s_0 = min { s : w_s > 0 }
//
// so rounding favours the larger shifts: two heads already look out of their block. The paper's
// shares of 12 heads are 10:2 for n = 2 and 8:2:2 for n = 3; we go on with w_0 = max(1, 7 - n)
// against 1 for every other shift, which gives both.
//
// Source: Qiu, Ma, Levy, Yih, Wang, Tang 2020, "Blockwise self-attention for long document
// understanding", Findings of EMNLP, arXiv:1911.02972v2, section 3.1; shares: section 4. The paper
// is bidirectional and has queries and keys of one sequence. This project adds other numbers of
// keys than queries, and a causal mask over the whole, which empties every row with pi_h(b(i)) >
// b(i).
// Cost: 2 pairs (head_dim + value_dim) FLOPs with about query_tokens kv_tokens / n pairs a head.
#ifndef TFB_ATTENTION_BLOCKWISE_BLOCKWISE_H_
#define TFB_ATTENTION_BLOCKWISE_BLOCKWISE_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "core/options.h"

namespace tfb::blockwise {

struct BlockwiseOptions {
  static constexpr int64_t kMaxBlocks = int64_t{1} << 20;

  int64_t blocks = 2;
  std::vector<int64_t> shares = {0};
  std::vector<int64_t> permutation = {-1};

  void Describe(OptionBinder& bind) {
    bind.Int("blocks", &blocks, 1, kMaxBlocks, "blocks that the tokens are split into",
             {2, 3, 4, 8, 16, 32});
    bind.Ints("shares", &shares, 0, kMaxBlocks,
              "shares of the heads that have shift 0/1/2/...; 0 for those of the paper");
    bind.Ints("permutation", &permutation, -1, kMaxBlocks - 1,
              "the key block of each query block in the place of shifts, for all heads or for one "
              "head after the other; -1 for shifts");
  }
};

// Returns the shift of each head, by the rule above.
std::vector<int64_t> BlockwiseShifts(const BlockwiseOptions& options, int64_t heads);

}  // namespace tfb::blockwise

#endif  // TFB_ATTENTION_BLOCKWISE_BLOCKWISE_H_
