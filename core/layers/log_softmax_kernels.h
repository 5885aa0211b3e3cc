// The kernel of log_softmax.h as C++ sees it: plain data and a launcher.
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

struct LogSoftmaxKernels {
  // Enqueues on the stream and returns null, or a text that says why it could not.
  const char* (*log_softmax)(const LogSoftmaxArguments& arguments, void* stream);
};

}  // namespace tfb

#endif  // TFB_CORE_LAYERS_LOG_SOFTMAX_KERNELS_H_
