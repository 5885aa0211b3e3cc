// The CUDA kernel of adaptive_span as C++ sees it. Pointers are to device memory.
#ifndef TFB_ADAPTIVE_ADAPTIVE_SPAN_ADAPTIVE_SPAN_CUDA_H_
#define TFB_ADAPTIVE_ADAPTIVE_SPAN_ADAPTIVE_SPAN_CUDA_H_

#include <stdint.h>

#include "core/cuda/device_view.h"
#include "core/cuda/kernel_table.h"

namespace tfb::adaptive_span {

// Computes z of every token and head: max_span sigmoid(weight_h . x_i + bias_h).
struct GateArguments {
  DeviceView x;         // [batch, tokens, channels]
  const float* weight;  // [heads, channels]
  const float* bias;    // [heads]
  float* spans;         // [batch, heads, tokens]
  int64_t batch;
  int64_t tokens;
  int64_t channels;
  int64_t heads;
  float max_span;
};

struct AdaptiveSpanKernels {
  // Enqueues on the stream and returns null, or a text that says why it could not.
  const char* (*gate)(const GateArguments& arguments, void* stream);
};

}  // namespace tfb::adaptive_span

#endif  // TFB_ADAPTIVE_ADAPTIVE_SPAN_ADAPTIVE_SPAN_CUDA_H_
