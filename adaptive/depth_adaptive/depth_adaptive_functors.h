// Steps of depth_adaptive that all devices run. Pointers are to the device's memory; row r of a Run is
// token r % tokens of sequence r / tokens.
#ifndef TFB_ADAPTIVE_DEPTH_ADAPTIVE_DEPTH_ADAPTIVE_FUNCTORS_H_
#define TFB_ADAPTIVE_DEPTH_ADAPTIVE_DEPTH_ADAPTIVE_FUNCTORS_H_

#include <math.h>
#include <stdint.h>

#include "core/cuda/functor.h"

namespace tfb::depth_adaptive {

constexpr int64_t kMaxExits = 32;

// Probabilities q [batch, tokens, classes]; row r is token r % tokens of sequence r / tokens.
struct DeviceProbabilities {
  float* data;
  int64_t batch_stride;
  int64_t token_stride;
  int64_t class_stride;
  int64_t tokens;

  TFB_HOST_DEVICE float* Row(int64_t r) const {
    return data + r / tokens * batch_stride + r % tokens * token_stride;
  }
};

// q of row r = softmax(scores[r / count]); or, where there are no scores, 1 for the last class.
struct ExitSoftmax {
  const float* scores;  // [rows / count, classes], or null
  DeviceProbabilities q;
  int64_t count;
  int64_t classes;

  TFB_HOST_DEVICE void operator()(int64_t r) const {
    float* to = q.Row(r);
    const float* own = scores == nullptr ? nullptr : scores + r / count * classes;
    float largest = -INFINITY, sum = 0;
    for (int64_t n = 0; own != nullptr && n < classes; ++n) largest = fmaxf(largest, own[n]);
    for (int64_t n = 0; n < classes; ++n) {
      float weight = n + 1 == classes ? 1 : 0;
      if (own != nullptr) weight = expf(own[n] - largest);
      to[n * q.class_stride] = weight;
      sum += weight;
    }
    for (int64_t n = 0; n < classes; ++n) to[n * q.class_stride] /= sum;
  }
};

// ---- The backward pass of the probabilities ----

// The mean over each segment, and 0 for the first, of the states of the segment before it: row
// b * segments + s is of segment s of sequence b.
struct MeansOfSegments {
  const float* states;  // [batch, tokens, channels]
  float* means;         // [batch, segments, channels]
  int64_t tokens;
  int64_t segments;
  int64_t segment;  // tokens of one
  int64_t channels;

  template <class Piece>
  TFB_HOST_DEVICE void operator()(int64_t row, const Piece& piece) const {
    const int64_t end = row % segments * segment;
    const float* const sequence = states + row / segments * tokens * channels + piece.first();
    float sum[Piece::kMost];
    for (int i = 0; i < piece.count(); ++i) sum[i] = 0;
    for (int64_t t = end == 0 ? 0 : end - segment; t < end; ++t) {
      const float* const state = sequence + t * channels;
      for (int i = 0; i < piece.count(); ++i) sum[i] += state[i];
    }
    float* const mean = means + row * channels + piece.first();
    for (int i = 0; i < piece.count(); ++i) mean[i] = sum[i] / static_cast<float>(segment);
  }
};

// With chi^n = sigmoid(z_n), q(n) = chi^n prod_(n' < n) (1 - chi^n') and g = dL/dq, whose last class,
// the `classes`-th from 0, is that of no chi:
//
//   dz_n = g_n q(n) (1 - chi^n) - chi^n sum_(m > n) g_m q(m)
struct GeometricGradient {
  DeviceProbabilities g;
  float* logits;  // [tokens of the batch, classes]: z, which become dz
  int64_t classes;

  TFB_HOST_DEVICE void operator()(int64_t r) const {
    const float* const of_q = g.Row(r);
    float* const z = logits + r * classes;
    float q[kMaxExits], left = 1;
    for (int64_t n = 0; n < classes; ++n) {
      q[n] = left / (1 + expf(-z[n]));
      left /= 1 + expf(z[n]);
    }
    float later = of_q[classes * g.class_stride] * left;
    for (int64_t n = classes - 1; n >= 0; --n) {
      const float own = of_q[n * g.class_stride] * q[n], chi = 1 / (1 + expf(-z[n]));
      z[n] = own * (1 - chi) - chi * later;
      later += own;
    }
  }
};

// With q = softmax(z) and g = dL/dq, dz_n = q(n) (g_n - sum_m g_m q(m)); and 0 for the first tokens of
// each sequence, whose probabilities are constant.
struct SoftmaxGradient {
  DeviceProbabilities g;
  float* logits;  // [tokens of the batch, classes]: z, which become dz
  int64_t classes;
  int64_t constant;  // tokens

  TFB_HOST_DEVICE void operator()(int64_t r) const {
    const float* const of_q = g.Row(r);
    float* const z = logits + r * classes;
    float largest = -INFINITY, sum = 0, mean = 0;
    for (int64_t n = 0; n < classes; ++n) largest = fmaxf(largest, z[n]);
    for (int64_t n = 0; n < classes; ++n) sum += expf(z[n] - largest);
    for (int64_t n = 0; n < classes; ++n) {
      z[n] = expf(z[n] - largest) / sum;
      mean += of_q[n * g.class_stride] * z[n];
    }
    const bool is_constant = r % g.tokens < constant;
    for (int64_t n = 0; n < classes; ++n) {
      z[n] = is_constant ? 0 : z[n] * (of_q[n * g.class_stride] - mean);
    }
  }
};

}  // namespace tfb::depth_adaptive

#endif  // TFB_ADAPTIVE_DEPTH_ADAPTIVE_DEPTH_ADAPTIVE_FUNCTORS_H_
