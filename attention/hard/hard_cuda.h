// The CUDA kernels of hard attention as C++ sees them. Pointers are to device memory.
#ifndef TFB_ATTENTION_HARD_HARD_CUDA_H_
#define TFB_ATTENTION_HARD_HARD_CUDA_H_

#include <stdint.h>

#include "core/cuda/device_view.h"
#include "core/cuda/kernel_table.h"

namespace tfb::hard {

enum class HardSample : unsigned char { kNone, kInverseCdf, kGumbel };

struct HardArguments {
  DeviceView q;
  DeviceView k;
  DeviceView v;
  DeviceView out;
  DeviceView noise;         // u [batch, heads, queries] or g [batch, heads, queries, keys]
  const uint8_t* key_mask;  // or null
  int64_t key_mask_strides[2];
  int32_t* index;  // or null
  int64_t index_strides[3];
  int64_t batch;
  int64_t query_heads;
  int64_t group;  // query heads that share a key-value head
  int64_t query_tokens;
  int64_t kv_tokens;
  int head_dim;
  int value_dim;
  bool causal;
  HardSample sample;
  float scale;  // factor of the queries
};

struct HardKernels {
  // Enqueues on the stream and returns null, or a text that says why it could not.
  const char* (*choose)(const HardArguments& arguments, void* stream);
};

}  // namespace tfb::hard

#endif  // TFB_ATTENTION_HARD_HARD_CUDA_H_
