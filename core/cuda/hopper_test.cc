// Tests what core/cuda/hopper.cuh takes matrix descriptors, swizzles and boxes to mean, in the
// simulator or on a GPU of compute capability 9.0. Numbers are small integers, so that sums are
// exact.
#include <algorithm>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "core/cuda/device_array.h"
#include "core/cuda/hopper_cases.h"
#include "core/cuda/runtime.h"
#include "core/cuda/simulator/simulator.h"
#include "core/half.h"
#include "core/tested_devices.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tfb::hopper_test {
namespace {

using Place = HopperCases::Place;

class Hopper : public testing::TestWithParam<Element> {
 protected:
  void SetUp() override {
    const auto runtime = CudaRuntime::For(KernelDevice());
    ASSERT_TRUE(runtime.ok()) << runtime.status();
    const CudaDevice& gpu = (*runtime)->properties();
    if (gpu.compute_capability_major != 9 || gpu.compute_capability_minor != 0) {
      GTEST_SKIP() << gpu.name << " has compute capability " << gpu.compute_capability_major << "."
                   << gpu.compute_capability_minor << ", not 9.0";
    }
    kernels_ = &KernelsOn<HopperCases>((*runtime)->target());
    const DeviceArray<int> compiled = OnDevice(std::vector<int>{0});
    ASSERT_EQ(kernels_->is_compiled(compiled.mutable_data()), nullptr);
    if (Read(compiled)[0] == 0) GTEST_SKIP() << "the kernels are not compiled for sm_90a";
  }

  const HopperCases& kernels() const { return *kernels_; }
  Element element() const { return GetParam(); }

  template <class T>
  static DeviceArray<T> OnDevice(const std::vector<T>& values) {
    return DeviceArray<T>::Create(KernelDevice(), values).value();
  }
  // Returns what the array holds after all work.
  template <class T>
  static std::vector<T> Read(const DeviceArray<T>& array) {
    std::vector<T> values(array.size());
    EXPECT_TRUE(array.Read(values.data()).ok());
    EXPECT_TRUE(CudaRuntime::For(array.device()).value()->Synchronize().ok());
    return values;
  }
  // Returns the bits of integers from -8 to 8.
  std::vector<uint16_t> Encode(const std::vector<int>& numbers) const {
    std::vector<uint16_t> bits;
    for (const int n : numbers) {
      const float x = static_cast<float>(n);
      const uint32_t of_float = BitsOf(x);  // of which bf16 is the upper half, exactly
      bits.push_back(element() == Element::kBf16 ? static_cast<uint16_t>(of_float >> 16)
                                                 : HalfBitsOf(x));
    }
    return bits;
  }
  static std::vector<int> Integers(int count, unsigned seed) {
    std::mt19937 random(seed);
    std::vector<int> numbers(count);
    for (int& n : numbers) n = static_cast<int>(random() % 17) - 8;
    return numbers;
  }

