// The CUDA kernels of shaw as C++ sees it. Pointers are to device memory.
#ifndef TFB_POSITIONAL_SHAW_SHAW_CUDA_H_
#define TFB_POSITIONAL_SHAW_SHAW_CUDA_H_

#include <stdint.h>

#include "core/cuda/device_view.h"
#include "core/cuda/kernel_table.h"
#include "positional/shaw/shaw_sizes.h"

namespace tfb::shaw {

// The arguments of ShawCall in device memory.
struct ShawArguments {
  ShawSizes sizes;
  DeviceView q;  // [batch, heads, tokens, channels]
  DeviceView k;
  DeviceView v;
  DeviceView out;
  const uint8_t* key_mask;  // or null
  int64_t mask_strides[2];
  const float* far_rows[2];
  const float* far_log_sum_exp[2];
  const float* key_table;
  const float* value_table;  // or null
  float* log_sum_exp;        // or null
  int64_t log_sum_exp_strides[3];
};

// The arguments of the first step of a backward pass: see ShawGradients.
struct ShawBackwardArguments {
  ShawArguments forward;            // out and log_sum_exp are not used
  DeviceView out_gradient;          // g
  DeviceView log_sum_exp_gradient;  // e, f32, or null
  DeviceView q_gradient;            // f32, added to, or null
  float* far_rows[2];               // added to
  float* far_log_sum_exp[2];
  float* weights;          // written: w [batch][query_heads][query_tokens][bins]
  float* score_gradients;  // written: ds, of that shape
};

// Each launcher enqueues on the stream and returns null, or a text that says why it could not.
struct ShawKernels {
  const char* (*softmax_of_bins)(const ShawArguments& arguments, void* stream);
  const char* (*differentiate_bins)(const ShawBackwardArguments& arguments, void* stream);
};

}  // namespace tfb::shaw

#endif  // TFB_POSITIONAL_SHAW_SHAW_CUDA_H_
