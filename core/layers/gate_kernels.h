// The passes of gates over rows, as kernels and C++ see them: plain data and launchers. See gate.h.
#ifndef TFB_CORE_LAYERS_GATE_KERNELS_H_
#define TFB_CORE_LAYERS_GATE_KERNELS_H_

#include <stdint.h>

#include "core/layers/layer_kernels.h"

namespace tfb {

// A function of sums a and b, channel by channel; s is the logistic function.
enum class GateStep : unsigned char {
  kReset,        // s(a) x
  kInput,        // s(a) x + y
  kOutput,       // x + s(a) y
  kHighway,      // s(a) x + (1 - s(a)) y
  kSigmoidTanh,  // x + s(a) tanh(b)
  kGru,          // (1 - s(a)) x + s(a) tanh(b)
};

struct GateArguments {
  DeviceRows a;  // [rows, channels], as all others
  DeviceRows b;  // empty where the step does not use it
  DeviceRows x;
  DeviceRows y;    // likewise
  DeviceRows out;  // may be any of the others
  int64_t rows;
  int64_t channels;
  GateStep step;
};

struct GateKernels {
  // Enqueues on the stream and returns null, or a text that says why it could not.
  const char* (*pass)(const GateArguments& arguments, void* stream);
};

}  // namespace tfb

#endif  // TFB_CORE_LAYERS_GATE_KERNELS_H_
