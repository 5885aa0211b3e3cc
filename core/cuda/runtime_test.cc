// Tests that need the simulator; device_work_test.cc has those of any device.
#include "core/cuda/runtime.h"

#include <cstdint>
#include <functional>
#include <vector>

#include "core/cuda/device_array.h"
#include "core/cuda/simulator/broken_kernels.h"
#include "core/cuda/simulator/simulator.h"
#include "core/status.h"
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

// The first bytes of a buffer on the simulator.
std::vector<uint8_t> BytesOf(CudaRuntime* runtime, const DeviceBuffer& buffer) {
  std::vector<uint8_t> bytes(buffer.bytes());
  EXPECT_TRUE(runtime->CopyToHost(bytes.data(), buffer.data(), bytes.size()).ok());
  return bytes;
}

// Makes work in the simulator as late as CUDA permits while it exists.
class LateStreams {
 public:
  LateStreams() {
    cuda_simulator::Settings settings;
    settings.streams_are_late = true;
    cuda_simulator::Configure(settings);
  }
  ~LateStreams() { cuda_simulator::Configure({}); }
};

TEST(LateStreams, WorkIsDoneWhenItsStreamIsWaitedForAndNotBefore) {
  CudaRuntime* runtime = CudaRuntime::For(Device::kSimulator).value();
  const uint8_t zeros[4] = {};
  const DeviceBuffer a = runtime->Upload(zeros, 4).value(), b = runtime->Upload(zeros, 4).value();
  const DeviceStream stream = DeviceStream::Make(runtime).value();
  const LateStreams late;
  ASSERT_TRUE(runtime->Fill(a.data(), 7, 4, stream.get()).ok());
  ASSERT_TRUE(runtime->Fill(b.data(), 5, 4).ok());
  ASSERT_TRUE(runtime->CopyWithinDevice(a.data(), b.data(), 1).ok());
  // A copy to the host is behind all work of its own stream, and of no other.
  EXPECT_EQ(BytesOf(runtime, a), std::vector<uint8_t>({5, 0, 0, 0}));
  ASSERT_TRUE(runtime->Synchronize(stream.get()).ok());
  EXPECT_EQ(BytesOf(runtime, a), std::vector<uint8_t>(4, 7));
  ASSERT_TRUE(runtime->Fill(b.data(), 1, 4, stream.get()).ok());
  ASSERT_TRUE(runtime->SynchronizeAll().ok());
  EXPECT_EQ(BytesOf(runtime, b), std::vector<uint8_t>(4, 1));
}

TEST(LateStreams, GraphsAreWorkOfTheStreamThatTheyAreLaunchedOn) {
  CudaRuntime* runtime = CudaRuntime::For(Device::kSimulator).value();
  const uint8_t zeros[4] = {};
  const DeviceBuffer a = runtime->Upload(zeros, 4).value();
  const LateStreams late;
  const DeviceGraph graph = DeviceGraph::Capture(runtime, [&](void* captured) {
                              return runtime->Fill(a.data(), 3, 4, captured);
                            }).value();
  {
    const DeviceStream stream = DeviceStream::Make(runtime).value();
    ASSERT_TRUE(graph.Launch(stream.get()).ok());
    EXPECT_EQ(BytesOf(runtime, a), std::vector<uint8_t>(4, 0));
  }
  EXPECT_EQ(BytesOf(runtime, a), std::vector<uint8_t>(4, 3)) << "it was destroyed";
}

// Arrays are read for statistics, by callers that do not know the stream of the last Run.
TEST(LateStreams, AnArrayIsReadBehindTheWorkOfAllStreams) {
  CudaRuntime* runtime = CudaRuntime::For(Device::kSimulator).value();
  const auto array = DeviceArray<uint8_t>::Create(Device::kSimulator, std::vector<uint8_t>{1, 2});
  ASSERT_TRUE(array.ok()) << array.status();
  const DeviceStream stream = DeviceStream::Make(runtime).value();
  const LateStreams late;
  ASSERT_TRUE(runtime->Fill(array->mutable_data(), 9, 2, stream.get()).ok());
  uint8_t bytes[2] = {};
  ASSERT_TRUE(array->Read(bytes).ok());
  EXPECT_EQ(bytes[0], 9);
}

// A failure is told by what waits for it.
TEST(LateStreams, LaunchesKeepTheirArguments) {
  CudaRuntime* runtime = CudaRuntime::For(Device::kSimulator).value();
  const std::vector<float> ones(64, 1);
  const DeviceBuffer values = runtime->Upload(ones.data(), 256).value();
  const DeviceBuffer sum = runtime->Allocate(sizeof(float)).value();
  const BrokenKernels& kernels = KernelsOn<BrokenKernels>(runtime->target());
  const LateStreams late;
  const int64_t before = cuda_simulator::TotalCounts().launches;
  ASSERT_STREQ(kernels.reduce(values.As<float>(), sum.As<float>(), true), nullptr);
  EXPECT_EQ(cuda_simulator::TotalCounts().launches, before);
  float total = 0;
  ASSERT_TRUE(runtime->CopyToHost(&total, sum.data(), sizeof(total)).ok());
  EXPECT_EQ(cuda_simulator::TotalCounts().launches, before + 1);
  EXPECT_EQ(total, 64);
  ASSERT_STREQ(kernels.reduce(nullptr, sum.As<float>(), true), nullptr);
  const absl::Status status = runtime->Synchronize();
  EXPECT_NE(status.message().find("null pointer"), std::string::npos) << status;
  EXPECT_TRUE(runtime->Synchronize().ok());
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
