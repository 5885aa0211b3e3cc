// The CUDA kernel of kNN-LM as C++ sees it. Pointers are to device memory.
#ifndef TFB_MEMORY_KNN_LM_KNN_LM_CUDA_H_
#define TFB_MEMORY_KNN_LM_KNN_LM_CUDA_H_

#include <stdint.h>

#include "core/cuda/device_view.h"
#include "core/cuda/kernel_table.h"

namespace tfb::knn_lm {

struct KnnLmArguments {
  const int32_t* neighbours;  // [rows][k], -1: none
  const float* keys;          // [entries][dim]
  const int32_t* values;      // [entries]
  DeviceView context;         // [batch, tokens, dim]
  DeviceView log_p;           // [batch, tokens, vocabulary], f32: the model's
  DeviceView out;             // of the same shape, of any dtype; may be log_p
  float* statistics;          // [rows][2]: agreement, neighbour mass
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

struct KnnLmKernels {
  // Enqueues on the stream and returns null, or a text that says why it could not.
  const char* (*mix)(const KnnLmArguments& arguments, void* stream);
};

}  // namespace tfb::knn_lm

#endif  // TFB_MEMORY_KNN_LM_KNN_LM_CUDA_H_
