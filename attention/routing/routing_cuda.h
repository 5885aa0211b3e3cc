// Memberships as marks [batch, heads, tokens, groups], on devices. Every pointer is to the device's
// memory.
#ifndef TFB_ATTENTION_ROUTING_ROUTING_CUDA_H_
#define TFB_ATTENTION_ROUTING_ROUTING_CUDA_H_

#include <stdint.h>

#include "core/cuda/kernel_table.h"

namespace tfb::routing {

// The arguments: groups first to first + clusters - 1 of the marks, for the heads from first_head
// on.
struct RoutingMarkArguments {
  uint8_t* marks;
  int64_t strides[4];
  int64_t first;
  int64_t first_head;
  float* scores;     // [batch][heads][clusters][stride]
  int32_t* members;  // [batch][heads][clusters][size], ascending
  int64_t batch;
  int64_t heads;  // heads that have clusters
  int64_t tokens;
  int64_t clusters;
  int64_t stride;
  int64_t size;
};

struct RoutingKernels {
  // Computes scores of 0 and 1 from marks.
  const char* (*from_marks)(const RoutingMarkArguments& arguments, void* stream);
  // Computes marks, for all heads, from members.
  const char* (*to_marks)(const RoutingMarkArguments& arguments, void* stream);
};

}  // namespace tfb::routing

#endif  // TFB_ATTENTION_ROUTING_ROUTING_CUDA_H_
