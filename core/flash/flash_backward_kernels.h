// The kernels of engine flash's backward pass, as C++ launches them. Formulas: core/flash/flash_backward.h.
#ifndef TFB_CORE_FLASH_FLASH_BACKWARD_KERNELS_H_
#define TFB_CORE_FLASH_FLASH_BACKWARD_KERNELS_H_

#include <stdint.h>

#include "core/cuda/device_view.h"
#include "core/flash/flash_kernels.h"
#include "core/schedule/schedule_view.h"

namespace tfb {

// Three numbers of each row of the output [batch, query_heads, rows], f32 without strides. A row that has no gradients
// has the shift +inf.
struct RowNumbers {
  float* shift = nullptr;  // l, the log-sum-exp
  float* rest = nullptr;   // what rounding took from it
  float* delta = nullptr;  // D
  int64_t rows = 0;

  TFB_HOST_DEVICE int64_t Of(int64_t heads, int64_t b, int64_t h, int64_t row) const {
    return (b * heads + h) * rows + row;
  }
};

// Sums over the pairs of one offset: block d of a head, of blocks_of_head, has the pairs of query tile t and key tile
// t + d + 1 - query tiles, whose offsets j - i are 64 of them d - 63 + n, for 0 <= n < 127. An offset is in two blocks.
constexpr int kBlockOffsets = 128;

struct FlashBackwardArguments {
  FlashArguments
      forward;  // whose schedule has tiles of 64 queries; `out`, `log_sum_exp` and rests are not read
  TransposedView transposed;
  DeviceView out_gradient;
  RowNumbers numbers;

  // f32, added to; null: none. Rows of q's are those of the output.
  DeviceView q_gradient;
  DeviceView k_gradient;
  DeviceView v_gradient;
  bool keys_by_place;  // rows of k's and v's are places of the key order, not tokens

  // Sums of the terms of the score by the blocks of kernels, each written once by the block that owns it and all 0 at
  // first; null: none.
  float* content_bias;  // [batch][query_heads][key tiles][head_dim]
  float* labels;  // [batch][query_heads][query tiles][2][head_dim + 1]: vectors, and their number
  float* bias;    // [query_heads][blocks of offsets][kBlockOffsets]
  float* relu_multiplier;
  float* positions;      // of score gradients
  float* relative_keys;  // [query_heads][blocks of offsets][kBlockOffsets][head_dim]
  float* span;           // [batch][query_heads][query_tokens], added to

  TFB_HOST_DEVICE int64_t key_tiles() const { return (forward.kv_tokens + 63) / 64; }
  // The blocks of offsets of a head.
  TFB_HOST_DEVICE int64_t offset_blocks() const {
    return forward.query_tokens == 0 || forward.kv_tokens == 0
               ? 0
               : forward.schedule.query_tiles + key_tiles() - 1;
  }
  TFB_HOST_DEVICE int widest() const {
    return forward.head_dim > forward.value_dim ? forward.head_dim : forward.value_dim;
  }
  TFB_HOST_DEVICE bool has_offset_sums() const {
    return bias != nullptr || relu_multiplier != nullptr || positions != nullptr ||
           relative_keys != nullptr;
  }
};

// The rows of an output, of which RowNumbers are made.
struct FlashDeltaArguments {
  DeviceView out;       // [batch, query_heads, rows, value_dim]
  DeviceView out_rest;  // likewise: what rounding took from it, or null
  DeviceView out_gradient;
  Element factors;                  // the type to which products round out_gradient
  DeviceView log_sum_exp;           // f32 [batch, query_heads, rows]
  DeviceView rest;                  // likewise, or null
  DeviceView log_sum_exp_gradient;  // likewise, or null
  // u8 [batch, rows], or null: rows that count where they are 1, or where they are 0.
  const uint8_t* marks;
  int64_t marks_stride;  // of a batch row
  bool counts_marked;
  int64_t batch;
  int64_t heads;
  int value_dim;
  RowNumbers numbers;
};

// Each launcher enqueues on the stream and returns null, or a text that says why it could not.
struct FlashBackwardKernels {
  const char* (*delta)(const FlashDeltaArguments& arguments, void* stream);
  const char* (*queries)(const FlashBackwardArguments& arguments, void* stream);
  const char* (*keys)(const FlashBackwardArguments& arguments, void* stream);
  const char* (*offsets)(const FlashBackwardArguments& arguments, void* stream);
};

// The same of calls without a score rule, of at most kFlashBackwardDim16 channels, on tensor cores.
constexpr int kFlashBackwardDim16 = 128;
struct FlashBackwardBf16Kernels {
  const char* (*queries)(const FlashBackwardArguments& arguments, void* stream);
  const char* (*keys)(const FlashBackwardArguments& arguments, void* stream);
};
struct FlashBackwardF16Kernels {
  const char* (*queries)(const FlashBackwardArguments& arguments, void* stream);
  const char* (*keys)(const FlashBackwardArguments& arguments, void* stream);
};

}  // namespace tfb

#endif  // TFB_CORE_FLASH_FLASH_BACKWARD_KERNELS_H_