 private:
  const HopperCases* kernels_ = nullptr;
};

// a's 64 rows begin in the first or in the second half of a panel of 128, and its 16 channels, like
// b's, at each multiple of 16 in a row of 128 bytes.
TEST_P(Hopper, ProductsOfRowsBeginAtAnyChannelAndInTheSecondHalfOfAPanel) {
  const std::vector<int> a = Integers(128 * 64, 1), b = Integers(128 * 64, 2);
  const std::vector<int> before = Integers(64 * 128, 3);
  const auto device_a = OnDevice(Encode(a)), device_b = OnDevice(Encode(b));
  for (const bool by_copy_box : {false, true}) {
    for (const int row : {0, 64}) {
      for (const int channel : {0, 16, 32, 48}) {
        for (const bool adds : {false, true}) {
          SCOPED_TRACE(testing::Message() << "row " << row << ", channel " << channel
                                          << (by_copy_box ? ", copied" : ", stored"));
          const auto sums = OnDevice(std::vector<float>(before.begin(), before.end()));
          const char* error =
              kernels().multiply(device_a.data(), device_b.data(), element(),
                                 Place{row, channel, by_copy_box}, adds, sums.mutable_data());
          ASSERT_EQ(error, nullptr) << error;
          const std::vector<float> found = Read(sums);
          for (int i = 0; i < 64; ++i) {
            for (int n = 0; n < 128; ++n) {
              int sum = adds ? before[i * 128 + n] : 0;
              for (int k = channel; k < channel + 16; ++k) {
                sum += a[(row + i) * 64 + k] * b[n * 64 + k];
              }
              ASSERT_EQ(found[i * 128 + n], static_cast<float>(sum)) << i << ", " << n;
            }
          }
        }
      }
    }
  }
}

// b's rows are of the summed dimension: 16 of 48, in one panel of 64 columns, or two.
TEST_P(Hopper, ProductsOfRegistersAndTransposedRowsBeginAtAnySixteenthRow) {
  const std::vector<int> a = Integers(64 * 16, 4);
  const auto device_a = OnDevice(Encode(a));
  for (const int columns : {64, 128}) {
    const std::vector<int> b = Integers(48 * columns, 5), before = Integers(64 * columns, 6);
    const auto device_b = OnDevice(Encode(b));
    for (const bool by_copy_box : {false, true}) {
      for (const int row : {0, 16, 32}) {
        SCOPED_TRACE(testing::Message() << columns << " columns, row " << row
                                        << (by_copy_box ? ", copied" : ", stored"));
        const auto sums = OnDevice(std::vector<float>(before.begin(), before.end()));
        const char* error =
            kernels().multiply_transposed(device_a.data(), device_b.data(), element(),
                                          Place{row, 0, by_copy_box}, columns, sums.mutable_data());
        ASSERT_EQ(error, nullptr) << error;
        const std::vector<float> found = Read(sums);
        for (int i = 0; i < 64; ++i) {
          for (int n = 0; n < columns; ++n) {
            int sum = before[i * columns + n];
            for (int k = 0; k < 16; ++k) sum += a[i * 16 + k] * b[(row + k) * columns + n];
            ASSERT_EQ(found[i * columns + n], static_cast<float>(sum)) << i << ", " << n;
          }
        }
      }
    }
  }
}

// The tensor is [batch 2, tokens 70, heads 3, channels 88], whose dimensions the map has in another
// order, and boxes are of tokens and channels.
TEST_P(Hopper, BoxesOfATensorAreZeroOutsideOfIt) {
  constexpr int kBatch = 2, kTokens = 70, kHeads = 3, kChannels = 88;
  std::vector<uint16_t> numbers(kBatch * kTokens * kHeads * kChannels);
  for (size_t n = 0; n < numbers.size(); ++n) numbers[n] = static_cast<uint16_t>(n + 1);
  const auto device = OnDevice(numbers);
  const auto expected = [&](int c, int token, int head, int batch) -> int {
    if (c < 0 || c >= kChannels || token < 0 || token >= kTokens) return 0;
    if (head < 0 || head >= kHeads || batch < 0 || batch >= kBatch) return 0;
    return numbers[((batch * kTokens + token) * kHeads + head) * kChannels + c];
  };
  const int places[][4] = {{0, 0, 0, 0},   {64, 0, 1, 1},  {0, 64, 2, 1}, {64, 69, 0, 0},
                           {-8, -3, 1, 0}, {16, 40, 1, 1}, {88, 0, 0, 0}, {0, 70, 0, 0},
                           {0, 0, 3, 0},   {0, 0, -1, 1},  {0, 0, 0, 2},  {0, 0, 0, -1}};
  for (const int rows : {1, 8, 50, 256}) {
    const BoxedTensor tensor = {device.mutable_data(),
                                {kChannels, kTokens, kHeads, kBatch},
                                {1, kHeads * kChannels, kChannels, kTokens * kHeads * kChannels},
                                rows};
    for (const auto& at : places) {
      SCOPED_TRACE(testing::Message() << rows << " rows at " << at[0] << ", " << at[1] << ", "
                                      << at[2] << ", " << at[3]);
      const auto to = OnDevice(std::vector<uint16_t>(rows * 64));
      const char* error = kernels().copy(tensor, element(), at, to.mutable_data());
      ASSERT_EQ(error, nullptr) << error;
      const std::vector<uint16_t> found = Read(to);
      for (int n = 0; n < rows * 64; ++n) {
        ASSERT_EQ(found[n], expected(at[0] + n % 64, at[1] + n / 64, at[2], at[3])) << n;
      }
    }
  }
}

TEST_P(Hopper, TensorsThatNoMapDescribesAreRefused) {
  const auto device = OnDevice(std::vector<uint16_t>(4096));
  const auto to = OnDevice(std::vector<uint16_t>(256 * 64));
  const BoxedTensor good = {device.mutable_data(), {64, 4, 2, 2}, {1, 64, 256, 512}, 8};
  const auto refusal = [&](const BoxedTensor& tensor) -> std::string {
    const char* error = kernels().copy(tensor, element(), {0, 0, 0, 0}, to.mutable_data());
    return error == nullptr ? "" : error;
  };
  EXPECT_EQ(refusal(good), "");
  const auto expect_refused = [&](const char* what, auto change) {
    BoxedTensor tensor = good;
    change(&tensor);
    EXPECT_NE(refusal(tensor), "") << what;
  };
  expect_refused("data not at 16 bytes",
                 [&](BoxedTensor* t) { t->data = device.mutable_data() + 4; });
  expect_refused("a stride not of 16 bytes", [](BoxedTensor* t) { t->strides[2] = 260; });
  expect_refused("gaps in rows", [](BoxedTensor* t) { t->strides[0] = 2; });
  expect_refused("no element", [](BoxedTensor* t) { t->sizes[3] = 0; });
  expect_refused("more than 2^32", [](BoxedTensor* t) { t->sizes[3] = (int64_t{1} << 32) + 1; });
  expect_refused("257 rows", [](BoxedTensor* t) { t->box_rows = 257; });
  expect_refused("no row", [](BoxedTensor* t) { t->box_rows = 0; });
  BoxedTensor odd = good;
  odd.strides[2] = 260;
  EXPECT_THAT(refusal(odd), testing::HasSubstr("strides 64 260 512 and boxes of 8 rows"));
}

// Depths of fewer stages than the ring has, and of several rounds. Threads run in several orders.
TEST_P(Hopper, AGroupThatCopiesAndTwoThatMultiplyShareARing) {
  for (const int depth : {64, 128, 448}) {
    const std::vector<int> a = Integers(128 * depth, 7), b = Integers(128 * depth, 8);
    const auto device_a = OnDevice(Encode(a)), device_b = OnDevice(Encode(b));
    const int seeds = KernelDevice() == Device::kSimulator ? 4 : 1;
    for (int seed = 1; seed <= seeds; ++seed) {
      cuda_simulator::Settings settings;
      settings.seed = static_cast<uint64_t>(seed);
      cuda_simulator::Configure(settings);
      const auto c = OnDevice(std::vector<float>(128 * 128 + 2));
      const char* error = kernels().multiply_in_stages(device_a.data(), device_b.data(), element(),
                                                       depth, c.mutable_data());
      ASSERT_EQ(error, nullptr) << error;
      const std::vector<float> found = Read(c);
      bool is_negative[2] = {};
      for (int i = 0; i < 128; ++i) {
        for (int n = 0; n < 128; ++n) {
          int sum = 0;
          for (int k = 0; k < depth; ++k) sum += a[i * depth + k] * b[n * depth + k];
          ASSERT_EQ(found[i * 128 + n], static_cast<float>(sum)) << i << ", " << n;
          is_negative[i / 64] |= sum < 0;
        }
      }
      EXPECT_EQ(found[128 * 128] != 0, is_negative[0]);
      EXPECT_EQ(found[128 * 128 + 1] != 0, is_negative[1]);
    }
    cuda_simulator::Configure({});
  }
}

// On every GPU, unlike the tests above.
TEST(HopperKernels, AreCompiledForNoOtherGpu) {
  const auto runtime = CudaRuntime::For(KernelDevice());
  ASSERT_TRUE(runtime.ok()) << runtime.status();
  const auto compiled = DeviceArray<int>::Create(KernelDevice(), {-1});
  ASSERT_TRUE(compiled.ok()) << compiled.status();
  ASSERT_EQ(KernelsOn<HopperCases>((*runtime)->target()).is_compiled(compiled->mutable_data()),
            nullptr);
  int found = -1;
  ASSERT_TRUE(compiled->Read(&found).ok());
  ASSERT_TRUE((*runtime)->Synchronize().ok());
  const bool is_simulated = KernelDevice() == Device::kSimulator;
  const bool may_be = is_simulated || (*runtime)->properties().compute_capability_major == 9;
  EXPECT_THAT(found,
              testing::AllOf(testing::Ge(is_simulated ? 1 : 0), testing::Le(may_be ? 1 : 0)));
}

INSTANTIATE_TEST_SUITE_P(Types, Hopper, testing::Values(Element::kBf16, Element::kF16),
                         [](const auto& info) {
                           return info.param == Element::kBf16 ? "bf16" : "f16";
                         });

}  // namespace
}  // namespace tfb::hopper_test
