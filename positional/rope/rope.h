// Rotary position embedding: queries and keys are rotated by angles proportional to their
// positions, so that their product depends on the distance alone.
//
//   theta_t = base^(-2 t / r), t = 0 .. r/2 - 1, on the first r = rotary_dims channels
//   (a, b) -> (a cos p theta_t - b sin p theta_t, a sin p theta_t + b cos p theta_t)
//
// for the pair t of a row at position p: channels (2t, 2t + 1) in the interleaved layout, and (t, t
// + r/2) in the half-split one. Keys have the positions j, queries i + kv_tokens - query_tokens,
// both plus position_offset. Then dense attention. In 16-bit problems rotated queries and keys are
// rounded to the problem's dtype before the product, as models of that precision do; that rounding
// is a part of the definition.
//
// Source: Su et al. 2021, "RoFormer", arXiv:2104.09864v5, section 3.2.2, equations 14 to 16
// (interleaved); half-split as in GPT-NeoX and LLaMA. Angles are formed in float64: in fp32 the
// cosine at position 1e5 would be wrong by 3e-3.
// Cost: dense attention and 3 r FLOPs a row of queries and keys.
#ifndef TFB_POSITIONAL_ROPE_ROPE_H_
#define TFB_POSITIONAL_ROPE_ROPE_H_

#include <cstdint>

#include "core/options.h"
#include "core/problem.h"

namespace tfb::rope {

struct RopeOptions {
  enum class Layout { kInterleaved, kHalf };
  Layout layout = Layout::kInterleaved;
  int64_t rotary_dims = 0;
  double base = 10000;
  int64_t position_offset = 0;

  void Describe(OptionBinder& bind) {
    bind.Choice("layout", &layout, {{"interleaved", Layout::kInterleaved}, {"half", Layout::kHalf}},
                "which channels make a pair: (2t, 2t+1), or (t, t + rotary_dims/2)");
    bind.Int("rotary_dims", &rotary_dims, 0, kMaxHeadDim,
             "leading channels that are turned, an even number; 0 means all (of an odd head_dim "
             "all but one)");
    bind.Real("base", &base, 1, 1e12, "base of the geometric series of frequencies");
    bind.Int("position_offset", &position_offset, 0, kMaxTokens, "position of key 0");
  }
};

}  // namespace tfb::rope

#endif  // TFB_POSITIONAL_ROPE_ROPE_H_
