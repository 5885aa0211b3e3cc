// Tests the kernels of engine linear, in every instruction set that this machine runs, against
// loops in double.
#include <algorithm>
#include <cmath>
#include <vector>

#include "core/cpu/kernels.h"
#include "core/random.h"
#include "gtest/gtest.h"

namespace tfb {
namespace {

std::vector<float> Normal(int64_t count, const char* name, double deviation = 1) {
  const RandomStream stream(1, name);
  std::vector<float> values(count);
  for (int64_t n = 0; n < count; ++n) values[n] = static_cast<float>(deviation * stream.Normal(n));
  return values;
}

class FeatureKernels : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    kernels_ = FindCpuKernels(GetParam());
    if (kernels_ == nullptr) GTEST_SKIP() << "this machine does not run " << GetParam();
  }
  const CpuKernels* kernels_ = nullptr;
};

TEST_P(FeatureKernels, FeaturesMaximaAndSumsAreThoseOfEachColumn) {
  constexpr int64_t kStride = 80;
  for (const Feature feature : {Feature::kExp, Feature::kExpPair, Feature::kRelu}) {
    for (const int64_t projections : {1, 7, 40}) {
      for (const int64_t columns : {16, 48, 64}) {
        const int64_t features = feature == Feature::kExpPair ? 2 * projections : projections;
        const std::vector<float> p = Normal(features * kStride, "p", 3),
                                 weights = Normal(features, "weights");
        std::vector<float> values = p, max(columns), sum(columns), dot(columns);
        kernels_->features(feature, {values.data(), kStride, projections, columns},
                           {max.data(), sum.data(), weights.data(), dot.data()});
        for (int64_t c = 0; c < columns; ++c) {
          double largest = feature == Feature::kRelu ? 0 : -INFINITY;
          for (int64_t r = 0; feature != Feature::kRelu && r < projections; ++r) {
            const double value = p[r * kStride + c];
            largest = std::max(largest, feature == Feature::kExpPair ? std::abs(value) : value);
          }
          EXPECT_EQ(max[c], static_cast<float>(largest));
          double expected_sum = 0, expected_dot = 0, size = 0;
          for (int64_t r = 0; r < features; ++r) {
            const double projection =
                r < projections ? p[r * kStride + c] : -p[(r - projections) * kStride + c];
            const double expected = feature == Feature::kRelu ? std::max(projection, 0.0)
                                                              : std::exp(projection - largest);
            EXPECT_NEAR(values[r * kStride + c], expected, 4e-7 * std::max(1.0, expected));
            expected_sum += expected;
            expected_dot += expected * weights[r];
            size += expected * std::abs(weights[r]);
          }
          // Each of up to 80 additions rounds once.
          EXPECT_NEAR(sum[c], expected_sum, 80 * 6e-8 * expected_sum + 1e-6);
          EXPECT_NEAR(dot[c], expected_dot, 80 * 6e-8 * size + 1e-6);
        }
        EXPECT_EQ(values[columns], p[columns]);  // the next column is not touched
      }
    }
  }
}

