// The CUDA kernels of kNN-LM as C++ sees them. Pointers are to device memory.
#ifndef TFB_MEMORY_KNN_LM_KNN_LM_CUDA_H_
#define TFB_MEMORY_KNN_LM_KNN_LM_CUDA_H_

#include <stdint.h>

#include "core/cuda/device_view.h"
#include "core/cuda/kernel_table.h"

namespace tfb::knn_lm {

// The neighbours and probabilities that a prediction is mixed of.
struct KnnLmArguments {
  const int32_t* neighbours;  // [rows][k], -1: none
  const float* keys;          // [entries][dim]
  const int32_t* values;      // [entries]
  DeviceView context;         // [batch, tokens, dim]
  DeviceView log_p;           // [batch, tokens, vocabulary], f32: the model's
  int64_t rows;               // batch * tokens
  int64_t tokens;
  int64_t dim;
  int64_t vocabulary;
  int k;
  double temperature;
  float lambda;          // of all tokens
  const float* lambdas;  // [batch, tokens], in their place unless null
  int64_t lambda_strides[2];
};

struct KnnLmOutputs {
  DeviceView out;     // [batch, tokens, vocabulary], of any dtype; may be log_p
  float* statistics;  // [rows][2]: agreement, neighbour mass
};

struct KnnLmGradients {
  DeviceView out;      // [batch, tokens, vocabulary], of any dtype: dL/dlog p
  float* log_p;        // [rows][vocabulary]; written: dL/dlog p_LM
  DeviceView context;  // [batch, tokens, dim], of any dtype; written, unless null
  DeviceView lambda;   // f32 [batch, tokens]; written, unless null
};

// Each launcher enqueues on the stream and returns null, or a text that says why it could not.
struct KnnLmKernels {
  const char* (*mix)(const KnnLmArguments& arguments, const KnnLmOutputs& outputs, void* stream);
  const char* (*differentiate)(const KnnLmArguments& arguments, const KnnLmGradients& gradients,
                               void* stream);
};

}  // namespace tfb::knn_lm

#endif  // TFB_MEMORY_KNN_LM_KNN_LM_CUDA_H_
