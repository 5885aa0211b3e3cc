// Tests of layers on every device share these helpers.
#ifndef TFB_CORE_LAYERS_DEVICE_TESTING_H_
#define TFB_CORE_LAYERS_DEVICE_TESTING_H_

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>

#include "absl/types/span.h"
#include "core/cuda/mirror.h"
#include "core/cuda/runtime.h"
#include "core/problem.h"
#include "core/technique.h"
#include "core/tensor.h"
#include "core/tested_devices.h"
#include "core/thread_pool.h"
#include "gtest/gtest.h"

namespace tfb {

// Threads, and a workspace and memory to keep of exactly these bytes on a device. In host memory both
// are filled with NaN and lie between two guards. The simulator checks bounds and unwritten reads itself.
class Machine {
 public:
  Machine(Device device, int threads, size_t bytes, size_t kept_bytes = 0)
      : pool_(threads), workspace_(device, bytes), kept_(device, kept_bytes) {
    execution_.pool = &pool_;
    execution_.workspace = workspace_.span();
    execution_.kept = kept_.span();
  }
  const Execution& execution() const { return execution_; }
  Execution WithoutKept() const {
    Execution execution = execution_;
    execution.kept = {};
    return execution;
  }
  bool guards_intact() const { return workspace_.guards_intact() && kept_.guards_intact(); }

 private:
  class Memory {
   public:
    Memory(Device device, size_t bytes)
        : bytes_(bytes),
          on_host_(DType::kF32, {static_cast<int64_t>(bytes / sizeof(float)) + 2 * kGuardFloats}) {
      Fill(on_host_.view(), std::numeric_limits<double>::quiet_NaN());
      if (device == Device::kCpu || bytes == 0) return;
      on_device_ = CudaRuntime::For(device).value()->Allocate(bytes).value();
    }
    absl::Span<std::byte> span() {
      std::byte* const begin = on_device_.As<std::byte>() != nullptr
                                   ? on_device_.As<std::byte>()
                                   : static_cast<std::byte*>(on_host_.raw()) + kGuardFloats * 4;
      return absl::MakeSpan(begin, bytes_);
    }
    bool guards_intact() const {
      const absl::Span<const float> floats = on_host_.span<float>();
      for (int64_t i = 0; i < kGuardFloats; ++i) {
        if (!std::isnan(floats[i]) || !std::isnan(floats[floats.size() - 1 - i])) return false;
      }
      return true;
    }

   private:
    static constexpr int64_t kGuardFloats = 16;
    size_t bytes_;
    Tensor on_host_;
    DeviceBuffer on_device_;
  };

  ThreadPool pool_;
  Memory workspace_;
  Memory kept_;
  Execution execution_;
};

// Copies of host tensors on a device; on the CPU the tensors themselves.
class Placed {
 public:
  explicit Placed(Device device) : device_(device) {
    if (device != Device::kCpu) mirror_.emplace(CudaRuntime::For(device).value());
  }
  ConstTensorView In(const ConstTensorView& view) {
    return mirror_.has_value() ? mirror_->Copy(view).value() : view;
  }
  // Returns the copy of a tensor that is written.
  TensorView Out(const TensorView& view) {
    return mirror_.has_value() ? mirror_->CopyForWriting(view).value() : view;
  }
  // Copies the written tensors to the host, and frees all copies.
  void Back() {
    if (!mirror_.has_value()) return;
    EXPECT_EQ(mirror_->CopyBack(), absl::OkStatus());
    mirror_.emplace(CudaRuntime::For(device_).value());
  }

 private:
  Device device_;
  std::optional<DeviceMirror> mirror_;  // none on the CPU
};

// Runs every test on every device that is present.
class OnEveryDevice : public ::testing::TestWithParam<Device> {
 protected:
  Device device() const { return GetParam(); }
  ConstTensorView In(const ConstTensorView& view) { return placed_.In(view); }
  TensorView Out(const TensorView& view) { return placed_.Out(view); }
  void Back() { placed_.Back(); }

 private:
  Placed placed_{GetParam()};
};

// Names the instances: INSTANTIATE_TEST_SUITE_P(, GateOn, ::testing::ValuesIn(TestedDevices()), DeviceName).
inline std::string DeviceName(const ::testing::TestParamInfo<Device>& info) {
  return std::string(Name(info.param));
}

}  // namespace tfb

#endif  // TFB_CORE_LAYERS_DEVICE_TESTING_H_
