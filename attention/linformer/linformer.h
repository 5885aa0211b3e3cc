// Linformer: attention to a fixed number of slots, into which keys and values are compressed along
// the sequence.
//
//   y_i = sum_s p_is V'_s,   p_is = exp(q_i . K'_s / sqrt(head_dim)) / sum_r exp(q_i . K'_r / ...)
//   K' = E K   [slots, head_dim],   V' = F V   [slots, value_dim],   E, F   [slots, kv_tokens]
//
// for each key-value head. Rows of K and V that are padding are 0 before they are compressed; a
// slot of nothing but padding is 0 and has its weight like any other. log_sum_exp is over the
// slots. Every slot may mix all tokens, so there is no causal form: a causal problem is refused.
//
// The compression (`projection`), with w = ceil(kv_tokens / k), as many slots as there are windows
// of w tokens, the last of which may be shorter:
//
//   learned      E and F are parameters, k slots
//   mean, max    of the window's rows, channel by channel
//   convolution  K'_s = sum_t C_t K_(s w + t): kernel and stride w, all channels into all, no bias
//   depthwise_convolution  K'_s = sum_t c_t * K_(s w + t): likewise, each channel c by itself
//   fit          E = F, fitted to the keys and values that Setup sees; at most kv_tokens slots
//
// Sharing of parameters (`sharing`), within this layer's tensors e and f:
//
//   none         each key-value head, for keys and for values: e and f have kv_heads tables
//   headwise     keys and values: one table each, for all heads
//   key_value    e alone, one table for all heads, keys and values
//   layerwise    the same, and for all layers of a stack: e is drawn without regard to `layer`
//
// `layer` counts from 0; a layer has k - layer * k_step slots, at least 1, as deeper layers need
// fewer (section 4, "Nonuniform projected dimension").
//
// The fit. M = [K V], the rows of the n tokens that are not padding, m their mean, M - 1 m = U S W^T
// cut to its r <= slots - 1 largest singular values, and the tokens' basis B = [1 / sqrt(n), U]:
//
//   E = F = sqrt(slots / n) R B^T      R [slots, 1 + r] with orthonormal columns, the first of them
//                                      1 / sqrt(slots)
//
// so that the slots [K' V'] have the tokens' mean, and as covariance the best one of rank r to the
// tokens' (Eckart and Young): the whole of it where slots > head_dim + value_dim. Of all such R it
// is the one whose slots are nearest to the tokens floor(s n / slots). Its property: where the
// covariance is whole, y is dense attention's to first order in q, and with slots = kv_tokens it is
// dense attention. It does not minimize the error of the softmax, which depends on all moments of
// the keys and on the queries; means of windows can have less, where neighbours are alike. (Rows of
// U^T themselves for E keep K and V as well, but a softmax over principal directions is none over
// tokens: on real inputs of 512 tokens its error is 10 to 20 times the output.) With `sharing`
// other than none M has the columns of all heads. f does not exist.
//
// Source: Wang, Li, Khabsa, Fang, Ma 2020, "Linformer: self-attention with linear complexity",
// arXiv:2006.04768v3, equation 7 and section 4, which names convolution and leaves open what it
// does to channels: linformer-pytorch's is full. A depthwise one pools keys and values in
// Multiscale Vision Transformers (Fan et al. 2021, arXiv:2104.11227v1, section 3.1; the authors'
// SlowFast, mode "conv", where kernels overlap and a norm follows: neither is followed). Deviations
// that are not followed: fairseq's layer compresses hidden states before it projects them, so that
// a bias of keys is not multiplied by E, shares among heads always, and ignores padding;
// linformer-pytorch adds biases to E, F and the convolution, and cuts off what a window of
// floor(kv_tokens / k) leaves over. Shorter inputs take the first columns of E, as lucidrains' code
// does: that is the caller's to cut.
//
// Seeded entries are N(0, 1 / kv_tokens), those of a convolution N(0, 1 / (w channels)), of a
// depthwise one N(0, 1 / w), so that slots of N(0, 1) keys are N(0, 1): the scale of the authors'
// code. Untrained, it estimates nothing.
//
// Gradients: those of e and f add up over what shares them. A maximum's is the first largest row's,
// or nobody's where the 0 of padding is largest. A fitted E counts as a constant: no gradient goes
// through the fit to the keys and values, and that of e is of E as any other parameter's. The slots are
// kept for them: 4 slots (head_dim + value_dim) bytes a sequence and key-value head.
//
// Cost: 2 slots (head_dim + value_dim) FLOPs a token and key-value head to compress (a convolution:
// 2 (head_dim^2 + value_dim^2), depthwise 2 (head_dim + value_dim); a window: one an element), and
// as many a token and query head to attend. K and V are read once; slots kv_tokens parameters a
// table. Slots are fp32 on every device, and attended to in fp32, in 16-bit problems too.
//
// What is in a sequence changes no bit of another one's result. How many sequences there are
// changes none on the CPU. On a GPU, where few queries would leave multiprocessors idle, engine
// flash cuts more than 192 slots into parts, whose number depends on the number of sequences and
// heads; so the result of a sequence may then have other roundings in a batch than alone.
//
// The parameters are e and, unless shared, f, in f32: learned [tables, k, kv_tokens]; convolution
// [tables, channels, channels, w] as [out, in, kernel], depthwise [tables, channels, w]; fit [batch
// * tables, slots, kv_tokens], 0 until Setup has fitted it, which it does unless the caller has
// given one. The definition takes the E that it is given, and fits it by the same code where that
// is 0. Statistics: slots.
#ifndef TFB_ATTENTION_LINFORMER_LINFORMER_H_
#define TFB_ATTENTION_LINFORMER_LINFORMER_H_

#include <cstdint>

#include "core/technique.h"

namespace tfb::linformer {

struct LinformerOptions {
  enum class Projection { kLearned, kMean, kMax, kConvolution, kDepthwiseConvolution, kFit };
  enum class Sharing { kNone, kHeadwise, kKeyValue, kLayerwise };

  int64_t k = 256;
  Projection projection = Projection::kLearned;
  Sharing sharing = Sharing::kNone;
  int64_t layer = 0;
  int64_t k_step = 0;

  void Describe(OptionBinder& bind) {
    bind.Int("k", &k, 1, 65536, "slots that keys and values are compressed into",
             {32, 64, 128, 256, 512});
    bind.Choice(
        "projection", &projection,
        {{"learned", Projection::kLearned},
         {"mean", Projection::kMean},
         {"max", Projection::kMax},
         {"convolution", Projection::kConvolution},
         {"depthwise_convolution", Projection::kDepthwiseConvolution},
         {"fit", Projection::kFit}},
        "what compresses: matrices E and F; mean, maximum or convolution of windows of "
        "ceil(kv_tokens / k) tokens, depthwise where each channel has a kernel of its own; or E = "
        "F fitted to the keys and values by a singular value decomposition");
    bind.Choice("sharing", &sharing,
                {{"none", Sharing::kNone},
                 {"headwise", Sharing::kHeadwise},
                 {"key_value", Sharing::kKeyValue},
                 {"layerwise", Sharing::kLayerwise}},
                "what is one for all heads; for keys and values; for all layers");
    bind.Int("layer", &layer, 0, 1024, "this layer's place in its stack, from 0");
    bind.Int("k_step", &k_step, 0, 65536, "slots that each layer has fewer than the one before it");
  }
};

}  // namespace tfb::linformer

#endif  // TFB_ATTENTION_LINFORMER_LINFORMER_H_
