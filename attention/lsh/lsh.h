// Reformer's LSH attention: softmax over the keys that fall into a query's bucket, in several rounds
// of hashing.
//
// Queries and keys share vectors: the key of token j is k_j = q_j / |q_j|, rounded to the problem's
// dtype where that is of 16 bits, and the input has no k.
// In round r = 1 .. R, with `buckets` B (by default 2 tokens / chunk, rounded up to an even number):
//
//   h_r(x) = argmax [x R_r ; -x R_r]          R_r [head_dim, B / 2], drawn N(0, 1); ties: the lowest
//
// Tokens are sorted by (h_r, position), and the order is cut into chunks of `chunk` tokens. Query i
// sees key j in round r when j is in i's chunk or in the one before, and
//
//   h_r(j) = h_r(i)                           where `bucket_mask`
//   j <= i                                    where the problem is causal
//
// (With `wrap`, the chunk before the first chunk is the last chunk of the previous round, and for
// the first round that of the last round.) With N_ij the number of rounds, and slots of a round, in
// which i sees j,
//
//   s_ij = scale q_i . k_j + self_bias [i = j] - log N_ij [dedup]
//   y_i  = sum_r sum_(j in r) exp(s_ij) v_j / sum_r sum_(j in r) exp(s_ij)
//
// That is, rounds are merged by their log-sum-exp. So y_i is softmax attention over the keys with
// N_ij > 0 exactly; each counts once where `dedup`, and else N_ij times. self_bias lets a token see
// itself only where it sees nothing else. The softmax misses a part of the attention over all keys,
// which is the counterpart (`buckets` 1: one bucket, one chunk, no hashing). That part falls with
// rounds: all rounds miss a pair with probability p of a common bucket with probability (1 - p)^R,
// where no bucket outgrows its chunks. For unit vectors at distance t ln(1 / p) is t^2 / (4 - t^2)
// ln B and O(ln ln B) more: of 64 buckets 2.8 times the first term at t = 0.5, 1.5 times it at t =
// 1, and it alone at t = sqrt(2).
//
// R_r is the same for all heads or, with `per_head`, drawn for each.
//
// More than 128 buckets are, where `factorize`, a product of two hashes of about sqrt(B) each.
// Tokens that key_mask declares padding are sorted behind all others, and are no keys.
//
// The output `buckets` contains h_r(i); given as an input, it replaces the hashes, so that other
// implementations' hashing can be used. In a causal problem, which tokens share a chunk may depend
// on later ones; with buckets and tokens' places given, no row depends on a later one.
//
// Source: Kitaev, Kaiser, Levskaya 2020, "Reformer", arXiv:2001.04451v2, section 2 (R_r has no head
// there) and appendix A (dedup: its equation for N_ij); hashing: Andoni et al. 2015,
// arXiv:1509.02897v1, theorem 1. Reformer's published code (trax) has no bucket mask and no dedup,
// but `wrap` and `per_head`; so have Hugging Face transformers, and both scale keys by 1 /
// sqrt(|x|^2 + head_dim 1e-6) (`key_norm` epsilon). `per_head` is an option of reformer-pytorch,
// too, which then draws R_r for each sequence as well.
// reformer-pytorch has `scale` 1 / sqrt(head_dim) besides unit keys, tokens / chunk buckets, and
// `wrap` or, where tokens keep to their buckets, the bucket mask. It and transformers replace a
// token's score with itself by -5e4 and -1e5: the same output, another log-sum-exp of tokens that
// see nothing else. Not followed: reformer-pytorch's dedup with wrap, in several rounds, does not
// count what the first chunk sees of the round before, and divides its weight by 1e-9.
//
// Gradients are those of the softmax with the buckets and the order that the forward pass found, or
// was given; rotations have none. q_j has the gradient of its key through the norm, and none there
// where it is 0.
//
// Cost: R tokens head_dim B FLOPs to hash (factorized: 2 sqrt(B) for B), a counting sort, and 8 R
// tokens chunk head_dim for the attention: linear in tokens with chunks of one size. cost() counts
// the pairs of the windows, of which bucket_mask and causality hide some.
#ifndef TFB_ATTENTION_LSH_LSH_H_
#define TFB_ATTENTION_LSH_LSH_H_

