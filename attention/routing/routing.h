// The Routing Transformer's attention: tokens attend within clusters of normalised queries and keys.
//
//   q~ = (q - mean q) / sqrt(var q + 1e-5),  k~ likewise, over the channels, or with `norm` unit
//   q~ = q / |q|, k~ = k / |k|; rounded to the problem's dtype where that is of 16 bits
//   I_c = the w tokens of largest q~_i . mu_c,  J_c = the w of largest k~_j . mu_c,  w = ceil(L / C)
//   y_i = 1 / n_i sum over c with i in I_c of softmax_(j in J_c)(scale q~_i . k~_j) v_j
//
// for clusters c = 1 .. C with centroids mu_c, of which every head has its own; of equal scores the
// earlier token is a member. n_i is the number of clusters that have i; where it is 0, y_i = 0. So all
// clusters are of one size, but a token may be in several or in none.
//
// With `scored` given, scores are scale q_i . k_j instead, of the vectors as they are given, and q~
// and k~ only choose the clusters. `self_bias` is added to a token's score with itself.
//
// Where the problem is causal, keys are queries (k~ = q~, and k = q / |q| where `scored` is given;
// the input k is not read), so that J_c = I_c, and j <= i. Even so, which tokens share a cluster
// depends on later ones: a token competes with them for its place. The output `members` says which
// tokens are in which cluster, and given as an input replaces the scores.
//
// Centroids are a parameter. Setup moves them `updates` times towards the tokens that it sees,
//
//   mu_c <- decay mu_c + (1 - decay) / 2 (sum_(a(q~_i) = c) q~_i + sum_(a(k~_j) = c) k~_j)
//   a(x) = argmax_c x . mu_c,                              of tokens, in all batch rows
//
// The sums are over all tokens of the nearest centroid; with `update_mean` they are means (a
// centroid that no token is nearest to then stays). Callers read and replace the centroids as the
// parameter `centroids`.
//
// The first `local_heads` heads attend locally instead: with b = local_block, query i sees key j
// where floor(i / b) - floor(j / b) is 0 or 1 (or -1, where the problem is not causal), by plain
// scores q_i . k_j / sqrt(head_dim).
//
// Source: Roy, Saffar, Vaswani, Grangier 2021, arXiv:2003.05997v5, section 4 and algorithm 1. Its
// published code averages counts and sums separately with Laplace smoothing (`update_mean` is the
// nearest to it), masks by rank in the cluster, which is the same where keys are queries, and
// divides by n_i + 0.01; its layer norm comes after 1/sqrt(head_dim), which that cancels, so that
// scores are unscaled as here. routing-transformer 1.6.1 (lucidrains) has `norm` unit and `scored`
// given, with `scale` 0; where keys are queries a token sees itself only if it sees nothing else
// (`self_bias` -5e4). Its centroids begin with 10 k-means steps from tokens and move towards sums
// that are made of unit length. It divides by n_i + 1e-5, lets padded tokens compete with others,
// and has learned keys and, in local heads, rotary positions.
//
// Gradients are those of the means of softmaxes with the members that the forward pass found, or
// was given. Centroids have none: the paper trains them by their moving averages. With `norm` unit,
// a vector of zeros has none through its norm.
//
// Cost: 4 L C head_dim FLOPs to assign queries and keys (2 where causal) and 4 L w head_dim for the
// attention, half of which are kept where causal: least at C = sqrt(L), and linear in L for a w of
// one size, which `clusters` 0 keeps.
#ifndef TFB_ATTENTION_ROUTING_ROUTING_H_
#define TFB_ATTENTION_ROUTING_ROUTING_H_

#include <cstdint>
#include <vector>

#include "core/flash/flash_technique.h"
#include "core/technique.h"

namespace tfb::routing {

struct RoutingOptions {
  int64_t clusters = 0;
  int64_t local_heads = -1;
  int64_t local_block = 128;
  double scale = 1;
  int64_t updates = 0;
  double decay = 0.999;
  bool update_mean = false;
  enum class Norm { kLayerNorm, kUnit };
  Norm norm = Norm::kLayerNorm;
  enum class Scored { kNormalized, kGiven };
  Scored scored = Scored::kNormalized;
  double self_bias = 0;

