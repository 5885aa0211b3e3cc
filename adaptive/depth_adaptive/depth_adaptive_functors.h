// A step of depth_adaptive that all devices run. Pointers are to the device's memory.
#ifndef TFB_ADAPTIVE_DEPTH_ADAPTIVE_DEPTH_ADAPTIVE_FUNCTORS_H_
#define TFB_ADAPTIVE_DEPTH_ADAPTIVE_DEPTH_ADAPTIVE_FUNCTORS_H_

#include <math.h>
#include <stdint.h>

#include "core/cuda/functor.h"

namespace tfb::depth_adaptive {

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

}  // namespace tfb::depth_adaptive

#endif  // TFB_ADAPTIVE_DEPTH_ADAPTIVE_DEPTH_ADAPTIVE_FUNCTORS_H_
