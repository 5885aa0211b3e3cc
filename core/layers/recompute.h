// The option recompute of stacks of blocks, which says what a Run keeps for its backward pass.
//
// Without it a Run keeps, of every block, all that the block's backward pass reads: projections,
// contexts, log-sum-exps, inner activations. With it a Run keeps the state that each block reads, f32
// [batch, tokens, model_dim], and the backward pass computes a block from that again right before it
// differentiates the block: the gradients have the same bits, for one more forward pass (Chen, Xu,
// Zhang, Guestrin 2016, "Training deep nets with sublinear memory cost", arXiv:1604.06174v2, section
// 4). So kept memory grows by one state a block, whatever the block holds, and the workspace of the
// backward pass has what one block keeps.
//
//   encoder_decoder, and decision_transformer, which is one      have the option
//   learned, universal (encoded_attention.h)                     have the option
//   transformer_xl, gated_transformer_xl, compressive,           always compute blocks again, one
//     memorizing, calm, depth_adaptive (segmented_layer.h)       segment of a layer at a time
//   universal_transformer                                        always computes its steps again
//   reversible                                                   keeps its last streams alone, for
//                                                                any number of blocks
//   multi_head, sinusoidal                                       are one block, which a network around
//                                                                them computes again
//
// The segmented stacks, universal_transformer and reversible have no option, since their backward
// passes are of another kind than their runs: attention over a segment's list of rows, the tokens that
// took a step, the inverse of a block. They do not read what a run leaves inside a block. compressive
// keeps the rows that it compressed beside the states, calm and depth_adaptive a byte a token and layer,
// and memorizing, of the layer that has a store, what its queries retrieved.
#ifndef TFB_CORE_LAYERS_RECOMPUTE_H_
#define TFB_CORE_LAYERS_RECOMPUTE_H_

#include "core/options.h"

namespace tfb {

inline void DescribeRecompute(OptionBinder& bind, bool* recompute) {
  bind.Bool("recompute", recompute,
            "keep one state a block for the backward pass, which computes the blocks again");
}

// The name of the statistic of stacks that says how many bytes a Run keeps more for one more block like
// those that there are. Stacks whose backward pass is not on the device do not have it.
inline constexpr char kKeptBytesPerBlock[] = "kept_bytes_per_block";

}  // namespace tfb

#endif  // TFB_CORE_LAYERS_RECOMPUTE_H_