  void Describe(OptionBinder& bind) {
    bind.Int("clusters", &clusters, 0, 4096,
             "clusters, at most one a token; 0 means one for 512 tokens", {1, 2, 4, 8, 16, 32});
    bind.Int("local_heads", &local_heads, -1, 4096,
             "heads that attend locally instead, at most all; -1 means half of them");
    bind.Int("local_block", &local_block, 1, kMaxTokens,
             "tokens of a block of local heads, which see their own block and the next ones");
    bind.Real("scale", &scale, 0, 1e6, "factor on scores in clusters; 0 means 1/sqrt(head_dim)");
    bind.Int("updates", &updates, 0, 1000, "times that Setup moves centroids towards its tokens");
    bind.Real("decay", &decay, 0, 1, "how much of a centroid an update keeps");
    bind.Bool("update_mean", &update_mean, "whether an update is by means, not sums, of tokens");
    bind.Choice("norm", &norm, {{"layer_norm", Norm::kLayerNorm}, {"unit", Norm::kUnit}},
                "how queries and keys are normalised: a layer norm without weights, or length 1");
    bind.Choice(
        "scored", &scored, {{"normalized", Scored::kNormalized}, {"given", Scored::kGiven}},
        "the queries and keys of scores in clusters: normalised, or as they are given, where "
        "keys that are queries have length 1");
    bind.Real("self_bias", &self_bias, -1e9, 0, "added to a token's score with itself in clusters");
  }
};

// Routing is self-attention only, and every head has its own keys: query_tokens must equal
// kv_tokens, and query_heads kv_heads. The parameter centroids [query_heads, clusters, head_dim]
// f32 is drawn N(0, 1); centroids of local heads are not read. Routing reads q, k unless causal, v,
// the optional key_mask and the optional members, u8 [batch, query_heads, query_tokens, clusters],
// or twice as many where the problem is not causal, those of queries first: 1 where the token is a
// member of the cluster. Of given members the first w count, and where there are fewer, the first
// of the other tokens as well. Where none are given, tokens that key_mask declares padding become
// members after all others, and only those whose scores are NaN come later. Routing writes out and
// members (0 for local heads). Statistics, on the CPU: grouping_share, the share of a Run that
// normalising, scoring and choosing members take.
class Routing : public FlashTechnique<RoutingOptions> {
 public:
  Routing();

  absl::StatusOr<TechniqueSpec> Counterpart(const Problem& problem,
                                            const Options& options) const override;

 protected:
  absl::Status Check(const Problem& problem, const RoutingOptions&) const override;
  absl::StatusOr<NamedTensors> Draw(const Job& job) const override;
  PlannedLayer::Fit MakeFit(const Problem& problem, const RoutingOptions& options) const override;
  absl::StatusOr<FlashPlan> Describe(const Job& job) const override;
  absl::Status Definition(const Problem& problem, const RoutingOptions& options,
                          const NamedTensors& parameters, const Inputs& inputs,
                          const DefinitionRequest& request, NamedTensors* outputs) const override;
  std::vector<TensorSpec> ReadTensors(const Problem& problem,
                                      const RoutingOptions& options) const override;
  std::vector<TensorSpec> WrittenTensors(const Problem& problem,
                                         const RoutingOptions& options) const override;
};

// Updates the centroids of one head, [clusters][head_dim], once by its tokens' vectors [count]
// [head_dim]: both queries and keys, or queries twice.
void UpdateCentroids(const RoutingOptions& options, int64_t clusters, int64_t head_dim,
                     const std::vector<std::vector<double>>& queries,
                     const std::vector<std::vector<double>>& keys, std::vector<double>* centroids);

}  // namespace tfb::routing

#endif  // TFB_ATTENTION_ROUTING_ROUTING_H_
