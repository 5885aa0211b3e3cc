// Tests the kernels of engine search in every instruction set that this machine runs.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "core/cpu/kernels.h"
#include "core/random.h"
#include "core/tensor.h"
#include "gtest/gtest.h"

namespace tfb {
namespace {

constexpr int64_t kRows = 7, kColumns[] = {1, 3, 15, 16, 17, 64, 83}, kStride = 90;

class SearchKernels : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    kernels_ = FindCpuKernels(GetParam());
    if (kernels_ == nullptr) GTEST_SKIP() << "this machine does not run " << GetParam();
    FillNormal(&a_, 1, "a");
    FillNormal(&x_, 1, "x");
  }
  const float* a() const { return a_.span<float>().data(); }
  const float* x() const { return x_.span<float>().data(); }

  const CpuKernels* kernels_ = nullptr;
  Tensor a_{DType::kF32, {kRows, kStride}};
  Tensor x_{DType::kF32, {kStride}};
};
INSTANTIATE_TEST_SUITE_P(In, SearchKernels, testing::Values("generic", "avx2", "avx512"),
                         [](const auto& name) { return std::string(name.param); });

TEST_P(SearchKernels, ScoresReachTheirColumnsBound) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const int64_t columns : {16, 48, 80}) {
    std::vector<float> offset(kRows, 0.25f), bound(columns, -0.5f);
    offset[2] = kInfinity;
    bound[1] = kInfinity;
    bound[5] = std::numeric_limits<float>::lowest();
    std::vector<float> scores(a(), a() + kRows * kStride);
    scores[3 * kStride + 5] = std::numeric_limits<float>::quiet_NaN();
    scores[4 * kStride + 7] = -0.25f;  // just so
    std::vector<int32_t> expected, places(kRows * columns);
    for (int64_t r = 0; r < kRows; ++r) {
      for (int64_t c = 0; c < columns; ++c) {
        const auto place = static_cast<int32_t>(r * kStride + c);
        if (scores[place] - offset[r] >= bound[c]) expected.push_back(place);
      }
    }
    places.resize(kernels_->reaching({scores.data(), kStride, kRows, columns}, offset.data(),
                                     bound.data(), places.data()));
    EXPECT_EQ(places, expected);
  }
}

TEST_P(SearchKernels, TheLargestOfEachGroupOfRows) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const int64_t columns : {16, 48, 80}) {
    for (const int64_t group : {1, 3, 7, 9}) {
      std::vector<float> offset(kRows, 0.25f), scores(a(), a() + kRows * kStride);
      offset[2] = kInfinity;
      scores[3 * kStride + 5] = std::numeric_limits<float>::quiet_NaN();
      const int64_t groups = (kRows + group - 1) / group;
      std::vector<float> maxima(groups * kStride);
      kernels_->group_maxima({scores.data(), kStride, kRows, columns}, offset.data(), group,
                             maxima.data());
      for (int64_t n = 0; n < groups; ++n) {
        for (int64_t c = 0; c < columns; ++c) {
          float largest = -kInfinity;
          for (int64_t r = n * group; r < std::min(kRows, (n + 1) * group); ++r) {
            largest = std::fmax(largest, scores[r * kStride + c] - offset[r]);
          }
          EXPECT_EQ(maxima[n * kStride + c], largest);
        }
      }
    }
  }
}

TEST_P(SearchKernels, TheBestOfFourRowsAndWhatIsLeft) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const int64_t columns : {16, 48, 80}) {
    std::vector<float> offset(kRows, 0.25f), scores(a(), a() + kRows * kStride);
    offset[6] = kInfinity;  // the infinite offset hides rows 4 to 6
    scores[1 * kStride + 5] = std::numeric_limits<float>::quiet_NaN();
    std::vector<float> best(2 * kStride), second(columns);
    kernels_->best_of_four({scores.data(), kStride, kRows, columns}, offset.data(), best.data(),
                           second.data());
    for (int64_t c = 0; c < columns; ++c) {
      float left = -kInfinity;
      for (int64_t n = 0; n < 2; ++n) {
        int64_t first = -1;
        for (int64_t r = 4 * n; r < std::min<int64_t>(4 * n + 4, kRows); ++r) {
          const float score = scores[r * kStride + c] - offset[r];
          if (std::isfinite(score) && (first < 0 || score > scores[first * kStride + c] - 0.25f)) {
            first = r;
          }
        }
        for (int64_t r = 4 * n; r < std::min<int64_t>(4 * n + 4, kRows); ++r) {
          if (r != first) left = std::fmax(left, scores[r * kStride + c] - offset[r]);
        }
        uint32_t bits;
        std::memcpy(&bits, &best[n * kStride + c], sizeof(bits));
        EXPECT_EQ(bits % 4, first - 4 * n);
        EXPECT_NEAR(best[n * kStride + c], scores[first * kStride + c] - 0.25f, 4 * 0x1p-20);
      }
      EXPECT_NEAR(second[c], left, 4 * 0x1p-20);
    }
  }
}

