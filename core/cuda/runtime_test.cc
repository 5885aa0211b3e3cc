#include "core/cuda/runtime.h"

#include "core/cuda/simulator/broken_kernels.h"
#include "core/cuda/simulator/simulator.h"
#include "gtest/gtest.h"

namespace tfb {
namespace {

TEST(Runtime, DeferredErrorsComeFromWhatWaitsAndStay) {
  CudaRuntime* runtime = CudaRuntime::For(Device::kSimulator).value();
  const DeviceBuffer sum = runtime->Allocate(sizeof(float)).value();
  const BrokenKernels& kernels = KernelsOn<BrokenKernels>(runtime->target());
  cuda_simulator::Settings deferring;
  deferring.errors_are_deferred = true;
  cuda_simulator::Configure(deferring);
  EXPECT_TRUE(runtime->Synchronize().ok());
  // The kernel reads a null pointer.
  EXPECT_STREQ(kernels.reduce(nullptr, sum.As<float>(), true), nullptr);
  const absl::Status status = runtime->Synchronize();
  EXPECT_NE(status.message().find("null pointer"), std::string::npos) << status;
  EXPECT_FALSE(runtime->Synchronize().ok());
  EXPECT_FALSE(runtime->Allocate(4).ok());
  EXPECT_FALSE(runtime->Fill(sum.data(), 0, 4).ok());
  EXPECT_NE(kernels.reduce(sum.As<float>(), sum.As<float>(), true), nullptr);
  cuda_simulator::Configure({});
  EXPECT_TRUE(runtime->Synchronize().ok());
}

TEST(Runtime, LaunchesAreToldBeforeAndAfter) {
  static int begun = 0, ended = 0;
  cuda_simulator::Settings telling;
  telling.on_launch = [](bool begins) { ++(begins ? begun : ended); };
  cuda_simulator::Configure(telling);
  KernelsOn<BrokenKernels>(CudaTarget::kSimulator).reduce(nullptr, nullptr, true);
  cuda_simulator::Configure({});
  KernelsOn<BrokenKernels>(CudaTarget::kSimulator).reduce(nullptr, nullptr, true);
  EXPECT_EQ(begun, 1);
  EXPECT_EQ(ended, 1);
}

TEST(Runtime, EventsMeasureAndCallsAreCounted) {
  CudaRuntime* runtime = CudaRuntime::For(Device::kSimulator).value();
  DeviceEvent from = DeviceEvent::Make(runtime).value();
  DeviceEvent to = DeviceEvent::Make(runtime).value();
  cuda_simulator::Settings settings;
  double now = 8;
  settings.event_seconds = [&now] { return now; };
  cuda_simulator::Configure(settings);
  const int64_t allocations = runtime->allocations(), waits = runtime->waits();
  ASSERT_TRUE(from.Record().ok());
  const DeviceBuffer buffer = runtime->Allocate(1 << 20).value();
  ASSERT_TRUE(runtime->Fill(buffer.data(), 1, buffer.bytes()).ok());
  now = 8.25;
  ASSERT_TRUE(to.Record().ok());
  cuda_simulator::Configure({});
  EXPECT_EQ(to.SecondsSince(from).value(), 0.25);
  EXPECT_EQ(runtime->allocations() - allocations, 1);
  EXPECT_EQ(runtime->waits() - waits, 0);
  ASSERT_TRUE(runtime->Synchronize().ok());
  EXPECT_EQ(runtime->waits() - waits, 1);
}

// Copies of at most 64 KiB from pageable memory may be under way when CUDA's call returns.
TEST(Runtime, AnUploadIsWaitedForSinceAnotherStreamMayReadIt) {
  CudaRuntime* runtime = CudaRuntime::For(Device::kSimulator).value();
  const int64_t waits = runtime->waits();
  const float value = 3;
  const DeviceBuffer buffer = runtime->Upload(&value, sizeof(value)).value();
  EXPECT_EQ(runtime->waits() - waits, 1);
}

}  // namespace
}  // namespace tfb
