// Tests the products and transposes of every instruction set that this machine runs against loops
// in double.
#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "core/cpu/kernels.h"
#include "core/random.h"
#include "gtest/gtest.h"

namespace tfb {
namespace {

constexpr int64_t kWide = 64;  // columns of gemm_triangle and transpose64
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

std::vector<float> Normal(int64_t count, const char* name) {
  const RandomStream stream(1, name);
  std::vector<float> values(count);
  for (int64_t n = 0; n < count; ++n) values[n] = static_cast<float>(stream.Normal(n));
  return values;
}

class ProductKernels : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    kernels_ = FindCpuKernels(GetParam());
    if (kernels_ == nullptr) GTEST_SKIP() << "this machine does not run " << GetParam();
  }
  // Expects c to be sum_k a_k b_k + d, for values(k) = (a_k, b_k). Each addition rounds once.
  template <class Values>
  static void ExpectSum(float c, float d, int64_t depth, Values values) {
    double sum = d, size = std::abs(d);
    for (int64_t k = 0; k < depth; ++k) {
      const auto [a, b] = values(k);
      sum += static_cast<double>(a) * b;
      size += std::abs(static_cast<double>(a) * b);
    }
    ASSERT_NEAR(c, sum, static_cast<double>(depth + 1) * 6e-8 * size);
  }
  const CpuKernels* kernels_ = nullptr;
};

TEST_P(ProductKernels, ProductsOfAllNumbersOfRowsAndColumns) {
  constexpr int64_t kDepth = 19, kRows = 21, kColumns = 144;
  const std::vector<float> a = Normal(kRows * kDepth, "a"), b = Normal(kDepth * kColumns, "b"),
                           d = Normal(kRows + kColumns, "d"),
                           before = Normal(kRows * kColumns, "c");
  for (const bool transposed : {false, true}) {
    const int64_t a_row = transposed ? 1 : kDepth, a_depth = transposed ? kRows : 1;
    for (int64_t rows = 1; rows <= kRows; ++rows) {
      for (int64_t columns = 16; columns <= kColumns; columns += 16) {
        const auto values = [&](int64_t r, int64_t c) {
          return [&, r, c](int64_t k) {
            return std::pair(a[r * a_row + k * a_depth], b[k * kColumns + c]);
          };
        };
        const auto expect = [&](const std::vector<float>& found, auto term) {
          for (int64_t r = 0; r < kRows; ++r) {
            for (int64_t c = 0; c < kColumns; ++c) {
              const float value = found[r * kColumns + c];
              if (r < rows && c < columns) {
                ExpectSum(value, term(r, c), kDepth, values(r, c));
              } else {
                ASSERT_EQ(value, before[r * kColumns + c]);
              }
            }
          }
        };
        std::vector<float> c = before;
        kernels_->gemm(rows, columns, kDepth, a.data(), a_row, a_depth, b.data(), kColumns,
                       c.data(), kColumns, false);
        expect(c, [](int64_t, int64_t) { return 0.0f; });
        c = before;
        kernels_->gemm(rows, columns, kDepth, a.data(), a_row, a_depth, b.data(), kColumns,
                       c.data(), kColumns, true);
        expect(c, [&](int64_t r, int64_t n) { return before[r * kColumns + n]; });
        c = before;
        kernels_->gemm_plus(rows, columns, kDepth, a.data(), a_row, a_depth, b.data(), kColumns,
                            d.data() + kRows, -1, c.data(), kColumns, nullptr);
        expect(c, [&](int64_t r, int64_t n) { return d[kRows + n - r]; });
      }
    }
  }
}

