// The CUDA kernels of compressive as C++ sees them. Pointers are to device memory. row_operations.h
// says what the kernels compute.
#ifndef TFB_MEMORY_COMPRESSIVE_COMPRESSIVE_CUDA_H_
#define TFB_MEMORY_COMPRESSIVE_COMPRESSIVE_CUDA_H_

#include <stdint.h>

#include "core/cuda/device_view.h"
#include "core/cuda/kernel_table.h"

namespace tfb::compressive {

struct MergePartsArguments {
  DeviceView out;      // [batch, heads, tokens, channels]; receives the result
  DeviceView other;    // likewise
  float* log_sum_exp;  // [batch][heads][tokens]; receives the result
  const float* other_log_sum_exp;
  int64_t batch;
  int64_t heads;
  int64_t tokens;
  int64_t channels;
};

struct ReceivedArguments {
  DeviceView q;                  // [batch, heads, tokens, head_dim]
  DeviceView k;                  // [batch, heads, keys, head_dim]
  const float* log_sum_exp;      // [batch][heads][tokens]
  const float* distances;        // [distance_rows][heads][head_dim]
  const float* distance_biases;  // [distance_rows][heads]
  const float* u;                // [heads][head_dim]
  float* use;                    // [batch][places]; key n is at (first + n) % places
  int64_t batch;
  int64_t heads;
  int64_t tokens;
  int64_t keys;
  int64_t head_dim;
  int64_t distance_rows;
  int64_t first_distance;  // distance from key 0 to query 0
  int64_t first;
  int64_t places;
  float scale;
};

struct SelectRowsArguments {
  const float* use;  // [batch][places]
  int64_t first;
  int64_t places;
  int64_t batch;
  int64_t rows;
  int64_t count;
  int32_t* flags;     // [batch][rows], scratch
  int32_t* selected;  // [batch][count]
  int32_t* kept;      // or null
  int64_t kept_batch_stride;
  int64_t kept_stride;
  int64_t kept_size;
};

struct LossOfDifferenceArguments {
  DeviceView a;   // [batch, rows, channels]
  DeviceView b;   // [batch, ceil(rows / repeat), channels]
  DeviceView to;  // [batch]
  int64_t batch;
  int64_t rows;
  int64_t channels;
  int64_t repeat;
  bool mean_square;
};

// Each launcher enqueues on the stream and returns null, or a text that says why it could not.
struct CompressiveKernels {
  const char* (*merge_parts)(const MergePartsArguments& arguments, void* stream);
  const char* (*received)(const ReceivedArguments& arguments, void* stream);
  const char* (*select_rows)(const SelectRowsArguments& arguments, void* stream);
  const char* (*loss_of_difference)(const LossOfDifferenceArguments& arguments, void* stream);
};

}  // namespace tfb::compressive

#endif  // TFB_MEMORY_COMPRESSIVE_COMPRESSIVE_CUDA_H_
