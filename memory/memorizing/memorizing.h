// Memorizing Transformer: a Transformer-XL one layer of which also reads a large store of the keys
// and values of past tokens; each query takes the k nearest from it.
//
// All layers are those of memory/transformer_xl/transformer_xl.h, with its pre_norm and final_norm.
// In layer `memory_layer`, for each head h and with q, k, v the queries, keys and values that its
// own attention has:
//
//   unit(x) = x / max(|x|, 1e-12)
//   s_pj  = |scale_h| unit(q_p) . unit(k_j)                   so that |s_pj| <= |scale_h|
//   o_p   = sum_j softmax_j(s_pj) v_j                         over the tokens j that p retrieves
//   y_p   = g_h o_p + (1 - g_h) local_p,  g_h = 1 / (1 + exp(-gate_h))
//
// and concat_heads(y_p) W_o takes the place of concat_heads(local_p) W_o, where local_p is the
// result of the layer's own attention, including relative positions. Where the store is empty, y_p
// = local_p. With the whole store retrieved this is still two softmaxes mixed by g, not one over
// both. Options change this, as other implementations do:
//
//   softmax = joint      y_p is one softmax over the layer's own scores and the s_pj: g = 1 / (1 +
//                        exp(m - l)) with m and l the log-sum-exps of the two
//   null_key             p also retrieves a learned key and value of the head, whatever the store
//                        has: with an empty store o_p is that value
//   one_key_value_head   w_k and w_v of this layer make one head of keys and values, which all
//                        heads of queries share, in its own attention as in the store
//
// The store is read before it is written: while a segment that begins at token s is read, it holds
// the newest `store` tokens before s, first in, first out, for each head and batch row by itself.
// Tokens that the layer's own memory also has are among them, as in the paper; with `beyond_memory`
// it holds the newest `store` tokens before s - memory, those that the segment's first token cannot
// see otherwise. Reset empties it: at the beginning of a document.
//
// Token p retrieves these tokens of the store:
//
//   selection = exact      the k of the largest s_pj, of equal ones the older first
//   selection = bucketed   of each of k buckets the token of the largest s_pj; token j is in bucket
//                          (j mod slots) mod k, where slots is `store`, and `memory` more with
//                          beyond_memory: what the authors' code runs on TPUs
//
// Where the precision of queries and keys cannot tell which of two scores is larger (2e-5 in f32, 5
// roundings in 16 bits; scores without the scale), the result is not defined: the definition
// accepts the layer's choice. CPU and CUDA choose by float64 scores of the queries and keys that
// they have. A key with a NaN is not retrieved, unless all of the store is.
//
// Gradients stop at the store (section 3.2) and at the memory, as in Transformer-XL: what a segment
// finds there is constant, and so is which tokens its queries retrieve. Those a Run keeps for its
// backward pass, with the keys and values of its tokens, beside what Transformer-XL keeps.
//
// Source: Wu, Rabe, Hutchins, Szegedy 2022, "Memorizing Transformers", arXiv:2203.08913v1, section
// 3; |scale|, the form of the gate and the buckets as in the authors' code
// (github.com/google-research/meliad, transformer/memory/memory_layer.py, transformer_base.py). Where
// that code differs and is not followed: it normalises the keys and queries of the local attention
// too, and uses sqrt(|x|^2 + 1e-6); it begins with gates of 0 and scales of 1, where we draw so that
// heads differ; slots that were never written are read as zeros, which dilutes the softmax; in this
// layer its local attention has no positions. memorizing-transformers-pytorch has
// one_key_value_head; at 0.1.0 also null_key, with a sigmoid(gate) that multiplies the local side,
// and normalised values and no normalised queries, which are not followed; at 0.4.1 softmax=joint,
// where the layer's own scores are those of unit vectors with the same scale, which is not
// followed. None of it is in the paper.
//
// Cost beside Transformer-XL's, of a token and n = min(store, tokens before): 2 n d FLOPs to score
// (d = model_dim) and 2 min(k, n) d to read; where k >= n nothing is selected, and engine flash reads
// all. Store: 2 `store` d numbers a batch row, fp32 on the CPU; with one_key_value_head head_dim in
// the place of d, though the layer's own attention keeps a copy for each head.
#ifndef TFB_MEMORY_MEMORIZING_MEMORIZING_H_
#define TFB_MEMORY_MEMORIZING_MEMORIZING_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "core/layers/final_norm.h"
#include "core/layers/stack/stack_options.h"
#include "core/technique.h"

namespace tfb::memorizing {

struct MemorizingOptions : layers::RelativeStackOptions {
  enum class Selection { kExact, kBucketed };
  enum class Softmax { kSeparate, kJoint };
  static constexpr int64_t kMaxLayers = 32;
  static constexpr int64_t kMaxStore = int64_t{1} << 18;  // the paper's largest
  static constexpr int64_t kMaxGiven = int64_t{1} << 40;

  bool pre_norm = false;
  int64_t memory_layer = -1;
  int64_t store = 8192;
  int64_t k = 32;
  Selection selection = Selection::kExact;
  bool beyond_memory = false;
  Softmax softmax = Softmax::kSeparate;
  bool null_key = false;
  bool one_key_value_head = false;
  int64_t given_store = 0;

