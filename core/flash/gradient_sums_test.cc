// Sums of a backward pass that follow maps and orders: GradientMap and AddRowsByToken.
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "core/cuda/device_array.h"
#include "core/cuda/run_sums.h"
#include "core/cuda/runtime.h"
#include "core/flash/flash_backward_cuda.h"
#include "core/flash/parameter_gradients.h"
#include "core/flash/score_rule.h"
#include "core/tensor.h"
#include "core/tested_devices.h"
#include "core/thread_pool.h"
#include "gtest/gtest.h"

namespace tfb {
namespace {

class GradientSums : public testing::TestWithParam<Device> {
 protected:
  void SetUp() override {
    if (GetParam() == Device::kCpu) return;
    const auto runtime = CudaRuntime::For(GetParam());
    ASSERT_TRUE(runtime.ok()) << runtime.status();
    runtime_ = *runtime;
  }
  template <class T>
  std::vector<T> Read(const DeviceArray<T>& array) const {
    std::vector<T> values(array.size());
    EXPECT_TRUE(array.Read(values.data()).ok());
    if (runtime_ != nullptr) {
      EXPECT_TRUE(runtime_->Synchronize().ok());
    }
    return values;
  }

  CudaRuntime* runtime_ = nullptr;
};
INSTANTIATE_TEST_SUITE_P(On, GradientSums, testing::ValuesIn(TestedDevices()),
                         [](const auto& device) { return std::string(Name(device.param)); });

float NumberOf(int64_t n) { return static_cast<float>(n * 37 % 101 - 50) / 7; }

// ---- Maps ----

// Slopes by element 3 n of so many numbers, for the counts in turn, in no order.
std::vector<GradientMap::Slope> SlopesOf(const std::vector<int64_t>& counts, int64_t channels) {
  std::vector<GradientMap::Slope> slopes;
  for (size_t n = 0; n < counts.size(); ++n) {
    for (int64_t k = 0; k < counts[n]; ++k) {
      const int64_t number = (k * 7 + static_cast<int64_t>(n)) % 10'007;
      slopes.push_back(
          {3 * static_cast<int64_t>(n), number * channels, static_cast<double>(k % 5) / 3});
    }
  }
  for (size_t n = 0; n < slopes.size(); ++n) std::swap(slopes[n], slopes[n * 13 % slopes.size()]);
  return slopes;
}

class Maps : public GradientSums {
 protected:
  struct Result {
    std::vector<double> elements;
    std::vector<double> magnitudes;  // sums of the terms' absolute values
    std::vector<double> expected;
  };
  // Element e has `channels` channels, `stride` apart.
  Result Add(const std::vector<GradientMap::Slope>& slopes, int64_t channels, int64_t stride,
             int64_t elements, int threads = 3) {
    Result result;
    result.expected.assign(elements, 0.25);
    result.magnitudes.assign(elements, 0.25);
    std::vector<float> numbers(10'007 * channels);
    for (size_t n = 0; n < numbers.size(); ++n) numbers[n] = NumberOf(static_cast<int64_t>(n));
    for (const GradientMap::Slope& slope : slopes) {
      for (int64_t c = 0; c < channels; ++c) {
        const double term = slope.value * static_cast<double>(numbers[slope.number + c]);
        result.expected[slope.element + c * stride] += term;
        result.magnitudes[slope.element + c * stride] += std::fabs(term);
      }
    }
    const auto map = GradientMap::Create(GetParam(), slopes, channels, stride);
    const auto from = DeviceArray<float>::Create(GetParam(), numbers);
    const auto to = DeviceArray<double>::Create(GetParam(), std::vector<double>(elements, 0.25));
    const auto scratch = DeviceArray<double>::Create(
        GetParam(), std::vector<double>(GradientMap::kWorkspaceBytes / sizeof(double),
                                        std::numeric_limits<double>::quiet_NaN()));
    EXPECT_TRUE(map.ok() && from.ok() && to.ok() && scratch.ok());
    ThreadPool pool(threads);
    Execution execution;
    execution.pool = &pool;
    execution.workspace = absl::MakeSpan(reinterpret_cast<std::byte*>(scratch->mutable_data()),
                                         GradientMap::kWorkspaceBytes);
    EXPECT_EQ(map->Add(from->data(), to->mutable_data(), execution), absl::OkStatus());
    result.elements = Read(*to);
    return result;
  }
  // A sum of n terms in float64 is off by no more than n / 2^53 of the sum of their magnitudes, and so is
  // the expected one.
  static void ExpectEqual(const Result& result, int64_t most_terms) {
    for (size_t n = 0; n < result.elements.size(); ++n) {
      EXPECT_NEAR(result.elements[n], result.expected[n],
                  2 * static_cast<double>(most_terms + 2) * 0x1p-53 * result.magnitudes[n])
          << n;
    }
  }
};
INSTANTIATE_TEST_SUITE_P(On, Maps, testing::ValuesIn(TestedDevices()),
                         [](const auto& device) { return std::string(Name(device.param)); });

// Runs have 91 slopes, the root of 8191 and one more.
TEST_P(Maps, ElementsOfFewAndOfManyNumbersGetTheirSums) {
  const std::vector<int64_t> counts = {1, 8191, 0, 90, 91, 92, 2, 182, 183, 4096, 16};
  ExpectEqual(Add(SlopesOf(counts, 1), 1, 1, 3 * 11), 8191);
}

TEST_P(Maps, ChannelsLieApart) {
  ExpectEqual(Add(SlopesOf({5, 300, 17}, 5), 5, 7, 6 + 4 * 7 + 1), 300);
}

// 80 elements of 4097 numbers have 65 runs each, of 3 channels: too many for the workspace.
TEST_P(Maps, PartialSumsStayInTheWorkspace) {
  const std::vector<int64_t> counts(80, 4097);
  ExpectEqual(Add(SlopesOf(counts, 3), 3, 1, 3 * 80), 4097);
}

TEST_P(Maps, NoSlopesAddNothing) {
  const Result result = Add({}, 4, 1, 10);
  EXPECT_EQ(result.elements, std::vector<double>(10, 0.25));
}

TEST_P(Maps, ThreadsDoNotMatter) {
  if (GetParam() != Device::kCpu) GTEST_SKIP() << "the pool is the CPU's";
  const std::vector<GradientMap::Slope> slopes = SlopesOf({5000, 1, 300}, 2);
  const std::vector<double> one = Add(slopes, 2, 1, 9, 1).elements;
  for (const int threads : {2, 7}) EXPECT_EQ(Add(slopes, 2, 1, 9, threads).elements, one);
}

// ---- Rows by token ----

struct OrderedRows {
  int64_t batch, heads, places, tokens, channels;
  int64_t group = 1;  // heads that share an order
};

// Adds rows to tokens, whose channels are 2 apart, and expects what a walk through the places gives, in
// the same order and so with the same bits.
void ExpectSumsByToken(CudaRuntime* runtime, const OrderedRows& s,
                       const std::vector<int32_t>& order_tokens) {
  const int64_t rows = s.batch * s.heads * s.places;
  std::vector<float> numbers(rows * s.channels);
  for (size_t n = 0; n < numbers.size(); ++n) numbers[n] = NumberOf(static_cast<int64_t>(n));
  const Shape shape = {s.batch, s.heads, s.tokens, s.channels};
  const Shape strides = {s.heads * s.tokens * s.channels * 2, s.tokens * s.channels * 2,
                         s.channels * 2, 2};
  std::vector<float> expected(NumElements(shape) * 2, 0.125f);
  const int64_t orders = s.heads / s.group;
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t head = row / s.places, b = head / s.heads, h = head % s.heads;
    const int64_t token = order_tokens[(b * orders + h / s.group) * s.places + row % s.places];
    for (int64_t c = 0; token >= 0 && c < s.channels; ++c) {
      expected[head * strides[1] + token * strides[2] + c * 2] += numbers[row * s.channels + c];
    }
  }
  const Device device = runtime->device();
  const auto from = DeviceArray<float>::Create(device, numbers);
  const auto order = DeviceArray<int32_t>::Create(device, order_tokens);
  const auto to = DeviceArray<float>::Create(device, std::vector<float>(expected.size(), 0.125f));
  ASSERT_TRUE(from.ok() && order.ok() && to.ok());
  ASSERT_EQ(
      AddRowsByToken(
          runtime,
          ConstTensorView(from->data(), DType::kF32, {s.batch, s.heads, s.places, s.channels}),
          {order->data(), orders * s.places, s.places, s.group},
          TensorView(to->mutable_data(), DType::kF32, shape, strides), Execution()),
      absl::OkStatus());
  std::vector<float> sums(expected.size());
  ASSERT_TRUE(to->Read(sums.data()).ok());
  ASSERT_TRUE(runtime->Synchronize().ok());
  EXPECT_EQ(sums, expected) << s.places << " places, " << s.tokens << " tokens, " << s.channels;
}

// Numbers of places straddle 32 and 128, those of tokens 8, and channels 32.
TEST_P(GradientSums, RowsGoToTheirTokensInTheOrderOfPlaces) {
  if (runtime_ == nullptr) GTEST_SKIP() << "a kernel";
  for (const int64_t places : {0, 1, 31, 32, 127, 128, 129, 300}) {
    for (const int64_t tokens : {1, 7, 8, 9, 65}) {
      const OrderedRows s = {2, 2, places, tokens, tokens == 65 ? int64_t{33} : int64_t{5}};
      std::vector<int32_t> order;
      for (int64_t n = 0; n < s.batch * s.heads * places; ++n) {
        order.push_back(static_cast<int32_t>(n * 77 % tokens));  // most tokens several times
      }
      ExpectSumsByToken(runtime_, s, order);
    }
  }
}

TEST_P(GradientSums, PlacesWithoutTokensAreLeftOutAndHeadsShareOrders) {
  if (runtime_ == nullptr) GTEST_SKIP() << "a kernel";
  const OrderedRows s = {2, 4, 150, 40, 64, /*group=*/2};
  std::vector<int32_t> order;
  for (int32_t n = 0; n < 2 * 2 * 150; ++n) order.push_back(n % 3 == 0 ? -1 : n * n % 40);
  ExpectSumsByToken(runtime_, s, order);
}

TEST_P(GradientSums, ATokenMayHaveAllPlaces) {
  if (runtime_ == nullptr) GTEST_SKIP() << "a kernel";
  ExpectSumsByToken(runtime_, {1, 1, 200, 10, 3}, std::vector<int32_t>(200, 9));
}

}  // namespace
}  // namespace tfb
