// Tests the kernels of engine flash's backward pass against loops in double, in every instruction set
// that this machine runs.
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "core/cpu/kernels.h"
#include "core/random.h"
#include "gtest/gtest.h"

namespace tfb {
namespace {

constexpr int64_t kStride = 96, kOtherStride = 103, kRows = 21;
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

std::vector<float> Normal(const char* name, int64_t count) {
  const RandomStream stream(1, name);
  std::vector<float> numbers(count);
  for (int64_t n = 0; n < count; ++n) numbers[n] = static_cast<float>(stream.Normal(n));
  return numbers;
}

class BackwardKernels : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    kernels_ = FindCpuKernels(GetParam());
    if (kernels_ == nullptr) GTEST_SKIP() << "this machine does not run " << GetParam();
  }
  const CpuKernels* kernels_ = nullptr;
};
INSTANTIATE_TEST_SUITE_P(In, BackwardKernels, testing::Values("generic", "avx2", "avx512"),
                         [](const auto& name) { return std::string(name.param); });

// The error of one exponential is below 2e-7 of it; a row's span gradient sums up to 64 of them.
TEST_P(BackwardKernels, WeightsAndTheirGradientsAreThoseOfTheFormula) {
  const std::vector<float> shift = Normal("shift", kRows), delta = Normal("delta", kRows);
  std::vector<float> factor(kRows);
  std::vector<uint64_t> masks(kRows);
  std::vector<float> spans(kRows), distances(kRows);
  for (int64_t r = 0; r < kRows; ++r) {
    masks[r] = 0x9E3779B97F4A7C15u * static_cast<uint64_t>(r + 1);
    factor[r] = 1 + static_cast<float>(r) / 16;
    // Where the distance is great, fp32 keeps the half of a span plus the length by their order alone.
    spans[r] = 3.5f + (r % 2 == 0 ? 0.0f : 8388600.0f);
    distances[r] = 16 + 2 * static_cast<float>(r) + (r % 2 == 0 ? 0.0f : 8388600.0f);
  }
  const Ramp ramp{spans.data(), distances.data(), 16};
  for (const int64_t columns : {16, 48}) {
    for (const bool is_masked : {false, true}) {
      for (const bool has_ramp : {false, true}) {
        std::vector<float> scores = Normal("scores", kRows * kStride),
                           gradients = Normal("gradients", kRows * kOtherStride), span(kRows, 1.0f);
        const std::vector<float> s = scores, g = gradients;
        kernels_->softmax_backward(
            {scores.data(), kStride, kRows, columns}, gradients.data(), kOtherStride,
            {shift.data(), factor.data(), delta.data(), is_masked ? masks.data() : nullptr, 16,
             has_ramp ? &ramp : nullptr, span.data()});
        for (int64_t r = 0; r < kRows; ++r) {
          double span_gradient = 1;
          for (int64_t c = 0; c < kStride; ++c) {
            const int64_t n = r * kStride + c, other = r * kOtherStride + c;
            if (c >= columns) {
              EXPECT_EQ(scores[n], s[n]);
              EXPECT_EQ(gradients[other], g[other]);
              continue;
            }
            const double e = factor[r] * std::exp(static_cast<double>(s[n]) - shift[r]);
            const double slanted = (spans[r] - (distances[r] - static_cast<double>(c)) + 16) / 16;
            double p = e;
            if (has_ramp) p *= std::min(1.0, std::max(0.0, slanted));
            if (has_ramp && slanted > 0 && slanted < 1) {
              span_gradient += e * (g[other] - delta[r]) / 16;
            }
            if (is_masked && (masks[r] >> (16 + c) & 1) == 0) p = 0;
            const double gradient = p * (static_cast<double>(g[other]) - delta[r]);
            EXPECT_NEAR(scores[n], p, 1e-6 * p) << r << " " << c;
            EXPECT_NEAR(gradients[other], gradient,
                        1e-6 * p * (std::abs(g[other]) + std::abs(delta[r])));
          }
          EXPECT_NEAR(span[r], has_ramp ? span_gradient : 1, 2e-5) << r;
        }
      }
    }
  }
}

