// The kernel of list_rows.h as C++ sees it: plain data and a launcher. Pointers are to device memory.
#ifndef TFB_CORE_LAYERS_LIST_ROWS_KERNELS_H_
#define TFB_CORE_LAYERS_LIST_ROWS_KERNELS_H_

#include <stdint.h>

#include "core/cuda/kernel_table.h"

namespace tfb {

struct ListRowsArguments {
  const uint8_t* is_listed;  // [row_count], 1 or 0, aligned to 16 bytes
  int32_t* rows;             // [row_count]
  int32_t* begins;           // [row_count / tokens + 1]
  int64_t row_count;
  int64_t tokens;
};

struct ListRowsKernels {
  // Enqueues on the stream and returns null, or a text that says why it could not.
  const char* (*list_rows)(const ListRowsArguments& arguments, void* stream);
};

}  // namespace tfb

#endif  // TFB_CORE_LAYERS_LIST_ROWS_KERNELS_H_
