// The CUDA kernels of linformer as C++ sees them. Pointers are to device memory.
#ifndef TFB_ATTENTION_LINFORMER_LINFORMER_CUDA_H_
#define TFB_ATTENTION_LINFORMER_LINFORMER_CUDA_H_

#include <stdint.h>

#include "core/cuda/device_view.h"
#include "core/cuda/kernel_table.h"

namespace tfb::linformer {

struct CompressionArguments {
  DeviceView x;             // [batch, heads, tokens, channels]
  const uint8_t* key_mask;  // [batch, tokens], or null
  int64_t key_mask_strides[2];
  const float* tables;  // products [tokens][slots], convolutions [window][channels][row], depthwise
                        // [window][row], or null
  int64_t batch_stride;  // stride of the tables, in floats
  int64_t head_stride;
  float* sums;  // [chunks][batch * heads][slots][row]; slots are those of chunk 0
  int64_t batch;
  int64_t heads;
  int64_t tokens;
  int64_t slot_count;
  int64_t window;        // tokens of a slot, unless it is a product
  int64_t chunk_tokens;  // tokens of a chunk of a product
  int64_t chunks;
  int64_t channels;
  int64_t row;
  bool is_max;  // max pooling; else the mean
};

// Each launcher enqueues on the stream and returns null, or a text that says why it could not.
struct LinformerKernels {
  const char* (*multiply)(const CompressionArguments& arguments, void* stream);
  const char* (*add_chunks)(const CompressionArguments& arguments, void* stream);
  const char* (*pool)(const CompressionArguments& arguments, void* stream);
  const char* (*convolve)(const CompressionArguments& arguments, void* stream);
  const char* (*convolve_depthwise)(const CompressionArguments& arguments, void* stream);
};

}  // namespace tfb::linformer

#endif  // TFB_ATTENTION_LINFORMER_LINFORMER_CUDA_H_