TEST_P(BackwardKernels, WhatHasNoWeightHasNoGradientWhateverItHolds) {
  std::vector<float> scores(3 * kStride, 0.5f), gradients(3 * kStride, 2.0f);
  scores[3] = -kInfinity;  // a hidden key
  gradients[3] = kNaN;
  scores[4] = -200;  // e underflows
  gradients[4] = kInfinity;
  scores[5] = gradients[5] = kNaN;  // behind the mask
  const uint64_t masks[3] = {~uint64_t{1 << 5}, ~uint64_t{0}, ~uint64_t{0}};
  const float shift[3] = {0.25f, -kInfinity, 0};  // row 1 sees no key
  const float factor[3] = {1, 1, 1}, delta[3] = {0, kNaN, 0};
  gradients[2 * kStride] = kNaN;  // counts
  kernels_->softmax_backward({scores.data(), kStride, 3, 16}, gradients.data(), kStride,
                             {shift, factor, delta, masks, 0, nullptr, nullptr});
  for (const int64_t c : {3, 4, 5}) {
    EXPECT_EQ(scores[c], 0) << c;
    EXPECT_EQ(gradients[c], 0) << c;
  }
  for (int64_t c = 0; c < 16; ++c) {
    EXPECT_EQ(scores[kStride + c], 0) << c;
    EXPECT_EQ(gradients[kStride + c], 0) << c;
  }
  EXPECT_TRUE(std::isnan(gradients[2 * kStride]));
}

TEST_P(BackwardKernels, DiagonalsAreSummedFromTheLastRowsFirstColumnOn) {
  for (const int64_t rows : {1, 2, 16, 17, 21}) {
    for (const int64_t columns : {16, 32, 96}) {
      const std::vector<float> scores = Normal("scores", kRows * kStride);
      std::vector<float> copy = scores, sums(rows + columns + 1, 1.0f);
      kernels_->add_diagonals({copy.data(), kStride, rows, columns}, sums.data());
      EXPECT_EQ(copy, scores);
      std::vector<double> expected(rows + columns + 1, 1.0);
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t c = 0; c < columns; ++c) {
          expected[rows - 1 + c - r] += scores[r * kStride + c];
        }
      }
      for (size_t n = 0; n < sums.size(); ++n) {
        EXPECT_NEAR(sums[n], expected[n], 1e-5) << rows << " x " << columns << ", " << n;
      }
      EXPECT_EQ(sums[rows + columns], 1);
    }
  }
}

TEST_P(BackwardKernels, RowsAreLoadedWithABiasAndAFactorAndKnownToBeFinite) {
  std::vector<float> from = Normal("from", kRows * kOtherStride);
  const std::vector<float> bias = Normal("bias", 48);
  for (const bool has_bias : {false, true}) {
    std::vector<float> to(kRows * kStride, 7.0f);
    const auto load = [&] {
      return kernels_->load_scaled({to.data(), kStride, kRows, 48}, {from.data(), kOtherStride},
                                   has_bias ? bias.data() : nullptr, 0.75f);
    };
    EXPECT_TRUE(load());
    EXPECT_TRUE(kernels_->all_finite({from.data(), kOtherStride}, kRows, 48));
    for (int64_t r = 0; r < kRows; ++r) {
      for (int64_t c = 0; c < kStride; ++c) {
        const float x = from[r * kOtherStride + c];
        const float expected = (has_bias && c < 48 ? x + bias[c] : x) * 0.75f;
        EXPECT_EQ(to[r * kStride + c], c < 48 ? expected : 7) << r << " " << c;
      }
    }
    for (const float value : {kInfinity, -kInfinity, kNaN}) {
      for (const int64_t n : {int64_t{0}, (kRows - 1) * kOtherStride + 47}) {
        const float before = std::exchange(from[n], value);
        EXPECT_FALSE(load()) << n;
        EXPECT_FALSE(kernels_->all_finite({from.data(), kOtherStride}, kRows, 48)) << n;
        from[n] = before;
      }
      // Behind the last column nothing is looked at.
      const float before = std::exchange(from[48], value);
      EXPECT_TRUE(load());
      EXPECT_TRUE(kernels_->all_finite({from.data(), kOtherStride}, kRows, 48));
      from[48] = before;
    }
  }
}

