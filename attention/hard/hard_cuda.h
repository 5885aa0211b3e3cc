// The CUDA kernels of hard attention as C++ sees them. Pointers are to device memory.
#ifndef TFB_ATTENTION_HARD_HARD_CUDA_H_
#define TFB_ATTENTION_HARD_HARD_CUDA_H_

#include <stdint.h>

#include "core/cuda/device_view.h"
#include "core/cuda/functor.h"
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
  int32_t* kept_index;  // [batch][query_heads][query_tokens], or null
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

// The arguments of a backward pass: see HardBackwardCall. `out`, `noise` and `index` of the forward
// pass are not used.
struct HardBackwardArguments {
  HardArguments forward;
  const int32_t* index;     // [batch][query_heads][query_tokens]
  DeviceView baseline;      // f32, or null
  DeviceView out_gradient;  // or null
  DeviceView q_gradient;    // written by the kernel of that name
  DeviceView k_gradient;
  DeviceView v_gradient;
  // By query, in the order of the index: w_i, and the maximum and the sum of its scores' weights. A
  // query that sees no key has the weight 0.
  float* weight;
  float* max;
  float* sum;

  TFB_HOST_DEVICE int64_t RowOf(int64_t b, int64_t h, int64_t i) const {
    return (b * forward.query_heads + h) * forward.query_tokens + i;
  }
};

// Each launcher enqueues on the stream and returns null, or a text that says why it could not.
struct HardBackwardKernels {
  const char* (*sum_rows)(const HardBackwardArguments& arguments, void* stream);
  // Use the sums of rows.
  const char* (*query_gradients)(const HardBackwardArguments& arguments, void* stream);
  const char* (*key_gradients)(const HardBackwardArguments& arguments, void* stream);
  const char* (*value_gradients)(const HardBackwardArguments& arguments, void* stream);
};

}  // namespace tfb::hard

#endif  // TFB_ATTENTION_HARD_HARD_CUDA_H_
