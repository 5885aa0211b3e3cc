#include "core/linear/feature_matrix.h"

#include <cmath>
#include <cstdint>
#include <vector>

#include "core/definition.h"

namespace tfb {

void DrawFeatureRows(const RandomStream& stream, bool orthogonal, RowNorms norms,
                     const TensorView& rows) {
  const int64_t number = rows.dim(0), head_dim = rows.dim(1);
  std::vector<double> drawn(number * head_dim);
  for (int64_t r = 0; r < number; ++r) {
    double* row = drawn.data() + r * head_dim;
    for (int64_t c = 0; c < head_dim; ++c) row[c] = stream.Normal(r * head_dim + c);
    const double chi = std::sqrt(Dot(row, row, head_dim));
    const int64_t block = orthogonal ? r / head_dim * head_dim : r;
    for (int pass = 0; pass < 2; ++pass) {  // the second pass removes what rounding left
      for (int64_t other = block; other < r; ++other) {
        const double* unit = drawn.data() + other * head_dim;
        const double shared = Dot(row, unit, head_dim);
        for (int64_t c = 0; c < head_dim; ++c) row[c] -= shared * unit[c];
      }
    }
    const double length = std::sqrt(Dot(row, row, head_dim));
    const double norm = norms == RowNorms::kChi ? chi : std::sqrt(static_cast<double>(head_dim));
    for (int64_t c = 0; c < head_dim; ++c) {
      row[c] /= length;
      *rows.MutableAt<float>(r, c) = static_cast<float>(norm * row[c]);
    }
  }
}

}  // namespace tfb
