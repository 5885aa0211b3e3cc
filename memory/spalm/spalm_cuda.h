// The CUDA kernel of SPALM as C++ sees it. Pointers are to device memory.
#ifndef TFB_MEMORY_SPALM_SPALM_CUDA_H_
#define TFB_MEMORY_SPALM_SPALM_CUDA_H_

#include <stdint.h>

#include "core/cuda/device_view.h"
#include "core/cuda/kernel_table.h"

namespace tfb::spalm {

struct SpalmArguments {
  const int32_t* neighbours;  // [rows][k], -1: none
  const int32_t* values;      // [entries]
  const float* embeddings;    // [vocabulary][dim]: the rows of `output`
  const float* gate;          // [dim]
  DeviceView x;               // [batch, tokens, dim]
  float* z;                   // [rows][dim]
  float* statistics;          // [rows]: g
  int64_t rows;               // batch * tokens
  int64_t tokens;
  int64_t dim;
  int k;
};

struct SpalmKernels {
  // Enqueues on the stream and returns null, or a text that says why it could not.
  const char* (*aggregate)(const SpalmArguments& arguments, void* stream);
};

}  // namespace tfb::spalm

#endif  // TFB_MEMORY_SPALM_SPALM_CUDA_H_
