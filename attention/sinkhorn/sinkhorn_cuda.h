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
  double* hidden;    // written: the units [batch][heads][blocks][hidden], or null
  double* results;   // written: the last layer's, of the shape of the logits, or null
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

// The arguments of a backward pass through S. Arrays of doubles are [batch][heads][blocks][columns].
struct SortGradientArguments {
  struct Mixed {
    DeviceView rows;  // [batch, heads, tokens, channels]
    int64_t channels;
    const double* null_rows;  // [heads][channels], where there is a null block
    DeviceView sorted;        // f32 [batch, heads, mixed_blocks block, channels]: the gradient
  };
  SinkhornSizes sizes;
  SinkhornMask key_mask;
  Mixed mixed[2];  // keys and values
  double* matrix;  // written: dS, 0 outside of the support; then the gradient of R + g
  double* logits;  // as they are before the balance, and scratch then
  double* rows;    // scratch
  double* stored;  // scratch [batch][heads][stored_matrices][blocks][columns]
  int64_t stored_matrices;
  int64_t stride;  // iterations from one stored matrix to the next
};

// Each launcher enqueues on the stream and returns null, or a text that says why it could not.
struct SinkhornKernels {
  const char* (*score)(const SortArguments& arguments, void* stream);
  const char* (*balance)(const SortArguments& arguments, void* stream);
  const char* (*mix)(const MixArguments& arguments, void* stream);
  const char* (*gradient_of_matrix)(const SortGradientArguments& arguments, void* stream);
  const char* (*through_balance)(const SortGradientArguments& arguments, void* stream);
};

}  // namespace tfb::sinkhorn

#endif  // TFB_ATTENTION_SINKHORN_SINKHORN_CUDA_H_
