// The CUDA kernel of reversible as C++ sees it. Pointers are to device memory.
#ifndef TFB_MEMORY_REVERSIBLE_REVERSIBLE_CUDA_H_
#define TFB_MEMORY_REVERSIBLE_REVERSIBLE_CUDA_H_

#include <stdint.h>

#include "core/cuda/device_view.h"
#include "core/cuda/kernel_table.h"

namespace tfb::reversible {

// y = a x + b z. Views are [batch, tokens, channels].
struct CombineArguments {
  float a;
  DeviceView x;
  float b;
  DeviceView z;
  DeviceView y;  // may be x or z
  int64_t batch;
  int64_t tokens;
  int64_t channels;
};

struct ReversibleKernels {
  // Enqueues on the stream and returns null, or a text that says why it could not.
  const char* (*combine)(const CombineArguments& arguments, void* stream);
};

}  // namespace tfb::reversible

#endif  // TFB_MEMORY_REVERSIBLE_REVERSIBLE_CUDA_H_
