// Rows of a table by their indices, such as the embeddings of tokens, and the gradient of the
// table, on the CPU.
//
//   y_n = T[index_n]        dT_i = sum of dy_n over the places n with index_n = i
//
// An index below 0 selects no row: y_n is then 0, and dy_n adds to nothing. Sums are fp32, in the
// order of the places, whatever the number of threads. Source: Vaswani et al., arXiv:1706.03762v7,
// section 3.4, for the embeddings; the chain rule.
#ifndef TFB_CORE_LAYERS_LOOK_UP_H_
#define TFB_CORE_LAYERS_LOOK_UP_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "core/technique.h"
#include "core/tensor.h"

namespace tfb {

// Writes the rows of a table [rows, channels] to y, [batch, tokens, channels] or [places,
// channels], whose places are `indices`. Both are of any floating dtype and strides. Returns
// InvalidArgument for an index beyond the table, and Internal where the shapes do not fit, before
// it writes anything.
absl::Status LookUp(const ConstTensorView& table, absl::Span<const int32_t> indices,
                    const TensorView& y, const Execution& execution);

// Returns the scratch of a gradient in bytes: the places in the order of their rows.
size_t LookUpGradientWorkspaceBytes(int64_t places, int64_t rows);

// Writes the gradient of a table, [rows, channels] of any floating dtype and strides, of dy as y is
// above; rows without a place get 0. With `accumulate` it adds to what the gradient holds. It
// allocates nothing. Returns the errors of LookUp.
absl::Status LookUpGradient(const ConstTensorView& dy, absl::Span<const int32_t> indices,
                            const TensorView& table, bool accumulate, const Execution& execution);

}  // namespace tfb

#endif  // TFB_CORE_LAYERS_LOOK_UP_H_
