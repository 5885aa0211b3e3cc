// A hidden state as the heads of attention.
#ifndef TFB_CORE_LAYERS_HEADS_H_
#define TFB_CORE_LAYERS_HEADS_H_

#include <cstdint>

#include "core/tensor.h"

namespace tfb {

// Returns [batch, tokens, heads * channels] as [batch, heads, tokens, channels]. `View` is a
// ConstTensorView or a TensorView.
template <class View>
View Heads(const View& view, int64_t heads) {
  return Transpose(SplitAxis(view, 2, heads), 1, 2);
}

}  // namespace tfb

#endif  // TFB_CORE_LAYERS_HEADS_H_
