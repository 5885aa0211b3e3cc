// The sums of the gradients of relative positions and spans (relative_positions.h, list_attention.h). Pointers are to the device's memory.
#ifndef TFB_CORE_LAYERS_ATTENTION_POSITION_PRODUCTS_H_
#define TFB_CORE_LAYERS_ATTENTION_POSITION_PRODUCTS_H_

#include <stdint.h>

#include "core/cuda/functor.h"
#include "core/cuda/run_sums.h"
#include "core/layers/tensor_rows.h"

namespace tfb::layers {

// Row c of the gradient += sum_d r_d[c] T_d, in the order of the distances.
struct PositionProducts {
  const float* sinusoids;     // r, [rows][channels]
  const double* by_distance;  // T, [rows][width]
  int64_t rows;
  int64_t channels;
  int64_t width;
  double* gradient;  // [channels][width], or null
  RowsOfView to;     // then [channels, width]

  template <class Piece>
  TFB_HOST_DEVICE void operator()(int64_t c, const Piece& piece) const {
    double sums[Piece::kMost] = {};
    for (int64_t d = 0; d < rows; ++d) {
      const double factor = sinusoids[d * channels + c];
      const double* from = by_distance + d * width + piece.first();
      for (int i = 0; i < piece.count(); ++i) sums[i] += factor * from[i];
    }
    if (gradient != nullptr) {
      double* const of_row = gradient + c * width + piece.first();
      for (int i = 0; i < piece.count(); ++i) of_row[i] += sums[i];
      return;
    }
    float x[Piece::kMost];
    to.Load(c, piece, x);
    for (int i = 0; i < piece.count(); ++i) x[i] += static_cast<float>(sums[i]);
    to.Store(c, piece, x);
  }
};

// Row n of `to` += row n of the sums.
struct AddDoubleRows {
  const double* sums;  // [rows][width]
  int64_t width;
  RowsOfView to;

  template <class Piece>
  TFB_HOST_DEVICE void operator()(int64_t n, const Piece& piece) const {
    const double* from = sums + n * width + piece.first();
    float x[Piece::kMost];
    to.Load(n, piece, x);
    for (int i = 0; i < piece.count(); ++i) x[i] += static_cast<float>(from[i]);
    to.Store(n, piece, x);
  }
};

// The sums (core/cuda/run_sums.h) of the numbers of all queries of each head, a row of one column, which
// are added to its sum.
struct SumsOfHeads {
  using Number = double;
  static constexpr int kSums = 1;
  const float* numbers;  // [batch][heads][tokens]
  int64_t heads;
  int64_t tokens;
  double* sums;  // [heads]

  template <class Piece>
  TFB_HOST_DEVICE void AddTerms(int64_t h, int64_t begin, int64_t end, const Piece&,
                                double (&to)[kSums][Piece::kMost]) const {
    TermIndex query(begin, tokens);
    for (int64_t n = begin; n < end; ++n, query.Next()) {
      to[0][0] += numbers[(query.outer * heads + h) * tokens + query.inner];
    }
  }
  template <class Piece>
  TFB_HOST_DEVICE void Take(int64_t h, const Piece&,
                            const double (&from)[kSums][Piece::kMost]) const {
    sums[h] += from[0][0];
  }
};

}  // namespace tfb::layers

#endif  // TFB_CORE_LAYERS_ATTENTION_POSITION_PRODUCTS_H_