TEST_P(FeatureKernels, SinesAndCosinesOfNumbersOfAnySize) {
  std::vector<float> x = {0, -0.0f, 1e-40f, 8192, -8192, 8193, 1e6f, -3e9f, 1e20f, 3.4e38f};
  for (int n = 1; n < 5200; ++n) {  // around the multiples of pi / 4, where quadrants change
    const float edge = static_cast<float>(n * M_PI / 4);
    for (const float value : {edge, std::nextafter(edge, 0.0f), -edge}) x.push_back(value);
  }
  const RandomStream stream(1, "x");
  for (int n = 0; n < 100000; ++n) {
    x.push_back(static_cast<float>(std::exp(9 * stream.Uniform(2 * n)) * stream.Normal(2 * n + 1)));
  }
  const int64_t count = static_cast<int64_t>(x.size());
  std::vector<float> sine(count), cosine(count);
  kernels_->sin_cos(count, x.data(), sine.data(), cosine.data());
  for (int64_t n = 0; n < count; ++n) {
    ASSERT_NEAR(sine[n], std::sin(double{x[n]}), std::ldexp(1, -23)) << x[n];
    ASSERT_NEAR(cosine[n], std::cos(double{x[n]}), std::ldexp(1, -23)) << x[n];
  }
  const std::vector<float> values = x;
  kernels_->sin_cos(count, x.data(), x.data(), cosine.data());  // in place
  EXPECT_EQ(x, sine);
  // The tokens resemble features of 16 tokens at a time, of which one is large.
  for (const int64_t first : {0, 16, 3200}) {
    std::vector<float> features(values.begin() + first, values.begin() + first + 16), sum(16);
    features.resize(32);
    kernels_->features(Feature::kSinCos, {features.data(), 16, 1, 16},
                       {sum.data(), sum.data(), nullptr, nullptr});
    for (int64_t n = 0; n < 16; ++n) {
      EXPECT_NEAR(features[n], std::sin(double{values[first + n]}), std::ldexp(1, -23));
      EXPECT_NEAR(features[16 + n], std::cos(double{values[first + n]}), std::ldexp(1, -23));
    }
  }
  for (float nothing : {NAN, INFINITY, -INFINITY}) {
    kernels_->sin_cos(1, &nothing, &nothing, cosine.data());
    EXPECT_TRUE(std::isnan(nothing));
    EXPECT_TRUE(std::isnan(cosine[0]));
  }
}

TEST_P(FeatureKernels, ANaNProjectionMakesItsTokensFeatureNaN) {
  for (const Feature feature : {Feature::kExp, Feature::kExpPair, Feature::kRelu}) {
    std::vector<float> values = Normal(8 * 16, "p"), max(16), sum(16);
    values[2 * 16 + 5] = NAN;
    kernels_->features(feature, {values.data(), 16, 4, 16},
                       {max.data(), sum.data(), nullptr, nullptr});
    EXPECT_TRUE(std::isnan(values[2 * 16 + 5]));
    EXPECT_TRUE(std::isnan(sum[5]));
    EXPECT_FALSE(std::isnan(sum[6]));
  }
}

TEST_P(FeatureKernels, GradientsOfProjectionsAreThoseOfEachColumn) {
  constexpr int64_t kStride = 80, kProjections = 7;
  for (const Feature feature :
       {Feature::kExp, Feature::kExpPair, Feature::kRelu, Feature::kSinCos}) {
    for (const int64_t columns : {16, 48, 64}) {
      const bool pair = feature == Feature::kExpPair || feature == Feature::kSinCos;
      const int64_t features = pair ? 2 * kProjections : kProjections;
      std::vector<float> f = Normal(features * kStride, "f");
      if (feature == Feature::kRelu) {
        for (float& x : f) x = std::max(x, 0.0f);
      }
      const std::vector<float> d = Normal(features * kStride, "d"),
                               weights = Normal(features, "weights"),
                               factor = Normal(columns, "factor"),
                               offset = Normal(columns, "offset"), scale = Normal(columns, "scale");
      std::vector<float> values = f, sum(columns), product(columns);
      kernels_->feature_gradients(feature, {values.data(), kStride, kProjections, columns},
                                  {d.data(), weights.data(), factor.data(), offset.data(),
                                   scale.data(), sum.data(), product.data()});
      for (int64_t c = 0; c < columns; ++c) {
        double expected_sum = 0, expected_product = 0;
        const auto gradient = [&](int64_t r) {
          return double{d[r * kStride + c]} + double{weights[r]} * factor[c] + offset[c];
        };
        for (int64_t r = 0; r < features; ++r) {
          expected_sum += gradient(r);
          expected_product += scale[c] * f[r * kStride + c] * gradient(r);
        }
        // Numbers are at most 4.5 or so, gradients sums of three, of which the second is a product,
        // each with a few roundings of 2^-24.
        const double largest = 4.5 + 4.5 * 4.5 + 4.5, rounding = std::ldexp(1, -24) * 8;
        EXPECT_NEAR(sum[c], expected_sum, features * largest * rounding);
        EXPECT_NEAR(product[c], expected_product, features * 20 * largest * rounding);
        for (int64_t r = 0; r < kProjections; ++r) {
          const double own = f[r * kStride + c],
                       other = pair ? f[(kProjections + r) * kStride + c] : 0,
                       of_other = pair ? gradient(kProjections + r) : 0;
          const double expected =
              scale[c] * (feature == Feature::kExp       ? own * gradient(r)
                          : feature == Feature::kExpPair ? own * gradient(r) - other * of_other
                          : feature == Feature::kRelu    ? (own > 0 ? gradient(r) : 0)
                                                         : gradient(r) * other - of_other * own);
          EXPECT_NEAR(values[r * kStride + c], expected, 40 * largest * rounding);
        }
      }
      EXPECT_EQ(values[columns], f[columns]);  // the next column is not touched
    }
  }
}

