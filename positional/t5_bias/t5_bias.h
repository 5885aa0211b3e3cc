// T5's relative position bias: a learned number per head and bucket of distances is added to each
// score.
//
//   s_ij = scale q_i . k_j + beta[bucket(p_i - j), h],   p_i = i + kv_tokens - query_tokens
//
// A side of n' buckets gives the distances n < m = floor(n' / 2) a bucket each and the others
// buckets that grow geometrically up to max_distance D; all larger distances have the last one:
//
//   b(n) = n                                                       n < m
//   b(n) = min(n' - 1, m + floor((n' - m) ln(n/m) / ln(D/m)))      n >= m
//
//   causal         bucket(x) = b(max(x, 0))                n' = buckets
//   bidirectional  bucket(x) = b(|x|) + (x < 0 ? n' : 0)   n' = floor(buckets / 2)
//
// b(n) >= m + r means (n/m)^(n'-m) >= (D/m)^r. Bucket starts are computed from this in integers, so
// no logarithm is rounded to the wrong side of one.
//
// Source: Raffel et al. 2020, "Exploring the limits of transfer learning with a unified text-to-text
// transformer", JMLR 21, arXiv:1910.10683v4, section 2.1. It does not spell out the buckets: they
// are those of the authors' code (github.com/tensorflow/mesh,
// mesh_tensorflow/transformer/transformer_layers.py). T5 does not divide scores by sqrt(head_dim),
// its initial queries are smaller instead: so `scale` is 1 by default. One table serves all layers
// of a stack of T5's, and its cross-attention has none; here each layer has its own.
// Where we differ from that code and from Hugging Face's: both round a logarithm in fp32, which for
// 32 buckets up to 128 gives the same. beta is drawn with Hugging Face's deviation,
// 1/sqrt(model_dim).
//
// Cost: dense attention and one addition a score; memory heads (query_tokens + kv_tokens) floats.
// Parameters: beta [buckets, query_heads].
#ifndef TFB_POSITIONAL_T5_BIAS_T5_BIAS_H_
#define TFB_POSITIONAL_T5_BIAS_T5_BIAS_H_

#include <cstdint>
#include <vector>

#include "core/technique.h"

namespace tfb::t5_bias {

struct T5BiasOptions {
  int64_t buckets = 32;
  int64_t max_distance = 128;
  double scale = 1;

  void Describe(OptionBinder& bind) {
    bind.Int("buckets", &buckets, 4, 512,
             "rows of the table; without a causal mask half of them, rounded down, for each side");
    bind.Int(
        "max_distance", &max_distance, 2, int64_t{1} << 20,
        "distances from here on share a bucket; more than a quarter of buckets, causally half");
    bind.Real("scale", &scale, 0, 1e6, "factor on q . k; 0 means 1/sqrt(head_dim)");
  }
};

// Returns the smallest distance of each of a side's buckets, ascending: a distance is in the last
// bucket that starts at or below it. Where a start repeats, the buckets before its last are empty.
// It requires 2 <= buckets and buckets / 2 < max_distance < 2^32.
std::vector<int64_t> T5BucketStarts(int64_t buckets, int64_t max_distance);

}  // namespace tfb::t5_bias

#endif  // TFB_POSITIONAL_T5_BIAS_T5_BIAS_H_
