#include "core/cuda/for_each.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "core/cuda/device_array.h"
#include "core/cuda/for_each_test_functors.h"
#include "core/cuda/runtime.h"
#include "core/tensor.h"
#include "core/tested_devices.h"
#include "core/thread_pool.h"
#include "gtest/gtest.h"

namespace tfb::for_each_test {
namespace {

class ForEachOnDevice : public testing::TestWithParam<Device> {
 protected:
  void SetUp() override {
    if (GetParam() == Device::kCpu) return;
    const auto runtime = CudaRuntime::For(GetParam());
    ASSERT_TRUE(runtime.ok()) << runtime.status();
  }

  Execution execution() {
    Execution execution;
    execution.pool = &pool_;
    return execution;
  }
  // Returns what a device's array holds after all work.
  template <class T>
  static std::vector<T> Read(const DeviceArray<T>& array) {
    std::vector<T> values(array.size());
    EXPECT_TRUE(array.Read(values.data()).ok());
    if (array.device() != Device::kCpu) {
      EXPECT_TRUE(CudaRuntime::For(array.device()).value()->Synchronize().ok());
    }
    return values;
  }

  ThreadPool pool_{3};
};

TEST_P(ForEachOnDevice, VisitsEveryElementOnce) {
  for (const int64_t count : {0, 1, 31, 257, 5000}) {
    const auto counts = DeviceArray<int64_t>::Create(GetParam(), std::vector<int64_t>(count + 1));
    ASSERT_TRUE(counts.ok());
    ASSERT_TRUE(
        ForEach(GetParam(), count, CountElements{counts->mutable_data()}, execution()).ok());
    const std::vector<int64_t> found = Read(*counts);
    for (int64_t n = 0; n < count; ++n) EXPECT_EQ(found[n], n + 1) << n << " of " << count;
    EXPECT_EQ(found[count], 0);
  }
}

// Widths straddle the pieces of the CPU, of 256 columns, and its tasks, of 4096 elements or one row.
TEST_P(ForEachOnDevice, VisitsEveryColumnOfEveryRowOnce) {
  for (const int64_t columns : {0, 1, 33, 255, 256, 257, 600, 4097}) {
    for (const int64_t rows : {0, 1, 2, 19}) {
      const int64_t count = rows * columns;
      const auto counts = DeviceArray<int64_t>::Create(GetParam(), std::vector<int64_t>(count + 1));
      ASSERT_TRUE(counts.ok());
      ASSERT_TRUE(ForEachInRows(GetParam(), rows, columns,
                                CountColumns{counts->mutable_data(), columns}, execution())
                      .ok());
      const std::vector<int64_t> found = Read(*counts);
      for (int64_t n = 0; n < count; ++n) EXPECT_EQ(found[n], n + 1) << rows << "x" << columns;
      EXPECT_EQ(found[count], 0);
    }
  }
}

// 3 x 300 numbers in 16 bits, every second one of a row, are doubled to floats and back.
TEST_P(ForEachOnDevice, LoadsAndStoresElementsOfAnyDtypeAndStride) {
  constexpr int64_t kRows = 3, kColumns = 300;
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    Tensor numbers(dtype, {kRows, 2 * kColumns});
    for (int64_t n = 0; n < numbers.num_elements(); ++n) {
      numbers.view().Set(n, static_cast<double>(n % 128));
    }
    const auto* bits = static_cast<const uint16_t*>(numbers.view().data);
    const auto from = DeviceArray<uint16_t>::Create(
        GetParam(), std::vector<uint16_t>(bits, bits + numbers.num_elements()));
    const auto to =
        DeviceArray<float>::Create(GetParam(), std::vector<float>(kRows * kColumns, -1));
    ASSERT_TRUE(from.ok() && to.ok());
    const Element element = dtype == DType::kBF16 ? Element::kBf16 : Element::kF16;
    const DeviceView sixteen = {from->mutable_data(), {2 * kColumns, 2, 0, 0}, element};
    const DeviceView floats = {to->mutable_data(), {kColumns, 1, 0, 0}, Element::kF32};
    ASSERT_TRUE(
        ForEachInRows(GetParam(), kRows, kColumns, DoubleRows{sixteen, floats}, execution()).ok());
    ASSERT_TRUE(
        ForEachInRows(GetParam(), kRows, kColumns, DoubleRows{floats, sixteen}, execution()).ok());
    const std::vector<float> doubled = Read(*to);
    const std::vector<uint16_t> back = Read(*from);
    Tensor quadrupled(dtype, {kRows, 2 * kColumns});
    std::copy(back.begin(), back.end(), static_cast<uint16_t*>(quadrupled.view().mutable_data()));
    for (int64_t n = 0; n < numbers.num_elements(); ++n) {
      const double x = static_cast<double>(n % 128);
      EXPECT_EQ(quadrupled.view().Get(n), n % 2 == 0 ? 4 * x : x) << n;
    }
    for (int64_t n = 0; n < kRows * kColumns; ++n) {
      EXPECT_EQ(doubled[n], 2 * static_cast<double>(2 * n % 128)) << n;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Devices, ForEachOnDevice, testing::ValuesIn(TestedDevices()),
                         [](const auto& info) { return std::string(Name(info.param)); });

}  // namespace
}  // namespace tfb::for_each_test
