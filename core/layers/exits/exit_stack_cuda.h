// The CUDA kernel of exit_stack as C++ sees it. Pointers are to device memory.
#ifndef TFB_CORE_LAYERS_EXITS_EXIT_STACK_CUDA_H_
#define TFB_CORE_LAYERS_EXITS_EXIT_STACK_CUDA_H_

#include <stdint.h>

#include "core/cuda/kernel_table.h"
#include "core/cuda/row_list.h"
#include "core/layers/layer_kernels.h"

namespace tfb::layers {

// Exits, i32 [batch, tokens], or null.
struct DeviceExits {
  int32_t* data;
  int64_t batch_stride;
  int64_t token_stride;
};

// The step after layer n: rows that are there take their new state, and some of them leave.
struct LeaveArguments {
  const float* after;       // [rows, channels]: h^n
  const float* normalized;  // [rows, channels]: LN_n of it
  float* state;             // [rows, channels]
  DeviceRows out;
  DeviceExits given;      // replaces `leaves`
  const uint8_t* leaves;  // [rows]; null, where no exits are given: all leave
  uint8_t* stays;         // [rows] 1 for rows that stay, 0 for those that leave
  DeviceExits exits;      // outputs
  DeviceExits recorded;
  int64_t recorded_tokens;  // tokens of the segment that exits are recorded for
  int64_t rows;
  int64_t tokens;
  int64_t channels;
  int64_t layer;
  int64_t layers;
  RowList list;  // the rows that are there
};

struct ExitStackKernels {
  // Enqueues on the stream and returns null, or a text that says why it could not.
  const char* (*leave)(const LeaveArguments& arguments, void* stream);
};

}  // namespace tfb::layers

#endif  // TFB_CORE_LAYERS_EXITS_EXIT_STACK_CUDA_H_
