// The CUDA kernels of core/layers as C++ sees them: plain data and launchers. Every pointer is to
// device memory.
#ifndef TFB_CORE_LAYERS_LAYER_KERNELS_H_
#define TFB_CORE_LAYERS_LAYER_KERNELS_H_

#include <stdint.h>

#include "core/cuda/device_view.h"
#include "core/cuda/kernel_table.h"
#include "core/cuda/row_list.h"
#include "core/layers/activation.h"

namespace tfb {

// A hidden state as rows: row r is token r % tokens of batch row r / tokens. Strides are in
// elements.
struct DeviceRows {
  void* data;  // null where there is no tensor
  Element element;
  int64_t tokens;  // at least 1
  int64_t batch_stride;
  int64_t token_stride;
  int64_t channel_stride;
};

// y = activation(x W + b) + residual, as in MatMulCall; sums are in the order of the input
// channels.
struct MatMulArguments {
  DeviceRows x;          // [rows, in]
  const float* weights;  // W [in, out], rows `weight_stride` floats apart
  int64_t weight_stride;
  const float* bias;          // b [out], or null
  DeviceRows residual;        // [rows, out], or none
  DeviceRows y;               // [rows, out]; may be the residual
  DeviceRows pre_activation;  // receives x W + b; or none
  int64_t rows;
  int64_t in;
  int64_t out;
  Activation activation;
  RowList list;
};

// y = activation(scale x + b) + residual: a conversion, a sum, or the steps after a product that a
// library computed.
struct FinishArguments {
  DeviceRows x;  // [rows, channels]
  float scale;
  const float* bias;          // [channels], or null
  DeviceRows residual;        // or none
  DeviceRows y;               // may be x, or the residual
  DeviceRows pre_activation;  // receives scale x + b; or none, or x
  int64_t rows;
  int64_t channels;
  Activation activation;
};

// Each launcher enqueues on the stream and returns null, or a text that says why it could not.
struct LayerKernels {
  const char* (*multiply)(const MatMulArguments& arguments, void* stream);
  const char* (*finish)(const FinishArguments& arguments, void* stream);
};

}  // namespace tfb

#endif  // TFB_CORE_LAYERS_LAYER_KERNELS_H_
