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

// Returns [rows, heads * channels] as [batch, heads, rows, channels], where all batch rows share the
// rows: an order of tokens names those of each.
template <class View>
View SharedHeads(const View& rows, int64_t batch, int64_t heads) {
  View shared = rows;
  const int64_t channels = rows.dim(1) / heads;
  shared.rank = 4;
  shared.dims = {batch, heads, rows.dim(0), channels};
  shared.strides = {0, channels * rows.stride(1), rows.stride(0), rows.stride(1)};
  return shared;
}

}  // namespace tfb

#endif  // TFB_CORE_LAYERS_HEADS_H_
