// Sparse Sinkhorn attention: blocks of keys and values are sorted, softly, by a matrix that a small
// network makes from the blocks' sums; a block of queries sees its own block and the sorted block
// in its place.
//
// Tokens form N blocks of b = min(`block`, tokens) rows; token j is row j mod b of block j / b. Rows
// that do not exist, at the end of the last block, and tokens that the key mask hides are rows of
// zeros in every sum. For a key-value head, with blocks u and t,
//
//   X_u = sum of x_j over the tokens j of block u, or where causal over j <= u b
//   R_u = relu(W_2' relu(W_1' X_u + b_1) + b_2)                     scores of blocks, see `scores`
//   A   = (R + g) / temperature                                     g: Gumbel noise, or 0
//   S   = exp of A, after `iterations` times
//           A_ut -= log sum_t' exp A_ut'                            rows, then columns
//           A_ut -= log sum_u' exp A_u't                            where causal only over u' <= u
//   K^s_u = sum_t S_ut K_t, V^s_u = sum_t S_ut V_t                  rounded to a dtype of 16 bits
//
// The sums are over all t, or where causal over t < u: then block u depends only on tokens up to
// its first, and block 0 has nothing to sort. With `null_key`, where causal, a null block of b rows
// that are all the head's learned null key (null value) comes before block 0, and all blocks sort
// it too: R and S have it as a first column, and columns are normalised as before. A query i of
// block u then attends, in one softmax with the scale head_dim^(-1/2), to
//
//   the rows of K^s_u, and the tokens of K_u (where causal up to i)       sorted_blocks = 0
//   the rows of K^s_0, ..., K^s_(n-1) for all queries (SortCut)           sorted_blocks = n > 0
//
// Row r of K^s_u is a key where a block t of its sum has a token in row r; the null block has one
// in each. No query sees rows that come from padding alone. A given matrix S that takes a block
// whose row r is missing gives a key and a value of 0, which count.
//
// x_j is row j of the head's k (`pooled` keys), of q and k side by side (queries_and_keys; queries that
// share a key-value head are added up), or of the hidden states x, which is the paper's and which the
// other two are projections of. With `scores` given R is the input `logits`, of any network. S is
// written to the optional output `sort`; where the optional input `sort` is there, it is S.
//
// Without causality columns of S sum to 1, and rows ever more nearly. N = 1 makes S = 1: attention to
// every key twice, which is dense attention. With S = I it is attention within blocks, and with S a
// permutation SortCut of n = N is dense attention. As the temperature falls S becomes a permutation. A
// causal doubly stochastic matrix could only be I, and whole columns would show the future: hence sums
// over u' <= u, whose S has S_(u,u-1) = 1 and is not doubly stochastic.
//
// Source: Tay, Bahri, Yang, Metzler, Juan 2020, "Sparse Sinkhorn attention", arXiv:2002.11296; the
// balance with noise: Mena et al. 2018, arXiv:1802.08665. Choices of ours: a last ReLU, since
// accounts of the paper call its scores non-negative; which blocks the causal S is over, and its
// columns. The paper's mixture with dense attention is left out.
//
// sinkhorn-transformer 0.11.4 (lucidrains) is this with `pooled` queries_and_keys, `hidden` 0,
// `scores` log_relu, `gumbel` and zero biases where it sorts by SimpleSortNet and Sinkhorn. Not
// followed: without SortCut it takes sorted keys for sorted values; with SortCut queries see their own
// block too, unless blocks of keys have another size; a masked key counts in the sums, and hides
// those that S takes most of; by default it keeps of a softmax over R the largest entry of each row
// (such an S can be given as `sort`), or scores blocks by their mean queries and keys; where causal it
// has `null_key`, a masked softmax instead of the balance (its S can be given too), and half of the
// heads on rotated tokens. Its null keys and values are the source of ours; the paper has none.
//
// Gradients go through all of this: the attention, the sums, the iterations one by one, the network
// and what is pooled. The noise g and a given `sort` have gradients too; behind a given `sort` they
// end. That K^s and V^s are rounded to 16 bits counts as no change. S is kept for them, and K^s and V^s
// are summed again.
//
// Cost, a head of d: tokens d for X, 2 N (width hidden + hidden N) for R, 4 N^2 for each iteration, 4
// N tokens d for the sums, half of that where causal, and 8 tokens b d for attention. That is linear in
// tokens while N is below 2 b, and tokens^(3/2) with blocks of b = sqrt(tokens / 2). SortCut: n instead
// of N for the sums, 4 tokens n b d for attention.
#ifndef TFB_ATTENTION_SINKHORN_SINKHORN_H_
#define TFB_ATTENTION_SINKHORN_SINKHORN_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "attention/sinkhorn/sinkhorn_sizes.h"
#include "core/flash/flash_technique.h"
#include "core/technique.h"

