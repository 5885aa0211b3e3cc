// The CUDA kernel of core/retrieval as C++ sees it. Pointers are to device memory.
#ifndef TFB_CORE_RETRIEVAL_RETRIEVAL_KERNELS_H_
#define TFB_CORE_RETRIEVAL_RETRIEVAL_KERNELS_H_

#include <stdint.h>

#include "core/cuda/kernel_table.h"

namespace tfb {

// Arrays are [batch, tokens, k]; strides are in elements.
struct CopyNeighboursArguments {
  const int32_t* from;
  int64_t from_strides[3];
  int32_t* to;
  int64_t to_strides[3];
  int64_t sizes[3];
  int64_t entries;  // numbers that name no entry become -1
};

struct RetrievalKernels {
  // Enqueues on the stream and returns null, or a text that says why it could not.
  const char* (*copy_neighbours)(const CopyNeighboursArguments& arguments, void* stream);
};

}  // namespace tfb

#endif  // TFB_CORE_RETRIEVAL_RETRIEVAL_KERNELS_H_
