// The kernel of copy_rows.h as C++ sees it. Pointers are to device memory.
#ifndef TFB_CORE_LAYERS_COPY_ROWS_KERNELS_H_
#define TFB_CORE_LAYERS_COPY_ROWS_KERNELS_H_

#include <stdint.h>

#include "core/cuda/device_view.h"
#include "core/cuda/kernel_table.h"

namespace tfb {

// A list of rows in a ring [batch, places, channels]: row n is at place (first + n) % places.
struct DeviceRowList {
  DeviceView view;
  int64_t first;
  int64_t places;
};

struct CopyRowsArguments {
  DeviceRowList from;
  DeviceRowList to;
  int64_t batch;
  int64_t rows;
  int64_t channels;
  const int32_t* selected;  // [batch][rows], or null
  int64_t dilated_block;    // or 0
};

struct CopyRowsKernels {
  // Enqueues on the stream and returns null, or a text that says why it could not.
  const char* (*copy_rows)(const CopyRowsArguments& arguments, void* stream);
};

}  // namespace tfb

#endif  // TFB_CORE_LAYERS_COPY_ROWS_KERNELS_H_