// Products of floats are exact in float64, whose sums are off by 64 of its roundings at most.
TEST_P(BackwardKernels, RowsAreMultipliedInFloat64WithoutColumnsThatAreZero) {
  std::vector<float> a = Normal("a", kRows * kStride), b = Normal("b", kRows * kOtherStride);
  a[3] = kNaN;
  b[3] = 0;
  std::vector<double> sums(kRows), generic(kRows);
  kernels_->row_dots({a.data(), kStride}, {b.data(), kOtherStride}, kRows, 48, sums.data());
  FindCpuKernels("generic")->row_dots({a.data(), kStride}, {b.data(), kOtherStride}, kRows, 48,
                                      generic.data());
  EXPECT_EQ(sums, generic);
  for (int64_t r = 0; r < kRows; ++r) {
    long double expected = 0;
    for (int64_t c = 0; c < 48; ++c) {
      const float factor = b[r * kOtherStride + c];
      if (factor != 0) expected += static_cast<long double>(a[r * kStride + c]) * factor;
    }
    EXPECT_NEAR(sums[r], static_cast<double>(expected), 1e-13) << r;
  }
}

TEST_P(BackwardKernels, ColumnsAreSummed) {
  std::vector<float> scores = Normal("scores", kRows * kStride), sums(64, 2.0f);
  kernels_->add_columns({scores.data(), kStride, kRows, 48}, sums.data());
  for (int64_t c = 0; c < 64; ++c) {
    double expected = 2;
    for (int64_t r = 0; c < 48 && r < kRows; ++r) expected += scores[r * kStride + c];
    EXPECT_NEAR(sums[c], expected, 1e-5) << c;
  }
}

TEST_P(BackwardKernels, RowsAreSummedByLabel) {
  std::vector<float> scores = Normal("scores", kRows * kStride);
  std::vector<int32_t> row_ids(kRows), column_ids(kStride);
  for (int64_t r = 0; r < kRows; ++r) row_ids[r] = static_cast<int32_t>(r % 4) - 1;
  for (int64_t c = 0; c < kStride; ++c) column_ids[c] = static_cast<int32_t>(c % 3) - 1;
  float sums[kRows][2];
  for (auto& of_row : sums) of_row[0] = of_row[1] = 3;
  kernels_->add_sums_by_label({scores.data(), kStride, kRows, 32}, row_ids.data(),
                              column_ids.data() + 1, sums);
  for (int64_t r = 0; r < kRows; ++r) {
    double expected[2] = {3, 3};
    for (int64_t c = 0; c < 32; ++c) {
      expected[row_ids[r] == column_ids[c + 1]] += scores[r * kStride + c];
    }
    for (const int label : {0, 1}) EXPECT_NEAR(sums[r][label], expected[label], 1e-5) << r;
  }
}

TEST_P(BackwardKernels, AReluPassesWhatIsAboveZero) {
  const std::vector<float> table = Normal("table", kStride + kRows);
  for (const int64_t table_row : {-1, 0}) {
    std::vector<float> gradients = Normal("gradients", kRows * kStride),
                       products = Normal("products", kRows * kOtherStride);
    gradients[0] = 0;  // a hidden pair
    products[0] = kNaN;
    products[1] = 0;
    const std::vector<float> g = gradients, s = products;
    const float* first = table.data() + kRows;
    kernels_->relu_multiply_backward({gradients.data(), kStride, kRows, 48}, products.data(),
                                     kOtherStride, first, table_row);
    for (int64_t r = 0; r < kRows; ++r) {
      for (int64_t c = 0; c < kStride; ++c) {
        const int64_t n = r * kStride + c, other = r * kOtherStride + c;
        if (c >= 48) {
          EXPECT_EQ(gradients[n], g[n]);
          EXPECT_EQ(products[other], s[other]);
          continue;
        }
        const bool passes = s[other] > 0;
        EXPECT_EQ(gradients[n], passes ? g[n] * first[r * table_row + c] : 0) << r << " " << c;
        EXPECT_EQ(products[other], passes ? g[n] * s[other] : 0) << r << " " << c;
      }
    }
  }
}

}  // namespace
}  // namespace tfb