namespace tfb::sinkhorn {

struct SinkhornOptions {
  enum class Pooled { kKeys, kQueriesAndKeys, kHidden };

  int64_t block = 64;
  int64_t sorted_blocks = 0;
  int64_t iterations = 8;
  double temperature = 0.75;
  bool gumbel = false;
  bool null_key = false;
  Pooled pooled = Pooled::kKeys;
  int64_t hidden = 64;
  SortScores scores = SortScores::kRelu;

  void Describe(OptionBinder& bind) {
    bind.Int("block", &block, 1, 65536, "tokens of a block; all of them where they are fewer",
             {16, 32, 64, 128, 256});
    bind.Int(
        "sorted_blocks", &sorted_blocks, 0, 65536,
        "SortCut: the first sorted blocks, which all queries see; 0: each block of queries sees "
        "its own sorted block and its own tokens");
    bind.Int("iterations", &iterations, 1, 100, "times that rows and columns are normalised");
    bind.Real("temperature", &temperature, 1e-3, 1e3, "divides the scores of blocks");
    bind.Bool("gumbel", &gumbel, "add the noise in the input g to the scores of blocks");
    bind.Bool("null_key", &null_key,
              "where causal, blocks also sort a block whose rows all are a learned key and value");
    bind.Choice("pooled", &pooled,
                {{"keys", Pooled::kKeys},
                 {"queries_and_keys", Pooled::kQueriesAndKeys},
                 {"hidden", Pooled::kHidden}},
                "what a block's score is made from: its keys, its queries and keys, or its hidden "
                "states in the input x");
    bind.Int("hidden", &hidden, 0, 4096, "units of the scoring network; 0: one matrix, no layer");
    bind.Choice(
        "scores", &scores,
        {{"relu", SortScores::kRelu},
         {"linear", SortScores::kLinear},
         {"log_relu", SortScores::kLogRelu},
         {"given", SortScores::kGiven}},
        "the network's last step: relu(y), y, or log(relu(y) + 1e-6); given: no network, the "
        "scores are the input logits");
  }
};

// Sinkhorn reads q, k, v, the optional key_mask; x [batch, tokens, model_dim], logits and g f32
// [batch, kv_heads, N, M] where options say so, M = N, or N + 1 with a null key; the optional sort
// of that shape. It writes out and the optional log_sum_exp and sort. It is self-attention only, of
// at most 4096 blocks; SortCut is not causal.
//
// The parameters, f32, of deviation 1 / sqrt(inputs), with width head_dim, twice that, or
// model_dim, are hidden_weights [kv_heads, width, hidden], hidden_bias [kv_heads, hidden],
// score_weights [kv_heads, hidden, M] and score_bias [kv_heads, M]. Where `hidden` is 0, the first
// two do not exist and score_weights is [kv_heads, width, M]; where scores are given, none of the
// four exists. A null key has null_key [kv_heads, head_dim] and null_value [kv_heads, value_dim],
// N(0, 1).
class Sinkhorn : public FlashTechnique<SinkhornOptions> {
 public:
  Sinkhorn();

 protected:
  absl::Status Check(const Problem& problem, const SinkhornOptions& options) const override;
  absl::StatusOr<NamedTensors> Draw(const Job& job) const override;
  absl::StatusOr<FlashPlan> Describe(const Job& job) const override;
  absl::Status Definition(const Problem& problem, const SinkhornOptions& options,
                          const NamedTensors& parameters, const Inputs& inputs,
                          const DefinitionRequest& request, NamedTensors* outputs) const override;
  std::vector<TensorSpec> ReadTensors(const Problem& problem,
                                      const SinkhornOptions& options) const override;
  std::vector<TensorSpec> WrittenTensors(const Problem& problem,
                                         const SinkhornOptions& options) const override;
};

}  // namespace tfb::sinkhorn

#endif  // TFB_ATTENTION_SINKHORN_SINKHORN_H_
