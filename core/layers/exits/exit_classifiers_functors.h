// Steps of exit_classifiers.h that all devices run. Pointers are to the device's memory; row r of a Run
// is token r % tokens of sequence r / tokens.
#ifndef TFB_CORE_LAYERS_EXITS_EXIT_CLASSIFIERS_FUNCTORS_H_
#define TFB_CORE_LAYERS_EXITS_EXIT_CLASSIFIERS_FUNCTORS_H_

#include <stdint.h>

#include "core/cuda/functor.h"
#include "core/cuda/run_sums.h"

namespace tfb::layers {

// The rows that classifiers read: those of tokens, or those that the tokens of a segment share.
struct ClassifierRows {
  const float* rows;     // [batch, segments, channels]
  int64_t class_stride;  // from the rows of one class to those of the next
  int64_t tokens;
  int64_t segments;
  int64_t segment;  // tokens of one; 1: each token has its own row
  int64_t channels;

  TFB_HOST_DEVICE const float* Of(int64_t r, int64_t n) const {
    const int64_t row = r / tokens * segments + r % tokens / segment;
    return rows + n * class_stride + row * channels;
  }
};

// z = w_n . row + b_n of each token and class, of which element e is class e % classes of token
// e / classes. Sums are float64.
struct ClassifierLogits {
  ClassifierRows of;
  const float* weights;  // [classes, channels]
  const float* bias;     // [classes]
  float* logits;         // [tokens of the batch, classes]
  int64_t classes;

  TFB_HOST_DEVICE void operator()(int64_t e) const {
    const int64_t n = e % classes;
    const float* const row = of.Of(e / classes, n);
    const float* const own = weights + n * of.channels;
    double sum = 0;
    for (int64_t c = 0; c < of.channels; ++c) {
      sum += static_cast<double>(own[c]) * static_cast<double>(row[c]);
    }
    logits[e] = static_cast<float>(sum) + bias[n];
  }
};

// The sums (core/cuda/run_sums.h) over tokens of dz_n row, of which row i is of class n = first + i: dw_n.
struct ClassifierWeightGradient {
  using Number = float;
  static constexpr int kSums = 1;
  ClassifierRows of;
  const float* of_logits;  // [tokens of the batch, classes]
  float* gradient;         // of row i and channel c, at i class_stride + c channel_stride
  int64_t class_stride;
  int64_t channel_stride;
  int64_t classes;
  int64_t first;

  template <class Piece>
  TFB_HOST_DEVICE void AddTerms(int64_t i, int64_t begin, int64_t end, const Piece& piece,
                                float (&sums)[kSums][Piece::kMost]) const {
    const int64_t n = first + i;
    for (int64_t r = begin; r < end; ++r) {
      const float dz = of_logits[r * classes + n];
      const float* const row = of.Of(r, n) + piece.first();
      for (int k = 0; k < piece.count(); ++k) sums[0][k] += dz * row[k];
    }
  }
  template <class Piece>
  TFB_HOST_DEVICE void Take(int64_t i, const Piece& piece,
                            const float (&sums)[kSums][Piece::kMost]) const {
    float* const to = gradient + i * class_stride + piece.first() * channel_stride;
    for (int k = 0; k < piece.count(); ++k) to[k * channel_stride] += sums[0][k];
  }
};

// The sums over tokens of dz_n, of which column i of the only row is of class n = first + i: db_n.
struct ClassifierBiasGradient {
  using Number = float;
  static constexpr int kSums = 1;
  const float* of_logits;  // [tokens of the batch, classes]
  float* gradient;         // of column i, at i stride
  int64_t stride;
  int64_t classes;
  int64_t first;

  template <class Piece>
  TFB_HOST_DEVICE void AddTerms(int64_t, int64_t begin, int64_t end, const Piece& piece,
                                float (&sums)[kSums][Piece::kMost]) const {
    for (int64_t r = begin; r < end; ++r) {
      const float* const dz = of_logits + r * classes + first + piece.first();
      for (int k = 0; k < piece.count(); ++k) sums[0][k] += dz[k];
    }
  }
  template <class Piece>
  TFB_HOST_DEVICE void Take(int64_t, const Piece& piece,
                            const float (&sums)[kSums][Piece::kMost]) const {
    float* const to = gradient + piece.first() * stride;
    for (int k = 0; k < piece.count(); ++k) to[k * stride] += sums[0][k];
  }
};

// dh_t += sum over classes first, ..., end - 1 of dz_n w_n, of the tokens of a segment.
struct ClassifierStateGradient {
  const float* of_logits;  // [batch, tokens, classes]
  const float* weights;    // [classes, channels]
  DeviceView gradient;     // f32 [batch, segment, channels], of tokens begin, begin + 1, ...
  int64_t tokens;
  int64_t begin;
  int64_t segment;
  int64_t classes;
  int64_t channels;
  int64_t first;
  int64_t end;

  template <class Piece>
  TFB_HOST_DEVICE void operator()(int64_t place, const Piece& piece) const {
    const int64_t b = place / segment, t = place % segment;
    const float* const dz = of_logits + (b * tokens + begin + t) * classes;
    const int64_t offset = Offset(gradient, b, t, 0);
    float x[Piece::kMost];
    piece.Load(gradient, offset, gradient.strides[2], x);
    for (int64_t n = first; n < end; ++n) {
      const float* const own = weights + n * channels + piece.first();
      for (int i = 0; i < piece.count(); ++i) x[i] += dz[n] * own[i];
    }
    piece.Store(x, gradient, offset, gradient.strides[2]);
  }
};

}  // namespace tfb::layers

#endif  // TFB_CORE_LAYERS_EXITS_EXIT_CLASSIFIERS_FUNCTORS_H_
