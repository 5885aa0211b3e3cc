// Streams, events and graphs of core/cuda/runtime.h on the device that tests run kernels on. What
// only a simulator can be asked stands in runtime_test.cc.
#include <cmath>
#include <cstdint>
#include <functional>
#include <vector>

#include "core/cuda/device_array.h"
#include "core/cuda/runtime.h"
#include "core/status.h"
#include "core/tested_devices.h"
#include "gtest/gtest.h"

namespace tfb {
namespace {

class DeviceWork : public testing::Test {
 protected:
  DeviceWork() : runtime_(CudaRuntime::For(KernelDevice()).value()) {}

  DeviceBuffer Zeros(size_t bytes) const {
    const std::vector<uint8_t> zeros(bytes);
    return runtime_->Upload(zeros.data(), bytes).value();
  }
  // Waits for the default stream alone.
  std::vector<uint8_t> BytesOf(const DeviceBuffer& buffer) const {
    std::vector<uint8_t> bytes(buffer.bytes());
    EXPECT_TRUE(runtime_->CopyToHost(bytes.data(), buffer.data(), bytes.size()).ok());
    return bytes;
  }

  CudaRuntime* const runtime_;
};

TEST_F(DeviceWork, EventsMeasureWhatIsBetweenThem) {
  const DeviceBuffer buffer = Zeros(1 << 20);
  DeviceEvent from = DeviceEvent::Make(runtime_).value(), to = DeviceEvent::Make(runtime_).value();
  ASSERT_TRUE(from.Record().ok());
  ASSERT_TRUE(runtime_->Fill(buffer.data(), 1, buffer.bytes()).ok());
  ASSERT_TRUE(to.Record().ok());
  EXPECT_TRUE(std::isfinite(to.SecondsSince(from).value()));
  EXPECT_EQ(BytesOf(buffer), std::vector<uint8_t>(1 << 20, 1));
}

TEST_F(DeviceWork, AGraphDoesNothingWhileItIsCapturedAndAllOfItWithEveryLaunch) {
  const DeviceBuffer a = Zeros(4), b = Zeros(4);
  const absl::StatusOr<DeviceGraph> graph =
      DeviceGraph::Capture(runtime_, [&](void* stream) -> absl::Status {
        TFB_RETURN_IF_ERROR(runtime_->Fill(a.data(), 7, 2, stream));
        return runtime_->CopyWithinDevice(b.data(), a.data(), 4, stream);
      });
  ASSERT_TRUE(graph.ok()) << graph.status();
  EXPECT_EQ(BytesOf(a), std::vector<uint8_t>({0, 0, 0, 0}));
  for (const uint8_t last : {1, 2}) {
    ASSERT_TRUE(runtime_->Fill(a.data(), last, 4).ok());
    ASSERT_TRUE(graph->Launch().ok());
    EXPECT_EQ(BytesOf(b), std::vector<uint8_t>({7, 7, last, last}));
  }
}

// Work on the default stream among it: were it done at once and left out of the graph, a launch
// would compute something else.
TEST_F(DeviceWork, WhatNoGraphCanDoIsAnErrorAndTheNextCaptureWorks) {
  const DeviceBuffer buffer = Zeros(4);
  uint8_t byte = 0;
  const std::function<absl::Status(void*)> calls[] = {
      [&](void* stream) { return runtime_->Synchronize(stream); },
      [&](void*) { return runtime_->Allocate(4).status(); },
      [&](void* stream) { return runtime_->CopyToHost(&byte, buffer.data(), 1, stream); },
      [&](void* stream) { return runtime_->CopyToDevice(buffer.data(), &byte, 1, stream); },
      [&](void*) { return runtime_->Fill(buffer.data(), 2, 4); }};
  for (const auto& call : calls) {
    const int64_t number = &call - calls;
    EXPECT_EQ(DeviceGraph::Capture(runtime_, call).status().code(), absl::StatusCode::kInternal)
        << "call " << number;
    // A caller that does not look at the error gets it in the end.
    const auto ignored = DeviceGraph::Capture(runtime_, [&](void* stream) {
      call(stream).IgnoreError();
      return absl::OkStatus();
    });
    EXPECT_EQ(ignored.status().code(), absl::StatusCode::kInternal) << "call " << number;
    const auto fills = DeviceGraph::Capture(
        runtime_, [&](void* stream) { return runtime_->Fill(buffer.data(), 3, 4, stream); });
    EXPECT_TRUE(fills.ok()) << "behind call " << number << ": " << fills.status();
  }
  EXPECT_EQ(BytesOf(buffer), std::vector<uint8_t>(4, 0));
  const auto own_error = DeviceGraph::Capture(
      runtime_, [](void*) { return absl::InvalidArgumentError("the caller's own"); });
  EXPECT_EQ(own_error.status(), absl::InvalidArgumentError("the caller's own"));
}

TEST_F(DeviceWork, AStreamIsWaitedForByItself) {
  const DeviceBuffer a = Zeros(1 << 20);
  const DeviceStream stream = DeviceStream::Make(runtime_).value();
  ASSERT_TRUE(runtime_->Fill(a.data(), 7, a.bytes(), stream.get()).ok());
  ASSERT_TRUE(runtime_->Synchronize(stream.get()).ok());
  EXPECT_EQ(BytesOf(a), std::vector<uint8_t>(1 << 20, 7));
}

TEST_F(DeviceWork, AGraphIsLaunchedOnAStreamWhoseWorkIsDoneWhenItIsDestroyed) {
  const DeviceBuffer a = Zeros(1 << 20);
  const DeviceGraph graph = DeviceGraph::Capture(runtime_, [&](void* captured) {
                              return runtime_->Fill(a.data(), 3, a.bytes(), captured);
                            }).value();
  {
    const DeviceStream stream = DeviceStream::Make(runtime_).value();
    ASSERT_TRUE(graph.Launch(stream.get()).ok());
  }
  EXPECT_EQ(BytesOf(a), std::vector<uint8_t>(1 << 20, 3));
}

// Arrays are read for statistics, by callers that do not know the stream of the last Run.
TEST_F(DeviceWork, AnArrayIsReadBehindTheWorkOfAllStreams) {
  const int64_t count = 1 << 20;
  const auto array = DeviceArray<uint8_t>::Create(KernelDevice(), std::vector<uint8_t>(count, 1));
  ASSERT_TRUE(array.ok()) << array.status();
  const DeviceStream stream = DeviceStream::Make(runtime_).value();
  ASSERT_TRUE(runtime_->Fill(array->mutable_data(), 9, count, stream.get()).ok());
  std::vector<uint8_t> bytes(count);
  ASSERT_TRUE(array->Read(bytes.data()).ok());
  EXPECT_EQ(bytes, std::vector<uint8_t>(count, 9));
}

TEST_F(DeviceWork, OwnersOfHandlesAreMovable) {
  const DeviceBuffer a = Zeros(4);
  DeviceGraph graph;
  {
    auto captured = DeviceGraph::Capture(
        runtime_, [&](void* stream) { return runtime_->Fill(a.data(), 5, 4, stream); });
    ASSERT_TRUE(captured.ok()) << captured.status();
    graph = *std::move(captured);
  }
  DeviceStream stream, other = DeviceStream::Make(runtime_).value();
  stream = std::move(other);
  ASSERT_TRUE(graph.Launch(stream.get()).ok());
  ASSERT_TRUE(runtime_->Synchronize(stream.get()).ok());
  EXPECT_EQ(BytesOf(a), std::vector<uint8_t>(4, 5));
}

}  // namespace
}  // namespace tfb
