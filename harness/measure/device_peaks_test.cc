#include "harness/measure/device_peaks.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <vector>

#include "core/cuda/simulator/simulator.h"
#include "core/tested_devices.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "harness/measure/peak_kernels.h"
#include "harness/testing/simulated_clock.h"

namespace tfb {
namespace {

using ::testing::Each;
using ::testing::FloatEq;

constexpr int kBlocks = 2;

class PeakKernelsTest : public ::testing::Test {
 protected:
  // Returns the results of the threads of kBlocks.
  template <class Launch>
  std::vector<float> Results(const Launch& launch) {
    std::vector<float> results(kBlocks * PeakKernels::kThreads);
    const size_t bytes = results.size() * sizeof(float);
    const DeviceBuffer buffer = runtime_->Allocate(bytes).value();
    EXPECT_STREQ(launch(buffer.As<float>()), nullptr);
    EXPECT_TRUE(runtime_->CopyToHost(results.data(), buffer.data(), bytes).ok());
    return results;
  }

  CudaRuntime* const runtime_ = CudaRuntime::For(KernelDevice()).value();
  const PeakKernels& kernels_ = KernelsOn<PeakKernels>(runtime_->target());
};

// Peaks by a clock of the test's own.
class PeakMeterTest : public ::testing::Test {
 protected:
  CudaRuntime* const runtime_ = CudaRuntime::For(Device::kSimulator).value();
};

TEST_F(PeakKernelsTest, MultiplyAddsAreAsManyAsAreCounted) {
  for (const int64_t iterations : {0, 1, 7, 16}) {
    // This is 1 + 1/2 + 1/4 + ... of so many terms.
    const float each = static_cast<float>(2 - std::ldexp(2, -static_cast<int>(iterations)));
    EXPECT_THAT(Results([&](float* results) {
                  return kernels_.multiply_add(kBlocks, iterations, 0.5f, results);
                }),
                Each(FloatEq(PeakKernels::kChains * each)));
  }
}

TEST_F(PeakKernelsTest, MatrixProductsAreAsManyAsAreCounted) {
  for (const Element type : {Element::kBf16, Element::kF16}) {
    for (const int64_t iterations : {0, 1, 5}) {
      // A thread has four elements of each tile, each a sum of 16 products.
      const float sum = 4.0f * PeakKernels::kTiles * static_cast<float>(iterations) * 16 * 0.25f;
      EXPECT_THAT(Results([&](float* results) {
                    return kernels_.matrix_products(kBlocks, iterations, type, 0.5f, results);
                  }),
                  Each(sum));
    }
  }
}

TEST_F(PeakKernelsTest, CopiesAreWhole) {
  for (const size_t count : {4, 4 * 255, 4 * 3000}) {
    std::vector<float> values(count), copies(count);
    for (size_t i = 0; i < count; ++i) values[i] = static_cast<float>(i);
    const size_t bytes = count * sizeof(float);
    const DeviceBuffer from = runtime_->Upload(values.data(), bytes).value();
    const DeviceBuffer to = runtime_->Allocate(bytes).value();
    ASSERT_STREQ(kernels_.copy(kBlocks, to.data(), from.data(), bytes), nullptr);
    ASSERT_TRUE(runtime_->CopyToHost(copies.data(), to.data(), bytes).ok());
    EXPECT_EQ(copies, values);
  }
}

TEST_F(PeakKernelsTest, ReadsAreWholeAndWriteNothingWhereAllIsZero) {
  for (const size_t count : {4, 4 * 255, 4 * 3000}) {
    for (const size_t place : {size_t{0}, count / 2, count - 1, count}) {
      std::vector<float> values(count, 0);
      if (place < count) values[place] = 3;
      const DeviceBuffer from =
          runtime_->Upload(values.data(), values.size() * sizeof(float)).value();
      float not_zero = -1;
      const DeviceBuffer result = runtime_->Upload(&not_zero, sizeof(float)).value();
      ASSERT_STREQ(kernels_.read(kBlocks, from.data(), from.bytes(), result.As<float>()), nullptr);
      ASSERT_TRUE(runtime_->CopyToHost(&not_zero, result.data(), sizeof(float)).ok());
      EXPECT_EQ(not_zero, place < count ? 3 : -1) << place << " of " << count;
    }
  }
}

// A peak takes two readings of the events' clock for each of 20 passes, of which each is faster than
// the one before. The first trial of the first peak is too short, so that its passes do twice as much.
TEST_F(PeakMeterTest, APeakIsTheCountedWorkOfTheBestOfTwentyPasses) {
  constexpr int kPasses = 20;
  constexpr double kTick = 1.0 / 64;
  const auto seconds_of = [](int pass) { return kTick * (1 - pass / 100.0); };
  CountingClock clock([&](int reading) {
    if (reading < 2) return 0.0049;
    return seconds_of((reading - 2) / 2 % kPasses);
  });
  cuda_simulator::Settings settings;
  settings.event_seconds = [&clock] { return clock.Seconds(); };
  cuda_simulator::Configure(settings);
  Environment environment;
  const absl::Status status = MeasureDevicePeaks(runtime_, std::nullopt, &environment);
  cuda_simulator::Configure({});
  ASSERT_TRUE(status.ok()) << status;
  ASSERT_EQ(environment.peaks_size(), 4);
  const CudaDevice& device = runtime_->properties();
  const double threads = PeakKernels::kThreads * static_cast<double>(device.multiprocessors);
  const double best = seconds_of(kPasses - 1);
  const double adds = 2 * 8 * threads * PeakKernels::kChains;
  // A product of 16 x 16 and 16 x 8 elements by a warp of 32 threads.
  const double products = 2 * (2 * 16 * 16 * 8) * threads / 32 * PeakKernels::kTiles;
  ASSERT_GT(device.l2_cache_bytes, 0);
  const double copied = static_cast<double>(
      std::min<int64_t>(16 * device.l2_cache_bytes, device.memory_bytes / 16) / 16 * 16);
  const double expected[] = {2 * adds / best, products / best, products / best, 2 * copied / best};
  for (int n = 0; n < 4; ++n) {
    EXPECT_NEAR(environment.peaks(n).value(), expected[n], 1e-5 * expected[n]) << n;
    environment.mutable_peaks(n)->clear_value();
  }
  EXPECT_EQ(
      environment.ShortDebugString(),
      "peaks { name: \"f32 fma\" unit: \"FLOP/s\" kind: KIND_COMPUTE device: "
      "DEVICE_TYPE_SIMULATOR dtype: ELEMENT_TYPE_F32 } peaks { name: \"bf16 mma.sync\" unit: "
      "\"FLOP/s\" kind: KIND_COMPUTE device: DEVICE_TYPE_SIMULATOR dtype: ELEMENT_TYPE_BF16 } "
      "peaks { name: \"f16 mma.sync\" unit: \"FLOP/s\" kind: KIND_COMPUTE device: "
      "DEVICE_TYPE_SIMULATOR dtype: ELEMENT_TYPE_F16 } peaks { name: \"copy\" unit: \"B/s\" "
      "kind: KIND_COPY_BANDWIDTH device: DEVICE_TYPE_SIMULATOR }");
}

// The library's passes take the time that it tells the clock: the fastest one counts.
TEST_F(PeakMeterTest, ALibrarysProductsArePeaksOfTheirOwn) {
  static double now = 0;
  cuda_simulator::Settings settings;
  settings.event_seconds = [] { return now; };
  // Kernels that take no time would be measured for ever.
  settings.on_launch = [](bool begins) { now += begins ? 0 : 1.0 / 64; };
  cuda_simulator::Configure(settings);
  int calls = 0;
  PeakLibrary library;
  library.name = "library 1.2";
  library.workspace_bytes = 96;
  std::vector<Element> elements;
  library.multiply = [&](const SixteenBitGemmCall& call, void* workspace, void* stream) {
    EXPECT_NE(workspace, nullptr);
    EXPECT_EQ(stream, nullptr);
    EXPECT_EQ(std::vector<int64_t>(
                  {call.columns, call.depth, call.a_stride, call.b_stride, call.c_stride}),
              std::vector<int64_t>(5, call.rows));
    EXPECT_EQ(call.rows, 16);
    elements.push_back(call.element);
    now += ++calls % 7 == 0 ? 1.0 / 64 : 1.0 / 32;
    return absl::OkStatus();
  };
  Environment environment;
  const absl::Status status = MeasureDevicePeaks(runtime_, library, &environment);
  cuda_simulator::Configure({});
  ASSERT_TRUE(status.ok()) << status;
  ASSERT_EQ(environment.peaks_size(), 6);
  for (const int n : {3, 4}) {
    const Peak& peak = environment.peaks(n);
    EXPECT_EQ(peak.name(), n == 3 ? "bf16 library 1.2" : "f16 library 1.2");
    EXPECT_EQ(peak.dtype(), n == 3 ? ELEMENT_TYPE_BF16 : ELEMENT_TYPE_F16);
    EXPECT_EQ(peak.kind(), Peak::KIND_COMPUTE);
    EXPECT_NEAR(peak.value(), 2.0 * 16 * 16 * 16 * 64, 1e-3 * 16 * 16 * 16 * 64);
  }
  std::vector<Element> expected(20, Element::kBf16);
  expected.resize(40, Element::kF16);
  EXPECT_EQ(elements, expected);
}

TEST_F(PeakMeterTest, ALibraryThatFailsEndsTheMeasurementWithItsReason) {
  PeakLibrary library;
  library.multiply = [](const SixteenBitGemmCall&, void*, void*) {
    return absl::InternalError("no such product");
  };
  Environment environment;
  EXPECT_EQ(MeasureDevicePeaks(runtime_, library, &environment),
            absl::InternalError("no such product"));
  EXPECT_EQ(environment.peaks_size(), 3) << "those before it";
}

TEST_F(PeakMeterTest, EachPeakSaysWhatItIsOf) {
  Environment environment;
  const absl::Status status = MeasureDevicePeaks(runtime_, std::nullopt, &environment);
  ASSERT_TRUE(status.ok()) << status;
  ASSERT_EQ(environment.peaks_size(), 4);
  EXPECT_EQ(environment.peaks(0).dtype(), ELEMENT_TYPE_F32);
  EXPECT_EQ(environment.peaks(1).dtype(), ELEMENT_TYPE_BF16);
  EXPECT_EQ(environment.peaks(2).dtype(), ELEMENT_TYPE_F16);
  EXPECT_EQ(environment.peaks(3).kind(), Peak::KIND_COPY_BANDWIDTH);
  for (const Peak& peak : environment.peaks()) {
    EXPECT_GT(peak.value(), 0) << peak.name();
    EXPECT_EQ(peak.threads(), 0);
    EXPECT_EQ(peak.device(), DEVICE_TYPE_SIMULATOR);  // no rendering shows it as a GPU's
  }
  EXPECT_EQ(runtime_->allocated_bytes(), 0);
}

}  // namespace
}  // namespace tfb
