// ETC: a long input whose tokens see their neighbours, and a few global tokens, which see all
// tokens and are seen by all.
//
// The sequence is [global; long]: its first g = min(`global_tokens`, tokens) tokens are the global
// input, the others the long one. Query i sees key j when
//
//   g2g, g2l   i < g                       a global query sees everything
//   l2g        i >= g, j < g
//   l2l        i, j >= g, |i - j| <= w     w is the `radius`
//
// and with scale = 1 / sqrt(head_dim) one softmax over both pieces of a query is
//
//   y_i = softmax_j(scale q_i . (k_j + P_ij)) v_j
//
// where the label of a pair selects the vector P_ij from the table of its piece and head:
//
//   g2g, l2l   row clip(j - i, -m, m) + m of `g2g` or `l2l` [query_heads, 2 m + 1, head_dim], with m
//              the `max_distance`; 0 where that is -1
//   g2l, l2g   row 1 of `g2l` or `l2g` [query_heads, 2, head_dim] where segment_i = segment_j, else
//              row 0, with the input segment, i32 [batch, tokens]: a long token has the id of the
//              global token whose segment it belongs to, -1 if it belongs to none, and global tokens
//              have ids of their own, say their positions; 0 without `segments`
//
// The tables have the problem's dtype, as keys do, and are drawn N(0, 0.5^2), the deviation that
// the authors' code begins with. The authors' code adds a number for each label besides, to q_i .
// (k_j + P_ij): with `labels` both it is the same row of g2g_bias, l2l_bias [query_heads, 2 m +
// 1], g2l_bias or l2g_bias [query_heads, 2], f32 and drawn likewise; with biases it is there
// alone, and P_ij is 0.
//
// With `masks` the optional inputs g2g_mask [batch, g, g], g2l_mask [batch, g, n], l2g_mask
// [batch, n, g] and l2l_mask [batch, n, 2 w + 1], u8, with n long tokens, hide the pairs of their
// piece that have a 0. Column c of l2l_mask is the pair of long token i and i + c - w.
//
// The paper's four pieces can have projections of their own. A query's projection is that of its
// type, so q contains both types. Where `projections` is own, the keys and values of long
// queries are k = [l2g; l2l] and v, and those of global queries are k_global = [g2g; g2l] and
// v_global; where it is shared, k and v are both.
//
// Source: Ainslie, Ontanon, Alberti, Cvicek, Fisher, Pham, Ravula, Sanghai, Wang, Yang 2020, "ETC:
// encoding long and structured inputs in transformers", EMNLP, arXiv:2004.08483, section 3. There
// is no causal form. The masks are the paper's M and the authors' code's
// (google-research/etcmodel) g2g_att_mask and so on. Deviations of that code that are not
// followed: hidden keys have -10000 added, which a row without any other key cancels; labels of
// other structure than these; the pieces of a query type share one table, whose rows they divide
// between them, and rows of distances are in the order 0 .. m, -1 .. -m.
// Cost: 2 pairs (head_dim + value_dim) FLOPs with n (2 w + 1) + 2 n g + g^2 pairs for n long
// tokens, and 2 labels head_dim a query.
#ifndef TFB_ATTENTION_ETC_ETC_H_
#define TFB_ATTENTION_ETC_ETC_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "core/options.h"

namespace tfb::etc {

struct EtcOptions {
  static constexpr int64_t kMaxDistance = 4096;

  int64_t radius = 84;
  int64_t global_tokens = 16;
  int64_t max_distance = 12;
  bool segments = false;
  enum class Labels { kVectors, kBiases, kBoth };
  Labels labels = Labels::kVectors;
  bool masks = false;
  enum class Projections { kShared, kOwn };
  Projections projections = Projections::kShared;

  void Describe(OptionBinder& bind) {
    bind.Int("radius", &radius, 0, kMaxTokens,
             "long tokens seen by a long query on each side of its own", {16, 32, 84, 169, 512});
    bind.Int("global_tokens", &global_tokens, 0, kMaxTokens,
             "global tokens that the sequence begins with; all tokens where it is shorter");
    bind.Int(
        "max_distance", &max_distance, -1, kMaxDistance,
        "distances inside the global and inside the long input have labels up to this one, and "
        "those beyond have its; -1 means no labels");
    bind.Bool(
        "segments", &segments,
        "whether pairs of a global and a long token have labels, which go by the input segment");
    bind.Choice(
        "labels", &labels,
        {{"vectors", Labels::kVectors}, {"biases", Labels::kBiases}, {"both", Labels::kBoth}},
        "what a label adds: a vector to the key, a number to its product with the query, or "
        "both");
    bind.Bool("masks", &masks,
              "whether the optional inputs g2g_mask, g2l_mask, l2g_mask and l2l_mask hide pairs");
    bind.Choice("projections", &projections,
                {{"shared", Projections::kShared}, {"own", Projections::kOwn}},
                "whether global queries have keys and values of their own");
  }
};

}  // namespace tfb::etc

#endif  // TFB_ATTENTION_ETC_ETC_H_
