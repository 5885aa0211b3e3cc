// The CUDA kernel of max_probability_rule.h as C++ sees it. Pointers are to device memory.
#ifndef TFB_ADAPTIVE_DEPTH_ADAPTIVE_MAX_PROBABILITY_CUDA_H_
#define TFB_ADAPTIVE_DEPTH_ADAPTIVE_MAX_PROBABILITY_CUDA_H_

#include <stdint.h>

#include "core/cuda/kernel_table.h"
#include "core/cuda/row_list.h"

namespace tfb::depth_adaptive {

// Sets leaves[r] to whether the largest probability of softmax(logits_r) reaches the threshold.
struct MaxProbabilityArguments {
  const float* logits;  // [rows, vocabulary]
  uint8_t* leaves;
  int64_t rows;
  int64_t vocabulary;
  float threshold;
  RowList list;
};

struct MaxProbabilityKernels {
  // Enqueues on the stream and returns null, or a text that says why it could not.
  const char* (*decide)(const MaxProbabilityArguments& arguments, void* stream);
};

}  // namespace tfb::depth_adaptive

#endif  // TFB_ADAPTIVE_DEPTH_ADAPTIVE_MAX_PROBABILITY_CUDA_H_
