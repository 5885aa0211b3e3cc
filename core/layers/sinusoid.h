// Sinusoids of relative positions, as Transformer-XL and its descendants use them.
//
//   r_p = [sin(p f_0), sin(p f_1), ..., cos(p f_0), cos(p f_1), ...]
//   f_c = 10000^(-2 c / channels)
//
// for the distances p = 0, 1, ...: all sines, then all cosines; with an odd number of channels the
// last cosine is missing. Vaswani et al., arXiv:1706.03762v7, section 3.5 interleave the two; Dai
// et al., arXiv:1901.02860v3, section 3.3 refer to them, and the authors' code (mem_transformer.py,
// PositionalEmbedding) puts them in this order, which is the same up to a permutation of the rows
// of the matrix that r_p is multiplied by.
#ifndef TFB_CORE_LAYERS_SINUSOID_H_
#define TFB_CORE_LAYERS_SINUSOID_H_

#include <cstdint>

#include "core/tensor.h"

namespace tfb {

// r_0 to r_(distances - 1), f32 [distances, channels]; angles are in double.
Tensor RelativeSinusoids(int64_t distances, int64_t channels);

}  // namespace tfb

#endif  // TFB_CORE_LAYERS_SINUSOID_H_
