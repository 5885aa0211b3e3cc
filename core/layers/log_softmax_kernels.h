// The kernels of log_softmax.h as C++ sees them: plain data and launchers.
#ifndef TFB_CORE_LAYERS_LOG_SOFTMAX_KERNELS_H_
#define TFB_CORE_LAYERS_LOG_SOFTMAX_KERNELS_H_

#include <stdint.h>

#include "core/layers/layer_kernels.h"

namespace tfb {

struct LogSoftmaxArguments {
  DeviceRows x;  // [rows, channels]
  DeviceRows y;  // may be x
  int64_t rows;
  int64_t channels;
};

struct LogSoftmaxGradientArguments {
  DeviceRows x;  // [rows, channels], as the others
  DeviceRows dy;
  DeviceRows dx;  // may be dy
  int64_t rows;
  int64_t channels;
};

// Each launcher enqueues on the stream and returns null, or a text that says why it could not.
struct LogSoftmaxKernels {
  const char* (*log_softmax)(const LogSoftmaxArguments& arguments, void* stream);
  const char* (*differentiate)(const LogSoftmaxGradientArguments& arguments, void* stream);
};

}  // namespace tfb

#endif  // TFB_CORE_LAYERS_LOG_SOFTMAX_KERNELS_H_
