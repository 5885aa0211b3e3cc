// The CUDA kernels of memorizing as C++ sees them. Pointers are to device memory.
#ifndef TFB_MEMORY_MEMORIZING_MEMORIZING_CUDA_H_
#define TFB_MEMORY_MEMORIZING_MEMORIZING_CUDA_H_

#include <stdint.h>

#include "core/cuda/device_view.h"
#include "core/cuda/kernel_table.h"

namespace tfb::memorizing {

constexpr double kLeastNorm = 1e-12;  // the least norm that divides

// The length that rows get: unchanged, unit length, or the length of their head's scale.
enum class RowLength : unsigned char { kKept, kUnit, kScale };

// Token n goes to place (first_place + n) % places.
struct CopyRowsArguments {
  DeviceView from;  // [batch, heads, tokens, channels]
  DeviceView to;    // [batch * heads, places, channels]
  int64_t batch;
  int64_t heads;
  int64_t tokens;
  int64_t channels;
  int64_t first_place;
  int64_t places;
  RowLength length;
  const float* scales;  // [heads]
};

// out = g o + (1 - g) out, where o is the softmax of the scores over the values in the slots that
// were found, best first, or, where slots is null, `mean`; and over the null slot, where there is
// one. g is sigmoid(gate), or of the difference of the log-sum-exps of these scores and of the
// layer's own. out is unchanged where nothing was read.
struct MixArguments {
  // [batch][heads][tokens][channels], of unit length, or, where slots is null, of their scales.
  const float* queries;
  const int32_t* slots;  // [batch][heads][tokens][k]; -1 behind the last
  const float* scores;
  const float* mean;              // [batch][heads][tokens][channels]: the mean over all entries
  const float* mean_log_sum_exp;  // [batch][heads][tokens], or null where it is not used
  const float* null_keys;         // [heads / group][channels], of unit length, or null
  const float* null_values;
  DeviceView own_log_sum_exp;  // [batch, heads, tokens]; null data: gates
  int64_t entries;
  int64_t group;      // heads that share a row of values
  DeviceView values;  // [batch * heads / group, places, channels]
  DeviceView out;     // [batch, heads, tokens, channels]
  const float* gates;
  const float* scales;
  int64_t* retrieved;  // null, or with its strides [batch, heads, tokens, k]: the slots' tokens,
                       // ascending, and -1 behind the last
  int64_t retrieved_strides[4];
  int64_t first_token;  // token of slot `oldest`
  int64_t oldest;
  int64_t places;
  int64_t batch;
  int64_t heads;
  int64_t tokens;
  int64_t k;
  int64_t channels;  // 256 at most
};

// Each launcher enqueues on the stream and returns null, or a text that says why it could not.
struct MemorizingKernels {
  const char* (*copy_rows)(const CopyRowsArguments& arguments, void* stream);
  const char* (*mix)(const MixArguments& arguments, void* stream);
};

}  // namespace tfb::memorizing

#endif  // TFB_MEMORY_MEMORIZING_MEMORIZING_CUDA_H_
