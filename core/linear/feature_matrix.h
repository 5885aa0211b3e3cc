// The random matrix W of engine linear's features.
#ifndef TFB_CORE_LINEAR_FEATURE_MATRIX_H_
#define TFB_CORE_LINEAR_FEATURE_MATRIX_H_

#include "core/random.h"
#include "core/tensor.h"

namespace tfb {

enum class RowNorms { kChi, kSqrtD };

// Fills `rows`, f32 [number, head_dim]. Row r is Gaussian vector r of the stream, N(0, I), so that
// fewer rows are the first of more.
//
// `orthogonal`: within blocks of head_dim rows, of which the last may be cut short, each direction
// loses what it shares with the rows before it (Gram and Schmidt, which is the QR of the block with a
// positive diagonal of R: the directions of a block are uniform over the orthogonal group). Its length
// stays that of the Gaussian vector, chi(head_dim), which is independent of all directions. Norms of
// kSqrtD make all rows sqrt(head_dim) long.
void DrawFeatureRows(const RandomStream& stream, bool orthogonal, RowNorms norms,
                     const TensorView& rows);

}  // namespace tfb

#endif  // TFB_CORE_LINEAR_FEATURE_MATRIX_H_
