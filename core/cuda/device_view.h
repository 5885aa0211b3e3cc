// Tensor views as kernels take them: plain data, since nvcc sees no Abseil.
#ifndef TFB_CORE_CUDA_DEVICE_VIEW_H_
#define TFB_CORE_CUDA_DEVICE_VIEW_H_

#include <stdint.h>

namespace tfb {

// The floating-point dtypes of layers.
enum class Element : unsigned char { kF32, kBf16, kF16 };

// A view of up to four dimensions, with strides in elements. Null data mean that there is no
// tensor.
struct DeviceView {
  void* data;
  int64_t strides[4];
  Element element;
};

}  // namespace tfb

#endif  // TFB_CORE_CUDA_DEVICE_VIEW_H_
