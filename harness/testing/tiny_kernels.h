#ifndef TFB_HARNESS_TESTING_TINY_KERNELS_H_
#define TFB_HARNESS_TESTING_TINY_KERNELS_H_

#include <stdint.h>

#include "core/cuda/device_view.h"
#include "core/cuda/kernel_table.h"

namespace tfb {

// The faults of a kernel of the tiny technique.
enum class TinyKernelFault : unsigned char {
  kNone,
  kWritesBehindOutput,  // one element
  kReadsUnwritten,      // adds the workspace's unwritten contents to row 0
  kDependsOnOrder,      // sums weights by atomics, in an unspecified order
};

// Attention of the queries to the keys, as harness/testing/tiny_technique.h defines it.
struct TinyCall {
  DeviceView q, k, v, out;
  DeviceView log_sum_exp;         // with null data where it is not requested
  const unsigned char* key_mask;  // null where all keys are tokens
  int64_t mask_strides[2];
  const float* gain;  // by head
  float* scores;      // scratch of batch * heads * queries * (keys + 1)
  int64_t batch, heads, group, queries, keys, head_dim, value_dim;
  int64_t first_query;  // key position of query 0
  int64_t window;
  float score_factor;  // 1 where there is no fault
  bool causal;
  TinyKernelFault fault;
};

// Copies [batch, heads, tokens, channels].
struct TinyCopy {
  DeviceView from, to;
  int64_t batch, heads, tokens, channels;
};

// Each launcher enqueues on the stream, and returns null, or a text that says why it failed.
struct TinyKernels {
  const char* (*attend)(const TinyCall& call, void* stream);
  const char* (*copy)(const TinyCopy& copy, void* stream);
};

}  // namespace tfb

#endif  // TFB_HARNESS_TESTING_TINY_KERNELS_H_
