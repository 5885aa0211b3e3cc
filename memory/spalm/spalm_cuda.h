// The CUDA kernels of SPALM as C++ sees them. Pointers are to device memory.
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
  float* gates;               // [rows]: g
  int64_t rows;               // batch * tokens
  int64_t tokens;
  int64_t dim;
  int k;
  // Written for a backward pass, unless `mean` is null.
  float* mean;      // m [rows][dim], which is x where there is no neighbour
  float* weights;   // w [rows][k], unspecified for what is no neighbour
  int32_t* places;  // [rows][k]: the neighbours' tokens; -1 for none
};

struct SpalmGradientArguments {
  const int32_t* places;    // [rows][k]: the neighbours' tokens; -1 for none
  const float* embeddings;  // [vocabulary][dim]
  DeviceView x;             // [batch, tokens, dim]
  const float* mean;        // m [rows][dim]
  const float* weights;     // w [rows][k]
  const float* gates;       // g [rows]
  const float* z_gradient;  // [rows][dim]: dz, and dm for `add_to_output`
  float* scores;            // dc [rows][k]
  float* gate_scores;       // ds [rows]
  DeviceView output;        // f32 [vocabulary, dim]: the gradient of the embeddings
  int64_t rows;
  int64_t tokens;
  int64_t dim;
  int64_t vocabulary;
  int k;
};

// Each launcher enqueues on the stream and returns null, or a text that says why it could not.
struct SpalmKernels {
  const char* (*aggregate)(const SpalmArguments& arguments, void* stream);
  // Writes dc and ds.
  const char* (*differentiate_scores)(const SpalmGradientArguments& arguments, void* stream);
  // Adds dy_i to the rows of `output`.
  const char* (*add_to_output)(const SpalmGradientArguments& arguments, void* stream);
};

}  // namespace tfb::spalm

#endif  // TFB_MEMORY_SPALM_SPALM_CUDA_H_