TEST_P(ProductKernels, BlocksOfProductsAskForEightLinesEach) {
  constexpr int64_t kDepth = 5, kRows = 3, kColumns = 48;
  const std::vector<float> a = Normal(kRows * kDepth, "a"), b = Normal(kDepth * kColumns, "b");
  const std::vector<char> memory(2000);
  std::vector<float> c(kRows * kColumns), with_ahead(kRows * kColumns);
  // Three rows of 2 lines, then one of 16.
  Ahead ahead = {{{memory.data(), 256, 128, 3}, {memory.data() + 1000, 0, 1000, 1}}, 2, 0, 0, 0};
  const auto multiply = [&](int64_t columns, float* to, Ahead* rows) {
    kernels_->gemm_plus(1, columns, kDepth, a.data(), kDepth, 1, b.data(), kColumns, nullptr, 0, to,
                        kColumns, rows);
  };
  // Generic vectors have blocks of 8 columns, and avx2's of 16.
  const int blocks_of_16 = kernels_->lanes == 4 ? 2 : 1;
  for (int asked = 0; asked < 32;) {
    multiply(16, with_ahead.data(), &ahead);
    asked += 8 * blocks_of_16;
    const int lines = std::min(asked, 22);
    EXPECT_EQ(ahead.tensor, lines < 6 ? 0 : lines < 22 ? 1 : 2);
    EXPECT_EQ(ahead.row, lines < 6 ? lines / 2 : 0);
    EXPECT_EQ(ahead.byte, 64 * (lines < 6 ? lines % 2 : lines < 22 ? lines - 6 : 0));
  }
  multiply(16, c.data(), nullptr);
  EXPECT_EQ(c, with_ahead);
}

TEST_P(ProductKernels, ProductsWithTrianglesReadNoVectorOfZeros) {
  constexpr int64_t kRows = 13;
  const std::vector<float> a = Normal(kRows * kWide, "a"), before = Normal(kRows * kWide, "c");
  for (const bool above : {false, true}) {
    for (const int64_t depth : {0, 1, 17, 63, 64}) {
      for (const int64_t place : {-70, -33, -16, -1, 0, 1, 15, 16, 17, 47, 64, 90}) {
        const auto is_zero = [&](int64_t k, int64_t c) {
          return above ? c > k + place : c < k - place;
        };
        std::vector<float> b = Normal(kWide * kWide, "b");
        for (int64_t k = 0; k < kWide; ++k) {
          for (int64_t c = 0; c < kWide; ++c) {
            const int64_t first = c / kColumnQuantum * kColumnQuantum;
            const bool unread =
                k >= depth || is_zero(k, above ? first : first + kColumnQuantum - 1);
            if (is_zero(k, c)) b[k * kWide + c] = 0;
            if (unread) b[k * kWide + c] = kNaN;
          }
        }
        for (const int64_t rows : {int64_t{1}, int64_t{4}, int64_t{9}, kRows}) {
          std::vector<float> c = before;
          kernels_->gemm_triangle(rows, depth, a.data(), kWide, 1, b.data(), {above, place},
                                  c.data());
          for (int64_t r = 0; r < kRows; ++r) {
            for (int64_t n = 0; n < kWide; ++n) {
              ExpectSum(
                  c[r * kWide + n], before[r * kWide + n], r < rows ? depth : 0, [&](int64_t k) {
                    return std::pair(a[r * kWide + k], is_zero(k, n) ? 0.0f : b[k * kWide + n]);
                  });
            }
          }
        }
      }
    }
  }
}

TEST_P(ProductKernels, TransposesOfSixtyFourRows) {
  constexpr int64_t kStride = 100;
  const std::vector<float> from = Normal(kWide * kStride, "from");
  for (int64_t columns = 4; columns <= kStride; columns += 4) {
    std::vector<float> to((kStride + 1) * kWide, 7.0f);
    kernels_->transpose64(from.data(), kStride, columns, to.data());
    for (int64_t c = 0; c <= kStride; ++c) {
      for (int64_t r = 0; r < kWide; ++r) {
        ASSERT_EQ(to[c * kWide + r], c < columns ? from[r * kStride + c] : 7.0f) << columns;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(InstructionSets, ProductKernels,
                         testing::Values("generic", "avx2", "avx512"));

}  // namespace
}  // namespace tfb