  void Describe(OptionBinder& bind) {
    DescribeStack(bind, kMaxLayers);
    bind.Bool("pre_norm", &pre_norm, "normalise the input of each sublayer instead of its output");
    DescribeFinalNorm(bind, &final_norm);
    // The paper's is the 9th of 12.
    bind.Int("memory_layer", &memory_layer, -1, kMaxLayers - 1,
             "the layer that reads the store, from 0; -1 means three quarters of the way up");
    bind.Int("store", &store, 0, kMaxStore, "tokens in the store", {0, 1024, 4096, 16384, 65536});
    // The default is the paper's; the authors' code has 128.
    bind.Int("k", &k, 1, kMaxStore, "tokens that a query retrieves");
    bind.Choice("selection", &selection,
                {{"exact", Selection::kExact}, {"bucketed", Selection::kBucketed}},
                "the k nearest tokens, or the nearest of each of k buckets");
    bind.Bool("beyond_memory", &beyond_memory,
              "the store has no tokens that the layer's own memory still has");
    bind.Choice(
        "softmax", &softmax, {{"separate", Softmax::kSeparate}, {"joint", Softmax::kJoint}},
        "of the layer's own keys and of what is retrieved, mixed by a gate; or one over both");
    bind.Bool("null_key", &null_key, "queries also retrieve a learned key and value");
    bind.Bool("one_key_value_head", &one_key_value_head,
              "all heads of the layer with the store share one of keys and values");
    DescribeGivenMemory(bind);
    bind.Int("given_store", &given_store, 0, kMaxGiven,
             "tokens of earlier runs, of which the inputs `store_keys` and `store_values` hold the "
             "newest, as many as the store keeps; 0: there are none");
  }

  int64_t layer_with_store() const { return memory_layer >= 0 ? memory_layer : 3 * layers / 4; }
  int64_t retrieved() const { return k < store ? k : store; }
  int64_t lag() const { return beyond_memory ? memory : 0; }
  bool joins() const { return softmax == Softmax::kJoint; }
  // Returns how many of so many tokens the store keeps, with those that it does not search.
  int64_t kept(int64_t tokens) const {
    const int64_t slots = store + lag();
    return store == 0 ? 0 : tokens < slots ? tokens : slots;
  }
};

// Memorizing is causal self-attention only: kv_tokens must equal query_tokens, kv_heads
// query_heads, and value_dim head_dim.
//
// The parameters are transformer_xl's, and, where there is a store, layerN.memory.gate, drawn N(0,
// 1), unless softmax=joint, and layerN.memory.scale, drawn N(sqrt(head_dim), 1), both [heads], of
// the layer that reads it; with a null key layerN.memory.null_key and .null_value [heads,
// head_dim], drawn N(0, 1). With one_key_value_head that layer's w_k and w_v are [model_dim,
// head_dim], and the null key and value [1, head_dim].
//
// It writes out and the optional context, as transformer_xl does, and, where there is a store, the
// optional retrieved, i64 [batch, heads, query_tokens, min(k, store)]: the tokens that were read,
// ascending, -1 behind the last. A Run also writes, optionally,
//
//   memories                   [batch, layers, tokens, model_dim], as transformer_xl does
//   store_keys, store_values   [batch, heads, S, head_dim]: unit(k) and v of the newest tokens, the
//                              oldest first; S = min(given_store + query_tokens, slots), slots
//                              being `store`, and `memory` more with beyond_memory; 1 for heads
//                              with one_key_value_head
//
// The same tensors are inputs that hand the state of earlier runs over, whose last token precedes
// the first one: with given_memory=N memories, as transformer_xl's; with given_store=N, all tokens
// of earlier runs, store_keys and store_values of the newest min(N, slots). Tokens then see what
// they would in one run over all, segments being counted from the first token of this one, and
// retrieved counts tokens from the first of the N. A stream reads them with its first segment.
//
// The counterpart is the same network with all of the past in its memory, and no token of this run
// in the store.
class Memorizing : public TechniqueOf<MemorizingOptions> {
 public:
  Memorizing();
  absl::StatusOr<TechniqueSpec> Counterpart(const Problem& problem,
                                            const Options& options) const override;

 protected:
  absl::Status Check(const Problem& problem, const MemorizingOptions& options) const override;
  absl::StatusOr<std::unique_ptr<Layer>> MakeLayer(const Problem& problem,
                                                   const MemorizingOptions& options, Device device,
                                                   uint64_t seed) const override;
  absl::Status Definition(const Problem& problem, const MemorizingOptions& options,
                          const NamedTensors& parameters, const Inputs& inputs,
                          const DefinitionRequest& request, NamedTensors* outputs) const override;
  std::vector<TensorSpec> WrittenTensors(const Problem& problem,
                                         const MemorizingOptions& options) const override;
  std::vector<TensorSpec> ReadTensors(const Problem& problem,
                                      const MemorizingOptions& options) const override;
};

}  // namespace tfb::memorizing

#endif  // TFB_MEMORY_MEMORIZING_MEMORIZING_H_