TEST_P(FeatureKernels, PairWeightsAreThoseOfTheFormulaAndZeroWhereHidden) {
  constexpr int64_t kRows = 5, kColumns = 48, kStride = 64;
  const std::vector<float> scores = Normal(kRows * kStride, "scores"),
                           decay = Normal(kColumns, "decay"), total = Normal(kColumns, "total"),
                           seen = Normal(kColumns, "seen"), shift = Normal(kRows, "shift"),
                           product = Normal(kRows, "product"), key = Normal(kRows, "key"),
                           constant = Normal(kRows, "constant");
  const std::vector<int32_t> visible = {0, 1, 16, 37, 48};
  std::vector<float> weights = scores, sum(kRows);
  weights[1 * kStride + 1] = weights[3 * kStride + 40] = NAN;  // hidden
  kernels_->pair_weights({weights.data(), kStride, kRows, kColumns},
                         {decay.data(), total.data(), seen.data(), shift.data(), product.data(),
                          key.data(), constant.data(), visible.data(), sum.data()});
  for (int64_t r = 0; r < kRows; ++r) {
    double expected_sum = 0;
    for (int64_t c = 0; c < kColumns; ++c) {
      const double term = product[r] * scores[r * kStride + c] + key[r] * total[c];
      const double expected =
          c < visible[r] ? std::exp(double{decay[c]} - shift[r]) * term + constant[r] * seen[c] : 0;
      EXPECT_NEAR(weights[r * kStride + c], expected, 1e-6 * (1 + std::abs(expected)) * 4);
      expected_sum += expected;
    }
    EXPECT_NEAR(sum[r], expected_sum, 1e-4);
  }
}

TEST_P(FeatureKernels, MatrixTimesVectorOfAnySize) {
  for (const int64_t rows : {1, 3, 4, 9}) {
    for (const int64_t columns : {1, 7, 16, 40, 65}) {
      for (const bool accumulate : {false, true}) {
        const int64_t stride = columns + 3;
        const std::vector<float> a = Normal(rows * stride, "a"), x = Normal(columns, "x"),
                                 y = Normal(2 * rows, "y");
        std::vector<float> result = y;
        kernels_->matrix_vector(rows, columns, a.data(), stride, x.data(), result.data(), 2,
                                accumulate);
        for (int64_t r = 0; r < rows; ++r) {
          double expected = accumulate ? y[2 * r] : 0;
          for (int64_t c = 0; c < columns; ++c) expected += double{a[r * stride + c]} * x[c];
          EXPECT_NEAR(result[2 * r], expected, 2e-6 * (1 + static_cast<double>(columns)));
          EXPECT_EQ(result[2 * r + 1], y[2 * r + 1]);
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(InstructionSets, FeatureKernels,
                         testing::Values("generic", "avx2", "avx512"));

}  // namespace
}  // namespace tfb
