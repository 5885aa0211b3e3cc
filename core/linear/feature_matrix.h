// The random matrix W of engine linear's features.
#ifndef TFB_CORE_LINEAR_FEATURE_MATRIX_H_
#define TFB_CORE_LINEAR_FEATURE_MATRIX_H_

#include "core/random.h"
#include "core/tensor.h"

namespace tfb {

enum class RowNorms { kChi, kSqrtD };

// Fills `rows`, f32 [number, head_dim]. Row r is Gaussian vector r of the stream, N(0, I), so that
// a matrix of fewer rows begins one of more.
//
// Where `orthogonal`, within blocks of head_dim rows, of which the last may be shorter, each
// direction is made orthogonal to the rows before it (Gram and Schmidt, which is the QR of the
// block with a positive diagonal of R: the directions of a block are uniform over the orthogonal
// group). The row's length stays that of the Gaussian vector, chi(head_dim), which is independent
// of all directions. Norms of kSqrtD make all rows sqrt(head_dim) long.
void DrawFeatureRows(const RandomStream& stream, bool orthogonal, RowNorms norms,
                     const TensorView& rows);

}  // namespace tfb

#endif  // TFB_CORE_LINEAR_FEATURE_MATRIX_H_
