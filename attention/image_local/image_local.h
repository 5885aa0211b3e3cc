// Image Transformer: blocks of queries that each share one block of memory around them, in one
// dimension or two.
//
//   y_i = softmax_j(scale q_i . k_j) v_j over the keys that i sees, scale = 1 / sqrt(head_dim)
//
// 1d: the tokens as they come, with l_q = `query_block`, l_m = `memory` and b = l_q floor(i / l_q),
// the first token of the query's block. Query i sees key j when
//
//   b - l_m <= j <= i                        causal
//   b - l_m <= j <= b + l_q - 1 + l_m        not causal: an encoder's
//
// 2d: token i is row r = floor(i / W) and column c = i mod W of an image of W = `width` tokens a
// row, which is its pixels times their channels. A query block of h x w tokens (`block_height`,
// `block_width`) begins at row r0 and column c0, multiples of h and w. Its memory reaches f_h rows
// up and f_w columns to each side (`flange_height`, `flange_width`). Query (r, c) sees key (r', c')
// when
//
//   above    r0 - f_h <= r' < r0    and  c0 - f_w <= c' < c0 + w + f_w,   or
//   left     r0 <= r' < r0 + h      and  c0 - f_w <= c' < c0,             or
//   within   both are in one block  and  (r', c') is not behind (r, c) in its raster order.
//
// So 2d is causal in the order in which the paper generates images, block after block, and not in
// the order of tokens: above reaches to the right. Blocks are cut short at the image's edges, and
// the image's last row may be short as well: any number of tokens is an image. Every query sees
// itself.
//
// Source: Parmar et al. 2018, "Image transformer", ICML, arXiv:1802.05751v3, section 3.3. The
// memory of 2d does not reach down, so that 2d has no form without a causal mask: such a problem is
// refused (tensor2tensor's local_attention_2d has one of its own, with a flange all around).
// Deviations of tensor2tensor's common_attention.py that are not followed: in 1d with a causal mask
// l_m is l_q, and below 2 l_q tokens there is one block; tokens with keys of 0 are padding.
// Cost: 2 pairs (head_dim + value_dim) FLOPs; pairs a query are about l_q / 2 + l_m in 1d, causal,
// l_q + 2 l_m not causal, and h w / 2 + h f_w + f_h (w + 2 f_w) in 2d.
#ifndef TFB_ATTENTION_IMAGE_LOCAL_IMAGE_LOCAL_H_
#define TFB_ATTENTION_IMAGE_LOCAL_IMAGE_LOCAL_H_

#include <cstdint>
#include <memory>

#include "core/options.h"

namespace tfb::image_local {

struct ImageLocalOptions {
  enum class Form { k1d, k2d };
  Form form = Form::k1d;
  int64_t query_block = 256;
  int64_t memory = 256;
  int64_t width = 0;
  int64_t block_height = 8;
  int64_t block_width = 16;
  int64_t flange_height = 8;
  int64_t flange_width = 16;

  void Describe(OptionBinder& bind) {
    bind.Choice("form", &form, {{"1d", Form::k1d}, {"2d", Form::k2d}},
                "whether blocks are of the sequence or of an image's rows and columns");
    bind.Int("query_block", &query_block, 1, kMaxTokens, "1d: queries of a block");
    bind.Int("memory", &memory, 0, kMaxTokens,
             "1d: keys seen before the query's block and, where not causal, behind it",
             {64, 128, 256, 512, 1024});
    bind.Int("width", &width, 0, kMaxTokens,
             "2d: tokens in a row of the image, pixels times channels; 0 for about a square");
    bind.Int("block_height", &block_height, 1, kMaxTokens, "2d: rows of a query block");
    bind.Int("block_width", &block_width, 1, kMaxTokens, "2d: columns of a query block");
    bind.Int("flange_height", &flange_height, 0, kMaxTokens,
             "2d: rows seen above the query's block");
    bind.Int("flange_width", &flange_width, 0, kMaxTokens,
             "2d: columns seen on each side of the query's block");
  }
};

}  // namespace tfb::image_local

#endif  // TFB_ATTENTION_IMAGE_LOCAL_IMAGE_LOCAL_H_