TEST_P(SearchKernels, BoundsThatSomeOfAColumnReachAndFewMore) {
  constexpr int64_t kMany = 500;
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  Tensor tensor(DType::kF32, {kMany, 48});
  FillNormal(&tensor, 1, "scores");
  float* scores = tensor.span<float>().data();
  for (int64_t r = 0; r < kMany; ++r) {
    scores[r * 48 + 1] = -kInfinity;
    scores[r * 48 + 2] = r < 20 ? 1.0f * r : -kInfinity;
    scores[r * 48 + 3] = 7;
    scores[r * 48 + 4] = r == 9 ? 3e38f : r == 10 ? -3e38f : scores[r * 48 + 4];
    scores[r * 48 + 5] = r % 2 == 0 ? std::numeric_limits<float>::quiet_NaN() : scores[r * 48 + 5];
  }
  for (const int64_t wanted : {1, 20, 21, 100, 500}) {
    float bound[48];
    kernels_->column_bounds({scores, 48, kMany, 48}, wanted, bound);
    for (int64_t c = 0; c < 48; ++c) {
      int64_t reach = 0, finite = 0;
      for (int64_t r = 0; r < kMany; ++r) {
        reach += scores[r * 48 + c] >= bound[c];
        finite += std::isfinite(scores[r * 48 + c]);
      }
      if (bound[c] > -kInfinity) {
        EXPECT_GE(reach, wanted) << c;
      }
      if (finite < wanted) {
        EXPECT_EQ(bound[c], -kInfinity) << c;
      }
      // An interval of 2^-14 of a range of 8 holds one or two of 500 normal numbers.
      if (c > 5 && wanted < kMany) {
        EXPECT_LE(reach, wanted + 3) << c;
      }
    }
  }
}

TEST_P(SearchKernels, DotsAndSquaresOfRows) {
  for (const int64_t columns : kColumns) {
    float dots[kRows], squares[kRows];
    const int32_t index[kRows] = {6, 0, 6, 3, 2, 1, 5};
    kernels_->dots({a(), kStride, columns % 2 == 0 ? index : nullptr, kRows, columns}, x(), dots,
                   squares);
    for (int64_t n = 0; n < kRows; ++n) {
      const int64_t r = columns % 2 == 0 ? index[n] : n;
      double dot = 0, square = 0;
      for (int64_t c = 0; c < columns; ++c) {
        dot += double{a()[r * kStride + c]} * x()[c];
        square += double{a()[r * kStride + c]} * a()[r * kStride + c];
      }
      // The error is at most columns u |x||y|, and both norms are below 20.
      EXPECT_NEAR(dots[n], dot, columns * 0x1p-24 * 400);
      EXPECT_NEAR(squares[n], square, columns * 0x1p-24 * 400);
    }
    float alone[kRows];
    kernels_->dots({a(), kStride, columns % 2 == 0 ? index : nullptr, kRows, columns}, x(), alone,
                   /*squares=*/nullptr);
    EXPECT_TRUE(std::equal(alone, alone + kRows, dots));
  }
}

// Adds the terms to the sixteen sums of kernels.h, one by one.
double SumBySixteen(const std::vector<double>& terms) {
  double sums[16] = {};
  for (size_t c = 0; c < terms.size(); ++c) sums[c % 16] += terms[c];
  for (int width = 8; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) sums[i] += sums[i + width];
  }
  return sums[0];
}

TEST_P(SearchKernels, ExactScoresAreTheSameBitForBit) {
  const int32_t index[] = {6, 0, 6, 3};
  for (const int64_t columns : kColumns) {
    for (const bool distance : {false, true}) {
      for (const bool indexed : {false, true}) {
        const int64_t count = indexed ? 4 : kRows;
        double scores[kRows];
        kernels_->exact_scores(distance, {a(), kStride, indexed ? index : nullptr, count, columns},
                               x(), scores);
        for (int64_t n = 0; n < count; ++n) {
          const float* row = a() + (indexed ? index[n] : n) * kStride;
          std::vector<double> terms;
          for (int64_t c = 0; c < columns; ++c) {
            const double difference = x()[c] - row[c], value = row[c];
            terms.push_back(distance ? difference * difference : x()[c] * value);
          }
          EXPECT_EQ(scores[n], SumBySixteen(terms)) << columns << " " << n;
        }
      }
    }
  }
}

}  // namespace
}  // namespace tfb
