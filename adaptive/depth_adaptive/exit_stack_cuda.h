// The CUDA kernel of exit_stack as C++ sees it. Pointers are to device memory.
#ifndef TFB_ADAPTIVE_DEPTH_ADAPTIVE_EXIT_STACK_CUDA_H_
#define TFB_ADAPTIVE_DEPTH_ADAPTIVE_EXIT_STACK_CUDA_H_

#include <stdint.h>

#include "core/cuda/kernel_table.h"
#include "core/cuda/row_list.h"
#include "core/layers/layer_kernels.h"

namespace tfb {

// i32 [batch, tokens]; null: none.
struct DeviceExits {
  int32_t* data;
  int64_t batch_stride;
  int64_t token_stride;
};

// After layer n: rows that are there take their new state, and some of them leave.
struct LeaveArguments {
  const float* after;       // [rows, channels]: h^n
  const float* normalized;  // [rows, channels]: LN_n of it
  float* state;             // [rows, channels]
  DeviceRows out;
  DeviceExits given;      // in the place of `leaves`
  const uint8_t* leaves;  // [rows]; null, where none is given: all leave
  uint8_t* stays;         // [rows] 1 of rows that stay, 0 of those that leave
  DeviceExits exits;      // outputs
  DeviceExits recorded;
  int64_t recorded_tokens;  // of each batch row, of the segment
  int64_t rows;
  int64_t tokens;
  int64_t channels;
  int64_t layer;
  int64_t layers;
  RowList list;  // rows that are there
};

struct ExitStackKernels {
  // Enqueues on the stream and returns null, or why not.
  const char* (*leave)(const LeaveArguments& arguments, void* stream);
};

}  // namespace tfb

#endif  // TFB_ADAPTIVE_DEPTH_ADAPTIVE_EXIT_STACK_CUDA_H_
