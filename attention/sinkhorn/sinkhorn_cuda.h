// The CUDA kernels of sparse Sinkhorn attention as C++ sees them. Pointers are to device memory.
#ifndef TFB_ATTENTION_SINKHORN_SINKHORN_CUDA_H_
#define TFB_ATTENTION_SINKHORN_SINKHORN_CUDA_H_

#include <stdint.h>

#include "attention/sinkhorn/sinkhorn_functors.h"
#include "attention/sinkhorn/sinkhorn_sizes.h"
#include "core/cuda/device_view.h"
#include "core/cuda/kernel_table.h"

namespace tfb::sinkhorn {

// The members of SortCall of sinkhorn_cpu.h.
struct SortArguments {
  SinkhornSizes sizes;
  SortNetwork network;
  DeviceView pooled_rows[2];  // null data: none
  int64_t channels[2];
  int64_t heads_summed[2];
  SinkhornMask key_mask;
  DeviceView given;  // f32 scores; null data: those of the network
  DeviceView noise;  // null data: none
  double* pooled;    // scratch [batch][heads][blocks][width]
  double* logits;    // scratch [batch][heads][blocks][columns]
  SortMatrix sort;   // contiguous
};

// The arguments of MixCpu.
struct MixArguments {
  SinkhornSizes sizes;
  SortMatrix sort;  // contiguous
  DeviceView from;  // [batch, heads, tokens, channels]
  DeviceView to;    // [batch, heads, mixed_blocks block, channels]
  int64_t channels;
  const double* null_rows;  // [heads][channels], where there is a null block
  SinkhornMask key_mask;
};

// Each launcher enqueues on the stream and returns null, or a text that says why it could not.
struct SinkhornKernels {
  const char* (*sort)(const SortArguments& arguments, void* stream);
  const char* (*mix)(const MixArguments& arguments, void* stream);
};

}  // namespace tfb::sinkhorn

#endif  // TFB_ATTENTION_SINKHORN_SINKHORN_CUDA_H_
