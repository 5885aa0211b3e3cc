// The CUDA kernels of engine gather as C++ sees them: plain data and launchers. Every pointer
// points to device memory; gather.h says what the kernels compute.
#ifndef TFB_CORE_GATHER_GATHER_KERNELS_H_
#define TFB_CORE_GATHER_GATHER_KERNELS_H_

#include <stdint.h>

#include "core/cuda/device_view.h"
#include "core/cuda/kernel_table.h"

namespace tfb {

struct NormalizeArguments {
  DeviceView x;  // [batch, heads, tokens, channels]
  DeviceView y;
  int64_t batch;
  int64_t heads;
  int64_t tokens;
  int channels;
  bool centered;
  bool mean_square;
  double epsilon;
};

// The gradient of a normalised row's argument is added to.
struct NormalizeGradientArguments {
  NormalizeArguments forward;  // whose y is the gradient of the normalised rows, f32
  DeviceView x_gradient;       // f32
};

struct HashArguments {
  DeviceView x;            // [batch, heads, tokens, head_dim]
  const float* rotations;  // [1 or heads][rounds * columns][head_dim]
  int64_t head_stride;     // floats from a head's rotations to the next; 0: one for all heads
  const int32_t* factors;  // the columns of each factor
  int32_t* buckets;        // [batch][heads][rounds][tokens]
  int64_t batch;
  int64_t heads;
  int64_t tokens;
  int64_t rounds;
  int columns;  // of a round
  int factor_count;
  int head_dim;
};

struct SortArguments {
  const int32_t* keys;  // [rows][tokens]
  int32_t* counts;      // [rows][key_count], scratch
  int32_t* order;
  int32_t* places;  // or null
  int64_t rows;
  int64_t tokens;
  int64_t key_count;
  int64_t order_stride;
};

struct LargestArguments {
  const float* scores;  // [rows][stride]
  int32_t* members;     // [rows][count]
  int64_t rows;
  int64_t tokens;
  int64_t stride;
  int64_t count;
};

struct VectorScoreArguments {
  DeviceView x;             // [batch, heads, tokens, head_dim]
  const float* vectors;     // [heads][count][head_dim]
  const uint8_t* key_mask;  // [batch, tokens], or null
  int64_t key_mask_strides[2];
  float* scores;  // [batch][heads][count][stride]
  int64_t batch;
  int64_t heads;
  int64_t tokens;
  int64_t count;
  int64_t stride;
  int head_dim;
};

struct GroupMeanArguments {
  const int32_t* members;  // [batch][heads][groups][size]
  DeviceView rows;         // [batch, heads, groups * size, channels]
  DeviceView out;          // [batch, heads, tokens, channels]
  int64_t batch;
  int64_t heads;
  int64_t tokens;
  int64_t groups;
  int64_t size;
  int channels;
};

struct GroupGradientArguments {
  GroupMeanArguments
      forward;  // whose rows are their gradients, f32, added to, and out is its gradient
};

// Each launcher enqueues on the stream and returns null, or a text that says why it could not.
struct GatherKernels {
  const char* (*normalize)(const NormalizeArguments& arguments, void* stream);
  const char* (*hash)(const HashArguments& arguments, void* stream);
  const char* (*score)(const VectorScoreArguments& arguments, void* stream);
  const char* (*sort)(const SortArguments& arguments, void* stream);
  const char* (*largest)(const LargestArguments& arguments, void* stream);
  const char* (*group_mean)(const GroupMeanArguments& arguments, void* stream);
  const char* (*normalize_gradient)(const NormalizeGradientArguments& arguments, void* stream);
  const char* (*group_gradient)(const GroupGradientArguments& arguments, void* stream);
};

}  // namespace tfb

#endif  // TFB_CORE_GATHER_GATHER_KERNELS_H_
