// The CUDA kernel of calm as C++ sees it. Pointers are to device memory.
#ifndef TFB_ADAPTIVE_CALM_CALM_CUDA_H_
#define TFB_ADAPTIVE_CALM_CALM_CUDA_H_

#include <stdint.h>

#include "core/cuda/kernel_table.h"
#include "core/cuda/row_list.h"

namespace tfb::calm {

enum class Confidence : unsigned char { kSoftmax, kSaturation, kClassifier };

// lambda_t = clip(constant + scale exp(rate t), 0, most)
struct Threshold {
  float constant;
  float scale;
  float rate;
  float most;
};

// Logits of a classifier, of row r, token r % tokens of sequence r / tokens.
struct DeviceLogits {
  float* data;
  int64_t batch_stride;
  int64_t token_stride;
};

// leaves[r] = whether the confidence of row r reaches its threshold; and logits, of all rows, have w .
// state + b of the classifier. Either may be null.
struct ConfidenceArguments {
  Confidence confidence;
  const float* state;    // [rows, channels]; softmax: logits
  const float* before;   // saturation: the state before the layer
  const float* weights;  // classifier: w [channels]
  const float* bias;     // and b, one
  uint8_t* leaves;
  DeviceLogits logits;
  int64_t rows;
  int64_t channels;
  int64_t tokens;  // tokens of each batch row
  int64_t first_position;
  Threshold threshold;
  RowList list;
};

struct CalmKernels {
  // Enqueues on the stream and returns null, or a text that says why it could not.
  const char* (*decide)(const ConfidenceArguments& arguments, void* stream);
};

}  // namespace tfb::calm

#endif  // TFB_ADAPTIVE_CALM_CALM_CUDA_H_