#include <cstdint>
#include <vector>

#include "core/flash/flash_technique.h"
#include "core/technique.h"

namespace tfb::lsh {

struct LshOptions {
  enum class KeyNorm { kUnit, kEpsilon };

  int64_t rounds = 4;
  int64_t chunk = 64;
  int64_t buckets = 0;
  bool factorize = true;
  bool bucket_mask = true;
  bool dedup = true;
  bool wrap = false;
  double scale = 1;
  double self_bias = -1e5;
  KeyNorm key_norm = KeyNorm::kUnit;
  bool per_head = false;

  void Describe(OptionBinder& bind) {
    bind.Int("rounds", &rounds, 1, 32, "hashings, each of which finds other keys", {1, 2, 4, 8});
    bind.Int("chunk", &chunk, 1, 65536,
             "tokens of a chunk of the sorted sequence; a query sees its own and the one before");
    bind.Int("buckets", &buckets, 0, 65536,
             "an even number; 0 means 2 tokens / chunk, and 1 attention over all tokens");
    bind.Bool("factorize", &factorize,
              "whether the bucket among more than 128 comes of two smaller hashes");
    bind.Bool("bucket_mask", &bucket_mask, "whether keys of other buckets are hidden");
    bind.Bool("dedup", &dedup, "whether a key that several rounds find counts once");
    bind.Bool(
        "wrap", &wrap,
        "whether the first chunk sees the last one of the round before; not with bucket_mask");
    bind.Real("scale", &scale, 0, 1e6, "factor on scores; 0 means 1/sqrt(head_dim)");
    bind.Real("self_bias", &self_bias, -1e9, 0, "added to a token's score with itself");
    bind.Choice("key_norm", &key_norm, {{"unit", KeyNorm::kUnit}, {"epsilon", KeyNorm::kEpsilon}},
                "what keys are divided by: |x|, or sqrt(|x|^2 + head_dim 1e-6)");
    bind.Bool("per_head", &per_head, "whether each head has rotations of its own to hash with");
  }
};

// Lsh is self-attention only, and every head has its own keys: query_tokens must equal kv_tokens,
// and query_heads kv_heads. The parameter rotations [head_dim, rounds, columns] f32 has R_r, and
// the columns of factors one after the other; with per_head it is [query_heads, head_dim, rounds,
// columns]. Lsh reads q, v, the optional key_mask and the optional buckets, i32 [batch,
// query_heads, query_tokens, rounds]; those out of range count as the nearest one. It writes out,
// log_sum_exp and buckets. Statistics, on the CPU: grouping_share, the share of a Run that hashing
// and sorting take.
class Lsh : public FlashTechnique<LshOptions> {
 public:
  Lsh();

  absl::StatusOr<TechniqueSpec> Counterpart(const Problem& problem,
                                            const Options& options) const override;

 protected:
  absl::Status Check(const Problem& problem, const LshOptions& options) const override;
  absl::StatusOr<NamedTensors> Draw(const Job& job) const override;
  absl::StatusOr<FlashPlan> Describe(const Job& job) const override;
  absl::Status Definition(const Problem& problem, const LshOptions& options,
                          const NamedTensors& parameters, const Inputs& inputs,
                          const DefinitionRequest& request, NamedTensors* outputs) const override;
  std::vector<TensorSpec> ReadTensors(const Problem& problem,
                                      const LshOptions& options) const override;
  std::vector<TensorSpec> WrittenTensors(const Problem& problem,
                                         const LshOptions& options) const override;
};

// Returns the numbers of columns of the hashes. The product of twice each is the number of buckets,
// which is adjusted where the option leaves it open. Empty where there is one bucket.
std::vector<int64_t> LshFactors(const LshOptions& options, int64_t tokens);

}  // namespace tfb::lsh

#endif  // TFB_ATTENTION_LSH_LSH_H_
