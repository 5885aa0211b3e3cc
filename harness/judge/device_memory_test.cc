#include "harness/judge/device_memory.h"

#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "core/random.h"
#include "core/tested_devices.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "harness/judge/guarded.h"
#include "harness/testing/tiny_functors.h"

namespace tfb {
namespace {

using ::testing::HasSubstr;

// Copies f32 [1, 1, tokens, channels] by a kernel.
absl::Status CopyByKernel(const ConstTensorView& from, const TensorView& to) {
  const TinyCopy copy = {ToDeviceView(from), ToDeviceView(to), /*heads=*/1, from.dim(2)};
  return ToStatus(KernelsOn<ForEachKernel<TinyCopy>>(RuntimeOf(KernelDevice()).value()->target())
                      .run(copy, from.dim(2), from.dim(3), nullptr));
}

Tensor Drawn(const Shape& shape) {
  Tensor tensor(DType::kF32, shape);
  FillNormal(&tensor, 1, "drawn");
  return tensor;
}

TEST(DeviceMemory, RuntimesAreOfDevicesAndNoneOfTheCpu) {
  EXPECT_EQ(RuntimeOf(Device::kCpu).value(), nullptr);
  EXPECT_EQ(RuntimeOf(KernelDevice()).value()->device(), KernelDevice());
  EXPECT_TRUE(Synchronize(nullptr).ok());
}

TEST(DeviceMemory, MemoryThatIsNotThereIsAStatus) {
  for (const Device device : TestedDevices()) {
    const auto memory = DeviceMemory::Allocate(device, size_t{1} << 60);
    EXPECT_EQ(memory.status().code(), absl::StatusCode::kResourceExhausted) << memory.status();
  }
  EXPECT_EQ(DeviceMemory::Allocate(KernelDevice(), 0)->bytes().size(), 0u);
}

TEST(DeviceTensors, OfTheCpuAreTheHostsOwnAndOfADeviceCopies) {
  NamedTensors host;
  host["a"] = Drawn({2, 3, 5, 7});
  const ConstTensorView whole = std::as_const(host).at("a").view();
  const ConstTensorView strided = Slice(Transpose(whole, 1, 2), 3, 1, 4);
  const auto on_cpu = DeviceTensors::Of(Device::kCpu, {{"a", strided}});
  ASSERT_TRUE(on_cpu.ok());
  EXPECT_EQ(on_cpu->inputs().Get("a").data, strided.data);
  const auto simulated = DeviceTensors::Of(KernelDevice(), {{"a", strided}});
  ASSERT_TRUE(simulated.ok());
  EXPECT_NE(simulated->inputs().Get("a").data, strided.data);
  for (const auto* tensors : {&*on_cpu, &*simulated}) {
    const auto copies = tensors->Download();
    ASSERT_TRUE(copies.ok()) << copies.status();
    const Tensor& copy = copies->at("a");
    ASSERT_EQ(copy.shape(), strided.shape());
    ForEachOffset(copy.view(), strided,
                  [&](int64_t a, int64_t b) { EXPECT_EQ(copy.view().Get(a), strided.Get(b)); });
  }
}

TEST(DeviceTensors, OfSpecsHaveTheOptionalOnesOnRequest) {
  const std::vector<TensorSpec> specs = {{"out", {1, 1, 4, 8}, DType::kF32, false},
                                         {"more", {3}, DType::kBF16, true}};
  for (const Device device : TestedDevices()) {
    EXPECT_EQ(DeviceTensors::Allocate(device, specs, false)->outputs().size(), 1u);
    const auto both = DeviceTensors::Allocate(device, specs, true);
    ASSERT_TRUE(both.ok());
    EXPECT_EQ(both->outputs().Get("more").dtype, DType::kBF16);
    EXPECT_EQ(both->outputs().Get("out").shape(), Shape({1, 1, 4, 8}));
  }
}

TEST(DeviceTwin, OfTheCpuIsTheMemoryItself) {
  auto memory = GuardedMemory::Allocate(100);
  ASSERT_TRUE(memory.ok());
  EXPECT_EQ(memory->device_bytes().data(), memory->bytes().data());
  EXPECT_TRUE(memory->Upload(Contents::kUnwritten).ok());
  EXPECT_TRUE(memory->Download().ok());
}

// Returns a guarded tensor in the simulator, with drawn elements.
GuardedTensor Guarded(const Shape& shape, bool gaps, Contents contents) {
  auto tensor = GuardedTensor::Allocate(DType::kF32, shape, gaps, KernelDevice());
  EXPECT_TRUE(tensor.ok()) << tensor.status();
  if (contents == Contents::kWritten) CopyElements(Drawn(shape).view(), tensor->view());
  EXPECT_TRUE(tensor->Upload(contents).ok());
  return *std::move(tensor);
}

TEST(DeviceTwin, WhatAKernelWritesComesBackAndTheRestStays) {
  for (const bool gaps : {false, true}) {
    const Shape shape = {1, 1, 5, 33};
    GuardedTensor from = Guarded(shape, gaps, Contents::kWritten);
    GuardedTensor to = Guarded(shape, gaps, Contents::kUnwritten);
    ASSERT_TRUE(CopyByKernel(from.device_view(), to.device_view()).ok());
    EXPECT_EQ(to.CountUnwritten(), 5 * 33) << "the host's memory is another";
    ASSERT_TRUE(to.Download().ok());
    EXPECT_EQ(to.CountUnwritten(), 0);
    EXPECT_TRUE(to.CheckGuards("to").ok());
    const Tensor drawn = Drawn(shape);
    ForEachOffset(to.view(), drawn.view(),
                  [&](int64_t a, int64_t b) { EXPECT_EQ(to.view().Get(a), drawn.view().Get(b)); });
  }
}

TEST(DeviceTwin, WritesToAGapAreFoundAfterwardsAndToABandAreRefused) {
  GuardedTensor from = Guarded({1, 1, 2, 9}, false, Contents::kWritten);
  GuardedTensor to = Guarded({1, 1, 2, 8}, true, Contents::kUnwritten);
  TensorView wider = to.device_view();
  wider.dims[3] = 9;
  ASSERT_TRUE(CopyByKernel(from.device_view(), wider).ok());
  ASSERT_TRUE(to.Download().ok());
  EXPECT_THAT(std::string(to.CheckGuards("to").message()), HasSubstr("to: a gap between its rows"));

  GuardedTensor tight = Guarded({1, 1, 2, 8}, false, Contents::kUnwritten);
  wider = tight.device_view();
  wider.dims[3] = 9;
  const absl::Status refused = CopyByKernel(from.device_view(), wider);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("writes 4 bytes at an address that is no"));
}

TEST(DeviceTwin, ReadsOfWhatNothingWroteAreReported) {
  GuardedTensor from = Guarded({1, 1, 2, 8}, false, Contents::kUnwritten);
  GuardedTensor to = Guarded({1, 1, 2, 8}, false, Contents::kUnwritten);
  const absl::Status status = CopyByKernel(from.device_view(), to.device_view());
  EXPECT_THAT(std::string(status.message()), HasSubstr("which nothing wrote"));
}

TEST(DeviceTwin, TheHostsTensorsAreNoDeviceMemory) {
  const Tensor from = Drawn({1, 1, 2, 8});
  GuardedTensor to = Guarded({1, 1, 2, 8}, false, Contents::kUnwritten);
  EXPECT_FALSE(CopyByKernel(from.view(), to.device_view()).ok());
}

TEST(GuardedWorkspace, IsPoisonedBeforeEachCallAndCheckedAfterIt) {
  for (const Device device : TestedDevices()) {
    auto workspace = GuardedWorkspace::Allocate(256, device);
    ASSERT_TRUE(workspace.ok());
    CudaRuntime* const runtime = RuntimeOf(device).value();
    const auto fill = [&](int byte) {
      std::byte* const bytes = workspace->bytes().data();
      if (runtime != nullptr) return runtime->Fill(bytes, byte, 256);
      std::memset(bytes, byte, 256);
      return absl::OkStatus();
    };
    EXPECT_TRUE(workspace->Call("it", [&] { return fill(7); }).ok());
    const auto look = [&]() -> absl::Status {
      unsigned char bytes[256];
      if (runtime != nullptr) {
        EXPECT_TRUE(runtime->CopyToHost(bytes, workspace->bytes().data(), 256).ok());
      } else {
        std::memcpy(bytes, workspace->bytes().data(), 256);
      }
      for (const unsigned char byte : bytes) EXPECT_EQ(byte, 0xFF);
      return absl::OkStatus();
    };
    EXPECT_TRUE(workspace->Call("it", look).ok());
    EXPECT_EQ(workspace->Call("it", [] { return absl::DataLossError("x"); }).code(),
              absl::StatusCode::kDataLoss);
  }
  auto workspace = GuardedWorkspace::Allocate(16, Device::kCpu);
  const absl::Status status = workspace->Call("the workspace", [&] {
    workspace->bytes().data()[17] = std::byte{1};
    return absl::OkStatus();
  });
  EXPECT_THAT(std::string(status.message()), HasSubstr("the workspace: byte 1 behind its end"));
}

}  // namespace
}  // namespace tfb
