// The run of the tiny technique, for its layer and for techniques that need attention on a device.
#ifndef TFB_HARNESS_TESTING_TINY_ATTENTION_H_
#define TFB_HARNESS_TESTING_TINY_ATTENTION_H_

#include "absl/status/status.h"
#include "core/technique.h"
#include "harness/testing/tiny_functors.h"

namespace tfb {

// The sizes and masks of attention of q to k, without a fault or a window. Gains are the caller's.
TinyCall MakeTinyCall(const ConstTensorView& q, const ConstTensorView& k, const ConstTensorView& v,
                      const ConstTensorView& key_mask, bool causal);

struct TinyTensors {
  DeviceView q, k, v, out;
  DeviceView log_sum_exp;            // with null data where it is not requested
  float* weights = nullptr;          // scratch [rows, keys]
  float* factors = nullptr;          // scratch [rows]
  float* kept = nullptr;             // [rows], the same as log_sum_exp, or null
  unsigned char* overrun = nullptr;  // a byte that is not the layer's, for a fault
  const float* unwritten = nullptr;  // a number of the workspace that nobody writes, for a fault
  bool changed = false;              // whether another output is written
};

// Enqueues, or runs, the steps.
absl::Status RunTinyAttention(Device device, const TinyCall& call, const TinyTensors& tensors,
                              const Execution& execution);

}  // namespace tfb

#endif  // TFB_HARNESS_TESTING_TINY_ATTENTION_H_
