// What tests of CUDA code share.
#ifndef TFB_CORE_CUDA_TESTING_H_
#define TFB_CORE_CUDA_TESTING_H_

#include <string>
#include <vector>

#include "core/cuda/runtime.h"
#include "core/problem.h"
#include "core/tensor.h"
#include "gtest/gtest.h"

namespace tfb {

// Why the device is not there; empty where it is.
std::string WhyNoDevice(Device device);

// A copy of a tensor in a device's memory; of the CPU, the tensor itself. Aborts where there is no
// memory.
class DeviceTensor {
 public:
  // `tensor` must outlive it.
  DeviceTensor(Device device, const Tensor& tensor);

  // The copy as a whole, and the same part of it as `part` is of the tensor.
  TensorView view() const { return On(tensor_->view()); }
  TensorView On(const ConstTensorView& part) const;
  // What it holds now, after everything that was enqueued.
  Tensor Read() const;

 private:
  Device device_;
  const Tensor* tensor_;
  DeviceBuffer buffer_;
};

// For INSTANTIATE_TEST_SUITE_P: "cpu", "cuda", "simulator".
inline std::string DeviceTestName(const ::testing::TestParamInfo<Device>& info) {
  return std::string(Name(info.param));
}

}  // namespace tfb

#endif  // TFB_CORE_CUDA_TESTING_H_
