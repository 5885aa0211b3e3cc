// The option final_norm of stacks of layers: a normalisation of what the last layer writes, with
// parameters of its own.
//
// Post-norm layers end with a norm. Pre-norm layers do not, and most networks of them normalise
// once more before the output projection: GPT-2 and torch.nn.TransformerEncoder(norm=LayerNorm) do,
// the authors' code of Transformer-XL and torch.nn.TransformerEncoder(norm=None) do not.
// torch.nn.Transformer normalises once more behind post-norm layers too. calm and depth_adaptive do
// not have the option: they normalise what leaves at every exit, the last one among them.
#ifndef TFB_CORE_LAYERS_FINAL_NORM_H_
#define TFB_CORE_LAYERS_FINAL_NORM_H_

#include "core/options.h"

namespace tfb {

inline void DescribeFinalNorm(OptionBinder& bind, bool* final_norm) {
  bind.Bool("final_norm", final_norm, "normalise what the last layer writes once more");
}

}  // namespace tfb

#endif  // TFB_CORE_LAYERS_FINAL_NORM_H_
